"""The accept loop: one ALPN, one handler; limits before anything is read.

A handler answers one stream. What it raises of theirs becomes a refusal; a bug of ours costs that request,
with a traceback in the log, never the node.

Keys are free, so connections of peers that have shown nothing (peers.Tier) cost members nothing:

- where every slot is taken, a member takes that of a stranger, or of a newcomer; its own is never taken;
- a connection of a stranger that asks for nothing is closed after seconds;
- streams of others than members are accepted at a bounded rate, of each and of all together.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.version import ALPN_CONTROL
from .limits import TokenBuckets
from .peers import PeerTable, Tier, network_of
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
UNPROVEN_PER_SECOND, UNPROVEN_BURST = 20.0, 100.0
"""Control requests of one peer that is no member; further ones wait."""
ALL_UNPROVEN_PER_SECOND, ALL_UNPROVEN_BURST = 200.0, 400.0
"""Of all of them together: a tenth of what this loop can answer, about."""
STRANGER_S = 10.0
"""Time that a stranger has to say hello: its connection is closed if it asked for nothing for so long."""
NEWCOMER_IDLE_S = 15.0
"""A newcomer that asked for nothing for so long may lose its slot to another."""
STRANGERS = 0.25
NEWCOMERS = 0.5
"""Of all slots: what strangers can have whatever newcomers hold; newcomers with more than that lose them."""
SWEEP_S = 1.0
BLAMELESS = frozenset(
    {
        Reason.NOT_FOUND,
        Reason.NOT_YET,
        Reason.BUSY,
        Reason.DISK_FULL,
        Reason.LEASE_EXPIRED,
        Reason.LEASE_DONE,
        Reason.RUN_ENDED,
    }
)
"""What we cannot give is not the fault of who asked."""


async def no_pipelines(peer: bytes, stream: Stream) -> None:
    """The handler of nodes that share no model with others."""
    raise RemoteProtocolError(Reason.NOT_ADMITTED, "this node shares no model with others")


@dataclass
class OpenConnection:
    """A connection that is served."""

    connection: Connection
    opened: float
    """Monotonic seconds."""
    asked: float
    """Monotonic seconds of its last stream, or of its begin."""
    streams: int = 0
    """Streams that are being answered."""


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
        self._open: dict[bytes, list[OpenConnection]] = {}
        self._streams: Counter[bytes] = Counter()
        self._requests = TokenBuckets(REQUESTS_PER_SECOND, REQUEST_BURST, limit=4 * max_peers)
        self._unproven = TokenBuckets(UNPROVEN_PER_SECOND, UNPROVEN_BURST, limit=4 * max_peers)
        self._all_unproven = TokenBuckets(ALL_UNPROVEN_PER_SECOND, ALL_UNPROVEN_BURST, limit=1)

    async def run(self) -> None:
        """Accept until the transport is closed."""
        async with asyncio.TaskGroup() as tasks:
            sweeping = tasks.create_task(self._sweep())
            while True:
                try:
                    connection = await self._transport.accept()
                except ConnectionLost:
                    sweeping.cancel()
                    return
                tasks.create_task(self._serve(connection))

    async def _serve(self, connection: Connection) -> None:
        peer, now = connection.peer, time.monotonic()
        if not await self._make_room(connection, now):
            await connection.close("too many connections")
            return
        mine = OpenConnection(connection, now, now)
        self._open.setdefault(peer, []).append(mine)
        self._peers.connected(peer, connection)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    stream = await connection.accept_stream()
                    mine.asked = time.monotonic()
                    mine.streams += 1
                    tasks.create_task(self._answer(mine, stream))
                    await self._pace(connection)
        except* TransportError:
            logger.debug("connection of %s ended", short(peer))
        finally:
            self._drop(mine)
            self._peers.disconnected(peer, connection)
            await connection.close()

    async def _pace(self, connection: Connection) -> None:
        """Wait before the next stream of a peer that is no member is taken; it queues in the transport."""
        peer, now = connection.peer, time.monotonic()
        if connection.alpn != ALPN_CONTROL or self._peers.tier(peer) == Tier.MEMBER:
            return
        wait = max(self._unproven.debt(peer, now, 1.0), self._all_unproven.debt(b"", now, 1.0))
        if wait > 0.0:
            await asyncio.sleep(wait)

    async def _sweep(self) -> None:
        """Close connections of strangers that ask for nothing."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for peer in [peer for peer in self._open if self._peers.tier(peer) == Tier.STRANGER]:
                for one in list(self._open.get(peer, ())):
                    if not one.streams and now - one.asked >= STRANGER_S:
                        self._drop(one)
                        await one.connection.close("say hello")

    async def _make_room(self, connection: Connection, now: float) -> bool:
        """Whether a new connection can be served, if need be in place of those of another peer."""
        peer = connection.peer
        if peer in self._open:
            return len(self._open[peer]) < CONNECTIONS_PER_PEER
        if len(self._open) < self._max_peers:
            return True
        evicted = self._find_evicted(connection, now)
        if evicted is None:
            return False
        logger.debug("%s makes room for %s", short(evicted), short(peer))
        for one in self._open.pop(evicted):
            await one.connection.close("too many connections")
        return True

    def _find_evicted(self, connection: Connection, now: float) -> bytes | None:
        """The peer whose slot a new connection takes where all are taken."""
        arriving = self._peers.tier(connection.peer)
        tiers: dict[Tier, list[bytes]] = {tier: [] for tier in Tier}
        for node in self._open:
            tiers[self._peers.tier(node)].append(node)
        strangers, newcomers = tiers[Tier.STRANGER], tiers[Tier.NEWCOMER]
        if arriving == Tier.MEMBER:
            return self._first_out(strangers, now) or self._first_out(newcomers, now)
        most = STRANGERS * self._max_peers
        if arriving == Tier.NEWCOMER and len(strangers) > most:
            return self._first_out(strangers, now)
        if arriving == Tier.STRANGER and len(strangers) < most:
            over = len(newcomers) > NEWCOMERS * self._max_peers
            return self._first_out(newcomers, now) if over else None
        return self._first_out(tiers[arriving], now, beside=connection)

    def _first_out(
        self, nodes: list[bytes], now: float, beside: Connection | None = None
    ) -> bytes | None:
        """The peer that goes first: of the largest crowd, then whoever asked for nothing for longest.

        With `beside`, a connection of the same tier, only one that is idle, or of a larger crowd than its own.
        """
        crowds = Counter(self._crowd(node) for node in nodes)
        own = 0
        if beside is not None:
            own = 1 + crowds[self._crowd(beside.peer, beside)]
        found: list[tuple[int, float, bytes]] = []
        for node in nodes:
            crowd = crowds[self._crowd(node)]
            if beside is None or crowd > own or self._idle(node, now):
                found.append((-crowd, max(one.asked for one in self._open[node]), node))
        return min(found)[-1] if found else None

    def _idle(self, node: bytes, now: float) -> bool:
        """Whether a peer had time to say hello, or to ask for something, and does not use its slot."""
        there = self._open[node]
        if self._peers.tier(node) == Tier.STRANGER:
            busy = any(one.streams for one in there)
            return not busy or now - min(one.opened for one in there) > STRANGER_S
        return now - max(one.asked for one in there) > NEWCOMER_IDLE_S

    def _crowd(self, node: bytes, connection: Connection | None = None) -> tuple[bytes, str]:
        """Peers that may well be one and the same: of one ticket, or strangers of one network."""
        ticket = self._peers.get(node).ticket
        if ticket:
            return ticket, ""
        if connection is None:
            connection = self._open[node][-1].connection
        network = network_of(connection.path().remote)
        return (b"", network) if network else (node, "")

    def _drop(self, one: OpenConnection) -> None:
        """Count a connection no more."""
        there = self._open.get(one.connection.peer, [])
        if one in there:
            there.remove(one)
            if not there:
                del self._open[one.connection.peer]

    async def _answer(self, mine: OpenConnection, stream: Stream) -> None:
        try:
            await self._handle(mine.connection, stream)
        finally:
            mine.streams -= 1

    async def _handle(self, connection: Connection, stream: Stream) -> None:
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
