"""Nodes that only exchange chunks, in one process: an origin, honest and hostile workers."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType

from support.bare_node import serving
from support.memory_network import MemoryNetwork
from support.memory_store import MemoryStore

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.p2p.chunk_client import ChunkSource, PeerPaths
from primerl.node.p2p.connections import ConnectionPool, Handler
from primerl.node.p2p.download import BlobFetcher
from primerl.node.p2p.limits import Pacer
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.serve import BlobServer, ChunkArrivals
from primerl.node.storage.chunk_store import Store
from primerl.protocol.manifests import ChunkRef
from primerl.protocol.version import ALPN_BLOBS

KIB = 1024


def node_id(name: str) -> bytes:
    """Return the node id for a name."""
    return SecretKey.from_seed(digest(name.encode())).node_id


def payload(count: int, size: int = 64 * KIB, seed: int = 0) -> list[bytes]:
    """Chunks of an artifact."""
    chance = random.Random(seed)
    return [chance.randbytes(size) for _ in range(count)]


def references(chunks: Sequence[bytes]) -> list[ChunkRef]:
    """Make the manifest's references to these chunks."""
    return [ChunkRef(digest(chunk), len(chunk)) for chunk in chunks]


class Bare:
    """A node that serves its chunks, or answers by `handler`."""

    def __init__(
        self,
        network: MemoryNetwork,
        name: str,
        *,
        store: Store | None = None,
        handler: Handler | None = None,
        pacer: Pacer | None = None,
        seeds: Sequence[ChunkSource] = (),
        paths: PeerPaths | None = None,
        downlink: Pacer | None = None,
    ) -> None:
        self.id = node_id(name)
        self.network = network
        self.store = store or MemoryStore(max_bytes=1 << 30)
        self.transport = network.transport(self.id)
        self.peers = PeerTable()
        self.links = ConnectionPool(self.transport, self.peers, connect_timeout_s=2.0)
        self.arrivals = ChunkArrivals()
        self.server = BlobServer(self.store, self.arrivals, pacer or Pacer(0))
        self.fetcher = BlobFetcher(
            self.links,
            self.peers,
            self.store,
            self.arrivals,
            seeds=seeds,
            paths=paths,
            pacer=downlink,
        )
        self._handlers = {ALPN_BLOBS: handler or self.server.handle}

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Serve while the block lasts."""
        async with serving(self.transport, self._handlers, self.peers):
            try:
                yield
            finally:
                await self.links.close()

    def hold(self, chunks: Sequence[bytes]) -> None:
        """Put chunks into the store, as if fetched."""
        for chunk in chunks:
            self.arrivals.arrived(self.store.put(chunk))

    def holds(self, chunks: Sequence[ChunkRef]) -> bool:
        """Return whether the store has all chunks."""
        return all(self.store.has(chunk.digest) for chunk in chunks)

    async def fetch(
        self, chunks: Sequence[ChunkRef], neighbours: Sequence["Bare"], origin: "Bare"
    ) -> None:
        """Fetch chunks as a worker does, given the addresses of named peers."""
        for one in [*neighbours, origin]:
            self.peers.hint(one.id, one.transport.addresses())
        others = [one.id for one in neighbours if one is not self]
        await self.fetcher.fetch(chunks, others, origin.id)


class ExchangeNetwork:
    """Nodes that are up while the context lasts."""

    def __init__(self, network: MemoryNetwork | None = None) -> None:
        self.network = network or MemoryNetwork()
        self._running: list[asyncio.Task[None]] = []

    def add(self, name: str, *, handler: Handler | None = None, **parts: object) -> Bare:
        """Start a node."""
        bare = Bare(self.network, name, handler=handler, **parts)  # type: ignore[arg-type]
        self._running.append(asyncio.create_task(_keep_running(bare)))
        return bare

    async def __aenter__(self) -> "ExchangeNetwork":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.wait(self._running)


async def _keep_running(node: Bare) -> None:
    async with node.running():
        await asyncio.Event().wait()


def copies_sent(origin: Bare, chunks: Sequence[ChunkRef]) -> float:
    """Return how many copies of the artifact the origin has sent."""
    return sum(origin.server.served.values()) / sum(chunk.size for chunk in chunks)


def bytes_of(counted: Counter[bytes], *nodes: Bare) -> int:
    """Return the byte counters of these nodes."""
    return sum(counted[node.id] for node in nodes)
