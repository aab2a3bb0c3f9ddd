"""Code one block of a tensor by one of four methods.

skip     the bits of the base
sparse   positions of the changed elements and how far each moved, in plain bits
dense    how far every element moved, a byte each, larger moves apart
raw      the new bits, in byte planes; needs no base

Sparse costs within a few percent of the entropy of gaps and moves at any density. Positions are Rice-coded
(R. F. Rice, JPL 79-22, 1979): of each gap the `shift` low bits stand as they are, the rest is as many zeros
before a one. Moves are a sign each, and for those above one in magnitude their positions and then the bits of
the magnitude from the lowest up, each after a bit that says whether there are more (P. Elias, 1975), level
by level.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CodecError
from .moves import Bits, Changes, apply, find, find_few, measure, move, where
from .streams import MAX_STREAM, Flags, StreamReader, StreamWriter

BLOCK = MAX_STREAM
"""Elements of a block. 128 Ki costs 8 % in ratio, 4 Mi gains nothing and streams worse."""
SKIP, SPARSE, DENSE, RAW = 0, 1, 2, 3

SMALL = 4096
"""Elements below which comparing all at once gains nothing."""
DENSE_FROM = 0.68
"""Share of changed elements from which dense is shorter, from measurement."""
FEW = 1 << 16
"""Changes below which the work on them is so many short calls that two threads only wait for each
other's interpreter lock: half the speed of one thread after the other."""
BITMAP_FROM = 6
"""With one change in so many elements or fewer, a bitmap in Huffman code is as short, and faster."""
MAX_SHIFT = 20
ESCAPE = 255
"""A dense move that is this or more stands apart."""

Positions = NDArray[np.int64]
Turn = AbstractContextManager[Any]
"""Held while working on few changes: one lock for all threads of a payload."""
ALONE: Turn = nullcontext()


def max_body(numel: int, width: int) -> int:
    """The most bytes that any method makes of a block; a decoder refuses more."""
    return 3 * numel * width + 64


def encode_block(
    base: Bits | None,
    new: Bits,
    dtype: str,
    hint: Positions | None = None,
    turn: Turn = ALONE,
) -> tuple[int, bytes]:
    """Code what turns `base` into `new` as (method, body); without a base always raw.

    Both are flat arrays of bits, at most BLOCK elements long. `hint` holds every position that changed,
    sorted, and perhaps others; without it all are compared.
    """
    if base is None:
        return RAW, _encode_raw(new)
    if hint is None and new.size > SMALL:
        found = compare(base, new, dtype)
    else:
        found = find(base, new, dtype, hint)
    if isinstance(found, Changes):
        method, body = encode_changes(found, new.size, turn)
    else:
        method, body = DENSE, encode_dense(found)
    if is_large(body, new):
        raw = _encode_raw(new)
        if len(raw) < len(body):
            return RAW, raw
    return method, body


def compare(base: Bits, new: Bits, dtype: str) -> Changes | Bits:
    """Find what changed in a block; the moves of all elements, as for encode_dense(), where most did."""
    changes = find_few(base, new, dtype)
    if changes is not None:
        return changes
    differ = base != new
    if np.count_nonzero(differ) >= DENSE_FROM * new.size:
        return measure(base, new, dtype)
    index = where(differ)
    return Changes(index, measure(base.take(index), new.take(index), dtype))


def encode_changes(changes: Changes, size: int, turn: Turn = ALONE) -> tuple[int, bytes]:
    """Code `changes` of a block of `size` elements as (method, body): skip, sparse or dense, never raw."""
    count = changes.index.size
    if not count:
        return SKIP, b""
    if count < DENSE_FROM * size:
        writer = StreamWriter()
        with _turn(count, turn):
            write_positions(writer, changes.index, size)
            write_moves(writer, changes.moves)
            return SPARSE, writer.finish()
    moves = np.zeros(size, changes.moves.dtype)
    moves[changes.index] = changes.moves
    return DENSE, encode_dense(moves)


def encode_dense(moves: Bits) -> bytes:
    """Code the moves of all elements, 0 for those that stay, as the body of a dense block."""
    writer = StreamWriter()
    index = where(moves >= ESCAPE)
    short = moves.astype(np.uint8)
    short[index] = ESCAPE
    writer.stream(short)
    if index.size:
        writer.planes(moves[index] - np.array(ESCAPE, moves.dtype))
    return writer.finish()


def is_large(body: bytes, bits: Bits) -> bool:
    """Whether raw may be shorter: moves fill their width, or the bits have little entropy."""
    return len(body) * 2 > bits.nbytes


def decode_block(
    method: int,
    body: memoryview,
    base: Bits | None,
    out: Bits,
    dtype: str,
    turn: Turn = ALONE,
) -> Positions | None:
    """Write the block into `out`, reading `base` where the method needs it; return the changed positions.

    None where any may have changed. Raises CodecError.
    """
    if method == RAW:
        reader = StreamReader(body)
        out[:] = reader.planes(out.size, out.dtype)
        reader.finish()
    elif base is None:
        raise CodecError(f"method {method} needs a base, a full state has none")
    elif method == SKIP:
        out[:] = base
        return np.empty(0, np.int64)
    elif method == SPARSE:
        with _turn(len(body), turn):
            changes = _decode_sparse(body, out.size, out.dtype)
        apply(base, changes, dtype, out)
        return changes.index
    elif method == DENSE:
        out[:] = move(base, _decode_dense(body, out.size, out.dtype), dtype)
    else:
        raise CodecError(f"method {method} is unknown, update this node")
    return None


def _turn(work: int, turn: Turn) -> Turn:
    return turn if work < FEW else ALONE


