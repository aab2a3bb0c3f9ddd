"""What changed between two versions of one block of a tensor: where, and how far.

"How far" is counted in an order in which neighbouring floats differ by one, so that the typical
change of one unit in the last place is a 1 or a 2. All arithmetic is on bits and wraps: lossless, and
additive, so that the changes of several versions add up to one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})

FEW = 8192
"""Flags below which a call costs more than looking at each."""

Bits = NDArray[Any]
"""A flat array of unsigned integers: the storage bits of elements."""


@dataclass(frozen=True)
class Changes:
    """Which elements of a block changed, and how far each moved."""

    index: NDArray[np.int64]
    """Positions in the block, strictly increasing."""
    moves: Bits
    """Zig-zag of the wrapped difference, never 0: -1, 1, -2, ... are 1, 2, 3, ..."""


def find(base: Bits, new: Bits, dtype: str, hint: NDArray[np.int64] | None = None) -> Changes:
    """What turns `base` into `new`, two flat arrays of equally many elements.

    Only positions in `hint` are looked at, if it is given: sorted, unique, with every change in it.
    """
    if hint is None:
        index = where(base != new)
    else:
        index = hint[base[hint] != new[hint]]
    return Changes(index, measure(base[index], new[index], dtype))


def where(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Positions of the ones; where they are rare, in half the time of np.flatnonzero()."""
    if flags.size < FEW:
        return np.flatnonzero(flags)
    packed = np.packbits(flags, bitorder="little")
    some = packed != 0
    if np.count_nonzero(some) * 2 > packed.size:
        return np.flatnonzero(flags)
    eights = np.flatnonzero(some)
    bits = np.flatnonzero(np.unpackbits(packed[eights], bitorder="little").view(np.bool_))
    index = eights[bits >> 3] << 3
    index += bits & 7
    return index


def apply(base: Bits, changes: Changes, dtype: str, out: Bits) -> None:
    """Write into `out` what `changes` makes of `base`; positions have been checked."""
    out[:] = base
    out[changes.index] = move(base[changes.index], changes.moves, dtype)


def measure(base: Bits, new: Bits, dtype: str) -> Bits:
    """Zig-zag of the wrapped difference: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    moved = _order(new, dtype)
    moved -= _order(base, dtype)
    sign = moved >> (8 * moved.itemsize - 1)
    moved <<= 1
    moved ^= sign
    return moved.view(new.dtype)


def move(base: Bits, moves: Bits, dtype: str) -> Bits:
    """Inverse of measure(): `base` moved so far."""
    ordered = unzigzag(moves).view(f"<i{base.itemsize}")
    ordered += _order(base, dtype)
    return _order(ordered, dtype).view(base.dtype)


def unzigzag(moves: Bits) -> Bits:
    """The wrapped differences, as unsigned integers."""
    sign = moves & 1
    np.negative(sign, out=sign)
    sign ^= moves >> 1
    return sign


def _order(bits: Bits, dtype: str) -> Bits:
    """Bits as signed integers that compare like the floats they hold, a new array; its own inverse.

    A negative float has sign-magnitude bits, so all but the sign are flipped. Integers stay.
    """
    signed = bits.view(f"<i{bits.itemsize}")
    if dtype not in FLOATS:
        return signed.copy()
    width = 8 * bits.itemsize
    flip = signed >> (width - 1)
    flip &= np.array((1 << (width - 1)) - 1, signed.dtype)
    flip ^= signed
    return flip
