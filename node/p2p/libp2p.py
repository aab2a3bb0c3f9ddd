"""libp2p discovery and gossip: the only file that imports libp2p, which is trio and runs in a thread.

Nothing here is believed and nothing depends on it: if libp2p fails it costs speed, never the node. The library
reads foreign bytes, so every input has a limit, and every error is caught.
"""

import asyncio
import errno
import importlib.util
import ipaddress
import logging
import os
import random
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

from ...crypto.keys import SecretKey
from ...protocol.errors import LocalProtocolError
from ...protocol.version import KIB, MAX_GOSSIP, MIB
from .discovery import GossipFact, node_id_of, peer_id_of
from .limits import GossipFilter
from .transport import AddressInUse, Stream, TransportError, Unreachable
from .trio_bridge import (
    AcceptQueue,
    EventQueue,
    TrioStopped,
    TrioStream,
    TrioThread,
    attempt,
    open_whole,
)

if TYPE_CHECKING:
    import trio
    from libp2p.abc import IHost, INetStream
    from libp2p.kad_dht.kad_dht import KadDHT
    from libp2p.peer.id import ID
    from libp2p.peer.peerinfo import PeerInfo
    from libp2p.pubsub.gossipsub import GossipSub
    from libp2p.pubsub.pb import rpc_pb2
    from libp2p.pubsub.pubsub import Pubsub
    from multiaddr import Multiaddr


def check_free(host: str, port: int) -> None:
    """Return if the TCP port of the IP address `host` can be bound; 0 checks `host` alone.

    Raises AddressInUse if another program listens there, even one that set SO_REUSEPORT; TransportError if
    `host` is no IP address, or not one of this machine's.
    """
    try:
        version = ipaddress.ip_address(host).version
    except ValueError as error:
        raise TransportError(f"{host!r} is no IP address: set network.host to one") from error
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: without it, a port that was just released looks busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(
                    f"TCP {host}:{port} is taken by another program: stop it, or choose another "
                    "--network.port"
                ) from error
            raise TransportError(
                f"cannot listen on {host}, TCP port {port} ({error.strerror}):"
                " choose an address of this machine"
            ) from error


WANTED_NEIGHBOURS = 4
"""Fewest neighbours: with fewer, bootstrap peers are dialled again."""
DIAL_SECONDS = 10.0
REACH_SECONDS = 3.0
"""Seconds for one address of a peer while a caller waits: there may be other addresses, and other peers."""
RETRY_SECONDS = (1.0, 30.0)
"""First and longest pause between two dials of a bootstrap peer."""
LOOKUP_SECONDS = 20.0
LOOKUP_PAUSES = (2.0, 600.0)
"""First and longest pause between two rounds of Kademlia."""
DIALS_PER_LOOKUP = 3


