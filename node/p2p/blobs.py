"""Serves chunks from the store: one by name, whichever helps most, and news of what is held.

Only what is in the store is served, and only verified bytes get there. Once a chunk was announced on a
stream nothing but its bytes follows: a fault after that resets the stream.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.messages import (
    BlobRequest,
    ChunkFollows,
    GetAnyChunk,
    GetChunk,
    HaveChunks,
    InLine,
    WatchChunks,
)
from ..storage.chunk_store import Store
from .arrivals import Arrivals, Watch
from .copies import Copies
from .limits import Pacer
from .rpc import receive, send
from .slots import Slots, Upload
from .transport import Stream, TransportError

REQUEST_TIMEOUT_S = 15.0
UNHEARD_S = 0.25
"""How long one waits with us for a chunk that we do not fetch: its head may be on its way to us. We will
never have, say, an old anchor if we followed by deltas, and whoever waits for it loses that time."""
QUEUE_S = 60.0
"""Who waits longer for an upload slot is told that we are busy."""
BEAT_S = 0.5
"""Between two InLine messages."""
PIECE = 128 * 1024
PIECE_S = 10.0
"""For a receiver to take one piece."""
MIN_RATE = 64 * 1024
"""Bytes per second below which a receiver gives its slot to others."""
NEWS_BATCH_S = 0.02
WATCH_S = 600.0
WATCHES_PER_PEER = 8
MAX_WATCHED_BY_ALL = 1 << 18
"""Chunks in all watches together: some 40 MiB."""


class BlobServer:
    """Answers the requests on ALPN_BLOBS.

    A bare node is a transport, a PeerTable, Links over both, a Store, Arrivals, this with its handle() in a
    Router, and a BlobFetcher over the same store and arrivals.
    """

    def __init__(self, store: Store, arrivals: Arrivals, pacer: Pacer) -> None:
        self._store = store
        self._arrivals = arrivals
        self._pacer = pacer
        self._slots = Slots()
        self._copies = Copies(random.Random())
        self._watches: Counter[bytes] = Counter()
        self.served: Counter[bytes] = Counter()
        """Chunk bytes by peer."""

    async def handle(self, peer: bytes, stream: Stream) -> None:
        """Answer one request (a router handler)."""
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            request: BlobRequest = await receive(stream, BlobRequest)  # type: ignore[arg-type]
        match request:
            case GetChunk():
                await self._give(peer, stream, request)
            case GetAnyChunk():
                await self._give_any(peer, stream, request)
            case _:  # WatchChunks, the last of the union
                await self._watch(peer, stream, request)

    # -- chunks ----------------------------------------------------------------------------------

    async def _give(self, peer: bytes, stream: Stream, request: GetChunk) -> None:
        if not await self._find(request.digest, request.wait_ms / 1000):
            raise RemoteProtocolError(Reason.NOT_FOUND, short(request.digest))
        async with self._turn(peer, stream) as turn:
            await self._upload(turn, stream, 0, request.digest)

    async def _give_any(self, peer: bytes, stream: Stream, request: GetAnyChunk) -> None:
        held = await asyncio.to_thread(self._held, request.wanted)
        if not held:
            raise RemoteProtocolError(Reason.NOT_FOUND, "none of these is kept")
        self._choose(held, request)  # who gets nothing need not wait to hear it
        async with self._turn(peer, stream) as turn:
            # Only now: while it waited, others were given what it might have got.
            await self._upload(turn, stream, *self._choose(held, request))

    def _choose(self, held: Sequence[tuple[int, bytes]], request: GetAnyChunk) -> tuple[int, bytes]:
        choice = self._copies.choose(held, urgent=request.urgent, now=time.monotonic())
        if choice is None:
            raise RemoteProtocolError(Reason.NOT_YET, "others have these and pass them on")
        return choice

    async def _find(self, name: bytes, patience: float) -> bool:
        """Whether we hold a chunk; waits for one that we are fetching, or will hear of in a moment."""
        held = await asyncio.to_thread(self._store.has, name)
        if not held and patience > 0:
            await self._arrivals.wait(name, min(patience, UNHEARD_S))
            held = await asyncio.to_thread(self._store.has, name)
        if not held and patience > UNHEARD_S and self._arrivals.expected(name):
            await self._arrivals.wait(name, patience - UNHEARD_S)
            held = await asyncio.to_thread(self._store.has, name)
        return held

    def _held(self, names: Sequence[bytes]) -> list[tuple[int, bytes]]:
        return [(number, name) for number, name in enumerate(names) if self._store.has(name)]

    @asynccontextmanager
    async def _turn(self, peer: bytes, stream: Stream) -> AsyncGenerator[Upload]:
        """Hold an upload slot; tells the peer that it stands in line until it has one."""

        async def beat() -> None:
            async with asyncio.timeout(PIECE_S):
                await send(stream, InLine())

        patience = asyncio.timeout(QUEUE_S)
        try:
            async with patience, self._slots.turn(peer, beat_s=BEAT_S, beat=beat) as turn:
                patience.reschedule(None)
                yield turn
        except TimeoutError:
            if patience.expired():
                raise RemoteProtocolError(Reason.BUSY, "too many wait for a chunk") from None
            raise

    async def _upload(self, turn: Upload, stream: Stream, index: int, name: bytes) -> None:
        # Nothing is awaited between the choice of a chunk and its entry in the book of copies.
        with self._counting(name):
            data = await asyncio.to_thread(self._store.get, name)
            if data is None:
                raise RemoteProtocolError(Reason.NOT_FOUND, short(name))
            self._slots.charge(turn.peer, len(data))
            async with _whole_or_reset(stream):
                async with asyncio.timeout(PIECE_S):
                    await send(stream, ChunkFollows(len(data), index))
                await self._write(stream, memoryview(data))
        turn.size = len(data)
        self.served[turn.peer] += len(data)

    @contextmanager
    def _counting(self, name: bytes) -> Generator[None]:
        """Tell the book of copies how an upload goes."""
        size = self._store.size(name) or 0
        start = time.monotonic()
        self._copies.begun(name, size, start)
        whole = False
        try:
            yield
            whole = True
        finally:
            now = time.monotonic()
            if whole:
                self._copies.ended(name, size, now - start, now)
            else:
                self._copies.failed(name, now)

    async def _write(self, stream: Stream, data: memoryview) -> None:
        left = REQUEST_TIMEOUT_S + len(data) / MIN_RATE
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            await self._pacer.pace(len(piece))  # our own slowness is not the receiver's
            began = time.monotonic()
            async with asyncio.timeout(min(PIECE_S, left)):
                await stream.write(piece)
            left -= time.monotonic() - began
        await stream.finish()
        await _until_read(stream, max(PIECE_S, left))
        await stream.abort()  # nothing, if all was read; else what is still in a buffer stays there

    # -- watches ---------------------------------------------------------------------------------

    async def _watch(self, peer: bytes, stream: Stream, request: WatchChunks) -> None:
        names = request.chunks
        if len(set(names)) != len(names):
            raise RemoteProtocolError(Reason.MALFORMED, "a chunk is watched twice")
        full = self._arrivals.watched + len(names) > MAX_WATCHED_BY_ALL
        if full or self._watches[peer] >= WATCHES_PER_PEER:
            raise RemoteProtocolError(Reason.BUSY, "too many watches: end one first")
        self._watches[peer] += 1
        try:
            with self._arrivals.watching(names) as watch:
                for _, name in await asyncio.to_thread(self._held, names):
                    watch.add(name)
                await self._push(stream, watch)
        finally:
            self._watches[peer] -= 1
            if not self._watches[peer]:
                del self._watches[peer]

    async def _push(self, stream: Stream, watch: Watch) -> None:
        """Tell what is held until all of it is, or nobody listens."""
        listening = asyncio.ensure_future(_until_gone(stream, watch))
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._tell(stream, watch)
            if watch.over:
                await stream.abort()
            else:
                await stream.finish()
        finally:
            listening.cancel()
            await asyncio.wait([listening])

    async def _tell(self, stream: Stream, watch: Watch) -> None:
        while not watch.over:
            watch.news.clear()
            async with asyncio.timeout(PIECE_S):
                await send(stream, HaveChunks(watch.held))
            if watch.complete:
                return
            await watch.news.wait()
            await asyncio.sleep(NEWS_BATCH_S)


@asynccontextmanager
async def _whole_or_reset(stream: Stream) -> AsyncGenerator[None]:
    """Reset the stream if the block fails: a refusal would be taken for bytes of the chunk."""
    whole = False
    try:
        yield
        whole = True
    finally:
        if not whole:
            await stream.abort()


async def _until_read(stream: Stream, patience: float) -> None:
    """Writing ends when the bytes are in a buffer; an upload ends when its receiver ends its direction too.

    Without this a narrow line would look free, and a chunk given away, long before anybody has it.
    """
    async with asyncio.timeout(patience):
        with suppress(TransportError):
            await stream.read_exact(1)


async def _until_gone(stream: Stream, watch: Watch) -> None:
    """A watcher says nothing more: when its direction ends, so does its interest."""
    with suppress(TransportError):
        await stream.read_exact(1)
    watch.over = True
    watch.news.set()
