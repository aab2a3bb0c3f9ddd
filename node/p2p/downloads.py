"""One request for a chunk, or for news of chunks, to one node over iroh.

Silence is failure: whoever lets us wait says so again and again. What is read here is not verified yet.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

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
from .board import Pull
from .links import Links
from .rpc import TooSlow, receive_reply, send
from .transport import Connection, Stream, StreamClosed, TransportError

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
class Answer:
    """What a source announced: a chunk of `size` bytes, number `index` of those asked for."""

    size: int
    index: int


class Downloads:
    """Requests for chunks, spread over several connections to each peer."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._busy: Counter[tuple[bytes, int]] = Counter()

    async def one(self, chunk: ChunkRef, pull: Pull, *, start: Callable[[], bool]) -> bytes | None:
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
        pull: Pull,
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
        self, pull: Pull, request: Message, bulk: bool, patience: float | None
    ) -> AsyncGenerator[tuple[Stream, Answer]]:
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

    async def _answer(self, stream: Stream, pull: Pull) -> Answer:
        for _ in range(MAX_BEATS):
            async with asyncio.timeout(FIRST_BYTE_S):
                reply = await receive_reply(stream, ChunkFollows | InLine)  # type: ignore[arg-type]
            pull.touched = time.monotonic()
            if isinstance(reply, ChunkFollows):
                return Answer(reply.size, reply.index)
        raise TooSlow("too long in line for a chunk")

    async def _read(self, stream: Stream, size: int, pull: Pull) -> bytes:
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
