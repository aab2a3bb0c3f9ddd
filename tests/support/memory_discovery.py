"""The memory discovery: a graph of neighbours in one process over which facts flood, and chunks go.

Like real gossip it promises nothing: a fact crosses no cut link, and one that was lost is not sent
again.
"""

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from support.memory_streams import AsyncQueue, MemoryConnection, Uplink, connect_ends

from primerl.crypto.hashing import digest
from primerl.node.p2p.discovery import GossipFact
from primerl.node.p2p.transport import ConnectionLost, Stream, Unreachable
from primerl.node.p2p.waiting import Notifier
from primerl.protocol.errors import LocalProtocolError
from primerl.protocol.version import MAX_GOSSIP

T = TypeVar("T")

MAX_FACTS = 1024
"""Facts that wait for a reader; the oldest are dropped first."""
MAX_SEEN = 4096
"""Facts remembered so that none is yielded twice."""
MAX_CALLERS = 64
"""Streams that wait for a reader of callers()."""
CARRYING = b"primerl/blobs/1"


class World(Protocol):
    """What a discovery needs of the network that it lives in."""

    discoveries: "dict[str, MemoryDiscovery]"
    window: int
    uplink: Uplink

    def is_cut(self, a: bytes, b: bytes) -> bool:
        """Whether the two do not reach each other."""
        ...

    async def travel(self, source: bytes, target: bytes, over: Callable[[], bool]) -> None:
        """Return when something sent now would have arrived, or once over() is true."""
        ...

    def loses_gossip(self, source: bytes, target: bytes) -> bool:
        """Whether a fact that `source` hands to `target` is lost."""
        ...


class MemoryDiscovery:
    """One node's discovery. Made by MemoryNetwork.discovery()."""

    def __init__(self, world: World, node_id: bytes) -> None:
        self.node_id = node_id
        self._world = world
        self._wanted: tuple[str, ...] = ()
        self._neighbours: dict[str, MemoryDiscovery] = {}
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._facts: deque[GossipFact] = deque(maxlen=MAX_FACTS)
        self._arrived = Notifier()
        self._callers: AsyncQueue[tuple[bytes, Stream]] = AsyncQueue(MAX_CALLERS, _left)
        self._heard = False
        self._closed = False

    @property
    def address(self) -> str:
        """The made-up multiaddr of this node."""
        return f"/memory/{self.node_id.hex()}"

    def addresses(self) -> tuple[str, ...]:
        """Our one address."""
        return (self.address,)

    async def start(self, bootstrap: Sequence[str]) -> None:
        """Join the world; bootstrap nodes that start later become neighbours then."""
        self._wanted = tuple(bootstrap)
        others = [d for d in self._world.discoveries.values() if d is not self]
        self._world.discoveries[self.address] = self
        for other in others:
            if other.wants(self.address) or self.wants(other.address):
                self.meet(other)
                other.meet(self)

    async def publish(self, sealed: bytes) -> None:
        """Flood a fact to every node that our neighbours lead to."""
        if len(sealed) > MAX_GOSSIP:
            raise LocalProtocolError(
                f"a gossiped fact has at most {MAX_GOSSIP} bytes, this one {len(sealed)}: "
                "send it on a stream"
            )
        self._is_new(sealed)
        self._spread(sealed)

    async def facts(self) -> AsyncIterator[GossipFact]:
        """Facts from others; ends when the discovery is closed. All iterators share one queue."""
        while not self._closed:
            if self._facts:
                yield self._facts.popleft()
            else:
                await self._arrived.wait()

    async def converse(
        self, peer: bytes, addresses: Sequence[str], talk: Callable[[Stream], Awaitable[T]]
    ) -> T:
        """Open a stream to `peer`, a neighbour or at one of `addresses`, and return what `talk` makes of it."""
        reached = [self._world.discoveries.get(at) for at in (*self._neighbours, *addresses)]
        targets = [one for one in reached if one is not None and one.node_id == peer]
        if self._closed or not targets or self._world.is_cut(self.node_id, peer):
            raise Unreachable(f"no address of {peer[:5].hex()} led to it: is it up?")
        near, far = connect_ends(
            self._world.travel,
            self._world.uplink,
            window=self._world.window,
            ids=(self.node_id, peer),
            alpn=CARRYING,
            released=(_forget, _forget),
        )
        try:
            stream = await near.open_stream()
            await near.carry(stream)
            if not targets[0].hears(self.node_id, await far.accept_stream()):
                raise Unreachable(f"{peer[:5].hex()} takes no streams now: try another peer")
            return await talk(stream)
        finally:
            await near.close()

    async def callers(self) -> AsyncIterator[tuple[bytes, Stream]]:
        """(NodeId, stream) of whoever wants to converse; ends when the discovery is closed."""
        self._heard = True
        while not self._closed:
            try:
                yield await self._callers.take()
            except ConnectionLost:
                return

    def hears(self, peer: bytes, stream: Stream) -> bool:
        """Queue a stream that `peer` opened, if anybody takes it."""
        return self._heard and self._callers.offer((peer, stream))

    def neighbours(self) -> int:
        """How many nodes we would hand a fact to."""
        return len(self._neighbours)

    async def close(self) -> None:
        """Leave the world."""
        self.leave()

    def leave(self) -> None:
        """Vanish at once: neighbours lose us and waiting readers end."""
        self._closed = True
        if self._world.discoveries.get(self.address) is self:
            del self._world.discoveries[self.address]
        for neighbour in list(self._neighbours.values()):
            neighbour.lose(self)
        self._neighbours.clear()
        self._arrived.fire()
        self._callers.close()

    def wants(self, address: str) -> bool:
        """Whether `address` is one of our bootstrap entries."""
        return address in self._wanted

    def meet(self, other: "MemoryDiscovery") -> None:
        """Take a neighbour."""
        self._neighbours[other.address] = other

    def lose(self, other: "MemoryDiscovery") -> None:
        """A neighbour is gone."""
        self._neighbours.pop(other.address, None)

    def hear(self, sealed: bytes, source: bytes) -> None:
        """Take a fact from a neighbour and pass it on, once."""
        if not self._is_new(sealed):
            return
        self._facts.append(GossipFact(sealed, source))
        self._arrived.fire()
        self._spread(sealed)

    def _spread(self, sealed: bytes) -> None:
        for neighbour in list(self._neighbours.values()):
            if not self._world.loses_gossip(self.node_id, neighbour.node_id):
                neighbour.hear(sealed, self.node_id)

    def _is_new(self, sealed: bytes) -> bool:
        name = digest(sealed)
        if name in self._seen:
            return False
        self._seen[name] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return True


def _left() -> ConnectionLost:
    return ConnectionLost("this discovery is closed: nobody calls any more")


def _forget(connection: MemoryConnection) -> None:
    """Nobody keeps these connections: each carries one stream."""
