"""One block of a tensor, coded by one of four methods.

skip     the bits of the base
sparse   positions of the changed elements and how far each moved
dense    how far every element moved
raw      the new bits, in byte planes; needs no base
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CodecError
from .moves import Bits, Changes, apply, find, find_few, measure, move, where
from .places import read_places, write_places
from .streams import MAX_STREAM, StreamReader, StreamWriter
from .values import read_moves, read_values, write_moves, write_values

BLOCK = MAX_STREAM
"""Elements of a block. 128 Ki costs 8 % in ratio, 4 Mi gains nothing and streams worse."""
SKIP, SPARSE, DENSE, RAW = 0, 1, 2, 3

SMALL = 4096
"""Elements up to which sparse and dense are both tried: there the fixed costs decide."""
DENSE_FROM = 0.6
"""Share of changed elements from which dense is shorter, from measurement."""
FEW = 1 << 16
"""Changes below which the work on them is so many short calls that two threads only wait for each
other's interpreter lock: half the speed of one thread after the other."""
RAW_GAIN = 8
"""Raw must save one in so many bytes: such a block cannot be merged into another delta."""


Turn = AbstractContextManager[Any]
"""Held while working on few changes: one lock for all threads of a payload."""
ALONE: Turn = nullcontext()


def max_body(numel: int, width: int) -> int:
    """More than any method makes of a block: every move an escape, twice, and room for the lengths."""
    return 3 * numel * width + 64


def encode_block(
    base: Bits | None,
    new: Bits,
    dtype: str,
    hint: NDArray[np.int64] | None = None,
    turn: Turn = ALONE,
) -> tuple[int, bytes]:
    """(method, body) that turns `base` into `new`; without a base always raw.

    Both are flat arrays of bits, at most BLOCK elements long. `hint` holds every position that changed,
    sorted, and perhaps others; without it all are compared.
    """
    if base is None:
        return RAW, _raw(new)
    method, body = _encode(base, new, dtype, hint, turn)
    if is_large(body, new) or (method == DENSE and new.size <= SMALL):
        raw = _raw(new)
        if len(raw) * RAW_GAIN < len(body) * (RAW_GAIN - 1):
            return RAW, raw
    return method, body


def encode_changes(changes: Changes, size: int, turn: Turn = ALONE) -> tuple[int, bytes]:
    """(method, body) of `changes` in a block of `size` elements: skip, sparse or dense, never raw."""
    if not changes.index.size:
        return SKIP, b""
    share = changes.index.size / size
    if share < DENSE_FROM and (size > SMALL or share < DENSE_FROM / 2):
        with _turn(changes.index.size, turn):
            return SPARSE, _sparse(changes, size)
    moves = np.zeros(size, changes.moves.dtype)
    moves[changes.index] = changes.moves
    dense = encode_dense(moves)
    if share == 1 or (size > SMALL and not is_large(dense, moves)):
        return DENSE, dense
    sparse = _sparse(changes, size)
    return (SPARSE, sparse) if len(sparse) < len(dense) else (DENSE, dense)


def decode_changes(
    method: int, body: memoryview, size: int, dtype: np.dtype[Any], turn: Turn = ALONE
) -> Changes:
    """The changes in a block of `size` elements of bits `dtype`; CodecError for raw, which names no base."""
    if method == SKIP:
        return Changes(np.empty(0, np.int64), np.empty(0, dtype))
    if method == SPARSE:
        with _turn(len(body), turn):
            return _read_sparse(body, size, dtype)
    if method == DENSE:
        moves = _read_dense(body, size, dtype)
        index = where(moves != 0)
        return Changes(index, moves[index])
    raise CodecError(f"method {method} does not say what changed")


def decode_block(
    method: int,
    body: memoryview,
    base: Bits | None,
    out: Bits,
    dtype: str,
    turn: Turn = ALONE,
) -> NDArray[np.int64] | None:
    """Write the block into `out`, reading `base` where the method needs it; the changed positions.

    None where any may have changed. Raises CodecError.
    """
    if method in (SKIP, SPARSE) and base is not None:
        changes = decode_changes(method, body, out.size, out.dtype, turn)
        apply(base, changes, dtype, out)
        return changes.index
    if method == RAW:
        out[:] = _read_raw(body, out.size, out.dtype)
    elif base is None:
        raise CodecError(f"method {method} needs a base, a full state has none")
    elif method == DENSE:
        out[:] = move(base, _read_dense(body, out.size, out.dtype), dtype)
    else:
        raise CodecError(f"method {method} is unknown, update this node")
    return None if base is None or out.size > SMALL else np.flatnonzero(out != base)


def _turn(work: int, turn: Turn) -> Turn:
    return turn if work < FEW else ALONE


def compare(base: Bits, new: Bits, dtype: str) -> Changes | Bits:
    """What changed in a block; the moves of all elements, as for encode_dense(), where most did."""
    changes = find_few(base, new, dtype)
    if changes is not None:
        return changes
    differ = base != new
    if np.count_nonzero(differ) >= DENSE_FROM * new.size:
        return measure(base, new, dtype)
    index = where(differ)
    return Changes(index, measure(base.take(index), new.take(index), dtype))


def _encode(
    base: Bits, new: Bits, dtype: str, hint: NDArray[np.int64] | None, turn: Turn
) -> tuple[int, bytes]:
    """As encode_changes(), but a block that is dense needs no list of its changes."""
    if hint is None and new.size > SMALL:
        found = compare(base, new, dtype)
        if isinstance(found, Changes):
            return encode_changes(found, new.size, turn)
        body = encode_dense(found)
        if not is_large(body, new):
            return DENSE, body
    return encode_changes(find(base, new, dtype, hint), new.size, turn)


def is_large(body: bytes, bits: Bits) -> bool:
    """Whether another method may do better: moves that fill their width, or bits that say little."""
    return len(body) * 2 > bits.nbytes


def _raw(new: Bits) -> bytes:
    writer = StreamWriter()
    writer.planes(new)
    return writer.finish()


def _read_raw(body: memoryview, size: int, dtype: np.dtype[Any]) -> Bits:
    reader = StreamReader(body)
    new = reader.planes(size, dtype)
    reader.finish()
    return new


def encode_dense(moves: Bits) -> bytes:
    """The body of a dense block: `moves` of all elements, those that stay too."""
    writer = StreamWriter()
    write_values(writer, moves)
    return writer.finish()


def _read_dense(body: memoryview, size: int, dtype: np.dtype[Any]) -> Bits:
    reader = StreamReader(body)
    moves = read_values(reader, size, dtype)
    reader.finish()
    return moves


def _sparse(changes: Changes, size: int) -> bytes:
    writer = StreamWriter()
    write_places(writer, changes.index, size)
    write_moves(writer, changes.moves)
    return writer.finish()


def _read_sparse(body: memoryview, size: int, dtype: np.dtype[Any]) -> Changes:
    reader = StreamReader(body)
    index = read_places(reader, size)
    if not index.size:
        raise CodecError("a sparse block without a change")
    moves = read_moves(reader, index.size, dtype)
    reader.finish()
    return Changes(index, moves)
