"""The policy from wherever it is trained to the host, and where it differs from the one before.

Comparison and compaction run where the weights are, on every rank that holds some of them: only changed
elements travel. Imports torch: import this file lazily.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from ...models.tensors import torch_dtype
from ...ops.errors import StorageError
from ...weights.state import BITS, numel
from ..backend import Snapshot
from .collecting import Collector, Difference, OneRank, host_pieces
from .files import SnapshotFiles, StateFile
from .gathering import Policy, Run, Source, named_sources
from .host import Found, HostPiece, HostState

CHUNK = 1 << 25
"""Elements compared at once. Bounds what an export needs beside the bits that are kept on the device:
at most 20 bytes for each (its bits, a flag, and its position, twice), 640 MiB."""
BUCKET = 1 << 27
"""Elements whose differences travel to the first rank together, and one tensor more at most: bounds what
the ranks hold for that if everything differs, 256 MiB on the first and as much on the others together."""
MOST_SPARSE = 4
"""A chunk of which more than one in so many elements changed crosses whole: positions cost more than bits."""

Layout = tuple[str, tuple[int, ...], int, int]
"""dtype name, shape, and the rank's share: from where to where."""


class Alone:
    """The only rank."""

    rank = 0
    size = 1
    device = torch.device("cpu")


class PieceFinder:
    """Keeps the bits of what it found last: 2 bytes for each bf16 element of this rank's share, beside it."""

    def __init__(
        self, ranks: OneRank, *, chunk: int = CHUNK, bucket: int = BUCKET, keep: bool = True
    ) -> None:
        """`chunk` elements are compared at once, those of `bucket` travel at once: as on all ranks.

        Without `keep` every search finds everything, and no bits are held.
        """
        self._ranks = ranks
        self._chunk = chunk
        self._bucket = bucket
        self._keep = keep
        self._bits: dict[str, torch.Tensor] = {}
        self._layouts: dict[str, Layout] = {}
        self._sound = False
        """Whether all bits are those of the last search, and that one came to its end."""

    def find(self, sources: Iterable[Source]) -> Iterator[Found]:
        """What differs from the last search, on the first rank; nothing on the others.

        Collective, and on every rank it has to be walked to its end. Everything differs after
        forget() and after a search that was not, and so does a tensor that is new or has another
        shape or type. Raises EngineError for a dtype that a state cannot hold or ranks that
        disagree, and RuntimeError when memory runs out.
        """
        sound, self._sound = self._sound, False
        if not sound:
            self.forget()
        seen: set[str] = set()
        for source, whole, pieces in self._search(sources, sound):
            seen.add(source.name)
            if not self._ranks.rank:
                yield from _by_run(source, whole, pieces)
        for name in self._layouts.keys() - seen:
            del self._bits[name], self._layouts[name]
        self._sound = self._keep

    def forget(self) -> None:
        """Hold nothing: the next search finds everything."""
        self._bits, self._layouts = {}, {}
        self._sound = False

    def _search(
        self, sources: Iterable[Source], sound: bool
    ) -> Iterator[tuple[Source, bool, Sequence[HostPiece]]]:
        if self._ranks.size == 1:
            for source in sources:
                whole = self._begin(source)
                yield source, whole, host_pieces(source, self._compare(source, whole), self._chunk)
            return
        everything = list(sources)
        collector = Collector(self._ranks, everything, self._chunk)
        known = {source.name: _layout(source) for source in everything} == self._layouts
        if not collector.agree(everything, sound and known):
            self.forget()  # all of them or none: a tensor is whole or a difference on every rank
        for bucket in _buckets(everything, self._bucket):
            whole = [self._begin(source) for source in bucket]
            chunks = [list(self._compare(*pair)) for pair in zip(bucket, whole, strict=True)]
            pieces = collector.collect(list(zip(bucket, chunks, strict=True)))
            del chunks  # the host has them: not two buckets on the device
            yield from zip(bucket, whole, pieces, strict=True)

    def _begin(self, source: Source) -> bool:
        """Whether nothing is known about a source: then it is all there is to find."""
        whole = self._layouts.get(source.name) != _layout(source)
        if whole:
            self._layouts[source.name] = _layout(source)
            self._bits.pop(source.name, None)
        return whole

    def _compare(self, source: Source, whole: bool) -> Iterator[Difference | None]:
        """What differs in each chunk of this rank's share of one source."""
        flat = source.take()
        storage = _storage(source.dtype)
        if self._keep and whole:
            self._bits[source.name] = torch.empty_like(flat, dtype=storage)
        elif self._keep:
            self._bits[source.name] = self._bits[source.name].to(flat.device)
        for part in parts(flat.numel(), self._chunk):
            bits = flat[part].to(torch_dtype(source.dtype)).view(storage)
            held = self._bits[source.name][part] if self._keep else None
            found = Difference(None, bits) if whole or held is None else compare(held, bits)
            if found is not None and held is not None:
                held.copy_(bits)
            yield found


