"""Every implementation of the discovery seam, by name, for tests/conformance/test_discovery.py.

To add one: write an async context manager that takes `n` and yields `n` built, not yet started
discoveries that can reach each other, and name it in FACTORIES. The suite starts them; the factory
closes them. facts() may be iterated anew: all iterators of one discovery share one queue.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from primerl.node.network.discovery import Discovery
from primerl.node.network.memory import MemoryNetwork

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


# libp2p goes here: an `async def libp2p(n)` like memory() above, and its line in FACTORIES.

FACTORIES: dict[str, Factory] = {"memory": memory}
