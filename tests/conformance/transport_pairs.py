"""What both halves of the transport suite share: a pair of connected nodes, and deadlines."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from conformance.transport_factories import World

from primerl.node.p2p.transport import Connection, Stream, Transport

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
async def connected(world: World, alpn: bytes = ALPN) -> AsyncGenerator[Pair, None]:
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
