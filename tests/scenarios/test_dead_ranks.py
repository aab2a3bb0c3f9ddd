"""Ranks die under a running trainer: it goes on from its last checkpoint, in the same process."""

import asyncio
import os
import signal
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.swarm import Running, Swarm
from support.training_cases import FAST
from support.training_cases import make_model as make_real_model
from support.witness import Fakes, WitnessBackend, trained_ages

from primerl.node.app.factories import Factories
from primerl.node.app.trainer import Farewell
from primerl.node.config.run import RunConfig
from primerl.node.errors import EngineError, NodeError, RankFailed, StorageError
from primerl.node.models.model_files import read_state
from primerl.node.training.backend import Snapshot, StepMetrics, TrainBackend, TrainBatch
from primerl.node.training.fsdp_backend import FsdpBackend
from primerl.node.training.rank_group import RankGroup
from primerl.node.training.restarts import MAX_RESTARTS, Restarts, ranks_alone, until_done
from primerl.node.weights.state import digests, state_digest

Deaths = Counter[tuple[str, int]]
"""(what is done, at which step) -> how often it kills the ranks."""


class Mortal(WitnessBackend):
    """Its ranks die as `deaths` says, and stay dead."""

    def __init__(self, fakes: Fakes, deaths: Deaths, error: type[NodeError] = RankFailed) -> None:
        super().__init__(fakes)
        self._deaths = deaths
        self._error = error
        self._dead = False
        self._trained = 0
        self.closed = False

    async def start(self, model_dir: Path) -> None:
        self._meet("start", 0)
        await super().start(model_dir)

    async def step(self, batch: TrainBatch) -> StepMetrics:
        self._meet("step", batch.step)
        self._trained = batch.step
        return await super().step(batch)

    def snapshot(self) -> asyncio.Future[Snapshot]:
        try:
            self._meet("snapshot", self._trained)
        except RankFailed as error:  # like that of real ranks, it fails after the call
            failed: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed
        return super().snapshot()

    async def save(self, directory: Path) -> None:
        self._meet("save", self._trained)
        await super().save(directory)

    async def load(self, directory: Path) -> None:
        await super().load(directory)
        self._trained = int(directory.parent.name.removeprefix("step_"))
        self._meet("load", self._trained)

    async def export(self, directory: Path) -> None:
        self._meet("export", self._trained)
        await super().export(directory)

    async def close(self) -> None:
        self.closed = True
        await super().close()

    def _meet(self, what: str, step: int) -> None:
        if self._deaths[what, step]:
            self._deaths[what, step] -= 1
            self._dead = True
        if self._dead:
            raise self._error(f"rank 1 of 2 failed: killed in {what}")


class MortalSwarm(Swarm):
    """A swarm whose trainer's ranks die."""

    def __init__(
        self, *args: Any, deaths: Deaths, error: type[NodeError] = RankFailed, **overrides: Any
    ) -> None:
        super().__init__(*args, **overrides)
        self._deaths = deaths
        self._error = error
        self.mortals: list[Mortal] = []

    def _factories(self, running: Running, ledger: Any = None) -> Factories:
        def backend(config: RunConfig) -> WitnessBackend:
            self.mortals.append(Mortal(self.fakes, self._deaths, self._error))
            return self.mortals[-1]

        return replace(super()._factories(running, ledger), backend=backend)

    async def to_the_end(self) -> None:
        await self.start_trainer()
        self.add_worker("w1")
        self.add_worker("w2")
        await self.finished()
        for worker in self.workers.values():
            await worker.ended()


async def test_dead_ranks_cost_no_version_and_no_worker(tmp_path: Path, model_dir: Path) -> None:
    deaths = Deaths([("step", 2), ("snapshot", 4), ("save", 5), ("load", 4), ("export", 7)])
    soon = Farewell(1.0, 1.0, 1.0)  # the last process is there for workers that have left already
    every = {"interval": 1}
    async with MortalSwarm(
        tmp_path, model_dir, deaths=deaths, max_steps=7, farewell=soon, checkpoint=every
    ) as swarm:
        await swarm.to_the_end()
        heads = swarm.heads()
        taught = [batch for one in swarm.mortals for batch in one.batches]
        assert [one.closed for one in swarm.mortals] == [True] * 6
    assert not +deaths
    # nothing that was told is void: one epoch, and every version that a worker loaded is the published one
    assert sorted(heads) == [(0, version) for version in range(8)]
    for name in swarm.workers:
        assert [e.state for e in swarm.fakes.loads(name)] == [
            heads[0, e.version].state for e in swarm.fakes.loads(name)
        ]
    steps = [batch.step for batch in taught]
    assert sorted(set(steps)) == list(range(1, 8))
    assert all(b - a in (0, 1) for a, b in pairwise(steps))
    assert set[int]().union(*map(trained_ages, taught)) <= {0, 1, 2}


async def test_the_groups_of_the_batch_that_died_are_trained_after_all(
    tmp_path: Path, model_dir: Path
) -> None:
    """All that came is all that there is to lease: the run ends only if nothing is lost."""
    deaths = Deaths([("step", 1)])
    rollouts = {"groups_per_batch": 4, "groups_per_lease": 1, "max_off_policy_steps": 2}
    async with MortalSwarm(
        tmp_path, model_dir, deaths=deaths, max_steps=1, rollouts=rollouts
    ) as swarm:
        await swarm.to_the_end()
        asked = swarm.fakes.prompts("w1") | swarm.fakes.prompts("w2")
        (batch,) = swarm.mortals[-1].batches
    trained = {tuple(sample.token_ids[: len(next(iter(asked)))]) for sample in batch.samples}
    assert trained <= asked
    # the first batch is full when it dies; some more groups are leased while those that came are verified again
    assert len(asked) <= 12


