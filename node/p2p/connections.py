"""The accept loop: one handler for each ALPN; limits are checked before anything is read.

A handler answers one stream. Its RemoteProtocolError becomes a refusal; a bug of ours ends that request, with a
traceback in the log, and never the node. Keys are free, so connections of peers that have shown nothing
(peers.Tier) cost members nothing:

- if every slot is taken, a member takes that of a stranger or a newcomer, and never loses its own;
- a stranger's connection that asks for nothing is closed after seconds;
- streams of peers that are no members are accepted at a limited rate, for each and for all together.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.messages import Message
from ...protocol.recent import RecentDict
from ...protocol.version import ALPN_CONTROL
from ..errors import StorageError
from .limits import TokenBuckets, network_of
from .peers import MAX_PEERS, PeerTable, Tier
from .rpc import TooSlow, ask, refuse
from .transport import Connection, ConnectionLost, Stream, Transport, TransportError, Unreachable

logger = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 4.0

T = TypeVar("T")

Key = tuple[bytes, bytes, int]
"""Peer, ALPN, lane."""


class ConnectionPool:
    """A pool of connections that we dialled."""

    def __init__(
        self,
        transport: Transport,
        peers: PeerTable,
        *,
        connect_timeout_s: float,
        may_dial: Callable[[bytes], bool] = lambda peer: True,
    ) -> None:
        """`may_dial` names the peers that may see our address; no other is connected to."""
        self._transport = transport
        self._peers = peers
        self.may_dial = may_dial
        self._timeout = connect_timeout_s
        self._open: dict[Key, Connection] = {}
        self._locks = WeakValueDictionary[Key, asyncio.Lock]()
        """Of dials that are under way or waited for."""
        self._failures = RecentDict[tuple[bytes, int], tuple[int, float]](MAX_PEERS)

    async def get(
        self, peer: bytes, alpn: bytes, *, patience: float | None = None, lane: int = 0
    ) -> Connection:
        """Return a live connection to `peer`, dialled within `patience` seconds (default: as configured).

        Raises Unreachable, at once while it backs off.
        """
        key = (peer, alpn, lane)
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            connection = self._open.get(key)
            if connection is not None and not connection.closed:
                return connection
            await self.drop(peer, alpn, lane=lane)
            return await self._dial(key, min(patience or self._timeout, self._timeout))

    async def request(
        self,
        peer: bytes,
        alpn: bytes,
        message: Message,
        kind: type[T],
        *,
        deadline: float,
        patience: float | None = None,
    ) -> T:
        """Call ask() over the pool; drop a connection that failed, so that the next call dials again.

        `patience`: as for get().
        """
        connection = await self.get(peer, alpn, patience=patience)
        try:
            reply = await ask(connection, message, kind, deadline=deadline)
        except TooSlow:
            self._peers.failed(peer)
            raise
        except TransportError:
            await self.drop(peer, alpn)
            self._peers.failed(peer)
            raise
        self._peers.seen(peer)
        return reply

    async def drop(self, peer: bytes, alpn: bytes, *, lane: int = 0) -> None:
        """Close and forget a connection."""
        connection = self._open.pop((peer, alpn, lane), None)
        if connection is not None:
            self._peers.disconnected(peer, connection)
            await connection.close()

    async def close(self) -> None:
        """Close all connections."""
        for peer, alpn, lane in list(self._open):
            await self.drop(peer, alpn, lane=lane)

    async def _dial(self, key: Key, deadline: float) -> Connection:
        peer, alpn, lane = key
        if not self.may_dial(peer):
            raise Unreachable(
                "this node does not share its address (network.share_address), so it connects to the nodes "
                "that lead its run and to no other"
            )
        # A peer that takes no second connection still has its first: lanes back off by themselves.
        count, until = self._failures.get((peer, lane), (0, 0.0))
        if time.monotonic() < until:
            raise Unreachable("backing off after a failed connection")
        addresses = self._peers.get(peer).addresses
        try:
            connection = await self._transport.connect(peer, addresses, alpn, deadline=deadline)
        except TransportError:
            pause = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**count)
            self._failures[peer, lane] = (count + 1, time.monotonic() + pause)
            raise
        self._failures.pop((peer, lane), None)
        self._open[key] = connection
        self._peers.connected(peer, connection)
        return connection


Handler = Callable[[bytes, Stream], Awaitable[None]]
"""(peer's NodeId, stream) -> answered."""
Gate = Callable[[Connection], Awaitable[None]]
"""Called before a control request on a connection is read; raises RemoteProtocolError to refuse it."""

CONNECTIONS_PER_PEER = 12
"""One for control, LANES for chunks, and as many again that a peer has lost and we have not noticed."""
REQUESTS_PER_SECOND = 200.0
REQUEST_BURST = 400.0
UNPROVEN_PER_SECOND, UNPROVEN_BURST = 20.0, 100.0
"""Control requests of one peer that is no member; further ones wait."""
ALL_UNPROVEN_PER_SECOND, ALL_UNPROVEN_BURST = 50.0, 200.0
"""Rate and burst for all of these together: about a twentieth of the capacity of this loop."""
MAX_WAIT_S = 5.0
"""A request of a peer that is no member is refused, with its connection, if it would wait longer."""
SWAPS_PER_SECOND, SWAP_BURST = 10.0, 40.0
NETWORK_SWAPS_PER_SECOND, NETWORK_SWAP_BURST = 3.0, 10.0
"""Slots that may change hands between peers that are no members, of all and of one network. Further peers are
told to come again, which costs next to nothing."""
STRANGER_S = 10.0
"""Seconds that a stranger has to say hello: after that its connection is closed if it asked for nothing."""
REFUSED_S = 1.0
"""Time to read a refusal of the gate, after which its connection is closed."""
NEWCOMER_IDLE_S = 15.0
"""Seconds after which a newcomer that asked for nothing may lose its slot to another."""
STRANGERS = 0.25
NEWCOMERS = 0.5
"""Shares of all slots: newcomers cannot push strangers below STRANGERS, and newcomers above NEWCOMERS lose
slots."""
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
        Reason.KEY_IN_USE,
    }
)
"""Refusals that are not the fault of the peer that asked."""


