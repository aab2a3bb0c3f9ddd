"""Workers that were killed, were away or come late fetch the least that brings them up to date."""

import asyncio
import multiprocessing
import time
from pathlib import Path

import pytest
from support.drift_cases import LineTrainer, drifted
from support.memory_network import MemoryNetwork
from support.swarm import Running, Swarm
from support.waiting import until

from primerl.crypto.hashing import digest
from primerl.node.weights.codec import encode_full
from primerl.node.weights.payload import cut
from primerl.protocol.manifests import ChunkRef

WORDS, SHARE = 1_500_000, 0.1
LONG = 1000
"""Steps that no test reaches."""
PIECE_S = 0.15
"""For every piece of data: slow enough to be killed in between."""
ENOUGH = 3


def snapshot_chunks() -> dict[bytes, int]:
    """Digest and size of the chunks of version 0."""
    pieces = cut(encode_full(drifted(WORDS, SHARE, 0)), 1 << 22)
    return {digest(piece): len(piece) for piece in pieces}


def held(directory: Path) -> set[bytes]:
    """Chunks in a worker's store, by the names of its files."""
    files = (directory / "w1").rglob("*")
    return {bytes.fromhex(file.name) for file in files if len(file.name) == 64}


def work_until_killed(directory: Path, model: Path) -> None:
    """The life of a trainer and a worker on a slow network, in a process of their own.

    Nothing comes any more once enough is here: a watcher may be late.
    """
    snapshot = snapshot_chunks().keys()

    async def slow(source: bytes, target: bytes) -> None:
        enough = len(held(directory) & snapshot) >= ENOUGH
        await asyncio.sleep(3600 if enough else PIECE_S)

    async def live() -> None:
        network = MemoryNetwork(delay=slow)
        async with (
            Swarm(directory, model, network=network, max_steps=LONG) as swarm,
            LineTrainer(swarm, words=WORDS, share=SHARE) as trainer,
        ):
            await trainer.tell(1)
            swarm.add_worker("w1")
            await asyncio.sleep(60)

    asyncio.run(live())


def kill_in_the_middle(directory: Path, model: Path) -> set[bytes]:
    """Run the above until some chunks of the snapshot are here, then SIGKILL; what the store holds of it."""
    wanted = snapshot_chunks().keys()
    process = multiprocessing.get_context("spawn").Process(
        target=work_until_killed, args=(directory, model)
    )
    process.start()
    try:
        deadline = time.monotonic() + 60
        while len(held(directory) & wanted) < ENOUGH:
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.kill()
        process.join()
    return held(directory) & wanted


@pytest.mark.slow
async def test_sigkill_in_the_middle_of_a_version_refetches_nothing_that_is_held(
    tmp_path: Path, model_dir: Path
) -> None:
    before = await asyncio.to_thread(kill_in_the_middle, tmp_path, model_dir)
    sizes = snapshot_chunks()
    assert ENOUGH <= len(before) < len(sizes)
    async with (
        Swarm(tmp_path, model_dir, max_steps=LONG) as swarm,
        LineTrainer(swarm, words=WORDS, share=SHARE) as trainer,
    ):
        trainer.recall(1)
        snapshot = trainer.line.manifests[0].artifacts[0]
        assert set(snapshot.chunks) == {ChunkRef(name, size) for name, size in sizes.items()}
        worker = swarm.add_worker("w1")
        await until(lambda: bool(swarm.fakes.loads("w1")))
        sources = (await worker.status())["chunk_bytes_by_source"]
        assert swarm.fakes.loads("w1")[0].state == trainer.line.state(0)
    assert sum(sources.values()) == sum(sizes[name] for name in sizes.keys() - before)


SPARSE = 0.01
"""Share of the weights that a version changes: eight deltas weigh less than a snapshot."""
DENSE = 0.9
"""Eight such deltas weigh more than a snapshot."""
SLACK = 4_000
"""Bytes of manifests that are fetched as chunks."""


async def loaded(swarm: Swarm, version: int, *names: str) -> None:
    """Wait until the engines of these workers have a version."""
    for name in names:
        await until(
            lambda n=name: [e.version for e in swarm.fakes.loads(n)][-1:] == [version], 20.0
        )


async def received(worker: Running) -> int:
    """Chunk bytes that a worker has fetched since it started."""
    return sum((await worker.status())["chunk_bytes_by_source"].values())


def snapshot_bytes(trainer: LineTrainer, version: int) -> int:
    """Bytes of the snapshot of a version, which the next one's manifest has."""
    manifest = trainer.line.manifests[version + 1 if version else 0]
    return next(one.size for one in manifest.artifacts if one.kind == "anchor")


