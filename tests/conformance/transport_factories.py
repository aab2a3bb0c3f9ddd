"""Every implementation of the transport seam, by name, and connected pairs, for the suite test_transport*.py.

To add one: write an async context manager that takes the ALPNs and yields a World, and name it in
FACTORIES.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from support.access_lines import MBIT_S, AccessLines, Line
from support.memory_network import MemoryNetwork

from primerl.crypto.keys import SecretKey
from primerl.node.p2p.iroh import IrohTransport
from primerl.node.p2p.transport import Connection, Stream, Transport


@dataclass(frozen=True)
class TransportWorld:
    """Makes transports that can reach each other, and knows an address without a listener."""

    make: Callable[[], Awaitable[Transport]]
    dead_address: str


Factory = Callable[[Sequence[bytes]], AbstractAsyncContextManager[TransportWorld]]


@asynccontextmanager
async def memory(
    alpns: Sequence[bytes], lines: AccessLines | None = None
) -> AsyncGenerator[TransportWorld, None]:
    """Nodes of one in-process world."""
    network = MemoryNetwork(lines=lines)
    async with AsyncExitStack() as stack:

        async def make() -> Transport:
            transport = network.transport(SecretKey.generate().node_id, alpns)
            stack.push_async_callback(transport.close)
            return transport

        yield TransportWorld(make, "10.255.255.255:1")


def memory_over_lines(
    alpns: Sequence[bytes],
) -> AbstractAsyncContextManager[TransportWorld]:
    """Nodes of one in-process world, on lines of 400 Mbit/s with a round trip of 4 ms."""
    line = Line(up=400 * MBIT_S, down=400 * MBIT_S, latency_s=0.001)
    return memory(alpns, AccessLines(lambda node: line))


@asynccontextmanager
async def iroh(alpns: Sequence[bytes]) -> AsyncGenerator[TransportWorld, None]:
    """QUIC endpoints on the loopback interface."""
    async with AsyncExitStack() as stack:

        async def make() -> Transport:
            key = SecretKey.generate()
            transport = IrohTransport(key, host="127.0.0.1", port=0, alpns=alpns)
            stack.push_async_callback(transport.close)
            await transport.start()
            return transport

        yield TransportWorld(make, "127.0.0.1:9")


FACTORIES: dict[str, Factory] = {
    "memory": memory,
    "memory over lines": memory_over_lines,
    "iroh": iroh,
}


ALPN = b"primerl-test/1"
OTHER_ALPN = b"primerl-test-bulk/1"
DEADLINE_S = 60.0
MIB = 1 << 20

T = TypeVar("T")


async def soon(work: Awaitable[T]) -> T:
    """No wait of this suite is without a deadline."""
    async with asyncio.timeout(DEADLINE_S):
        return await work


async def connect(source: Transport, target: Transport, alpn: bytes = ALPN) -> Connection:
    return await source.connect(target.node_id, target.addresses(), alpn, deadline=DEADLINE_S)


@dataclass
class Pair:
    """Two transports and both ends of a connection between them."""

    client: Transport
    server: Transport
    near: Connection
    far: Connection


@asynccontextmanager
async def connected(world: TransportWorld, alpn: bytes = ALPN) -> AsyncGenerator[Pair, None]:
    client, server = await world.make(), await world.make()
    near, far = await soon(asyncio.gather(connect(client, server, alpn), server.accept()))
    yield Pair(client, server, near, far)


async def streams(pair: Pair) -> tuple[Stream, Stream]:
    """Both ends of a stream, opened by the client; one byte has crossed it."""
    near = await soon(pair.near.open_stream())
    await soon(near.write(b"!"))
    far = await soon(pair.far.accept_stream())
    assert await soon(far.read_exact(1)) == b"!"
    return near, far