async def answer_stream(handler: Handler, peers: PeerTable, peer: bytes, stream: Stream) -> None:
    """Let `handler` answer a stream; if it raises, refuse or abort the stream, and record the peer's fault if
    it is one."""
    try:
        await handler(peer, stream)
    except RemoteProtocolError as error:
        if error.reason in BLAMELESS:
            logger.debug("no for %s: %s", short(peer), error)
        else:
            peers.blame(peer, error.reason)
            logger.info("refused %s: %s", short(peer), error)
        await refuse(stream, error.reason, error.detail)
    except (TransportError, TimeoutError) as error:
        logger.debug("stream of %s broke: %s", short(peer), error)
        await stream.abort()
    except StorageError as error:
        logger.error("cannot answer %s: %s", short(peer), error)
        await refuse(stream, Reason.DISK_FULL, "this node cannot store it now")
    except Exception:
        # One request of one stranger must not end the node, whatever our bug is.
        logger.exception("bug while answering %s", short(peer))
        await refuse(stream, Reason.BUSY, "internal error")


async def no_gate(connection: Connection) -> None:
    """Admit every peer: the gate of nodes that answer all."""


async def no_pipelines(peer: bytes, stream: Stream) -> None:
    """Refuse pipeline connections: the handler of nodes that share no model."""
    raise RemoteProtocolError(Reason.NOT_ADMITTED, "this node shares no model with others")


@dataclass
class OpenConnection:
    """A connection that is served."""

    connection: Connection
    opened: float
    """Monotonic seconds."""
    asked: float
    """Monotonic seconds of its last stream, or of its beginning."""
    network: str
    """See peers.network_of()."""
    streams: int = 0
    """Streams that are being answered."""
    preferred: bool = False
    """Whether its peer is a member and the transport knows it."""
    refused: bool = False
    """Whether the gate refused its last request: its key is served on another connection, or not at all."""

    @property
    def account(self) -> bytes:
        """The key of the allowance that its streams use: a node's own requests are counted apart from those of
        others under its key."""
        own = self.connection.alpn == ALPN_CONTROL and not self.refused
        return self.connection.peer + (b"" if own else b"+")


