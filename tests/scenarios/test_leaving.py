"""What becomes of workers when their trainer ends: it tells them how, and they leave, or wait."""

import asyncio
import itertools
from pathlib import Path

import pytest
from support.hostile import HostileTrainer, Rogue, policy
from support.swarm import Swarm
from support.waiting import until

from primerl.crypto.hashing import short
from primerl.node.app.trainer import Farewell
from primerl.node.errors import NetworkError, RunFailed
from primerl.node.p2p.rpc import Refused, receive_reply, send
from primerl.node.p2p.transport import Stream
from primerl.node.p2p.waiting import LogBackoff
from primerl.node.storage.run_files import CHECKPOINTS
from primerl.node.training.checkpoint import Checkpoints
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.messages import (
    ControlRequest,
    Goodbye,
    HeadNotice,
    Heads,
    RunEnded,
    WatchHeads,
)


async def test_workers_of_a_trainer_that_was_stopped_wait_and_work_on_when_it_is_back(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with Swarm(tmp_path, model_dir, max_steps=10_000) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.wait_step(1)
        await swarm.stop_trainer()
        await until(lambda: "the trainer was stopped and may be resumed" in caplog.text)
        await swarm.start_trainer(resume=True)
        async with asyncio.timeout(30.0):
            while True:
                peers = await swarm.trainer.peers()
                if peers:  # there are none until it has started
                    break
                await asyncio.sleep(0.01)
        assert [row["role"] for row in peers] == ["inference"]
        version = (await swarm.trainer.status())["version"]
        await swarm.wait_step(version + 1)
        await until(lambda: "the trainer is back" in caplog.text)


async def test_a_run_that_fails_tells_its_watchers_why(tmp_path: Path, model_dir: Path) -> None:
    rollouts = {"batch_timeout_s": 1.0, "max_empty_batches": 3}
    async with Swarm(tmp_path, model_dir, rollouts=rollouts) as swarm:
        await swarm.start_trainer()
        async with Rogue(swarm, "watcher") as rogue:
            stream = await (await rogue.control()).open_stream()
            await send(stream, WatchHeads(0, -1))
            said: object = None
            async with asyncio.timeout(30.0):
                while not isinstance(said, RunEnded):
                    said = await receive_reply(stream, HeadNotice | Heads | RunEnded)  # type: ignore[arg-type]
        with pytest.raises(RunFailed) as failed:
            await swarm.trainer.ended(30.0)
        assert said.outcome == "failed"
        assert said.detail == str(failed.value)[: len(said.detail)] != ""


async def test_a_worker_of_a_run_that_failed_leaves_with_its_reason(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir) as swarm, HostileTrainer(swarm) as trainer:
        await trainer.publish(0, policy(1))
        worker = swarm.add_worker("w1")
        await until(lambda: bool(swarm.fakes.loads("w1")))
        await trainer.book.end("ten \x1b[2J empty batches", "failed")
        with pytest.raises(RunFailed, match=r"^the run failed: ten \?\[2J empty batches$"):
            await worker.ended(30.0)


async def test_a_worker_that_comes_when_a_run_is_over_leaves_at_once_and_says_so(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir) as swarm, Finishing(swarm):
        worker = swarm.add_worker("w1")
        await worker.ended(20.0)  # no error: there was nothing to do


async def test_a_worker_that_is_stopped_before_its_first_policy_says_goodbye(
    tmp_path: Path, model_dir: Path
) -> None:
    """Its row says `left`, and nobody waits for it."""
    requests: list[ControlRequest] = []

    class Silent(HostileTrainer):
        """A trainer without a policy, that notes what it is asked."""

        async def reply(self, peer: bytes, stream: Stream, request: ControlRequest) -> None:
            requests.append(request)
            await super().reply(peer, stream, request)

    async with Swarm(tmp_path, model_dir) as swarm, Silent(swarm):
        swarm.add_worker("w1")
        await until(lambda: any(isinstance(request, WatchHeads) for request in requests))
        await swarm.stop_worker("w1")
    assert sum(isinstance(request, Goodbye) for request in requests) == 1


class Finishing(HostileTrainer):
    """A trainer that has reached its last step."""

    async def reply(self, peer: bytes, stream: Stream, request: ControlRequest) -> None:
        raise RemoteProtocolError(Reason.RUN_ENDED, "the run has reached its last step")


async def test_a_trainer_that_finishes_admits_no_node_and_counts_those_that_worked(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=1) as swarm:
        await swarm.start_trainer()
        async with Rogue(swarm, "watcher") as rogue, Rogue(swarm, "late") as late:
            stream = await (await rogue.control()).open_stream()
            await send(stream, WatchHeads(0, -1))  # the trainer stays until its watchers heard
            await late.hello()
            worker = swarm.add_worker("w1")
            reason = None
            async with asyncio.timeout(60.0):
                while reason is None:
                    try:
                        await late.hello()
                    except Refused as refused:
                        reason = refused.reason
        assert reason == Reason.RUN_ENDED
        summary = await swarm.finished(60.0)
        await worker.ended(30.0)
    assert set(summary["workers"]) == {short(worker.node_id)}
    assert set(summary["chunk_bytes_by_source"]) == {short(worker.node_id)}


async def test_a_trainers_end_does_not_wait_for_a_worker_that_said_goodbye(
    tmp_path: Path, model_dir: Path
) -> None:
    long = Farewell(finished_s=3600.0, stopped_s=3600.0)
    async with Swarm(tmp_path, model_dir, max_steps=10, farewell=long) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("left")
        await swarm.wait_step(1)
        await swarm.stop_worker("left")
        await swarm.stop_trainer()
        swarm.fakes.last_step = 4
        await swarm.start_trainer(resume=True)
        swarm.add_worker("left")
        await swarm.wait_step(4)
        swarm.add_worker("stays")
        await until(lambda: swarm.fakes.newest("stays") > 0)
        await swarm.stop_worker("left")
        swarm.fakes.go.set()
        assert (await swarm.finished(60.0))["steps"] == 10


async def test_a_worker_on_its_way_back_to_a_trainer_that_was_killed_hears_of_the_end(
    tmp_path: Path, model_dir: Path
) -> None:
    """A trainer that resumes at its last step ends at once, before workers have dialled it again."""
    async with Swarm(tmp_path, model_dir, max_steps=10_000, checkpoint={"interval": 1}) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1")
        await swarm.wait_step(3)
        await swarm.crash_trainer()
        await asyncio.sleep(2.0)  # the worker's pauses between dials grow
        # it may have been killed in the middle of one, which does not count
        saved = Checkpoints(swarm.run_dir / CHECKPOINTS, keep_last=1).steps()[-1]
        await swarm.start_trainer(resume=True, max_steps=saved)
        await swarm.finished()
        await worker.ended(10.0)


def test_lines_about_what_goes_on_come_at_growing_distances() -> None:
    now = 0.0
    lines = LogBackoff(1.0, 600.0, clock=lambda: now)
    said: list[float] = []
    for tick in range(36_000):
        now = tick / 10
        if lines.due():
            said.append(now)
    assert said[:5] == [0.0, 1.0, 3.0, 7.0, 15.0]
    assert len(said) < 20
    assert max(b - a for a, b in itertools.pairwise(said)) <= 600.0
    lines.reset()
    assert lines.due()


async def test_workers_leave_a_trainer_that_was_stopped_at_once_or_when_they_have_waited(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=10_000) as swarm:
        await swarm.start_trainer()
        patient = swarm.add_worker("patient", wait_for_trainer_s=1.0)
        hasty = swarm.add_worker("hasty", wait=False)
        await until(lambda: all(swarm.fakes.newest(name) >= 1 for name in swarm.workers))
        await swarm.stop_trainer()
        with pytest.raises(NetworkError, match=r"was stopped and may be resumed: .* --wait waits"):
            await hasty.ended(10.0)
        with pytest.raises(
            NetworkError, match=r"was stopped and may be resumed, and was not there"
        ):
            await patient.ended(30.0)


async def test_workers_of_a_trainer_that_is_stopped_in_its_warm_up_leave(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, warmup={}) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w", wait=False)
        await until(lambda: worker.data_dir.joinpath("control.sock").exists())
        async with asyncio.timeout(30.0):
            while (await worker.status())["phase"] != "catching up":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await swarm.trainer.status())["phase"] == "warm-up"
        await swarm.stop_trainer()
        with pytest.raises(NetworkError, match="was stopped and may be resumed"):
            await worker.ended(10.0)
