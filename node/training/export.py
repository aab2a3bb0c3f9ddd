"""Export of the policy and its changes from the training ranks to the host.

Comparison and compaction run where the weights are, on every rank that holds some of them: only changed
elements travel. Imports torch: import this file lazily.
"""

import bisect
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..errors import EngineError, StorageError
from ..models.tensors import torch_dtype
from ..weights.state import BITS, numel
from .backend import Snapshot
from .gather import Policy, Source, TensorPiece, named_sources
from .snapshot import DeviceEvent, HostPiece, HostState, SnapshotFiles, StateFile, TensorDiff
from .world import World

ALIGN = 8
"""Alignment of every array in a message, in bytes, so that any element type may be viewed there."""
NOTHING, DENSE = 0, -1
"""Markers of a chunk in place of its number of differing elements."""


@dataclass(frozen=True)
class Difference:
    """Changed elements of one chunk of a rank's share, on the rank's device."""

    index: torch.Tensor | None
    """int32 positions in the chunk, increasing; None: `bits` are the whole chunk."""
    bits: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes to transfer."""
        return self.bits.nbytes + (0 if self.index is None else self.index.nbytes)


Chunks = Sequence[Difference | None]
"""Changes in each chunk of a rank's share of one source."""


def fetch(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], DeviceEvent | None]:
    """Copy tensors to the host; they are complete once the returned event has occurred."""
    if not tensors[0].is_cuda:
        return [tensor.cpu() for tensor in tensors], None
    hosts = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
    for host, tensor in zip(hosts, tensors, strict=True):
        host.copy_(tensor, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(tensors[0].device))
    return hosts, ready


def host_pieces(source: Source, chunks: Iterable[Difference | None], chunk: int) -> list[HostPiece]:
    """Copy a rank's own differences, in chunks of `chunk` elements, to the host, one by one."""
    return [
        _host_piece(source, source.share.start + at * chunk, difference)
        for at, difference in enumerate(chunks)
        if difference is not None
    ]


def _host_piece(source: Source, start: int, difference: Difference) -> HostPiece:
    if difference.index is None:
        (bits,), ready = fetch(difference.bits)
        return HostPiece(start, None, bits.numpy().view(BITS[source.dtype]), ready)
    (index, bits), ready = fetch(difference.index, difference.bits)
    return HostPiece(start, index.numpy(), bits.numpy().view(BITS[source.dtype]), ready)


