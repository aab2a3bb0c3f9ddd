"""The TOPLOC fingerprint: the largest numbers of 32 hidden states as one polynomial, 258 bytes.

Nothing in a proof is a length or an address: a modulus and the coefficients are all there is, and both are
checked before the first is used.

As in the paper (arXiv 2501.16007): the 128 numbers of the largest magnitude of a block of 32 states,
flattened; m is the largest modulus up to 65497 that keeps their positions apart; the polynomial over
GF(65497) through all (position mod m, bfloat16 pattern); written as m and 128 coefficients from the
constant on, big-endian u16. A full block is byte for byte TOPLOC's. Two things are ours: the last block,
of t < 32 tokens, has 4 t coefficients, so that a short reply costs 8 bytes a token too; and signs count
when proofs are compared.
Patterns beyond the field (from 65497) are NaNs, and no proof is made of what is not finite.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .fingerprint import (
    BadProof,
    Compared,
    Hidden,
    ProofFailed,
)
from .polynomial import PRIME, evaluate, interpolate
from .residuals import weighed_sums

BLOCK = 32
"""Tokens in a block."""
PER_TOKEN = 4
"""Committed numbers for each token: 128 in a full block."""

_AT_ONCE = 64
"""Blocks; each needs about half a MiB meanwhile, and a reply may have 2^20 tokens."""
_SMALLEST_MODULUS = 32769
"""TOPLOC looks no further down."""
_NEAR = 0.125
"""Beyond this relative difference a committed number is another one, and says nothing about versions."""
_SOFTNESS = 3.0
"""Of the weights: single numbers spread more by chance than whole tokens."""
_LARGEST = 3.3895e38
"""Of bfloat16; what is not a number is not below it either."""
_EXPONENT = 0x7F80
_MAGNITUDE = 0x7FFF

Ints = NDArray[np.int64]
Bits = NDArray[np.uint16]
Floats = NDArray[np.float64]


class Toploc:
    """The largest activations of each block of 32 tokens."""

    @property
    def name(self) -> str:
        """As in the run manifest."""
        return "toploc"

    def size(self, tokens: int) -> int:
        """258 bytes for 32 tokens; 8 t + 2 for the t of the last block."""
        return 2 * -(-tokens // BLOCK) + 2 * PER_TOKEN * tokens

    def make(self, hidden: Hidden) -> bytes:
        """The proof of the hidden states [tokens, width] of one reply. Raises ProofFailed."""
        parts: list[bytes] = []
        for blocks in _batches(_finite(hidden)):
            patterns = _patterns(blocks)
            index = _largest(patterns, PER_TOKEN * blocks.shape[1] // hidden.shape[1])
            parts.append(self.make_top(index, np.take_along_axis(patterns, index, 1)))
        return b"".join(parts)

    def make_top(self, index: Ints, patterns: Bits) -> bytes:
        """The proof of whole blocks whose largest numbers are known already.

        `index` [blocks, 4 t]: positions in each flattened block of t tokens, in any order; `patterns`:
        the bfloat16 bits there. A reply is its blocks of 32 tokens, then the rest. Raises ProofFailed.
        """
        if ((patterns & _EXPONENT) == _EXPONENT).any():
            raise ProofFailed("hidden states are not finite; load the policy again")
        modulus = np.array([_modulus(row) for row in index], np.int64)
        coefficients = interpolate(index % modulus[:, None], patterns.astype(np.int64))
        return np.hstack([modulus[:, None], coefficients]).astype(">u2").tobytes()

    def check(self, proof: bytes, tokens: int) -> None:
        """Raise BadProof unless every modulus and coefficient is possible."""
        _decode(proof, tokens)

    def compare(self, proof: bytes, hidden: Hidden, others: Sequence[Hidden] = ()) -> Compared:
        """Compare with own hidden states [tokens, width]; `others` have the same shape.

        Of each of the own largest numbers the committed one has the relative error |committed - own| / |own|,
        1 if it has another sign or is more than one binade away; the distance is their mean, own being
        rounded to bfloat16. `own` and `others` are squared relative differences to what is not rounded,
        of the `samples` committed numbers within 1/8 of the own, weighed (residuals.py).
        Raises BadProof, and ProofFailed if the own hidden states are not finite.
        """
        committed = _decode(proof, len(hidden))
        policies = zip(*(_batches(_finite(one)) for one in (hidden, *others)), strict=True)
        errors: list[Floats] = []
        for (modulus, coefficients), blocks in zip(committed, policies, strict=True):
            patterns = _patterns(blocks[0])
            index = _largest(patterns, coefficients.shape[1])
            value = evaluate(coefficients, index % modulus[:, None]).astype(np.uint16)
            mine = np.take_along_axis(patterns, index, 1)
            numbers = [_numbers(mine), *(np.take_along_axis(one, index, 1) for one in blocks)]
            errors.append(np.stack([_relative(value, one, mine).ravel() for one in numbers]))
        apart = np.minimum(1.0, np.abs(np.concatenate(errors, axis=1)))
        near = apart[1:, apart[0] <= _NEAR]
        own, *rest = weighed_sums(near**2, _SOFTNESS).tolist()
        return Compared(float(apart[0].mean()), near.shape[1], own, tuple(rest))


def _finite(hidden: Hidden) -> Hidden:
    if hidden.ndim != 2 or not len(hidden) or hidden.shape[1] < PER_TOKEN:
        raise ProofFailed(f"hidden states are [tokens, width >= 4], not {hidden.shape}")
    if not np.abs(hidden).max() <= _LARGEST:
        raise ProofFailed("hidden states are not finite; load the policy again")
    return hidden.astype(np.float32, copy=False)


def _shares(tokens: int) -> Iterator[tuple[int, int]]:
    """(blocks, tokens in each): the full blocks, a bounded number at a time, then the rest."""
    full, rest = divmod(tokens, BLOCK)
    for start in range(0, full, _AT_ONCE):
        yield min(_AT_ONCE, full - start), BLOCK
    if rest:
        yield 1, rest


def _batches(hidden: Hidden) -> Iterator[Hidden]:
    """Flattened blocks [blocks, tokens in each * width], as shared out."""
    start = 0
    for blocks, tokens in _shares(len(hidden)):
        end = start + blocks * tokens
        yield np.ascontiguousarray(hidden[start:end]).reshape(blocks, -1)
        start = end


def _patterns(numbers: Hidden) -> Bits:
    """bfloat16 bits, rounded to even as torch rounds."""
    bits = numbers.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def _largest(patterns: Bits, count: int) -> Ints:
    """Positions [blocks, count] of the largest magnitudes of each block; of equals, the first."""
    magnitude = patterns & np.uint16(_MAGNITUDE)
    bar = np.partition(magnitude, -count, axis=1)[:, -count]
    found = np.empty((len(patterns), count), np.int64)
    for row, (numbers, least) in enumerate(zip(magnitude, bar, strict=True)):
        above = np.flatnonzero(numbers > least)
        found[row, : len(above)] = above
        found[row, len(above) :] = np.flatnonzero(numbers == least)[: count - len(above)]
    return found


def _modulus(index: Ints) -> int:
    """The largest modulus that keeps these positions apart. Raises ProofFailed."""
    for modulus in range(PRIME, _SMALLEST_MODULUS - 1, -1):
        if np.unique(index % modulus).size == index.size:
            return modulus
    raise ProofFailed("no modulus keeps the positions of the largest numbers apart")


def _decode(proof: bytes, tokens: int) -> list[tuple[Ints, Ints]]:
    """(moduli [blocks], coefficients [blocks, 4 t]) of all blocks, as shared out. Raises BadProof."""
    if tokens < 1 or len(proof) != Toploc().size(tokens):
        raise BadProof(f"{len(proof)} bytes are no TOPLOC proof of {tokens} tokens")
    words = np.frombuffer(proof, ">u2").astype(np.int64)
    parts: list[Ints] = []
    for blocks, each in _shares(tokens):
        used = blocks * (1 + PER_TOKEN * each)
        parts.append(words[:used].reshape(blocks, -1))
        words = words[used:]
    if max(int(part.max()) for part in parts) > PRIME:
        raise BadProof("a modulus or coefficient is beyond the field")
    for part in parts:
        if (part[:, 0] < _SMALLEST_MODULUS).any():
            raise BadProof(f"modulus {int(part[:, 0].min())} is below {_SMALLEST_MODULUS}")
        if (part[:, 1:] == PRIME).any():
            raise BadProof("a coefficient is beyond the field")
    return [(part[:, 0], part[:, 1:]) for part in parts]


def _numbers(patterns: Bits) -> Hidden:
    return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _relative(value: Bits, numbers: Hidden, own: Bits) -> Floats:
    """(value - number) / own; 1 where the value is no number, or of another sign or binade than `own`."""
    binades = (value & _EXPONENT).astype(np.int64) - (own & _EXPONENT).astype(np.int64)
    alike = (np.abs(binades) <= 1 << 7) & ((value ^ own) >> 15 == 0)
    alike &= (value & _EXPONENT) != _EXPONENT
    apart = _numbers(np.where(alike, value, 0)).astype(np.float64) - numbers
    scale = np.abs(_numbers(own).astype(np.float64))
    return np.where(alike, apart / np.where(scale == 0, 1, scale), 1.0)
