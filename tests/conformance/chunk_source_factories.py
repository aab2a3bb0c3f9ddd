"""Every way to a chunk beside iroh, by name, for tests/conformance/test_chunk_source.py.

To add one: write an async context manager that yields a Place, whose server behaves as `place.mood` says,
and name it in FACTORIES.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pytest
from support.memory_network import MemoryNetwork
from support.memory_store import MemoryStore

from primerl.crypto.keys import SecretKey
from primerl.node.p2p import seeds
from primerl.node.p2p.chunk_client import ChunkSource, PeerPaths, TcpChunks
from primerl.node.p2p.discovery import Discovery
from primerl.node.p2p.libp2p import Libp2pDiscovery
from primerl.node.p2p.limits import Pacer
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.rpc import receive, send
from primerl.node.p2p.seeds import open_seeds
from primerl.node.p2p.serve import BlobServer, ChunkArrivals, TcpChunkServer, serving
from primerl.node.p2p.transport import Stream
from primerl.node.storage.chunk_store import FileStore, Store
from primerl.protocol.manifests import ChunkRef
from primerl.protocol.messages import ChunkFollows, GetChunk

Mood = Literal["honest", "silent", "stalling", "short", "long", "garbage"]
SERVER, CLIENT = (SecretKey.from_seed(bytes([i]) * 32) for i in (1, 2))
STALL_AFTER = 1000
STALL_S = 2.0


@dataclass
class Place:
    """A source under test, and what its server does."""

    source: ChunkSource
    store: Store
    stop: Callable[[], None]
    """Ends the server, as a crash would."""
    mood: Mood = "honest"
    lies: bytes = b""
    """What is said in the mood for garbage."""


@dataclass
class OnePeer:
    """PeerPaths with the peer left out: a ChunkSource."""

    paths: PeerPaths
    name: str = "peer"
    received: int = 0

    async def get(self, chunk: ChunkRef, *, deadline: float) -> bytes:
        """From the server."""
        return await self.paths.get(SERVER.node_id, chunk, deadline=deadline)


@asynccontextmanager
async def seed() -> AsyncGenerator[Place]:
    """A web server of a few lines, which can misbehave."""
    closing: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closing.append(writer)
        try:
            while request := await reader.readuntil(b"\r\n\r\n"):
                digest = bytes.fromhex(request.split()[1].decode().rpartition("/")[2])
                await say(writer, place.store.get(digest))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def say(writer: asyncio.StreamWriter, data: bytes | None) -> None:
        length = 0 if data is None else len(data)
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
        match place.mood:
            case "silent":
                return
            case "stalling":
                writer.write(head % length + (data or b"")[:STALL_AFTER])
                return
            case "garbage":
                writer.write(place.lies)
                writer.close()
            case "short":
                writer.write(head % length + (data or b"")[:-1])
                writer.close()
            case "long":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + (data or b"") + bytes(1 << 20))
                writer.close()
            case _ if data is None:
                writer.write(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
            case _:
                writer.write(head % length + data)
        await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    def stop() -> None:
        server.close()
        for writer in closing:
            writer.transport.abort()

    async with open_seeds([f"http://127.0.0.1:{port}/chunks/"]) as seeds:
        place = Place(seeds[0], MemoryStore(max_bytes=1 << 26), stop)
        yield place
    stop()
    await server.wait_closed()


@asynccontextmanager
async def folder() -> AsyncGenerator[Place]:
    """A chunk store on a disk that can be slow, and files that can be damaged."""

    def read(path: Path, size: int) -> bytes:
        data = honest(path, size)
        match place.mood:
            case "silent" | "stalling":
                time.sleep(STALL_S)
                return data
            case "short":
                return data[:-1]
            case "long":
                return (data + bytes(size))[:size]
            case "garbage":
                return place.lies
            case _:
                return data

    def stop() -> None:
        """A disk that is gone has a plain file, or nothing, where it was mounted."""
        base.rename(base.with_name("gone"))
        base.write_bytes(b"")

    honest = seeds.read_most
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        base = Path(name, "a b")
        patched.setattr(seeds, "read_most", read)
        async with open_seeds([base.as_uri()]) as (seed,):
            place = Place(seed, FileStore(base, max_bytes=1 << 26), stop)
            yield place


@asynccontextmanager
async def carried(server: Discovery, client: Discovery) -> AsyncGenerator[Place]:
    """Two started discoveries; the first one's node has the chunks."""

    async def answer(peer: bytes, stream: Stream) -> None:
        if place.mood == "honest":
            return await honest.handle(peer, stream)
        request = await receive(stream, GetChunk)
        data = place.store.get(request.digest) or b""
        match place.mood:
            case "stalling":
                await send(stream, ChunkFollows(len(data)))
                await stream.write(data[:STALL_AFTER])
            case "garbage":
                await stream.write(place.lies)
            case "short":
                await send(stream, ChunkFollows(len(data)))
                await stream.write(data[:-1])
                return await stream.finish()
            case "long":
                await send(stream, ChunkFollows(len(data) + 1))
                await stream.write(data + bytes(1 << 20))
            case _:
                pass
        await asyncio.sleep(60)

    running = asyncio.Event()

    async def serve() -> None:
        async with serving(TcpChunkServer(server, PeerTable(), answer)):
            await running.wait()
        await server.close()

    chunks = TcpChunks(client, PeerTable(), bootstrap=server.addresses())
    store = MemoryStore(max_bytes=1 << 26)
    honest = BlobServer(store, ChunkArrivals(), Pacer(0))
    task = asyncio.ensure_future(serve())
    await asyncio.sleep(0)
    place = Place(OnePeer(chunks), store, running.set)
    yield place
    running.set()
    await task


@asynccontextmanager
async def memory() -> AsyncGenerator[Place]:
    """Two nodes of one world."""
    world = MemoryNetwork()
    server, client = world.discovery(SERVER.node_id), world.discovery(CLIENT.node_id)
    await server.start([])
    await client.start(server.addresses())
    async with carried(server, client) as place:
        yield place
    await client.close()


@asynccontextmanager
async def libp2p() -> AsyncGenerator[Place]:
    """Two nodes on loopback, over TCP."""
    server, client = (
        Libp2pDiscovery(key, run_id=bytes(32), host="127.0.0.1", port=0) for key in (SERVER, CLIENT)
    )
    await server.start([])
    await client.start([])
    async with carried(server, client) as place:
        yield place
    await client.close()


Factory = Callable[[], AbstractAsyncContextManager[Place]]
FACTORIES: dict[str, Factory] = {
    "seed": seed,
    "folder": folder,
    "memory": memory,
    "libp2p": libp2p,
}
