"""One block of a tensor, coded by the smallest of four methods.

    skip     the bits of the base
    sparse   positions of the changed elements (gaps) and how far each moved
    dense    how far every element moved, in byte planes
    raw      the new bits, in byte planes; needs no base

"How far" is counted in an order in which neighbouring floats differ by one, so that the typical
change of one unit in the last place is a 1 or a 2. All arithmetic is on bits and wraps: lossless.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CodecError
from .streams import MAX_STREAM, StreamReader, StreamWriter

BLOCK = MAX_STREAM
"""Elements of a block. 128 Ki costs 8 % in ratio, 4 Mi gains nothing and streams worse."""
SKIP, SPARSE, DENSE, RAW = 0, 1, 2, 3

SMALL = 4096
"""Elements below which every method is tried: there the fixed costs decide."""
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
GAP = np.dtype("<u4")

Bits = NDArray[Any]


def max_body(numel: int, width: int) -> int:
    """More than any method makes of a block: positions and moves with every one an escape."""
    return 2 * numel * width + 64


def encode_block(base: Bits | None, new: Bits, dtype: str) -> tuple[int, bytes]:
    """(method, body) that turns `base` into `new`; without a base always raw.

    Both are flat arrays of bits, at most BLOCK elements long.
    """
    if base is None:
        return RAW, _raw(new)
    index = np.flatnonzero(base != new)
    if not index.size:
        return SKIP, b""
    return _smallest(base, new, dtype, index)


def decode_block(method: int, body: memoryview, base: Bits | None, out: Bits, dtype: str) -> None:
    """Write the block into `out`, reading `base` where the method needs it. Raises CodecError."""
    reader = StreamReader(body)
    if method == RAW:
        out[:] = reader.planes(out.size, out.itemsize, out.dtype)
    elif base is None:
        raise CodecError(f"method {method} needs a base, a full state has none")
    elif method == SKIP:
        out[:] = base
    elif method == SPARSE:
        _apply_sparse(reader, base, out, dtype)
    elif method == DENSE:
        out[:] = _moved(base, reader.planes(out.size, out.itemsize, out.dtype), dtype)
    else:
        raise CodecError(f"unknown method {method}")
    reader.finish()


def _smallest(base: Bits, new: Bits, dtype: str, index: NDArray[np.intp]) -> tuple[int, bytes]:
    """Try the methods that can win at this density, keep the first of the shortest."""
    makers: dict[int, Callable[[], bytes]] = {
        SPARSE: lambda: _sparse(base, new, dtype, index),
        DENSE: lambda: _dense(base, new, dtype),
        RAW: lambda: _raw(new),
    }
    tries = [(method, makers[method]()) for method in _candidates(index.size, new.size)]
    if tries[-1][0] == DENSE and len(tries[-1][1]) * 2 > new.nbytes:
        tries.append((RAW, makers[RAW]()))
    return min(tries, key=lambda coded: len(coded[1]))


def _candidates(changed: int, numel: int) -> list[int]:
    """Deterministic, from measurement: sparse is shorter below 0.6, dense above 0.7."""
    if numel <= SMALL:
        return [SPARSE, DENSE, RAW]
    if changed * 5 <= numel * 2:
        return [SPARSE]
    return [DENSE] if changed * 4 >= numel * 3 else [SPARSE, DENSE]


def _raw(new: Bits) -> bytes:
    writer = StreamWriter()
    writer.planes(new, new.itemsize)
    return writer.finish()


def _dense(base: Bits, new: Bits, dtype: str) -> bytes:
    writer = StreamWriter()
    writer.planes(_moves(base, new, dtype), new.itemsize)
    return writer.finish()


def _sparse(base: Bits, new: Bits, dtype: str, index: NDArray[np.intp]) -> bytes:
    writer = StreamWriter()
    writer.uint32(index.size)
    gaps = np.diff(index, prepend=-1) - 1
    writer.small(gaps.astype(GAP), _gap_width(new.size))
    writer.small(_moves(base[index], new[index], dtype), new.itemsize)
    return writer.finish()


def _apply_sparse(reader: StreamReader, base: Bits, out: Bits, dtype: str) -> None:
    count = reader.uint32()
    if not 0 < count <= out.size:
        raise CodecError(f"{count} changed elements in a block of {out.size}")
    gaps = reader.small(count, _gap_width(out.size), GAP)
    # Gaps are unsigned, so positions strictly increase; only the last one can be out of range.
    index = np.cumsum(gaps, dtype=np.int64)
    index += np.arange(count)
    if index[-1] >= out.size:
        raise CodecError(f"changed element {int(index[-1])} in a block of {out.size}")
    moves = reader.small(count, out.itemsize, out.dtype)
    out[:] = base
    out[index] = _moved(base[index], moves, dtype)


def _gap_width(numel: int) -> int:
    """Bytes that hold any gap in a block."""
    return max(1, ((numel - 1).bit_length() + 7) // 8)


def _moves(base: Bits, new: Bits, dtype: str) -> Bits:
    """Zig-zag of the wrapped difference: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    moved = _order(new, dtype) - _order(base, dtype)
    return ((moved << 1) ^ (moved >> (8 * moved.itemsize - 1))).view(new.dtype)


def _moved(base: Bits, moves: Bits, dtype: str) -> Bits:
    """Inverse of _moves()."""
    moved = (moves >> 1) ^ -(moves & 1)
    ordered = _order(base, dtype)
    ordered = ordered + moved.view(ordered.dtype)
    return _order(ordered, dtype).view(base.dtype)


def _order(bits: Bits, dtype: str) -> Bits:
    """Bits as signed integers that compare like the floats they hold; its own inverse.

    A negative float has sign-magnitude bits, so all but the sign are flipped. Integers stay.
    """
    signed = bits.view(f"<i{bits.itemsize}")
    if dtype not in FLOATS:
        return signed
    width = 8 * bits.itemsize
    return signed ^ ((signed >> (width - 1)) & np.array((1 << (width - 1)) - 1, signed.dtype))
