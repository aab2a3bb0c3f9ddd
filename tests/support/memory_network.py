"""A network in memory: streams, transports and discovery, with faults that tests plant."""

import asyncio
import itertools
import random
import weakref
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

from support.access_lines import AccessLines

from primerl.crypto.hashing import digest, short
from primerl.node.p2p.discovery import GossipFact
from primerl.node.p2p.transport import (
    Connection,
    ConnectionLost,
    PathInfo,
    Stream,
    StreamClosed,
    TransportError,
    Unreachable,
)
from primerl.node.p2p.waiting import Notifier
from primerl.protocol.errors import LocalProtocolError
from primerl.protocol.version import ALPN_BLOBS, ALPN_CONTROL, ALPN_PIPELINE, KIB, MAX_GOSSIP

WINDOW = 256 * KIB
"""Bytes that one direction of a stream holds unread before its writer waits."""
STREAM_BACKLOG = 256
"""Streams of one connection that may wait for accept_stream()."""

Broken = Callable[[], TransportError]


T = TypeVar("T")


class AsyncQueue(Generic[T]):
    """A bounded queue that can end: once closed, whatever it still held is dropped."""

    def __init__(self, limit: int, ended: Callable[[], Exception]) -> None:
        self._items: deque[T] = deque()
        self._limit = limit
        self._ended = ended
        self._closed = False
        self._changed = Notifier()

    def offer(self, item: T) -> bool:
        """Add `item`; False when the inbox is full or closed."""
        if self._closed or len(self._items) >= self._limit:
            return False
        self._items.append(item)
        self._changed.fire()
        return True

    async def take(self) -> T:
        """The next item in order. Raises what `ended` makes once the inbox is closed."""
        while not self._closed:
            if self._items:
                return self._items.popleft()
            await self._changed.wait()
        raise self._ended()

    def close(self) -> None:
        """End the inbox."""
        self._closed = True
        self._items.clear()
        self._changed.fire()


class Pipe:
    """One direction of a stream: bytes in order, at most `window` of them on their way or unread."""

    def __init__(self, world: "MemoryNetwork", ends: tuple[bytes, bytes], alpn: bytes) -> None:
        """`ends`: its source and its target."""
        self._world = world
        self._ends = ends
        self._alpn = alpn
        self._unread = bytearray()
        self._under_way = 0
        self._finished = False
        self._ended = False
        """Whether the reader knows that it is finished."""
        self._broken: Broken | None = None
        self._changed = Notifier()

    async def put(self, data: memoryview, shown: Callable[[], None]) -> None:
        """Send all of `data`, waiting for room; call `shown` just before some of it arrives."""
        while data:
            self._check()
            if self._finished:
                raise StreamClosed("this stream was finished: open another one to say more")
            room = self._world.window - len(self._unread) - self._under_way
            if room <= 0:
                await self._changed.wait()
                continue
            # what cannot change is not copied
            self._send(data[:room] if data.readonly else bytes(data[:room]), shown)
            data = data[room:]

    def _send(self, data: bytes | memoryview, shown: Callable[[], None]) -> None:
        self._under_way += len(data)
        lines, (source, target) = self._world.lines, self._ends
        arrive = partial(self._arrive, data, shown)
        if lines is None:
            arrive()
        else:
            arrives = partial(self._world.deliver, source, target, arrive)
            lines.send(self, self._ends, self._alpn, len(data), arrives)

    def _arrive(self, data: bytes | memoryview, shown: Callable[[], None]) -> None:
        if self._broken is not None:
            return
        shown()
        self._world.note(self._ends[1], data)
        self._under_way -= len(data)
        self._unread += data
        self._ended = self._finished and not self._under_way
        self._changed.fire()

    async def take(self, size: int) -> bytes:
        """Exactly `size` bytes."""
        taken = bytearray()
        while len(taken) < size:
            self._check()
            piece = self._unread[: size - len(taken)]
            if piece:
                taken += piece
                del self._unread[: len(piece)]
                self._changed.fire()
            elif self._ended:
                raise StreamClosed(f"the stream ended after {len(taken)} of {size} bytes")
            else:
                await self._changed.wait()
        return bytes(taken)

    def finish(self, shown: Callable[[], None]) -> None:
        """Say that nothing more comes."""
        self._check()
        self._finished = True
        self._send(b"", shown)

    def fail(self, broken: Broken) -> None:
        """Every later call raises what `broken` makes. The first failure stays."""
        self._broken = self._broken or broken
        self._unread.clear()
        if self._world.lines is not None:
            self._world.lines.drop(self, self._ends[0])
        self._changed.fire()

    def drop(self, broken: Broken) -> None:
        """Fail for good, unless the writer finished in order."""
        if not self._finished:
            self.fail(broken)

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken()


