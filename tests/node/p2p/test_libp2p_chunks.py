"""Chunks over libp2p's TCP between real sockets on loopback, with peers that keep to no rule among them."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, cast

import pytest
import pytest_asyncio
from support.libp2p_cases import DEADLINE_S, key, living, multiaddr, node, port_of
from support.memory_network import MemoryNetwork
from support.memory_store import MemoryStore
from support.waiting import until

from primerl.node.p2p import serve
from primerl.node.p2p.chunk_client import BACKOFF_S, TcpChunks
from primerl.node.p2p.libp2p import CARRYING, MAX_UNREAD, Libp2pDiscovery
from primerl.node.p2p.limits import Pacer
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.rpc import Refused
from primerl.node.p2p.transport import Stream, StreamClosed, TransportError, Unreachable
from primerl.node.p2p.trio_bridge import STREAMS_PER_PEER, TrioThread
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.manifests import ChunkRef, PeerRecord
from primerl.protocol.messages import GetChunk
from primerl.protocol.session import frame

if TYPE_CHECKING:
    from libp2p.abc import IHost
    from libp2p.peer.id import ID

DATA = random.Random(1).randbytes(1_500_000)


class Server:
    """Number 1: a node that serves one chunk."""

    def __init__(self) -> None:
        self.store = MemoryStore(max_bytes=1 << 26)
        self.chunk = ChunkRef(self.store.put(DATA), len(DATA))
        self.blobs = serve.BlobServer(self.store, serve.ChunkArrivals(), Pacer(0))
        self.peers = PeerTable()
        self.discovery = node(1)
        self.handler: Callable[[bytes, Stream], Awaitable[None]] = self.blobs.handle

    async def answer(self, peer: bytes, stream: Stream) -> None:
        """What the test wants of it."""
        await self.handler(peer, stream)


@pytest_asyncio.fixture
async def server(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Server]:
    """May not die of what is done to it, not even to come back."""
    built = Server()
    await built.discovery.start([])
    async with serve.serving(serve.TcpChunkServer(built.discovery, built.peers, built.answer)):
        await asyncio.sleep(0)
        yield built
        assert "died" not in caplog.text
    await built.discovery.close()


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Libp2pDiscovery]:
    """Number 2, which knows nobody yet."""
    discovery = node(2)
    await discovery.start([])
    yield discovery
    await discovery.close()


def chunks_of(client: Libp2pDiscovery, *addresses: str) -> TcpChunks:
    """Paths of the client, whose table says that number 1 is at `addresses`."""
    peers = PeerTable()
    peers.learn(PeerRecord(key(1).node_id, "trainer", "0", (), addresses, True), b"")
    return TcpChunks(client, peers)


async def fetch(chunks: TcpChunks, server: Server, deadline: float = DEADLINE_S) -> bytes:
    return await chunks.get(key(1).node_id, server.chunk, deadline=deadline)


async def test_a_peer_record_leads_to_a_chunk(server: Server, client: Libp2pDiscovery) -> None:
    chunks = chunks_of(client, *server.discovery.addresses())
    assert await fetch(chunks, server) == DATA
    await until(lambda: server.blobs.served == {key(2).node_id: len(DATA)})


async def test_a_neighbour_needs_no_address_and_stays_one(server: Server) -> None:
    client = node(2)
    await client.start(server.discovery.addresses())
    await until(lambda: client.neighbours() and server.discovery.neighbours())
    assert await fetch(chunks_of(client), server) == DATA
    with pytest.raises(Refused):
        await chunks_of(client).get(key(1).node_id, ChunkRef(bytes(32), 1), deadline=DEADLINE_S)
    assert client.neighbours() == server.discovery.neighbours() == 1
    await client.close()


async def test_dead_and_strange_addresses_are_passed_over(
    server: Server, client: Libp2pDiscovery
) -> None:
    dead = [
        multiaddr(1, 1),
        "no address",
        "/dns4/h/udp/1/p2p/x",
        multiaddr(port_of(server.discovery), 3),
    ]
    assert await fetch(chunks_of(client, *dead, *server.discovery.addresses()), server) == DATA


async def test_another_node_at_the_address_is_not_believed(
    server: Server, client: Libp2pDiscovery
) -> None:
    impostor = node(3)
    await impostor.start([])
    stolen: list[bytes] = []

    async def steal(peer: bytes, stream: Stream) -> None:
        stolen.append(peer)

    async with serve.serving(serve.TcpChunkServer(impostor, PeerTable(), steal)):
        chunks = chunks_of(client, multiaddr(port_of(impostor), 1))
        with pytest.raises(Unreachable):
            await fetch(chunks, server)
        with pytest.raises(Unreachable, match="backing off"):
            await fetch(chunks, server)
        # What another record claims to be number 1's is not used for it either.
        with pytest.raises(Unreachable, match="no TCP address"):
            await fetch(chunks_of(client, *impostor.addresses()), server)
    assert stolen == []
    await impostor.close()


async def test_backing_off_ends(
    server: Server, client: Libp2pDiscovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primerl.node.p2p.chunk_client.BACKOFF_S", (0.01, BACKOFF_S[1]))
    peers = PeerTable()
    chunks = TcpChunks(client, peers)
    with pytest.raises(Unreachable):
        await fetch(chunks, server)
    addresses = server.discovery.addresses()
    peers.learn(PeerRecord(key(1).node_id, "trainer", "0", (), addresses, True), b"")
    await asyncio.sleep(0.05)
    assert await fetch(chunks, server) == DATA


async def test_a_peer_that_admits_nobody_refuses_us(client: Libp2pDiscovery) -> None:
    server = Server()
    await server.discovery.start([])
    with pytest.raises(StreamClosed):
        await fetch(chunks_of(client, *server.discovery.addresses()), server)
    await server.discovery.close()


async def test_a_server_that_closes_in_the_middle_ends_the_fetch(
    server: Server, client: Libp2pDiscovery
) -> None:
    begun = asyncio.Event()

    async def begin(peer: bytes, stream: Stream) -> None:
        begun.set()
        await asyncio.sleep(DEADLINE_S)

    server.handler = begin
    chunks = chunks_of(client, *server.discovery.addresses())
    getting = asyncio.ensure_future(fetch(chunks, server))
    await begun.wait()
    await server.discovery.close()
    with pytest.raises(TransportError):
        await getting


async def test_a_bug_while_answering_costs_one_request(
    server: Server, client: Libp2pDiscovery, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(peer: bytes, stream: Stream) -> None:
        raise ZeroDivisionError

    chunks = chunks_of(client, *server.discovery.addresses())
    server.handler = fail
    with pytest.raises(Refused, match="internal error"):
        await fetch(chunks, server)
    assert "ZeroDivisionError" in caplog.text
    server.handler = server.blobs.handle
    assert await fetch(chunks, server) == DATA


# -- strangers -------------------------------------------------------------------------------------


class Stranger:
    """Number 9: a plain libp2p peer without any of our limits."""

    def __init__(self, host: "IHost", victim: "ID", thread: TrioThread) -> None:
        self.host = host
        self._victim = victim
        self._thread = thread

    async def open(self, *said: bytes, window: int | None = None, protocol: str = CARRYING) -> Any:
        """A stream on which this was said, with no regard to the victim's window."""
        from libp2p.custom_types import TProtocol

        async def begin() -> Any:
            stream = cast(Any, await self.host.new_stream(self._victim, [TProtocol(protocol)]))
            if window is not None:
                stream.muxed_stream.send_window = window
            for one in said:
                await stream.write(one)
            return stream

        return await self._thread.call(begin)

    async def read(self, stream: Any) -> bytes:
        """What comes first; b"" when the stream has ended."""

        async def read() -> bytes:
            try:
                return await stream.read(1024)
            except Exception:
                return b""

        async with asyncio.timeout(DEADLINE_S):
            return await self._thread.call(read)

    def is_connected(self) -> bool:
        return bool(self.host.get_connected_peers())