class Dialler:
    """Keep one host connected."""

    def __init__(
        self,
        host: "IHost",
        dht: "KadDHT",
        content: str,
        *,
        neighbours: Callable[[], int],
        known: "Callable[[], list[PeerInfo]]",
    ) -> None:
        """`content`: the key of the run; `known()`: peers with addresses from earlier contact."""
        self._host = host
        self._dht = dht
        self._content = content
        self._neighbours = neighbours
        self._known = known
        self._reaching: dict[ID, trio.Lock] = {}

    def is_connected(self, peer: "ID") -> bool:
        """Return whether `peer` is connected, or is this node."""
        return peer == self._host.get_id() or bool(self._host.get_network().get_connections(peer))

    async def reach(self, infos: "Sequence[PeerInfo]", peer: "ID") -> None:
        """Connect to `peer` by the first of `infos` that leads to it; ignore those of other peers.

        Raises Unreachable.
        """
        import trio

        lock = self._reaching.setdefault(peer, trio.Lock())
        try:
            async with lock:
                await self._reach([info for info in infos if info.peer_id == peer], peer)
        finally:
            if not lock.locked():
                self._reaching.pop(peer, None)

    async def _reach(self, infos: "Sequence[PeerInfo]", peer: "ID") -> None:
        # One address after the other: left to itself, the library dials only the first of each kind.
        for address in [address for info in infos for address in info.addrs]:
            if self.is_connected(peer):
                return
            await attempt(REACH_SECONDS, self._host.get_network().dial_addr, address, peer)
        if not self.is_connected(peer):
            raise Unreachable(f"no TCP address of {peer} led to it: is its libp2p port open?")

    async def keep_dialling(self, info: "PeerInfo") -> None:
        """Dial a bootstrap peer whenever there are too few neighbours."""
        import trio

        pause, longest = RETRY_SECONDS
        while True:
            if self._neighbours() < WANTED_NEIGHBOURS and not self.is_connected(info.peer_id):
                pause = RETRY_SECONDS[0] if await self._dial(info) else min(2 * pause, longest)
            await trio.sleep(pause * random.uniform(0.8, 1.2))

    async def keep_looking(self, tidy: Callable[[], None]) -> None:
        """Ask Kademlia for other peers of the run from time to time; call `tidy()` before every round."""
        import trio

        pause, longest = LOOKUP_PAUSES
        while True:
            await trio.sleep(pause * random.uniform(0.8, 1.2))
            tidy()
            alone = not self._host.get_connected_peers()
            await (self._dial_some(self._known()) if alone else self._look())
            pause = min(2 * pause, RETRY_SECONDS[1] if alone else longest)

    async def _look(self) -> None:
        """Do one round of Kademlia: find providers of this run, and announce ourselves as one."""
        for peer in self._host.get_connected_peers():
            await attempt(LOOKUP_SECONDS, self._dht.add_peer, peer)
        providers = await attempt(LOOKUP_SECONDS, self._find) or []
        await attempt(LOOKUP_SECONDS, self._dht.provide, self._content)
        await self._dial_some([info for info in providers if not self.is_connected(info.peer_id)])

    async def _dial_some(self, infos: "list[PeerInfo]") -> None:
        for info in random.sample(infos, min(DIALS_PER_LOOKUP, len(infos))):
            await self._dial(info)

    async def _find(self) -> "list[PeerInfo]":
        """Find providers of the run, both those that told us and those that others know of."""
        records, key = self._dht.provider_store.providers, bytes.fromhex(self._content)
        # A key with local records, our own among them, is never looked up elsewhere.
        local = records.pop(key, {})
        try:
            remote = await self._dht.find_providers(self._content)
        finally:
            records.setdefault(key, {}).update(local)
        return remote + [record.provider_info for record in local.values()]

    async def _dial(self, info: "PeerInfo") -> bool:
        await attempt(DIAL_SECONDS, self._host.connect, info)
        return self.is_connected(info.peer_id)


logger = logging.getLogger(__name__)

Take = Callable[[bytes, TrioStream], Awaitable[None]]
T = TypeVar("T")

CARRYING = "/primerl/blobs/1"
"""The stream protocol of chunks over TCP, as ALPN_BLOBS over QUIC."""
MAX_UNREAD = 64 * MIB
"""Unread bytes of one connection; the windows of four chunks have as many."""
UNREAD_SECONDS = 0.25
"""Seconds between two checks of that."""
MAX_FRAME = 256 * KIB
"""One pubsub frame; an honest one carries a few facts or a list of message names."""
MAX_BOOTSTRAP = 16
HIGH_WATER, MAX_CONNECTIONS = 24, 64
"""Connections above the first are closed after a while, above the second refused."""
HANG_UP_SECONDS = 2.0

INSTALL = "pip install --no-deps libp2p==0.8.1"
"""Command that installs libp2p without its requirements: pyproject.toml says why. constraints.txt pins the same
version."""
OPTIONAL = frozenset({"coincurve", "fastecdsa", "miniupnpc"})
"""Modules that libp2p imports at once, for other kinds of keys than Ed25519 and for UPnP. No node uses these,
and they have no wheel for every Python: fastecdsa for none."""


def is_installed() -> bool:
    """Return whether libp2p is installed, without importing it."""
    return importlib.util.find_spec("libp2p") is not None