class MemoryStream:
    """One end of a bidirectional stream."""

    def __init__(self, connection: "MemoryConnection", incoming: Pipe, outgoing: Pipe) -> None:
        self.incoming = incoming
        self.outgoing = outgoing
        self.unseen = False
        """Opened by us, and the peer does not know yet."""
        self._connection = connection
        self._unusable = False
        # A stream that its owner forgot is a reset for the peer, never a clean end.
        for pipe in (incoming, outgoing):
            weakref.finalize(self, pipe.drop, _dropped).atexit = False

    async def read_exact(self, size: int) -> bytes:
        """Exactly `size` bytes, or StreamClosed."""
        with self._using():
            return await self.incoming.take(size)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; waits while the peer's window is full."""
        view = memoryview(data).cast("B")
        size = self._connection.world.packet
        with self._using():
            while view:
                piece, view = view[:size], view[size:]
                await self._connection.send(self, piece)

    async def finish(self) -> None:
        """End our direction."""
        with self._using():
            await self._connection.carry(self)
            self.outgoing.finish(partial(self._connection.announce, self))

    async def abort(self) -> None:
        """Reset what was not finished, and refuse what the peer still sends."""
        self._unusable = True
        self._connection.announce(self)
        self.incoming.drop(_aborted)
        self.outgoing.drop(_aborted)

    def fail(self, broken: Broken) -> None:
        """Break both directions."""
        self.incoming.fail(broken)
        self.outgoing.fail(broken)

    @contextmanager
    def _using(self) -> Generator[None, None, None]:
        if self._unusable:
            raise StreamClosed("an earlier call was cancelled or the stream aborted: open another")
        try:
            yield
        except asyncio.CancelledError:
            self._unusable = True
            raise


