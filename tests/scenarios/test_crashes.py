"""The trainer dies and is resumed: the chain goes on, workers follow, and no receipt was a lie."""

import asyncio
import random
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from support.hostile import Rogue
from support.repository import ROOT
from support.swarm import Swarm
from support.waiting import until
from support.witness import Fakes, trained_ages

from primerl.node.training.backend import TrainBatch
from primerl.node.training.checkpoint import Checkpoints
from primerl.node.training.resume_points import ResumePoints
from primerl.protocol.manifests import PolicyHead

Heads = dict[tuple[int, int], PolicyHead]


def chained(heads: Heads) -> bool:
    """Whether versions of an epoch follow each other without a gap."""
    orders = sorted(heads)
    return all(b[0] > a[0] or b == (a[0], a[1] + 1) for a, b in pairwise(orders))


def prompts(batches: list[TrainBatch]) -> list[tuple[int, ...]]:
    return sorted({tuple(sample.token_ids[:2]) for batch in batches for sample in batch.samples})


async def test_a_run_that_reached_its_end_goes_on_with_more_steps(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=2) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1")
        assert (await swarm.finished())["steps"] == 2
        await worker.ended(10.0)
        await swarm.start_trainer(resume=True, max_steps=5)
        swarm.add_worker("w1")
        assert (await swarm.finished())["steps"] == 5


async def test_a_killed_trainer_goes_on_in_the_same_chain_and_workers_come_back(
    tmp_path: Path, model_dir: Path
) -> None:
    chance = random.Random(11)
    seen: Heads = {}
    fakes = Fakes(last_step=10)
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=14) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        swarm.add_worker("w2")
        for step in (2, 5, 8):
            await swarm.wait_step(step)
            await asyncio.sleep(chance.random() * 0.05)
            await swarm.crash_trainer()
            heads = swarm.heads()
            assert heads.items() >= seen.items()
            seen = heads
            await swarm.start_trainer(resume=True)
        await until(lambda: all(fakes.newest(name) == 10 for name in swarm.workers))
        fakes.go.set()  # a worker that has not found back by the end would wait for ever
        await swarm.finished()
        for worker in swarm.workers.values():
            await worker.ended()
        heads = swarm.heads()
        backends = swarm.backends
        assert [line["step"] for line in swarm.metrics()] == list(range(1, 15))
    assert heads.items() >= seen.items()
    assert sorted(heads) == [(0, version) for version in range(15)]
    taught = [batch for backend in backends for batch in backend.batches]
    # A step that was learnt but not yet saved is learnt again, and none is left out.
    steps = [batch.step for batch in taught]
    assert sorted(set(steps)) == list(range(1, 15))
    assert all(b - a in (0, 1) for a, b in pairwise(steps))
    assert set[int]().union(*map(trained_ages, taught)) <= {0, 1, 2}
    for name in swarm.workers:
        loads = swarm.fakes.loads(name)
        assert [event.state for event in loads] == [heads[0, e.version].state for e in loads]


async def test_what_has_a_receipt_is_trained_after_a_crash(tmp_path: Path, model_dir: Path) -> None:
    rollouts = {"groups_per_batch": 4, "groups_per_lease": 1, "group_size": 24}
    async with Swarm(tmp_path, model_dir, max_steps=1, rollouts=rollouts) as swarm:
        await swarm.start_trainer()
        await swarm.wait_step(0)
        asked: list[int] = []
        async with Rogue(swarm, "hand") as hand:
            await hand.hello()
            for _ in range(3):
                lease, sealed = await hand.lease()
                groups = await hand.play(lease)
                asked.append(lease.tasks[0].index)
                await hand.submit(hand.bundle(sealed, groups), lease.lease_id)
        await swarm.crash_trainer()
        await swarm.start_trainer(resume=True)
        async with Rogue(swarm, "hand") as hand:
            lease, sealed = await hand.lease()
            asked.append(lease.tasks[0].index)
            await hand.submit(hand.bundle(sealed, await hand.play(lease)), lease.lease_id)
            await swarm.wait_step(1)
        trained = swarm.backend.batches
    assert sorted(asked) == [0, 1, 2, 3]
    assert len(prompts(trained)) == 4
    assert len(trained[0].samples) == 4 * 24


