"""The memory transport: a world of nodes in one process, with faults that a test can cause.

It is no kinder than QUIC: a cancelled read loses what it had taken, a peer sees a stream only once
something was written to it, and closing a connection drops what was still under way.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence

from support.memory_discovery import MemoryDiscovery
from support.memory_streams import AsyncQueue, MemoryConnection, Uplink, connect_ends

from primerl.crypto.hashing import short
from primerl.node.p2p.transport import Connection, ConnectionLost, Unreachable
from primerl.node.p2p.waiting import Notifier
from primerl.protocol.version import ALPN_BLOBS, ALPN_CONTROL, ALPN_PIPELINE, KIB

DEFAULT_ALPNS = (ALPN_CONTROL, ALPN_BLOBS, ALPN_PIPELINE)
DEFAULT_WINDOW = 256 * KIB
BACKLOG = 256
"""Connections that may wait for accept(); further ones are refused."""

Delay = Callable[[bytes, bytes], Awaitable[None]]
"""Called with (from, to) before every piece of data and every handshake; it may sleep."""
Loss = Callable[[bytes, bytes], bool]
"""Called with (from, to) for every fact that one neighbour hands to another; true loses it."""


async def no_limit(source: bytes, size: int) -> None:
    """The uplink of a world in which every line is as fast as the machine."""


async def no_delay(source: bytes, target: bytes) -> None:
    """The delay of a world without latency."""


def no_loss(source: bytes, target: bytes) -> bool:
    """The loss of a world in which gossip always arrives."""
    return False


class MemoryNetwork:
    """Everything that exists in one world: its nodes, its addresses, and which links are cut.

    `delay` makes latency, `uplink` narrow lines, `loss` drops gossip. `window` is how many bytes one
    direction of a stream holds unread before its writer waits.
    """

    def __init__(
        self,
        *,
        delay: Delay = no_delay,
        uplink: Uplink = no_limit,
        loss: Loss = no_loss,
        window: int = DEFAULT_WINDOW,
    ) -> None:
        self.delay = delay
        self.uplink = uplink
        self.loss = loss
        self.window = window
        self.changed = Notifier()
        self.transports: dict[str, MemoryTransport] = {}
        self.discoveries: dict[str, MemoryDiscovery] = {}
        self._cut: set[frozenset[bytes]] = set()
        self._stalled: set[frozenset[bytes]] = set()
        self._serial = itertools.count(1)

    def transport(
        self, node_id: bytes, alpns: Sequence[bytes] = DEFAULT_ALPNS
    ) -> "MemoryTransport":
        """A live endpoint of `node_id` at an address of its own; it accepts only `alpns`."""
        serial = next(self._serial)
        address = f"10.0.{serial >> 8}.{serial & 255}:4433"
        transport = MemoryTransport(self, node_id, address, alpns)
        self.transports[address] = transport
        return transport

    def discovery(self, node_id: bytes) -> MemoryDiscovery:
        """A discovery of `node_id`; it takes part once started."""
        return MemoryDiscovery(self, node_id)

    def partition(self, a: bytes, b: bytes) -> None:
        """Cut the link between two nodes: its connections are lost, new ones are unreachable."""
        self._cut.add(frozenset((a, b)))
        for transport in self._transports_of(a):
            transport.lose(b)
        self.changed.fire()

    def stall(self, a: bytes, b: bytes) -> None:
        """Make the link between two nodes swallow everything, without a word, until heal()."""
        self._stalled.add(frozenset((a, b)))

    def heal(self, a: bytes, b: bytes) -> None:
        """End a partition or a stall; what a partition broke stays broken."""
        self._cut.discard(frozenset((a, b)))
        self._stalled.discard(frozenset((a, b)))
        self.changed.fire()

    def drop(self, node_id: bytes) -> None:
        """Kill a node: its connections are lost on both sides and nobody reaches it again.

        A later transport(node_id) is the restarted node, at a new address.
        """
        for transport in self._transports_of(node_id):
            transport.die("the node was dropped")
        for discovery in list(self.discoveries.values()):
            if discovery.node_id == node_id:
                discovery.leave()

    def is_cut(self, a: bytes, b: bytes) -> bool:
        """Whether partition(a, b) holds."""
        return frozenset((a, b)) in self._cut

    def loses_gossip(self, source: bytes, target: bytes) -> bool:
        """Whether a fact on its way from `source` to `target` is lost."""
        link = frozenset((source, target))
        return link in self._cut or link in self._stalled or self.loss(source, target)

    async def travel(self, source: bytes, target: bytes, over: Callable[[], bool]) -> None:
        """Return when something sent by `source` would be at `target`, or once over() is true."""
        await self.delay(source, target)
        while frozenset((source, target)) in self._stalled and not over():
            await self.changed.wait()

    def forget(self, transport: "MemoryTransport") -> None:
        """Take an endpoint out of the world."""
        self.transports.pop(transport.address, None)

    def _transports_of(self, node_id: bytes) -> list["MemoryTransport"]:
        return [t for t in self.transports.values() if t.node_id == node_id]


class MemoryTransport:
    """One node's endpoint in a MemoryNetwork. Made by MemoryNetwork.transport()."""

    def __init__(
        self, network: MemoryNetwork, node_id: bytes, address: str, alpns: Sequence[bytes]
    ) -> None:
        self.address = address
        self._network = network
        self._node_id = node_id
        self._alpns = tuple(alpns)
        self._connections: set[MemoryConnection] = set()
        self._closed = False
        self._incoming: AsyncQueue[MemoryConnection] = AsyncQueue(BACKLOG, _transport_closed)

    @property
    def node_id(self) -> bytes:
        """Our own NodeId."""
        return self._node_id

    def addresses(self) -> tuple[str, ...]:
        """The one made-up `host:port` of this endpoint."""
        return (self.address,)

    async def connect(
        self, peer: bytes, addresses: Sequence[str], alpn: bytes, *, deadline: float
    ) -> MemoryConnection:
        """Connect to the node that `addresses` lead to, if it is `peer` and speaks `alpn`."""
        try:
            async with asyncio.timeout(deadline):
                await self._network.travel(self._node_id, peer, lambda: self._closed)
                await self._network.travel(peer, self._node_id, lambda: self._closed)
                return self._handshake(peer, addresses, alpn)
        except TimeoutError as error:
            raise Unreachable(
                f"{short(peer)} did not answer within {deadline:g} s: is the node up?"
            ) from error

    async def accept(self) -> MemoryConnection:
        """The next incoming connection."""
        return await self._incoming.take()

    def prefer(self, connection: Connection) -> None:
        """Handshakes cost nothing here, so nobody has to wait."""

    async def close(self) -> None:
        """Close every connection and leave the world."""
        self.die("the transport was closed")

    def die(self, reason: str) -> None:
        """Leave the world at once; both sides of every connection see it lost."""
        self._closed = True
        self._network.forget(self)
        self._incoming.close()
        for connection in list(self._connections):
            connection.lose(reason)
        self._network.changed.fire()

    def lose(self, peer: bytes) -> None:
        """Break the connections with `peer`."""
        for connection in list(self._connections):
            if connection.peer == peer:
                connection.lose("the link was cut")

    def released(self, connection: MemoryConnection) -> None:
        """A connection of ours is gone."""
        self._connections.discard(connection)
        self._network.changed.fire()

    def admit(self, connection: MemoryConnection) -> bool:
        """Queue an incoming connection; False when too many wait already."""
        if not self._incoming.offer(connection):
            return False
        self._connections.add(connection)
        return True

    def speaks(self, alpn: bytes) -> bool:
        """Whether this endpoint accepts `alpn`."""
        return alpn in self._alpns

    def _handshake(self, peer: bytes, addresses: Sequence[str], alpn: bytes) -> MemoryConnection:
        target = self._find(peer, addresses)
        if not target.speaks(alpn):
            raise Unreachable(f"{short(peer)} does not speak {alpn!r}: is its version ours?")
        near, far = connect_ends(
            self._network.travel,
            self._network.uplink,
            window=self._network.window,
            ids=(self._node_id, peer),
            alpn=alpn,
            released=(self.released, target.released),
        )
        if not target.admit(far):
            raise Unreachable(f"{short(peer)} takes no more connections now: try again later")
        self._connections.add(near)
        return near

    def _find(self, peer: bytes, addresses: Sequence[str]) -> "MemoryTransport":
        if self._closed:
            raise Unreachable("our own transport is closed: start a new one")
        if peer == self._node_id:
            raise Unreachable("that is our own node id: a node does not connect to itself")
        if not self._network.is_cut(self._node_id, peer):
            for address in addresses:
                target = self._network.transports.get(address)
                if target is not None and target.node_id == peer:
                    return target
        raise Unreachable(
            f"no address of {short(peer)} led to it: {', '.join(addresses) or 'none'}"
        )


def _transport_closed() -> ConnectionLost:
    return ConnectionLost("the transport is closed: no more connections will come")
