"""A way over a relay of our own, with the real iroh."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from support.iroh_relay import relaying

from primerl.crypto.keys import SecretKey
from primerl.node.p2p.iroh import IrohTransport

ALPN = b"primerl-test/1"
DEADLINE_S = 60.0


@asynccontextmanager
async def connected_to(relay: str) -> AsyncGenerator[IrohTransport]:
    """Yield an endpoint that uses this relay."""
    key = SecretKey.generate()
    end = IrohTransport(key, host="127.0.0.1", port=0, alpns=[ALPN], relay_urls=[relay])
    await end.start()
    try:
        yield end
    finally:
        await end.close()


@pytest.mark.slow
async def test_a_node_is_reached_through_our_own_relay_without_any_address_of_it() -> None:
    async with (
        relaying() as relay,
        connected_to(relay.url) as server,
        connected_to(f"{relay.url}/") as client,
        asyncio.timeout(DEADLINE_S),
    ):
        hint = server.addresses()[-1]
        assert hint.rstrip("/") == relay.url, "tickets and records name the relay"
        near = await client.connect(server.node_id, [hint], ALPN, deadline=DEADLINE_S)
        far = await server.accept()
        stream = await near.open_stream()
        await stream.write(b"over the relay")
        assert await (await far.accept_stream()).read_exact(14) == b"over the relay"
        assert relay.carried > 0
        assert near.path().kind in ("relayed", "direct"), "iroh goes on directly where it can"
