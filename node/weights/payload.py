"""The frame of a weight payload: header and blocks, the chunks it is cut into, and the parts of it.

Names, types, shapes and so every length come from the signed manifest, never from the payload; the
payload only fills them. It is a header, then for each tensor by name, for each block: method, and unless
that is skip, length of the body and body. Blocks of one tensor follow each other: so the bytes between the
offsets of wanted tensors are, behind a header of their own, a payload that any decoder reads. Offsets are
proof of nothing: each tensor is proved by its digest in the manifest.
"""

import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import msgspec

from ...crypto.hashing import digest
from ...protocol.manifests import Artifact, ChunkRef, PolicyManifest, TensorInfo
from ...protocol.recent import RecentDict
from ...protocol.version import KIB, MAX_CHUNK, MIB
from .blocks import BLOCK, SKIP, max_body
from .state import BITS, CodecError, State, numel
from .streams import read_varint, varint

MAGIC = b"PRLW"
FULL, DELTA = 0, 1
MAX_TENSOR_BYTES = 1 << 40

LARGEST_CHUNK = 4 * MIB
MIN_CHUNK = 128 * KIB
"""Below this the round trip costs more than the bytes."""
CHUNK_SHARE = 64
"""A chunk is about a 64th of the bytes before it."""
MAX_REMEMBERED = 256
"""Most artifacts whose chunks NeededChunks remembers."""

TOGETHER = 1 << 17
"""Bytes or changes of blocks that are coded together: with more, arrays would leave the cache."""
MOST_TOGETHER = 16 * BLOCK
"""Elements of such blocks, which bounds the memory for what hostile bytes may announce."""

_HEADER = struct.Struct("<4sB16s")
HEADER_BYTES = _HEADER.size

Payload = bytes | bytearray | memoryview | Iterable[bytes]
Layout = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""
TensorShare = Callable[[Collection[str]], AbstractSet[str]]
"""Names of all tensors of a manifest -> those that this node wants."""
T = TypeVar("T")


def layout_of(state: State) -> list[Layout]:
    """Return the layout of a state, by name."""
    return [(name, tensor.dtype, tensor.shape) for name, tensor in sorted(state.items())]


def check_layout(tensors: Sequence[TensorInfo]) -> list[Layout]:
    """Check the layout in a manifest and sort it by name; CodecError if it makes no sense."""
    layout = sorted((info.name, info.dtype, tuple(info.shape)) for info in tensors)
    if len({name for name, _, _ in layout}) != len(layout):
        raise CodecError("the manifest names a tensor twice")
    for name, dtype, shape in layout:
        if dtype not in BITS:
            raise CodecError(f"{name}: dtype {dtype!r} is unknown, update this node")
        if min(shape, default=0) < 0 or numel(shape) * BITS[dtype].itemsize > MAX_TENSOR_BYTES:
            raise CodecError(f"{name}: shape {list(shape)} is out of bounds")
    return layout


def blocks_of(shape: Iterable[int]) -> Iterator[slice]:
    """Cut a tensor into blocks, as slices of its flat data; none for an empty one."""
    count = numel(shape)
    return (slice(at, min(at + BLOCK, count)) for at in range(0, count, BLOCK))


def header(kind: int, layout: Sequence[Layout]) -> bytes:
    """Make the first bytes of a payload, which tie it to its kind and its layout."""
    return _HEADER.pack(MAGIC, kind, digest(msgspec.msgpack.encode(layout))[:16])


def framed(method: int, body: bytes) -> bytes:
    """Frame one coded block."""
    size = b"" if method == SKIP else varint(len(body))
    return b"".join((bytes([method]), size, body))


def ordered(
    function: Callable[..., T], jobs: Iterable[tuple[Any, ...]], threads: int
) -> Iterator[T]:
    """Yield `function(*job)` in the order of `jobs`, with few jobs in flight."""
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


def together(items: Iterable[T], weigh: Callable[[T], tuple[int, int]]) -> Iterator[list[T]]:
    """Group neighbours, so that short blocks share the operations on arrays.

    `weigh` returns the bytes of an item's blocks, or their number of changes, and their elements.
    """
    group: list[T] = []
    weight = elements = 0
    for item in items:
        more = weigh(item)
        group.append(item)
        weight, elements = weight + more[0], elements + more[1]
        if weight >= TOGETHER or elements >= MOST_TOGETHER:
            yield group
            group, weight, elements = [], 0, 0
    if group:
        yield group


