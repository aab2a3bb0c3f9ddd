"""The accept loop: which peers are blamed and limited, and that a bug of ours costs one request."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from support import virtual_time
from support.memory_network import MemoryConnection, MemoryNetwork
from support.sizes import kept_by
from support.waiting import until

from primerl.crypto.hashing import short
from primerl.crypto.keys import SecretKey
from primerl.node.errors import StorageError
from primerl.node.p2p import connections
from primerl.node.p2p.peers import PeerTable, Tier
from primerl.node.p2p.rpc import Refused, TooSlow, receive, send
from primerl.node.p2p.rpc import ask as request
from primerl.node.p2p.transport import Connection, ConnectionLost, Stream, Unreachable
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.messages import Accepted, Goodbye
from primerl.protocol.version import ALPN_CONTROL

GONE = 300
SERVER, CLIENT = (SecretKey.from_seed(bytes([n]) * 32).node_id for n in (1, 2))


@asynccontextmanager
async def served(
    handler: connections.Handler, max_streams: int = 4
) -> AsyncGenerator[tuple[connections.ConnectionPool, PeerTable]]:
    """A client's links to a server with `handler`, and the server's peer table."""
    network = MemoryNetwork()
    server, client = network.transport(SERVER), network.transport(CLIENT)
    table = PeerTable()
    router = connections.Router(
        server, table, {ALPN_CONTROL: handler}, max_streams_per_peer=max_streams, max_peers=4
    )
    peers = PeerTable()
    peers.hint(SERVER, server.addresses())
    links = connections.ConnectionPool(client, peers, connect_timeout_s=2.0)
    running = asyncio.create_task(router.run())
    try:
        yield links, table
    finally:
        await links.close()
        await server.close()
        await client.close()
        await asyncio.wait_for(running, 60.0)


async def ask(links: connections.ConnectionPool) -> Accepted:
    return await links.request(SERVER, ALPN_CONTROL, Goodbye(), Accepted, deadline=60.0)


async def answer(peer: bytes, stream: Stream) -> None:
    await receive(stream, Goodbye)
    await send(stream, Accepted())
    await stream.finish()


def refuse_with(reason: Reason) -> connections.Handler:
    async def handler(peer: bytes, stream: Stream) -> None:
        raise RemoteProtocolError(reason, "because")

    return handler


async def test_a_request_is_answered_and_its_peer_is_known() -> None:
    async with served(answer) as (links, table):
        assert await ask(links) == Accepted()
        assert [peer.node for peer in table.rows()] == [CLIENT]


async def test_a_request_that_is_not_answered_costs_its_deadline() -> None:
    async def late(peer: bytes, stream: Stream) -> None:
        await asyncio.sleep(3.0)
        await answer(peer, stream)

    async with served(late) as (links, _):
        with pytest.raises(TooSlow, match="no reply to Goodbye"):
            await links.request(SERVER, ALPN_CONTROL, Goodbye(), Accepted, deadline=0.1)


async def test_a_peer_that_breaks_the_protocol_is_refused_and_blamed() -> None:
    async with served(refuse_with(Reason.MALFORMED)) as (links, table):
        with pytest.raises(Refused, match="malformed: because"):
            await ask(links)
        assert table.get(CLIENT).blamed[Reason.MALFORMED] == 1
        assert table.reliability(CLIENT) < 1.0


async def test_a_peer_that_asks_for_something_we_lack_is_refused_and_not_blamed() -> None:
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


async def test_a_full_disk_costs_requests_that_need_it_and_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handler(peer: bytes, stream: Stream) -> None:
        raise StorageError("the disk is full")

    async with served(handler) as (links, table):
        with pytest.raises(Refused, match="disk_full"):
            await ask(links)
        assert table.reliability(CLIENT) == 1.0
    assert [line for line in caplog.messages if "full" in line] == [
        f"cannot answer {short(CLIENT)}: the disk is full"
    ]
    assert not any(record.exc_info for record in caplog.records)


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


async def test_a_node_that_stops_does_not_say_that_its_peers_asked_too_much() -> None:
    network = MemoryNetwork()
    server, client = network.transport(SERVER), network.transport(CLIENT)
    router = connections.Router(
        server, PeerTable(), {ALPN_CONTROL: answer}, max_streams_per_peer=4, max_peers=4
    )
    running = asyncio.create_task(router.run())
    connection = await client.connect(SERVER, server.addresses(), ALPN_CONTROL, deadline=60.0)
    await request(connection, Goodbye(), Accepted, deadline=60.0)
    running.cancel()
    await asyncio.wait([running])
    with pytest.raises(ConnectionLost, match="is gone: closed"):
        await connection.open_stream()


# -- slots -------------------------------------------------------------------------------------------


class Host:
    """A server with room for eight peers, and its clients."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.server = self.network.transport(SERVER)
        self.table = PeerTable()
        self.router = connections.Router(
            self.server, self.table, {ALPN_CONTROL: answer}, max_streams_per_peer=4, max_peers=8
        )

    async def connect(
        self, name: int, tier: Tier = Tier.STRANGER, ticket: bytes = b""
    ) -> MemoryConnection:
        """A connection of the peer of that number; it has shown already what it is."""
        node = SecretKey.from_seed(name.to_bytes(32, "big")).node_id
        if tier != Tier.STRANGER:
            self.table.admit(node, tier, ticket)
        transport = self.network.transport(node)
        made = await transport.connect(SERVER, self.server.addresses(), ALPN_CONTROL, deadline=10.0)
        for _ in range(10):
            await asyncio.sleep(0)  # until it was served or refused
        return made


