"""Find and apply what changed between two versions of one block of a tensor: positions and moves.

A move is counted in an order in which neighbouring floats differ by one, so that the typical change of one
unit in the last place is a 1 or a 2. All arithmetic is on bits and wraps: lossless, and additive.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})

FEW = 8192
"""Flags below which the calls cost more than the work."""

PIECE = 1 << 17
"""Elements that are worked on at once: intermediate arrays stay in the cache and their memory is reused,
where larger ones would go back to the kernel and come again, zeroed, page by page."""

RARE_ONES = 0.1
"""Share of ones up to which np.flatnonzero() is slow: its branches are mispredicted."""

RARE = 8
"""Comparing words of eight bytes is faster where at most one in eight has a change."""

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
    """Find what turns `base` into `new`, two flat arrays of equally many elements.

    Only positions in `hint` are compared, if it is given: sorted, unique, with every change in it.
    """
    if hint is None:
        index = where(base != new)
    else:
        index = hint[base[hint] != new[hint]]
    return Changes(index, measure(base[index], new[index], dtype))


def find_few(base: Bits, new: Bits, dtype: str) -> Changes | None:
    """Do find() by words of eight bytes; None if changes are many or the arrays do not divide."""
    lanes = 8 // base.itemsize
    if base.size % lanes or base.size < FEW:
        return None
    if np.count_nonzero(base[:FEW] != new[:FEW]) * RARE > FEW:  # most likely so all over
        return None
    before, after = base.view("<u8"), new.view("<u8")
    flags = before != after
    if np.count_nonzero(flags) * RARE > flags.size:
        return None
    words = where(flags)
    old, now = before.take(words).view(base.dtype), after.take(words).view(new.dtype)
    found = np.flatnonzero(old != now)
    index = words.take(found // lanes)
    index *= lanes
    index += found % lanes
    return Changes(index, measure(old.take(found), now.take(found), dtype))


def where(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Positions of the ones; where they are rare, in half the time of np.flatnonzero().

    That is slow below RARE_ONES. In the bytes that have a one at least one bit in eight is set, so among
    these it is fast.
    """
    if flags.size < FEW or np.count_nonzero(flags) > RARE_ONES * flags.size:
        return np.flatnonzero(flags)
    packed = np.packbits(flags, bitorder="little")
    eights = np.flatnonzero(packed != 0)
    bits = np.flatnonzero(np.unpackbits(packed[eights], bitorder="little").view(np.bool_))
    index = eights[bits >> 3] << 3
    index += bits & 7
    return index


def apply(base: Bits, changes: Changes, dtype: str, out: Bits) -> None:
    """Apply `changes` to `base` and write the result into `out`; positions have been checked."""
    out[:] = base
    out[changes.index] = move(base[changes.index], changes.moves, dtype)


def measure(base: Bits, new: Bits, dtype: str) -> Bits:
    """Moves from `base` to `new`, zig-zag: differences 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    out = np.empty_like(new)
    for at in range(0, new.size, PIECE):
        part = slice(at, at + PIECE)
        moved = _order(new[part], dtype)
        moved -= _order(base[part], dtype)
        sign = moved >> (8 * moved.itemsize - 1)
        moved <<= 1
        np.bitwise_xor(moved, sign, out=out[part].view(moved.dtype))
    return out


def move(base: Bits, moves: Bits, dtype: str) -> Bits:
    """Move `base` by `moves`; the inverse of measure()."""
    ordered = _unzigzag(moves).view(f"<i{base.itemsize}")
    ordered += _order(base, dtype)
    return _order(ordered, dtype).view(base.dtype)


def _unzigzag(moves: Bits) -> Bits:
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