class PayloadReader:
    """Read header and blocks from chunks of any size, without copying if one chunk has all of a block."""

    def __init__(self, payload: Payload) -> None:
        whole = isinstance(payload, bytes | bytearray | memoryview)
        self._chunks = iter([bytes(payload)] if whole else payload)
        self._chunk = memoryview(b"")

    def header(self, kind: int, layout: Sequence[Layout]) -> None:
        """Refuse a payload of another kind or for other tensors."""
        if bytes(self._take(_HEADER.size)) != header(kind, layout):
            raise CodecError("the payload is of another format or kind, or for other tensors")

    def block(self, part: slice, dtype: str) -> tuple[int, memoryview]:
        """Read method and body of the next block, which fills `part` of a tensor."""
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
        """Read the next `size` bytes; the caller has bounded `size`."""
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
        """Move to the next chunk with bytes; False at the end."""
        for chunk in self._chunks:
            if len(chunk):
                self._chunk = memoryview(chunk)
                return True
        return False


# -- offsets and chunks ------------------------------------------------------------------------------


class Offsets:
    """Record where each tensor begins in a payload while it is encoded, block by block."""

    def __init__(self, layout: Sequence[Layout]) -> None:
        """`layout` of the state, by name."""
        self._blocks = [-(-numel(shape) // BLOCK) for _, _, shape in layout]
        self._found: list[int] = []

    def watch(self, payload: Iterable[bytes]) -> Iterator[bytes]:
        """Pass on `payload`, which is its header and then one item for every block."""
        parts = iter(payload)
        head = next(parts)
        at = len(head)
        yield head
        for blocks in self._blocks:
            self._found.append(at)
            for _ in range(blocks):
                block = next(parts)
                at += len(block)
                yield block
        yield from parts

    @property
    def found(self) -> tuple[int, ...]:
        """Offsets of the first block of each tensor, in the order of the layout; complete at the end."""
        return tuple(self._found)


def _regions(artifact: Artifact, count: int) -> list[tuple[int, int]]:
    """Check where each of `count` tensors, by name, begins and ends in the payload.

    Raises CodecError for offsets that make no sense; the artifact has some.
    """
    edges = (*artifact.offsets, artifact.size)
    rising = all(before <= after for before, after in pairwise(edges))
    if len(artifact.offsets) != count or edges[0] != HEADER_BYTES or not rising:
        raise CodecError("the offsets of an artifact do not fit its tensors")
    if sum(chunk.size for chunk in artifact.chunks) != artifact.size:
        raise CodecError("the chunks of an artifact are not as large as the whole")
    return list(pairwise(edges))


def cut(payload: Iterator[bytes], largest: int = LARGEST_CHUNK) -> Iterator[bytes]:
    """Cut a payload into chunks of at most `largest` bytes, the first ones small; no empty chunk.

    A swarm spreads a version faster the more parts it has, so a small delta has parts to swap too. Equal
    payloads give equal chunks, however they were split.
    """
    if not 0 < largest <= MAX_CHUNK:
        raise ValueError(f"chunk size {largest} is not in 1..{MAX_CHUNK}")
    buffer = bytearray()
    total = 0
    for part in payload:
        buffer += part
        while len(buffer) >= (size := _chunk_size(total, largest)):
            yield bytes(buffer[:size])
            del buffer[:size]
            total += size
    if buffer:
        yield bytes(buffer)


def _chunk_size(total: int, largest: int) -> int:
    """Return the bytes of the chunk after `total` bytes."""
    return min(largest, max(MIN_CHUNK, total // CHUNK_SHARE))


# -- part of the tensors -----------------------------------------------------------------------------


def everything(names: Collection[str]) -> AbstractSet[str]:
    """Return the share of a node that holds all tensors."""
    return frozenset(names)


def wanted_of(tensors: Sequence[TensorInfo], share: TensorShare) -> AbstractSet[str]:
    """Return the names of the manifest's tensors that `share` wants."""
    names = [info.name for info in tensors]
    return share(names) & frozenset(names)


class NeededChunks:
    """Remember chunks_for() of one share, which planning asks for again and again."""

    def __init__(self, share: TensorShare) -> None:
        self._share = share
        self._known = RecentDict[tuple[bytes, Artifact], tuple[ChunkRef, ...]](MAX_REMEMBERED)

    def __call__(self, manifest: PolicyManifest, artifact: Artifact) -> tuple[ChunkRef, ...]:
        """Return the chunks needed of an artifact that reaches `manifest`. Raises CodecError."""
        if not artifact.offsets or self._share is everything:
            return artifact.chunks
        key = (manifest.state, artifact)
        if key not in self._known:
            wanted = wanted_of(manifest.tensors, self._share)
            self._known[key] = chunks_for(artifact, manifest.tensors, wanted)
        return self._known[key]


def chunks_for(
    artifact: Artifact, tensors: Sequence[TensorInfo], wanted: AbstractSet[str]
) -> tuple[ChunkRef, ...]:
    """Select the chunks of `artifact` with bytes of the `wanted` tensors, in order; all if it has no offsets.

    Raises CodecError for offsets that make no sense.
    """
    if not artifact.offsets or _all(tensors, wanted):
        return artifact.chunks
    spans = _spans(artifact, check_layout(tensors), wanted)
    return tuple(artifact.chunks[number] for number in _touched(artifact, spans))


def part_of(
    artifact: Artifact,
    tensors: Sequence[TensorInfo],
    wanted: AbstractSet[str],
    chunks: Iterable[bytes],
) -> Iterator[bytes]:
    """Make a payload of the `wanted` tensors alone from the chunks that chunks_for() names.

    Raises CodecError.
    """
    layout = check_layout(tensors)
    if _all(tensors, wanted):
        yield from chunks
        return
    kind = FULL if artifact.kind == "anchor" else DELTA
    yield header(kind, [tensor for tensor in layout if tensor[0] in wanted])
    if artifact.offsets:
        yield from _cut_out(artifact, _spans(artifact, layout, wanted), chunks)
    else:
        yield from _sift(kind, layout, wanted, chunks)


def _all(tensors: Sequence[TensorInfo], wanted: AbstractSet[str]) -> bool:
    return all(info.name in wanted for info in tensors)


def _spans(
    artifact: Artifact, layout: Sequence[Layout], wanted: AbstractSet[str]
) -> list[tuple[int, int]]:
    """Return the byte ranges of the wanted tensors in the payload; adjacent ones joined, none empty."""
    spans: list[tuple[int, int]] = []
    for (name, _, _), (start, end) in zip(layout, _regions(artifact, len(layout)), strict=True):
        if name not in wanted or start == end:
            continue
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
    return spans


def _touched(artifact: Artifact, spans: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Return the numbers of the chunks with a byte in one of `spans`."""
    rest = iter(spans)
    span = next(rest, None)
    ends = accumulate(chunk.size for chunk in artifact.chunks)
    for number, (end, chunk) in enumerate(zip(ends, artifact.chunks, strict=True)):
        while span is not None and span[1] <= end - chunk.size:
            span = next(rest, None)
        if span is not None and span[0] < end:
            yield number


def _cut_out(
    artifact: Artifact, spans: Sequence[tuple[int, int]], chunks: Iterable[bytes]
) -> Iterator[bytes]:
    """Cut the bytes of `spans` from the chunks that hold them."""
    starts = [0, *accumulate(chunk.size for chunk in artifact.chunks)]
    at = 0
    for number, chunk in zip(_touched(artifact, spans), chunks, strict=False):
        start, end = starts[number], starts[number + 1]
        while at < len(spans) and spans[at][0] < end:
            low, high = max(spans[at][0], start), min(spans[at][1], end)
            yield chunk[low - start : high - start]
            if spans[at][1] > end:
                break
            at += 1


def _sift(
    kind: int, layout: Sequence[Layout], wanted: AbstractSet[str], chunks: Iterable[bytes]
) -> Iterator[bytes]:
    """Yield the wanted blocks of a whole payload without offsets."""
    reader = PayloadReader(chunks)
    reader.header(kind, layout)
    for name, dtype, shape in layout:
        for part in blocks_of(shape):
            method, body = reader.block(part, dtype)
            if name in wanted:
                yield framed(method, bytes(body))
    reader.finish()
