"""A swarm that fetches: everybody gets everything, and the origin sends each chunk as seldom as possible."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
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
from support.lying_holders import claiming, late
from support.memory_network import MemoryNetwork
from support.memory_store import MemoryStore
from support.virtual_time import on_virtual_time
from support.waiting import until

from primerl.node.errors import NetworkError, StorageError
from primerl.node.p2p.download import Fetch
from primerl.node.p2p.download_state import ChunkDownload
from primerl.node.p2p.rpc import Refused, receive, send
from primerl.node.p2p.transport import Stream, TransportError, Unreachable
from primerl.node.storage.chunk_store import FileStore
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import ChunkRef
from primerl.protocol.messages import ChunkFollows, GetAnyChunk, InLine

MBIT = 125_000.0


async def all_fetch(
    workers: Sequence[Bare], chunks: Sequence[ChunkRef], origin: Bare, timeout: float = 60.0
) -> None:
    """Everybody fetches at the same time, in a line."""
    async with asyncio.timeout(timeout), asyncio.TaskGroup() as tasks:
        for place, worker in enumerate(workers):
            worker.fetcher.place = place
            line = [*reversed(workers[:place]), *workers[place + 1 :]]
            tasks.create_task(worker.fetch(chunks, line, origin))


@on_virtual_time
async def test_a_lone_worker_fetches_everything_once() -> None:
    chunks = payload(40)
    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0")
        origin.hold(chunks)
        await worker.fetch(refs(chunks), [], origin)
        assert worker.holds(refs(chunks))
        assert copies_sent(origin, refs(chunks)) == 1.0
        assert worker.fetcher.fetched == {origin.id: 40 * 64 * KIB}
        assert worker.fetcher.by_source(origin.id) == {"trainer": 40 * 64 * KIB}
        assert not +worker.fetcher.wasted


@pytest.mark.parametrize(("workers", "count"), [(2, 30), (8, 24), (8, 3)])
@on_virtual_time
async def test_a_swarm_costs_the_origin_about_one_copy(workers: int, count: int) -> None:
    chunks = payload(count, 32 * KIB)
    names = ["origin", *(f"w{number}" for number in range(workers))]
    rates = {node_id(name): 10 * MBIT for name in names}
    async with ExchangeNetwork(MemoryNetwork(lines=uplinks(rates))) as world:
        origin = world.add("origin")
        origin.hold(chunks)
        nodes = [world.add(name) for name in names[1:]]
        await all_fetch(nodes, refs(chunks), origin)
        assert all(node.holds(refs(chunks)) for node in nodes)
        assert copies_sent(origin, refs(chunks)) <= 2.0


@on_virtual_time
async def test_two_workers_share_out_what_the_origin_sends_and_pass_it_to_each_other() -> None:
    chunks = payload(30, 32 * KIB)
    rates = {node_id(name): 40 * MBIT for name in ("origin", "w0", "w1")}
    async with ExchangeNetwork(MemoryNetwork(lines=uplinks(rates))) as world:
        origin, first, second = (world.add(name) for name in ("origin", "w0", "w1"))
        origin.hold(chunks)
        await all_fetch([first, second], refs(chunks), origin)
        for one, other in ((first, second), (second, first)):
            assert bytes_of(one.fetcher.fetched, other) >= 0.2 * 30 * 32 * KIB


@on_virtual_time
async def test_a_late_joiner_fetches_from_neighbours_and_leaves_the_origin_alone() -> None:
    chunks = payload(30)
    async with ExchangeNetwork() as world:
        origin, late = world.add("origin"), world.add("late")
        nodes = [world.add(f"w{number}") for number in range(3)]
        for holder in [origin, *nodes]:
            holder.hold(chunks)
        await late.fetch(refs(chunks), nodes, origin)
        assert not origin.server.served
        assert sum(node.server.served[late.id] > 0 for node in nodes) >= 2


@on_virtual_time
async def test_a_worker_passes_on_what_it_has_while_it_still_fetches() -> None:
    chunks = payload(20, 32 * KIB)
    rates = {node_id("origin"): 1 * MBIT}
    async with ExchangeNetwork(MemoryNetwork(lines=uplinks(rates))) as world:
        origin, first, second = (world.add(name) for name in ("origin", "w0", "w1"))
        origin.hold(chunks)
        world.network.partition(second.id, origin.id)
        fetching = [
            asyncio.create_task(first.fetch(refs(chunks), [second], origin)),
            asyncio.create_task(second.fetch(refs(chunks), [first], origin)),
        ]
        await until(lambda: len(second.store.names()) >= 3)
        assert not first.holds(refs(chunks))
        for task in fetching:
            task.cancel()
        await asyncio.wait(fetching)


@on_virtual_time
async def test_what_is_in_the_store_is_not_fetched_again_after_a_kill(tmp_path: Path) -> None:
    chunks = payload(40, 32 * KIB)
    rates = {node_id("origin"): 4 * MBIT}
    async with ExchangeNetwork(MemoryNetwork(lines=uplinks(rates))) as world:
        origin = world.add("origin")
        origin.hold(chunks)
        before = world.add("w0", store=FileStore(tmp_path, max_bytes=1 << 30, fsync=False))
        fetching = asyncio.create_task(before.fetch(refs(chunks), [], origin))
        await until(lambda: len(before.store.names()) >= 12)
        world.network.drop(before.id)
        fetching.cancel()
        await asyncio.wait([fetching])
        # A new process: nothing is left but the directory.
        store = FileStore(tmp_path, max_bytes=1 << 30, fsync=False)
        kept = len(store.names())
        rates.clear()
        after = world.add("w0", store=store)
        await after.fetch(refs(chunks), [], origin)
        assert after.holds(refs(chunks))
        assert kept >= 12
        assert after.fetcher.fetched == {origin.id: (40 - kept) * 32 * KIB}


@on_virtual_time
async def test_a_slow_neighbour_does_not_slow_the_others() -> None:
    chunks = payload(24, 128 * KIB)
    rates = {node_id("slow"): 0.5 * MBIT}
    async with ExchangeNetwork(MemoryNetwork(lines=uplinks(rates))) as world:
        origin, worker = world.add("origin"), world.add("w0")
        slow, fast = world.add("slow"), world.add("fast")
        for holder in (origin, slow, fast):
            holder.hold(chunks)
        async with asyncio.timeout(20.0):  # the slow one alone would take 50 s
            await worker.fetch(refs(chunks), [slow, fast], origin)
        assert bytes_of(worker.fetcher.fetched, fast) > 0.7 * 24 * 128 * KIB


# -- what nobody has --------------------------------------------------------------------------------


@on_virtual_time
async def test_what_the_origin_keeps_no_longer_ends_the_fetch_at_once() -> None:
    chunks = payload(3)
    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0")
        origin.hold(chunks[:2])
        async with asyncio.timeout(60.0):
            # Before: the end waits for nothing that is on its way, and takes nothing away.
            await worker.fetch(refs(chunks[:2]), [], origin)
            with pytest.raises(NetworkError, match="no longer kept"):
                await worker.fetch(refs(chunks), [], origin)
        assert worker.holds(refs(chunks[:2]))


@on_virtual_time
async def test_without_anybody_a_fetch_gives_up_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("primerl.node.p2p.download.GIVE_UP_S", 1.0)
    chunks = payload(3)
    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0")
        world.network.drop(origin.id)
        async with asyncio.timeout(60.0):
            with pytest.raises(NetworkError, match="could not be fetched from anybody"):
                await worker.fetch(refs(chunks), [], origin)


@pytest.mark.parametrize(
    ("source", "chunk_s", "stuck_s"), [("origin", 0.25, 2.0), ("holder", 0.3, 4.0)]
)
@on_virtual_time
async def test_a_crowd_that_waits_in_line_for_longer_than_for_the_dead_gets_every_chunk(
    source: str, chunk_s: float, stuck_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, who was in line at the origin for two minutes without a chunk gave up."""
    monkeypatch.setattr("primerl.node.p2p.download.GIVE_UP_S", 2.0)
    monkeypatch.setattr("primerl.node.p2p.download.STUCK_S", stuck_s)
    monkeypatch.setattr("primerl.node.p2p.serve.BEAT_S", 0.1)
    chunks = payload(1)
    rates = {node_id(name): 64 * KIB / chunk_s for name in ("origin", "holder")}
    async with ExchangeNetwork(MemoryNetwork(lines=uplinks(rates))) as world:
        origin, holder = world.add("origin"), world.add("holder")
        workers = [world.add(f"w{number}") for number in range(24)]
        for one in (origin, holder):
            one.hold(chunks)
        line = [holder] if source == "holder" else []
        async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(worker.fetch(refs(chunks), line, origin))
        assert all(worker.holds(refs(chunks)) for worker in workers)


