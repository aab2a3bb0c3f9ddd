"""One bare node of swarm.py: iroh, a store in memory, chunks served and fetched; no engine, no weights.

    python swarm_node.py ADDRESS      (commands and answers are JSON lines on stdin and stdout)

It ends when its stdin does: a killed benchmark leaves no process behind.
"""

import asyncio
import json
import logging
import resource
import sys
import time
from collections import Counter
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.p2p.connections import ConnectionPool, Router
from primerl.node.p2p.download import BlobFetcher
from primerl.node.p2p.iroh import IrohTransport
from primerl.node.p2p.limits import Pacer
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.serve import BlobServer, ChunkArrivals
from primerl.protocol.manifests import ChunkRef
from primerl.protocol.version import ALPN_BLOBS

LINE_BYTES = 2**24
CONNECT_S = 10.0
MAX_STREAMS = 64
MAX_PEERS = 256

Command = dict[str, Any]


class LyingStore:
    """A store in memory that gives out wrong bytes once told to lie."""

    def __init__(self) -> None:
        self._blobs: dict[bytes, bytes] = {}
        self.lies = False

    def put(self, data: bytes) -> bytes:
        """Keep `data`."""
        name = digest(data)
        self._blobs[name] = data
        return name

    def get(self, name: bytes) -> bytes | None:
        """The bytes of `name`; of a liar the first one is flipped."""
        data = self._blobs.get(name)
        return data if data is None or not self.lies else bytes([data[0] ^ 1]) + data[1:]

    def has(self, name: bytes) -> bool:
        """Whether `name` is kept."""
        return name in self._blobs

    def size(self, name: bytes) -> int | None:
        """Bytes of `name`."""
        data = self._blobs.get(name)
        return None if data is None else len(data)

    def delete(self, name: bytes) -> None:
        """Drop `name`."""
        self._blobs.pop(name, None)

    def names(self) -> set[bytes]:
        """All digests that are kept."""
        return set(self._blobs)

    def total_bytes(self) -> int:
        """Bytes of everything that is kept."""
        return sum(map(len, self._blobs.values()))

    def collect(self, keep: AbstractSet[bytes]) -> int:
        """Delete everything but `keep`."""
        before = self.total_bytes()
        self._blobs = {name: data for name, data in self._blobs.items() if name in keep}
        return before - self.total_bytes()


class Node:
    """Everything of a node that moves chunks."""

    def __init__(self, transport: IrohTransport) -> None:
        self._transport = transport
        self._peers = PeerTable()
        self._links = ConnectionPool(transport, self._peers, connect_timeout_s=CONNECT_S)
        self._store = LyingStore()
        self._arrivals = ChunkArrivals()
        self._server = BlobServer(self._store, self._arrivals, Pacer(0))
        self._fetcher = BlobFetcher(self._links, self._peers, self._store, self._arrivals)

    def router(self) -> Router:
        """The accept loop."""
        return Router(
            self._transport,
            self._peers,
            {ALPN_BLOBS: self._server.handle},
            max_streams_per_peer=MAX_STREAMS,
            max_peers=MAX_PEERS,
        )

    def meet(self, command: Command) -> Command:
        """Learn the addresses of all nodes."""
        for name, addresses in command["nodes"]:
            self._peers.hint(bytes.fromhex(name), addresses)
        return {}

    def hold(self, command: Command) -> Command:
        """Take in a file that we did not fetch; with `lie` its bytes, and all others, go out wrong."""
        data, size = Path(command["file"]).read_bytes(), command["chunk"]
        chunks: list[tuple[str, int]] = []
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            name = self._store.put(piece)
            chunks.append((name.hex(), len(piece)))
            self._arrivals.arrived(name)
        self._store.lies = command["lie"]
        return {"chunks": chunks}

    async def fetch(self, command: Command) -> Command:
        """Fetch a version, from the moment `at` of the monotonic clock on."""
        chunks = [ChunkRef(bytes.fromhex(name), size) for name, size in command["chunks"]]
        neighbours = [bytes.fromhex(name) for name in command["neighbours"]]
        self._fetcher.place = command["place"]
        fetched, wasted = Counter(self._fetcher.fetched), Counter(self._fetcher.wasted)
        await asyncio.sleep(max(0.0, command["at"] - time.monotonic()))
        await self._fetcher.fetch(chunks, neighbours, bytes.fromhex(command["origin"]))
        done = time.monotonic()
        missing = sum(not self._store.has(chunk.digest) for chunk in chunks)
        by_source = self._fetcher.fetched - fetched
        return {
            "done": done,
            "missing": missing,
            "fetched": {source.hex(): size for source, size in by_source.items()},
            "wasted": (self._fetcher.wasted - wasted).total(),
        }

    def report(self, command: Command) -> Command:
        """What this process has used and seen so far."""
        blamed = {row.node.hex(): row.blamed.total() for row in self._peers.rows() if row.blamed}
        return {
            "cpu": time.process_time(),
            "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "served": {peer.hex(): size for peer, size in self._server.served.items()},
            "blamed": blamed,
        }

    async def close(self) -> None:
        """Close what was dialled."""
        await self._links.close()


async def serve(node: Node) -> None:
    """Answer commands until stdin ends."""
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    handlers = {"meet": node.meet, "hold": node.hold, "report": node.report}
    while line := await reader.readline():
        command = json.loads(line)
        name = command["do"]
        say(await node.fetch(command) if name == "fetch" else handlers[name](command))


def say(answer: Command) -> None:
    """One line to the benchmark."""
    print(json.dumps(answer), flush=True)


async def main() -> None:
    """Run a node until stdin ends."""
    logging.basicConfig(level=logging.WARNING)
    started = time.monotonic()
    key = SecretKey.generate()
    transport = IrohTransport(key, host=sys.argv[1], port=0, alpns=(ALPN_BLOBS,))
    await transport.start()
    node = Node(transport)
    accepting = asyncio.create_task(node.router().run())
    say(
        {
            "node": key.node_id.hex(),
            "addresses": transport.addresses(),
            "start_s": time.monotonic() - started,
        }
    )
    try:
        await serve(node)
    finally:
        await node.close()
        await transport.close()
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