class MemoryConnection:
    """One end of a connection."""

    def __init__(
        self,
        world: "MemoryNetwork",
        ids: tuple[bytes, bytes],
        alpn: bytes,
        released: Callable[["MemoryConnection"], None],
    ) -> None:
        self.world = world
        self._id, self._peer = ids
        self._alpn = alpn
        self._released = released
        self.remote = ""
        """IP address of the other node."""
        self._other = self
        self._reason: str | None = None
        self.vanished = False
        """Whether this end's node was killed: the other end hears nothing of it, and gets no answer."""
        self._streams: weakref.WeakValueDictionary[int, MemoryStream] = (
            weakref.WeakValueDictionary()
        )
        """By a number, in order: what a loss does repeats."""
        self._numbers = itertools.count()
        self._incoming: AsyncQueue[MemoryStream] = AsyncQueue(STREAM_BACKLOG, self._lost)
        self._sent = 0

    def pair(self, other: "MemoryConnection") -> None:
        """Name the other end; done once, before either is handed out."""
        self._other = other

    @property
    def peer(self) -> bytes:
        """The other node."""
        return self._peer

    @property
    def alpn(self) -> bytes:
        """The protocol both sides agreed on."""
        return self._alpn

    @property
    def closed(self) -> bool:
        """Whether either side closed it or the link broke."""
        return self._reason is not None

    async def open_stream(self) -> MemoryStream:
        """A new stream; the peer sees it at our first write, finish or abort."""
        self._check()
        here, there = self._id, self._peer
        incoming = Pipe(self.world, (there, here), self.alpn)
        stream = MemoryStream(self, incoming, Pipe(self.world, (here, there), self.alpn))
        stream.unseen = True
        self._streams[next(self._numbers)] = stream
        return stream

    async def accept_stream(self) -> MemoryStream:
        """The next stream that the peer opened."""
        return await self._incoming.take()

    def path(self) -> PathInfo:
        """Counters of what was written at either end; there is no round-trip time."""
        return PathInfo("memory", None, self._sent, self._other._sent, self.remote)

    async def answers(self, within: float) -> bool:
        """Whether a packet would come back in time."""
        try:
            async with asyncio.timeout(within):
                if self._other.vanished:
                    await asyncio.Event().wait()
                await self.world.travel(self._id, self._peer, lambda: self.closed)
                await self.world.travel(self._peer, self._id, lambda: self.closed)
        except TimeoutError:
            return False
        return not self.closed

    async def close(self, reason: str = "") -> None:
        """Close both ends at once; what was not read yet is lost."""
        self.lose(reason or "closed")

    async def send(self, stream: MemoryStream, piece: memoryview) -> None:
        """Carry one piece to the other end."""
        await self.carry(stream)
        await stream.outgoing.put(piece, partial(self.announce, stream))
        self._sent += len(piece)

    async def carry(self, stream: MemoryStream) -> None:
        """Wait for the delay, and announce a stream that is new to the peer; lines do both themselves."""
        self._check()
        if self.world.lines is None:
            await self.world.travel(self._id, self._peer, lambda: self.closed)
            self._check()
            self.announce(stream)

    def announce(self, stream: MemoryStream) -> None:
        """Show the peer a stream that we opened, once."""
        if self.closed or not stream.unseen:
            return
        stream.unseen = False
        far = MemoryStream(self._other, stream.outgoing, stream.incoming)
        if not self._other.admit(far):
            stream.fail(lambda: StreamClosed("the peer takes no more streams now: try later"))

    def admit(self, stream: MemoryStream) -> bool:
        """Queue a stream that the peer opened."""
        self._streams[next(self._numbers)] = stream
        return self._incoming.offer(stream)

    def lose(self, reason: str) -> None:
        """Break both ends; that of a node that was killed breaks alone."""
        for end in (self,) if self.vanished else (self, self._other):
            end.end(reason)

    def end(self, reason: str) -> None:
        """Break this end; the first reason stays."""
        if self.closed:
            return
        self._reason = reason
        self._incoming.close()
        for stream in list(self._streams.values()):
            stream.fail(self._lost)
        self._released(self)

    def _check(self) -> None:
        if self.closed:
            raise self._lost()

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"the connection to {self._peer[:5].hex()} is gone: {self._reason}")


def _aborted() -> StreamClosed:
    return StreamClosed("the stream was aborted")


def _dropped() -> StreamClosed:
    return StreamClosed("the other side dropped the stream without finishing it")


def connect_ends(
    world: "MemoryNetwork",
    ids: tuple[bytes, bytes],
    alpn: bytes,
    released: tuple[Callable[[MemoryConnection], None], Callable[[MemoryConnection], None]],
) -> tuple[MemoryConnection, MemoryConnection]:
    """The two ends of a new connection: that of ids[0], which connects, and that of ids[1]."""
    near = MemoryConnection(world, ids, alpn, released[0])
    far = MemoryConnection(world, (ids[1], ids[0]), alpn, released[1])
    near.pair(far)
    far.pair(near)
    return near, far


MAX_FACTS = 1024
"""Facts that wait for a reader; the oldest are dropped first."""
MAX_SEEN = 4096
"""Facts remembered so that none is yielded twice."""
MAX_CALLERS = 64
"""Streams that wait for a reader of callers()."""
CARRYING = b"primerl/blobs/1"
GOSSIP = b"gossip"
"""Kind of the bytes that facts take on lines."""


