"""Code the changes of sparse blocks, those of several blocks together.

Each costs within a few percent of the entropy of gaps and moves at any density. Positions are Rice-coded
(R. F. Rice, JPL 79-22, 1979): of each gap the `shift` low bits are stored unchanged, the rest as that many
zeros before a one. Of each move the sign is stored; of those above one in magnitude the positions too, and
then the bits of the magnitude from the lowest up, each after a bit that tells whether more follow (P. Elias,
1975), level by level.

At each operation on an array threads wait for each other's interpreter lock, so blocks share the operations:
their changes stand one after the other, and only the bytes are of each. The bytes do not depend on what is
coded together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .state import CodecError
from .streams import Bytes, StreamReader, coded_stream, pack, varint

Flags = NDArray[np.bool_]
Positions = NDArray[np.int64]
Bits = NDArray[Any]
"""A flat array of unsigned integers: the storage bits of elements."""

NO_BYTES = memoryview(b"")
PADDING = np.array([0xFF, *(0xFF << (8 - bits) & 0xFF for bits in range(1, 8))], np.uint8)
"""Mask of the last byte of a bit string, by its length modulo 8."""

FEW_FLAGS = 8192
"""Flags below which the calls cost more than the work."""
RARE_ONES = 0.1
"""Share of ones up to which np.flatnonzero() is slow: its branches are mispredicted."""
BITMAP_FROM = 6
"""With one change in this many elements or fewer, a bitmap in Huffman code is as short, and faster."""
MAX_SHIFT = 20


@dataclass(frozen=True)
class Changes:
    """The changed elements of a block, and the size of each change."""

    index: NDArray[Any]
    """Positions in the block, strictly increasing."""
    moves: Bits
    """Zig-zag of the wrapped difference, never 0: -1, 1, -2, ... are 1, 2, 3, ..."""


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


# -- positions -------------------------------------------------------------------------------------


def code_positions(index: NDArray[Any], counts: Positions, sizes: Sequence[int]) -> list[bytes]:
    """Code positions below `sizes`, strictly increasing in each part: `counts` of them, and never none."""
    firsts = np.cumsum(counts) - counts
    shifts = [_shift(count, size) for count, size in zip(counts.tolist(), sizes, strict=True)]
    gaps = np.empty(index.size, np.int32)  # half the bytes of positions
    np.subtract(index[1:], index[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= 1
    gaps[firsts] = index[firsts]
    low = _pack_low(gaps, counts, shifts)
    gaps >>= shifts[0] if len(set(shifts)) == 1 else np.repeat(np.array(shifts, np.int32), counts)
    gaps += 1
    lengths = np.add.reduceat(gaps, firsts, dtype=np.int64)
    # each bitmap begins with a byte
    gaps[firsts[1:]] += -lengths[:-1] & 7
    ones = np.cumsum(gaps, dtype=np.int64)
    flags = np.zeros(ones[-1], np.uint8)
    ones -= 1
    flags[ones] = 1
    packed = np.packbits(flags)
    ends = np.cumsum((lengths + 7) >> 3).tolist()
    coded: list[bytes] = []
    for number, (start, end) in enumerate(pairwise([0, *ends])):
        head = (varint(int(counts[number])), varint(shifts[number]), low[number])
        bitmap = packed[start:end]
        body = bitmap.data if shifts[number] else coded_stream(bitmap)
        coded.append(b"".join((*head, varint(int(lengths[number])), body)))
    return coded


def _pack_low(
    gaps: NDArray[np.int32], counts: Positions, shifts: Sequence[int]
) -> list[memoryview]:
    """Return the low bits of each part's gaps, plane by plane, the lowest first."""
    most = max(shifts)
    low = gaps.astype(np.uint8) if most <= 8 else gaps
    planes = [(low & (1 << at)).astype(np.bool_) for at in range(most)]
    ends = np.cumsum(counts).tolist()
    return pack(
        [plane[start:end] for plane in planes[:shift]]
        for shift, (start, end) in zip(shifts, pairwise([0, *ends]), strict=True)
    )


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


def code_moves(moves: Bits, counts: Positions) -> list[bytes]:
    """Code moves, `counts` in each part; none is 0."""
    edges = np.concatenate([[0], np.cumsum(counts)])
    negative = moves & 1
    bounds = list(pairwise(edges.tolist()))
    signs = pack([negative[start:end]] for start, end in bounds)
    remaining = moves >> 1
    remaining += negative
    index = where(remaining > 1)
    large = np.diff(np.searchsorted(index, edges))
    live = np.flatnonzero(large)
    if not live.size:
        return [b"".join((sign, b"\0")) for sign in signs]
    places = code_positions(
        index - np.repeat(edges[:-1], large), large[live], [counts[number] for number in live]
    )
    levels = _code_magnitudes(remaining[index], large[live])
    tails = [b"\0"] * len(bounds)
    for number, place, level in zip(live.tolist(), places, levels, strict=True):
        tails[number] = place + level
    return [b"".join((sign, tail)) for sign, tail in zip(signs, tails, strict=True)]


def _code_magnitudes(remaining: Bits, counts: Positions) -> list[bytes]:
    """Code magnitudes above 1, `counts` in each part, level by level."""
    low: list[list[Flags]] = [[] for _ in counts]
    more: list[list[Flags]] = [[] for _ in counts]
    edges = np.concatenate([[0], np.cumsum(counts)])
    while remaining.size:
        bits = (remaining & 1).astype(np.bool_)
        remaining >>= 1
        above = remaining > 1
        for number, (start, end) in enumerate(pairwise(edges.tolist())):
            if start < end:
                low[number].append(bits[start:end])
                more[number].append(above[start:end])
        index = where(above)
        remaining = remaining[index]
        edges = np.searchsorted(index, edges)
    lengths = [sum(part.size for part in parts) for parts in more]
    packed = pack([*more, *low])
    return [
        b"".join((varint(length), packed[number], packed[number + len(more)]))
        for number, length in enumerate(lengths)
    ]


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


# -- blocks ----------------------------------------------------------------------------------------


def encode_sparse(changes: Changes, counts: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
    """Code the changes of several blocks, of `sizes` elements, as the bodies of sparse blocks.

    `changes` has `counts` of each, positions counted from its start, and none has no change.
    """
    many = np.array(counts, np.int64)
    positions = code_positions(changes.index, many, sizes)
    moves = code_moves(changes.moves, many)
    return [b"".join(body) for body in zip(positions, moves, strict=True)]


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
