"""The accept loop: one ALPN, one handler; per-peer limits before anything is read.

A handler answers one stream. What it raises of theirs becomes a refusal; a bug of ours costs that request,
with a traceback in the log, never the node.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from .limits import TokenBuckets
from .peers import PeerTable
from .rpc import refuse
from .transport import (
    Connection,
    ConnectionLost,
    Stream,
    Transport,
    TransportError,
)

logger = logging.getLogger(__name__)

Handler = Callable[[bytes, Stream], Awaitable[None]]
"""(peer's NodeId, stream) -> answered."""

CONNECTIONS_PER_PEER = 12
"""One for control, LANES for chunks, and as many that a peer has lost and we do not know of yet."""
REQUESTS_PER_SECOND = 200.0
REQUEST_BURST = 400.0
BLAMELESS = frozenset(
    {
        Reason.NOT_FOUND,
        Reason.NOT_YET,
        Reason.BUSY,
        Reason.DISK_FULL,
        Reason.LEASE_EXPIRED,
        Reason.LEASE_DONE,
    }
)
"""What we cannot give is not the fault of who asked."""


async def no_pipelines(peer: bytes, stream: Stream) -> None:
    """The handler of nodes that share no model with others."""
    raise RemoteProtocolError(Reason.NOT_ADMITTED, "this node shares no model with others")


class Router:
    """Accepts connections and streams, and hands each stream to the handler of its ALPN."""

    def __init__(
        self,
        transport: Transport,
        peers: PeerTable,
        handlers: Mapping[bytes, Handler],
        *,
        max_streams_per_peer: int,
        max_peers: int,
    ) -> None:
        self._transport = transport
        self._peers = peers
        self._handlers = handlers
        self._max_streams = max_streams_per_peer
        self._max_peers = max_peers
        self._connections: Counter[bytes] = Counter()
        self._streams: Counter[bytes] = Counter()
        self._requests = TokenBuckets(REQUESTS_PER_SECOND, REQUEST_BURST, limit=4 * max_peers)

    async def run(self) -> None:
        """Accept until the transport is closed."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    connection = await self._transport.accept()
                except ConnectionLost:
                    return
                tasks.create_task(self._serve(connection))

    async def _serve(self, connection: Connection) -> None:
        peer = connection.peer
        crowded = len(self._connections) >= self._max_peers and peer not in self._connections
        if crowded or self._connections[peer] >= CONNECTIONS_PER_PEER:
            await connection.close("too many connections")
            return
        self._connections[peer] += 1
        self._peers.connected(peer, connection)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    stream = await connection.accept_stream()
                    tasks.create_task(self._answer(connection, stream))
        except* TransportError:
            logger.debug("connection of %s ended", short(peer))
        finally:
            self._peers.disconnected(peer, connection)
            await connection.close()
            self._connections[peer] -= 1
            if not self._connections[peer]:
                del self._connections[peer]

    async def _answer(self, connection: Connection, stream: Stream) -> None:
        peer = connection.peer
        crowded = self._streams[peer] >= self._max_streams
        if crowded or not self._requests.take(peer, time.monotonic()):
            await refuse(stream, Reason.RATE_LIMITED, "too many requests at once")
            return
        self._streams[peer] += 1
        try:
            await self._handlers[connection.alpn](peer, stream)
        except RemoteProtocolError as error:
            if error.reason in BLAMELESS:
                logger.debug("no for %s: %s", short(peer), error)
            else:
                self._peers.blame(peer, error.reason)
                logger.info("refused %s: %s", short(peer), error)
            await refuse(stream, error.reason, error.detail)
        except (TransportError, TimeoutError) as error:
            logger.debug("stream of %s broke: %s", short(peer), error)
            await stream.abort()
        except Exception:
            # One request of one stranger must not end the node, whatever our bug is.
            logger.exception("bug while answering %s", short(peer))
            await refuse(stream, Reason.BUSY, "internal error")
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]