async def test_a_batch_that_is_complete_after_a_crash_is_trained_without_more_work(
    tmp_path: Path, model_dir: Path
) -> None:
    rollouts = {"groups_per_batch": 2, "groups_per_lease": 1, "group_size": 24}
    async with Swarm(
        tmp_path, model_dir, max_steps=3, rollouts=rollouts, checkpoint={"interval": 3}
    ) as swarm:
        await swarm.start_trainer()
        await swarm.wait_step(0)
        async with Rogue(swarm, "hand") as hand:
            await hand.hello()
            for _ in range(2):
                await hand.work()
        await swarm.wait_step(1)
        await swarm.crash_trainer(resume_points=False)
        await swarm.start_trainer(resume=True)
        await swarm.wait_step(1)
        assert len(prompts(swarm.backend.batches)) == 2


async def test_a_bundle_from_before_a_crash_is_taken_after_it_once(
    tmp_path: Path, model_dir: Path
) -> None:
    rollouts = {"groups_per_batch": 2, "groups_per_lease": 1, "group_size": 8}
    async with Swarm(tmp_path, model_dir, max_steps=1, rollouts=rollouts) as swarm:
        await swarm.start_trainer()
        await swarm.wait_step(0)
        async with Rogue(swarm, "hand") as hand:
            await hand.hello()
            late, sealed = await hand.lease()
            bundle = hand.bundle(sealed, await hand.play(late))
        await swarm.crash_trainer()
        await swarm.start_trainer(resume=True)
        async with Rogue(swarm, "hand") as hand:
            receipt = await hand.submit(bundle, late.lease_id)
            assert await hand.submit(bundle, late.lease_id) == receipt
            assert (await hand.verdict(late.lease_id)).accepted == 8
            assert (await swarm.trainer.status())["accepted"] == 8


async def test_a_crash_between_two_checkpoints_costs_no_version(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(last_step=5)
    checkpoint = {"interval": 4}
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=8, checkpoint=checkpoint) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await until(lambda: fakes.newest("w1") == 5)
        await swarm.crash_trainer()
        before = swarm.heads()
        await swarm.start_trainer(resume=True)
        fakes.go.set()
        summary = await swarm.finished()
        heads = swarm.heads()
        taught = [[batch.step for batch in backend.batches] for backend in swarm.backends]
    assert heads.items() >= before.items()
    assert sorted(heads) == [(0, version) for version in range(9)]
    assert taught == [[1, 2, 3, 4, 5], [6, 7, 8]]
    assert not summary["rejected"]


async def test_a_resume_point_whose_version_was_not_announced_counts_as_not_written(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(last_step=5)
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=6) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await until(lambda: fakes.newest("w1") == 5)
        await swarm.crash_trainer()
        points = ResumePoints(swarm.run_dir / "checkpoints")
        (newest, _) = points.newest_first(0)
        points.begin(6, newest.parts)
        await points.finish()
        (swarm.run_dir / "checkpoints" / "step_4.resume").write_bytes(b"torn")
        points.begin(5, newest.parts)
        await points.finish()
        await swarm.start_trainer(resume=True)
        fakes.go.set()
        await swarm.finished()
        assert sorted(swarm.heads()) == [(0, version) for version in range(7)]