def stranger(address: str) -> AbstractAsyncContextManager[Stranger]:
    """Connected to the node at `address`."""

    async def build(stack: AsyncExitStack, thread: TrioThread) -> Stranger:
        from libp2p import new_host
        from libp2p.crypto.ed25519 import create_new_key_pair
        from libp2p.peer.peerinfo import info_from_p2p_addr
        from multiaddr import Multiaddr

        listen = [Multiaddr("/ip4/127.0.0.1/tcp/0")]
        host = new_host(key_pair=create_new_key_pair(key(9).seed()), listen_addrs=listen)
        await stack.enter_async_context(host.run(listen))
        stack.push_async_callback(host.close)
        victim = info_from_p2p_addr(Multiaddr(address))
        await host.connect(victim)
        return Stranger(host, victim.peer_id, thread)

    return living(build)


async def test_a_peer_that_knows_no_chunks_is_unharmed(client: Libp2pDiscovery) -> None:
    async with stranger(client.addresses()[0]) as other:
        await until(other.is_connected)
        with pytest.raises(StreamClosed):
            await TcpChunks(client, PeerTable()).get(
                key(9).node_id, ChunkRef(bytes(32), 1), deadline=DEADLINE_S
            )
        assert other.is_connected()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xff" * 9,
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x05\x81",
        frame(GetChunk(b"x" * 32))[:9],
    ],
)
async def test_rubbish_costs_its_stream_only(
    server: Server, client: Libp2pDiscovery, said: bytes
) -> None:
    async with stranger(server.discovery.addresses()[0]) as other:
        await other.open(said)
        assert await fetch(chunks_of(client, *server.discovery.addresses()), server) == DATA
        assert other.is_connected()


