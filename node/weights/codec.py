"""Encode a policy version without loss as a full state, or as the difference to a base; and decode it.

Decoding any bytes ends in a state laid out as the manifest says or in CodecError, never in another error.
Equal input gives equal bytes, with any number of threads, with or without a hint.
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from ...protocol.manifests import TensorInfo
from .blocks import (
    SKIP,
    SPARSE,
    Block,
    Coded,
    decode_block,
    encode_blocks,
    encode_raw,
    move,
)
from .payload import (
    DELTA,
    FULL,
    Layout,
    Payload,
    PayloadReader,
    blocks_of,
    check_layout,
    framed,
    header,
    layout_of,
    ordered,
    together,
)
from .sparse import Bits, Positions, decode_changes
from .state import BITS, Changed, CodecError, State, Tensor, numel
from .state_history import StepChanges

CODEC = "planes/3"
"""Goes into Artifact.codec. Any change of the bytes is a new name."""

HUGE_PAGE = 1 << 21
"""Alignment in bytes of large tensors, a huge page: with it writing a tensor causes a hundredth of the page
faults, which take longer than decoding a few changes. The memory before it is never touched and takes none."""

MANY_CHANGED = 8
"""A tensor with more than one changed element in this many counts as changed everywhere."""

LARGE = 4 * HUGE_PAGE
"""Bytes from which a tensor is aligned to huge pages."""

KEPT = 1 << 16
"""Bytes from which the memory of a discarded tensor is kept for the next version: new pages are zeroed first,
which takes a quarter of the time of an update. The C library keeps that of smaller ones."""
_idle: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
"""Memory of discarded tensors, by size; a node holds at most that of two versions at a time."""

Done = Callable[[str, Tensor], None]
"""Called with each tensor, and its name, once it is complete, in the thread that decoded it."""
EncodeBlocks = Callable[[Sequence[Block]], list[Coded]]
"""Does encode_blocks()."""
RARELY = 32
"""Of elements that have to be compared one in so many is assumed to have changed."""
NONE = np.empty(0, np.int64)

_Part = tuple[slice, int, memoryview]
"""The elements of a block, its method and body."""


def encode_full(state: State, *, threads: int = 1) -> Iterator[bytes]:
    """Encode `state` on its own, block by block. Equal states give equal bytes."""
    jobs = (
        (state[name].data[part],)
        for name, _, shape in layout_of(state)
        for part in blocks_of(shape)
    )
    yield header(FULL, layout_of(state))
    for method, body in ordered(encode_raw, jobs, threads):
        yield framed(method, body)


def encode_delta(
    base: State,
    new: State,
    *,
    threads: int = 1,
    changed: Changed | None = None,
    encode: EncodeBlocks = encode_blocks,
) -> Iterator[bytes]:
    """Encode the difference from `base` to `new`, block by block, by `encode` for groups of blocks.

    With `changed` only those positions are compared: it must name every change, as sorted unique
    positions, and may name more; the bytes do not depend on it. Raises CodecError at once if the two
    states differ in names, types or shapes: publish a snapshot then.
    """
    layout = layout_of(base)
    if layout != layout_of(new):
        raise CodecError("base and new state differ in names, types or shapes: publish a snapshot")
    blocks = (
        block for name, _, _ in layout for block in _blocks(name, base[name], new[name], changed)
    )
    return _encode_delta(layout, blocks, threads, encode)


def decode_full(
    payload: Payload, tensors: Sequence[TensorInfo], *, threads: int = 1, done: Done | None = None
) -> State:
    """Decode the state in `payload`, laid out as `tensors`; digests are not checked here.

    `done` is called with every tensor with elements as soon as it is written. Raises CodecError. Allocates
    the size of `tensors` and one block, for any payload.
    """
    return _decode(FULL, None, payload, check_layout(tensors), threads, done)[0]


def apply_delta(
    base: State,
    payload: Payload,
    tensors: Sequence[TensorInfo],
    *,
    threads: int = 1,
    done: Done | None = None,
) -> tuple[State, Changed]:
    """Apply `payload` to `base`: the new state, and where it changed; digests are not checked here.

    `base` is never written to. Tensors without a change are the very objects of `base` and absent
    from the second result, the others are new, and `done` is called with each as soon as it is written.
    Raises CodecError, also when `base` is not laid out as `tensors`.
    """
    layout = check_layout(tensors)
    if layout_of(base) != layout:
        raise CodecError("the held state differs from the manifest in names, types or shapes")
    return _decode(DELTA, base, payload, layout, threads, done)


def _encode_delta(
    layout: Sequence[Layout], blocks: Iterable[Block], threads: int, encode: EncodeBlocks
) -> Iterator[bytes]:
    yield header(DELTA, layout)
    jobs = (
        (group,)
        for _, alike in groupby(blocks, lambda block: block.dtype)
        for group in together(alike, _weigh_difference)
    )
    for coded in ordered(encode, jobs, threads):
        for method, body in coded:
            yield framed(method, body)


def _blocks(name: str, base: Tensor, new: Tensor, changed: Changed | None) -> Iterator[Block]:
    """Yield the blocks of a tensor, with what is known of where they changed, counted from their starts."""
    parts = list(blocks_of(new.shape))
    bits: Sequence[Bits] = ()
    if isinstance(changed, StepChanges):
        positions, *bits = changed.edit(name)
    else:
        positions = None if changed is None else changed.get(name, NONE)
    if positions is None:
        for part in parts:
            yield Block(base.data[part], new.data[part], new.dtype)
        return
    ends = [part.stop for part in parts]
    edges = [0, *np.searchsorted(positions, ends).tolist()] if ends[1:] else [0, positions.size]
    for part, (low, high) in zip(parts, pairwise(edges), strict=False):  # an empty tensor has none
        hint = positions[low:high] - part.start if part.start else positions[low:high]
        known = (bits[0][low:high], bits[1][low:high]) if bits else None
        yield Block(base.data[part], new.data[part], new.dtype, hint, known)


def _weigh_difference(block: Block) -> tuple[int, int]:
    changes = block.new.size // RARELY if block.hint is None else block.hint.size
    return changes, block.new.size


def _decode(
    kind: int,
    base: State | None,
    payload: Payload,
    layout: Sequence[Layout],
    threads: int,
    done: Done | None,
) -> tuple[State, Changed]:
    reader = PayloadReader(payload)
    reader.header(kind, layout)
    state: dict[str, Tensor] = {}
    changed: dict[str, Positions | None] = {}
    tensors = _coded_tensors(base, reader, layout, state)
    jobs = ((group, done) for group in together(tensors, _weigh_tensor))
    for group in ordered(_decode_tensors, jobs, threads):
        changed |= group
    reader.finish()
    return state, changed


@dataclass
class _CodedTensor:
    """A tensor to decode."""

    name: str
    base: Tensor | None
    out: Tensor
    sparse: list[_Part]
    others: list[_Part]
    """Blocks of other methods."""
    changed: int = 0
    """Number of changes in sparse blocks so far, and their positions, unless they are many."""
    positions: list[Positions] = field(default_factory=list[Positions])

    def write(self, positions: Positions, bits: Bits) -> None:
        """Write changed elements into a copy of the base."""
        self.out.data[positions] = bits
        self.changed += positions.size
        self.positions.append(positions)
        if self.changed * MANY_CHANGED > self.out.data.size:
            self.positions.clear()


_SparseBlock = tuple[_CodedTensor, slice, memoryview]
"""A tensor, the part of it that a sparse block changes, and the block's body."""


