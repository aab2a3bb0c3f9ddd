"""What the ranks found to differ, brought together on the first rank.

Collective from end to end: all ranks walk the same sources in the same order, and only what differs
travels. Imports torch: import this file lazily.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ...ops.errors import EngineError
from ...weights.state import BITS, numel
from .gathering import Source
from .host import HostPiece, Ready

ALIGN = 8
"""Every array in a message begins at a multiple of this, so that any element type may be viewed there."""
NOTHING, DENSE = 0, -1
"""What is said of a chunk instead of the number of elements that differ."""


class OneRank(Protocol):
    """The part of World that is needed here."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank's messages lie."""
        ...


@dataclass(frozen=True)
class Difference:
    """What differs in one chunk of a rank's share, on the rank's device."""

    index: torch.Tensor | None
    """int32 positions in the chunk, increasing; None: `bits` are all of it."""
    bits: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.bits.nbytes + (0 if self.index is None else self.index.nbytes)


Chunks = Sequence[Difference | None]
"""For each chunk of a rank's share of one source, what differs."""


def fetch(*found: torch.Tensor) -> tuple[list[torch.Tensor], Ready | None]:
    """Tensors of the host that hold these once the event has come to pass."""
    if not found[0].is_cuda:
        return [one.cpu() for one in found], None
    hosts = [torch.empty_like(one, device="cpu", pin_memory=True) for one in found]
    for host, one in zip(hosts, found, strict=True):
        host.copy_(one, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(found[0].device))
    return hosts, ready


def host_pieces(source: Source, chunks: Iterable[Difference | None], chunk: int) -> list[HostPiece]:
    """A rank's own differences on the host, `chunk` elements' each; they leave the device one by one."""
    return [
        _host_piece(source, source.share.start + at * chunk, one)
        for at, one in enumerate(chunks)
        if one is not None
    ]


def _host_piece(source: Source, start: int, found: Difference) -> HostPiece:
    if found.index is None:
        (bits,), ready = fetch(found.bits)
        return HostPiece(start, None, bits.numpy().view(BITS[source.dtype]), ready)
    (index, bits), ready = fetch(found.index, found.bits)
    return HostPiece(start, index.numpy(), bits.numpy().view(BITS[source.dtype]), ready)


class Collector:
    """Brings differences to the first rank, a bucket of sources at a time."""

    def __init__(self, ranks: OneRank, sources: Sequence[Source], chunk: int) -> None:
        self._ranks = ranks
        self._sources = {source.name: place for place, source in enumerate(sources)}
        self._chunk = chunk
        self._shares = np.zeros((ranks.size, len(sources), 2), np.int64)
        """By rank and source: where its share begins and how many elements it has."""

    def agree(self, sources: Sequence[Source], ready: bool) -> bool:
        """Whether all ranks are `ready`.

        Raises EngineError on all of them if they export different tensors, or if some element is
        nobody's or two ranks'.
        """
        if self._ranks.device.type == "cuda":  # messages need what a first collective sets up
            dist.all_reduce(torch.zeros(1, device=self._ranks.device))
        told = [(one.name, one.dtype, one.shape, one.runs, self._chunk) for one in sources]
        said = self._tell(np.array([ready, zlib.crc32(repr(told).encode())], np.int64))
        if len(set(said[:, 1].tolist())) > 1:
            raise EngineError(
                "the ranks export different tensors: start all of them with the same model and config"
            )
        mine = [(one.share.start, one.share.stop - one.share.start) for one in sources]
        shares = self._tell(np.array(mine, np.int64).reshape(-1))
        self._shares = shares.reshape(self._ranks.size, -1, 2)
        for place, source in enumerate(sources):
            self._check_shares(source, self._shares[:, place])
        return bool(said[:, 0].all())

    def collect(self, bucket: Sequence[tuple[Source, Chunks]]) -> list[list[HostPiece]]:
        """For each source of the bucket its pieces, by position; nothing on other ranks than the first."""
        codes = [_code(one) for _, chunks in bucket for one in chunks]
        slots = [sum(self._slots(source, rank) for source, _ in bucket) for rank in self._everyone]
        header = np.zeros(max(1, *slots), np.int64)
        header[: len(codes)] = codes
        headers = self._tell(header)
        plans = [self._plan(bucket, rank, headers[rank]) for rank in self._everyone]
        sizes = [sum(item.nbytes for item in plan) for plan in plans]
        if self._ranks.rank:
            self._send(bucket, sizes[self._ranks.rank])
            return [[] for _ in bucket]
        found = [host_pieces(source, chunks, self._chunk) for source, chunks in bucket]
        for plan, payload in self._receive(plans, sizes):
            for item, piece in _read(plan, payload):
                found[item.source].append(piece)
        return [sorted(pieces, key=lambda piece: piece.start) for pieces in found]

    @property
    def _everyone(self) -> range:
        return range(self._ranks.size)

    def _tell(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Everybody's `numbers` (as many on every rank), a row for each rank."""
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
        """Chunks in a rank's share."""
        return -(-int(self._shares[rank, self._sources[source.name], 1]) // self._chunk)

    def _plan(
        self, bucket: Sequence[tuple[Source, Chunks]], rank: int, header: NDArray[np.int64]
    ) -> "list[_Item]":
        """What a rank's message holds, in this order."""
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
            for one in chunks:
                for part in () if one is None else (one.index, one.bits):
                    if part is not None:
                        payload[at : at + part.nbytes].copy_(part.view(torch.uint8))
                        at += _aligned(part.nbytes)
        _wait([dist.P2POp(dist.isend, payload, 0)])

    def _receive(
        self, plans: "Sequence[list[_Item]]", sizes: Sequence[int]
    ) -> "Iterator[tuple[list[_Item], _Payload]]":
        """Everybody's message; all of them arrive together."""
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
    """Which of the bucket."""
    start: int
    code: int
    length: int
    bits: np.dtype[Any]

    @property
    def count(self) -> int:
        """Elements of which the bits come."""
        return self.length if self.code == DENSE else self.code

    @property
    def index_bytes(self) -> int:
        """Bytes of the positions."""
        return 0 if self.code == DENSE else 4 * self.code

    @property
    def nbytes(self) -> int:
        """Bytes in the message, to the next chunk."""
        return _aligned(self.index_bytes) + _aligned(self.count * self.bits.itemsize)


@dataclass(frozen=True)
class _Payload:
    data: NDArray[np.uint8]
    ready: Ready | None


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


def _code(found: Difference | None) -> int:
    if found is None:
        return NOTHING
    return DENSE if found.index is None else found.index.numel()


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _wait(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()
