"""Merged deltas for peers that come back: made of single deltas that we hold, kept, and served as chunks.

A request may cost us what the limits here allow and no more; whatever is wrong with it, we say no.
"""

import asyncio
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import Artifact, ChunkRef, PolicyManifest
from ...protocol.messages import MAX_WATCHED, GetMerged, Merged
from ...protocol.version import MIB
from ..config import WeightsConfig
from ..errors import StorageError
from ..network.limits import TokenBuckets
from ..network.rpc import send
from ..network.transport import Stream
from ..store import Store
from ..weights.chain import Chain, Step
from ..weights.chunking import cut
from ..weights.codec import CODEC
from ..weights.errors import CodecError, NoPath
from ..weights.merge import MAX_MERGED, merge
from ..weights.offsets import Offsets
from ..weights.payload import check_layout

logger = logging.getLogger(__name__)

LARGEST_CHUNK = 4 * MIB
"""The same on every node, whatever its configuration: then two of them make the same chunks."""
MAX_LOCATED = 1 << 16
"""Tensors whose places fit into an answer; with more a merged delta is only of use as a whole."""
MAX_THREADS = 8
KEPT = 32
"""Merged deltas remembered; the one that was not asked for the longest goes first."""
WAITING = 16
"""Peers that may wait for a merge; each of them once."""
MAKE_S = 60.0
"""A merge, and the wait for the one before it; after this a peer is told to do without."""
ANSWER_S = 15.0
PEER_RATE, PEER_BURST, PEERS = 0.5, 4, 1024
"""Requests per second of one peer."""
MAKE_RATE, MAKE_BURST = 0.1, 4
"""Merges per second, whoever asks: identities are free."""

DISK_SHARE = 16
"""One part in so many of the disk that chunks may take is for merged deltas."""
FULL = 0.75
"""Above this share of the disk nothing is merged: versions come first."""

_Key = tuple[int, bytes, int, bytes]
"""(version, state digest) of both ends."""