def _coded_tensors(
    base: State | None,
    reader: PayloadReader,
    layout: Sequence[Layout],
    state: dict[str, Tensor],
) -> Iterator[_CodedTensor]:
    """Yield the tensors to decode; put those, and unchanged ones, into `state`.

    A tensor is allocated once all its blocks have been read, and not at all if it is unchanged.
    """
    for name, dtype, shape in layout:
        old = None if base is None else base[name]
        blocks = [(part, *reader.block(part, dtype)) for part in blocks_of(shape)]
        if old is not None and all(method == SKIP for _, method, _ in blocks):
            state[name] = old
            continue
        state[name] = Tensor(dtype, shape, _allocate(name, dtype, shape))
        sparse = [block for block in blocks if old is not None and block[1] == SPARSE]
        others = [block for block in blocks if old is None or block[1] != SPARSE]
        yield _CodedTensor(name, old, state[name], sparse, others)


def _weigh_tensor(tensor: _CodedTensor) -> tuple[int, int]:
    blocks = (*tensor.sparse, *tensor.others)
    return sum(len(body) for _, _, body in blocks), tensor.out.data.size


def _weigh_block(block: _SparseBlock) -> tuple[int, int]:
    _, part, body = block
    return len(body), part.stop - part.start


def _decode_tensors(
    group: Sequence[_CodedTensor], done: Done | None
) -> dict[str, Positions | None]:
    """Fill tensors from their bases and blocks, and call `done` with each.

    Returns the positions that changed by name, None for many of them.
    """
    for tensor in group:
        copied = tensor.sparse or any(method == SKIP for _, method, _ in tensor.others)
        if copied and tensor.base is not None:
            np.copyto(tensor.out.data, tensor.base.data)
    blocks = ((tensor, part, body) for tensor in group for part, _, body in tensor.sparse)
    for dtype, alike in groupby(blocks, lambda block: block[0].out.dtype):
        for batch in together(alike, _weigh_block):
            _decode_sparse(batch, dtype)
    changed: dict[str, Positions | None] = {}
    for tensor in group:
        _decode_others(tensor)
        if done is not None:
            done(tensor.name, tensor.out)
        known = tensor.positions
        if not known or any(method != SKIP for _, method, _ in tensor.others):
            changed[tensor.name] = None
        else:
            changed[tensor.name] = known[0] if len(known) == 1 else np.concatenate(known)
    return changed


