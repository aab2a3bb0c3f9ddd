"""A worker that was away, was restarted or comes late fetches the cheaper of deltas and an anchor."""

from pathlib import Path

from support.drift_cases import LineTrainer
from support.memory_network import MemoryNetwork
from support.swarm import Running, Swarm, until

LONG = 1000
"""Steps that no test reaches."""
SPARSE = 0.01
"""Share of the weights that a version changes: eight deltas weigh less than an anchor."""
DENSE = 0.9
"""Eight such deltas weigh more than an anchor."""
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


def anchor_bytes(trainer: LineTrainer, version: int) -> int:
    """Bytes of the anchor of a version."""
    return next(
        one.size for one in trainer.line.manifests[version].artifacts if one.kind == "anchor"
    )


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
            assert singles <= got < singles + SLACK < anchor_bytes(trainer, 0)
        for name in names:
            assert [event.version for event in swarm.fakes.loads(name)] == [1, 9]
            assert swarm.fakes.loads(name)[-1].state == trainer.line.state(9)


async def test_a_worker_that_was_restarted_fetches_neither_what_it_holds_nor_a_newer_anchor(
    tmp_path: Path, model_dir: Path
) -> None:
    """The anchor of version 10 would be the shortest way for a worker that holds nothing."""
    async with (
        Swarm(tmp_path, model_dir, max_steps=LONG) as swarm,
        LineTrainer(swarm, share=SPARSE, anchors=[10]) as trainer,
    ):
        await trainer.tell(3)
        worker = swarm.add_worker("w1")
        await loaded(swarm, 2, "w1")
        await swarm.crash_worker("w1")
        await trainer.tell(8)
        worker = swarm.add_worker("w1")
        await loaded(swarm, 10, "w1")
        singles = trainer.line.single_bytes(2, 10)
        assert singles <= await received(worker) < singles + SLACK < anchor_bytes(trainer, 10)
        assert swarm.fakes.loads("w1")[-1].state == trainer.line.state(10)


async def test_a_worker_that_missed_versions_does_not_take_an_anchor_that_it_can_do_without(
    tmp_path: Path, model_dir: Path
) -> None:
    """It hears of the newest head only, which has an anchor; the deltas before it are the shorter way."""
    async with (
        Swarm(tmp_path, model_dir, max_steps=LONG) as swarm,
        LineTrainer(swarm, share=SPARSE, anchors=[8]) as trainer,
    ):
        await trainer.tell(1)
        worker = swarm.add_worker("w1")
        await loaded(swarm, 0, "w1")
        before = await received(worker)
        await trainer.tell(8)
        await loaded(swarm, 8, "w1")
        singles = trainer.line.single_bytes(0, 8)
        assert singles <= await received(worker) - before < singles + SLACK
        assert singles + SLACK < anchor_bytes(trainer, 8)


async def test_a_worker_that_was_away_takes_an_anchor_where_the_deltas_outweigh_it(
    tmp_path: Path, model_dir: Path
) -> None:
    network = MemoryNetwork()
    async with (
        Swarm(tmp_path, model_dir, network=network, max_steps=LONG) as swarm,
        LineTrainer(swarm, share=DENSE, anchors=[8]) as trainer,
    ):
        await trainer.tell(1)
        worker = swarm.add_worker("w1")
        await loaded(swarm, 0, "w1")
        before = await received(worker)
        network.partition(trainer.key.node_id, worker.node_id)
        await trainer.tell(8)
        network.heal(trainer.key.node_id, worker.node_id)
        await loaded(swarm, 8, "w1")
        anchor = anchor_bytes(trainer, 8)
        got = await received(worker) - before
        assert anchor <= got < anchor + SLACK < trainer.line.single_bytes(0, 8)
        assert swarm.fakes.loads("w1")[-1].state == trainer.line.state(8)


async def test_a_late_joiner_takes_the_nearest_anchor_and_the_deltas_after_it(
    tmp_path: Path, model_dir: Path
) -> None:
    async with (
        Swarm(tmp_path, model_dir, max_steps=LONG) as swarm,
        LineTrainer(swarm, share=SPARSE, anchors=[5]) as trainer,
    ):
        await trainer.tell(9)
        worker = swarm.add_worker("late")
        await loaded(swarm, 8, "late")
        cost = anchor_bytes(trainer, 5) + trainer.line.single_bytes(5, 8)
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