@on_virtual_time
async def test_an_origin_that_failed_once_and_then_keeps_us_in_line_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("primerl.node.p2p.download.GIVE_UP_S", 1.0)
    (chunk,) = payload(1)
    requests: list[bytes] = []

    async def handler(peer: bytes, stream: Stream) -> None:
        await receive(stream, GetAnyChunk)
        requests.append(peer)
        if len(requests) == 1:
            return await stream.abort()
        for _ in range(25):
            await send(stream, InLine())
            await asyncio.sleep(0.1)
        await send(stream, ChunkFollows(len(chunk), 0))
        await stream.write(chunk)
        await asyncio.sleep(60.0)

    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin", handler=handler), world.add("w0")
        async with asyncio.timeout(60.0):
            await worker.fetch(refs([chunk]), [], origin)
        assert worker.holds(refs([chunk]))


@on_virtual_time
async def test_a_line_at_a_neighbour_is_waited_for_when_the_origin_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("primerl.node.p2p.download.GIVE_UP_S", 1.0)
    chunks = payload(1)
    store = MemoryStore(max_bytes=1 << 30)
    store.put(chunks[0])
    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0")
        holder = world.add("holder", handler=claiming(late(store, 5.0)))
        world.network.drop(origin.id)
        async with asyncio.timeout(60.0):
            await worker.fetch(refs(chunks), [holder], origin)
        assert worker.holds(refs(chunks))