class MissingModule(ModuleType):
    """Stand in for a missing module of OPTIONAL, or a name in it: it may be imported, not called."""

    def __getattr__(self, name: str) -> "MissingModule":
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingModule(f"{self.__name__}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise ValueError, as the library itself does for an invalid key."""
        raise ValueError(f"{self.__name__} is not installed: nodes have Ed25519 keys")


class MissingModuleFinder(MetaPathFinder, Loader):
    """Find a MissingModule for those of OPTIONAL that no other finder finds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for OPTIONAL modules and their submodules."""
        if fullname.partition(".")[0] not in OPTIONAL:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the module."""
        return MissingModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


sys.meta_path.append(MissingModuleFinder())  # the last one: installed modules come first


FACT_QUEUE = 256
"""Facts that wait for a reader; a newer one replaces the oldest."""
LEAVE_SECONDS = 3.0
"""Seconds that close() gives a session to end before it is cancelled."""
RESTART_SECONDS = (1.0, 60.0)
"""First and longest pause before the next session."""


class _Started(Protocol):
    def started(self) -> None: ...


class Libp2pDiscovery:
    """Discovery by libp2p, in a thread of its own: bootstrap peers, Kademlia, GossipSub.

    If the library fails, a new session starts after a pause, on the same port.
    """

    def __init__(self, key: SecretKey, *, run_id: bytes, host: str, port: int) -> None:
        self.gate = GossipFilter()
        self._key = key
        self._run = run_id.hex()
        self._host = host
        self._port = port
        self._facts: EventQueue[GossipFact] = EventQueue(FACT_QUEUE)
        self._thread = TrioThread("libp2p")
        self._incoming = AcceptQueue(self._thread)
        self._session: Libp2pSession | None = None
        self._addresses: tuple[str, ...] = ()
        self._leaving: trio.Event | None = None
        self._left: trio.Event | None = None

    def open_session(
        self, port: int, receive: Callable[[GossipFact], None]
    ) -> AbstractAsyncContextManager["Libp2pSession"]:
        """Open a session that listens on `port` and calls `receive` with every fact. In trio."""
        _quiet()
        check_free(self._host, port)
        session = Libp2pSession(self._key, self._run, self.gate, receive, self._incoming.take)
        return session.open(self._host, port)

    def addresses(self) -> tuple[str, ...]:
        """Return our multiaddrs with /p2p/PEERID; empty before start()."""
        return self._addresses

    async def start(self, bootstrap: Sequence[str]) -> None:
        """Listen, then connect to `bootstrap` in the background. Once only.

        Raises:
            AddressInUse: another program has the TCP port.
            TransportError: the address is not this machine's, or the library does not start.
        """
        self._facts.bind(asyncio.get_running_loop())
        self._incoming.bind(asyncio.get_running_loop())
        try:
            await self._thread.start()
            await self._thread.call(self._open, tuple(bootstrap))
        except BaseException:  # also when cancelled: the thread and its port would stay
            await self.close()
            raise

    async def publish(self, sealed: bytes) -> None:
        """Gossip a sealed fact; drop it if no session is open.

        Raises LocalProtocolError if the fact is larger than MAX_GOSSIP.
        """
        if len(sealed) > MAX_GOSSIP:
            raise LocalProtocolError(
                f"a fact of {len(sealed)} bytes cannot be gossiped (at most {MAX_GOSSIP}):"
                " gossip its digest and send the bytes by the transport"
            )
        try:
            await self._thread.call(self._publish, sealed)
        except TrioStopped:
            logger.debug("a fact was not gossiped: discovery is not running")

    def facts(self) -> AsyncIterator[GossipFact]:
        """Yield facts from others as they come, until close(). All callers share one queue."""
        return self._facts

    async def converse(
        self, peer: bytes, addresses: Sequence[str], talk: Callable[[Stream], Awaitable[T]]
    ) -> T:
        """Reach `peer`, open a stream and return the result of `talk` on it, in the trio thread.

        Raises:
            Unreachable: also between two sessions. StreamClosed, and whatever `talk` raises.
        """
        try:
            return await self._thread.call(self._converse, peer, addresses, talk)
        except TrioStopped as error:
            raise Unreachable("libp2p is not running: nothing goes over TCP") from error

    def callers(self) -> AsyncIterator[tuple[bytes, Stream]]:
        """Yield (NodeId, stream) of peers that want to talk, until close()."""
        return self._incoming.listen()

    def neighbours(self) -> int:
        """Count the connected peers that listen to this run's topic."""
        session = self._session
        return 0 if session is None else session.neighbours()

    async def close(self) -> None:
        """End the session, and join the thread. Never raises; closing twice is fine."""
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._thread.call(self._leave)
        except (TrioStopped, TimeoutError):
            logger.debug("discovery is not running, or did not stop in time")
        await self._thread.stop()
        self._facts.close()
        self._incoming.close()

    async def _leave(self) -> None:
        # Leaving by an event and not by cancelling: a cancelled library drops its sockets open.
        if self._leaving is not None and self._left is not None:
            self._leaving.set()
            await self._left.wait()

    async def _publish(self, sealed: bytes) -> None:
        if self._session is not None:
            await self._session.publish(sealed)

    async def _converse(
        self, peer: bytes, addresses: Sequence[str], talk: Callable[[Stream], Awaitable[T]]
    ) -> T:
        if self._session is None:
            raise Unreachable("libp2p is between two sessions: nothing goes over TCP")
        return await self._session.converse(peer, addresses, talk)

    async def _open(self, bootstrap: tuple[str, ...]) -> None:
        import trio

        self._leaving, self._left = trio.Event(), trio.Event()
        # Stubs that libp2p brings along know nothing of keyword task_status: hence the cast.
        supervise = cast(Any, self._supervise)
        await self._thread.nursery.start(supervise, bootstrap, self._leaving, self._left)

    async def _supervise(
        self,
        bootstrap: tuple[str, ...],
        leaving: "trio.Event",
        closed: "trio.Event",
        *,
        task_status: _Started,
    ) -> None:
        """Open one session after the other until `leaving`."""
        import trio

        started, pause, begun = False, RESTART_SECONDS[0], trio.current_time()
        try:
            while not leaving.is_set():
                try:
                    async with self._open_session() as session:
                        if not started:
                            task_status.started()
                        started, begun = True, trio.current_time()
                        await _stay(session, bootstrap, leaving)
                except Exception as error:
                    # The library failed on foreign bytes, or lost its port: the node continues.
                    if not started:
                        raise _start_error(error) from error
                    if trio.current_time() - begun > RESTART_SECONDS[1]:
                        pause = RESTART_SECONDS[0]
                    logger.warning("discovery failed and starts again in %.0f s: %r", pause, error)
                    with trio.move_on_after(pause):
                        await leaving.wait()
                    pause = min(2 * pause, RESTART_SECONDS[1])
        finally:
            closed.set()

    @asynccontextmanager
    async def _open_session(self) -> "AsyncGenerator[Libp2pSession]":
        async with self.open_session(self._port, self._facts.put) as session:
            self._port, self._addresses, self._session = session.port, session.addresses, session
            try:
                yield session
            finally:
                self._session = None


async def _stay(session: "Libp2pSession", bootstrap: Sequence[str], leaving: "trio.Event") -> None:
    import trio

    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.keep_connected, bootstrap)
        await leaving.wait()
        nursery.cancel_scope.cancel()


