"""Encode a policy version without loss as a full state, or as the difference to a base; and decode it.

Decoding any bytes ends in a state laid out as the manifest says or in CodecError, never in another error.
Equal input gives equal bytes, with any number of threads, with or without a hint.
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from ...protocol.manifests import TensorInfo
from .blocks import (
    ALONE,
    FEW_CHANGES,
    SKIP,
    SPARSE,
    Bits,
    Changes,
    Positions,
    decode_block,
    decode_changes,
    encode_block,
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
)
from .state import BITS, Changed, CodecError, State, Tensor, numel

CODEC = "planes/3"
"""Goes into Artifact.codec. Any change of the bytes is a new name."""

HUGE_PAGE = 1 << 21
"""Alignment in bytes of large tensors, a huge page: with it writing a tensor causes a hundredth of the page
faults, which take longer than decoding a few changes. The memory before it is never touched and takes none."""

MANY_CHANGED = 8
"""A tensor with more than one changed element in this many counts as changed everywhere."""

LARGE = 4 * HUGE_PAGE
"""Bytes from which the memory of a discarded tensor is kept for the next version: new pages are zeroed first,
which takes a quarter of the time of an update."""
_idle: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
"""Memory of discarded tensors, by size; a node holds at most that of two versions at a time."""

NONE = np.empty(0, np.int64)
"""No positions."""

Done = Callable[[str, Tensor], None]
"""Called with each tensor, and its name, once it is complete, in the thread that decoded it."""
Coded = tuple[slice, int, memoryview]
"""The elements of a block, its method and body."""


def encode_full(state: State, *, threads: int = 1) -> Iterator[bytes]:
    """Encode `state` on its own, block by block. Equal states give equal bytes."""
    jobs = (
        (None, state[name].data[part], dtype)
        for name, dtype, shape in layout_of(state)
        for part in blocks_of(shape)
    )
    yield header(FULL, layout_of(state))
    for method, body in ordered(encode_block, jobs, threads):
        yield framed(method, body)


def encode_delta(
    base: State, new: State, *, threads: int = 1, changed: Changed | None = None
) -> Iterator[bytes]:
    """Encode the difference from `base` to `new`, block by block.

    With `changed` only those positions are compared: it must name every change, as sorted unique
    positions, and may name more; the bytes do not depend on it. Raises CodecError at once if the two
    states differ in names, types or shapes: publish a snapshot then.
    """
    layout = layout_of(base)
    if layout != layout_of(new):
        raise CodecError("base and new state differ in names, types or shapes: publish a snapshot")
    return _encode_delta(layout, base, new, changed, threads)


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
    layout: Sequence[Layout], base: State, new: State, changed: Changed | None, threads: int
) -> Iterator[bytes]:
    yield header(DELTA, layout)
    turn = Lock() if threads > 1 else ALONE
    jobs = (
        (base[name].data[part], new[name].data[part], dtype, _hint_of(changed, name, part), turn)
        for name, dtype, shape in layout
        for part in blocks_of(shape)
    )
    for method, body in ordered(encode_block, jobs, threads):
        yield framed(method, body)


def _hint_of(changed: Changed | None, name: str, part: slice) -> Positions | None:
    """Select the positions of `changed` in a block, counted from its start; None to compare all of it."""
    if changed is None:
        return None
    positions = changed.get(name, np.empty(0, np.int64))
    if positions is None:
        return None
    low, high = np.searchsorted(positions, (part.start, part.stop))
    return positions[low:high] - part.start


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
    jobs = _decode_jobs(base, reader, layout, state, done)
    for name, positions in ordered(_decode_tensor, jobs, threads):
        changed[name] = positions
    reader.finish()
    return state, changed


def _decode_jobs(
    base: State | None,
    reader: PayloadReader,
    layout: Sequence[Layout],
    state: dict[str, Tensor],
    done: Done | None,
) -> Iterator[tuple[str, list[Coded], list[Changes], Tensor | None, Tensor, Done | None]]:
    """Yield arguments of _decode_tensor(); put the tensors to fill into `state`.

    A tensor is allocated once all its blocks have been read, and not at all if it is unchanged. Blocks of few
    changes are decoded here, in the one thread that iterates: it is short calls, at each of which threads
    would wait for each other's interpreter lock.
    """
    for name, dtype, shape in layout:
        old = None if base is None else base[name]
        blocks = [(part, *reader.block(part, dtype)) for part in blocks_of(shape)]
        if old is not None and all(method == SKIP for _, method, _ in blocks):
            state[name] = old
            continue
        few: list[Changes] = []
        others: list[Coded] = []
        for part, method, body in blocks:
            if old is not None and method == SPARSE and len(body) < FEW_CHANGES:
                with _of_tensor(name):
                    changes = decode_changes(body, part.stop - part.start, BITS[dtype])
                few.append(Changes(changes.index + part.start, changes.moves))
            else:
                others.append((part, method, body))
        state[name] = Tensor(dtype, shape, _allocate(name, dtype, shape))
        yield name, others, few, old, state[name], done


def _decode_tensor(
    name: str,
    blocks: list[Coded],
    few: list[Changes],
    base: Tensor | None,
    out: Tensor,
    done: Done | None,
) -> tuple[str, Positions | None]:
    """Fill `out` from `base`, changed by `few` and coded `blocks`, and call `done`.

    Returns the tensor's name and changed positions, None for many of them.
    """
    written: list[Positions | None] = []
    if base is not None and (few or any(method == SKIP for _, method, _ in blocks)):
        np.copyto(out.data, base.data)
    if base is not None and few:
        index = np.concatenate([changes.index for changes in few])
        moves = np.concatenate([changes.moves for changes in few])
        out.data[index] = move(base.data[index], moves, out.dtype)
        written.append(index)
    for part, method, body in blocks:
        if base is not None and method == SKIP:
            continue
        old = None if base is None else base.data[part]
        with _of_tensor(name):
            positions = decode_block(method, body, old, out.data[part], out.dtype)
        written.append(None if positions is None else positions + part.start)
    if done is not None:
        done(name, out)
    known = [positions for positions in written if positions is not None]
    count = sum(positions.size for positions in known)
    if len(known) < len(written) or count * MANY_CHANGED > out.data.size:
        return name, None
    return name, known[0] if len(known) == 1 else np.sort(np.concatenate([NONE, *known]))


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
        if size < LARGE:
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
    """Return `size` bytes that begin at a huge page."""
    try:
        return _idle[size].pop()
    except IndexError:
        memory = np.empty(size + HUGE_PAGE, np.uint8)
        start = -memory.ctypes.data % HUGE_PAGE
        return memory[start : start + size]
