"""One block of a tensor, coded by the smallest of four methods.

skip     the bits of the base
sparse   positions of the changed elements (gaps) and how far each moved
dense    how far every element moved, in byte planes
raw      the new bits, in byte planes; needs no base
"""

from typing import Any

import numpy as np

from .errors import CodecError
from .moves import Bits, Changes, apply, find
from .streams import MAX_STREAM, StreamReader, StreamWriter

BLOCK = MAX_STREAM
"""Elements of a block. 128 Ki costs 8 % in ratio, 4 Mi gains nothing and streams worse."""
SKIP, SPARSE, DENSE, RAW = 0, 1, 2, 3

SMALL = 4096
"""Elements below which every method is tried: there the fixed costs decide."""
GAP = np.dtype("<u4")


def max_body(numel: int, width: int) -> int:
    """More than any method makes of a block: positions and moves with every one an escape."""
    return 2 * numel * width + 64


def encode_block(base: Bits | None, new: Bits, dtype: str) -> tuple[int, bytes]:
    """(method, body) that turns `base` into `new`; without a base always raw.

    Both are flat arrays of bits, at most BLOCK elements long.
    """
    if base is None:
        return RAW, _raw(new)
    method, body = encode_changes(find(base, new, dtype), new.size)
    if method == DENSE and len(body) * 2 > new.nbytes or new.size <= SMALL:
        raw = _raw(new)
        if len(raw) < len(body):
            return RAW, raw
    return method, body


def encode_changes(changes: Changes, size: int) -> tuple[int, bytes]:
    """(method, body) of `changes` in a block of `size` elements: skip, sparse or dense, never raw."""
    if not changes.index.size:
        return SKIP, b""
    makers = {SPARSE: _sparse, DENSE: _dense}
    tries = [(method, makers[method](changes, size)) for method in _candidates(changes, size)]
    return min(tries, key=lambda coded: len(coded[1]))


def decode_changes(method: int, body: memoryview, size: int, dtype: np.dtype[Any]) -> Changes:
    """The changes in a block of `size` elements of bits `dtype`; CodecError for raw, which names no base."""
    reader = StreamReader(body)
    if method == SKIP:
        changes = Changes(np.empty(0, np.int64), np.empty(0, dtype))
    elif method == SPARSE:
        changes = _read_sparse(reader, size, dtype)
    elif method == DENSE:
        moves = reader.planes(size, dtype.itemsize, dtype)
        index = np.flatnonzero(moves)
        changes = Changes(index, moves[index])
    else:
        raise CodecError(f"method {method} does not say what changed")
    reader.finish()
    return changes


def decode_block(method: int, body: memoryview, base: Bits | None, out: Bits, dtype: str) -> None:
    """Write the block into `out`, reading `base` where the method needs it. Raises CodecError."""
    if method == RAW:
        reader = StreamReader(body)
        out[:] = reader.planes(out.size, out.itemsize, out.dtype)
        reader.finish()
    elif base is None:
        raise CodecError(f"method {method} needs a base, a full state has none")
    else:
        apply(base, decode_changes(method, body, out.size, out.dtype), dtype, out)


def _candidates(changes: Changes, size: int) -> list[int]:
    """Deterministic, from measurement: sparse is shorter below 0.6, dense above 0.7."""
    changed = changes.index.size
    if size <= SMALL:
        return [SPARSE, DENSE]
    if changed * 5 <= size * 2:
        return [SPARSE]
    return [DENSE] if changed * 4 >= size * 3 else [SPARSE, DENSE]


def _raw(new: Bits) -> bytes:
    writer = StreamWriter()
    writer.planes(new, new.itemsize)
    return writer.finish()


def _dense(changes: Changes, size: int) -> bytes:
    moves = np.zeros(size, changes.moves.dtype)
    moves[changes.index] = changes.moves
    writer = StreamWriter()
    writer.planes(moves, moves.itemsize)
    return writer.finish()


def _sparse(changes: Changes, size: int) -> bytes:
    writer = StreamWriter()
    writer.uint32(changes.index.size)
    gaps = np.diff(changes.index, prepend=-1) - 1
    writer.small(gaps.astype(GAP), _gap_width(size))
    writer.small(changes.moves, changes.moves.itemsize)
    return writer.finish()


def _read_sparse(reader: StreamReader, size: int, dtype: np.dtype[Any]) -> Changes:
    count = reader.uint32()
    if not 0 < count <= size:
        raise CodecError(f"{count} changed elements in a block of {size}")
    gaps = reader.small(count, _gap_width(size), GAP)
    # Gaps are unsigned, so positions strictly increase; only the last one can be out of range.
    index = np.cumsum(gaps, dtype=np.int64)
    index += np.arange(count)
    if index[-1] >= size:
        raise CodecError(f"changed element {int(index[-1])} in a block of {size}")
    return Changes(index, reader.small(count, dtype.itemsize, dtype))


def _gap_width(numel: int) -> int:
    """Bytes that hold any gap in a block."""
    return max(1, ((numel - 1).bit_length() + 7) // 8)
