"""Every implementation of the discovery seam, by name, for tests/conformance/test_discovery.py.

To add one: write an async context manager that takes `n` and yields `n` built, not yet started
discoveries that can reach each other, and name it in FACTORIES. The suite starts them; the factory
closes them. facts() may be iterated anew: all iterators of one discovery share one queue.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from support.memory_network import MemoryNetwork

from primerl.crypto.keys import SecretKey
from primerl.node.p2p.discovery import Discovery
from primerl.node.p2p.libp2p import Libp2pDiscovery

Factory = Callable[[int], AbstractAsyncContextManager[list[Discovery]]]


@asynccontextmanager
async def memory(n: int) -> AsyncGenerator[list[Discovery], None]:
    """`n` nodes of one in-process world."""
    network = MemoryNetwork()
    discoveries: list[Discovery] = [network.discovery(bytes([i]) * 32) for i in range(n)]
    try:
        yield discoveries
    finally:
        for discovery in discoveries:
            await discovery.close()


@asynccontextmanager
async def libp2p(n: int) -> AsyncGenerator[list[Discovery]]:
    """`n` nodes on loopback, each with a trio thread and a TCP port of its own."""
    discoveries: list[Discovery] = [
        Libp2pDiscovery(
            SecretKey.from_seed(bytes([i]) * 32), run_id=bytes(32), host="127.0.0.1", port=0
        )
        for i in range(n)
    ]
    try:
        yield discoveries
    finally:
        await asyncio.gather(*(discovery.close() for discovery in discoveries))


FACTORIES: dict[str, Factory] = {"libp2p": libp2p, "memory": memory}