@on_virtual_time
async def test_neighbours_alone_are_enough_when_the_origin_is_gone() -> None:
    chunks = payload(20)
    async with ExchangeNetwork() as world:
        origin, worker, other = world.add("origin"), world.add("w0"), world.add("w1")
        other.hold(chunks)
        world.network.drop(origin.id)
        async with asyncio.timeout(20.0):
            await worker.fetch(refs(chunks), [other], origin)


@on_virtual_time
async def test_a_full_store_is_named_as_the_cause() -> None:
    chunks = payload(4)
    async with ExchangeNetwork() as world:
        origin = world.add("origin")
        worker = world.add("w0", store=MemoryStore(max_bytes=100 * KIB))
        origin.hold(chunks)
        with pytest.raises(StorageError):
            await worker.fetch(refs(chunks), [], origin)


# -- other ways -------------------------------------------------------------------------------------


class Seed:
    """A seed that holds some chunks."""

    name = "seed:example.org"

    def __init__(self, chunks: Sequence[bytes], error: TransportError | None = None) -> None:
        self.held = dict(zip((one.digest for one in refs(chunks)), chunks, strict=True))
        self._error = error
        self.asked = 0

    async def get(self, chunk: ChunkRef, *, deadline: float) -> bytes:
        """See ChunkSource."""
        self.asked += 1
        if self._error is not None:
            raise self._error
        if chunk.digest not in self.held:
            raise Refused(Reason.NOT_FOUND)
        return self.held[chunk.digest]