async def test_a_malformed_request_is_refused_and_blamed(server: Server) -> None:
    async with stranger(server.discovery.addresses()[0]) as other:
        stream = await other.open(b"\x00\x00\x00\x01\xc0")
        assert Reason.MALFORMED.encode() in await other.read(stream)
        row = server.peers.get(key(9).node_id)
        assert row.blamed == {Reason.MALFORMED: 1}


async def test_a_peer_with_too_many_streams_is_turned_away_and_others_are_served(
    server: Server, client: Libp2pDiscovery
) -> None:
    async with stranger(server.discovery.addresses()[0]) as other:
        for _ in range(STREAMS_PER_PEER):
            await other.open()
        said = b""
        with suppress(Exception):  # turned away as soon as it is opened, or a little later
            said = await other.read(await other.open(frame(GetChunk(server.chunk.digest))))
        assert said == b""
        assert await fetch(chunks_of(client, *server.discovery.addresses()), server) == DATA


@pytest.mark.parametrize("streams", [1, 4])
async def test_a_peer_that_sends_more_than_its_window_is_disconnected(
    server: Server, client: Libp2pDiscovery, streams: int
) -> None:
    async def listen_to_nothing(peer: bytes, stream: Stream) -> None:
        await asyncio.sleep(DEADLINE_S)

    server.handler = listen_to_nothing
    pieces = [bytes(1 << 20)] * (MAX_UNREAD // streams // (1 << 20) + 1)
    async with stranger(server.discovery.addresses()[0]) as other:
        for _ in range(streams):
            with suppress(Exception):
                await other.open(*pieces, window=1 << 31)
        await until(lambda: not other.is_connected())
    server.handler = server.blobs.handle
    assert await fetch(chunks_of(client, *server.discovery.addresses()), server) == DATA


async def test_too_many_requests_are_refused() -> None:
    world = MemoryNetwork()
    server, client = world.discovery(key(1).node_id), world.discovery(key(2).node_id)
    await server.start([])
    await client.start(server.addresses())

    async def say_no(peer: bytes, stream: Stream) -> None:
        raise RemoteProtocolError(Reason.NOT_FOUND)

    said: list[Reason] = []
    async with serve.serving(serve.TcpChunkServer(server, PeerTable(), say_no)):
        await asyncio.sleep(0)
        chunks = TcpChunks(client, PeerTable())
        for _ in range(int(serve.TCP_REQUEST_BURST) + 50):
            with pytest.raises(Refused) as refusal:
                await chunks.get(server.node_id, ChunkRef(bytes(32), 1), deadline=DEADLINE_S)
            said.append(refusal.value.reason)
    assert said.count(Reason.NOT_FOUND) >= serve.TCP_REQUEST_BURST
    assert Reason.RATE_LIMITED in said
    await server.close()
    await client.close()