class Router:
    """Accept connections and streams, and hand each stream to the handler of its ALPN."""

    def __init__(
        self,
        transport: Transport,
        peers: PeerTable,
        handlers: Mapping[bytes, Handler],
        *,
        max_streams_per_peer: int,
        max_peers: int,
        gate: Gate = no_gate,
    ) -> None:
        self._transport = transport
        self._peers = peers
        self._handlers = handlers
        self._gate = gate
        self._max_streams = max_streams_per_peer
        self._max_peers = max_peers
        self._open: dict[bytes, list[OpenConnection]] = {}
        self._streams: Counter[bytes] = Counter()
        self._requests = TokenBuckets(REQUESTS_PER_SECOND, REQUEST_BURST, limit=4 * max_peers)
        self._unproven = TokenBuckets(UNPROVEN_PER_SECOND, UNPROVEN_BURST, limit=4 * max_peers)
        self._all_unproven = TokenBuckets(ALL_UNPROVEN_PER_SECOND, ALL_UNPROVEN_BURST, limit=1)
        self._swaps = TokenBuckets(SWAPS_PER_SECOND, SWAP_BURST, limit=1)
        self._network_swaps = TokenBuckets(
            NETWORK_SWAPS_PER_SECOND, NETWORK_SWAP_BURST, limit=4 * max_peers
        )

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
        mine = OpenConnection(connection, now, now, network_of(connection.path().remote))
        if not await self._make_room(mine):
            await connection.close("too many connections")
            return
        self._open.setdefault(peer, []).append(mine)
        self._peers.connected(peer, connection)
        reason = ""
        answers: set[asyncio.Task[None]] = set()
        try:
            async with asyncio.TaskGroup() as tasks:
                while (stream := await self._next_stream(mine)) is not None:
                    if not await self._pace(mine):
                        reason = "too many requests"
                        break
                    answer = tasks.create_task(self._answer(mine, stream))
                    answers.add(answer)
                    answer.add_done_callback(answers.discard)
                if stream is None:
                    for answer in answers:
                        answer.cancel()
        except* TransportError:
            logger.debug("an answer to %s broke", short(peer))
        finally:
            self._drop(mine)
            self._peers.disconnected(peer, connection)
            await connection.close(reason)

    async def _next_stream(self, mine: OpenConnection) -> Stream | None:
        """Take the next request; return None if the connection has ended.

        Raising would put the error into a group that refers to itself, which keeps the connection in memory
        until the garbage collector runs.
        """
        try:
            stream = await mine.connection.accept_stream()
        except TransportError as error:
            logger.debug("connection of %s ended: %s", short(mine.connection.peer), error)
            return None
        mine.asked = time.monotonic()
        mine.streams += 1
        return stream

    async def _pace(self, mine: OpenConnection) -> bool:
        """Wait before a request of a peer that is no member is answered; its next ones queue in the transport.

        Return False if it would have to wait too long.
        """
        peer, now = mine.connection.peer, time.monotonic()
        if mine.connection.alpn != ALPN_CONTROL or self._peers.tier(peer) == Tier.MEMBER:
            return True
        if self._all_unproven.debt(b"", now, 0.0) > MAX_WAIT_S:
            return False
        wait = max(
            self._unproven.debt(mine.account, now, 1.0), self._all_unproven.debt(b"", now, 1.0)
        )
        if wait > 0.0:
            await asyncio.sleep(wait)
        return True

    async def _sweep(self) -> None:
        """Close connections of strangers that ask for nothing; let members in first when they come again."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for entry in [entry for there in self._open.values() for entry in there]:
                tier = self._peers.tier(entry.connection.peer)
                if tier == Tier.MEMBER and not entry.preferred:
                    self._transport.prefer(entry.connection)
                    entry.preferred = True
                elif entry.streams:
                    continue
                elif entry.refused and now - entry.asked >= REFUSED_S:
                    self._drop(entry)
                    await entry.connection.close("this key is refused here")
                elif tier == Tier.STRANGER and now - entry.asked >= STRANGER_S:
                    self._drop(entry)
                    await entry.connection.close("say hello")

    async def _make_room(self, mine: OpenConnection) -> bool:
        """Make room for a new connection, if need be by closing another peer's; return success."""
        peer = mine.connection.peer
        if peer in self._open:
            return await self._make_own_room(mine, self._open[peer])
        if len(self._open) < self._max_peers:
            return True
        if not self._may_swap(mine):
            return False
        evicted = self._find_evicted(mine)
        if evicted is None:
            return False
        logger.debug("%s makes room for %s", short(evicted), short(peer))
        for entry in self._open.pop(evicted):
            await entry.connection.close("too many connections")
        return True

    async def _make_own_room(self, mine: OpenConnection, there: list[OpenConnection]) -> bool:
        """Make room among a peer's own connections; return whether it may have another one.

        A thief of its key must not use them up. If it has all of them, a connection that the gate refused makes
        room, and for control also the one idle longest.
        """
        if len(there) < CONNECTIONS_PER_PEER:
            return True
        gone = next((entry for entry in there if entry.refused), None)
        if gone is None and mine.connection.alpn == ALPN_CONTROL:
            others = [entry for entry in there if entry.connection.alpn != ALPN_CONTROL]
            gone = min(others, key=lambda entry: entry.asked, default=None)
        if gone is None:
            return False
        self._drop(gone)
        await gone.connection.close("too many connections")
        return True

    def _may_swap(self, mine: OpenConnection) -> bool:
        """Return whether to look for a connection that a new one may replace, as all slots are taken."""
        if self._peers.tier(mine.connection.peer) == Tier.MEMBER:
            return True
        own = not mine.network or self._network_swaps.take(mine.network.encode(), mine.opened)
        return own and self._swaps.take(b"", mine.opened)

    def _find_evicted(self, mine: OpenConnection) -> bytes | None:
        """Return the peer that loses its slot to a new connection when all are taken."""
        arriving = self._peers.tier(mine.connection.peer)
        tiers: dict[Tier, list[bytes]] = {tier: [] for tier in Tier}
        for node in self._open:
            tiers[self._peers.tier(node)].append(node)
        strangers, newcomers = tiers[Tier.STRANGER], tiers[Tier.NEWCOMER]
        if arriving == Tier.MEMBER:
            return self._first_out(strangers, mine) or self._first_out(newcomers, mine)
        most = STRANGERS * self._max_peers
        if arriving == Tier.NEWCOMER and len(strangers) > most:
            return self._first_out(strangers, mine)
        if arriving == Tier.STRANGER and len(strangers) < most:
            over = len(newcomers) > NEWCOMERS * self._max_peers
            return self._first_out(newcomers, mine) if over else None
        return self._first_out(tiers[arriving], mine, same=True)

    def _first_out(
        self, nodes: list[bytes], mine: OpenConnection, *, same: bool = False
    ) -> bytes | None:
        """Choose the peer to evict: the one idle longest in the largest crowd.

        With `same` (all are of its own tier), only one that is idle, or of a larger crowd than its own.
        """
        crowds = [self._crowd(self._open[node][-1]) for node in nodes]
        sizes = Counter(crowds)
        own = 1 + sizes[self._crowd(mine)]
        candidates: list[tuple[int, float, bytes]] = []
        for node, crowd in zip(nodes, crowds, strict=True):
            size = sizes[crowd]
            if not same or size > own or self._idle(node, mine.opened):
                candidates.append((-size, max(entry.asked for entry in self._open[node]), node))
        return min(candidates)[-1] if candidates else None

    def _idle(self, node: bytes, now: float) -> bool:
        """Return whether a peer does not use its slot: it had time to say hello or to ask for something."""
        there = self._open[node]
        if self._peers.tier(node) == Tier.STRANGER:
            busy = any(entry.streams for entry in there)
            return not busy or now - min(entry.opened for entry in there) > STRANGER_S
        return now - max(entry.asked for entry in there) > NEWCOMER_IDLE_S

    def _crowd(self, entry: OpenConnection) -> tuple[bytes, str]:
        """Return the crowd of a peer: those of one ticket, or strangers of one network, may be one person."""
        node = entry.connection.peer
        ticket = self._peers.get(node).ticket
        if ticket:
            return ticket, ""
        return (b"", entry.network) if entry.network else (node, "")

    def _drop(self, entry: OpenConnection) -> None:
        """Remove a connection from the table."""
        there = self._open.get(entry.connection.peer, [])
        if entry in there:
            there.remove(entry)
            if not there:
                del self._open[entry.connection.peer]

    async def _answer(self, mine: OpenConnection, stream: Stream) -> None:
        try:
            await self._handle(mine, stream)
        finally:
            mine.streams -= 1

    async def _handle(self, mine: OpenConnection, stream: Stream) -> None:
        connection, peer = mine.connection, mine.connection.peer
        account = mine.account
        crowded = self._streams[account] >= self._max_streams
        if crowded or not self._requests.take(account, time.monotonic()):
            await refuse(stream, Reason.RATE_LIMITED, "too many requests at once")
            return
        self._streams[account] += 1
        try:
            handler = self._handlers[connection.alpn]
            if connection.alpn == ALPN_CONTROL:
                handler = partial(self._enter, mine)
            await answer_stream(handler, self._peers, peer, stream)
        finally:
            self._streams[account] -= 1
            if not self._streams[account]:
                del self._streams[account]

    async def _enter(self, mine: OpenConnection, peer: bytes, stream: Stream) -> None:
        """Answer a control request that the gate lets through."""
        try:
            await self._gate(mine.connection)
        except RemoteProtocolError:
            mine.refused = True
            raise
        mine.refused = False
        await self._handlers[ALPN_CONTROL](peer, stream)
