"""Reproducible sampling: noise is a hash of (seed, position, token id), never of a generator's state.

So what a row draws cannot depend on its neighbours, its row number or the size of the batch. The
hash is part of what "reproducible from the seed" means: changing it changes every sampled token
(tests hold golden values).
"""

import torch
from torch import Tensor

_GOLDEN64 = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX64_A = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX64_B = 0x94D049BB133111EB - (1 << 64)
"""splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit constants."""
_GOLDEN32 = 0x9E3779B9 - (1 << 32)
_MIX32_A = 0x85EBCA6B - (1 << 32)
_MIX32_B = 0xC2B2AE35 - (1 << 32)
"""MurmurHash3's 32-bit finaliser, as signed 32-bit constants."""
_LARGEST = 1.0 - 2.0**-24


def sample(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one token a row from softmax(logits / temperature).

    `logits` [B, V]; `temperature` [B] fp32, > 0; `seeds` [B] int64; `positions` [B] int64, the index
    in its sequence of the token to draw. Returns token ids [B] int64 and their log-probabilities
    under that softmax [B] fp32. The Gumbel-max trick: argmax(log p + Gumbel noise) is distributed
    as p (Gumbel 1954; Maddison et al. 2014).
    """
    scaled = logits.float() / temperature[:, None]
    tokens = (scaled + gumbel(seeds, positions, logits.shape[-1])).argmax(-1)
    logprobs = torch.log_softmax(scaled, -1).gather(1, tokens[:, None])[:, 0]
    return tokens, logprobs


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise [B, vocabulary] fp32 of `seeds` [B] and `positions` [B].

    -log(-log1p(-u)): u is most precise near 0, which is where the large noise that wins comes from.
    """
    return -torch.log(-torch.log1p(-uniform(seeds, positions, vocabulary)))


def uniform(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Uniform fp32 values in (0, 1) [B, vocabulary], from 32 hashed bits each."""
    unsigned = hash_bits(seeds, positions, vocabulary).float()
    unsigned += 2.0**31  # the signed value moved to 0 .. 2**32
    return unsigned.add_(0.5).mul_(2.0**-32).clamp_max_(_LARGEST)


def hash_bits(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """The hash [B, vocabulary] int32 of (seed, position, token id); all 32 bits are used.

    A 64-bit key a row, of which one half is mixed in before and one between two 32-bit finalisers:
    32-bit arithmetic halves the memory traffic, which is what this costs.
    """
    keys = _mix64(_mix64(seeds) + positions)
    low = _as_int32(keys)[:, None]
    high = _as_int32(keys >> 32)[:, None]
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=seeds.device)
    return _mix32_(_mix32_(tokens * _GOLDEN32 + low).bitwise_xor_(high))


def _mix64(value: Tensor) -> Tensor:
    value = value + _GOLDEN64
    value = (value ^ _shift64(value, 30)) * _MIX64_A
    value = (value ^ _shift64(value, 27)) * _MIX64_B
    return value ^ _shift64(value, 31)


def _shift64(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts the sign in


def _mix32_(value: Tensor) -> Tensor:
    """In place."""
    value.bitwise_xor_((value >> 16) & 0xFFFF).mul_(_MIX32_A)
    value.bitwise_xor_((value >> 13) & 0x7FFFF).mul_(_MIX32_B)
    return value.bitwise_xor_((value >> 16) & 0xFFFF)


def _as_int32(value: Tensor) -> Tensor:
    """The low 32 bits, as a signed number."""
    return (((value & 0xFFFFFFFF) ^ (1 << 31)) - (1 << 31)).to(torch.int32)
