"""Neighbours that corrupt, lie, stall or die: they cost a fetch little, and the swarm nothing."""

import asyncio

from support.access_lines import uplinks
from support.exchange_world import (
    KIB,
    Bare,
    ExchangeNetwork,
    bytes_of,
    copies_sent,
    node_id,
    payload,
)
from support.exchange_world import references as refs
from support.lying_holders import claiming, deny, keep_in_line
from support.memory_network import MemoryNetwork
from support.virtual_time import on_virtual_time
from support.waiting import until

from primerl.node.p2p.rpc import send
from primerl.node.p2p.transport import Stream
from primerl.protocol.errors import Reason
from primerl.protocol.messages import ChunkFollows, GetChunk

SIZE = 32 * KIB
MBIT = 125_000.0


async def corrupt(stream: Stream, request: GetChunk) -> None:
    await send(stream, ChunkFollows(SIZE))
    await stream.write(bytes(SIZE))
    await stream.finish()


async def stall(stream: Stream, request: GetChunk) -> None:
    await send(stream, ChunkFollows(SIZE))
    await stream.write(bytes(SIZE // 2))
    await asyncio.sleep(3600)


@on_virtual_time
async def test_a_corrupting_neighbour_costs_one_chunk_and_is_left_out_of_the_next_fetch() -> None:
    chunks, more = payload(30, SIZE), payload(30, SIZE, seed=1)
    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0")
        bad = world.add("bad", handler=claiming(corrupt))
        origin.hold(chunks + more)
        for some in (chunks, more):
            await worker.fetch(refs(some), [bad], origin)
            assert worker.holds(refs(some))
        assert worker.fetcher.wasted[bad.id] == SIZE
        assert worker.peers.get(bad.id).blamed == {Reason.WRONG_DIGEST: 1}
        assert bad.id not in worker.fetcher.fetched


@on_virtual_time
async def test_a_neighbour_that_has_not_what_it_claims_is_blamed_and_left_out() -> None:
    chunks = payload(30, SIZE)
    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0")
        bad = world.add("bad", handler=claiming(deny))
        origin.hold(chunks)
        await worker.fetch(refs(chunks), [bad], origin)
        assert worker.holds(refs(chunks))
        assert worker.peers.get(bad.id).blamed == {Reason.NOT_FOUND: 1}


@on_virtual_time
async def test_a_neighbour_that_stalls_or_lets_us_wait_holds_up_no_chunk_for_long() -> None:
    chunks = payload(30, SIZE)
    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0")
        bad = [world.add("b1", handler=claiming(stall))]
        bad.append(world.add("b2", handler=claiming(keep_in_line)))
        good = world.add("good")
        for holder in (origin, good):
            holder.hold(chunks)
        async with asyncio.timeout(60.0):
            await worker.fetch(refs(chunks), [*bad, good], origin)
        assert worker.holds(refs(chunks))
        assert bytes_of(worker.fetcher.fetched, *bad) == 0


@on_virtual_time
async def test_neighbours_that_stall_with_all_they_claim_cost_seconds_then_the_origin_gives() -> (
    None
):
    chunks = payload(6, SIZE)
    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0")
        bad = [world.add(f"b{number}", handler=claiming(stall)) for number in range(3)]
        origin.hold(chunks)
        async with asyncio.timeout(60.0):
            await worker.fetch(refs(chunks), bad, origin)
        assert worker.holds(refs(chunks))


@on_virtual_time
async def test_dead_neighbours_do_not_keep_a_fetch_from_the_origin() -> None:
    chunks = payload(10, SIZE)
    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0")
        silent, gone = world.add("silent"), world.add("gone")
        world.network.stall(worker.id, silent.id)
        world.network.drop(gone.id)
        origin.hold(chunks)
        async with asyncio.timeout(60.0):
            await worker.fetch(refs(chunks), [silent, gone], origin)
        assert worker.holds(refs(chunks))
        assert worker.peers.reliability(silent.id) < 1.0


@on_virtual_time
async def test_a_swarm_with_every_kind_of_bad_neighbour_loses_no_chunk() -> None:
    chunks = payload(40, SIZE)
    names = ["origin", *(f"w{number}" for number in range(8))]
    rates = {node_id(name): 40 * MBIT for name in names}
    async with ExchangeNetwork(MemoryNetwork(lines=uplinks(rates))) as world:
        origin = world.add("origin")
        origin.hold(chunks)
        workers = [world.add(name) for name in names[1:]]
        bad = [
            world.add(f"bad{number}", handler=claiming(answer))
            for number, answer in enumerate((corrupt, deny, stall))
        ]
        mortal = workers.pop()
        tasks = [
            asyncio.create_task(fetch_among(one, workers, bad, mortal, origin)) for one in workers
        ]
        dying = asyncio.create_task(fetch_among(mortal, workers, bad, mortal, origin))
        await until(lambda: len(mortal.store.names()) >= 10)
        world.network.drop(mortal.id)
        dying.cancel()
        await asyncio.wait([dying])
        async with asyncio.timeout(60.0):
            await asyncio.gather(*tasks)
        for worker in workers:
            assert worker.holds(refs(chunks))
            assert worker.fetcher.wasted[bad[0].id] <= SIZE
        assert copies_sent(origin, refs(chunks)) <= 3.0


async def fetch_among(
    one: Bare, workers: list[Bare], bad: list[Bare], mortal: Bare, origin: Bare
) -> None:
    """The artifact of the test above, with everybody as a neighbour."""
    chunks = refs(payload(40, SIZE))
    await one.fetch(chunks, [*workers[:4], mortal, *bad, *workers[4:]], origin)