class MergeDesk:
    """Answers GetMerged."""

    def __init__(
        self,
        store: Store,
        *,
        chain: Callable[[], Chain],
        pinned: set[bytes],
        config: WeightsConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pinned` are the chunks that the node never collects: what is kept here is among them."""
        self._store = store
        self._chain = chain
        self._pinned = pinned
        self._disk = int(config.max_disk_gib * 2**30)
        self._max_bytes = self._disk // DISK_SHARE
        """Of the deltas that are read for one merge, and of all merged ones together."""
        self._clock = clock
        self._kept: OrderedDict[_Key, Artifact | None] = OrderedDict()
        """None: this one cannot be merged, or it does not pay."""
        self._loose: dict[bytes, int] = {}
        """Sizes of chunks that are not kept any more; retention deletes them, and nobody else does."""
        self._making = asyncio.Lock()
        self._waiting: set[bytes] = set()
        self._asked = TokenBuckets(PEER_RATE, PEER_BURST, PEERS)
        self._makes = TokenBuckets(MAKE_RATE, MAKE_BURST, 1)
        self.made = 0
        """Merges done."""

    async def handle(self, peer: bytes, stream: Stream, request: GetMerged) -> None:
        """Answer one request; the caller has decided that `peer` may ask."""
        artifact = await self.answer(peer, request)
        async with asyncio.timeout(ANSWER_S):
            await send(stream, Merged(artifact))
            await stream.finish()

    async def answer(self, peer: bytes, request: GetMerged) -> Artifact:
        """The merged delta. Raises RemoteProtocolError with the reason why there is none."""
        if not self._asked.take(peer, self._clock()):
            raise RemoteProtocolError(Reason.BUSY, "merged deltas are asked for too often")
        key = (request.base_version, request.base_state, request.version, request.state)
        found = await self._find(key)
        if found is not None:
            return found
        steps = await self._steps(key)
        if peer in self._waiting or len(self._waiting) >= WAITING:
            raise RemoteProtocolError(Reason.BUSY, "others wait for merged deltas: do without")
        self._waiting.add(peer)
        try:
            async with asyncio.timeout(MAKE_S), self._making:
                found = await self._find(key) or await self._make(key, steps)
        except TimeoutError as error:
            raise RemoteProtocolError(Reason.BUSY, "merging takes too long here") from error
        finally:
            self._waiting.discard(peer)
        if found is None:
            raise _nothing("these deltas cannot be merged")
        return found

    def learn(self, artifact: Artifact, version: int, state: bytes) -> None:
        """Keep a merged delta that we fetched whole and proved to lead to `version`, for others to fetch.

        Where its tensors begin is not passed on: that is what the peer said of whom we have it, unproved.
        """
        if artifact.size <= self._max_bytes:
            plain = msgspec.structs.replace(artifact, offsets=())
            self._keep((artifact.base_version, artifact.base_state, version, state), plain)

    async def _find(self, key: _Key) -> Artifact | None:
        """What is kept of this, if all of it is still here. Raises if it is known to be impossible."""
        if key not in self._kept:
            return None
        artifact = self._kept[key]
        if artifact is None:
            raise _nothing("these deltas cannot be merged")
        if not await asyncio.to_thread(self._holds, artifact):
            self._drop(key)
            return None
        if key in self._kept:
            self._kept.move_to_end(key)
        return artifact

    async def _steps(self, key: _Key) -> list[Step]:
        """The single deltas between both ends, if we hold every chunk of them."""
        try:
            steps = self._chain().deltas(key[:2], key[2:])
        except NoPath as error:
            raise _nothing(str(error)) from error
        if not 2 <= len(steps) <= MAX_MERGED:
            raise _nothing(f"{len(steps)} deltas are not merged: ask for 2 to {MAX_MERGED}")
        singles = [artifact for _, artifact in steps]
        if sum(artifact.size for artifact in singles) > self._max_bytes:
            raise _nothing("these deltas are too large to be merged here")
        if not await asyncio.to_thread(self._holds, *singles):
            raise _nothing("not all of these deltas are here")
        return steps

    async def _make(self, key: _Key, steps: Sequence[Step]) -> Artifact | None:
        """Merge in a thread, which stops soon after this is cancelled."""
        manifest = self._chain().get(key[2])
        if manifest is None:
            raise _nothing("the version is forgotten by now")
        singles = [artifact for _, artifact in steps]
        await self._make_room(sum(artifact.size for artifact in singles))
        if not self._makes.take(b"", self._clock()):
            raise RemoteProtocolError(Reason.BUSY, "too many merges lately: do without")
        started = time.monotonic()
        chunks: list[ChunkRef] = []
        stop = threading.Event()
        try:
            offsets = await asyncio.to_thread(self._merge, singles, manifest, chunks, stop)
            artifact = _artifact(singles[0], chunks, offsets)
        except CodecError as error:
            logger.debug("no merged delta to version %d: %s", manifest.version, error)
            artifact = None
        except StorageError as error:
            logger.warning("a merged delta cannot be kept: %s", error)
            raise RemoteProtocolError(Reason.DISK_FULL, "no room for a merged delta") from error
        finally:
            stop.set()
            self._let_go(chunks)  # until it is kept
        self._keep(key, artifact)
        if artifact is None:
            return None
        self.made += 1
        logger.info(
            "%d deltas to version %d merged in %.2fs: %d B",
            len(steps),
            manifest.version,
            time.monotonic() - started,
            artifact.size,
        )
        # What was collected between its making and its keeping is made anew when it is asked for again.
        return await self._find(key)

    def _merge(
        self,
        singles: Sequence[Artifact],
        manifest: PolicyManifest,
        chunks: list[ChunkRef],
        stop: threading.Event,
    ) -> tuple[int, ...]:
        """In a thread: put the merged delta into the store and `chunks`; where its tensors begin.

        Raises CodecError, StorageError.
        """
        limit = sum(artifact.size for artifact in singles)
        deltas = [self._read(one, stop) for one in singles]
        payload = merge(deltas, manifest.tensors, threads=_threads())
        offsets = Offsets(check_layout(manifest.tensors))
        for piece in cut(offsets.watch(payload), LARGEST_CHUNK):
            chunks.append(ChunkRef(self._store.put(piece), len(piece)))
            limit -= len(piece)
            if limit < 0 or len(chunks) > MAX_WATCHED:
                raise CodecError("the merged delta is larger than the single ones")
        return offsets.found if len(manifest.tensors) <= MAX_LOCATED else ()

    def _read(self, artifact: Artifact, stop: threading.Event) -> Iterator[bytes]:
        for chunk in artifact.chunks:
            data = None if stop.is_set() else self._store.get(chunk.digest)
            if data is None:
                raise StorageError(f"chunk {short(chunk.digest)} is not here any more")
            yield data

    def _holds(self, *artifacts: Artifact) -> bool:
        return all(self._store.has(chunk.digest) for one in artifacts for chunk in one.chunks)

    def _keep(self, key: _Key, artifact: Artifact | None) -> None:
        """Remember, and forget what nobody can start from any more, then the oldest."""
        self._kept[key] = artifact
        self._kept.move_to_end(key)
        if artifact is not None:
            self._pinned.update(chunk.digest for chunk in artifact.chunks)
            for chunk in artifact.chunks:
                self._loose.pop(chunk.digest, None)
        chain = self._chain()
        for old in [old for old in self._kept if old != key and chain.get(old[0] + 1) is None]:
            self._drop(old)
        while len(self._kept) > 1 and (len(self._kept) > KEPT or self._bytes() > self._max_bytes):
            self._drop(next(iter(self._kept)))

    async def _make_room(self, size: int) -> None:
        """Room for `size` bytes more, or a refusal; then there is some after the next collection."""
        names = list(self._loose)
        gone = await asyncio.to_thread(
            lambda: [name for name in names if not self._store.has(name)]
        )
        for name in gone:
            self._loose.pop(name, None)
        while self._kept and self._bytes() + size > self._max_bytes:
            self._drop(next(iter(self._kept)))
        total = await asyncio.to_thread(self._store.total_bytes)
        crowded = self._bytes() + sum(self._loose.values()) + size > self._max_bytes
        if crowded or total + size > FULL * self._disk:
            raise RemoteProtocolError(Reason.DISK_FULL, "no room for a merged delta now")

    def _bytes(self) -> int:
        return sum(artifact.size for artifact in self._kept.values() if artifact is not None)

    def _drop(self, key: _Key) -> None:
        artifact = self._kept.pop(key, None)
        if artifact is not None:
            self._let_go(artifact.chunks)

    def _let_go(self, chunks: Sequence[ChunkRef]) -> None:
        """Leave to retention what no other merged delta consists of."""
        kept = {c.digest for one in self._kept.values() if one is not None for c in one.chunks}
        loose = {chunk.digest: chunk.size for chunk in chunks if chunk.digest not in kept}
        self._pinned.difference_update(loose)
        self._loose.update(loose)


def _artifact(first: Artifact, chunks: Sequence[ChunkRef], offsets: tuple[int, ...]) -> Artifact:
    """A delta on the base of `first`."""
    return Artifact(
        kind="delta",
        base_version=first.base_version,
        base_state=first.base_state,
        codec=CODEC,
        size=sum(chunk.size for chunk in chunks),
        chunks=tuple(chunks),
        offsets=offsets,
    )


def _threads() -> int:
    """Threads that merge: half of the cores are for what the node is there for."""
    return max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))


def _nothing(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError(Reason.NOT_FOUND, detail)