async def test_ranks_that_die_between_two_checkpoints_cost_no_version(
    tmp_path: Path, model_dir: Path
) -> None:
    deaths = Deaths([("step", 6)])
    async with MortalSwarm(
        tmp_path, model_dir, deaths=deaths, max_steps=7, checkpoint={"interval": 3}
    ) as swarm:
        await swarm.to_the_end()
        heads = swarm.heads()
    assert sorted(heads) == [(0, version) for version in range(8)]


async def test_a_run_that_dies_before_its_first_checkpoint_begins_again(
    tmp_path: Path, model_dir: Path
) -> None:
    deaths = Deaths([("save", 0)])
    last = Farewell(
        60.0, 2.0, 60.0
    )  # a worker that met the restart may be in a pause when the run ends
    async with MortalSwarm(tmp_path, model_dir, deaths=deaths, max_steps=1, farewell=last) as swarm:
        await swarm.to_the_end()
        assert sorted(swarm.heads()) == [(0, 0), (0, 1)]
        assert len(swarm.mortals) == 2


async def test_ranks_that_never_live_long_enough_end_the_run(
    tmp_path: Path, model_dir: Path
) -> None:
    deaths = Deaths({("step", 2): 9})
    async with MortalSwarm(tmp_path, model_dir, deaths=deaths, max_steps=3) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        with pytest.raises(RankFailed, match="rank 1"):
            await swarm.trainer.ended()
        assert len(swarm.mortals) == 1 + MAX_RESTARTS
        assert all(one.closed for one in swarm.mortals)


async def test_another_error_of_the_backend_ends_the_run_at_once(
    tmp_path: Path, model_dir: Path
) -> None:
    async with MortalSwarm(
        tmp_path, model_dir, deaths=Deaths([("step", 1)]), error=EngineError
    ) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        with pytest.raises(EngineError, match="killed in step"):
            await swarm.trainer.ended()
        assert len(swarm.mortals) == 1


async def test_restarts_wait_longer_each_time_until_a_checkpoint_is_new() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    restarts = Restarts(3, sleep)
    failure = RankFailed("rank 0 of 2 failed")
    for newest in (None, None, 1, 1, 1):
        await restarts.after(failure, newest)
    assert waits == [0.0, 1.0, 0.0, 1.0, 3.0]
    with pytest.raises(RankFailed):
        await restarts.after(ExceptionGroup("tasks", [failure]), 1)


async def test_a_replacement_that_dies_counts_as_a_restart() -> None:
    replaced: list[int] = []

    async def work(again: bool) -> None:
        if not again:
            raise ExceptionGroup("tasks", [RankFailed("rank 0 of 2 failed")])

    async def replace_once() -> None:
        replaced.append(1)
        if len(replaced) < 3:
            raise RankFailed("no rank came up")

    async def sleep(seconds: float) -> None:
        pass

    await until_done(work, Restarts(3, sleep), newest=lambda: 1, replace=replace_once)
    assert len(replaced) == 3


def test_dead_ranks_beside_another_fault_are_not_answered() -> None:
    failure = RankFailed("rank 0 of 2 failed")
    assert ranks_alone(ExceptionGroup("a", [ExceptionGroup("b", [failure])])) is failure
    assert ranks_alone(ExceptionGroup("a", [failure, StorageError("disk full")])) is None
    assert ranks_alone(StorageError("disk full")) is None


KILLED_AT = 3
"""The step in which a real rank dies."""


class RealBackend(FsdpBackend):
    """Trains a real model, whatever the run's contract says about its shape."""

    def __init__(self, config: RunConfig, model_dir: Path) -> None:
        super().__init__(config.training, max_steps=config.max_steps, seed=config.seed)
        self._real = model_dir

    async def start(self, model_dir: Path) -> None:
        await super().start(self._real)

    def ranks(self) -> RankGroup:
        assert self._ranks is not None
        return self._ranks


class MortalBackend(RealBackend):
    """Its last rank dies."""

    async def step(self, batch: TrainBatch) -> StepMetrics:
        if batch.step == KILLED_AT:
            os.kill(self.ranks().pids[-1], signal.SIGKILL)
        return await super().step(batch)


class RealSwarm(Swarm):
    """A swarm with real ranks."""

    def __init__(self, *args: Any, real: Path, **overrides: Any) -> None:
        super().__init__(*args, **overrides)
        self._real = real
        self.made: list[RealBackend] = []

    def _factories(self, running: Running, ledger: Any = None) -> Factories:
        def backend(config: RunConfig) -> TrainBackend:
            kind = RealBackend if self.made else MortalBackend
            self.made.append(kind(config, self._real))
            return self.made[-1]

        return replace(super()._factories(running, ledger), backend=backend)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_rank_that_is_killed_costs_a_running_swarm_no_version(
    tmp_path: Path, model_dir: Path, ranks: int
) -> None:
    real = make_real_model(tmp_path / "real")
    training = FAST.model_dump(mode="json", include={"lr", "threads", "device", "seq_len"})
    training |= {"backend": "fsdp", "fsdp": {"ranks": ranks, "timeout_s": 60.0}}
    async with RealSwarm(tmp_path, model_dir, real=real, max_steps=5, training=training) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        swarm.add_worker("w2")
        await swarm.finished(timeout=300.0)
        for worker in swarm.workers.values():
            await worker.ended()
        heads = swarm.heads()
        weights = read_state(swarm.run_dir / "weights" / "step_5")
    assert len(swarm.made) == 2
    assert sorted(heads) == [(0, version) for version in range(6)]
    assert state_digest(digests(weights)) == heads[0, 5].state
    for name in swarm.workers:
        for event in swarm.fakes.loads(name):
            assert event.state == heads[0, event.version].state