def _decode_sparse(blocks: Sequence[_SparseBlock], dtype: str) -> None:
    """Decode sparse blocks together, and write them over copies of their bases."""
    try:
        changes, parts = decode_changes([(body, part) for _, part, body in blocks], BITS[dtype])
    except CodecError:
        for tensor, part, body in blocks:  # find out whose it is
            with _of_tensor(tensor.name):
                decode_changes([(body, part)], BITS[dtype])
        raise
    bits = np.empty_like(changes.moves)
    for (tensor, _, _), part in zip(blocks, parts, strict=True):
        tensor.out.data.take(changes.index[part], out=bits[part], mode="clip")  # none is clipped
    bits = move(bits, changes.moves, dtype)
    for (tensor, _, _), part in zip(blocks, parts, strict=True):
        tensor.write(changes.index[part], bits[part])


def _decode_others(tensor: _CodedTensor) -> None:
    for part, method, body in tensor.others:
        if tensor.base is None or method != SKIP:
            old = None if tensor.base is None else tensor.base.data[part]
            with _of_tensor(tensor.name):
                decode_block(method, body, old, tensor.out.data[part], tensor.out.dtype)


@contextlib.contextmanager
def _of_tensor(name: str) -> Generator[None]:
    """Name the tensor in a CodecError."""
    try:
        yield
    except CodecError as error:
        raise CodecError(f"{name}: {error}") from error


def _allocate(name: str, dtype: str, shape: tuple[int, ...]) -> Bits:
    """Allocate elements to be written; of a large tensor in memory of one that is gone, if there is any."""
    size = numel(shape) * BITS[dtype].itemsize
    try:
        if size < KEPT:
            return np.empty(size, np.uint8).view(BITS[dtype])
        memory = _pages(size)
    except MemoryError as error:
        _idle.clear()
        raise CodecError(f"{name}: {dtype} {list(shape)} does not fit into memory") from error
    # an array of its own, which lives as long as any view of it
    array = np.frombuffer(memory.data, np.uint8)
    weakref.finalize(array, _idle[size].append, memory).atexit = False
    return array.view(BITS[dtype])


def _pages(size: int) -> NDArray[np.uint8]:
    """Return `size` bytes; many begin at a huge page."""
    try:
        return _idle[size].pop()
    except IndexError:
        if size < LARGE:
            return np.empty(size, np.uint8)
        memory = np.empty(size + HUGE_PAGE, np.uint8)
        start = -memory.ctypes.data % HUGE_PAGE
        return memory[start : start + size]
