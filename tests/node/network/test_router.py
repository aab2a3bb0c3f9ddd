"""The accept loop: who is blamed, who is limited, and that a bug of ours costs one request."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from primerl.crypto.keys import SecretKey
from primerl.node.network.links import Links
from primerl.node.network.memory import MemoryNetwork
from primerl.node.network.peers import PeerTable
from primerl.node.network.router import Handler, Router
from primerl.node.network.rpc import Refused, receive, send
from primerl.node.network.transport import Stream
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.messages import Accepted, Goodbye
from primerl.protocol.version import ALPN_CONTROL

SERVER, CLIENT = (SecretKey.from_seed(bytes([n]) * 32).node_id for n in (1, 2))


@asynccontextmanager
async def served(handler: Handler, max_streams: int = 4) -> AsyncGenerator[tuple[Links, PeerTable]]:
    """A client's links to a server with `handler`, and the server's peer table."""
    network = MemoryNetwork()
    server, client = network.transport(SERVER), network.transport(CLIENT)
    table = PeerTable()
    router = Router(
        server, table, {ALPN_CONTROL: handler}, max_streams_per_peer=max_streams, max_peers=4
    )
    peers = PeerTable()
    peers.hint(SERVER, server.addresses())
    links = Links(client, peers, connect_timeout_s=2.0)
    running = asyncio.create_task(router.run())
    try:
        yield links, table
    finally:
        await links.close()
        await server.close()
        await client.close()
        await asyncio.wait_for(running, 60.0)


async def ask(links: Links) -> Accepted:
    return await links.request(SERVER, ALPN_CONTROL, Goodbye(), Accepted, deadline=60.0)


async def answer(peer: bytes, stream: Stream) -> None:
    await receive(stream, Goodbye)
    await send(stream, Accepted())
    await stream.finish()


def refuse_with(reason: Reason) -> Handler:
    async def handler(peer: bytes, stream: Stream) -> None:
        raise RemoteProtocolError(reason, "because")

    return handler


async def test_a_request_is_answered_and_its_peer_is_known() -> None:
    async with served(answer) as (links, table):
        assert await ask(links) == Accepted()
        assert [peer.node for peer in table.rows()] == [CLIENT]


async def test_who_breaks_the_protocol_is_refused_and_blamed() -> None:
    async with served(refuse_with(Reason.MALFORMED)) as (links, table):
        with pytest.raises(Refused, match="malformed: because"):
            await ask(links)
        assert table.get(CLIENT).blamed[Reason.MALFORMED] == 1
        assert table.reliability(CLIENT) < 1.0


async def test_who_asks_for_what_we_lack_is_refused_and_not_blamed() -> None:
    async with served(refuse_with(Reason.NOT_FOUND)) as (links, table):
        with pytest.raises(Refused, match="not_found"):
            await ask(links)
        assert table.reliability(CLIENT) == 1.0


async def test_a_bug_of_ours_costs_one_request() -> None:
    broken = True

    async def handler(peer: bytes, stream: Stream) -> None:
        if broken:
            raise KeyError("a bug")
        await answer(peer, stream)

    async with served(handler) as (links, _):
        with pytest.raises(Refused, match="busy"):
            await ask(links)
        broken = False
        assert await ask(links) == Accepted()


async def test_more_streams_at_once_than_allowed_are_refused_and_the_others_answered() -> None:
    release = asyncio.Event()

    async def handler(peer: bytes, stream: Stream) -> None:
        await release.wait()
        await answer(peer, stream)

    async with served(handler, max_streams=2) as (links, _):
        asking = [asyncio.create_task(ask(links)) for _ in range(3)]
        done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED, timeout=60.0)
        refused = done.pop().exception()
        assert isinstance(refused, Refused)
        assert refused.reason == Reason.RATE_LIMITED
        release.set()
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
        assert outcomes.count(Accepted()) == 2
