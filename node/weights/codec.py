"""The lossless codec of policy versions: a full state, or the difference to a base, as bytes.

Names, types, shapes and so every length come from the signed manifest, never from the payload; the
payload only fills them. Layout: header, then for each tensor by name, for each block: method, and
unless it is skip, body length (u32) and body.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import numpy as np

from ...crypto.hashing import digest
from ...protocol.manifests import TensorInfo
from .blocks import BLOCK, SKIP, decode_block, encode_block, max_body
from .errors import CodecError
from .moves import Bits
from .state import BITS, State, Tensor, numel

CODEC = "planes/1"
"""Goes into Artifact.codec. Any change of the bytes is a new name."""

MAGIC = b"PRLW"
FULL, DELTA = 0, 1
MAX_TENSOR = 1 << 40
"""Bytes of one tensor."""

_HEADER = struct.Struct("<4sB16s")
_SIZE = struct.Struct("<I")

Payload = bytes | bytearray | memoryview | Iterable[bytes]
Layout = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""
T = TypeVar("T")


def encode_full(state: State, *, threads: int = 1) -> Iterator[bytes]:
    """The payload of `state` on its own, block by block. Equal states give equal bytes."""
    return _encode(None, state, threads)


def encode_delta(base: State, new: State, *, threads: int = 1) -> Iterator[bytes]:
    """The payload that turns `base` into `new`, block by block.

    Raises CodecError at once if the two differ in names, types or shapes: publish an anchor then.
    """
    if _layout_of(base) != _layout_of(new):
        raise CodecError("base and new state differ in names, types or shapes: publish an anchor")
    return _encode(base, new, threads)


def decode_full(payload: Payload, tensors: Sequence[TensorInfo], *, threads: int = 1) -> State:
    """The state in `payload`, laid out as `tensors`; digests are not checked here.

    Raises CodecError. Allocates what `tensors` implies and one block, whatever the payload says.
    """
    return _decode(None, payload, tensors, threads)


def apply_delta(
    base: State, payload: Payload, tensors: Sequence[TensorInfo], *, threads: int = 1
) -> State:
    """The state that `payload` makes of `base`; digests are not checked here.

    `base` is never written to. Tensors without a change are the very objects of `base`, the others
    are new. Raises CodecError, also when `base` is not laid out as `tensors`.
    """
    if _layout_of(base) != _check_layout(tensors):
        raise CodecError("the held state differs from the manifest in names, types or shapes")
    return _decode(base, payload, tensors, threads)


def _encode(base: State | None, state: State, threads: int) -> Iterator[bytes]:
    layout = _layout_of(state)
    yield _header(FULL if base is None else DELTA, layout)
    jobs = (
        (None if base is None else base[name].data[part], state[name].data[part], dtype)
        for name, dtype, shape in layout
        for part in _parts(numel(shape))
    )
    for method, body in _ordered(encode_block, jobs, threads):
        size = b"" if method == SKIP else _SIZE.pack(len(body))
        yield b"".join((bytes([method]), size, body))


def _decode(
    base: State | None, payload: Payload, tensors: Sequence[TensorInfo], threads: int
) -> State:
    layout = _check_layout(tensors)
    reader = _Reader(payload)
    if bytes(reader.take(_HEADER.size)) != _header(FULL if base is None else DELTA, layout):
        raise CodecError("the payload is of another format or kind, or for other tensors")
    state: dict[str, Tensor] = {}
    for _ in _ordered(_decode_named, _decode_jobs(base, reader, layout, state), threads):
        pass
    reader.finish()
    return state


def _decode_jobs(
    base: State | None, reader: "_Reader", layout: Sequence[Layout], state: dict[str, Tensor]
) -> Iterator[tuple[str, int, memoryview, Bits | None, Bits, str]]:
    """Arguments of _decode_named() for every block; puts the tensors to fill into `state`.

    A tensor is allocated once all its blocks have been read, and not at all if it is unchanged.
    """
    for name, dtype, shape in layout:
        held = None if base is None else base[name]
        blocks = [(part, *reader.block(part, dtype)) for part in _parts(numel(shape))]
        if held is not None and all(method == SKIP for _, method, _ in blocks):
            state[name] = held
            continue
        out = _allocate(name, dtype, shape)
        state[name] = Tensor(dtype, shape, out)
        for part, method, body in blocks:
            yield name, method, body, None if held is None else held.data[part], out[part], dtype


def _decode_named(
    name: str, method: int, body: memoryview, base: Bits | None, out: Bits, dtype: str
) -> None:
    try:
        decode_block(method, body, base, out, dtype)
    except CodecError as error:
        raise CodecError(f"{name}: {error}") from error


def _ordered(
    function: Callable[..., T], jobs: Iterable[tuple[Any, ...]], threads: int
) -> Iterator[T]:
    """Results of `function(*job)` in the order of `jobs`, with few jobs in flight."""
    if threads <= 1:
        for job in jobs:
            yield function(*job)
        return
    pending: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for job in jobs:
            pending.append(pool.submit(function, *job))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _parts(count: int) -> Iterator[slice]:
    """The blocks of a tensor of `count` elements; none for an empty one."""
    return (slice(at, min(at + BLOCK, count)) for at in range(0, count, BLOCK))


def _allocate(name: str, dtype: str, shape: tuple[int, ...]) -> Bits:
    try:
        return np.empty(numel(shape), BITS[dtype])
    except MemoryError as error:
        raise CodecError(f"{name}: {dtype} {list(shape)} does not fit into memory") from error


def _layout_of(state: State) -> list[Layout]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in sorted(state.items())]


def _check_layout(tensors: Sequence[TensorInfo]) -> list[Layout]:
    """The layout that the manifest promises, by name; CodecError if it makes no sense."""
    layout = sorted((info.name, info.dtype, tuple(info.shape)) for info in tensors)
    if len({name for name, _, _ in layout}) != len(layout):
        raise CodecError("the manifest names a tensor twice")
    for name, dtype, shape in layout:
        if dtype not in BITS:
            raise CodecError(f"{name}: dtype {dtype!r} is unknown, update this node")
        if min(shape, default=0) < 0 or numel(shape) * BITS[dtype].itemsize > MAX_TENSOR:
            raise CodecError(f"{name}: shape {list(shape)} is out of bounds")
    return layout


def _header(kind: int, layout: Sequence[Layout]) -> bytes:
    return _HEADER.pack(MAGIC, kind, digest(msgspec.msgpack.encode(layout))[:16])


class _Reader:
    """Takes exact amounts from chunks of any size, without copying where one chunk has it all."""

    def __init__(self, payload: Payload) -> None:
        whole = isinstance(payload, bytes | bytearray | memoryview)
        self._chunks = iter([bytes(payload)] if whole else payload)
        self._chunk = memoryview(b"")

    def take(self, size: int) -> memoryview:
        """The next `size` bytes; the caller has bounded `size`."""
        parts: list[memoryview] = []
        missing = size
        while missing > len(self._chunk):
            parts.append(self._chunk)
            missing -= len(self._chunk)
            if not self._refill():
                raise CodecError("the payload ends early")
        parts.append(self._chunk[:missing])
        self._chunk = self._chunk[missing:]
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def block(self, part: slice, dtype: str) -> tuple[int, memoryview]:
        """Method and body of the next block, which fills `part` of a tensor."""
        method = self.take(1)[0]
        if method == SKIP:
            return method, memoryview(b"")
        (size,) = _SIZE.unpack(self.take(_SIZE.size))
        if size > max_body(part.stop - part.start, BITS[dtype].itemsize):
            raise CodecError(f"a block announces {size} bytes, more than any coding needs")
        return method, self.take(size)

    def finish(self) -> None:
        """Refuse anything after the last block."""
        if len(self._chunk) or self._refill():
            raise CodecError("bytes after the end of the payload")

    def _refill(self) -> bool:
        """Go on to the next chunk that is not empty; False at the end."""
        for chunk in self._chunks:
            if len(chunk):
                self._chunk = memoryview(chunk)
                return True
        return False
