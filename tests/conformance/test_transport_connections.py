"""The connections of every transport: nodes within and out of reach, and how connections end."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from conformance.transport_factories import (
    ALPN,
    DEADLINE_S,
    FACTORIES,
    MIB,
    OTHER_ALPN,
    TransportWorld,
    connect,
    connected,
    soon,
    streams,
)

from primerl.crypto.keys import SecretKey
from primerl.node.p2p.transport import ConnectionLost, Unreachable


@pytest.fixture(params=sorted(FACTORIES))
async def world(request: pytest.FixtureRequest) -> AsyncIterator[TransportWorld]:
    async with FACTORIES[request.param]((ALPN, OTHER_ALPN)) as world:
        yield world


async def test_both_sides_know_the_id_and_the_protocol_of_the_other(world: TransportWorld) -> None:
    async with connected(world) as pair:
        assert pair.near.peer == pair.server.node_id
        assert pair.far.peer == pair.client.node_id
        assert pair.near.alpn == pair.far.alpn == ALPN
        assert not pair.near.closed
        assert not pair.far.closed


async def test_another_node_at_the_right_address_is_unreachable(world: TransportWorld) -> None:
    client, server = await world.make(), await world.make()
    stranger = SecretKey.generate().node_id
    with pytest.raises(Unreachable):
        await soon(client.connect(stranger, server.addresses(), ALPN, deadline=5.0))


async def test_an_impostor_does_not_disturb_the_node_at_that_address(world: TransportWorld) -> None:
    async with connected(world) as pair:
        with pytest.raises(Unreachable):
            await soon(
                pair.client.connect(
                    SecretKey.generate().node_id, pair.server.addresses(), ALPN, deadline=5.0
                )
            )
        near, far = await streams(pair)
        await near.write(b"still here")
        assert await soon(far.read_exact(10)) == b"still here"


async def test_a_dead_port_is_unreachable_within_the_deadline(world: TransportWorld) -> None:
    client = await world.make()
    started = time.monotonic()
    with pytest.raises(Unreachable):
        await client.connect(
            SecretKey.generate().node_id, (world.dead_address,), ALPN, deadline=0.5
        )
    assert time.monotonic() - started < DEADLINE_S


@pytest.mark.parametrize(
    "hints", [(), ("",), ("nonsense",), ("127.0.0.1:0",), ("127.0.0.1:70000",), ("http://x/",)]
)
async def test_hints_that_lead_nowhere_are_unreachable(
    world: TransportWorld, hints: tuple[str, ...]
) -> None:
    client = await world.make()
    with pytest.raises(Unreachable):
        await soon(client.connect(SecretKey.generate().node_id, hints, ALPN, deadline=0.3))


async def test_bad_hints_beside_a_good_one_do_no_harm(world: TransportWorld) -> None:
    client, server = await world.make(), await world.make()
    hints = ("nonsense", world.dead_address, *server.addresses())
    near = await soon(client.connect(server.node_id, hints, ALPN, deadline=DEADLINE_S))
    assert near.peer == server.node_id


async def test_an_unknown_alpn_is_unreachable_and_not_accepted(world: TransportWorld) -> None:
    client, server = await world.make(), await world.make()
    with pytest.raises(Unreachable):
        await soon(connect(client, server, b"primerl-test/2"))
    await connect(client, server)
    assert (await soon(server.accept())).alpn == ALPN


async def test_a_node_does_not_connect_to_itself(world: TransportWorld) -> None:
    client = await world.make()
    with pytest.raises(Unreachable):
        await soon(connect(client, client))


async def test_a_malformed_node_id_is_unreachable(world: TransportWorld) -> None:
    client, server = await world.make(), await world.make()
    for peer in (b"", b"short", b"\xff" * 32, bytes(33)):
        with pytest.raises(Unreachable):
            await soon(client.connect(peer, server.addresses(), ALPN, deadline=1.0))


async def test_a_closed_connection_is_lost_for_both_sides(world: TransportWorld) -> None:
    async with connected(world) as pair:
        near, far = await streams(pair)
        accepting = asyncio.ensure_future(pair.far.accept_stream())
        reading = asyncio.ensure_future(far.read_exact(1))
        await asyncio.sleep(0)
        await pair.near.close("bye")
        await pair.near.close("twice is fine")
        for waiting in (accepting, reading):
            with pytest.raises(ConnectionLost):
                await soon(waiting)
        assert pair.near.closed
        assert pair.far.closed
        for call in (pair.near.open_stream(), pair.far.open_stream(), pair.near.accept_stream()):
            with pytest.raises(ConnectionLost):
                await soon(call)
        for write in (near.write(b"x"), far.write(b"x")):
            with pytest.raises(ConnectionLost):
                await soon(write)
        await soon(near.abort())


async def test_the_reason_of_a_close_reaches_the_peer(world: TransportWorld) -> None:
    async with connected(world) as pair:
        await pair.near.close("the run ended")
        with pytest.raises(ConnectionLost, match="the run ended"):
            await soon(pair.far.accept_stream())


async def test_an_idle_peer_answers_however_often_and_a_closed_connection_does_not(
    world: TransportWorld,
) -> None:
    async with connected(world) as pair:
        for _ in range(150):  # more than the streams that a peer lets be open at a time
            assert await soon(pair.far.answers(10.0))
        near, far = await streams(pair)
        await near.write(b"undisturbed")
        assert await soon(far.read_exact(11)) == b"undisturbed"
        await pair.near.close()
        assert not await soon(pair.far.answers(10.0))


async def test_closing_a_transport_ends_its_connections_and_its_accept(
    world: TransportWorld,
) -> None:
    async with connected(world) as pair:
        _near, far = await streams(pair)
        accepting = asyncio.ensure_future(pair.client.accept())
        await asyncio.sleep(0)
        await soon(pair.client.close())
        await soon(pair.client.close())
        with pytest.raises(ConnectionLost):
            await soon(accepting)
        with pytest.raises(ConnectionLost):
            await soon(pair.client.accept())
        with pytest.raises(ConnectionLost):
            await soon(far.read_exact(1))
        with pytest.raises(Unreachable):
            await soon(connect(pair.client, pair.server))


async def test_a_closed_transport_is_unreachable(world: TransportWorld) -> None:
    client, server = await world.make(), await world.make()
    hints = server.addresses()
    await server.close()
    with pytest.raises(Unreachable):
        await soon(client.connect(server.node_id, hints, ALPN, deadline=0.5))


async def test_two_connections_of_one_pair_carry_different_protocols(world: TransportWorld) -> None:
    async with connected(world) as pair:
        bulk_near, bulk_far = await soon(
            asyncio.gather(connect(pair.client, pair.server, OTHER_ALPN), pair.server.accept())
        )
        assert (pair.far.alpn, bulk_far.alpn) == (ALPN, OTHER_ALPN)
        await bulk_near.close()
        with pytest.raises(ConnectionLost):
            await soon(bulk_far.accept_stream())
        near, far = await streams(pair)
        await near.write(b"control")
        assert await soon(far.read_exact(7)) == b"control"


async def test_the_path_counters_grow_with_what_is_carried(world: TransportWorld) -> None:
    async with connected(world) as pair:
        near, far = await streams(pair)
        before = pair.near.path(), pair.far.path()
        reading = asyncio.ensure_future(far.read_exact(MIB))
        await near.write(bytes(MIB))
        await soon(reading)
        assert pair.near.path().bytes_sent >= before[0].bytes_sent + MIB
        assert pair.far.path().bytes_received >= before[1].bytes_received + MIB
        assert pair.near.path().kind in ("direct", "memory")


async def test_the_path_of_a_closed_connection_can_still_be_asked_for(
    world: TransportWorld,
) -> None:
    async with connected(world) as pair:
        await streams(pair)
        await pair.near.close()
        assert pair.near.path().bytes_sent > 0
