"""Code one block of a tensor by one of four methods.

skip     the bits of the base
sparse   positions of the changed elements and how far each moved, in plain bits
dense    how far every element moved, a byte each, larger moves apart
raw      the new bits, in byte planes; needs no base

A move is counted in an order in which neighbouring floats differ by one, so that the typical change of one
unit in the last place is a 1 or a 2. All arithmetic is on bits and wraps: lossless, and additive.

Sparse costs within a few percent of the entropy of gaps and moves at any density. Positions are Rice-coded
(R. F. Rice, JPL 79-22, 1979): of each gap the `shift` low bits are stored unchanged, the rest as that many
zeros before a one. Of each move the sign is stored; of those above one in magnitude the positions too, and
then the bits of the magnitude from the lowest up, each after a bit that tells whether more follow (P. Elias,
1975), level by level.

The size of every stream is known before it is read; a zstd frame that announces another one is refused before
anything is allocated. (python-zstandard ignores max_output_size when a frame announces its size.)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from .state import FLOATS, CodecError

MAX_STREAM = 1 << 20
"""Bytes of the longest stream: one byte plane of a full block. Also bounds the zstd window."""

HUFFMAN = zstandard.ZstdCompressionParameters(
    format=zstandard.FORMAT_ZSTD1_MAGICLESS,
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=6,
    chain_log=6,
    search_log=1,
    target_length=0,
    window_log=MAX_STREAM.bit_length() - 1,
)
"""Nearly no search for repetitions: a delta has none, and those that zstd finds cost 5 to 15 % of size and
half of the speed. A target_length above 0 would switch Huffman off."""

SHORTEST = 48
"""Bytes below which a Huffman table costs more than it saves."""
STORED, ZEROS = 0, 1
"""Codes in place of a length, as no frame is so short: stored bytes, and only zeros."""

Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]
Positions = NDArray[np.int64]
Bits = NDArray[Any]
"""A flat array of unsigned integers: the storage bits of elements."""

NO_BYTES = memoryview(b"")
PADDING = np.array([0xFF, *(0xFF << (8 - bits) & 0xFF for bits in range(1, 8))], np.uint8)
"""Mask of the last byte of a bit string, by its length modulo 8."""

FEW_FLAGS = 8192
"""Flags below which the calls cost more than the work."""

PIECE = 1 << 17
"""Elements that are worked on at once: intermediate arrays stay in the cache and their memory is reused,
where larger ones would go back to the kernel and come again, zeroed, page by page."""

RARE_ONES = 0.1
"""Share of ones up to which np.flatnonzero() is slow: its branches are mispredicted."""

RARE = 8
"""Comparing words of eight bytes is faster where at most one in eight has a change."""

BLOCK = MAX_STREAM
"""Elements of a block. 128 Ki costs 8 % in ratio, 4 Mi gains nothing and streams worse."""
SKIP, SPARSE, DENSE, RAW = 0, 1, 2, 3

SMALL = 4096
"""Elements below which comparing all at once gains nothing."""
DENSE_FROM = 0.68
"""Share of changed elements from which dense is shorter, from measurement."""
FEW_CHANGES = 1 << 16
"""Changes below which the work on them is short calls, for which two threads only wait for each
other's interpreter lock: half the speed of one thread after the other."""
BITMAP_FROM = 6
"""With one change in this many elements or fewer, a bitmap in Huffman code is as short, and faster."""
MAX_SHIFT = 20
ESCAPE = 255
"""A dense move that is this or more stands apart."""

Turn = AbstractContextManager[Any]
"""Held while working on few changes: one lock for all threads of a payload."""
ALONE: Turn = nullcontext()


# -- byte streams ------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """Write `value` in groups of seven bits, lowest first; all but the last have the high bit set."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(next_byte: Callable[[], int], most: int, what: str) -> int:
    """Read what varint() wrote; CodecError if it is above `most` or does not end."""
    value = 0
    for shift in range(0, most.bit_length() + 7, 7):
        byte = next_byte()
        value |= (byte & 0x7F) << shift
        if byte < 0x80 and value <= most:
            return value
        if byte < 0x80:
            break
    raise CodecError(f"{value} or more {what}, at most {most} are possible")