class MemoryDiscovery:
    """One node's discovery. Made by MemoryNetwork.discovery()."""

    def __init__(self, world: "MemoryNetwork", node_id: bytes) -> None:
        self.node_id = node_id
        self._world = world
        self._wanted: tuple[str, ...] = ()
        self._neighbours: dict[str, MemoryDiscovery] = {}
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._coming: set[bytes] = set()
        """Digests of the facts that neighbours have sent and that will be here in a moment."""
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
        mesh = self._world.mesh
        if mesh is not None:
            chosen = random.sample(others, min(mesh, len(others)))
        else:
            chosen = [
                other for other in others if other.wants(self.address) or self.wants(other.address)
            ]
        for other in chosen:
            self.meet(other)
            other.meet(self)

    async def publish(self, sealed: bytes) -> None:
        """Flood a fact to every node that our neighbours lead to."""
        if len(sealed) > MAX_GOSSIP:
            raise LocalProtocolError(
                f"a gossiped fact has at most {MAX_GOSSIP} bytes, this one {len(sealed)}: "
                "send it on a stream"
            )
        name = digest(sealed)
        self._is_new(name)
        self._spread(sealed, name)

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
        near, far = connect_ends(self._world, (self.node_id, peer), CARRYING, (_forget, _forget))
        try:
            stream = await near.open_stream()
            await near.carry(stream)
            near.announce(stream)
            if not targets[0].hears(self.node_id, await far.accept_stream()):
                raise Unreachable(f"{peer[:5].hex()} takes no streams now: try another peer")
            return await talk(stream)
        finally:
            await near.close()

    async def callers(self) -> AsyncIterator[tuple[bytes, Stream]]:
        """(NodeId, stream) of each node that opens one; ends when the discovery is closed."""
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
        self._world.connected.add((self.node_id, other.node_id))
        self._neighbours[other.address] = other

    def lose(self, other: "MemoryDiscovery") -> None:
        """A neighbour is gone."""
        self._neighbours.pop(other.address, None)

    def expects(self, name: bytes) -> bool:
        """Whether a fact with this digest is new; from now on it is on its way. Over lines only."""
        if name in self._seen or name in self._coming:
            return False
        self._coming.add(name)
        return True

    def hear(self, sealed: bytes, name: bytes, source: bytes) -> None:
        """Take a fact from a neighbour and pass it on, once; `name` is its digest."""
        self._coming.discard(name)
        if self._closed or not self._is_new(name):
            return
        self._world.note(self.node_id, sealed)
        self._facts.append(GossipFact(sealed, source))
        self._arrived.fire()
        self._spread(sealed, name, source)

    def _spread(self, sealed: bytes, name: bytes, source: bytes = b"") -> None:
        lines, spared = self._world.lines, 0
        for neighbour in list(self._neighbours.values()):
            if neighbour.node_id == source:
                continue
            if self._world.loses_gossip(self.node_id, neighbour.node_id):
                continue
            if lines is None:
                neighbour.hear(sealed, name, self.node_id)
            elif neighbour.expects(name):
                hear = partial(neighbour.hear, sealed, name, self.node_id)
                ends = self.node_id, neighbour.node_id
                lines.send(ends, ends, GOSSIP, len(sealed), hear)
            else:
                spared += 1
        if lines is not None and spared:  # nobody knows here that they have it: its bytes count
            lines.count(self.node_id, GOSSIP, spared * len(sealed))

    def _is_new(self, name: bytes) -> bool:
        if name in self._seen:
            return False
        self._seen[name] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return True


def _left() -> ConnectionLost:
    return ConnectionLost("this discovery is closed: nobody calls any more")


def _forget(connection: MemoryConnection) -> None:
    """Ignore the end of a connection: each carries one stream."""


DEFAULT_ALPNS = (ALPN_CONTROL, ALPN_BLOBS, ALPN_PIPELINE)
BACKLOG = 256
"""Connections that may wait for accept(); further ones are refused."""

Delay = Callable[[bytes, bytes], Awaitable[None]]
"""Called with (from, to) before every piece of data and every handshake; it may sleep."""


async def no_delay(source: bytes, target: bytes) -> None:
    """The delay of a world without latency."""


