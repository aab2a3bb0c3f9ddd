"""One bare node of swarm.py: iroh, an in-memory store, a chunk server and fetcher.

python swarm_node.py ADDRESS      (commands: children.py)
"""

import asyncio
import logging
import resource
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.memory_store import MemoryStore

from primerl.crypto.keys import SecretKey
from primerl.node.p2p.connections import ConnectionPool, Router
from primerl.node.p2p.download import BlobFetcher
from primerl.node.p2p.iroh import IrohTransport
from primerl.node.p2p.limits import Pacer
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.serve import BlobServer, ChunkArrivals
from primerl.protocol.manifests import ChunkRef
from primerl.protocol.version import ALPN_BLOBS
from primerl.scripts.bench.children import Event, Wire

CONNECT_S = 10.0
MAX_BYTES = 2**32
MAX_STREAMS = 64
MAX_PEERS = 256


class LyingStore(MemoryStore):
    """A store that returns wrong bytes while `lies` is set."""

    lies = False

    def get(self, name: bytes) -> bytes | None:
        """Return the bytes of `name`; while `lies` is set, with the first byte flipped."""
        data = super().get(name)
        return data if data is None or not self.lies else bytes([data[0] ^ 1]) + data[1:]


class Node:
    """The parts of a node that move chunks."""

    def __init__(self, transport: IrohTransport) -> None:
        self._transport = transport
        self._peers = PeerTable()
        self._links = ConnectionPool(transport, self._peers, connect_timeout_s=CONNECT_S)
        self._store = LyingStore(max_bytes=MAX_BYTES)
        self._arrivals = ChunkArrivals()
        self._server = BlobServer(self._store, self._arrivals, Pacer(0))
        self._fetcher = BlobFetcher(self._links, self._peers, self._store, self._arrivals)

    def router(self) -> Router:
        """Make the accept loop."""
        return Router(
            self._transport,
            self._peers,
            {ALPN_BLOBS: self._server.handle},
            max_streams_per_peer=MAX_STREAMS,
            max_peers=MAX_PEERS,
        )

    async def meet(self, command: Event) -> Event:
        """Learn the addresses of all nodes."""
        for name, addresses in command["nodes"]:
            self._peers.hint(bytes.fromhex(name), addresses)
        return {}

    async def hold(self, command: Event) -> Event:
        """Store the chunks of a file without fetching it.

        With `lie`, this file and everything else is served with wrong bytes.
        """
        file, size = Path(command["file"]), command["chunk"]
        data = await asyncio.to_thread(file.read_bytes)
        chunks: list[tuple[str, int]] = []
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            name = self._store.put(piece)
            chunks.append((name.hex(), len(piece)))
            self._arrivals.arrived(name)
        self._store.lies = command["lie"]
        return {"chunks": chunks}

    async def fetch(self, command: Event) -> Event:
        """Fetch a version, starting at the time `at` of the monotonic clock."""
        chunks = [ChunkRef(bytes.fromhex(name), size) for name, size in command["chunks"]]
        neighbours = [bytes.fromhex(name) for name in command["neighbours"]]
        self._fetcher.place = command["place"]
        before = Counter(self._fetcher.wasted)
        await asyncio.sleep(max(0.0, command["at"] - time.monotonic()))
        await self._fetcher.fetch(chunks, neighbours, bytes.fromhex(command["origin"]))
        done = time.monotonic()
        missing = sum(not self._store.has(chunk.digest) for chunk in chunks)
        wasted = (self._fetcher.wasted - before).total()
        return {"done": done, "missing": missing, "wasted": wasted}

    async def report(self, command: Event) -> Event:
        """Return the CPU time, peak memory and bytes served of this process so far."""
        return {
            "cpu": time.process_time(),
            "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "served": {peer.hex(): size for peer, size in self._server.served.items()},
        }

    async def close(self) -> None:
        """Close the outgoing connections."""
        await self._links.close()


async def main() -> None:
    """Run a node until stdin ends."""
    wire = Wire()
    logging.basicConfig(level=logging.WARNING)
    key = SecretKey.generate()
    transport = IrohTransport(key, host=sys.argv[1], port=0, alpns=(ALPN_BLOBS,))
    await transport.start()
    node = Node(transport)
    accepting = asyncio.create_task(node.router().run())
    wire.tell("up", node=key.node_id.hex(), addresses=transport.addresses())
    handlers = {"meet": node.meet, "hold": node.hold, "fetch": node.fetch, "report": node.report}
    try:
        await wire.serve(handlers)
    finally:
        await node.close()
        await transport.close()
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
