"""The lossless codec of policy versions: a full state, or the difference to a base, as bytes.

Whatever bytes come in, decoding ends in a state laid out as the manifest says, or in CodecError and in
nothing else. Equal input gives equal bytes, with any number of threads, with or without a hint.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...protocol.manifests import TensorInfo
from .blocks import (
    ALONE,
    BLOCK,
    SKIP,
    Turn,
    decode_block,
    decode_changes,
    encode_block,
    encode_changes,
)
from .errors import CodecError
from .found import Found
from .moves import Bits, Changes
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
from .state import BITS, Changed, State, Tensor, numel

CODEC = "planes/2"
"""Goes into Artifact.codec. Any change of the bytes is a new name."""

HUGE = 1 << 21
"""Bytes of a huge page. A tensor that begins on its edge has a hundredth of the page faults, which take
longer than decoding a few changes; what lies before it is never touched and takes no memory."""

Positions = NDArray[np.int64]


Done = Callable[[str, Tensor], None]
"""Told of a tensor, by name, that will not be written to again."""


def ignore(_name: str, _tensor: Tensor) -> None:
    """For who does not need to know."""


class BlockChanges(NamedTuple):
    """What a delta says of one block: which tensor, which part of its flat data, what changed there."""

    name: str
    dtype: str
    part: slice
    changes: Changes
    """Positions count from the start of the block."""


def encode_full(state: State, *, threads: int = 1) -> Iterator[bytes]:
    """The payload of `state` on its own, block by block. Equal states give equal bytes."""
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
    """The payload that turns `base` into `new`, block by block.

    With `changed` only those positions are compared: it must name every change, as sorted unique
    positions, and may name more; the bytes do not depend on it. Raises CodecError at once if the two
    states differ in names, types or shapes: publish an anchor then.
    """
    layout = layout_of(base)
    if layout != layout_of(new):
        raise CodecError("base and new state differ in names, types or shapes: publish an anchor")
    return _encode_delta(layout, base, new, changed, threads)


def encode_changes_stream(
    tensors: Sequence[TensorInfo], blocks: Iterable[BlockChanges], *, threads: int = 1
) -> Iterator[bytes]:
    """The payload of a delta from what changed in every block, in the order of read_changes().

    The bytes are those of encode_delta(), but for blocks that it would have stored raw. Raises
    CodecError if `tensors` makes no sense or `blocks` are not those of `tensors`.
    """
    layout = check_layout(tensors)
    yield header(DELTA, layout)
    for method, body in ordered(encode_changes, _checked(layout, blocks), threads):
        yield framed(method, body)


def decode_full(
    payload: Payload, tensors: Sequence[TensorInfo], *, threads: int = 1, done: Done = ignore
) -> State:
    """The state in `payload`, laid out as `tensors`; digests are not checked here.

    `done` is told of every tensor with elements as soon as it is written. Raises CodecError.
    Allocates what `tensors` implies and one block, whatever the payload says.
    """
    return _decode(FULL, None, payload, check_layout(tensors), threads, done)[0]


def apply_delta(
    base: State, payload: Payload, tensors: Sequence[TensorInfo], *, threads: int = 1
) -> State:
    """The state that `payload` makes of `base`; see apply_delta_changed()."""
    return apply_delta_changed(base, payload, tensors, threads=threads)[0]


def apply_delta_changed(
    base: State,
    payload: Payload,
    tensors: Sequence[TensorInfo],
    *,
    threads: int = 1,
    done: Done = ignore,
) -> tuple[State, Changed]:
    """The state that `payload` makes of `base`, and where it changed; digests are not checked here.

    `base` is never written to. Tensors without a change are the very objects of `base` and absent
    from the second result, the others are new, and `done` is told of each as soon as it is written.
    Raises CodecError, also when `base` is not laid out as `tensors`.
    """
    layout = check_layout(tensors)
    if layout_of(base) != layout:
        raise CodecError("the held state differs from the manifest in names, types or shapes")
    return _decode(DELTA, base, payload, layout, threads, done)


def read_changes(
    payload: Payload, tensors: Sequence[TensorInfo], *, threads: int = 1
) -> Iterator[BlockChanges]:
    """What the delta `payload` says of every block of every tensor, by name, unchanged ones too.

    Needs no state and holds a few blocks at a time; any two deltas of one layout are cut into the same
    blocks. Raises CodecError, also at a raw block, which does not say what changed.
    """
    layout = check_layout(tensors)
    reader = PayloadReader(payload)
    reader.header(DELTA, layout)
    jobs = (
        (name, dtype, part, *reader.block(part, dtype))
        for name, dtype, shape in layout
        for part in blocks_of(shape)
    )
    yield from ordered(_changes_named, jobs, threads)
    reader.finish()


def _encode_delta(
    layout: Sequence[Layout], base: State, new: State, changed: Changed | None, threads: int
) -> Iterator[bytes]:
    yield header(DELTA, layout)
    turn = _turns(threads)
    jobs = (
        (base[name].data[part], new[name].data[part], dtype, hint_of(changed, name, part), turn)
        for name, dtype, shape in layout
        for part in blocks_of(shape)
    )
    for method, body in ordered(encode_block, jobs, threads):
        yield framed(method, body)


def _turns(threads: int) -> Turn:
    return Lock() if threads > 1 else ALONE


def hint_of(changed: Changed | None, name: str, part: slice) -> Positions | None:
    """Positions of `changed` in a block, counted from its start; None to compare all of it."""
    if changed is None:
        return None
    positions = changed.get(name, np.empty(0, np.int64))
    if positions is None:
        return None
    low, high = np.searchsorted(positions, (part.start, part.stop))
    return positions[low:high] - part.start


def _checked(
    layout: Sequence[Layout], blocks: Iterable[BlockChanges]
) -> Iterator[tuple[Changes, int]]:
    """Arguments of encode_changes() for every block of `layout`."""
    given = iter(blocks)
    for name, dtype, shape in layout:
        for part in blocks_of(shape):
            block = next(given, None)
            if block is None or block[:3] != (name, dtype, part):
                raise CodecError(f"{name}: changes of block {part} are due")
            yield block.changes, part.stop - part.start
    if next(given, None) is not None:
        raise CodecError("changes after the last block")


def _changes_named(
    name: str, dtype: str, part: slice, method: int, body: memoryview
) -> BlockChanges:
    try:
        changes = decode_changes(method, body, part.stop - part.start, BITS[dtype])
    except CodecError as error:
        raise CodecError(f"{name}: {error}") from error
    return BlockChanges(name, dtype, part, changes)


def _decode(
    kind: int,
    base: State | None,
    payload: Payload,
    layout: Sequence[Layout],
    threads: int,
    done: Done,
) -> tuple[State, Changed]:
    reader = PayloadReader(payload)
    reader.header(kind, layout)
    state: dict[str, Tensor] = {}
    found = Found()
    jobs = _decode_jobs(base, reader, layout, state, _turns(threads))
    for name, start, index in ordered(_decode_named, jobs, threads):
        tensor = state[name]
        found.add(name, start, index, tensor.data.size)
        if start + BLOCK >= tensor.data.size:
            done(name, tensor)
    reader.finish()
    return state, found.changed()


def _decode_jobs(
    base: State | None,
    reader: PayloadReader,
    layout: Sequence[Layout],
    state: dict[str, Tensor],
    turn: Turn,
) -> Iterator[tuple[str, slice, int, memoryview, Bits | None, Bits, str, Turn]]:
    """Arguments of _decode_named() for every block; puts the tensors to fill into `state`.

    A tensor is allocated once all its blocks have been read, and not at all if it is unchanged.
    """
    for name, dtype, shape in layout:
        held = None if base is None else base[name]
        blocks = [(part, *reader.block(part, dtype)) for part in blocks_of(shape)]
        if held is not None and all(method == SKIP for _, method, _ in blocks):
            state[name] = held
            continue
        out = _allocate(name, dtype, shape)
        state[name] = Tensor(dtype, shape, out)
        for part, method, body in blocks:
            old = None if held is None else held.data[part]
            yield name, part, method, body, old, out[part], dtype, turn


def _decode_named(
    name: str,
    part: slice,
    method: int,
    body: memoryview,
    base: Bits | None,
    out: Bits,
    dtype: str,
    turn: Turn,
) -> tuple[str, int, Positions | None]:
    """Fill `out`; the tensor, where the block starts, and which of its elements changed."""
    try:
        return name, part.start, decode_block(method, body, base, out, dtype, turn)
    except CodecError as error:
        raise CodecError(f"{name}: {error}") from error


def _allocate(name: str, dtype: str, shape: tuple[int, ...]) -> Bits:
    """Elements to be written, from a page's edge on if they fill huge pages: see HUGE."""
    size = numel(shape) * BITS[dtype].itemsize
    spare = HUGE if size >= 4 * HUGE else 0
    try:
        memory = np.empty(size + spare, np.uint8)
    except MemoryError as error:
        raise CodecError(f"{name}: {dtype} {list(shape)} does not fit into memory") from error
    start = -memory.ctypes.data % HUGE if spare else 0
    return memory[start : start + size].view(BITS[dtype])