class MemoryNetwork:
    """Everything that exists in one world: its nodes, its addresses, and which links are cut.

    `delay` makes latency for tests of order; `lines`, in place of it, latency and rates as of real lines.
    Discoveries gossip with `mesh` earlier ones, drawn at random; None: with bootstrap nodes alone.
    """

    def __init__(
        self,
        *,
        delay: Delay = no_delay,
        lines: AccessLines | None = None,
        mesh: int | None = None,
    ) -> None:
        self.mesh = mesh
        self.delay = delay
        self.lines = lines
        self.window = WINDOW
        self.changed = Notifier()
        self.transports: dict[str, MemoryTransport] = {}
        self.discoveries: dict[str, MemoryDiscovery] = {}
        self._cut: set[frozenset[bytes]] = set()
        self._stalled: set[frozenset[bytes]] = set()
        self._waiting: list[tuple[frozenset[bytes], Callable[[], None]]] = []
        """What came over a line to a stalled link."""
        self._serial = itertools.count(1)
        self.connected: set[tuple[bytes, bytes]] = set()
        """(who connected, to whom), in discovery as well."""
        self.heard: dict[bytes, bytearray] | None = None
        """All that came to each node, where a test keeps it."""

    def note(self, target: bytes, data: bytes | memoryview) -> None:
        """Keep what came to a node, if a test wants that."""
        if self.heard is not None:
            self.heard.setdefault(target, bytearray()).extend(data)

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
        waiting, self._waiting = self._waiting, []
        for link, arrive in waiting:
            self._hand_over(link, arrive)

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
        return bool(self._cut) and frozenset((a, b)) in self._cut

    def loses_gossip(self, source: bytes, target: bytes) -> bool:
        """Whether a fact on its way from `source` to `target` is lost."""
        if not self._cut and not self._stalled:
            return False
        link = frozenset((source, target))
        return link in self._cut or link in self._stalled

    async def travel(self, source: bytes, target: bytes, over: Callable[[], bool]) -> None:
        """Return when something sent by `source` would be at `target`, or once over() is true."""
        if self.lines is None:
            await self.delay(source, target)
        else:
            await asyncio.sleep(self.lines.latency_s(source, target))
        while frozenset((source, target)) in self._stalled and not over():
            await self.changed.wait()

    def deliver(self, source: bytes, target: bytes, arrive: Callable[[], None]) -> None:
        """Call `arrive`, which came over a line, unless the link is stalled: then after heal()."""
        if self._stalled:
            self._hand_over(frozenset((source, target)), arrive)
        else:
            arrive()

    def _hand_over(self, link: frozenset[bytes], arrive: Callable[[], None]) -> None:
        if link in self._stalled:
            self._waiting.append((link, arrive))
        else:
            arrive()

    @property
    def packet(self) -> int:
        """Bytes that are sent at once: over narrow lines few, so that a reader sees them come."""
        return self.window if self.lines is None else min(self.window, self.lines.packet)

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
        self._connections: dict[MemoryConnection, None] = {}
        self._closed = False
        self.public = ""
        """IP address that others see of it; empty where they see none."""
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

    def vanish(self) -> None:
        """Kill the node: the other sides of its connections see nothing of that."""
        for connection in self._connections:
            connection.vanished = True

    def lose(self, peer: bytes) -> None:
        """Break the connections with `peer`."""
        for connection in list(self._connections):
            if connection.peer == peer:
                connection.lose("the link was cut")

    def released(self, connection: MemoryConnection) -> None:
        """A connection of ours is gone."""
        self._connections.pop(connection, None)
        self._network.changed.fire()

    def admit(self, connection: MemoryConnection) -> bool:
        """Queue an incoming connection; False when too many wait already."""
        if not self._incoming.offer(connection):
            return False
        self._connections[connection] = None
        return True

    def speaks(self, alpn: bytes) -> bool:
        """Whether this endpoint accepts `alpn`."""
        return alpn in self._alpns

    def _handshake(self, peer: bytes, addresses: Sequence[str], alpn: bytes) -> MemoryConnection:
        target = self._find(peer, addresses)
        if not target.speaks(alpn):
            raise Unreachable(f"{short(peer)} does not speak {alpn!r}: is its version ours?")
        ids, released = (self._node_id, peer), (self.released, target.released)
        self._network.connected.add(ids)
        near, far = connect_ends(self._network, ids, alpn, released)
        far.remote = self.public
        if not target.admit(far):
            raise Unreachable(f"{short(peer)} takes no more connections now: try again later")
        self._connections[near] = None
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
