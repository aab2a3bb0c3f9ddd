"""Chunks over the TCP connections of discovery, for where QUIC does not get through.

What is said is what ALPN_BLOBS says; who says it is proved by the handshake, for a libp2p peer id is a node
id. Slower than iroh (one thread encrypts everything): a way round, never the first choice.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import ChunkRef
from ...protocol.messages import ChunkFollows, GetChunk, InLine
from .connections import BLAMELESS, Handler
from .discovery import StreamCarrier
from .limits import TokenBuckets
from .peers import PeerTable
from .rpc import TooSlow, receive_reply, refuse, send
from .transport import Stream, StreamClosed, TransportError, Unreachable

logger = logging.getLogger(__name__)

FETCHES = 4
"""Chunks that are fetched at a time: more streams are slower, and each holds a chunk."""
AGAIN_S = (0.0, 0.05, 0.2)
"""Pauses before a peer whose connection broke is asked again."""
BACKOFF_S = (1.0, 60.0)
"""First and longest pause after a peer was not reached."""
KNOWN_FAILURES = 1024
REQUESTS_PER_SECOND, REQUEST_BURST = 50.0, 100.0
CALLERS = 1024
"""Peers whose request rate is remembered."""


class TcpChunks:
    """Chunks from peers over TCP; a PeerPaths."""

    def __init__(
        self, carrier: StreamCarrier, peers: PeerTable, *, bootstrap: Sequence[str] = ()
    ) -> None:
        """`bootstrap`: discovery addresses from the ticket, of peers that may have sent no record yet."""
        self._carrier = carrier
        self._peers = peers
        self._bootstrap = tuple(bootstrap)
        self._slots = asyncio.Semaphore(FETCHES)
        self._failures: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    async def get(self, peer: bytes, chunk: ChunkRef, *, deadline: float) -> bytes:
        """Exactly `chunk.size` bytes that claim to be this chunk, from `peer`, within `deadline` seconds.

        Raises:
            Refused: the peer said no (NOT_FOUND, BUSY, RATE_LIMITED).
            RemoteProtocolError: it broke the protocol: blame it.
            TransportError: it was not reached (at once while it backs off), hung up, or is too slow.
        """
        count, until = self._failures.get(peer, (0, 0.0))
        if time.monotonic() < until:
            raise Unreachable("backing off after it was not reached over TCP")
        try:
            async with asyncio.timeout(deadline), self._slots:
                data = await self._converse(peer, chunk)
        except TimeoutError as error:
            raise TooSlow(f"no chunk over TCP within {deadline:.1f} s") from error
        except Unreachable:
            self._failed(peer, count)
            raise
        self._failures.pop(peer, None)
        return data

    async def _converse(self, peer: bytes, chunk: ChunkRef) -> bytes:
        """Ask, and again where the stream broke: whoever cancels a get cuts the connection under it, and the
        next ones may still meet its remains."""
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
        if len(self._failures) > KNOWN_FAILURES:
            self._failures.popitem(last=False)


async def _fetch(stream: Stream, chunk: ChunkRef) -> bytes:
    """One request and its chunk. Runs in the thread of the stream."""
    with suppress(StreamClosed):  # refused before it was read: the reply says why
        await send(stream, GetChunk(chunk.digest))
    reply = await receive_reply(stream, ChunkFollows | InLine)  # type: ignore[arg-type]
    while isinstance(reply, InLine):
        reply = await receive_reply(stream, ChunkFollows | InLine)  # type: ignore[arg-type]
    if reply.size != chunk.size:
        raise RemoteProtocolError(Reason.WRONG_DIGEST, "not the size that was signed")
    data = await stream.read_exact(chunk.size)
    with suppress(TransportError):
        await stream.finish()  # the sender waits to hear that we have it
    return data


class TcpChunkServer:
    """Answers peers that ask over TCP, by the handler that answers them over QUIC."""

    def __init__(self, carrier: StreamCarrier, peers: PeerTable, handler: Handler) -> None:
        """The carrier bounds how many streams are open, of one peer and of all."""
        self._carrier = carrier
        self._peers = peers
        self._handler = handler
        self._requests = TokenBuckets(REQUESTS_PER_SECOND, REQUEST_BURST, limit=CALLERS)

    async def run(self) -> None:
        """Serve until the carrier is closed."""
        async with asyncio.TaskGroup() as tasks:
            async for peer, stream in self._carrier.callers():
                tasks.create_task(self._answer(peer, stream))

    async def _answer(self, peer: bytes, stream: Stream) -> None:
        try:
            if not self._requests.take(peer, time.monotonic()):
                raise RemoteProtocolError(Reason.RATE_LIMITED, "too many requests over TCP")
            await self._handler(peer, stream)
        except RemoteProtocolError as error:
            if error.reason not in BLAMELESS:
                self._peers.blame(peer, error.reason)
            logger.debug("refused %s over TCP: %s", short(peer), error)
            await refuse(stream, error.reason, error.detail)
        except (TransportError, TimeoutError) as error:
            logger.debug("a TCP stream of %s broke: %s", short(peer), error)
        except Exception:
            # As in the router: one request of one stranger must not end the node, whatever our bug is.
            logger.exception("bug while answering %s over TCP", short(peer))
        finally:
            await stream.abort()


@asynccontextmanager
async def serving(door: TcpChunkServer) -> AsyncGenerator[None]:
    """Run `door` while the block lasts; should it fall, the node goes on without it."""
    running = asyncio.create_task(door.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled() and (error := running.exception()) is not None:
            logger.error("chunks were not served over TCP any more", exc_info=error)
