"""The book of one fetch: what is missing, who holds what of it, what is under way and for how long.

Pure: time and randomness are arguments. A claim is only a hint; nothing here counts as held until it arrived.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from statistics import median
from typing import Protocol

from ...crypto.hashing import digest, short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import ChunkRef
from ...protocol.messages import (
    ChunkFollows,
    Digests,
    GetAnyChunk,
    GetChunk,
    HaveChunks,
    InLine,
    Message,
    WatchChunks,
)
from ...protocol.version import ALPN_BLOBS, MIB
from ..ops.errors import NetworkError, StorageError
from ..storage.chunk_store import Store
from .connections import ConnectionPool
from .peers import PeerTable
from .rpc import TooSlow, receive_reply, send
from .serve import ChunkArrivals
from .transport import Connection, Stream, StreamClosed, TransportError
from .waiting import Notifier


class ChunkSource(Protocol):
    """Somewhere that may have chunks."""

    @property
    def name(self) -> str:
        """What to call it in tables and logs."""
        ...

    async def get(self, chunk: ChunkRef, *, deadline: float) -> bytes:
        """At most `chunk.size` + 1 bytes that claim to be this chunk, within `deadline` seconds.

        Raises:
            TransportError: it cannot be reached, or is too slow.
            Refused: it says that it has none (NOT_FOUND) or will not give it.
        """
        ...


class PeerPaths(Protocol):
    """Another way to the peers that we know."""

    async def get(self, peer: bytes, chunk: ChunkRef, *, deadline: float) -> bytes:
        """As ChunkSource.get(), from this peer."""
        ...


SHUN_S = 60.0
"""For the first lie; twice as long for each further one."""
SHUN_MAX_S = 3600.0
DETOUR_S = 60.0
NO_DETOUR_S = 15.0
"""After a detour that led nowhere, or is over, the usual path is tried for so long before the next."""
REST_S = 30.0


class PeerScores:
    """Sources by id: node ids, and names of seeds."""

    def __init__(self) -> None:
        self._lies: dict[bytes, int] = {}
        self._shunned: dict[bytes, float] = {}
        self._detours: dict[bytes, float] = {}
        self._resting: dict[bytes, float] = {}
        self._silent: set[bytes] = set()

    def lied(self, source: bytes, now: float) -> None:
        """It gave wrong bytes, or claimed what it does not have."""
        count = self._lies[source] = self._lies.get(source, 0) + 1
        self._shunned[source] = now + min(SHUN_S * 2 ** (count - 1), SHUN_MAX_S)

    def shunned(self, source: bytes, now: float) -> bool:
        """Whether it is left out for what it did."""
        return now < self._shunned.get(source, 0.0)

    def path_failed(self, source: bytes, now: float, *, detour: bool) -> None:
        """A path to it fails, the usual one or the detour: take the other one for a while.

        Several may fail together; a usual path that was tried before the detour began says nothing of it.
        """
        if detour:
            self._detours[source] = min(now, self._detours.get(source, now))
        elif not self.detoured(source, now) and self._may_turn(source, now):
            self._detours[source] = now + DETOUR_S

    def _may_turn(self, source: bytes, now: float) -> bool:
        ended = self._detours.get(source)
        return ended is None or now >= ended + NO_DETOUR_S

    def detoured(self, source: bytes, now: float) -> bool:
        """Whether to take the other path."""
        return now < self._detours.get(source, 0.0)

    def rest(self, source: bytes, now: float) -> None:
        """It failed: leave it alone for a while."""
        self._resting[source] = now + REST_S

    def resting(self, source: bytes, now: float) -> bool:
        """Whether it is left alone."""
        return now < self._resting.get(source, 0.0)

    def silent(self, source: bytes) -> None:
        """It did not say in time what it holds: the next fetch does not wait for it."""
        self._silent.add(source)

    def spoke(self, source: bytes) -> None:
        """It said what it holds."""
        self._silent.discard(source)

    def awaited(self, source: bytes) -> bool:
        """Whether a fetch should hear it before it asks anybody else."""
        return source not in self._silent


LOOK_AT = 1024
"""Chunks compared for one choice; among more, sets are in random order anyway."""
COPIES_AT_ONCE = 2
"""Sources that may send one chunk at a time, the second because the first is late."""
LINES_AT_ONCE = 3
"""Lines that one may stand in for the same chunk; who begins to send ends the others."""
IN_LINE_S = 2.0
"""Who stands in line for longer may trouble the origin."""
LATE = 3.0
"""Times the median after which a chunk is late."""
LATE_LEAST_S = 0.5
SILENT_S = 2.0
"""A download that brings nothing for this long is late whatever the others do."""


@dataclass(eq=False)
class ChunkDownload:
    """One download under way."""

    source: bytes
    begun: float
    touched: float
    """When something last came of it."""
    chunk: ChunkRef | None = None
    """None while the source has not chosen yet."""
    sending: bool = False
    """Its bytes come; until then we stand in line."""
    received: int = 0
    leash: asyncio.Timeout | None = None

    def stop(self) -> None:
        """End it from outside: another one was faster."""
        if self.leash is not None:
            self.leash.reschedule(asyncio.get_running_loop().time())


@dataclass
class DownloadState:
    """Made with what is missing; chunks leave it as they arrive."""

    missing: dict[bytes, ChunkRef]
    chance: Random
    _claims: dict[bytes, set[bytes]] = field(default_factory=dict[bytes, set[bytes]])
    """Source -> missing chunks that it says it holds."""
    _holders: Counter[bytes] = field(default_factory=Counter[bytes])
    _pulls: dict[bytes, list[ChunkDownload]] = field(
        default_factory=dict[bytes, list[ChunkDownload]]
    )
    _seconds: deque[float] = field(default_factory=lambda: deque[float](maxlen=32))

    @property
    def typical_s(self) -> float | None:
        """Median seconds of the last chunks; None before the first."""
        return median(self._seconds) if self._seconds else None

    @property
    def sending(self) -> int:
        """Downloads whose bytes are coming."""
        return sum(pull.sending for pulls in self._pulls.values() for pull in pulls)

    @property
    def touched(self) -> float:
        """When something last came of any download under way."""
        return max((pull.touched for some in self._pulls.values() for pull in some), default=0.0)

    def claim(self, source: bytes, names: Iterable[bytes]) -> bool:
        """`source` says that it holds these; whether that is news."""
        held = self._claims.setdefault(source, set())
        fresh = {name for name in names if name in self.missing} - held
        held |= fresh
        self._holders.update(fresh)
        return bool(fresh)

    def claims(self, source: bytes, name: bytes) -> bool:
        """Whether `source` says that it holds a chunk that is missing."""
        return name in self._claims.get(source, ())

    def withdraw(self, source: bytes) -> None:
        """Forget what `source` says."""
        for name in self._claims.pop(source, ()):
            self._holders[name] -= 1

    def next_of(self, source: bytes) -> ChunkRef | None:
        """The chunk that `source` holds, nobody fetches and fewest hold; ties by chance."""
        free = (name for name in self._claims.get(source, ()) if name not in self._pulls)
        names = list(islice(free, LOOK_AT))
        if not names:
            return None
        rarest = min(names, key=lambda name: (self._holders[name], self.chance.random()))
        return self.missing[rarest]

    def late_of(self, source: bytes, now: float) -> ChunkRef | None:
        """A chunk that `source` holds too and that others let us wait for, or take too long to give."""
        for name, pulls in self._pulls.items():
            if self.claims(source, name) and self._may_join(pulls, source, now):
                return self.missing[name]
        return None

    def unheld(self, source: bytes, now: float) -> list[ChunkRef]:
        """What only `source`, who has everything, can give: no claims, or none that keeps its promise."""
        stuck = self._stuck(now)
        stuck_claims = Counter(name for one in stuck for name in self._claims.get(one, ()))
        return [
            chunk
            for name, chunk in self.missing.items()
            if (
                self._is_overdue(pulls, source, now) and not self._others(name, pulls, stuck)
                if (pulls := self._pulls.get(name))
                else self._holders[name] <= stuck_claims[name]
            )
        ]

    def untouched(self, source: bytes, now: float) -> list[ChunkRef]:
        """Everything that is not on its way, or is late, whoever holds it."""
        return [
            chunk
            for name, chunk in self.missing.items()
            if not (pulls := self._pulls.get(name)) or self._is_overdue(pulls, source, now)
        ]

    def wants(self, name: bytes, source: bytes, now: float) -> bool:
        """Whether it helps that `source` sends a chunk now."""
        pulls = self._pulls.get(name, [])
        return name in self.missing and self._may_join(pulls, source, now)

    def starts(self, pull: ChunkDownload, now: float) -> bool:
        """The bytes of `pull` come now; False when the same bytes come from elsewhere already."""
        pulls = self._pulls.get(pull.chunk.digest, []) if pull.chunk else []
        others = [one for one in pulls if one is not pull]
        if any(one.sending and not self._late(one, now) for one in others):
            return False
        pull.sending = True
        for one in others:
            if not one.sending:
                one.stop()
        return True

    def begin(self, chunk: ChunkRef, pull: ChunkDownload) -> None:
        """`pull` fetches `chunk` from now on."""
        pull.chunk = chunk
        self._pulls.setdefault(chunk.digest, []).append(pull)

    def end(self, pull: ChunkDownload) -> None:
        """`pull` is over, however it went."""
        if pull.chunk is None:
            return
        pulls = self._pulls.get(pull.chunk.digest, [])
        if pull in pulls:
            pulls.remove(pull)
        if not pulls:
            self._pulls.pop(pull.chunk.digest, None)

    def arrived(self, chunk: ChunkRef, seconds: float) -> list[ChunkDownload] | None:
        """A chunk is here: whose downloads of it are in vain now; None if it was here already."""
        if self.missing.pop(chunk.digest, None) is None:
            return None
        self._seconds.append(seconds)
        del self._holders[chunk.digest]
        for held in self._claims.values():
            held.discard(chunk.digest)
        return self._pulls.pop(chunk.digest, [])

    def _may_join(self, pulls: list[ChunkDownload], source: bytes, now: float) -> bool:
        if any(pull.source == source for pull in pulls):
            return False
        if not any(pull.sending for pull in pulls):
            return len(pulls) < LINES_AT_ONCE
        alive = [one for one in pulls if one.sending and now - one.touched <= SILENT_S]
        return len(alive) < COPIES_AT_ONCE and all(self._late(one, now) for one in alive)

    def _stuck(self, now: float) -> set[bytes]:
        """Sources that do not give what they promised: nobody should wait for the rest of their claims."""
        return {
            pull.source
            for pulls in self._pulls.values()
            for pull in pulls
            if (now - pull.touched > SILENT_S if pull.sending else now - pull.begun > 2 * IN_LINE_S)
        }

    def _others(self, name: bytes, pulls: list[ChunkDownload], stuck: set[bytes]) -> bool:
        """Whether somebody else could be asked for a chunk that is under way."""
        busy = stuck | {pull.source for pull in pulls}
        return any(name in held for one, held in self._claims.items() if one not in busy)

    def _is_overdue(self, pulls: list[ChunkDownload], source: bytes, now: float) -> bool:
        waited = (one.sending or now - one.begun > IN_LINE_S for one in pulls)
        return all(waited) and self._may_join(pulls, source, now)

    def _late(self, pull: ChunkDownload, now: float) -> bool:
        typical = self.typical_s
        slow = typical is not None and now - pull.begun > max(LATE * typical, LATE_LEAST_S)
        return slow or now - pull.touched > SILENT_S


FIRST_BYTE_S = 2.0
"""A source that says nothing for this long is passed over: dead peers cost seconds."""
PIECE = 128 * 1024
PIECE_S = 6.0
"""For one piece of a chunk: a deadline for every size."""
MAX_BEATS = 240
"""InLine messages that one request may bring: two minutes of them."""
LANES = 4
BULK = 1 * MIB
"""Smaller chunks do not gain from a connection of their own."""
WATCH_S = 660.0
"""A watch ends by itself some time before that."""
IDLE_NEWS = 8
"""Messages of a watch that tell nothing new before it counts as a flood."""


@dataclass(frozen=True)
class ChunkOffer:
    """What a source announced: a chunk of `size` bytes, number `index` of those asked for."""

    size: int
    index: int


class Downloads:
    """Requests for chunks, spread over several connections to each peer."""

    def __init__(self, links: ConnectionPool) -> None:
        self._links = links
        self._busy: Counter[tuple[bytes, int]] = Counter()

    async def one(
        self, chunk: ChunkRef, pull: ChunkDownload, *, start: Callable[[], bool]
    ) -> bytes | None:
        """The bytes that pull.source gives for `chunk`; `start` hears that they come, and may decline them.

        Raises:
            Refused, RemoteProtocolError, TransportError.
        """
        request = GetChunk(chunk.digest)
        bulk = chunk.size >= BULK
        # A neighbour is one of several sources: it gets no more time to be reached than to answer.
        async with self._ask(pull, request, bulk, FIRST_BYTE_S) as (stream, answer):
            if answer.size != chunk.size:
                raise RemoteProtocolError(Reason.WRONG_DIGEST, "not the size that was signed")
            if not start():
                return None
            return await self._read(stream, answer.size, pull)

    async def any(
        self,
        wanted: Sequence[ChunkRef],
        pull: ChunkDownload,
        *,
        urgent: bool,
        take: Callable[[ChunkRef], bool],
    ) -> bytes | None:
        """The bytes of that one of `wanted` which pull.source chose; `take` hears which, and may decline it.

        Raises:
            Refused, RemoteProtocolError, TransportError.
        """
        names: Digests = tuple(chunk.digest for chunk in wanted)
        bulk = max(chunk.size for chunk in wanted) >= BULK
        request = GetAnyChunk(names, urgent)
        async with self._ask(pull, request, bulk, None) as (stream, answer):
            if answer.index >= len(wanted) or answer.size != wanted[answer.index].size:
                raise RemoteProtocolError(Reason.WRONG_DIGEST, "none of what was asked for")
            if not take(wanted[answer.index]):
                return None
            return await self._read(stream, answer.size, pull)

    async def watch(self, peer: bytes, names: Sequence[bytes]) -> AsyncGenerator[list[bytes]]:
        """Yields which of `names` the peer holds: first what it has, then what is new, until it ends this.

        Raises:
            Refused, RemoteProtocolError (MALFORMED for an impossible bitmap, RATE_LIMITED for a flood),
            TransportError.
        """
        connection = await self._links.get(peer, ALPN_BLOBS, patience=FIRST_BYTE_S)
        stream: Stream | None = None
        try:
            stream = await self._open(connection, WatchChunks(tuple(names)))
            async for fresh in _read_news(stream, names):
                yield fresh
        except TimeoutError as error:
            await self._links.drop(peer, ALPN_BLOBS)
            raise TooSlow("no news of chunks in time") from error
        finally:
            if stream is not None:
                await stream.abort()

    @asynccontextmanager
    async def _ask(
        self, pull: ChunkDownload, request: Message, bulk: bool, patience: float | None
    ) -> AsyncGenerator[tuple[Stream, ChunkOffer]]:
        """A stream on which the bytes of a chunk come next."""
        peer = pull.source
        lane = self._free_lane(peer) if bulk else 0
        self._busy[peer, lane] += 1
        stream: Stream | None = None
        try:
            connection, lane_used = await self._connect(peer, lane, patience)
            try:
                stream = await self._open(connection, request)
                yield stream, await self._answer(stream, pull)
            except TimeoutError as error:
                await self._links.drop(peer, ALPN_BLOBS, lane=lane_used)
                raise TooSlow("the chunk did not come in time") from error
        finally:
            self._busy[peer, lane] -= 1
            if stream is not None:
                await stream.abort()

    async def _connect(
        self, peer: bytes, lane: int, patience: float | None
    ) -> tuple[Connection, int]:
        """A connection on this lane, or on the first where the peer takes no more."""
        if lane:
            with suppress(TransportError):
                found = await self._links.get(peer, ALPN_BLOBS, patience=patience, lane=lane)
                return found, lane
        return await self._links.get(peer, ALPN_BLOBS, patience=patience), 0

    async def _open(self, connection: Connection, request: Message) -> Stream:
        """A stream with a request on it. Our direction stays open: its end says that we need no more."""
        async with asyncio.timeout(FIRST_BYTE_S):
            stream = await connection.open_stream()
            try:
                with suppress(StreamClosed):  # refused before it was read: the reply says why
                    await send(stream, request)
            except BaseException:
                await stream.abort()  # nobody else knows of it yet
                raise
            return stream

    async def _answer(self, stream: Stream, pull: ChunkDownload) -> ChunkOffer:
        for _ in range(MAX_BEATS):
            async with asyncio.timeout(FIRST_BYTE_S):
                reply = await receive_reply(stream, ChunkFollows | InLine)  # type: ignore[arg-type]
            pull.touched = time.monotonic()
            if isinstance(reply, ChunkFollows):
                return ChunkOffer(reply.size, reply.index)
        raise TooSlow("too long in line for a chunk")

    async def _read(self, stream: Stream, size: int, pull: ChunkDownload) -> bytes:
        pieces: list[bytes] = []
        for start in range(0, size, PIECE):
            async with asyncio.timeout(PIECE_S):
                pieces.append(await stream.read_exact(min(PIECE, size - start)))
            pull.received += len(pieces[-1])
            pull.touched = time.monotonic()
        with suppress(TransportError):
            await stream.finish()  # the sender waits to hear that we have it
        return b"".join(pieces)

    def _free_lane(self, peer: bytes) -> int:
        return min(range(LANES), key=lambda lane: (self._busy[peer, lane], lane))


async def _read_news(stream: Stream, names: Sequence[bytes]) -> AsyncGenerator[list[bytes]]:
    known = 0
    limit = FIRST_BYTE_S
    for _ in range(len(names) + IDLE_NEWS):
        try:
            async with asyncio.timeout(limit):
                news = await receive_reply(stream, HaveChunks)
        except StreamClosed:
            if limit == FIRST_BYTE_S:
                raise
            return
        held = read_bitmap(news.held, len(names))
        fresh = held & ~known
        known = held
        yield [name for number, name in enumerate(names) if fresh >> number & 1]
        limit = WATCH_S
    raise RemoteProtocolError(Reason.RATE_LIMITED, "news that are none, again and again")


def read_bitmap(held: bytes, size: int) -> int:
    """A bitmap of `size` bits as an int. Raises RemoteProtocolError(MALFORMED) for any other length."""
    bits = int.from_bytes(held, "little")
    if len(held) != (size + 7) // 8 or bits >> size:
        raise RemoteProtocolError(Reason.MALFORMED, f"a bitmap that is not one of {size} chunks")
    return bits


MAX_SENDING = 16
"""Chunks whose bytes are coming: what bounds the memory of a fetch."""
DEPTH, DEPTH_MAX = 2, 4
"""Requests in flight at one source, and at most where there are few sources."""
TICK_S = 0.25
"""Without news, how often to look for what is late."""

OTHER_WAY_S = 10.0
MIN_RATE = 64 * 1024
"""Bytes per second below which a seed, or a peer over another path, is given up."""


@dataclass(frozen=True)
class FetchServices:
    """What all fetches of a node share."""

    downloads: Downloads
    peers: PeerTable
    store: Store
    arrivals: ChunkArrivals
    standing: PeerScores
    seeds: Sequence[ChunkSource]
    paths: PeerPaths | None
    fetched: Counter[bytes]
    wasted: Counter[bytes]


@dataclass
class Fetch:
    """One fetch."""

    tools: FetchServices
    board: DownloadState
    origin: bytes
    neighbours: set[bytes]
    """Those from whom something may still be hoped."""
    error: Exception | None = None
    progressed: float = field(default_factory=time.monotonic)
    """When a chunk arrived, or somebody got one that we miss."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    news: Notifier = field(default_factory=Notifier)

    def fail(self, error: Exception) -> None:
        """End the fetch with an error; the first one counts."""
        self.error = self.error or error
        self.over.set()

    def told(self) -> None:
        """Something changed: everybody looks again."""
        self.news.fire()

    def progress(self) -> None:
        """Things go on: nobody has to become impatient."""
        self.progressed = time.monotonic()
        self.news.fire()

    async def wait_news(self, timeout: float = TICK_S) -> None:
        """Until something changes, or the timeout."""
        try:
            async with asyncio.timeout(timeout):
                await self.news.wait()
        except TimeoutError:
            pass  # whoever waits looks for itself

    def depth(self) -> int:
        """Requests in flight at one source: more where few sources have to fill the line."""
        return max(DEPTH, min(DEPTH_MAX, 8 // (len(self.neighbours) + 1)))

    def full(self) -> bool:
        """Whether no further download may begin."""
        return self.board.sending >= MAX_SENDING

    def pull(
        self, source: bytes, chunk: ChunkRef | None, *, sending: bool = False
    ) -> ChunkDownload:
        """A download that begins now; without a chunk until the source has chosen one.

        `sending`: the source has no line to stand in.
        """
        now = time.monotonic()
        pull = ChunkDownload(source, now, now, sending=sending)
        if chunk is not None:
            self.board.begin(chunk, pull)
        return pull

    async def attempt(
        self, pull: ChunkDownload, get: Callable[[], Awaitable[bytes | None]]
    ) -> bool:
        """Run one download to its end; whether its chunk arrived by it.

        Raises what `get` raises, and RemoteProtocolError(WRONG_DIGEST).
        """
        won = False
        try:
            async with asyncio.timeout(None) as pull.leash:
                data = await get()
            pull.leash = None
            if data is not None and pull.chunk is not None:
                won = await self._keep(pull, pull.chunk, data)
        except TimeoutError:
            if pull.leash is None or not pull.leash.expired():
                raise
        finally:
            pull.leash = None
            self.board.end(pull)
            if not won:
                self.tools.wasted[pull.source] += pull.received
            self.told()
        return won

    async def _keep(self, pull: ChunkDownload, chunk: ChunkRef, data: bytes) -> bool:
        pull.received = len(data)
        try:
            await asyncio.to_thread(_store_verified, self.tools.store, chunk, data)
        except StorageError as error:
            self.fail(error)
            return False
        return self._arrived(pull, chunk)

    def _arrived(self, pull: ChunkDownload, chunk: ChunkRef) -> bool:
        seconds = time.monotonic() - pull.begun
        losers = self.board.arrived(chunk, seconds)
        if losers is None:
            return False
        for loser in losers:
            if loser is not pull:
                loser.stop()
        self.tools.arrivals.arrived(chunk.digest)
        self.tools.fetched[pull.source] += chunk.size
        self.progress()
        if not self.board.missing:
            self.over.set()
        return True


def _store_verified(store: Store, chunk: ChunkRef, data: bytes) -> None:
    if len(data) != chunk.size or digest(data) != chunk.digest:
        raise RemoteProtocolError(Reason.WRONG_DIGEST, f"chunk {short(chunk.digest)}")
    store.put(data)


def other_way_s(chunk: ChunkRef) -> float:
    """Seconds that a chunk may take from a seed, or over another path."""
    return OTHER_WAY_S + chunk.size / MIN_RATE


def gone_from_origin(chunks: Sequence[ChunkRef]) -> NetworkError:
    """What its origin does not keep will not come back: plan anew, for a newer version."""
    names = ", ".join(short(chunk.digest) for chunk in chunks[:3])
    return NetworkError(f"no longer kept by anybody: {len(chunks)} chunk(s), {names}")
