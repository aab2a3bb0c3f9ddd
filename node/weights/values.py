"""Moves as streams: mostly 1 and 2, a few thousands now and then.

gamma    sign, then the bits of the magnitude from the lowest up, each after a bit that says whether
         there are more (P. Elias, 1975), level by level: like stands with like. No tables, so a handful
         of moves costs no more than it should.
fields   four or eight bits each, larger ones as escapes; what Huffman coding likes, for many moves
planes   byte planes, for moves that fill their width
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CodecError
from .moves import Bits, where
from .places import read_places, write_places
from .streams import SHORTEST, Bytes, Flags, StreamReader, StreamWriter

PLANES, GAMMA, NIBBLES, BYTES = range(4)

SAMPLE = 1 << 12
"""Moves looked at to choose among the codings."""
SYMBOL, ESCAPED, WASTE = 5, 16, 1.03
"""Bits of a symbol in a Huffman table, of an escaped move, and what codes of whole bits waste, about."""


def write_moves(writer: StreamWriter, moves: Bits) -> None:
    """Append moves none of which is 0."""
    sample = _sample(moves)
    if _gamma_bits(sample) <= _field_bits(sample, moves.size):
        writer.number(GAMMA)
        _write_gamma(writer, moves)
    else:
        write_values(writer, moves)


def read_moves(reader: StreamReader, count: int, dtype: np.dtype[Any]) -> Bits:
    """The next `count` moves, none of them 0. Raises CodecError."""
    coding = reader.number(BYTES, "as a coding of moves")
    moves = (
        _read_gamma(reader, count, dtype)
        if coding == GAMMA
        else _read(reader, coding, count, dtype)
    )
    if not moves.all():
        raise CodecError("a changed element does not move")
    return moves


def write_values(writer: StreamWriter, values: Bits) -> None:
    """Append unsigned values, 0 included."""
    sample = _sample(values)
    if np.count_nonzero(sample < 15) * 5 > sample.size * 4:
        writer.number(NIBBLES)
        _write_fields(writer, values, 4)
    elif np.count_nonzero(sample < 255) * 2 > sample.size:
        writer.number(BYTES)
        _write_fields(writer, values, 8)
    else:
        writer.number(PLANES)
        writer.planes(values)


def read_values(reader: StreamReader, count: int, dtype: np.dtype[Any]) -> Bits:
    """The next `count` values that write_values() wrote. Raises CodecError."""
    return _read(reader, reader.number(BYTES, "as a coding of values"), count, dtype)


def _read(reader: StreamReader, coding: int, count: int, dtype: np.dtype[Any]) -> Bits:
    if coding == PLANES:
        return reader.planes(count, dtype)
    if coding == GAMMA:
        raise CodecError("this coding cannot hold values of 0")
    return _read_fields(reader, 4 if coding == NIBBLES else 8, count, dtype)


def _gamma_bits(sample: Bits) -> float:
    """What gamma makes of moves like these, about."""
    size = (sample >> 1) + (sample & 1)
    above = np.frexp(size.astype(np.float64))[1] - 1
    some = np.count_nonzero(above)
    return sample.size + _entropy(np.array([some, sample.size - some])) + 2 * float(above.sum())


def _field_bits(sample: Bits, count: int) -> float:
    """What fields make of moves like these, about, with a share of the tables for all `count`."""
    if count < 2 * SHORTEST:
        return 8.0 * sample.size
    counts = np.bincount(np.minimum(sample, 255).astype(np.uint8), minlength=256)
    tables = SYMBOL * np.count_nonzero(counts) * sample.size / count
    return WASTE * _entropy(counts) + ESCAPED * int(counts[255]) + tables


def _entropy(counts: NDArray[np.int64]) -> float:
    """Bits of symbols that come so often, if each is coded by its frequency."""
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def _sample(values: Bits) -> Bits:
    return values[:: max(1, values.size // SAMPLE)]


# -- gamma -----------------------------------------------------------------------------------------


def _write_gamma(writer: StreamWriter, moves: Bits) -> None:
    negative = moves & 1
    writer.bits(negative != 0)
    left = (moves >> 1) + negative
    index = where(left > 1)
    write_places(writer, index, moves.size)
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
    writer.bitmap(flags)
    writer.bits(np.concatenate(low))


def _read_gamma(reader: StreamReader, count: int, dtype: np.dtype[Any]) -> Bits:
    negative = reader.bits(count)
    index = read_places(reader, count)
    size = np.ones(count, dtype)
    if index.size:
        size[index] = _read_sizes(reader, index.size, dtype)
    size <<= 1
    size -= negative
    return size


def _read_sizes(reader: StreamReader, count: int, dtype: np.dtype[Any]) -> Bits:
    """`count` magnitudes above 1."""
    width = 8 * dtype.itemsize
    flags = reader.bitmap(reader.number(count * width, "bits of magnitudes"))
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
    sizes = np.empty(0, dtype)
    for level in reversed(levels):
        at -= level.size
        above = sizes
        sizes = np.ones(level.size, dtype)
        sizes[where(level)] = above
        sizes <<= 1
        sizes |= low[at : at + level.size]
    return sizes


# -- fields ----------------------------------------------------------------------------------------


def _write_fields(writer: StreamWriter, values: Bits, width: int) -> None:
    escape = (1 << width) - 1
    index = where(values >= escape)
    fields = values.astype(np.uint8)
    fields[index] = escape
    writer.stream(_paired(fields) if width == 4 else fields)
    if not index.size:
        return
    large = values[index] - np.array(escape, values.dtype)
    if width == 4:
        _write_fields(writer, large, 8)
    else:
        writer.planes(large)


def _read_fields(reader: StreamReader, width: int, count: int, dtype: np.dtype[Any]) -> Bits:
    escape = (1 << width) - 1
    if width == 4:
        fields = _unpaired(reader.stream((count + 1) // 2), count)
    else:
        fields = reader.stream(count)
    values = fields.astype(dtype)
    index = where(fields == escape)
    if index.size:
        large = (
            _read_fields(reader, 8, index.size, dtype)
            if width == 4
            else reader.planes(index.size, dtype)
        )
        values[index] += large
    return values


def _paired(fields: Bytes) -> Bytes:
    """Two fields of four bits to a byte, the first in the low half."""
    if fields.size % 2:
        fields = np.append(fields, np.uint8(0))
    pairs = fields.view("<u2")
    return (pairs | pairs >> 4).astype(np.uint8)


def _unpaired(pairs: Bytes, count: int) -> Bytes:
    wide = pairs.astype("<u2")
    return ((wide | wide << 4) & 0x0F0F).view(np.uint8)[:count]
