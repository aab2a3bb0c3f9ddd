"""The faults that a MemoryNetwork can cause, and the bounds of its parts."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import pytest
from support.memory_network import (
    BACKLOG,
    MAX_FACTS,
    STREAM_BACKLOG,
    MemoryConnection,
    MemoryDiscovery,
    MemoryNetwork,
    MemoryTransport,
)

from primerl.node.p2p.discovery import GossipFact
from primerl.node.p2p.transport import ConnectionLost, StreamClosed, Unreachable
from primerl.protocol.version import ALPN_BLOBS, ALPN_CONTROL

A, B, C = b"A" * 32, b"B" * 32, b"C" * 32

T = TypeVar("T")


async def soon(work: Awaitable[T]) -> T:
    async with asyncio.timeout(60.0):
        return await work


async def connect(
    source: MemoryTransport, target: MemoryTransport, *, deadline: float = 5.0
) -> MemoryConnection:
    return await source.connect(target.node_id, target.addresses(), ALPN_CONTROL, deadline=deadline)


async def test_a_partition_breaks_what_runs_and_refuses_what_is_new_until_healed() -> None:
    network = MemoryNetwork()
    a, b, c = (network.transport(node_id) for node_id in (A, B, C))
    near, bystander = await connect(a, b), await connect(a, c)
    far = await b.accept()
    reading = asyncio.ensure_future(far.accept_stream())
    await asyncio.sleep(0)
    network.partition(A, B)
    with pytest.raises(ConnectionLost):
        await soon(reading)
    assert near.closed
    assert not bystander.closed
    for source, target in ((a, b), (b, a)):
        with pytest.raises(Unreachable):
            await connect(source, target)
    network.heal(A, B)
    assert near.closed
    assert not (await connect(b, a)).closed


async def test_a_stalled_link_is_silent_and_goes_on_when_healed() -> None:
    network = MemoryNetwork()
    a, b = network.transport(A), network.transport(B)
    near = await connect(a, b)
    far = await b.accept()
    stream = await near.open_stream()
    network.stall(A, B)
    writing = asyncio.ensure_future(stream.write(b"late"))
    accepting = asyncio.ensure_future(far.accept_stream())
    await asyncio.wait([writing, accepting], timeout=0.05)
    assert not writing.done()
    assert not accepting.done()
    assert not near.closed
    with pytest.raises(Unreachable, match="did not answer"):
        await connect(a, b, deadline=0.05)
    network.heal(A, B)
    await soon(writing)
    assert await soon((await soon(accepting)).read_exact(4)) == b"late"


async def test_closing_a_connection_ends_a_write_on_a_stalled_link() -> None:
    network = MemoryNetwork()
    a, b = network.transport(A), network.transport(B)
    near = await connect(a, b)
    stream = await near.open_stream()
    network.stall(A, B)
    writing = asyncio.ensure_future(stream.write(b"never"))
    await asyncio.sleep(0)
    await near.close()
    with pytest.raises(ConnectionLost):
        await soon(writing)


async def test_a_dropped_node_loses_everything_and_comes_back_elsewhere() -> None:
    network = MemoryNetwork()
    a, b = network.transport(A), network.transport(B)
    near = await connect(a, b)
    accepting = asyncio.ensure_future(b.accept())
    await soon(accepting)
    accepting = asyncio.ensure_future(b.accept())
    await asyncio.sleep(0)
    network.drop(B)
    with pytest.raises(ConnectionLost):
        await soon(accepting)
    with pytest.raises(ConnectionLost):
        await soon(near.open_stream())
    with pytest.raises(Unreachable):
        await connect(a, b)
    restarted = network.transport(B)
    assert restarted.addresses() != b.addresses()
    assert (await connect(a, restarted)).peer == B


async def test_the_delay_is_asked_for_every_handshake_and_every_piece_of_data() -> None:
    trips: list[tuple[bytes, bytes]] = []

    async def delay(source: bytes, target: bytes) -> None:
        trips.append((source, target))

    network = MemoryNetwork(delay=delay, window=4)
    a, b = network.transport(A), network.transport(B)
    near = await connect(a, b)
    far = await b.accept()
    assert trips == [(A, B), (B, A)]
    trips.clear()
    stream = await near.open_stream()
    writing = asyncio.ensure_future(stream.write(b"0123456789"))
    assert await soon((await far.accept_stream()).read_exact(10)) == b"0123456789"
    await writing
    assert trips == [(A, B)] * 3


async def test_a_writer_waits_when_the_window_is_full() -> None:
    network = MemoryNetwork(window=8)
    a, b = network.transport(A), network.transport(B)
    near = await connect(a, b)
    stream = await near.open_stream()
    await soon(stream.write(bytes(8)))
    writing = asyncio.ensure_future(stream.write(b"+"))
    await asyncio.wait([writing], timeout=0.02)
    assert not writing.done()
    incoming = await (await b.accept()).accept_stream()
    await soon(incoming.read_exact(1))
    await soon(writing)
    assert near.path().bytes_sent == 9


async def test_a_node_accepts_only_the_protocols_it_was_made_with() -> None:
    network = MemoryNetwork()
    a, b = network.transport(A), network.transport(B, [ALPN_BLOBS])
    with pytest.raises(Unreachable, match="does not speak"):
        await connect(a, b)
    both = network.transport(C)
    for alpn in (ALPN_CONTROL, ALPN_BLOBS):
        assert (await a.connect(C, both.addresses(), alpn, deadline=60.0)).alpn == alpn


async def test_connections_that_nobody_accepts_are_refused_beyond_the_backlog() -> None:
    network = MemoryNetwork()
    a, b = network.transport(A), network.transport(B)
    for _ in range(BACKLOG):
        await connect(a, b)
    with pytest.raises(Unreachable, match="no more connections"):
        await connect(a, b)
    await b.accept()
    await connect(a, b)


async def test_streams_that_nobody_accepts_are_refused_beyond_the_backlog() -> None:
    network = MemoryNetwork()
    a, b = network.transport(A), network.transport(B)
    near = await connect(a, b)
    kept = [await near.open_stream() for _ in range(STREAM_BACKLOG + 1)]
    for stream in kept[:-1]:
        await stream.write(b"x")
    with pytest.raises(StreamClosed, match="no more streams"):
        await kept[-1].write(b"x")


async def started(network: MemoryNetwork, *node_ids: bytes) -> list[MemoryDiscovery]:
    """A chain: each node is bootstrapped from the one before it."""
    chain = [network.discovery(node_id) for node_id in node_ids]
    bootstrap: tuple[str, ...] = ()
    for discovery in chain:
        await discovery.start(bootstrap)
        bootstrap = discovery.addresses()
    return chain


async def next_fact(discovery: MemoryDiscovery) -> GossipFact:
    return await soon(anext(discovery.facts()))


async def test_facts_wait_in_a_bounded_queue_that_drops_the_oldest() -> None:
    a, b = await started(MemoryNetwork(), A, B)
    for number in range(MAX_FACTS + 5):
        await a.publish(number.to_bytes(4, "big"))
    assert (await next_fact(b)).sealed == (5).to_bytes(4, "big")


async def test_a_fact_names_the_neighbour_that_handed_it_over() -> None:
    a, _b, c = await started(MemoryNetwork(), A, B, C)
    await a.publish(b"fact")
    assert await next_fact(c) == GossipFact(b"fact", source=B)


async def test_gossip_crosses_no_cut_or_stalled_link_and_is_not_repeated() -> None:
    network = MemoryNetwork()
    a, b = await started(network, A, B)
    for cut in (network.partition, network.stall):
        cut(A, B)
        await a.publish(cut.__name__.encode())
        network.heal(A, B)
    await a.publish(b"after")
    assert (await next_fact(b)).sealed == b"after"


async def test_gossip_that_the_world_loses_does_not_arrive() -> None:
    lost = {(A, B)}
    network = MemoryNetwork(loss=lambda source, target: (source, target) in lost)
    a, b = await started(network, A, B)
    await a.publish(b"lost")
    lost.clear()
    await a.publish(b"found")
    assert (await next_fact(b)).sealed == b"found"


async def test_a_node_that_was_dropped_is_heard_no_more() -> None:
    network = MemoryNetwork()
    a, b, c = await started(network, A, B, C)
    network.drop(B)
    assert (a.neighbours(), c.neighbours()) == (0, 0)
    await b.publish(b"from the grave")
    await c.start(a.addresses())
    await a.publish(b"alive")
    assert (await next_fact(c)).sealed == b"alive"


async def test_a_bootstrap_node_that_starts_late_becomes_a_neighbour_then() -> None:
    network = MemoryNetwork()
    early, late = network.discovery(A), network.discovery(B)
    await early.start(late.addresses())
    assert early.neighbours() == 0
    await late.start(())
    assert early.neighbours() == late.neighbours() == 1