@on_virtual_time
async def test_a_seed_is_asked_before_the_origin_and_the_origin_for_the_rest() -> None:
    chunks = payload(20)
    seed = Seed(chunks[:15])
    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0", seeds=[seed])
        origin.hold(chunks)
        await worker.fetch(refs(chunks), [], origin)
        assert worker.fetcher.by_source(origin.id) == {
            "seed:example.org": 15 * 64 * KIB,
            "trainer": 5 * 64 * KIB,
        }


@pytest.mark.parametrize("fault", ["wrong bytes", "unreachable"])
@on_virtual_time
async def test_a_seed_that_fails_is_left_alone(fault: str) -> None:
    chunks = payload(20)
    lies = payload(20, seed=1)
    seed = Seed(chunks, Unreachable("no") if fault == "unreachable" else None)
    if fault == "wrong bytes":
        seed = Seed(chunks)
        seed.held = dict(zip((one.digest for one in refs(chunks)), lies, strict=True))
    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0", seeds=[seed])
        origin.hold(chunks)
        await worker.fetch(refs(chunks), [], origin)
        assert worker.fetcher.by_source(origin.id) == {"trainer": 20 * 64 * KIB}
        assert seed.asked <= 2


class Tcp:
    """Another path, to the named node."""

    def __init__(self, *nodes: Bare) -> None:
        self._nodes = {node.id: node for node in nodes}
        self.asked: list[bytes] = []

    async def get(self, peer: bytes, chunk: ChunkRef, *, deadline: float) -> bytes:
        """See PeerPaths."""
        self.asked.append(peer)
        data = self._nodes[peer].store.get(chunk.digest) if peer in self._nodes else None
        if data is None:
            raise Refused(Reason.NOT_FOUND)
        return data


@on_virtual_time
async def test_an_origin_that_iroh_does_not_reach_is_reached_by_another_path() -> None:
    chunks = payload(10)
    async with ExchangeNetwork() as world:
        origin = world.add("origin")
        origin.hold(chunks)
        tcp = Tcp(origin)
        worker = world.add("w0", paths=tcp)
        world.network.partition(worker.id, origin.id)
        async with asyncio.timeout(20.0):
            await worker.fetch(refs(chunks), [], origin)
        assert worker.holds(refs(chunks))
        assert tcp.asked == [origin.id] * 10


@on_virtual_time
async def test_a_path_that_leads_nowhere_either_does_not_keep_us_from_the_usual_one() -> None:
    chunks = payload(10)
    async with ExchangeNetwork() as world:
        origin = world.add("origin")
        origin.hold(chunks)

        class Nowhere(Tcp):
            async def get(self, peer: bytes, chunk: ChunkRef, *, deadline: float) -> bytes:
                self.asked.append(peer)
                world.network.heal(worker.id, origin.id)
                raise Unreachable("no TCP either")

        tcp = Nowhere()
        worker = world.add("w0", paths=tcp)
        world.network.partition(worker.id, origin.id)
        async with asyncio.timeout(20.0):
            await worker.fetch(refs(chunks), [], origin)
        assert worker.holds(refs(chunks))
        assert 1 <= len(tcp.asked) <= 4


@pytest.mark.parametrize(
    ("usual_s", "place_s"), [(None, 0.1), (0.04, 0.01), (0.8, 0.1), (2.4, 0.3), (6.0, 0.5)]
)
@on_virtual_time
async def test_a_source_keeps_its_place_for_a_share_of_the_usual_time(
    usual_s: float | None, place_s: float
) -> None:
    """Where a chunk takes 0.2 s, as at homes, an honest source with a queue is not replaced after 0.1."""
    async with ExchangeNetwork() as world:
        worker, source = world.add("worker"), world.add("source")
        chunks = {chunk.digest: chunk for chunk in refs(payload(2))}
        state = Fetch(worker.fetcher, chunks, source.id, set(), usual_s).state
        chunk = next(iter(chunks.values()))
        state.claim(source.id, [chunk.digest])
        state.begin(chunk, ChunkDownload(source.id, begun=10.0, touched=10.0))
        assert state.gives(source.id, 10.0 + 0.9 * place_s)
        assert not state.gives(source.id, 10.0 + 1.1 * place_s)
