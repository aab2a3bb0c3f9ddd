"""Merged deltas in a swarm: who was away, was restarted or comes late fetches one in place of many."""

from pathlib import Path

from merged_cases import LineTrainer
from swarm import Running, Swarm, until

from primerl.node.network.memory import MemoryNetwork

LONG = 1000
"""Steps that no test reaches."""


async def loaded(swarm: Swarm, version: int, *names: str) -> None:
    """Wait until the engines of these workers have a version."""
    for name in names:
        await until(
            lambda n=name: [e.version for e in swarm.fakes.loads(n)][-1:] == [version], 20.0
        )


async def received(worker: Running) -> int:
    """Chunk bytes that a worker has fetched since it started."""
    return sum((await worker.status())["chunk_bytes_by_source"].values())


async def test_workers_that_were_away_come_back_by_one_delta_that_is_made_once(
    tmp_path: Path, model_dir: Path
) -> None:
    names = ["w1", "w2", "w3"]
    network = MemoryNetwork()
    async with (
        Swarm(tmp_path, model_dir, network=network, max_steps=LONG) as swarm,
        LineTrainer(swarm) as trainer,
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
            assert 0 < await received(worker) - had < 0.9 * singles
        assert trainer.desk.made == 1
        for name in names:
            assert [event.version for event in swarm.fakes.loads(name)] == [1, 9]
            assert swarm.fakes.loads(name)[-1].state == trainer.line.state(9)


async def test_a_worker_that_was_restarted_fetches_neither_what_it_holds_nor_a_newer_anchor(
    tmp_path: Path, model_dir: Path
) -> None:
    """The anchor of version 10 would be the shortest way for who holds nothing."""
    async with (
        Swarm(tmp_path, model_dir, max_steps=LONG) as swarm,
        LineTrainer(swarm, anchors=[10]) as trainer,
    ):
        await trainer.tell(3)
        worker = swarm.add_worker("w1")
        await loaded(swarm, 2, "w1")
        await swarm.crash_worker("w1")
        await trainer.tell(8)
        worker = swarm.add_worker("w1")
        await loaded(swarm, 10, "w1")
        assert 0 < await received(worker) < 0.9 * trainer.line.single_bytes(2, 10)
        assert trainer.desk.made == 1


async def test_a_worker_that_missed_versions_does_not_take_an_anchor_that_it_can_do_without(
    tmp_path: Path, model_dir: Path
) -> None:
    """It hears of the newest head only, which has an anchor; the deltas before it are the shorter way."""
    async with (
        Swarm(tmp_path, model_dir, max_steps=LONG) as swarm,
        LineTrainer(swarm, anchors=[8]) as trainer,
    ):
        await trainer.tell(1)
        worker = swarm.add_worker("w1")
        await loaded(swarm, 0, "w1")
        before = await received(worker)
        await trainer.tell(8)
        await loaded(swarm, 8, "w1")
        assert 0 < await received(worker) - before < 0.9 * trainer.line.single_bytes(0, 8)


async def test_a_late_joiner_takes_the_anchor_and_one_delta(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm, LineTrainer(swarm) as trainer:
        await trainer.tell(9)
        worker = swarm.add_worker("late")
        await loaded(swarm, 8, "late")
        anchor = trainer.line.manifests[0].artifacts[0].size
        assert anchor < await received(worker) < anchor + 0.9 * trainer.line.single_bytes(0, 8)
        assert trainer.desk.made == 1


async def test_little_to_fetch_is_fetched_without_asking(tmp_path: Path, model_dir: Path) -> None:
    async with (
        Swarm(tmp_path, model_dir, max_steps=LONG) as swarm,
        LineTrainer(swarm, words=9000) as trainer,
    ):
        await trainer.tell(9)
        swarm.add_worker("late")
        await loaded(swarm, 8, "late")
        assert trainer.desk.made == 0


async def test_a_worker_makes_merged_deltas_for_another(tmp_path: Path, model_dir: Path) -> None:
    """The trainer merges nothing here: the peer that followed all along does."""
    async with (
        Swarm(tmp_path, model_dir, max_steps=LONG) as swarm,
        LineTrainer(swarm, merges=False) as trainer,
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
        singles = trainer.line.single_bytes(0, 8)
        anchor = trainer.line.manifests[0].artifacts[0].size
    assert sum(sources.values()) < anchor + 0.9 * singles