class DiffCollector:
    """Collects differences on the first rank, a bucket of sources at a time."""

    def __init__(self, ranks: World, sources: Sequence[Source], chunk: int) -> None:
        self._ranks = ranks
        self._sources = {source.name: place for place, source in enumerate(sources)}
        self._chunk = chunk
        self._shares = np.zeros((ranks.size, len(sources), 2), np.int64)
        """By rank and source: start of the share and its number of elements."""

    def agree(self, sources: Sequence[Source], ready: bool) -> bool:
        """Return whether all ranks are `ready`.

        Raises EngineError on all ranks if they export different tensors, or if some element belongs to no rank
        or to two ranks.
        """
        if self._ranks.device.type == "cuda":  # the first collective sets up messaging
            dist.all_reduce(torch.zeros(1, device=self._ranks.device))
        layouts = [
            (source.name, source.dtype, source.shape, source.runs, self._chunk)
            for source in sources
        ]
        answers = self._tell(np.array([ready, zlib.crc32(repr(layouts).encode())], np.int64))
        if len(set(answers[:, 1].tolist())) > 1:
            raise EngineError(
                "the ranks export different tensors: start all of them with the same model and config"
            )
        mine = [(source.share.start, source.share.stop - source.share.start) for source in sources]
        shares = self._tell(np.array(mine, np.int64).reshape(-1))
        self._shares = shares.reshape(self._ranks.size, -1, 2)
        for place, source in enumerate(sources):
            self._check_shares(source, self._shares[:, place])
        return bool(answers[:, 0].all())

    def collect(self, bucket: Sequence[tuple[Source, Chunks]]) -> list[list[HostPiece]]:
        """Return each source's pieces, by position; empty except on the first rank."""
        codes = [_code(difference) for _, chunks in bucket for difference in chunks]
        slots = [sum(self._slots(source, rank) for source, _ in bucket) for rank in self._everyone]
        header = np.zeros(max(1, *slots), np.int64)
        header[: len(codes)] = codes
        headers = self._tell(header)
        plans = [self._plan(bucket, rank, headers[rank]) for rank in self._everyone]
        sizes = [sum(item.nbytes for item in plan) for plan in plans]
        if self._ranks.rank:
            self._send(bucket, sizes[self._ranks.rank])
            return [[] for _ in bucket]
        pieces_of = [host_pieces(source, chunks, self._chunk) for source, chunks in bucket]
        for plan, payload in self._receive(plans, sizes):
            for item, piece in _read(plan, payload):
                pieces_of[item.source].append(piece)
        return [sorted(pieces, key=lambda piece: piece.start) for pieces in pieces_of]

    @property
    def _everyone(self) -> range:
        return range(self._ranks.size)

    def _tell(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Gather every rank's `numbers` (same length on every rank), one row per rank."""
        mine = torch.from_numpy(numbers)
        rows = [torch.empty_like(mine) for _ in self._everyone]
        dist.all_gather(rows, mine)
        return torch.stack(rows).numpy()

    def _check_shares(self, source: Source, shares: NDArray[np.int64]) -> None:
        at = 0
        for start, count in sorted(shares[shares[:, 1] > 0].tolist()):
            if start != at:
                break
            at += count
        else:
            if at == numel(source.shape):
                return
        raise EngineError(
            f"the shards of {source.name} are not all of it, each element once: shard the model with "
            "fully_shard() over one mesh of all ranks"
        )

    def _slots(self, source: Source, rank: int) -> int:
        """Return the number of chunks in a rank's share."""
        return -(-int(self._shares[rank, self._sources[source.name], 1]) // self._chunk)

    def _plan(
        self, bucket: Sequence[tuple[Source, Chunks]], rank: int, header: NDArray[np.int64]
    ) -> "list[_Item]":
        """Return the items of a rank's message, in order."""
        codes = iter(header.tolist())
        plan: list[_Item] = []
        for place, (source, _) in enumerate(bucket):
            start, count = self._shares[rank, self._sources[source.name]].tolist()
            for at in range(0, count, self._chunk):
                code = next(codes)
                length = min(self._chunk, count - at)
                if code != NOTHING:
                    plan.append(_Item(place, start + at, code, length, BITS[source.dtype]))
        return plan

    def _send(self, bucket: Sequence[tuple[Source, Chunks]], size: int) -> None:
        if not size:
            return
        payload = torch.empty(size, dtype=torch.uint8, device=self._ranks.device)
        at = 0
        for _, chunks in bucket:
            for difference in chunks:
                for part in () if difference is None else (difference.index, difference.bits):
                    if part is not None:
                        payload[at : at + part.nbytes].copy_(part.view(torch.uint8))
                        at += _aligned(part.nbytes)
        _wait([dist.P2POp(dist.isend, payload, 0)])

    def _receive(
        self, plans: "Sequence[list[_Item]]", sizes: Sequence[int]
    ) -> "Iterator[tuple[list[_Item], _Payload]]":
        """Yield the messages of all other ranks, received together."""
        device = self._ranks.device
        coming = {
            rank: torch.empty(sizes[rank], dtype=torch.uint8, device=device)
            for rank in self._everyone[1:]
            if sizes[rank]
        }
        if not coming:
            return
        _wait([dist.P2POp(dist.irecv, payload, rank) for rank, payload in coming.items()])
        for rank, payload in coming.items():
            (host,), ready = fetch(payload)
            yield plans[rank], _Payload(host.numpy(), ready)


@dataclass(frozen=True)
class _Item:
    """One chunk in a message."""

    source: int
    """Index of the source in the bucket."""
    start: int
    code: int
    length: int
    bits: np.dtype[Any]

    @property
    def count(self) -> int:
        """Elements whose bits are sent."""
        return self.length if self.code == DENSE else self.code

    @property
    def index_bytes(self) -> int:
        """Size of the positions in bytes."""
        return 0 if self.code == DENSE else 4 * self.code

    @property
    def nbytes(self) -> int:
        """Size in the message in bytes, padding included."""
        return _aligned(self.index_bytes) + _aligned(self.count * self.bits.itemsize)


@dataclass(frozen=True)
class _Payload:
    data: NDArray[np.uint8]
    ready: DeviceEvent | None


def _read(plan: Sequence[_Item], payload: _Payload) -> Iterator[tuple[_Item, HostPiece]]:
    at = 0
    for item in plan:
        bits_at = at + _aligned(item.index_bytes)
        index = None
        if item.code != DENSE:
            index = payload.data[at : at + item.index_bytes].view(np.int32)
        bits = payload.data[bits_at : bits_at + item.count * item.bits.itemsize].view(item.bits)
        yield item, HostPiece(item.start, index, bits, payload.ready)
        at += item.nbytes


def _code(difference: Difference | None) -> int:
    if difference is None:
        return NOTHING
    return DENSE if difference.index is None else difference.index.numel()


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _wait(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


CHUNK = 1 << 25
"""Elements compared at once. Bounds the memory of an export beyond the bits kept on the device: at most 20
bytes for each (its bits, a flag, and its position, twice), 640 MiB."""
BUCKET = 1 << 27
"""Elements whose differences travel to the first rank together; a bucket may exceed it by one tensor. Bounds
the buffers if everything differs: 256 MiB on the first rank and as much on the others together."""
MOST_SPARSE = 4
"""A chunk is sent whole if more than one in this many elements changed: positions cost more than bits."""

Layout = tuple[str, tuple[int, ...], int, int]
"""dtype name, shape, and start and stop of the rank's share."""


class PieceFinder:
    """Finds changed elements against the kept bits of the last search.

    The kept bits take 2 bytes for each bf16 element of this rank's share, on its device.
    """

    def __init__(
        self,
        ranks: World,
        *,
        chunk: int = CHUNK,
        bucket: int = BUCKET,
        keep: bool = True,
        bundles: bool = False,
    ) -> None:
        """Set the sizes: `chunk` elements are compared at once, those of `bucket` travel at once.

        Both must be equal on all ranks. A single rank with `bundles` compares small tensors together. Without
        `keep` every search finds everything, and no bits are held.
        """
        self._ranks = ranks
        self._chunk = chunk
        self._bucket = bucket
        self._keep = keep
        self._bundles = bundles and ranks.size == 1
        self._bits: dict[str, torch.Tensor] = {}
        self._layouts: dict[str, Layout] = {}
        self._sound = False
        """Whether all bits are those of the last search, and that search was completed."""

    def find(self, sources: Iterable[Source]) -> Iterator[TensorDiff]:
        """Yield the differences from the last search, on the first rank; nothing on the others.

        Collective, and every rank has to iterate to the end. Everything differs after forget() and after an
        incomplete search, and so does a tensor that is new or has another shape or type. Raises EngineError for
        a dtype that a state cannot hold or ranks that disagree, and RuntimeError when memory runs out.
        """
        sound, self._sound = self._sound, False
        if not sound:
            self.forget()
        names: set[str] = set()
        for source, whole, pieces in self._search(sources, sound):
            names.add(source.name)
            if not self._ranks.rank:
                yield from _by_run(source, whole, pieces)
        for name in self._layouts.keys() - names:
            del self._bits[name], self._layouts[name]
        self._sound = self._keep

    def forget(self) -> None:
        """Drop all kept bits: the next search finds everything."""
        self._bits, self._layouts = {}, {}
        self._sound = False

    def _search(
        self, sources: Iterable[Source], sound: bool
    ) -> Iterator[tuple[Source, bool, Sequence[HostPiece]]]:
        if self._ranks.size == 1:
            joined = bundled(sources, self._chunk) if self._bundles else sources
            for source in joined:
                whole = self._begin(source)
                yield source, whole, host_pieces(source, self._compare(source, whole), self._chunk)
            return
        everything = list(sources)
        collector = DiffCollector(self._ranks, everything, self._chunk)
        known = {source.name: _layout(source) for source in everything} == self._layouts
        if not collector.agree(everything, sound and known):
            self.forget()  # on all ranks or none: a tensor is whole, or a difference, on every rank
        for bucket in _buckets(everything, self._bucket):
            whole = [self._begin(source) for source in bucket]
            chunks = [list(self._compare(*pair)) for pair in zip(bucket, whole, strict=True)]
            pieces = collector.collect(list(zip(bucket, chunks, strict=True)))
            del chunks  # the host has them: do not keep two buckets on the device
            yield from zip(bucket, whole, pieces, strict=True)

    def _begin(self, source: Source) -> bool:
        """Return whether the source must be exported whole, since no bits of this layout are kept."""
        whole = self._layouts.get(source.name) != _layout(source)
        if whole:
            self._layouts[source.name] = _layout(source)
            self._bits.pop(source.name, None)
        return whole

    def _compare(self, source: Source, whole: bool) -> Iterator[Difference | None]:
        """Yield the changes in each chunk of this rank's share of one source."""
        flat = source.take()
        storage = _storage(source.dtype)
        if self._keep and whole:
            self._bits[source.name] = torch.empty_like(flat, dtype=storage)
        elif self._keep:
            self._bits[source.name] = self._bits[source.name].to(flat.device)
        for part in parts(flat.numel(), self._chunk):
            bits = flat[part].to(torch_dtype(source.dtype)).view(storage)
            last = self._bits[source.name][part] if self._keep else None
            if whole or last is None:
                difference = Difference(None, bits)
            else:
                difference = compare(last, bits, sparse=self._bundles)
            if difference is not None and last is not None:
                last.copy_(bits)
            yield difference


class PolicyExporter:
    """Exports the policy as a State, or as files for another process (SnapshotReader).

    Every call but snapshot() is collective, with the same policy and path on every rank; the first rank writes.
    """

    def __init__(
        self,
        world: World,
        *,
        chunk: int = CHUNK,
        bucket: int = BUCKET,
        bundles: bool = False,
        threads: int = 0,
        ahead: bool = False,
    ) -> None:
        """Set `chunk`, `bucket` and `bundles` as in PieceFinder, `threads` and `ahead` as in HostState."""
        self._world = world
        self._finder = PieceFinder(world, chunk=chunk, bucket=bucket, bundles=bundles)
        self._whole_finder = PieceFinder(world, chunk=chunk, bucket=bucket, keep=False)
        self._host = HostState(threads=threads, ahead=ahead)
        self._files = SnapshotFiles()

    def snapshot(self, policy: Policy) -> Snapshot:
        """Return a single rank's State, floating tensors in bf16, and its changes.

        The tensors are taken one after the other. The first call, and one with other names or shapes, exports
        everything. Raises EngineError for a dtype that a state cannot hold, and RuntimeError when memory runs
        out; then the next call exports everything.
        """
        if self._host.state is None:
            self._finder.forget()
        return self._host.build(self._finder.find(named_sources(policy, 0)))

    def write_snapshot(self, sources: Iterable[Source], path: Path, *, whole: bool = False) -> None:
        """Write the changes since the last snapshot; everything if `whole` or in the first call.

        Raises StorageError on the first rank if the file cannot be written, EngineError for ranks that
        disagree, and RuntimeError when memory runs out; after each of them the next snapshot is whole.
        """
        if whole:
            self._finder.forget()
        try:
            self._write(self._files.following(path), self._finder.find(sources))
        except StorageError:
            self._finder.forget()  # noted as exported, but not written
            raise

    def write_state(self, sources: Iterable[Source], path: Path) -> None:
        """Write the whole policy without affecting snapshots. Raises the errors of write_snapshot()."""
        self._write(self._files.apart(path), self._whole_finder.find(sources))

    def close(self) -> None:
        """End the threads that copy ahead; exported states stay valid."""
        self._host.close()

    def _write(self, file: StateFile, differences: Iterator[TensorDiff]) -> None:
        """Write `differences`; ranks other than the first iterate over it too, though it is empty there."""
        if self._world.rank:
            for _ in differences:
                pass
            return
        try:
            with file:
                for difference in differences:
                    file.add(difference)
        except StorageError:
            for _ in differences:  # the other ranks still send and would wait for their deadline
                pass
            raise


def compare(old: torch.Tensor, new: torch.Tensor, *, sparse: bool = False) -> Difference | None:
    """Return the elements of `new` that differ from `old`; None if all are equal.

    All of `new` if many differ, unless `sparse`.
    """
    index = torch.nonzero(new != old).view(-1)  # waits for the device; the size is known now
    if not index.numel():
        return None
    if not sparse and index.numel() * MOST_SPARSE > new.numel():
        return Difference(None, new)
    return Difference(index.to(torch.int32), new[index])


def parts(count: int, chunk: int = CHUNK) -> Iterator[slice]:
    """Split `count` elements into chunks."""
    return (slice(at, min(at + chunk, count)) for at in range(0, count, chunk))


def bundled(sources: Iterable[Source], size: int) -> list[Source]:
    """Join neighbouring sources of one dtype of a single rank into sources of at most `size` elements.

    Each comparison waits for the device once, however few elements it has.
    """
    bundles: list[list[Source]] = []
    elements = 0
    for source in sources:
        elements += numel(source.shape)
        if not bundles or bundles[-1][0].dtype != source.dtype or elements > size:
            bundles.append([])
            elements = numel(source.shape)
        bundles[-1].append(source)
    return [_bundle(bundle) for bundle in bundles]


def _bundle(sources: Sequence[Source]) -> Source:
    if len(sources) == 1:
        return sources[0]
    members, runs, start = tuple(sources), list[TensorPiece](), 0
    for source in members:
        runs += [replace(run, start=start + run.start) for run in source.runs]
        start += numel(source.shape)

    def take() -> torch.Tensor:
        return torch.cat([source.take() for source in members])

    shape = (start,)
    name = f"{members[0].name} to {members[-1].name}"
    return Source(name, members[0].dtype, shape, tuple(runs), slice(0, start), take, take, None)


def _buckets(sources: Sequence[Source], size: int) -> Iterator[list[Source]]:
    """Yield the sources in order, in buckets of about `size` elements: the same on every rank."""
    bucket: list[Source] = []
    elements = 0
    for source in sources:
        bucket.append(source)
        elements += numel(source.shape)
        if elements >= size:
            yield bucket
            bucket, elements = [], 0
    if bucket:
        yield bucket


def _by_run(source: Source, whole: bool, pieces: Sequence[HostPiece]) -> Iterator[TensorDiff]:
    """Yield the differences of one source's checkpoint tensors."""
    mine: list[list[HostPiece]] = [[] for _ in source.runs]
    if len(source.runs) == 1:
        mine[0].extend(pieces)
    else:
        starts = [run.start for run in source.runs]
        for piece in pieces:
            piece.wait()
            for place in _touched(starts, piece):
                mine[place] += _cut(piece, source.runs[place])
    for run, run_pieces in zip(source.runs, mine, strict=True):
        yield TensorDiff(run.name, source.dtype, run.shape, whole, run_pieces)


def _touched(starts: Sequence[int], piece: HostPiece) -> range:
    """Return the indices of the runs that elements of `piece` may lie in."""
    last = piece.bits.size - 1 if piece.index is None else int(piece.index[-1])
    first = 0 if piece.index is None else int(piece.index[0])
    return range(
        bisect.bisect_right(starts, piece.start + first) - 1,
        bisect.bisect_right(starts, piece.start + last),
    )


def _cut(piece: HostPiece, run: TensorPiece) -> list[HostPiece]:
    """Return the part of `piece` that lies in `run`; empty if none does."""
    low, high = run.start - piece.start, run.stop - piece.start
    if piece.index is None:
        low, high = max(low, 0), min(high, piece.bits.size)
        overlap = HostPiece(piece.start + low - run.start, None, piece.bits[low:high])
        return [overlap] if high > low else []
    first, last = piece.index.searchsorted([low, high]).tolist()
    index, bits = piece.index[first:last], piece.bits[first:last]
    return [HostPiece(piece.start - run.start, index, bits)] if last > first else []


def _layout(source: Source) -> Layout:
    return source.dtype, source.shape, source.share.start, source.share.stop


def _storage(dtype: str) -> torch.dtype:
    """Return the torch type that holds the bits of a safetensors dtype."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return widths[BITS[dtype].itemsize]
