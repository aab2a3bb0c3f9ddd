"""The desk for merged deltas: what it makes, what it keeps, and what it refuses."""

import asyncio
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
import weights_cases as cases
from merged_cases import Line, desk, line
from protocol_cases import refuses
from swarm import until

from primerl.node.roles.merging import KEPT, MAKE_BURST, PEER_BURST, WAITING
from primerl.node.store import MemoryStore
from primerl.node.weights.merge import MAX_MERGED
from primerl.node.weights.mirror import Mirror, prove
from primerl.node.weights.state import Tensor
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import Artifact

PEER, OTHER = b"p" * 32, b"o" * 32


def leads(made: Line, artifact: Artifact, base: int, target: int) -> bool:
    """Whether a merged delta leads from one version to the other, by the signed digest."""
    mirror = Mirror(prove(base, made.states[base]))
    mirror.prepare(made.manifests[target], artifact, iter(made.payload(artifact)))
    return True


class SlowStore(MemoryStore):
    """Reads wait until the test lets them go."""

    def __init__(self) -> None:
        super().__init__(max_bytes=1 << 30)
        self.go = threading.Event()
        self.go.set()
        self.reads = 0

    def get(self, name: bytes) -> bytes | None:
        """See Store."""
        self.reads += 1
        assert self.go.wait(10)
        return super().get(name)


def slow_line(versions: int) -> tuple[Line, SlowStore]:
    store = SlowStore()
    made = Line(5000, 0.05, store)
    made.grow(versions)
    return made, store


# -- what is made --------------------------------------------------------------------------------


async def test_one_delta_leads_where_many_lead_and_is_made_once() -> None:
    made = line(9)
    server = desk(made)
    artifact = await server.answer(PEER, made.ends(0, 8))
    assert leads(made, artifact, 0, 8)
    assert artifact.size < 0.9 * made.single_bytes(0, 8)
    assert await server.answer(OTHER, made.ends(0, 8)) == artifact
    assert server.made == 1
    assert leads(made, await server.answer(PEER, made.ends(3, 6)), 3, 6)


async def test_two_nodes_make_the_same_chunks() -> None:
    left, right = line(6), line(6)
    question = left.ends(1, 5)
    assert await desk(left).answer(PEER, question) == await desk(right).answer(OTHER, question)


async def test_all_who_ask_at_once_get_the_one_that_is_made() -> None:
    made = line(5)
    server = desk(made)
    peers = [bytes([number]) * 32 for number in range(WAITING)]
    answers = await asyncio.gather(*(server.answer(peer, made.ends(0, 4)) for peer in peers))
    assert len({artifact.chunks for artifact in answers}) == 1
    assert server.made == 1


async def test_what_a_worker_was_given_it_gives_on_without_making_it() -> None:
    made = line(5)
    artifact = await desk(made).answer(PEER, made.ends(0, 4))
    for version in range(1, 5):
        made.store.delete(made.manifests[version].artifacts[0].chunks[0].digest)
    worker = desk(made)
    with refuses(Reason.NOT_FOUND):
        await worker.answer(PEER, made.ends(0, 4))
    worker.learn(artifact, 4, made.state(4))
    given = await worker.answer(PEER, made.ends(0, 4))
    assert given == msgspec.structs.replace(artifact, offsets=())
    assert artifact.offsets, "it was made with them, and they are not proved"
    assert worker.made == 0


async def test_who_holds_only_some_chunks_merges_nothing() -> None:
    """As the stage of a pipeline does: one delta has chunks that are not of its layers."""
    made = line(5)
    made.store.delete(made.manifests[2].artifacts[0].chunks[-1].digest)
    server = desk(made)
    with refuses(Reason.NOT_FOUND):
        await server.answer(PEER, made.ends(0, 4))
    assert leads(made, await server.answer(PEER, made.ends(2, 4)), 2, 4)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil",
    [
        {"base_state": b"x" * 32},
        {"state": b"x" * 32},
        {"base_version": 1},
        {"base_version": 4},
        {"base_version": 2**53},
        {"version": 3},
        {"version": 5},
        {"version": 2**53},
        {"version": 0},
    ],
    ids=repr,
)
async def test_ends_that_are_not_those_of_known_deltas_are_not_found(spoil: dict[str, Any]) -> None:
    made = line(5)
    server = desk(made)
    ends = made.ends(0, 4)
    with refuses(Reason.NOT_FOUND):
        await server.answer(PEER, msgspec.structs.replace(ends, **spoil))
    assert server.made == 0