def _start_error(error: Exception) -> TransportError:
    """Turn `error`, in any number of nested groups, into a TransportError."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, TransportError):
        return error
    return TransportError(f"discovery did not start ({error!r}): network.libp2p = false skips it")


class Libp2pSession:
    """One libp2p host with its gossip and its Kademlia. For the trio thread only."""

    def __init__(
        self,
        key: SecretKey,
        run: str,
        gate: GossipFilter,
        receive: Callable[[GossipFact], None],
        take: Take,
    ) -> None:
        """`take(peer, stream)` answers a stream that a peer opened, and returns once it is finished."""
        from libp2p.kad_dht.kad_dht import DHTMode, KadDHT

        self.port = 0
        self.addresses: tuple[str, ...] = ()
        self._topic = f"primerl/{run}/1"
        self._content = "1220" + run  # dressed as a SHA-256 multihash, as a DHT key has to be
        self._gate = gate
        self._host = _make_host(key)
        self._router = _make_router()
        self._pubsub = _guarded_pubsub(self._host, self._router, self._topic, gate, receive)
        self._dht = KadDHT(self._host, DHTMode.SERVER, enable_values=False)
        self._dialler = Dialler(
            self._host, self._dht, self._content, neighbours=self.neighbours, known=self._known
        )
        self._take = take

    @asynccontextmanager
    async def open(self, host: str, port: int) -> "AsyncGenerator[Libp2pSession]":
        """Listen and run every service until the block is left."""
        from libp2p.custom_types import TProtocol
        from libp2p.tools.anyio_service import background_trio_service

        self._host.set_stream_handler(TProtocol(CARRYING), self._answer)
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._host.run([_multiaddr(host, port)]))
                for service in (self._pubsub, self._router, self._dht):
                    await stack.enter_async_context(background_trio_service(service))
                stack.push_async_callback(self._hang_up)
                await self._pubsub.wait_until_ready()
                await self._pubsub.subscribe(self._topic)
                self._note_addresses()
                yield self
        finally:
            # This cache keeps a thread of its own, which nothing in the library ever stops.
            self._pubsub.seen_messages.stop()

    def neighbours(self) -> int:
        """Count the connected peers that listen to the topic: one look-up, safe from any thread."""
        return len(self._pubsub.peer_topics.get(self._topic, ()))

    async def publish(self, sealed: bytes) -> None:
        """Hand a fact to the mesh; each neighbour's queue is bounded and drops the excess."""
        self._gate.knows(sealed)
        await self._pubsub.publish(self._topic, sealed)

    async def keep_connected(self, bootstrap: Sequence[str]) -> None:
        """Dial the bootstrap peers whenever there are too few neighbours, and ask Kademlia."""
        import trio

        async with trio.open_nursery() as nursery:
            for info in _parse(bootstrap):
                nursery.start_soon(self._dialler.keep_dialling, info)
            nursery.start_soon(self._keep_bounded)
            await self._dialler.keep_looking(self._tidy)

    async def converse(
        self, peer: bytes, addresses: Sequence[str], talk: Callable[[Stream], Awaitable[T]]
    ) -> T:
        """Reach `peer` and talk to it over a stream of its own."""
        from libp2p.custom_types import TProtocol
        from libp2p.peer.id import ID

        peer_id = ID(peer_id_of(peer))  # the handshake proves that the peer has this key
        await self._dialler.reach(list(_parse(addresses)), peer_id)
        begin = partial(self._host.new_stream, peer_id, [TProtocol(CARRYING)])
        stream = await open_whole(begin, partial(self._host.disconnect, peer_id))
        try:
            return await talk(stream)
        finally:
            await stream.abort()

    async def _hang_up(self) -> None:
        """Close every connection; the library forgets those that it dialled itself."""
        import trio

        with trio.move_on_after(HANG_UP_SECONDS) as scope:
            scope.shield = True
            async with trio.open_nursery() as nursery:
                for peer in self._host.get_connected_peers():
                    nursery.start_soon(attempt, HANG_UP_SECONDS, self._host.disconnect, peer)
            await self._host.close()

    def _note_addresses(self) -> None:
        bound = [
            a
            for listener in self._host.get_network().listeners.values()
            for a in listener.get_addrs()
        ]
        if not bound:
            raise AddressInUse("the TCP port was taken while libp2p started: start again")
        self.port = int(bound[0].value_for_protocol("tcp") or 0)
        self.addresses = tuple(str(address) for address in self._host.get_addrs())

    async def _keep_bounded(self) -> None:
        """Disconnect peers that send more than their windows allow: the library only logs it and buffers the
        bytes."""
        import trio

        while True:
            await trio.sleep(UNREAD_SECONDS)
            for connection in self._host.get_network().get_connections():
                buffers = getattr(connection.muxed_conn, "stream_buffers", {})
                if sum(map(len, buffers.values())) > MAX_UNREAD:
                    await attempt(HANG_UP_SECONDS, connection.close)

    def _known(self) -> "list[PeerInfo]":
        """List peers with addresses from earlier contact."""
        from libp2p.peer.peerinfo import PeerInfo

        book = self._host.get_peerstore()
        ids = [peer for peer in book.peers_with_addrs() if peer != self._host.get_id()]
        return [PeerInfo(peer, book.addrs(peer)) for peer in ids]

    def _tidy(self) -> None:
        # The router keeps these for a feature that is off here, and never lets them go.
        self._router.recent_message_deliveries.clear()

    async def _answer(self, raw: "INetStream") -> None:
        """Serve a stream that a peer opened; an error here would stop the whole host."""
        peer = raw.muxed_conn.peer_id
        stream = TrioStream(raw, partial(self._host.disconnect, peer))
        try:
            await self._take(node_id_of(peer.to_bytes()), stream)
        except ValueError as error:
            logger.debug("%s is turned away: %s", peer, error)
            await stream.abort()


