"""The frame of a weight payload: header, then block after block, and how it is taken apart.

Names, types, shapes and so every length come from the signed manifest, never from the payload; the
payload only fills them. A header, then for each tensor by name, for each block: method, and unless it
is skip, length of the body and body.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from ...crypto.hashing import digest
from ...protocol.manifests import TensorInfo
from .blocks import BLOCK, SKIP, max_body
from .errors import CodecError
from .state import BITS, State, numel
from .streams import read_varint, varint

MAGIC = b"PRLW"
FULL, DELTA = 0, 1
MAX_TENSOR = 1 << 40
"""Bytes of one tensor."""

_HEADER = struct.Struct("<4sB16s")
HEADER_BYTES = _HEADER.size

Payload = bytes | bytearray | memoryview | Iterable[bytes]
Layout = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""
T = TypeVar("T")


def layout_of(state: State) -> list[Layout]:
    """The layout of a state that is held, by name."""
    return [(name, tensor.dtype, tensor.shape) for name, tensor in sorted(state.items())]


def check_layout(tensors: Sequence[TensorInfo]) -> list[Layout]:
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


def blocks_of(shape: Iterable[int]) -> Iterator[slice]:
    """The blocks of a tensor, as slices of its flat data; none for an empty one."""
    count = numel(shape)
    return (slice(at, min(at + BLOCK, count)) for at in range(0, count, BLOCK))


def header(kind: int, layout: Sequence[Layout]) -> bytes:
    """First bytes of a payload: they tie it to its kind and its layout."""
    return _HEADER.pack(MAGIC, kind, digest(msgspec.msgpack.encode(layout))[:16])


def framed(method: int, body: bytes) -> bytes:
    """One block as it stands in the payload."""
    size = b"" if method == SKIP else varint(len(body))
    return b"".join((bytes([method]), size, body))


def ordered(
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


class PayloadReader:
    """Takes exact amounts from chunks of any size, without copying where one chunk has it all."""

    def __init__(self, payload: Payload) -> None:
        whole = isinstance(payload, bytes | bytearray | memoryview)
        self._chunks = iter([bytes(payload)] if whole else payload)
        self._chunk = memoryview(b"")

    def header(self, kind: int, layout: Sequence[Layout]) -> None:
        """Refuse a payload of another kind or for other tensors."""
        if bytes(self._take(_HEADER.size)) != header(kind, layout):
            raise CodecError("the payload is of another format or kind, or for other tensors")

    def block(self, part: slice, dtype: str) -> tuple[int, memoryview]:
        """Method and body of the next block, which fills `part` of a tensor."""
        method = self._take(1)[0]
        if method == SKIP:
            return method, memoryview(b"")
        most = max_body(part.stop - part.start, BITS[dtype].itemsize)
        size = read_varint(lambda: self._take(1)[0], most, "bytes of a block")
        return method, self._take(size)

    def finish(self) -> None:
        """Refuse anything after the last block."""
        if len(self._chunk) or self._refill():
            raise CodecError("bytes after the end of the payload")

    def _take(self, size: int) -> memoryview:
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

    def _refill(self) -> bool:
        """Go on to the next chunk that is not empty; False at the end."""
        for chunk in self._chunks:
            if len(chunk):
                self._chunk = memoryview(chunk)
                return True
        return False