@asynccontextmanager
async def hosting() -> AsyncGenerator[Host]:
    host = Host()
    running = asyncio.create_task(host.router.run())
    try:
        yield host
    finally:
        await host.server.close()
        await asyncio.wait_for(running, 60.0)


async def crowd(
    host: Host, first: int, count: int, tier: Tier, ticket: bytes = b""
) -> list[MemoryConnection]:
    return [await host.connect(first + number, tier, ticket) for number in range(count)]


async def test_a_member_takes_the_slot_of_a_stranger_then_of_a_newcomer_and_never_a_members() -> (
    None
):
    async with hosting() as host:
        strangers = await crowd(host, 100, 1, Tier.STRANGER)
        newcomers = await crowd(host, 200, 1, Tier.NEWCOMER, b"one")
        members = await crowd(host, 300, 8, Tier.MEMBER)
        assert strangers[0].closed
        assert newcomers[0].closed
        assert not any(one.closed for one in members)
        assert (await host.connect(400, Tier.MEMBER)).closed


async def test_a_stranger_finds_a_slot_though_newcomers_would_take_all_of_them() -> None:
    async with hosting() as host:
        newcomers = await crowd(host, 200, 8, Tier.NEWCOMER, b"leaked")
        late = await host.connect(1)
        assert not late.closed
        assert sum(one.closed for one in newcomers) == 1
        assert newcomers[0].closed, "the one that asked for nothing for longest"


async def test_a_newcomer_by_another_ticket_takes_the_slot_of_the_many_by_one() -> None:
    async with hosting() as host:
        many = await crowd(host, 200, 8, Tier.NEWCOMER, b"leaked")
        other = await host.connect(1, Tier.NEWCOMER, b"another")
        assert not other.closed
        assert sum(one.closed for one in many) == 1
        assert (await host.connect(2, Tier.NEWCOMER, b"leaked")).closed


def test_slots_change_hands_no_faster_than_is_cheap_but_for_members() -> None:
    async def work() -> None:
        async with hosting() as host:
            await crowd(host, 200, 8, Tier.STRANGER)
            for number in range(int(connections.SWAP_BURST)):
                assert not (await host.connect(300 + number)).closed
            refused = await crowd(host, 400, 20, Tier.STRANGER)
            assert all(connection.closed for connection in refused)
            assert not (await host.connect(1, Tier.MEMBER)).closed
            await asyncio.sleep(1.5 / connections.SWAPS_PER_SECOND)
            assert not (await host.connect(2)).closed
            assert (await host.connect(3)).closed

    virtual_time.run(work())