def _guarded_pubsub(
    host: "IHost",
    router: "GossipSub",
    topic: str,
    gate: GossipFilter,
    receive: Callable[[GossipFact], None],
) -> "Pubsub":
    """Make a Pubsub that reads no faster than the gate allows and survives any message."""
    import trio

    own = host.get_id()

    def accept(forwarder: "ID", message: "rpc_pb2.Message") -> bool:
        if forwarder == own:
            return True
        origin = node_id_of(message.from_id)
        if not gate.accepts(origin, message.data, trio.current_time()):
            return False
        receive(GossipFact(bytes(message.data), node_id_of(forwarder.to_bytes())))
        return True

    # No cache of verdicts: a message that came too fast may come again later.
    pubsub = _guarded_class(host, topic, gate)(
        host, router, strict_signing=True, allowed_topics={topic}, validation_cache_ttl=-1
    )
    pubsub.set_topic_validator(topic, accept, False)
    return pubsub


def _guarded_class(host: "IHost", topic: str, gate: GossipFilter) -> "type[Pubsub]":
    """Make the library's Pubsub with three unsafe methods replaced; here, because importing it is slow."""
    import trio
    from libp2p.io.exceptions import IOException, MessageTooLarge
    from libp2p.network.connection.exceptions import RawConnError
    from libp2p.network.stream.exceptions import StreamError
    from libp2p.pubsub.pb import rpc_pb2
    from libp2p.pubsub.pubsub import Pubsub
    from libp2p.pubsub.utils import maybe_consume_signed_record
    from libp2p.utils.varint import read_varint_prefixed_bytes_limited

    own = host.get_id()

    class GuardedPubsub(Pubsub):
        async def stream_handler(self, stream: "INetStream") -> None:
            neighbour = stream.muxed_conn.peer_id
            try:
                await self.continuously_read_stream(stream)
            except Exception as error:
                # Left alone, an error here would take the whole host down with it.
                ended = isinstance(error, (StreamError, IOException, RawConnError))
                if ended and not isinstance(error, MessageTooLarge):
                    return
                logger.debug("%s is disconnected for its messages: %r", neighbour, error)
                await attempt(HANG_UP_SECONDS, host.disconnect, neighbour)

        async def continuously_read_stream(self, stream: "INetStream") -> None:
            # One message after the other: the library starts a task for each, without a bound.
            neighbour = stream.muxed_conn.peer_id
            while self.manager.is_running:
                frame = await read_varint_prefixed_bytes_limited(stream, MAX_FRAME)
                now = trio.current_time()
                await trio.sleep(gate.pause(node_id_of(neighbour.to_bytes()), len(frame), now))
                await self._take(neighbour, rpc_pb2.RPC.FromString(frame))

        async def _take(self, neighbour: "ID", rpc: "rpc_pb2.RPC") -> None:
            if not maybe_consume_signed_record(rpc, host, neighbour):
                return
            for message in rpc.publish:
                await self.push_msg(neighbour, message)
            for subscription in rpc.subscriptions[: self.max_subscriptions_per_rpc]:
                self.handle_subscription(neighbour, subscription)
            if rpc.HasField("control"):
                await self.router.handle_rpc(rpc, neighbour)

        async def push_msg(self, msg_forwarder: "ID", msg: "rpc_pb2.Message") -> None:
            if msg_forwarder != own:
                neighbour = node_id_of(msg_forwarder.to_bytes())
                node_id_of(msg.from_id)  # other key types make the signature check raise
                foreign = list(msg.topicIDs) == [topic] and msg.from_id != own.to_bytes()
                if not foreign or not gate.admits(neighbour, msg.data, trio.current_time()):
                    return
            await super().push_msg(msg_forwarder, msg)

        def notify_subscriptions(self, publish_message: "rpc_pb2.Message") -> None:
            # Facts leave by the validator, which alone knows the neighbour that forwarded them.
            del publish_message

    return GuardedPubsub