async def test_workers_that_were_away_come_back_by_the_deltas_that_they_missed(
    tmp_path: Path, model_dir: Path
) -> None:
    names = ["w1", "w2", "w3"]
    network = MemoryNetwork()
    async with (
        Swarm(tmp_path, model_dir, network=network, max_steps=LONG) as swarm,
        LineTrainer(swarm, share=SPARSE) as trainer,
    ):
        await trainer.tell(2)
        workers = [swarm.add_worker(name) for name in names]
        await loaded(swarm, 1, *names)
        before = [await received(worker) for worker in workers]
        for worker in workers:
            network.partition(trainer.key.node_id, worker.node_id)
        await trainer.tell(8)
        for worker in workers:
            network.heal(trainer.key.node_id, worker.node_id)
        await loaded(swarm, 9, *names)
        singles = trainer.line.single_bytes(1, 9)
        for worker, had in zip(workers, before, strict=True):
            got = await received(worker) - had
            assert singles <= got < singles + SLACK < snapshot_bytes(trainer, 0)
        for name in names:
            assert [event.version for event in swarm.fakes.loads(name)] == [1, 9]
            assert swarm.fakes.loads(name)[-1].state == trainer.line.state(9)


async def test_a_node_that_holds_a_version_takes_no_newer_snapshot_whether_restarted_or_told_only_now(
    tmp_path: Path, model_dir: Path
) -> None:
    """The snapshot of version 10 would be on the shortest way to 11 for a worker that holds nothing.

    The second worker hears of that head only, of none before it."""
    async with (
        Swarm(tmp_path, model_dir, max_steps=LONG) as swarm,
        LineTrainer(swarm, share=SPARSE, snapshots=[10]) as trainer,
    ):
        await trainer.tell(3)
        swarm.add_worker("w1")
        second = swarm.add_worker("w2")
        await loaded(swarm, 2, "w1", "w2")
        before = await received(second)
        await swarm.crash_worker("w1")
        await trainer.tell(9)
        first = swarm.add_worker("w1")
        await loaded(swarm, 11, "w1", "w2")
        singles = trainer.line.single_bytes(2, 11)
        for got in (await received(first), await received(second) - before):
            assert singles <= got < singles + SLACK < snapshot_bytes(trainer, 10)
        for name in ("w1", "w2"):
            assert swarm.fakes.loads(name)[-1].state == trainer.line.state(11)


async def test_a_worker_that_was_away_takes_a_snapshot_where_the_deltas_outweigh_it(
    tmp_path: Path, model_dir: Path
) -> None:
    network = MemoryNetwork()
    async with (
        Swarm(tmp_path, model_dir, network=network, max_steps=LONG) as swarm,
        LineTrainer(swarm, share=DENSE, snapshots=[8]) as trainer,
    ):
        await trainer.tell(1)
        worker = swarm.add_worker("w1")
        await loaded(swarm, 0, "w1")
        before = await received(worker)
        network.partition(trainer.key.node_id, worker.node_id)
        await trainer.tell(9)
        network.heal(trainer.key.node_id, worker.node_id)
        await loaded(swarm, 9, "w1")
        snapshot = snapshot_bytes(trainer, 8) + trainer.line.single_bytes(8, 9)
        got = await received(worker) - before
        assert snapshot <= got < snapshot + SLACK < trainer.line.single_bytes(0, 9)
        assert swarm.fakes.loads("w1")[-1].state == trainer.line.state(9)


async def test_a_late_joiner_takes_the_nearest_snapshot_and_the_deltas_after_it(
    tmp_path: Path, model_dir: Path
) -> None:
    async with (
        Swarm(tmp_path, model_dir, max_steps=LONG) as swarm,
        LineTrainer(swarm, share=SPARSE, snapshots=[5]) as trainer,
    ):
        await trainer.tell(9)
        worker = swarm.add_worker("late")
        await loaded(swarm, 8, "late")
        cost = snapshot_bytes(trainer, 5) + trainer.line.single_bytes(5, 8)
        assert cost <= await received(worker) < cost + SLACK
        assert [event.version for event in swarm.fakes.loads("late")] == [8]
        assert swarm.fakes.loads("late")[0].state == trainer.line.state(8)


async def test_a_late_joiner_fetches_from_a_worker_that_followed(
    tmp_path: Path, model_dir: Path
) -> None:
    async with (
        Swarm(tmp_path, model_dir, max_steps=LONG) as swarm,
        LineTrainer(swarm, share=SPARSE) as trainer,
    ):
        await trainer.tell(1)
        first = swarm.add_worker("first")
        for version in range(1, 9):
            await loaded(swarm, version - 1, "first")
            await trainer.tell()
        await loaded(swarm, 8, "first")
        trainer.upstreams.append(trainer.records[first.node_id])
        late = swarm.add_worker("late")
        await loaded(swarm, 8, "late")
        sources = (await late.status())["chunk_bytes_by_source"]
        assert swarm.fakes.loads("late")[-1].state == trainer.line.state(8)
    assert sources.get("trainer", 0) < 0.2 * sum(sources.values())
