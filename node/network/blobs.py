"""Chunks by digest: served from the store, fetched from many peers, verified before use and before serving.

A node that is still fetching a chunk lets others wait for it, so versions flow down a line of peers while
the trainer sends each chunk as few times as possible.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from ...crypto.hashing import digest, short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import ChunkRef
from ...protocol.messages import BlobRequest, ChunkFollows, GetChunk
from ...protocol.version import ALPN_BLOBS
from ..errors import NetworkError
from ..store import Store
from .limits import Pacer
from .links import Links
from .peers import PeerTable
from .rpc import Refused, TooSlow, receive, receive_reply, send
from .transport import Stream, TransportError

logger = logging.getLogger(__name__)

PARALLEL_CHUNKS = 8
PEER_WAIT_MS = 2_000
"""How long a peer may let us wait for a chunk that it is fetching itself."""
UNHEARD_S = 0.25
"""How long one waits with us for a chunk that we do not fetch: its head may be on its way to us. We will
never have, say, an old anchor if we followed by deltas, and whoever waits for it loses that time."""
ROUNDS = 4
MIN_RATE = 64 * 1024
"""Bytes per second below which a source is given up: a deadline for every size."""
REQUEST_TIMEOUT_S = 15.0
FIRST_BYTE_S = 2.0
"""A source that says nothing for this long (beside an agreed wait) is passed over: dead peers cost seconds."""


class Arrivals:
    """Who waits for which chunk."""

    def __init__(self) -> None:
        self._events: dict[bytes, asyncio.Event] = {}
        self._waiting: Counter[asyncio.Event] = Counter()
        self._expected: Counter[bytes] = Counter()

    def expected(self, name: bytes) -> bool:
        """Whether we are fetching this chunk ourselves."""
        return self._expected[name] > 0

    @contextmanager
    def expecting(self, name: bytes) -> Generator[None]:
        """While we fetch a chunk."""
        self._expected[name] += 1
        try:
            yield
        finally:
            self._expected[name] -= 1
            if not self._expected[name]:
                del self._expected[name]

    def arrived(self, name: bytes) -> None:
        """Wake all who wait for this chunk."""
        event = self._events.pop(name, None)
        if event is not None:
            event.set()

    async def wait(self, name: bytes, timeout: float) -> None:
        """Wait for a chunk; returns silently at the timeout."""
        event = self._events.setdefault(name, asyncio.Event())
        self._waiting[event] += 1
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            pass  # the caller looks for itself
        finally:
            self._waiting[event] -= 1
            if not self._waiting[event]:
                del self._waiting[event]
                if self._events.get(name) is event:
                    del self._events[name]


class BlobServer:
    """Answers GetChunk from the store."""

    def __init__(self, store: Store, arrivals: Arrivals, pacer: Pacer) -> None:
        self._store = store
        self._arrivals = arrivals
        self._pacer = pacer
        self.served: Counter[bytes] = Counter()
        """Chunk bytes by peer."""

    async def handle(self, peer: bytes, stream: Stream) -> None:
        """Answer one request (a router handler)."""
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            request = await receive(stream, BlobRequest)
        data = await self._find(request.digest, request.wait_ms / 1000)
        if data is None:
            raise RemoteProtocolError(Reason.NOT_FOUND, short(request.digest))
        await self._pacer.pace(len(data))
        async with asyncio.timeout(REQUEST_TIMEOUT_S + len(data) / MIN_RATE):
            await send(stream, ChunkFollows(len(data)))
            await stream.write(data)
            await stream.finish()
        self.served[peer] += len(data)

    async def _find(self, name: bytes, patience: float) -> bytes | None:
        """A chunk that we hold, that we are fetching, or that we will hear of in a moment."""
        data = await asyncio.to_thread(self._store.get, name)
        if data is None and patience > 0:
            await self._arrivals.wait(name, min(patience, UNHEARD_S))
            data = await asyncio.to_thread(self._store.get, name)
        if data is None and patience > UNHEARD_S and self._arrivals.expected(name):
            await self._arrivals.wait(name, patience - UNHEARD_S)
            data = await asyncio.to_thread(self._store.get, name)
        return data


class BlobFetcher:
    """Fetches chunks into the store."""

    def __init__(self, links: Links, peers: PeerTable, store: Store, arrivals: Arrivals) -> None:
        self._links = links
        self._peers = peers
        self._store = store
        self._arrivals = arrivals
        self._slots = asyncio.Semaphore(PARALLEL_CHUNKS)
        self._chance = random.Random()
        self.fetched: Counter[bytes] = Counter()
        """Good chunk bytes by source."""

    async def fetch(
        self, chunks: Sequence[ChunkRef], upstreams: Sequence[bytes], origin: bytes
    ) -> None:
        """Bring all `chunks` into the store, from `upstreams` if possible, else from `origin`.

        Raises:
            NetworkError: some chunk could not be had from anybody, or `origin` keeps it no longer.
        """
        brought = [self._expect(chunk, upstreams, origin) for chunk in chunks]
        for outcome in await asyncio.gather(*brought, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _expect(self, chunk: ChunkRef, upstreams: Sequence[bytes], origin: bytes) -> None:
        with self._arrivals.expecting(chunk.digest):
            await self._bring(chunk, upstreams, origin)

    async def _bring(self, chunk: ChunkRef, upstreams: Sequence[bytes], origin: bytes) -> None:
        async with self._slots:
            if await asyncio.to_thread(self._store.has, chunk.digest):
                return
            for attempt in range(ROUNDS):
                for source in [*self._ranked(upstreams), origin]:
                    if await self._try(chunk, source, wait=source != origin):
                        return
                await asyncio.sleep(0.25 * 2**attempt)
        raise NetworkError(f"chunk {short(chunk.digest)} could not be fetched from anybody")

    def _ranked(self, upstreams: Sequence[bytes]) -> list[bytes]:
        """Random order weighted by success times bandwidth, so load spreads and the slow get probed.

        A peer that keeps failing is mostly left out: it comes before the origin, so each try at it would
        cost every chunk its deadline.
        """
        keys = {
            peer: self._chance.random() ** (1.0 / self._peers.weight(peer))
            for peer in upstreams
            if self._chance.random() < self._peers.reliability(peer) ** 2
        }
        return sorted(keys, key=lambda peer: -keys[peer])

    async def _try(self, chunk: ChunkRef, source: bytes, *, wait: bool) -> bool:
        start = time.monotonic()
        try:
            data = await self._download(chunk, source, PEER_WAIT_MS if wait else 0)
        except Refused as refusal:
            if refusal.reason == Reason.NOT_FOUND and not wait:
                # What its origin does not keep will not come back: plan anew, for a newer version.
                raise NetworkError(f"chunk {short(chunk.digest)} is no longer kept") from refusal
            logger.debug("%s has no %s: %s", short(source), short(chunk.digest), refusal)
            return False
        except RemoteProtocolError as error:
            logger.warning("bad chunk from %s: %s", short(source), error)
            self._peers.blame(source, error.reason)
            return False
        except TransportError as error:
            logger.info("no chunk from %s: %s", short(source), error)
            self._peers.failed(source)
            return False
        await asyncio.to_thread(self._store.put, data)
        self._arrivals.arrived(chunk.digest)
        self._peers.served(source, len(data), time.monotonic() - start)
        self.fetched[source] += len(data)
        return True

    async def _download(self, chunk: ChunkRef, source: bytes, wait_ms: int) -> bytes:
        # A peer is one of several sources: it gets no more time to be reached than to answer.
        patience = FIRST_BYTE_S if wait_ms else None
        connection = await self._links.get(source, ALPN_BLOBS, patience=patience)
        stream: Stream | None = None
        try:
            async with asyncio.timeout(FIRST_BYTE_S + wait_ms / 1000) as deadline:
                stream = await connection.open_stream()
                await send(stream, GetChunk(chunk.digest, wait_ms))
                await stream.finish()
                reply = await receive_reply(stream, ChunkFollows)
                if reply.size != chunk.size:
                    raise RemoteProtocolError(Reason.WRONG_DIGEST, "not the size that was signed")
                deadline.reschedule(asyncio.get_running_loop().time() + 1 + chunk.size / MIN_RATE)
                data = await stream.read_exact(chunk.size)
        except TimeoutError as error:
            await self._links.drop(source, ALPN_BLOBS)
            raise TooSlow("the chunk did not come in time") from error
        except TransportError:
            await self._links.drop(source, ALPN_BLOBS)
            raise
        finally:
            if stream is not None:
                await stream.abort()
        if digest(data) != chunk.digest:
            raise RemoteProtocolError(Reason.WRONG_DIGEST, f"chunk {short(chunk.digest)}")
        return data