def _make_host(key: SecretKey) -> "IHost":
    """Make a TCP host under the node's own key: Noise only, and few connections."""
    from libp2p import new_host
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.x25519 import create_new_key_pair as create_noise_pair
    from libp2p.custom_types import TProtocol
    from libp2p.network.config import ConnectionConfig
    from libp2p.rcmgr import ResourceLimits, new_resource_manager
    from libp2p.security.noise.transport import PROTOCOL_ID, Transport
    from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
    from libp2p.stream_muxer.yamux.yamux import Yamux
    from libp2p.transport.tcp.tcp import TCP

    pair = create_new_key_pair(key.seed())
    noise = Transport(pair, noise_privkey=create_noise_pair().private_key)
    return new_host(
        key_pair=pair,
        sec_opt={PROTOCOL_ID: noise},  # the default also offers plaintext, where ids are claims
        muxer_opt={TProtocol(YAMUX): Yamux},  # the other one has no windows at all
        transports=[TCP()],
        addrs_factory=_dialable,
        disable_identify_address_discovery=True,
        connection_config=ConnectionConfig(
            min_connections=0,
            low_watermark=0,
            high_watermark=HIGH_WATER,
            max_connections=MAX_CONNECTIONS,
        ),
        # Without these switches libp2p refuses peers on a machine with its memory full of weights.
        resource_manager=new_resource_manager(
            ResourceLimits(max_connections=2 * MAX_CONNECTIONS),
            enable_memory_limits=False,
            enable_circuit_breaker=False,
            enable_graceful_degradation=False,
        ),
    )


