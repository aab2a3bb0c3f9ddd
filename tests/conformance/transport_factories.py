"""Every implementation of the transport seam, by name, for the suite test_transport*.py.

To add one: write an async context manager that takes the ALPNs and yields a World, and name it in
FACTORIES.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from support.memory_transport import MemoryNetwork

from primerl.crypto.keys import SecretKey
from primerl.node.p2p.iroh import IrohTransport
from primerl.node.p2p.transport import Transport


@dataclass(frozen=True)
class World:
    """Makes transports that can reach each other, and knows an address where nobody listens."""

    make: Callable[[], Awaitable[Transport]]
    dead_address: str


Factory = Callable[[Sequence[bytes]], AbstractAsyncContextManager[World]]


@asynccontextmanager
async def memory(alpns: Sequence[bytes]) -> AsyncGenerator[World, None]:
    """Nodes of one in-process world."""
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:

        async def make() -> Transport:
            transport = network.transport(SecretKey.generate().node_id, alpns)
            stack.push_async_callback(transport.close)
            return transport

        yield World(make, "10.255.255.255:1")


@asynccontextmanager
async def iroh(alpns: Sequence[bytes]) -> AsyncGenerator[World, None]:
    """QUIC endpoints on the loopback interface."""
    async with AsyncExitStack() as stack:

        async def make() -> Transport:
            key = SecretKey.generate()
            transport = IrohTransport(key, host="127.0.0.1", port=0, alpns=alpns)
            stack.push_async_callback(transport.close)
            await transport.start()
            return transport

        yield World(make, "127.0.0.1:9")


FACTORIES: dict[str, Factory] = {"memory": memory, "iroh": iroh}
