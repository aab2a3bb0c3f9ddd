"""Code one block of a tensor by one of four methods.

skip     the bits of the base
sparse   positions of the changed elements and how far each moved (sparse.py)
dense    how far every element moved, a byte each, larger moves apart
raw      the new bits, in byte planes; needs no base

A move is counted in an order in which neighbouring floats differ by one, so that the typical change of one
unit in the last place is a 1 or a 2. All arithmetic is on bits and wraps: lossless, and additive.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sparse import FEW_FLAGS, Bits, Changes, encode_sparse, where
from .state import FLOATS, CodecError
from .streams import MAX_STREAM, StreamReader, coded_planes, coded_stream

PIECE = 1 << 17
"""Elements that are worked on at once: intermediate arrays stay in the cache and their memory is reused,
where larger ones would go back to the kernel and come again, zeroed, page by page."""

RARE = 8
"""Comparing words of eight bytes is faster where at most one in eight has a change."""

BLOCK = MAX_STREAM
"""Elements of a block. 128 Ki costs 8 % in ratio, 4 Mi gains nothing and streams worse."""
SKIP, SPARSE, DENSE, RAW = 0, 1, 2, 3

SMALL = 4096
"""Elements below which comparing all at once gains nothing."""
DENSE_FROM = 0.68
"""Share of changed elements from which dense is shorter, from measurement."""
ESCAPE = 255
"""A dense move that is this or more stands apart."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a tensor in two versions, at most BLOCK elements."""

    base: Bits
    new: Bits
    dtype: str
    hint: NDArray[Any] | None = None
    """Every position that changed, sorted and unique, and perhaps others; None: all have to be compared."""
    bits: tuple[Bits, Bits] | None = None
    """The bits of both at the hint, where they are known."""


Coded = tuple[int, bytes]
"""Method and body of a block."""


def find(block: Block) -> Changes | Bits:
    """Find the difference by comparing all elements; if most changed, the moves of all (encode_dense())."""
    base, new, dtype = block.base, block.new, block.dtype
    if new.size > SMALL and (few := _find_few(base, new, dtype)) is not None:
        return few
    differ = base != new
    if new.size > SMALL and np.count_nonzero(differ) >= DENSE_FROM * new.size:
        return measure(base, new, dtype)
    index = where(differ)
    return Changes(index, measure(base.take(index), new.take(index), dtype))


def find_known(blocks: Sequence[Block]) -> tuple[Changes, list[int]]:
    """Find the differences of blocks of one dtype at their hints: those of all, and how many are of each."""
    hints = [block.hint for block in blocks if block.hint is not None]
    edges = [0, *accumulate(hint.size for hint in hints)]
    index = np.concatenate(hints)
    known = [block.bits for block in blocks if block.bits is not None]
    if len(known) == len(blocks):
        old, now = map(np.concatenate, zip(*known, strict=True))
    else:
        old, now = (np.empty(index.size, blocks[0].new.dtype) for _ in range(2))
        for block, hint, (start, end) in zip(blocks, hints, pairwise(edges), strict=True):
            block.base.take(hint, out=old[start:end], mode="clip")  # none is clipped
            block.new.take(hint, out=now[start:end], mode="clip")
    differ = old != now
    if not differ.all():
        index, old, now = index[differ], old[differ], now[differ]
        edges = np.concatenate([[0], np.cumsum(differ)])[edges].tolist()
    counts = [end - start for start, end in pairwise(edges)]
    return Changes(index, measure(old, now, blocks[0].dtype)), counts


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


# -- blocks ------------------------------------------------------------------------------------------


def max_body(numel: int, width: int) -> int:
    """Return the most bytes that any method makes of a block; a decoder refuses more."""
    return 3 * numel * width + 64


def encode_raw(new: Bits) -> Coded:
    """Code the bits of a block as they are."""
    return RAW, coded_planes(new)


def encode_blocks(blocks: Sequence[Block]) -> list[Coded]:
    """Code blocks of one dtype; the bytes of each are the same whatever is coded with it."""
    return encode_found(blocks, encode_changes)


def encode_found(blocks: Sequence[Block], encode: "EncodeChanges") -> list[Coded]:
    """Do encode_blocks() with `encode` in place of encode_changes()."""
    sizes = [block.new.size for block in blocks]
    dense: dict[int, Coded] = {}
    if all(block.hint is not None for block in blocks):
        changes, counts = find_known(blocks)
    else:
        changes, counts = _compare(blocks, dense)
    coded = encode(changes, counts, sizes)
    for number, block in enumerate(blocks):
        method, body = coded[number] = dense.get(number, coded[number])
        if (
            len(body) * 2 > block.new.nbytes
        ):  # moves fill their width, or the bits have little entropy
            raw = encode_raw(block.new)
            coded[number] = min((method, body), raw, key=lambda each: len(each[1]))
    return coded


def _compare(blocks: Sequence[Block], dense: dict[int, Coded]) -> tuple[Changes, list[int]]:
    """Do find_known() for blocks of which some have no hint; `dense` gets those of which most changed."""
    parts: list[Changes] = []
    for number, block in enumerate(blocks):
        part = find(block) if block.hint is None else find_known([block])[0]
        if not isinstance(part, Changes):
            dense[number] = DENSE, encode_dense(part)
            part = Changes(np.empty(0, np.int64), part[:0])
        parts.append(part)
    joined = Changes(
        np.concatenate([part.index for part in parts]),
        np.concatenate([part.moves for part in parts]),
    )
    return joined, [part.index.size for part in parts]


def encode_changes(changes: Changes, counts: Sequence[int], sizes: Sequence[int]) -> list[Coded]:
    """Code the changes of blocks of `sizes` elements, `counts` in each: skip, sparse or dense, never raw."""
    coded: list[Coded] = [(SKIP, b"")] * len(sizes)
    sparse: list[int] = []
    parts: list[slice] = []
    at = 0
    for number, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        part = slice(at, at := at + count)
        if count >= DENSE_FROM * size:
            moves = np.zeros(size, changes.moves.dtype)
            moves[changes.index[part]] = changes.moves[part]
            coded[number] = DENSE, encode_dense(moves)
        elif count:
            sparse.append(number)
            parts.append(part)
    if not sparse:
        return coded
    if sum(part.stop - part.start for part in parts) < at:
        changes = Changes(
            np.concatenate([changes.index[part] for part in parts]),
            np.concatenate([changes.moves[part] for part in parts]),
        )
    bodies = encode_sparse(
        changes, [counts[number] for number in sparse], [sizes[number] for number in sparse]
    )
    for number, body in zip(sparse, bodies, strict=True):
        coded[number] = SPARSE, body
    return coded


EncodeChanges = Callable[[Changes, Sequence[int], Sequence[int]], list[Coded]]
"""Does encode_changes()."""


def encode_dense(moves: Bits) -> bytes:
    """Code the moves of all elements, 0 for those that stay, as the body of a dense block."""
    index = where(moves >= ESCAPE)
    short = moves.astype(np.uint8)
    short[index] = ESCAPE
    body = coded_stream(short)
    if not index.size:
        return body
    return body + coded_planes(moves[index] - np.array(ESCAPE, moves.dtype))


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


def _decode_dense(body: memoryview, size: int, dtype: np.dtype[Any]) -> Bits:
    reader = StreamReader(body)
    short = reader.stream(size)
    moves = short.astype(dtype)
    index = where(short == ESCAPE)
    if index.size:
        moves[index] += reader.planes(index.size, dtype)
    reader.finish()
    return moves