def _make_router() -> "GossipSub":
    from libp2p.custom_types import TProtocol
    from libp2p.pubsub.gossipsub import GossipSub

    # Its own spam and diversity rules count addresses, and a machine room has one: ours is the gate.
    return GossipSub(
        protocols=[TProtocol("/meshsub/1.1.0")],
        degree=6,
        degree_low=4,
        degree_high=12,
        heartbeat_interval=1,
        adaptive_gossip_enabled=False,
        spam_protection_enabled=False,
        eclipse_protection_enabled=False,
    )


def _parse(bootstrap: Sequence[str]) -> "Iterator[PeerInfo]":
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from multiaddr import Multiaddr
    from multiaddr.exceptions import Error

    for text in bootstrap[:MAX_BOOTSTRAP]:
        try:
            yield info_from_p2p_addr(Multiaddr(text))
        except (ValueError, Error) as error:
            logger.warning("address %r is not /ip4/../tcp/../p2p/..: %s", text, error)


def _multiaddr(host: str, port: int) -> "Multiaddr":
    from multiaddr import Multiaddr

    return Multiaddr(f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}")


def _dialable(addresses: "Sequence[Multiaddr]") -> "list[Multiaddr]":
    """Return the addresses to announce: a wildcard address stands for the machine's own ones."""
    from libp2p.utils.address_validation import expand_wildcard_address

    return [expanded for address in addresses for expanded in expand_wildcard_address(address)]


def _quiet() -> None:
    """Silence libp2p, which logs messages of peers; LIBP2P_DEBUG turns its own logging on."""
    import libp2p

    if not os.environ.get("LIBP2P_DEBUG"):
        library = logging.getLogger(libp2p.__name__)
        library.setLevel(logging.CRITICAL)
        library.propagate = False  # some of its loggers set a level of their own
        if not library.handlers:
            library.addHandler(logging.NullHandler())  # else Python prints warnings to stderr