async def test_a_single_delta_and_too_many_are_not_merged() -> None:
    made = line(MAX_MERGED + 2, words=64)
    server = desk(made)
    for base, target in ((0, 1), (0, MAX_MERGED + 1)):
        with refuses(Reason.NOT_FOUND):
            await server.answer(PEER, made.ends(base, target))
    assert leads(made, await server.answer(PEER, made.ends(1, MAX_MERGED + 1)), 1, MAX_MERGED + 1)


async def test_deltas_of_which_a_chunk_is_gone_are_not_found() -> None:
    made = line(5)
    made.store.delete(made.manifests[2].artifacts[0].chunks[0].digest)
    server = desk(made)
    with refuses(Reason.NOT_FOUND):
        await server.answer(PEER, made.ends(0, 4))
    assert server.made == 0
    assert leads(made, await server.answer(PEER, made.ends(2, 4)), 2, 4)


async def test_deltas_that_are_too_large_together_are_not_read() -> None:
    made, store = slow_line(5)
    reads = store.reads
    server = desk(made, max_disk_gib=16 * (made.single_bytes(0, 4) - 1) / 2**30)
    with refuses(Reason.NOT_FOUND):
        await server.answer(PEER, made.ends(0, 4))
    assert store.reads == reads
    assert leads(made, await server.answer(PEER, made.ends(1, 4)), 1, 4)


async def test_what_cannot_be_merged_is_tried_once_and_leaves_nothing() -> None:
    made, store = slow_line(2)
    made.grow(state={"w": Tensor("BF16", (5000,), np.zeros(5000, "<u2"))})  # stored raw
    pinned: set[bytes] = set()
    server = desk(made, pinned)
    before = store.names()
    with refuses(Reason.NOT_FOUND):
        await server.answer(PEER, made.ends(0, 2))
    reads = store.reads
    with refuses(Reason.NOT_FOUND):
        await server.answer(PEER, made.ends(0, 2))
    assert store.reads == reads > 0
    store.collect(made.chain.live_chunks(3) | pinned)
    assert store.names() == before


async def test_without_room_nothing_is_kept_and_the_asker_is_told() -> None:
    made = line(5)
    full = MemoryStore(max_bytes=made.store.total_bytes())
    for name in made.store.names():
        full.put(made.store.get(name) or b"")
    before = full.names()
    made.store = full
    pinned: set[bytes] = set()
    server = desk(made, pinned)
    with refuses(Reason.DISK_FULL):
        await server.answer(PEER, made.ends(0, 4))
    full.collect(made.chain.live_chunks(5) | pinned)
    assert full.names() == before


async def test_a_disk_that_versions_will_need_is_not_filled_with_merged_deltas() -> None:
    made = line(5, words=40_000, share=0.01)
    used = made.store.total_bytes() + made.single_bytes(0, 4)
    crowded = desk(made, max_disk_gib=used / 0.76 / 2**30)
    with refuses(Reason.DISK_FULL):
        await crowded.answer(PEER, made.ends(0, 4))
    assert crowded.made == 0
    assert await desk(made, max_disk_gib=used / 0.74 / 2**30).answer(PEER, made.ends(0, 4))


# -- what a flood may cost -----------------------------------------------------------------------


async def test_a_peer_that_keeps_asking_is_put_off_and_no_other_is() -> None:
    made = line(5)
    server = desk(made)
    for _ in range(PEER_BURST):
        await server.answer(PEER, made.ends(0, 4))
    with refuses(Reason.BUSY):
        await server.answer(PEER, made.ends(0, 4))
    assert await server.answer(OTHER, made.ends(0, 4))


async def test_many_names_do_not_get_more_merges_than_one() -> None:
    made = line(9)
    server = desk(made)
    ends = [made.ends(base, target) for base in range(7) for target in range(base + 2, 9)]
    for number, question in enumerate(ends):
        peer = bytes([number]) * 32
        if number < MAKE_BURST:
            await server.answer(peer, question)
        else:
            with refuses(Reason.BUSY):
                await server.answer(peer, question)
    assert server.made == MAKE_BURST