def _encode_raw(new: Bits) -> bytes:
    writer = StreamWriter()
    writer.planes(new)
    return writer.finish()


def _decode_dense(body: memoryview, size: int, dtype: np.dtype[Any]) -> Bits:
    reader = StreamReader(body)
    short = reader.stream(size)
    moves = short.astype(dtype)
    index = where(short == ESCAPE)
    if index.size:
        moves[index] += reader.planes(index.size, dtype)
    reader.finish()
    return moves


def _decode_sparse(body: memoryview, size: int, dtype: np.dtype[Any]) -> Changes:
    reader = StreamReader(body)
    index = read_positions(reader, size)
    if not index.size:
        raise CodecError("a sparse block without a change")
    moves = read_moves(reader, index.size, dtype)
    reader.finish()
    return Changes(index, moves)


# -- positions -------------------------------------------------------------------------------------


def write_positions(writer: StreamWriter, index: Positions, size: int) -> None:
    """Append `index`, strictly increasing positions below `size`."""
    count = index.size
    writer.number(count)
    if not count:
        return
    shift = _shift(count, size)
    writer.number(shift)
    ones = index
    if shift:
        gaps = np.diff(index.astype(np.int32), prepend=np.int32(-1))  # half the bytes of positions
        gaps -= 1
        low = np.empty((shift, count), np.bool_)
        for at in range(shift):
            np.not_equal(gaps & (1 << at), 0, out=low[at])
        writer.bits(low.reshape(-1))
        gaps >>= shift
        gaps += 1
        ones = np.cumsum(gaps, dtype=np.int64)
        ones -= 1
    flags = np.zeros(ones[-1] + 1, np.bool_)
    flags[ones] = True
    writer.number(flags.size)
    if shift:
        writer.bits(flags)
    else:
        writer.stream(np.packbits(flags))


def read_positions(reader: StreamReader, size: int) -> Positions:
    """Read strictly increasing positions below `size`. Raises CodecError."""
    count = reader.number(size, f"positions in a block of {size}")
    if not count:
        return np.empty(0, np.int64)
    shift = reader.number(MAX_SHIFT, "low bits of a gap")
    low = reader.bits(count * shift)
    length = reader.number(count + (size >> shift), "bits of a bitmap")
    if shift:
        flags = reader.bits(length)
    else:
        flags = np.unpackbits(reader.stream((length + 7) // 8), count=length).view(np.bool_)
    ones = np.flatnonzero(flags)
    if ones.size != count:
        raise CodecError(f"{count} positions announced, {ones.size} found")
    index = ones
    if shift:
        gaps = np.diff(ones.astype(np.int32), prepend=np.int32(-1))
        gaps -= 1
        for at in reversed(range(shift)):
            gaps <<= 1
            gaps |= low[at * count : (at + 1) * count]
        gaps += 1
        index = np.cumsum(gaps, dtype=np.int64)
        index -= 1
    # Gaps cannot be negative, so positions strictly increase; only the last one can be out of range.
    if index[-1] >= size:
        raise CodecError(f"position {int(index[-1])} in a block of {size}")
    return index


def _shift(count: int, size: int) -> int:
    """The Rice parameter for `count` of `size` elements; 0: a bitmap, which Huffman coding makes shorter.

    The next parameter is better once q^(2^k) > 0.618, where q is the share that did not change: that is
    size / count > 2.08 x 2^k + 0.5, in whole numbers.
    """
    if size <= BITMAP_FROM * count:
        return 0
    shift = 1
    while 100 * size > count * ((208 << shift) + 50) and shift < MAX_SHIFT:
        shift += 1
    return shift


# -- moves -----------------------------------------------------------------------------------------


def write_moves(writer: StreamWriter, moves: Bits) -> None:
    """Append moves, none of which is 0."""
    negative = moves & 1
    writer.bits(negative != 0)
    left = (moves >> 1) + negative
    index = where(left > 1)
    write_positions(writer, index, moves.size)
    if not index.size:
        return
    left = left[index]
    low: list[Flags] = []
    more: list[Flags] = []
    while left.size:
        low.append(left & 1 != 0)
        left >>= 1
        more.append(left > 1)
        left = left[where(more[-1])]
    flags = np.concatenate(more)
    writer.number(flags.size)
    writer.bits(flags)
    writer.bits(np.concatenate(low))


def read_moves(reader: StreamReader, count: int, dtype: np.dtype[Any]) -> Bits:
    """Read `count` moves, none of them 0. Raises CodecError."""
    negative = reader.bits(count)
    index = read_positions(reader, count)
    moves = np.ones(count, dtype)
    if index.size:
        moves[index] = _read_magnitudes(reader, index.size, dtype)
    moves <<= 1
    moves -= negative
    if not moves.all():
        raise CodecError("a changed element does not move")
    return moves


def _read_magnitudes(reader: StreamReader, count: int, dtype: np.dtype[Any]) -> Bits:
    """Read `count` magnitudes above 1."""
    width = 8 * dtype.itemsize
    flags = reader.bits(reader.number(count * width, "bits of magnitudes"))
    levels: list[Flags] = []
    at, due = 0, count
    while due:
        if at + due > flags.size or len(levels) == width - 1:
            raise CodecError("magnitudes do not end")
        levels.append(flags[at : at + due])
        at += due
        due = int(np.count_nonzero(levels[-1]))
    if at != flags.size:
        raise CodecError("magnitudes end early")
    low = reader.bits(at)
    magnitudes = np.empty(0, dtype)
    for level in reversed(levels):
        at -= level.size
        above = magnitudes
        magnitudes = np.ones(level.size, dtype)
        magnitudes[where(level)] = above
        magnitudes <<= 1
        magnitudes |= low[at : at + level.size]
    return magnitudes
