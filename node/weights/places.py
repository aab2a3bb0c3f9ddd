"""Positions of the rarer elements, in about as many bits as they carry.

The gaps between positions are Rice-coded (R. F. Rice, JPL 79-22, 1979): `shift` low bits of each are
random and stand as they are, the rest counts in zeros before a one. These zeros and ones are a bitmap
that Huffman coding makes shorter where there are enough of them; with shift 0 it marks the positions.
"""

import numpy as np
from numpy.typing import NDArray

from .errors import CodecError
from .streams import StreamReader, StreamWriter

ZEROS_PER_ONE = 3
"""Most zeros for a one in the bitmap, on average: from measurement; 2 to 4 are within 0.5 % of each other."""
MARKS = 6
"""With a position among so many elements or fewer, marking them is as short, and faster."""
MAX_SHIFT = 20

Positions = NDArray[np.int64]


def write_places(writer: StreamWriter, index: Positions, size: int) -> None:
    """Append `index`, strictly increasing positions below `size`."""
    count = index.size
    writer.number(count)
    if not count:
        return
    shift = _shift(count, size)
    writer.number(shift)
    ones = index
    if shift:
        gaps = _gaps(index)
        writer.bits(np.concatenate([gaps & (1 << at) != 0 for at in range(shift)]))
        gaps >>= shift
        ones = np.cumsum(gaps, dtype=np.int64)
        ones += np.arange(count)
    flags = np.zeros(ones[-1] + 1, np.bool_)
    flags[ones] = True
    writer.number(flags.size)
    writer.bitmap(flags)


def read_places(reader: StreamReader, size: int) -> Positions:
    """The next positions, strictly increasing and below `size`. Raises CodecError."""
    count = reader.number(size, f"positions in a block of {size}")
    if not count:
        return np.empty(0, np.int64)
    shift = reader.number(MAX_SHIFT, "low bits of a gap")
    low = reader.bits(count * shift)
    most = count + (size >> shift)
    ones = np.flatnonzero(reader.bitmap(reader.number(most, "bits of a bitmap")))
    if ones.size != count:
        raise CodecError(f"{count} positions announced, {ones.size} found")
    index = _joined(ones, low, shift) if shift else ones
    # Gaps cannot be negative, so positions strictly increase; only the last one can be out of range.
    if index[-1] >= size:
        raise CodecError(f"position {int(index[-1])} in a block of {size}")
    return index


def _gaps(index: Positions) -> NDArray[np.int32]:
    """How many other elements stand before each, after the one before; half the bytes of positions."""
    narrow = index.astype(np.int32)
    gaps = narrow.copy()
    gaps[1:] -= narrow[:-1]
    gaps[1:] -= 1
    return gaps


def _joined(ones: Positions, low: NDArray[np.bool_], shift: int) -> Positions:
    """Positions from where the ones of the bitmap are and the low bits of the gaps."""
    gaps = ones.copy()
    gaps[1:] -= ones[:-1]
    gaps[1:] -= 1
    for at in reversed(range(shift)):
        gaps <<= 1
        gaps |= low[at * ones.size : (at + 1) * ones.size]
    gaps += 1
    index = np.cumsum(gaps)
    index -= 1
    return index


def _shift(count: int, size: int) -> int:
    """Low bits of a gap that look random when `count` of `size` elements are meant."""
    if size <= MARKS * count:
        return 0
    shift = 1
    while size > (ZEROS_PER_ONE * count) << shift:
        shift += 1
    return shift
