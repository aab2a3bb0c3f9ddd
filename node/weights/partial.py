"""A part of the weights: which chunks it takes, and how they become a payload of the wanted tensors alone.

Blocks of one tensor follow each other in a payload, and tensors follow each other by name: so what stands
between the offsets of a wanted tensor is, behind a header of its own, a payload that any decoder reads. Nothing
here is proof of anything; each tensor's digest is, in the signed manifest.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate

from ...protocol.manifests import Artifact, ChunkRef, PolicyManifest, TensorInfo
from .offsets import regions
from .payload import (
    DELTA,
    FULL,
    Layout,
    PayloadReader,
    blocks_of,
    check_layout,
    framed,
    header,
)

Share = Callable[[Collection[str]], AbstractSet[str]]
"""Names of all tensors of a manifest -> those that are wanted."""
REMEMBERED = 256
"""Artifacts whose chunks Needed remembers."""


def everything(names: Collection[str]) -> AbstractSet[str]:
    """The share of who holds all."""
    return frozenset(names)


def wanted_of(tensors: Sequence[TensorInfo], share: Share) -> AbstractSet[str]:
    """What `share` wants of a manifest's tensors."""
    names = [info.name for info in tensors]
    return share(names) & frozenset(names)


class Needed:
    """chunks_for() of one share, remembered: who plans asks for the same again and again."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._known: dict[tuple[bytes, Artifact], tuple[ChunkRef, ...]] = {}

    def __call__(self, manifest: PolicyManifest, artifact: Artifact) -> tuple[ChunkRef, ...]:
        """What is needed of an artifact that reaches `manifest`. Raises CodecError."""
        if not artifact.offsets or self._share is everything:
            return artifact.chunks
        key = (manifest.state, artifact)
        if key not in self._known:
            wanted = wanted_of(manifest.tensors, self._share)
            while len(self._known) >= REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[key] = chunks_for(artifact, manifest.tensors, wanted)
        return self._known[key]


def chunks_for(
    artifact: Artifact, tensors: Sequence[TensorInfo], wanted: AbstractSet[str]
) -> tuple[ChunkRef, ...]:
    """The chunks of `artifact` that hold anything of the `wanted` tensors, in order.

    All of them where it does not say where its tensors are. Raises CodecError for offsets that make no sense.
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
    """A payload of the `wanted` tensors alone, from the chunks that chunks_for() names.

    Raises CodecError.
    """
    layout = check_layout(tensors)
    if _all(tensors, wanted):
        yield from chunks
        return
    kind = FULL if artifact.kind == "anchor" else DELTA
    yield header(kind, [one for one in layout if one[0] in wanted])
    if artifact.offsets:
        yield from _cut_out(artifact, _spans(artifact, layout, wanted), chunks)
    else:
        yield from _sift(kind, layout, wanted, chunks)


def _all(tensors: Sequence[TensorInfo], wanted: AbstractSet[str]) -> bool:
    return all(info.name in wanted for info in tensors)


def _spans(
    artifact: Artifact, layout: Sequence[Layout], wanted: AbstractSet[str]
) -> list[tuple[int, int]]:
    """From where to where bytes are wanted; neighbours as one, none empty."""
    found: list[tuple[int, int]] = []
    for (name, _, _), (start, end) in zip(layout, regions(artifact, len(layout)), strict=True):
        if name not in wanted or start == end:
            continue
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return found


def _touched(artifact: Artifact, spans: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Numbers of the chunks with a byte in one of `spans`."""
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
    """The bytes of `spans` from the chunks that hold them."""
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
    """The wanted blocks of a whole payload that does not say where they are."""
    reader = PayloadReader(chunks)
    reader.header(kind, layout)
    for name, dtype, shape in layout:
        for part in blocks_of(shape):
            method, body = reader.block(part, dtype)
            if name in wanted:
                yield framed(method, bytes(body))
    reader.finish()