def test_requests_of_those_that_are_no_members_are_bounded_together() -> None:
    """Each of many keys asks as often as it can; a member is answered in between."""
    answered = 0

    async def flood(connection: MemoryConnection) -> None:
        nonlocal answered
        while True:
            await request(connection, Goodbye(), Accepted, deadline=60.0)
            answered += 1

    async def work() -> None:
        async with hosting() as host:
            newcomers = await crowd(host, 200, 6, Tier.NEWCOMER, b"leaked")
            member = await host.connect(1, Tier.MEMBER)
            floods = [asyncio.create_task(flood(newcomer)) for newcomer in newcomers]
            try:
                for _ in range(300):
                    await request(member, Goodbye(), Accepted, deadline=60.0)
                    await asyncio.sleep(0)
                assert 0 < answered <= connections.ALL_UNPROVEN_BURST
            finally:
                for task in floods:
                    task.cancel()
                await asyncio.gather(*floods, return_exceptions=True)

    virtual_time.run(work())


async def test_requests_that_the_gate_refused_leave_those_of_the_same_key_their_allowance() -> None:
    network = MemoryNetwork()
    server, first, second = (network.transport(one) for one in (SERVER, CLIENT, CLIENT))
    came: list[Connection] = []
    open_again = asyncio.Event()

    async def gate(connection: Connection) -> None:
        came.append(connection)
        if connection is came[0]:
            return
        if len(came) > 3:  # the third request of the thief waits, and all after it
            await open_again.wait()
        raise RemoteProtocolError(Reason.KEY_IN_USE, "elsewhere")

    router = connections.Router(
        server,
        PeerTable(),
        {ALPN_CONTROL: answer},
        max_streams_per_peer=2,
        max_peers=4,
        gate=gate,
    )
    running = asyncio.create_task(router.run())
    owner, thief = [
        await one.connect(SERVER, server.addresses(), ALPN_CONTROL, deadline=5.0)
        for one in (first, second)
    ]
    try:
        assert await request(owner, Goodbye(), Accepted, deadline=60.0) == Accepted()
        for _ in range(2):
            with pytest.raises(Refused, match="elsewhere"):
                await request(thief, Goodbye(), Accepted, deadline=60.0)
        waiting = [
            asyncio.ensure_future(request(thief, Goodbye(), Accepted, deadline=60.0))
            for _ in range(2)
        ]
        await until(lambda: len(came) == 5)
        with pytest.raises(Refused, match="too many requests"):
            await request(thief, Goodbye(), Accepted, deadline=60.0)
        assert await request(owner, Goodbye(), Accepted, deadline=60.0) == Accepted()
        open_again.set()
        for one in waiting:
            with pytest.raises(Refused, match="elsewhere"):
                await one
    finally:
        for one in (first, second, server):
            await one.close()
        await asyncio.wait_for(running, 60.0)


async def test_a_node_that_is_not_there_any_more_leaves_nothing_but_a_bounded_pause() -> None:
    """Anybody can announce nodes that do not exist, for others to dial."""
    network = MemoryNetwork()
    client = network.transport(CLIENT)
    links = connections.ConnectionPool(client, PeerTable(), connect_timeout_s=2.0)
    for number in range(GONE):
        with pytest.raises(Unreachable):
            await links.get(number.to_bytes(32, "big"), ALPN_CONTROL)
    assert kept_by(links) == GONE  # one pause each, of which there are MAX_PEERS at most
    await links.close()
    await client.close()


async def test_two_that_need_a_connection_at_once_share_one_dial() -> None:
    async with served(answer) as (links, table):
        first, second = await asyncio.gather(
            links.get(SERVER, ALPN_CONTROL), links.get(SERVER, ALPN_CONTROL)
        )
        assert first is second
        await until(lambda: len(table.get(CLIENT).connections) == 1)
        assert kept_by(links) == 1