async def test_a_version_is_announced_only_after_its_resume_point_is_written(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, write = threading.Event(), ResumePoints._write  # pyright: ignore[reportPrivateUsage]
    begun: list[int] = []

    def slow(self: ResumePoints, step: int, parts: dict[str, bytes]) -> None:
        begun.append(step)
        disk.wait(30.0)
        write(self, step, parts)

    monkeypatch.setattr(ResumePoints, "_write", slow)
    async with Swarm(tmp_path, model_dir, max_steps=2) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await until(lambda: begun == [1])
        for _ in range(20):  # the version would be encoded and announced by now
            await asyncio.sleep(0.01)
        assert (await swarm.trainer.status())["version"] == 0
        disk.set()
        await swarm.finished()
        assert sorted(swarm.heads()) == [(0, 0), (0, 1), (0, 2)]


async def test_a_trainer_that_is_stopped_writes_a_checkpoint_of_its_newest_step(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(last_step=3)
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=9) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await until(lambda: fakes.newest("w1") == 3)
        stopping = asyncio.create_task(swarm.stop_trainer())
        await asyncio.sleep(0)
        fakes.go.set()
        await stopping
        newest = max(version for _, version in swarm.heads())
        saved = Checkpoints(swarm.run_dir / "checkpoints", keep_last=2).steps()
        assert saved[0] == 0
        assert saved[-1] >= newest >= 3


async def test_resuming_from_an_older_checkpoint_begins_a_term_that_workers_follow(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(last_step=5)
    async with Swarm(
        tmp_path, model_dir, fakes=fakes, max_steps=9, checkpoint={"interval": 3}
    ) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        swarm.add_worker("w2")
        await until(lambda: all(fakes.newest(name) == 5 for name in swarm.workers))
        await swarm.crash_trainer(resume_points=False)
        before = swarm.heads()
        assert max(before) == (0, 5)
        had = {name: len(fakes.loads(name)) for name in swarm.workers}
        await swarm.start_trainer(resume=True)
        await until(lambda: all(len(fakes.loads(name)) > had[name] for name in had))
        fakes.go.set()
        summary = await swarm.finished()
        for worker in swarm.workers.values():
            await worker.ended()
        after = swarm.heads()
    resumed = 3
    assert sorted(order for order in after if order[0] == 1) == [
        (1, version) for version in range(resumed, 10)
    ]
    assert after[1, resumed].state == before[0, resumed].state
    assert chained(after)
    for name in swarm.workers:
        last = swarm.fakes.loads(name)[-1]
        assert last.version > resumed
        assert last.state == after[1, last.version].state
    # Work from before is stale at worst: nobody is taken for a liar because the trainer forgot.
    assert set(summary["rejected"]) <= {"stale"}


async def test_work_on_a_policy_that_the_trainer_lost_is_stale_and_no_fraud(
    tmp_path: Path, model_dir: Path
) -> None:
    rollouts = {"groups_per_batch": 2, "groups_per_lease": 1, "group_size": 8}
    async with Swarm(
        tmp_path, model_dir, max_steps=9, rollouts=rollouts, checkpoint={"interval": 9}
    ) as swarm:
        await swarm.start_trainer()
        await swarm.wait_step(0)
        async with Rogue(swarm, "hand") as hand:
            await hand.hello()
            while (await swarm.trainer.status())["version"] < 1:
                await hand.work()
            lost, sealed = await hand.lease()
            assert 1 <= lost.min_version < 9
            bundle = hand.bundle(sealed, await hand.play(lost))
        await swarm.crash_trainer(resume_points=False)
        await swarm.start_trainer(resume=True)
        await swarm.wait_step(0)
        async with Rogue(swarm, "hand") as hand:
            lease, _ = await hand.lease()
            assert lease.term == 1
            await hand.submit(bundle, lost.lease_id)
            verdict = await hand.verdict(lost.lease_id)
            assert {one.reason for one in verdict.rejections} == {"stale"}
            (row,) = await swarm.trainer.peers()
            assert row["trust"] >= 0.5


async def test_versions_that_were_announced_before_the_first_checkpoint_was_written_are_kept(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(last_step=3)
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=5) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await until(lambda: fakes.newest("w1") == 3)
        await swarm.crash_trainer()
        (checkpoint,) = swarm.run_dir.glob("checkpoints/step_0")
        checkpoint.rename(checkpoint.with_name("step_0.partial"))
        before = swarm.heads()
        await swarm.start_trainer(resume=True)
        fakes.go.set()
        await swarm.finished()
        heads = swarm.heads()
    assert heads.items() >= before.items()
    assert sorted(heads) == [(0, version) for version in range(6)]
    assert [batch.step for batch in swarm.backend.batches] == [4, 5]


async def test_a_resume_point_of_another_run_is_passed_over(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fakes = Fakes(last_step=3)
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=4) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await until(lambda: fakes.newest("w1") == 3)
        await swarm.crash_trainer()
        points = ResumePoints(swarm.run_dir / "checkpoints")
        newest = points.read(3)
        cursor = msgspec.json.decode(newest.parts["cursor"]) | {"ledger": "another"}
        points.begin(3, newest.parts | {"cursor": msgspec.json.encode(cursor)})
        await points.finish()
        await swarm.start_trainer(resume=True)
        fakes.go.set()
        await swarm.finished()
    assert "resume point 3 is of another run" in caplog.text


def crash(*options: str) -> None:
    """End runs before changes of the disk; no promise is broken by those that go on."""
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "crashes.py"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whichever_change_of_the_disk_a_process_ends_before_nothing_is_lost() -> None:
    crash("--every", "9")


async def test_workers_find_a_trainer_that_moved_through_gossip(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(last_step=2)
    async with Swarm(
        tmp_path, model_dir, fakes=fakes, max_steps=6, gossip=True, at_home=False
    ) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1")
        await swarm.wait_step(2)
        await swarm.crash_trainer()
        fakes.go.set()
        before = swarm.network.transports.copy()
        await swarm.start_trainer(resume=True)
        assert set(swarm.network.transports) - set(before)
        await swarm.finished()
        await worker.ended()