class DeviceExporter:
    """A policy of one process as a State: what differs is found where it lies, the rest is the host's."""

    def __init__(self, *, threads: int = 0, chunk: int = CHUNK, ahead: bool = False) -> None:
        """`threads` build the host's copy, `ahead` of time if that is wanted: see HostState."""
        self._finder = PieceFinder(Alone(), chunk=chunk)
        self._host = HostState(threads=threads, ahead=ahead)

    def export(self, policy: Policy) -> Snapshot:
        """The tensors as a State, floating ones rounded to bf16, and what changed since the last call.

        They are taken one after the other. The first call, and one with other names or shapes,
        exports everything. Raises EngineError for a dtype that a state cannot hold, and
        RuntimeError when memory runs out; then the next call exports everything.
        """
        if self._host.state is None:
            self._finder.forget()
        return self._host.build(self._finder.find(named_sources(policy, 0)))

    def close(self) -> None:
        """End the threads that copy ahead; what was exported stays."""
        self._host.close()


class SnapshotWriter:
    """A policy of several ranks as files that another process reads (state_file.SnapshotReader).

    Every call is collective, with the same model and path on every rank; the first one writes.
    """

    def __init__(self, world: OneRank, *, chunk: int = CHUNK, bucket: int = BUCKET) -> None:
        """A new writer's first snapshot is whole; see PieceFinder for the sizes."""
        self._world = world
        self._finder = PieceFinder(world, chunk=chunk, bucket=bucket)
        self._everything = PieceFinder(world, chunk=chunk, bucket=bucket, keep=False)
        self._files = SnapshotFiles()

    def snapshot(self, sources: Iterable[Source], path: Path, *, whole: bool = False) -> None:
        """What changed since the last snapshot, or all of it: then whoever reads needs no other file.

        Raises StorageError (on the first rank alone), EngineError for ranks that disagree, and
        RuntimeError when memory runs out; after each the next one is whole.
        """
        if whole:
            self._finder.forget()
        try:
            self._write(self._files.following(path), self._finder.find(sources))
        except StorageError:
            self._finder.forget()  # it was noted as exported, but nobody has it
            raise

    def state(self, sources: Iterable[Source], path: Path) -> None:
        """All of it, compared with nothing; the next snapshot does not know of it. Raises as that."""
        self._write(self._files.apart(path), self._everything.find(sources))

    def _write(self, file: StateFile, found: Iterator[Found]) -> None:
        """On other ranks than the first nothing is found, and nothing written."""
        if self._world.rank:
            for _ in found:
                pass
            return
        try:
            with file:
                for one in found:
                    file.add(one)
        except StorageError:
            for _ in found:  # the others are still sending: they would wait for their deadline
                pass
            raise


def compare(held: torch.Tensor, new: torch.Tensor) -> Difference | None:
    """What is not as `held`, on the device; None for nothing."""
    index = torch.nonzero(new != held).view(-1)  # waits for the device: how many is known now
    if not index.numel():
        return None
    if index.numel() * MOST_SPARSE > new.numel():
        return Difference(None, new)
    return Difference(index.to(torch.int32), new[index])


def parts(count: int, chunk: int = CHUNK) -> Iterator[slice]:
    """`count` elements in chunks."""
    return (slice(at, min(at + chunk, count)) for at in range(0, count, chunk))


def _buckets(sources: Sequence[Source], size: int) -> Iterator[list[Source]]:
    """The sources in their order, `size` elements at a time: the same buckets on every rank."""
    bucket: list[Source] = []
    held = 0
    for source in sources:
        bucket.append(source)
        held += numel(source.shape)
        if held >= size:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket


def _by_run(source: Source, whole: bool, pieces: Sequence[HostPiece]) -> Iterator[Found]:
    """What was found about the checkpoint tensors of one source."""
    mine: list[list[HostPiece]] = [[] for _ in source.runs]
    if len(source.runs) == 1:
        mine[0].extend(pieces)
    else:
        starts = [run.start for run in source.runs]
        for piece in pieces:
            piece.wait()
            for place in _touched(starts, piece):
                mine[place] += _cut(piece, source.runs[place])
    for run, found in zip(source.runs, mine, strict=True):
        yield Found(run.name, source.dtype, run.shape, whole, found)


def _touched(starts: Sequence[int], piece: HostPiece) -> range:
    """Which runs elements of `piece` may lie in."""
    last = piece.bits.size - 1 if piece.index is None else int(piece.index[-1])
    first = 0 if piece.index is None else int(piece.index[0])
    return range(
        bisect.bisect_right(starts, piece.start + first) - 1,
        bisect.bisect_right(starts, piece.start + last),
    )


def _cut(piece: HostPiece, run: Run) -> list[HostPiece]:
    """The part of `piece` that lies in `run`, if any does."""
    low, high = run.start - piece.start, run.stop - piece.start
    if piece.index is None:
        low, high = max(low, 0), min(high, piece.bits.size)
        found = HostPiece(piece.start + low - run.start, None, piece.bits[low:high])
        return [found] if high > low else []
    first, last = piece.index.searchsorted([low, high]).tolist()
    index, bits = piece.index[first:last], piece.bits[first:last]
    return [HostPiece(piece.start - run.start, index, bits)] if last > first else []


def _layout(source: Source) -> Layout:
    return source.dtype, source.shape, source.share.start, source.share.stop


def _storage(dtype: str) -> torch.dtype:
    """The torch type that holds the bits of a safetensors dtype."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return widths[BITS[dtype].itemsize]
