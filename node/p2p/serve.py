"""Serve chunks from the store: one by name, whichever of several helps most, and news of the chunks held.

Only chunks in the store are served or announced, and only verified bytes get there. Once a chunk was announced
on a stream, only its bytes follow: a later fault resets the stream.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from random import Random

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
from ...protocol.recent import RecentCounter, RecentDict
from ..storage.chunk_store import Store
from ..tasks import end_tasks
from .connections import Handler, answer_stream
from .discovery import StreamCarrier
from .limits import Pacer, TokenBuckets
from .peers import PeerTable
from .rpc import receive, send
from .transport import Stream, TransportError

logger = logging.getLogger(__name__)


NEWS_BATCH_S = 0.02
"""Seconds after which watchers hear of a chunk, and of those that came meanwhile."""


class ChunkWatch:
    """Bitmap of the watched chunks that are held: bit i % 8 of byte i // 8 stands for chunk i."""

    def __init__(self, names: Sequence[bytes]) -> None:
        self._index = {name: number for number, name in enumerate(names)}
        self._size = len(names)
        self._count = 0
        self._held = bytearray((len(names) + 7) // 8)
        self.news = asyncio.Event()
        """Set when there is news to tell, or the watch is over; the reader clears it."""
        self.over = False
        """Whether the other end is gone."""

    @property
    def held(self) -> bytes:
        """The present bitmap."""
        return bytes(self._held)

    @property
    def complete(self) -> bool:
        """Whether all watched chunks are held."""
        return self._count == len(self._index)

    @property
    def size(self) -> int:
        """Number of watched chunks."""
        return self._size

    def add(self, name: bytes) -> bool:
        """Mark a chunk as held; return False for one that is not watched, or was marked before."""
        number = self._index.get(name)
        if number is None or self._held[number // 8] >> number % 8 & 1:
            return False
        self._held[number // 8] |= 1 << number % 8
        self._count += 1
        return True


class ChunkArrivals:
    """Wake waiters and watches when a chunk arrives."""

    def __init__(self) -> None:
        self._events: dict[bytes, asyncio.Event] = {}
        self._waiting: Counter[asyncio.Event] = Counter()
        self._expected: Counter[bytes] = Counter()
        self._watches: dict[ChunkWatch, None] = {}  # in order, so that a simulation repeats
        self._untold: dict[ChunkWatch, None] = {}
        """Watches with news that their readers will be woken for."""

    @property
    def watched(self) -> int:
        """Chunks of all watches together: a measure of their memory."""
        return sum(watch.size for watch in self._watches)

    def expected(self, name: bytes) -> bool:
        """Return whether we are fetching this chunk ourselves."""
        return self._expected[name] > 0

    @contextmanager
    def expecting(self, names: Iterable[bytes]) -> Generator[None]:
        """Count these chunks as expected for the duration of the block."""
        names = tuple(names)
        self._expected.update(names)
        try:
            yield
        finally:
            for name in names:
                self._expected[name] -= 1
                if not self._expected[name]:
                    del self._expected[name]

    @contextmanager
    def watching(self, names: Sequence[bytes]) -> Generator[ChunkWatch]:
        """Open a watch that hears of every chunk from now on; the caller adds those already held."""
        watch = ChunkWatch(names)
        self._watches[watch] = None
        try:
            yield watch
        finally:
            self._watches.pop(watch, None)

    def arrived(self, name: bytes) -> None:
        """Wake all waiters for this chunk, and soon those of all watches together."""
        event = self._events.pop(name, None)
        if event is not None:
            event.set()
        untold = [watch for watch in self._watches if watch.add(name)]
        if untold and not self._untold:
            asyncio.get_running_loop().call_later(NEWS_BATCH_S, self._tell)
        self._untold.update(dict.fromkeys(untold))

    def _tell(self) -> None:
        for watch in self._untold:
            watch.news.set()
        self._untold.clear()

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


MAX_CHUNKS = 1 << 16
"""Chunks remembered; one that was forgotten counts as never given."""
RELAY_S = 2.0
"""Least time for others to pass a chunk on before it is given away again."""
RELAY_MAX_S = 12.0
UNDER_WAY_MAX_S = 60.0
"""A copy that takes longer than this to send is not relied on: its receiver may stall on purpose."""
FIRST_RATE = 1024 * 1024
"""Bytes per second that an upload is expected to reach before any was measured."""


@dataclass
class SentChunk:
    """One chunk that was given away."""

    count: int = 0
    """Copies sent or being sent."""
    spreads_until: float = 0.0
    """Time until which others are expected to receive it and pass it on."""


class UploadCounts:
    """Count the uploads of each chunk, and those that are spreading among others."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._given = RecentDict[bytes, SentChunk](MAX_CHUNKS)
        self._seconds_per_byte = 1.0 / FIRST_RATE

    def choose(
        self, chunks: Iterable[tuple[int, bytes]], *, urgent: bool, now: float
    ) -> tuple[int, bytes] | None:
        """Choose the (index, digest) in `chunks` to give now; None while every one of them is spreading.

        `urgent` gives one that spreads rather than none.
        """
        best: tuple[int, bytes] | None = None
        lowest: tuple[bool, int, float] | None = None
        for index, name in chunks:
            given = self._given.get(name) or SentChunk()
            spreads = now < given.spreads_until
            if spreads and not urgent:
                continue
            rank = (spreads, given.count, self._chance.random())
            if lowest is None or rank < lowest:
                best, lowest = (index, name), rank
        return best

    def begun(self, name: bytes, size: int, now: float) -> None:
        """Count a copy of a chunk that goes out."""
        given = self._given[name] = self._given.get(name) or SentChunk()
        given.count += 1
        expected = min(4 * size * self._seconds_per_byte, UNDER_WAY_MAX_S)
        given.spreads_until = max(given.spreads_until, now + RELAY_S + expected)

    def ended(self, name: bytes, size: int, seconds: float, now: float) -> None:
        """Record that a copy went out whole, in `seconds`."""
        given = self._given.setdefault(name, SentChunk())
        given.spreads_until = now + min(RELAY_S + 3 * seconds, RELAY_MAX_S)
        if size:
            self._seconds_per_byte += 0.3 * (seconds / size - self._seconds_per_byte)

    def failed(self, name: bytes, now: float) -> None:
        """Take back the count of a copy that was not delivered."""
        given = self._given.setdefault(name, SentChunk(1))
        given.count = max(0, given.count - 1)
        if not given.count:
            given.spreads_until = now


FEWEST, MOST = 2, 16
NEARLY = 0.85
"""Share of the best rate that is good enough: with fewer uploads at a time, chunks complete sooner."""
RELEARN_AFTER = 256
"""Uploads after which all rates are measured again: networks change."""
NEWEST = 0.25
"""Weight of the newest upload in the averages."""


class UploadLimit:
    """Learn from completed uploads how many at a time complete chunks soonest."""

    def __init__(self, first: int = FEWEST) -> None:
        self._fewest = min(first, FEWEST)
        self._limit = first
        self._uploads = 0
        self._rates: dict[int, float] = {}
        """Uploads under way -> bytes per second of all of them."""
        self.typical_s = 0.0
        """Typical seconds of an upload; 0 before the first."""

    @property
    def value(self) -> int:
        """Uploads to have under way."""
        return self._limit

    def learn(self, size: int, seconds: float, beside: int) -> None:
        """Learn from an upload of `size` bytes in `seconds`, with `beside` under way, itself included."""
        seconds = max(seconds, 1e-6)
        self.typical_s = _mixed(self.typical_s, seconds)
        self._uploads += 1
        if self._uploads % RELEARN_AFTER == 0:
            self._rates.clear()
            self._limit = self._fewest
        self._rates[beside] = _mixed(self._rates.get(beside, 0.0), beside * size / seconds)
        enough = NEARLY * max(self._rates.values())
        best = min(count for count, rate in self._rates.items() if rate >= enough)
        if best == max(self._rates) and best >= self._limit:
            best += (best + 1) // 2  # by one alone the next could seem no better
        self._limit = max(self._fewest, min(best, MOST))


def _mixed(known: float, newest: float) -> float:
    return known + NEWEST * (newest - known) if known else newest


OVERDUE_S = 4.0
OVERDUE = 4.0
"""Factor of the usual time after which an upload, also older than OVERDUE_S, no longer occupies a slot: a slow
reader, on purpose or not, must not hold up others."""
MAX_UPLOADS = 64
"""Most uploads at a time, with overdue ones, which occupy no slot."""
LEAST_RATE = 44 * 1024
"""Bytes per second that an upload under a limit needs: its receiver waits for a piece (PIECE) for PIECE_S of
chunk_client.py, twice the time that it takes at this rate."""
MAX_QUEUE = 512
"""Requests that may wait; further ones are refused as BUSY."""
HALF_LIFE_S = 10.0
"""Age in seconds at which bytes count half."""
MAX_ACCOUNTS = 1024


@dataclass(eq=False)
class QueuedUpload:
    """A request that waits for a slot."""

    peer: bytes
    granted: "asyncio.Future[ActiveUpload]"


@dataclass(eq=False)
class ActiveUpload:
    """An upload that holds a slot."""

    peer: bytes
    begun: float
    beside: int
    """How many were under way when it began, itself included."""
    size: int = 0
    """Bytes that went out; set by the caller at the end."""


class UploadTotals:
    """Bytes recently sent to each peer: every byte counts half after HALF_LIFE_S. Time is an argument."""

    def __init__(self) -> None:
        self._sums: dict[bytes, tuple[float, float]] = {}

    def add(self, peer: bytes, size: int, now: float) -> None:
        """Count `size` bytes sent to `peer`."""
        self._sums[peer] = (self.recent(peer, now) + size, now)
        if len(self._sums) > MAX_ACCOUNTS:
            del self._sums[min(self._sums, key=lambda account: self.recent(account, now))]

    def recent(self, peer: bytes, now: float) -> float:
        """Return the recent load of `peer`, in bytes."""
        total, since = self._sums.get(peer, (0.0, now))
        return total * 0.5 ** ((now - since) / HALF_LIFE_S)


class UploadSlots:
    """Limit the uploads at a time; the peers that received least lately go first."""

    def __init__(
        self,
        slots: int = FEWEST,
        *,
        queue: int = MAX_QUEUE,
        clock: Callable[[], float] = time.monotonic,
        pacer: Pacer | None = None,
    ) -> None:
        """`slots` is the limit at the start; the best limit is learned. `pacer` may allow fewer."""
        self._limit = UploadLimit(slots)
        self._pacer = pacer or Pacer()
        self._most_waiting = queue
        self._clock = clock
        self._uploads: list[ActiveUpload] = []
        self._queue: list[QueuedUpload] = []
        self._accounts = UploadTotals()

    def charge(self, peer: bytes, size: int) -> None:
        """Count `size` bytes that are about to be sent to `peer`."""
        self._accounts.add(peer, size, self._clock())

    @asynccontextmanager
    async def turn(
        self, peer: bytes, *, beat_s: float, beat: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[ActiveUpload]:
        """Hold a slot; while waiting for it, `beat` is called every `beat_s` seconds.

        The caller holds the deadline. Raises RemoteProtocolError(BUSY) when too many wait.
        """
        if len(self._queue) >= self._most_waiting:
            raise RemoteProtocolError(Reason.BUSY, "too many wait for a chunk: come again")
        waiting = QueuedUpload(peer, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._grant()
        try:
            while not waiting.granted.done():
                done, _ = await asyncio.wait([waiting.granted], timeout=beat_s)
                if not done:
                    await beat()
                    self._grant()  # one of those before us may be overdue by now
            upload = waiting.granted.result()
            yield upload
            if upload.size:
                seconds = self._clock() - upload.begun
                self._limit.learn(upload.size, seconds, upload.beside)
        finally:
            if waiting.granted.done():
                self._uploads.remove(waiting.granted.result())
                self._grant()
            else:
                self._queue.remove(waiting)

    def _grant(self) -> None:
        now = self._clock()
        patience = max(OVERDUE_S, OVERDUE * self._limit.typical_s)
        most = 0 if self._pacer.is_taken else self._pacer.sharers(LEAST_RATE, MAX_UPLOADS)
        while self._queue and len(self._uploads) < most:
            beside = sum(1 for upload in self._uploads if now - upload.begun < patience)
            used = Counter(upload.peer for upload in self._uploads)
            # Of one peer: it cannot hold all slots by reading slowly on purpose.
            most = max(1, self._limit.value - 1)
            ready = [waiting for waiting in self._queue if used[waiting.peer] < most]
            if beside >= self._limit.value or not ready:
                return
            # min() keeps the first of equals: the order of arrival.
            neediest = min(ready, key=lambda waiting: self._accounts.recent(waiting.peer, now))
            self._queue.remove(neediest)
            upload = ActiveUpload(neediest.peer, now, beside + 1)
            self._uploads.append(upload)
            neediest.granted.set_result(upload)


REQUEST_TIMEOUT_S = 15.0
UNHEARD_S = 0.25
"""How long a requester waits for a chunk that we do not fetch: its head may be on its way to us.

Waiting longer is time lost: we never get, say, an old snapshot if we followed by deltas.
"""
QUEUE_S = 60.0
"""A request that waits longer for an upload slot is refused as BUSY."""
BEAT_S = 0.5
"""Interval between two InLine messages."""
PIECE = 128 * 1024
PIECE_S = 10.0
"""Time for a receiver to take one piece."""
MIN_RATE = 64 * 1024
"""Bytes per second below which a receiver gives its slot to others."""
WATCH_S = 600.0
WATCHES_PER_PEER = 8
MAX_WATCHED_BY_ALL = 1 << 18
"""Chunks in all watches together: some 40 MiB."""


class BlobServer:
    """Answer the requests on ALPN_BLOBS.

    The smallest node is a transport, a PeerTable, a ConnectionPool over both, a Store, ChunkArrivals, this with
    its handle() in a Router, and a BlobFetcher over the same store and arrivals.
    """

    def __init__(self, store: Store, arrivals: ChunkArrivals, pacer: Pacer) -> None:
        self._store = store
        self._arrivals = arrivals
        self._pacer = pacer
        self._slots = UploadSlots(pacer=pacer)
        self._copies = UploadCounts(random.Random())
        self._watches: Counter[bytes] = Counter()
        self.served = RecentCounter[bytes](MAX_ACCOUNTS)
        """Chunk bytes by peer."""
        self.closed = False
        """Whether this node serves nothing for now, as its owner wants it."""

    async def handle(self, peer: bytes, stream: Stream) -> None:
        """Answer one request (a router handler)."""
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            request: BlobRequest = await receive(stream, BlobRequest)  # type: ignore[arg-type]
        if self.closed:
            raise RemoteProtocolError(Reason.BUSY, "this node serves no chunks for now")
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
        chunks = await asyncio.to_thread(self._held, request.wanted)
        if not chunks:
            raise RemoteProtocolError(Reason.NOT_FOUND, "none of these is kept")
        self._choose_chunk(chunks, request)  # refuse at once if there is nothing to give
        async with self._turn(peer, stream) as turn:
            # Only now: while it waited, others may have taken its chunk.
            await self._upload(turn, stream, *self._choose_chunk(chunks, request))

    def _choose_chunk(
        self, chunks: Sequence[tuple[int, bytes]], request: GetAnyChunk
    ) -> tuple[int, bytes]:
        choice = self._copies.choose(chunks, urgent=request.urgent, now=time.monotonic())
        if choice is None:
            raise RemoteProtocolError(Reason.NOT_YET, "others have these and pass them on")
        return choice

    async def _find(self, name: bytes, patience: float) -> bool:
        """Return whether we hold a chunk; wait for one that we are fetching or will soon hear of."""
        present = await asyncio.to_thread(self._store.has, name)
        if not present and patience > 0:
            await self._arrivals.wait(name, min(patience, UNHEARD_S))
            present = await asyncio.to_thread(self._store.has, name)
        if not present and patience > UNHEARD_S and self._arrivals.expected(name):
            await self._arrivals.wait(name, patience - UNHEARD_S)
            present = await asyncio.to_thread(self._store.has, name)
        return present

    def _held(self, names: Sequence[bytes]) -> list[tuple[int, bytes]]:
        return [(number, name) for number, name in enumerate(names) if self._store.has(name)]

    @asynccontextmanager
    async def _turn(self, peer: bytes, stream: Stream) -> AsyncGenerator[ActiveUpload]:
        """Hold an upload slot; until there is one, tell the peer that it is in the queue."""

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

    async def _upload(self, turn: ActiveUpload, stream: Stream, index: int, name: bytes) -> None:
        # Nothing is awaited between the choice of a chunk and its entry in the counts of copies.
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
        """Record an upload in the counts of copies."""
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
        remaining_s = REQUEST_TIMEOUT_S + len(data) / MIN_RATE
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            await self._pacer.pace(len(piece))  # our own slowness is not the receiver's
            began = time.monotonic()
            async with asyncio.timeout(min(PIECE_S, remaining_s)):
                await stream.write(piece)
            remaining_s -= time.monotonic() - began
        await stream.finish()
        await _until_read(stream, max(PIECE_S, remaining_s))
        await stream.abort()  # no effect if all was read; else buffered bytes are dropped

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

    async def _push(self, stream: Stream, watch: ChunkWatch) -> None:
        """Send the bitmap until all chunks are held or the watcher is gone."""
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
            await end_tasks(listening)

    async def _tell(self, stream: Stream, watch: ChunkWatch) -> None:
        while not watch.over:
            watch.news.clear()
            async with asyncio.timeout(PIECE_S):
                await send(stream, HaveChunks(watch.held))
            if watch.complete:
                return
            await watch.news.wait()


@asynccontextmanager
async def _whole_or_reset(stream: Stream) -> AsyncGenerator[None]:
    """Reset the stream if the block fails: the peer would take a refusal for bytes of the chunk."""
    whole = False
    try:
        yield
        whole = True
    finally:
        if not whole:
            await stream.abort()


async def _until_read(stream: Stream, patience: float) -> None:
    """Wait until the receiver ends its direction too: writing ends when the bytes are in a buffer.

    Without this a slow connection would look free, and a chunk delivered, long before it is.
    """
    async with asyncio.timeout(patience):
        with suppress(TransportError):
            await stream.read_exact(1)


async def _until_gone(stream: Stream, watch: ChunkWatch) -> None:
    """End a watch when the direction of the watcher ends."""
    with suppress(TransportError):
        await stream.read_exact(1)
    watch.over = True
    watch.news.set()


TCP_REQUESTS_PER_SECOND, TCP_REQUEST_BURST = 50.0, 100.0
TCP_CALLERS = 1024
"""Peers whose request rate is remembered."""


@dataclass
class CountingStream:
    """A stream, and how many bytes it has sent."""

    stream: Stream
    sent: int = 0

    async def read_exact(self, size: int) -> bytes:
        """Read exactly `size` bytes."""
        return await self.stream.read_exact(size)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`."""
        await self.stream.write(data)
        self.sent += len(data)

    async def finish(self) -> None:
        """End our direction."""
        await self.stream.finish()

    async def abort(self) -> None:
        """Reset both directions."""
        await self.stream.abort()


class TcpChunkServer:
    """Answer peers that ask over TCP, by the handler that answers them over QUIC."""

    def __init__(self, carrier: StreamCarrier, peers: PeerTable, handler: Handler) -> None:
        """`carrier` limits how many streams are open, of one peer and of all."""
        self._carrier = carrier
        self._peers = peers
        self._handler = handler
        self.sent = 0
        """Bytes of all streams that have ended."""
        self._requests = TokenBuckets(TCP_REQUESTS_PER_SECOND, TCP_REQUEST_BURST, limit=TCP_CALLERS)

    async def run(self) -> None:
        """Serve until the carrier is closed."""
        async with asyncio.TaskGroup() as tasks:
            async for peer, stream in self._carrier.callers():
                tasks.create_task(self._answer(peer, stream))

    async def _answer(self, peer: bytes, stream: Stream) -> None:
        counted = CountingStream(stream)
        try:
            await answer_stream(self._handle, self._peers, peer, counted)
        finally:
            self.sent += counted.sent
            await stream.abort()

    async def _handle(self, peer: bytes, stream: Stream) -> None:
        if not self._requests.take(peer, time.monotonic()):
            raise RemoteProtocolError(Reason.RATE_LIMITED, "too many requests over TCP")
        await self._handler(peer, stream)


@asynccontextmanager
async def serving(server: TcpChunkServer) -> AsyncGenerator[None]:
    """Run `server` during the block; the node continues without it if it fails."""
    running = asyncio.create_task(server.run())
    try:
        yield
    finally:
        await end_tasks(running)
        if not running.cancelled() and (error := running.exception()) is not None:
            logger.error("chunks were not served over TCP any more", exc_info=error)
