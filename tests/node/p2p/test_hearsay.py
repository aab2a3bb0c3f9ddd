"""A fetch from peers that gossip names: holders that no other node named, and liars, which cost it little."""

import asyncio
from collections import Counter
from collections.abc import Collection

from support.access_lines import uplinks
from support.exchange_world import KIB, Bare, ExchangeNetwork, copies_sent, node_id, payload
from support.exchange_world import references as refs
from support.memory_network import MemoryNetwork
from support.memory_store import MemoryStore
from support.virtual_time import on_virtual_time
from support.waiting import until

from primerl.node.p2p.connections import Handler
from primerl.node.p2p.rpc import receive, send
from primerl.node.p2p.transport import Stream
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.manifests import ChunkRef
from primerl.protocol.messages import BlobRequest, ChunkFollows, GetAnyChunk

SIZE = 32 * KIB


async def fetch(
    worker: Bare,
    chunks: list[ChunkRef],
    origin: Bare,
    *,
    line: Collection[Bare] = (),
    holders: Collection[Bare] = (),
) -> None:
    """A fetch in which gossip names `holders`."""
    for one in [*line, *holders, origin]:
        worker.peers.hint(one.id, one.transport.addresses())
    known = [one.id for one in holders]
    async with asyncio.timeout(60.0):
        await worker.fetcher.fetch(
            chunks, [one.id for one in line], origin.id, holders=lambda: known
        )
    assert worker.holds(chunks)


def refusing(asked: Counter[str], name: str) -> Handler:
    """A node that has nothing to give, and counts requests."""

    async def handler(peer: bytes, stream: Stream) -> None:
        asked[name] += 1
        raise RemoteProtocolError(Reason.NOT_FOUND, "I only said so")

    return handler


@on_virtual_time
async def test_a_holder_that_only_gossip_names_spares_the_origin() -> None:
    chunks = payload(20, SIZE)
    async with ExchangeNetwork() as world:
        origin, holder, worker = (world.add(name) for name in ("origin", "holder", "w0"))
        origin.hold(chunks)
        holder.hold(chunks)
        await fetch(worker, refs(chunks), origin, holders=[holder])
        assert worker.fetcher.fetched == {holder.id: 20 * SIZE}
        assert copies_sent(origin, refs(chunks)) == 0


@on_virtual_time
async def test_a_holder_that_gossip_names_during_the_fetch_is_asked_too() -> None:
    chunks = payload(20, SIZE)
    network = MemoryNetwork(lines=uplinks({node_id("origin"): 2.0 * SIZE}))
    async with ExchangeNetwork(network) as world:
        origin, holder, worker = (world.add(name) for name in ("origin", "holder", "w0"))
        origin.hold(chunks)
        holder.hold(chunks)
        worker.peers.hint(holder.id, holder.transport.addresses())
        worker.peers.hint(origin.id, origin.transport.addresses())
        told: list[bytes] = []
        fetching = asyncio.create_task(
            worker.fetcher.fetch(refs(chunks), [], origin.id, holders=lambda: told)
        )
        await until(lambda: worker.fetcher.fetched[origin.id])
        told.append(holder.id)
        await fetching
        assert worker.fetcher.fetched[holder.id] >= 10 * SIZE


@on_virtual_time
async def test_a_liar_that_says_it_holds_everything_costs_a_refused_watch() -> None:
    chunks = payload(20, SIZE)
    asked: Counter[str] = Counter()
    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0")
        origin.hold(chunks)
        liar = world.add("liar", handler=refusing(asked, "liar"))
        await fetch(worker, refs(chunks), origin, holders=[liar])
        assert asked == {"liar": 1}
        assert worker.fetcher.fetched == {origin.id: 20 * SIZE}
        assert not worker.fetcher.wasted.total()


@on_virtual_time
async def test_a_liar_that_is_nowhere_keeps_a_worker_from_nothing() -> None:
    chunks, more = payload(20, SIZE), payload(20, SIZE, seed=1)
    async with ExchangeNetwork() as world:
        origin, other, worker = (world.add(name) for name in ("origin", "other", "w0"))
        origin.hold(chunks + more)
        other.hold(chunks)
        liar = world.add("liar")
        await liar.transport.close()
        await fetch(worker, refs(chunks), origin, line=[other], holders=[liar])
        assert worker.fetcher.fetched == {other.id: 20 * SIZE}
        await fetch(worker, refs(more), origin, holders=[liar])
        assert worker.fetcher.fetched[origin.id] == 20 * SIZE


@on_virtual_time
async def test_the_origin_is_not_asked_to_spare_itself_for_the_sake_of_hearsay() -> None:
    """It would make us wait for a neighbour that may never have existed."""
    chunks = payload(4, SIZE)
    urgent: set[bool] = set()
    async with ExchangeNetwork() as world:
        worker = world.add("w0")
        store = MemoryStore(max_bytes=1 << 30)

        async def answer(peer: bytes, stream: Stream) -> None:
            request: BlobRequest = await receive(stream, BlobRequest)  # type: ignore[arg-type]
            assert isinstance(request, GetAnyChunk)
            urgent.add(request.urgent)
            data = store.get(request.wanted[0])
            assert data is not None
            await send(stream, ChunkFollows(len(data)))
            await stream.write(data)
            await stream.finish()

        async def stay_silent(peer: bytes, stream: Stream) -> None:
            await asyncio.sleep(3600)

        for chunk in chunks:
            store.put(chunk)
        origin = world.add("origin", handler=answer)
        liar = world.add("liar", handler=stay_silent)
        await fetch(worker, refs(chunks), origin, holders=[liar])
        assert urgent == {True}


@on_virtual_time
async def test_liars_in_any_number_get_half_the_places_and_never_the_first() -> None:
    chunks = payload(40, SIZE)
    asked: Counter[str] = Counter()
    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0")
        line = [world.add(f"w{number}") for number in range(1, 9)]
        for one in [origin, *line]:
            one.hold(chunks)
        liars = [world.add(f"l{n}", handler=refusing(asked, f"l{n}")) for n in range(40)]
        await fetch(worker, refs(chunks), origin, line=line, holders=liars)
        assert 1 <= len(asked) <= 4
        assert copies_sent(origin, refs(chunks)) == 0
        assert worker.fetcher.fetched[line[0].id] > 0


@on_virtual_time
async def test_a_neighbour_that_says_it_holds_the_version_comes_before_those_that_do_not() -> None:
    chunks = payload(20, SIZE)
    asked: Counter[str] = Counter()
    async with ExchangeNetwork() as world:
        origin, holder = world.add("origin"), world.add("holder")
        empty = [world.add(f"e{n}", handler=refusing(asked, f"e{n}")) for n in range(40)]
        for one in (origin, holder):
            one.hold(chunks)
        line = [*empty[:20], holder, *empty[20:]]
        for number in range(1, 6):
            worker = world.add(f"w{number}")
            await fetch(worker, refs(chunks), origin, line=line, holders=[holder])
            assert worker.fetcher.fetched[holder.id] > 0
            assert asked["e0"] == number, "the first of the line stays the first"
