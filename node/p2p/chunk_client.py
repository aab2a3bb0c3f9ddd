"""Request chunks: over several iroh connections to each peer, or over the TCP connections of discovery.

TCP is for peers that QUIC does not reach. The same messages are exchanged, and the handshake proves the same
key, as a libp2p peer id is a node id. It is slower (one thread encrypts everything), so it is never the first
choice.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ...crypto.hashing import short
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
from ...protocol.recent import RecentDict
from ...protocol.version import ALPN_BLOBS, MIB
from .connections import ConnectionPool
from .discovery import StreamCarrier
from .download_state import ChunkDownload
from .limits import Pacer
from .peers import PeerTable
from .rpc import Refused, TooSlow, receive_reply, send
from .transport import Connection, Stream, StreamClosed, TransportError, Unreachable

logger = logging.getLogger(__name__)


class ChunkSource(Protocol):
    """A source that may have chunks."""

    @property
    def name(self) -> str:
        """Name in tables and logs."""
        ...

    @property
    def received(self) -> int:
        """Bytes that came over a network so far."""
        ...

    async def get(self, chunk: ChunkRef, *, deadline: float) -> bytes:
        """Fetch at most `chunk.size` + 1 bytes that claim to be this chunk, within `deadline` seconds.

        Raises TransportError if it cannot be reached or is too slow; Refused if it has none (NOT_FOUND) or
        refuses to give it.
        """
        ...


class PeerPaths(Protocol):
    """Another path to known peers."""

    async def get(self, peer: bytes, chunk: ChunkRef, *, deadline: float) -> bytes:
        """Fetch a chunk from this peer, as ChunkSource.get()."""
        ...


FIRST_BYTE_S = 2.0
"""A source that sends nothing for this long is passed over: dead peers cost seconds."""
PIECE_LEAST, PIECE = 16 * 1024, 128 * 1024
"""Bytes of the first pieces of a chunk, small so that its rate is known early, and of the later ones."""
PIECE_S = 6.0
"""Deadline for one piece of a chunk, of any size."""
LINE_S = 20.0
"""Longest wait in the upload queue of a peer. Nothing is lost by coming again: the server prefers those that
received least, not those that came first."""
ORIGIN_LINE_S = 90.0
"""The same at the origin, which alone may have the chunk; longer than its server keeps anybody in its queue."""
MAX_BEATS = 240
"""InLine messages that one request may bring: more than our own servers send in that time."""
LANES = 4
BULK = 1 * MIB
"""Bytes below which a chunk does not gain from a connection of its own."""
WATCH_S = 660.0
"""Seconds without news after which a watch is given up; the server ends it before that."""
IDLE_NEWS = 8
"""Messages without news before a watch counts as a flood."""


class KeptInLine(Refused):
    """The peer kept us in its queue for so long that it counts as busy."""

    def __init__(self, seconds: float) -> None:
        super().__init__(Reason.BUSY, f"nothing after {seconds:.0f} s in line for a chunk")


@dataclass(frozen=True)
class ChunkOffer:
    """A source's announcement: a chunk of `size` bytes, number `index` of those requested."""

    size: int
    index: int


