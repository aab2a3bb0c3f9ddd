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

Bits = NDArray[Any]
"""A flat array of unsigned integers: the storage bits of elements."""


@dataclass(frozen=True)
class Changes:
    """Which elements of a block changed, and how far each moved."""

    index: NDArray[np.int64]
    """Positions in the block, strictly increasing."""
    moves: Bits
    """Zig-zag of the wrapped difference, never 0: -1, 1, -2, ... are 1, 2, 3, ..."""


def find(base: Bits, new: Bits, dtype: str) -> Changes:
    """What turns `base` into `new`, two flat arrays of equally many elements."""
    index = np.flatnonzero(base != new)
    return Changes(index, measure(base[index], new[index], dtype))


def apply(base: Bits, changes: Changes, dtype: str, out: Bits) -> None:
    """Write into `out` what `changes` makes of `base`; positions have been checked."""
    out[:] = base
    out[changes.index] = move(base[changes.index], changes.moves, dtype)


def measure(base: Bits, new: Bits, dtype: str) -> Bits:
    """Zig-zag of the wrapped difference: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    moved = _order(new, dtype) - _order(base, dtype)
    return ((moved << 1) ^ (moved >> (8 * moved.itemsize - 1))).view(new.dtype)


def move(base: Bits, moves: Bits, dtype: str) -> Bits:
    """Inverse of measure(): `base` moved so far."""
    ordered = _order(base, dtype)
    ordered = ordered + unzigzag(moves).view(ordered.dtype)
    return _order(ordered, dtype).view(base.dtype)


def unzigzag(moves: Bits) -> Bits:
    """The wrapped differences, as unsigned integers."""
    return (moves >> 1) ^ -(moves & 1)


def _order(bits: Bits, dtype: str) -> Bits:
    """Bits as signed integers that compare like the floats they hold; its own inverse.

    A negative float has sign-magnitude bits, so all but the sign are flipped. Integers stay.
    """
    signed = bits.view(f"<i{bits.itemsize}")
    if dtype not in FLOATS:
        return signed
    width = 8 * bits.itemsize
    return signed ^ ((signed >> (width - 1)) & np.array((1 << (width - 1)) - 1, signed.dtype))