async def test_only_so_many_wait_and_each_peer_once() -> None:
    made, store = slow_line(5)
    server = desk(made)
    store.go.clear()
    peers = [bytes([number]) * 32 for number in range(WAITING)]
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(server.answer(p, made.ends(0, 4))) for p in peers[:-1]]
        await asyncio.sleep(0.05)
        with refuses(Reason.BUSY):
            await server.answer(peers[0], made.ends(1, 4))
        waiting.append(tasks.create_task(server.answer(peers[-1], made.ends(0, 4))))
        await asyncio.sleep(0.05)
        with refuses(Reason.BUSY):
            await server.answer(OTHER, made.ends(0, 4))
        store.go.set()
    assert len({task.result().chunks for task in waiting}) == 1
    assert server.made == 1


async def test_a_request_that_is_given_up_stops_the_work_and_blocks_nobody() -> None:
    made, store = slow_line(9)
    server = desk(made)
    store.go.clear()
    asked = asyncio.create_task(server.answer(PEER, made.ends(0, 8)))
    await until(lambda: store.reads > 0)
    asked.cancel()
    await asyncio.wait([asked])
    reads = store.reads
    store.go.set()
    assert leads(made, await server.answer(OTHER, made.ends(6, 8)), 6, 8)
    assert server.made == 1
    assert reads <= 1  # of the eight that were to be read


# -- what is kept, and what is collected ---------------------------------------------------------


async def test_a_merged_delta_stays_as_long_as_one_can_start_from_its_base() -> None:
    made = line(9)
    pinned: set[bytes] = set()
    server = desk(made, pinned)
    artifact = await server.answer(PEER, made.ends(2, 6))
    names = {chunk.digest for chunk in artifact.chunks}
    assert names <= pinned
    made.store.collect(made.chain.live_chunks(8) | pinned)
    assert await server.answer(OTHER, made.ends(2, 6)) == artifact
    assert server.made == 1
    made.grow()
    kept = cases.manifest(9, made.states[9], made.put([b"x"], -1, bytes(32), "anchor"))
    made.chain.rewind(9)
    made.chain.add(kept)
    made.chain.forget(1)
    other = line(3, words=700)
    server.learn(await desk(other).answer(PEER, other.ends(0, 2)), 2, other.state(2))
    assert not names & pinned
    made.store.collect(made.chain.live_chunks(1) | pinned)
    assert not names & made.store.names()


async def test_kept_deltas_are_bounded_in_bytes_also_before_they_are_collected() -> None:
    made = line(6)
    pinned: set[bytes] = set()
    limit = made.single_bytes(0, 5)
    server = desk(made, pinned, max_disk_gib=16 * limit / 2**30)
    first = await server.answer(PEER, made.ends(0, 3))
    with refuses(Reason.DISK_FULL):  # until the first one, which is let go now, is collected
        await server.answer(PEER, made.ends(0, 5))
    assert not pinned
    assert made.store.has(first.chunks[0].digest)
    made.store.collect(made.chain.live_chunks(6) | pinned)
    second = await server.answer(PEER, made.ends(0, 5))
    assert pinned == {chunk.digest for chunk in second.chunks}


async def test_only_so_many_deltas_are_kept() -> None:
    made = line(4)
    pinned: set[bytes] = set()
    server = desk(made, pinned)
    some = [made.put([b"%d" % number], 0) for number in range(KEPT + 5)]
    for number, artifact in enumerate(some):
        server.learn(artifact, 100 + number, made.state(3))
    assert pinned == {artifact.chunks[0].digest for artifact in some[5:]}


async def test_what_two_merged_deltas_share_is_let_go_with_the_last() -> None:
    """Where a delta is empty, merging it in changes nothing, chunk for chunk."""
    made = line(3)
    made.grow(1, made.states[2])
    pinned: set[bytes] = set()
    server = desk(made, pinned)
    short, long = [await server.answer(PEER, made.ends(0, target)) for target in (2, 3)]
    assert short.chunks == long.chunks
    for number in range(KEPT):
        assert {chunk.digest for chunk in long.chunks} <= pinned
        server.learn(made.put([b"%d" % number], 0), 100 + number, made.state(3))
    assert not {chunk.digest for chunk in long.chunks} & pinned


async def test_one_that_was_lost_from_the_disk_is_made_anew() -> None:
    made = line(5)
    server = desk(made)
    artifact = await server.answer(PEER, made.ends(0, 4))
    made.store.delete(artifact.chunks[0].digest)
    assert await server.answer(PEER, made.ends(0, 4)) == artifact
    assert server.made == 2
    assert leads(made, artifact, 0, 4)
