"""libp2p nodes on loopback, and plain peers of the library in a trio thread of their own."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TypeVar

import trio

from primerl.crypto.keys import SecretKey
from primerl.node.p2p.discovery import GossipFact, peer_id_of
from primerl.node.p2p.libp2p import Libp2pDiscovery
from primerl.node.p2p.trio_bridge import TrioThread

T = TypeVar("T")

RUN = b"r" * 32
DEADLINE_S = 60.0


def key(i: int) -> SecretKey:
    return SecretKey.from_seed(bytes([i]) * 32)


def node(i: int) -> Libp2pDiscovery:
    return Libp2pDiscovery(key(i), run_id=RUN, host="127.0.0.1", port=0)


def port_of(discovery: Libp2pDiscovery) -> int:
    return int(discovery.addresses()[0].split("/")[4])


def multiaddr(port: int, i: int) -> str:
    """Where node `i` would be."""
    from libp2p.peer.id import ID

    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{ID(peer_id_of(key(i).node_id))}"


async def heard(discovery: Libp2pDiscovery) -> GossipFact:
    async with asyncio.timeout(DEADLINE_S):
        return await anext(discovery.facts())


@asynccontextmanager
async def living(
    build: Callable[[AsyncExitStack, TrioThread], Awaitable[T]],
) -> AsyncGenerator[T]:
    """What `build` makes in a trio thread; its stack is closed there at the end of the block."""
    thread = TrioThread("stranger")
    await thread.start()
    leave, left = trio.Event(), trio.Event()

    async def begin() -> T:
        ready: list[T] = []
        up = trio.Event()
        thread.nursery.start_soon(live, ready, up)
        await up.wait()
        return ready[0]

    async def live(ready: list[T], up: trio.Event) -> None:
        async with AsyncExitStack() as stack:
            ready.append(await build(stack, thread))
            up.set()
            await leave.wait()
        left.set()

    async def end() -> None:
        leave.set()
        await left.wait()

    try:
        async with asyncio.timeout(2 * DEADLINE_S):
            yield await thread.call(begin)
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                await thread.call(end)
        await thread.stop()
