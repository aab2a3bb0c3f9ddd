"""Reproducible noise: a hash of (seed, position, token id), not of a generator's state.

Its bits are the same on every CPU and GPU, here and in kernels.py: integer operations, then separate fp32
operations that IEEE 754 rounds exactly, without logarithms, fused multiply-adds or reordering. Any change here
changes every sampled token (tests hold golden values).
"""

import torch
from torch import Tensor

GOLDEN64 = 0x9E3779B97F4A7C15
MIX64_A = 0xBF58476D1CE4E5B9
MIX64_B = 0x94D049BB133111EB
"""Constants of splitmix64 (Steele, Lea, Flood 2014)."""
GOLDEN32 = 0x9E3779B9
MIX32_A = 0x85EBCA6B
MIX32_B = 0xC2B2AE35
"""Constants of MurmurHash3's 32-bit finaliser."""

LN2 = 0.6931471824645996
HALF_LOG = (
    0.013224685564637184,
    -0.009721682406961918,
    0.025210173800587654,
    0.03920888900756836,
    0.12522386014461517,
    0.49999675154685974,
)
"""Coefficients of -log(1 - w / 2) / w on [0, 1], highest power first.

Minimax, relative error 6.5e-6.
"""
SLOPE = -8.262958317573066e-08
"""-ln(2) / 2**23: maps the bits of a float to its negated logarithm, apart from CURVE."""
CURVE = (
    0.01780770532786846,
    -0.19071859121322632,
    0.878160834312439,
    -2.278048038482666,
    3.702784776687622,
    -3.5440359115600586,
    1.414048194885254,
)
"""Coefficients of ln(2) (m - 1) - log(m) on [1, 2], highest power first.

Minimax, absolute error 1.3e-6.
"""
EXPONENT_OF_ONE = 0x3F800000
MANTISSA = 0x7FFFFF

CHUNK = {"cpu": 2**16, "cuda": 2**26}
"""Values processed at once in eager mode.

A cache, or the memory beside the weights, holds ten times as many.
"""


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Return standard Gumbel noise [B, vocabulary] fp32 of `seeds` [B], `positions` [B] int64.

    For each of the 2**32 hashes it is within 1.2e-5 of -log(-log(v)), where a hash h < 2**31 means 1 - v = (h +
    0.5) / 2**32 and a hash 2**31 + h means v = (h + 0.5) / 2**32.
    """
    low, high = _keys(seeds, positions)
    width = max(1, chunk(seeds.device) // max(1, len(seeds)))
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=seeds.device)
    parts = [_gumbel_of_(_hash(low[:, None], high[:, None], ids)) for ids in tokens.split(width)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def gumbel_at(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Return the noise [N] fp32 of single tokens [N], bitwise equal to that of gumbel()."""
    low, high = _keys(seeds, positions)
    return _gumbel_of_(_hash(low, high, tokens.to(torch.int32)))


def chunk(device: torch.device) -> int:
    """Return how many values to process at once on `device`."""
    return CHUNK.get(device.type, CHUNK["cuda"])


def _int(value: int) -> Tensor:
    return torch.tensor(value - (value >> 31 << 32), dtype=torch.int32, device="cpu")


def _float(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


# Constants that are tensors of the right type save torch a conversion at every use.
_GOLDEN32, _MIX32_A, _MIX32_B = _int(GOLDEN32), _int(MIX32_A), _int(MIX32_B)
_BITS16, _BITS19, _BITS31 = _int(0xFFFF), _int(0x7FFFF), _int(0x7FFFFFFF)
_EXPONENT_OF_ONE, _MANTISSA, _MANTISSA_BITS = _int(EXPONENT_OF_ONE), _int(MANTISSA), _int(23)
_13, _16, _31, _158 = _int(13), _int(16), _int(31), _int(158)
_HALF, _TWO, _SMALL, _LN2, _SLOPE = map(_float, (0.5, 2.0, 2.0**-31, -LN2, SLOPE))
_HALF_LOG, _CURVE = [_float(bits) for bits in HALF_LOG], [_float(bits) for bits in CURVE]


def _gumbel_of_(bits: Tensor) -> Tensor:
    """Turn hashes [...] int32 into noise, in place: 31 bits give a number, the sign its side.

    With v = m 2**e, -log(v) = (-1 - e) ln(2) + w HALF_LOG(w), w = 2 - m; for v near 1, where the largest noise
    comes from, w = 2 (1 - v) keeps all bits. The outer logarithm is again computed from exponent and mantissa.
    """
    far = bits >> _31  # all ones where the hash gives v, zero where it gives 1 - v
    value = bits.bitwise_and_(_BITS31).float().add_(_HALF)
    raw = value.view(torch.int32)
    halvings = (raw >> _MANTISSA_BITS).sub_(_158).bitwise_and_(far).float().mul_(_LN2)
    rest = (raw & _MANTISSA).bitwise_or_(_EXPONENT_OF_ONE)
    rest.view(torch.float32).neg_().add_(_TWO)
    value.mul_(_SMALL)
    rest = raw.bitwise_xor_(rest.bitwise_xor_(raw).bitwise_and_(far)).view(torch.float32)
    energy = _polynomial(_HALF_LOG, rest).mul_(rest).add_(halvings)
    raw = energy.view(torch.int32)
    line = (raw - _EXPONENT_OF_ONE).float().mul_(_SLOPE)
    mantissa = raw.bitwise_and_(_MANTISSA).bitwise_or_(_EXPONENT_OF_ONE).view(torch.float32)
    return _polynomial(_CURVE, mantissa).add_(line)


def _polynomial(factors: list[Tensor], x: Tensor) -> Tensor:
    value = x * factors[0]
    for factor in factors[1:-1]:
        value.add_(factor).mul_(x)
    return value.add_(factors[-1])


def _keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return both halves [B] int32 of the 64-bit key of (seed, position)."""
    keys = _mix64(_mix64(seeds) + positions)
    return _as_int32(keys), _as_int32(keys >> 32)


def _hash(low: Tensor, high: Tensor, tokens: Tensor) -> Tensor:
    """Return the hash of token ids under a key: one half is mixed in before, one between, two finalisers.

    All 32 bits are used. 32-bit arithmetic halves the memory traffic, which dominates the cost.
    """
    return _mix32_(_mix32_(tokens * _GOLDEN32 + low).bitwise_xor_(high))


def _mix64(value: Tensor) -> Tensor:
    value = value + (GOLDEN64 - 2**64)
    value = (value ^ _shift64(value, 30)) * (MIX64_A - 2**64)
    value = (value ^ _shift64(value, 27)) * (MIX64_B - 2**64)
    return value ^ _shift64(value, 31)


def _shift64(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)  # torch's shift extends the sign


def _mix32_(value: Tensor) -> Tensor:
    """Apply the 32-bit finaliser in place."""
    value.bitwise_xor_((value >> _16).bitwise_and_(_BITS16)).mul_(_MIX32_A)
    value.bitwise_xor_((value >> _13).bitwise_and_(_BITS19)).mul_(_MIX32_B)
    return value.bitwise_xor_((value >> _16).bitwise_and_(_BITS16))


def _as_int32(value: Tensor) -> Tensor:
    """Return the low 32 bits, as a signed number."""
    return (((value & 0xFFFFFFFF) ^ (1 << 31)) - (1 << 31)).to(torch.int32)