class ChunkClient:
    """Requests for chunks, spread over several connections to each peer."""

    def __init__(self, links: ConnectionPool, pacer: Pacer) -> None:
        self._links = links
        self._pacer = pacer
        self._busy: Counter[tuple[bytes, int]] = Counter()

    async def one(
        self, chunk: ChunkRef, download: ChunkDownload, *, start: Callable[[], bool]
    ) -> bytes | None:
        """Fetch `chunk` from download.source; `start` is called before its bytes come, and may decline them.

        Raises Refused, RemoteProtocolError, TransportError.
        """
        request = GetChunk(chunk.digest)
        bulk = chunk.size >= BULK
        # A neighbour is one of several sources: it gets no more time to be reached than to answer.
        async with self._ask(download, request, bulk, FIRST_BYTE_S, LINE_S) as (stream, answer):
            if answer.size != chunk.size:
                raise RemoteProtocolError(Reason.WRONG_DIGEST, "not the size that was signed")
            if not start():
                return None
            return await self._read(stream, answer.size, download)

    async def any(
        self,
        wanted: Sequence[ChunkRef],
        download: ChunkDownload,
        *,
        urgent: bool,
        take: Callable[[ChunkRef], bool],
    ) -> bytes | None:
        """Fetch the chunk in `wanted` that download.source chooses; `take` is told which, and may decline it.

        Raises Refused, RemoteProtocolError, TransportError.
        """
        names: Digests = tuple(chunk.digest for chunk in wanted)
        bulk = max(chunk.size for chunk in wanted) >= BULK
        request = GetAnyChunk(names, urgent)
        async with self._ask(download, request, bulk, None, ORIGIN_LINE_S) as (stream, answer):
            if answer.index >= len(wanted) or answer.size != wanted[answer.index].size:
                raise RemoteProtocolError(Reason.WRONG_DIGEST, "none of the chunks requested")
            if not take(wanted[answer.index]):
                return None
            return await self._read(stream, answer.size, download)

    async def watch(self, peer: bytes, names: Sequence[bytes]) -> AsyncGenerator[list[bytes]]:
        """Yield which of `names` the peer holds: first those that it has, then new ones, until it ends this.

        Raises Refused, RemoteProtocolError (MALFORMED for an impossible bitmap, RATE_LIMITED for a flood),
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
        self,
        download: ChunkDownload,
        request: Message,
        bulk: bool,
        patience: float | None,
        line_s: float,
    ) -> AsyncGenerator[tuple[Stream, ChunkOffer]]:
        """Open a stream on which the bytes of a chunk come next."""
        peer = download.source
        lanes = range(LANES) if bulk else (0,)
        lane = min(lanes, key=lambda number: (self._busy[peer, number], number))
        self._busy[peer, lane] += 1
        stream: Stream | None = None
        try:
            connection, lane_used = await self._connect(peer, lane, patience)
            try:
                stream = await self._open(connection, request)
                yield stream, await self._answer(stream, download, line_s)
            except TimeoutError as error:
                await self._links.drop(peer, ALPN_BLOBS, lane=lane_used)
                raise TooSlow("the chunk did not come in time") from error
        finally:
            self._busy[peer, lane] -= 1
            if not self._busy[peer, lane]:
                del self._busy[peer, lane]
            if stream is not None:
                await stream.abort()

    async def _connect(
        self, peer: bytes, lane: int, patience: float | None
    ) -> tuple[Connection, int]:
        """Connect on this lane, or on the first if the peer accepts no more."""
        if lane:
            with suppress(TransportError):
                connection = await self._links.get(peer, ALPN_BLOBS, patience=patience, lane=lane)
                return connection, lane
        return await self._links.get(peer, ALPN_BLOBS, patience=patience), 0

    async def _open(self, connection: Connection, request: Message) -> Stream:
        """Open a stream and send a request. Our direction stays open: ending it says that we need no more."""
        async with asyncio.timeout(FIRST_BYTE_S):
            stream = await connection.open_stream()
            try:
                with suppress(StreamClosed):  # refused before it was read: the reply says why
                    await send(stream, request)
            except BaseException:
                await stream.abort()  # the caller does not know it yet
                raise
            return stream

    async def _answer(self, stream: Stream, download: ChunkDownload, line_s: float) -> ChunkOffer:
        begun = time.monotonic()
        for _ in range(MAX_BEATS):
            async with asyncio.timeout(FIRST_BYTE_S):
                reply = await receive_reply(stream, ChunkFollows | InLine)  # type: ignore[arg-type]
            now = download.heard = time.monotonic()
            if isinstance(reply, ChunkFollows):
                download.touched = now
                return ChunkOffer(reply.size, reply.index)
            # To be in line is no progress: `touched` stays.
            if now - begun > line_s:
                raise KeptInLine(line_s)
        raise RemoteProtocolError(Reason.RATE_LIMITED, "too many words about a line")

    async def _read(self, stream: Stream, size: int, download: ChunkDownload) -> bytes:
        pieces: list[bytes] = []
        length = PIECE_LEAST
        while download.received < size:
            await self._pacer.pace(min(length, size - download.received))
            async with asyncio.timeout(PIECE_S):
                pieces.append(await stream.read_exact(min(length, size - download.received)))
            # under a limit in small pieces: to others, and to our own clocks, it then flows
            length = length if self._pacer.rate else min(2 * length, PIECE)
            download.received += len(pieces[-1])
            download.touched = download.heard = time.monotonic()
        with suppress(TransportError):
            await stream.finish()  # the sender waits to hear that we have it
        return b"".join(pieces)


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
        bits = read_bitmap(news.held, len(names))
        fresh = bits & ~known
        known = bits
        yield [name for number, name in enumerate(names) if fresh >> number & 1]
        limit = WATCH_S
    raise RemoteProtocolError(Reason.RATE_LIMITED, "a watch that repeats the same news")


def read_bitmap(bitmap: bytes, size: int) -> int:
    """Convert a bitmap of `size` bits to an int. Raises RemoteProtocolError(MALFORMED) for any other length."""
    bits = int.from_bytes(bitmap, "little")
    if len(bitmap) != (size + 7) // 8 or bits >> size:
        raise RemoteProtocolError(Reason.MALFORMED, f"a bitmap that is not one of {size} chunks")
    return bits


FETCHES = 4
"""Chunks fetched at a time: more streams are slower, and each takes memory for a chunk."""
AGAIN_S = (0.0, 0.05, 0.2)
"""Pauses before a peer whose connection broke is asked again."""
BACKOFF_S = (1.0, 60.0)
"""First and longest pause after a peer was not reached."""
KNOWN_FAILURES = 1024


class TcpChunks:
    """Fetch chunks from peers over TCP; a PeerPaths."""

    def __init__(
        self,
        carrier: StreamCarrier,
        peers: PeerTable,
        *,
        bootstrap: Sequence[str] = (),
        trainer: bytes = b"",
        pacer: Pacer | None = None,
    ) -> None:
        """`bootstrap`: discovery addresses from the ticket, of peers that may have sent no record yet.
        `trainer`: its chunks do not wait for those of other peers, which may be slow on purpose."""
        self._carrier = carrier
        self._peers = peers
        self._bootstrap = tuple(bootstrap)
        self._trainer = trainer
        self._pacer = pacer or Pacer()
        self.received = 0
        """Bytes of the chunks that came."""
        self._slots = asyncio.Semaphore(FETCHES)
        self._trainer_slots = asyncio.Semaphore(FETCHES)
        self._failures = RecentDict[bytes, tuple[int, float]](KNOWN_FAILURES)

    async def get(self, peer: bytes, chunk: ChunkRef, *, deadline: float) -> bytes:
        """Fetch exactly `chunk.size` bytes that claim to be this chunk, from `peer`, within `deadline` seconds.

        Raises:
            Refused: the peer said no (NOT_FOUND, BUSY, RATE_LIMITED).
            RemoteProtocolError: it broke the protocol: blame it.
            TransportError: it was not reached (at once while it backs off), hung up, or is too slow.
        """
        count, until = self._failures.get(peer, (0, 0.0))
        if time.monotonic() < until:
            raise Unreachable("backing off after it was not reached over TCP")
        slots = self._trainer_slots if peer == self._trainer else self._slots
        try:
            async with asyncio.timeout(deadline), slots:
                data = await self._converse(peer, chunk)
        except TimeoutError as error:
            raise TooSlow(f"no chunk over TCP within {deadline:.1f} s") from error
        except Unreachable:
            self._failed(peer, count)
            raise
        self._failures.pop(peer, None)
        self.received += len(data)
        self._pacer.charge(len(data))  # the next chunk waits for it
        return data

    async def _converse(self, peer: bytes, chunk: ChunkRef) -> bytes:
        """Request a chunk, and again if the stream broke: the next call meets the connection that a cancelled
        one cut."""
        talk = partial(_fetch, chunk=chunk)
        for pause in AGAIN_S:
            try:
                return await self._carrier.converse(peer, self._addresses(peer), talk)
            except StreamClosed as error:
                logger.debug("asking %s again over TCP in %g s: %s", short(peer), pause, error)
                await asyncio.sleep(pause)
        return await self._carrier.converse(peer, self._addresses(peer), talk)

    def _addresses(self, peer: bytes) -> tuple[str, ...]:
        record = self._peers.get(peer).record
        return (*(record.discovery if record else ()), *self._bootstrap)

    def _failed(self, peer: bytes, count: int) -> None:
        first, longest = BACKOFF_S
        pause = min(longest, first * 2 ** min(count, 10))
        self._failures[peer] = (count + 1, time.monotonic() + pause)


async def _fetch(stream: Stream, chunk: ChunkRef) -> bytes:
    """Send one request and read its chunk, in the thread of the stream."""
    with suppress(StreamClosed):  # refused before it was read: the reply says why
        await send(stream, GetChunk(chunk.digest))
    begun = time.monotonic()
    reply = await receive_reply(stream, ChunkFollows | InLine)  # type: ignore[arg-type]
    beats = 0
    while isinstance(reply, InLine):
        beats += 1
        if beats >= MAX_BEATS or time.monotonic() - begun > LINE_S:
            raise KeptInLine(LINE_S)
        reply = await receive_reply(stream, ChunkFollows | InLine)  # type: ignore[arg-type]
    if reply.size != chunk.size:
        raise RemoteProtocolError(Reason.WRONG_DIGEST, "not the size that was signed")
    data = await stream.read_exact(chunk.size)
    with suppress(TransportError):
        await stream.finish()  # the sender waits to hear that we have it
    return data