def plane(values: NDArray[Any], at: int) -> Bytes:
    """Take byte `at` of unsigned `values`, 0 being the lowest, as an array of its own."""
    return (values >> (8 * at)).astype(np.uint8) if at else values.astype(np.uint8)


def join_planes(parts: list[Bytes], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Make unsigned integers from their byte planes, lowest first."""
    out = parts[-1].astype(dtype)
    for part in reversed(parts[:-1]):
        out <<= 8
        out |= part
    return out


class StreamWriter:
    """Collects the streams of one block. Not for two threads at once."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(compression_params=HUFFMAN)
        self._parts: list[bytes] = []

    def number(self, value: int) -> None:
        """Append one number."""
        self._parts.append(varint(value))

    def bits(self, flags: Flags) -> None:
        """Append bits as they are, eight to a byte."""
        self._parts.append(np.packbits(flags).tobytes())

    def stream(self, values: Bytes) -> None:
        """Append bytes: nothing when empty, else a coded length and the shortest coding."""
        if not values.size:
            return
        if not values.any():
            self.number(ZEROS)
            return
        frame = b"" if values.size < SHORTEST else self._zstd.compress(values.data)
        if frame and len(frame) < values.size:
            self.number(len(frame))
            self._parts.append(frame)
        else:
            self.number(STORED)
            self._parts.append(values.tobytes())

    def planes(self, values: NDArray[Any]) -> None:
        """Append all byte planes of unsigned values."""
        for at in range(values.itemsize):
            self.stream(plane(values, at))

    def finish(self) -> bytes:
        """Join all that was appended."""
        return b"".join(self._parts)


class StreamReader:
    """Reads what StreamWriter wrote, from untrusted bytes; every fault is a CodecError."""

    def __init__(self, body: bytes | memoryview) -> None:
        self._body = memoryview(body)
        self._at = 0

    def number(self, most: int, what: str) -> int:
        """Read a number; CodecError above `most`."""
        return read_varint(lambda: self._take(1)[0], most, what)

    def bits(self, count: int) -> memoryview:
        """Read `count` bits, eight to a byte."""
        return self._take((count + 7) // 8)

    def stream(self, size: int) -> Bytes:
        """Read a stream of exactly `size` bytes, at most MAX_STREAM."""
        if not size:
            return np.empty(0, np.uint8)
        coded = self.number(size - 1 or ZEROS, f"coded bytes of a stream of {size}")
        if coded == ZEROS:
            return np.zeros(size, np.uint8)
        if coded == STORED:
            return np.frombuffer(self._take(size), np.uint8)
        return np.frombuffer(inflate(self._take(coded), size), np.uint8)

    def planes(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Read `count` unsigned values from their byte planes."""
        return join_planes([self.stream(count) for _ in range(dtype.itemsize)], dtype)

    def finish(self) -> None:
        """Refuse bytes after the last stream."""
        if self._at != len(self._body):
            raise CodecError(f"{len(self._body) - self._at} bytes after the end of a block")

    def _take(self, size: int) -> memoryview:
        if size > len(self._body) - self._at:
            raise CodecError("block ends inside a stream")
        self._at += size
        return self._body[self._at - size : self._at]


def inflate(frame: memoryview, size: int) -> bytes:
    """Decompress one zstd frame without magic of exactly `size` bytes, which it must announce itself."""
    magicless = zstandard.FORMAT_ZSTD1_MAGICLESS
    try:
        announced = zstandard.get_frame_parameters(frame, format=magicless)
        if announced.content_size != size or announced.dict_id:
            raise CodecError(f"zstd frame does not announce the {size} bytes that are due")
        if announced.window_size > MAX_STREAM:
            raise CodecError(f"zstd window of {announced.window_size} bytes exceeds {MAX_STREAM}")
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_STREAM, format=magicless)
        plain = decompressor.decompress(
            frame, max_output_size=size, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CodecError(f"zstd: {error}") from error
    if len(plain) != size:
        raise CodecError(f"zstd frame holds {len(plain)} bytes, {size} are due")
    return plain


# -- changes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """The changed elements of a block, and the size of each change."""

    index: NDArray[np.int64]
    """Positions in the block, strictly increasing."""
    moves: Bits
    """Zig-zag of the wrapped difference, never 0: -1, 1, -2, ... are 1, 2, 3, ..."""


def find(base: Bits, new: Bits, dtype: str, hint: Positions | None = None) -> Changes | Bits:
    """Find the difference from `base` to `new`; if most elements changed, the moves of all (encode_dense()).

    Only positions in `hint` are compared, if it is given: sorted, unique, with every change in it.
    """
    if hint is not None:
        index = hint[base[hint] != new[hint]]
    else:
        if new.size > SMALL and (few := _find_few(base, new, dtype)) is not None:
            return few
        differ = base != new
        if new.size > SMALL and np.count_nonzero(differ) >= DENSE_FROM * new.size:
            return measure(base, new, dtype)
        index = where(differ)
    return Changes(index, measure(base.take(index), new.take(index), dtype))


def _find_few(base: Bits, new: Bits, dtype: str) -> Changes | None:
    """Compare words of eight bytes; None if changes are many or the arrays do not divide."""
    lanes = 8 // base.itemsize
    if base.size % lanes or base.size < FEW_FLAGS:
        return None
    if (
        np.count_nonzero(base[:FEW_FLAGS] != new[:FEW_FLAGS]) * RARE > FEW_FLAGS
    ):  # most likely so all over
        return None
    before, after = base.view("<u8"), new.view("<u8")
    flags = before != after
    if np.count_nonzero(flags) * RARE > flags.size:
        return None
    words = where(flags)
    old, now = before.take(words).view(base.dtype), after.take(words).view(new.dtype)
    positions = np.flatnonzero(old != now)
    index = words.take(positions // lanes)
    index *= lanes
    index += positions % lanes
    return Changes(index, measure(old.take(positions), now.take(positions), dtype))


def where(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the positions of the ones; where they are rare, in half the time of np.flatnonzero().

    That is slow below RARE_ONES. In the bytes that have a one at least one bit in eight is set, so among
    these it is fast.
    """
    if flags.size < FEW_FLAGS or np.count_nonzero(flags) > RARE_ONES * flags.size:
        return np.flatnonzero(flags)
    packed = np.packbits(flags, bitorder="little")
    eights = np.flatnonzero(packed != 0)
    bits = np.flatnonzero(np.unpackbits(packed[eights], bitorder="little").view(np.bool_))
    index = eights[bits >> 3] << 3
    index += bits & 7
    return index


def measure(base: Bits, new: Bits, dtype: str) -> Bits:
    """Compute the moves from `base` to `new`, zig-zag: differences 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
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
    """Return the wrapped differences, as unsigned integers."""
    sign = moves & 1
    np.negative(sign, out=sign)
    sign ^= moves >> 1
    return sign


def _order(bits: Bits, dtype: str) -> Bits:
    """Map bits to signed integers that compare like the floats they hold, in a new array; its own inverse.

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


@dataclass(frozen=True, slots=True)
class CodedPositions:
    """Positions as they are coded; every length has been checked, the bits have not."""

    count: int
    size: int
    """Positions are below this."""
    shift: int
    low: memoryview
    """`shift` planes of `count` bits, the lowest first."""
    length: int
    flags: memoryview
    """`length` bits, `count` of which should be ones."""


def read_positions(reader: StreamReader, size: int) -> CodedPositions:
    """Read positions below `size`, for join_positions(). Raises CodecError."""
    count = reader.number(size, f"positions in a block of {size}")
    if not count:
        return CodedPositions(0, size, 0, NO_BYTES, 0, NO_BYTES)
    shift = reader.number(MAX_SHIFT, "low bits of a gap")
    low = reader.bits(count * shift)
    length = reader.number(count + (size >> shift), "bits of a bitmap")
    flags = reader.bits(length) if shift else reader.stream((length + 7) // 8).data
    if length < count:
        raise CodecError(f"{count} positions announced, in a bitmap of {length} bits")
    return CodedPositions(count, size, shift, low, length, flags)


def join_positions(parts: Sequence[CodedPositions], starts: Sequence[int]) -> Positions:
    """Decode strictly increasing positions, those of each part counted from its start; no part is empty.

    Raises CodecError.
    """
    counts = np.array([part.count for part in parts])
    firsts = np.cumsum(counts) - counts
    ones, begins = _ones(parts, counts)
    gaps = np.empty(ones.size, np.int32)
    np.subtract(ones[1:], ones[:-1], out=gaps[1:])
    gaps[1:] -= 1
    gaps[firsts] = ones[firsts] - begins
    shifts = [part.shift for part in parts]
    if any(shifts):
        gaps <<= (
            np.repeat(np.array(shifts, np.int32), counts) if len(set(shifts)) > 1 else shifts[0]
        )
        gaps |= _low_bits(parts, gaps.size)
    index = gaps.astype(np.int64)
    index += 1
    # Gaps cannot be negative, so positions strictly increase; only the last one can be out of range.
    ends = np.add.reduceat(index, firsts)
    for part, end in zip(parts, ends.tolist(), strict=True):
        if end > part.size:
            raise CodecError(f"position {end - 1} in a block of {part.size}")
    index[firsts] += np.diff(np.array(starts, np.int64), prepend=1)  # each part begins anew
    index[firsts[1:]] -= ends[:-1]
    return np.cumsum(index, out=index)


def _ones(
    parts: Sequence[CodedPositions], counts: Positions
) -> tuple[NDArray[np.int32], Positions]:
    """Return the places of the ones in all bitmaps, and where each bitmap begins, in bits."""
    packed = np.frombuffer(bytearray().join(part.flags for part in parts), np.uint8)
    ends = np.cumsum([len(part.flags) for part in parts])
    lengths = np.array([part.length for part in parts])
    packed[ends - 1] &= PADDING[lengths & 7]
    flags = np.unpackbits(packed).view(np.bool_)
    begins = 8 * (ends - (lengths + 7) // 8)
    count = np.count_nonzero(flags)
    if count != counts.sum():  # places take eight times the memory of flags
        raise CodecError(f"{counts.sum()} positions announced, {count} found")
    ones = np.flatnonzero(flags)
    each = np.diff(np.searchsorted(ones, begins), append=ones.size)
    if (each != counts).any():
        at = int(np.argmax(each != counts))
        raise CodecError(f"{counts[at]} positions announced, {each[at]} found")
    return ones.astype(np.int32), begins


def _low_bits(parts: Sequence[CodedPositions], total: int) -> NDArray[Any]:
    """Return the low bits of all gaps as numbers: parts of equal shift together, plane by plane."""
    shifts = {part.shift for part in parts} - {0}
    firsts = [0, *accumulate(part.count for part in parts)]
    values = np.zeros(total, np.uint8 if max(shifts) <= 8 else np.uint32)
    for shift in shifts:
        alike = [
            (part, first) for part, first in zip(parts, firsts, strict=False) if part.shift == shift
        ]
        bits = np.unpackbits(np.frombuffer(b"".join(part.low for part, _ in alike), np.uint8))
        begins = [0, *accumulate(8 * len(part.low) for part, _ in alike)]
        low = np.zeros(sum(part.count for part, _ in alike), values.dtype)
        for plane in reversed(range(shift)):
            low <<= 1
            low |= np.concatenate(
                [
                    bits[begin + plane * part.count :][: part.count]
                    for (part, _), begin in zip(alike, begins, strict=False)
                ]
            )
        if len(alike) == len(parts):
            return low
        at = 0
        for part, first in alike:
            values[first : first + part.count] = low[at : at + part.count]
            at += part.count
    return values


def _join_bits(parts: Sequence[memoryview], counts: Sequence[int]) -> Bytes:
    """Return the first bits of each part, one after the other, as numbers."""
    bits = np.unpackbits(np.frombuffer(b"".join(parts), np.uint8))
    if len(parts) == 1:
        return bits[: counts[0]]
    begins = [0, *accumulate(8 * len(part) for part in parts)]
    return np.concatenate(
        [bits[begin:][:count] for begin, count in zip(begins, counts, strict=False)]
    )


def _shift(count: int, size: int) -> int:
    """Return the Rice parameter for `count` of `size` elements; 0: a bitmap, shorter after Huffman coding.

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
    """Append moves; none is 0."""
    negative = moves & 1
    writer.bits(negative != 0)
    remaining = (moves >> 1) + negative
    index = where(remaining > 1)
    write_positions(writer, index, moves.size)
    if not index.size:
        return
    remaining = remaining[index]
    low: list[Flags] = []
    more: list[Flags] = []
    while remaining.size:
        low.append(remaining & 1 != 0)
        remaining >>= 1
        more.append(remaining > 1)
        remaining = remaining[where(more[-1])]
    flags = np.concatenate(more)
    writer.number(flags.size)
    writer.bits(flags)
    writer.bits(np.concatenate(low))


@dataclass(frozen=True, slots=True)
class CodedMoves:
    """Moves as they are coded; every length has been checked, the bits have not."""

    count: int
    negative: memoryview
    large: CodedPositions
    """Which of them are above one in magnitude."""
    length: int
    """Bits of all levels of the magnitudes."""
    more: memoryview
    low: memoryview


def read_moves(reader: StreamReader, count: int, width: int) -> CodedMoves:
    """Read `count` moves of `width` bits, for join_moves(). Raises CodecError."""
    negative = reader.bits(count)
    large = read_positions(reader, count)
    if not large.count:
        return CodedMoves(count, negative, large, 0, NO_BYTES, NO_BYTES)
    length = reader.number(large.count * width, "bits of magnitudes")
    return CodedMoves(count, negative, large, length, reader.bits(length), reader.bits(length))


def join_moves(parts: Sequence[CodedMoves], dtype: np.dtype[Any]) -> Bits:
    """Decode moves, none of them 0, one part after the other. Raises CodecError."""
    counts = [part.count for part in parts]
    moves = np.ones(sum(counts), dtype)
    starts = [0, *accumulate(counts)]
    large = [(part, at) for part, at in zip(parts, starts, strict=False) if part.large.count]
    if large:
        index = join_positions([part.large for part, _ in large], [start for _, start in large])
        moves[index] = _join_magnitudes([part for part, _ in large], dtype)
    moves <<= 1
    moves -= _join_bits([part.negative for part in parts], counts)
    if not moves.all():
        raise CodecError("a changed element does not move")
    return moves


def _join_magnitudes(parts: Sequence[CodedMoves], dtype: np.dtype[Any]) -> Bits:
    """Decode magnitudes above 1, level by level of all parts."""
    lengths = [part.length for part in parts]
    more = _join_bits([part.more for part in parts], lengths)
    low = _join_bits([part.low for part in parts], lengths)
    edges = [0, *accumulate(lengths)]
    at, ends = edges[:-1], edges[1:]
    due = [part.large.count for part in parts]
    levels: list[tuple[Flags, Bytes]] = []
    while live := [number for number, count in enumerate(due) if count]:
        spans = [slice(at[number], at[number] + due[number]) for number in live]
        beyond = any(span.stop > ends[number] for number, span in zip(live, spans, strict=True))
        if beyond or len(levels) == 8 * dtype.itemsize - 1:
            raise CodecError("magnitudes do not end")
        level = np.concatenate([more[span] for span in spans])
        levels.append((level.view(np.bool_), np.concatenate([low[span] for span in spans])))
        sizes = [due[number] for number in live]
        go_on = np.add.reduceat(level, [0, *accumulate(sizes[:-1])], dtype=np.int64).tolist()
        for number, count in zip(live, go_on, strict=True):
            at[number] += due[number]
            due[number] = count
    if at != ends:
        raise CodecError("magnitudes end early")
    magnitudes = np.empty(0, dtype)
    for flags, bits in reversed(levels):
        above = magnitudes
        magnitudes = np.ones(flags.size, dtype)
        magnitudes[where(flags)] = above
        magnitudes <<= 1
        magnitudes |= bits
    return magnitudes


# -- blocks ------------------------------------------------------------------------------------------


def max_body(numel: int, width: int) -> int:
    """Return the most bytes that any method makes of a block; a decoder refuses more."""
    return 3 * numel * width + 64


def encode_block(
    base: Bits | None,
    new: Bits,
    dtype: str,
    hint: Positions | None = None,
    turn: Turn = ALONE,
) -> tuple[int, bytes]:
    """Code the difference from `base` to `new` as (method, body); without a base always raw.

    Both are flat arrays of bits, at most BLOCK elements long. `hint` holds every position that changed,
    sorted, and perhaps others; without it all are compared.
    """
    if base is None:
        return RAW, _encode_raw(new)
    difference = find(base, new, dtype, hint)
    if isinstance(difference, Changes):
        method, body = encode_changes(difference, new.size, turn)
    else:
        method, body = DENSE, encode_dense(difference)
    if is_large(body, new):
        raw = _encode_raw(new)
        if len(raw) < len(body):
            return RAW, raw
    return method, body


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
    """Return whether raw may be shorter: moves fill their width, or the bits have little entropy."""
    return len(body) * 2 > bits.nbytes


def decode_block(method: int, body: memoryview, base: Bits | None, out: Bits, dtype: str) -> None:
    """Write a block that is not sparse into `out`, reading `base` where the method needs it.

    Raises CodecError.
    """
    if method == RAW:
        reader = StreamReader(body)
        out[:] = reader.planes(out.size, out.dtype)
        reader.finish()
    elif base is None:
        raise CodecError(f"method {method} needs a base, a full state has none")
    elif method == SKIP:
        out[:] = base
    elif method == DENSE:
        out[:] = move(base, _decode_dense(body, out.size, out.dtype), dtype)
    else:
        raise CodecError(f"method {method} is unknown, update this node")


def _turn(work: int, turn: Turn) -> Turn:
    return turn if work < FEW_CHANGES else ALONE


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


def decode_changes(
    blocks: Sequence[tuple[memoryview, slice]], dtype: np.dtype[Any]
) -> tuple[Changes, list[slice]]:
    """Decode the bodies of sparse blocks, which fill the given parts of their tensors.

    Returns the changes of all, with positions in their tensors, and the part of these for each block. At each
    operation on an array threads wait for each other's interpreter lock, so all blocks share the operations.
    Raises CodecError.
    """
    positions: list[CodedPositions] = []
    moves: list[CodedMoves] = []
    for body, part in blocks:
        reader = StreamReader(body)
        coded = read_positions(reader, part.stop - part.start)
        if not coded.count:
            raise CodecError("a sparse block without a change")
        positions.append(coded)
        moves.append(read_moves(reader, coded.count, 8 * dtype.itemsize))
        reader.finish()
    index = join_positions(positions, [part.start for _, part in blocks])
    edges = accumulate((coded.count for coded in positions), initial=0)
    changes = Changes(index, join_moves(moves, dtype))
    return changes, [slice(start, end) for start, end in pairwise(edges)]
