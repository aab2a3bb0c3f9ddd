"""From the start of a trainer to its first step: what waits for what."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from support.counting_environment import CountingEnvironment
from support.swarm import Running, Swarm
from support.witness import Fakes, WitnessEngine

from primerl.node.app.factories import Factories
from primerl.node.config.run import EngineConfig
from primerl.node.environments.environment import EnvironmentFailed
from primerl.node.errors import EngineError, UsageError
from primerl.node.inference.engine import Completion, Engine, GenerateRequest
from primerl.node.storage.ledger import Ledger


class SlowEnvironment(CountingEnvironment):
    """Starts when a test lets it, and may fail then."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.may_start = asyncio.Event()
        self._fault = fault

    async def start(self) -> None:
        await self.may_start.wait()
        if self._fault:
            raise EnvironmentFailed(self._fault)


class EvaluationEngine(WitnessEngine):
    """Evaluates when a test lets it, and may fail at the first version."""

    def __init__(self, fakes: Fakes, *, fails: bool = False) -> None:
        super().__init__(fakes, "evaluation")
        self.may_evaluate = asyncio.Event()
        self._fails = fails

    async def generate(self, request: GenerateRequest) -> Completion:
        await self.may_evaluate.wait()
        if self._fails and self.policy_version == 1:
            raise EngineError("out of memory")
        return await super().generate(request)


class EvaluatedSwarm(Swarm):
    """Its trainer evaluates with an engine of the test."""

    def __init__(
        self,
        *args: Any,
        fails: bool = False,
        evaluation: Any = MappingProxyType({}),
        **overrides: Any,
    ) -> None:
        super().__init__(*args, evaluation={"prompts": 2, **evaluation}, **overrides)
        self.evaluation = EvaluationEngine(self.fakes, fails=fails)

    def _factories(
        self, running: Running, ledger: Callable[..., Ledger] | None = None
    ) -> Factories:
        def evaluation_engine(config: EngineConfig) -> Engine:
            return self.evaluation

        return replace(super()._factories(running, ledger), evaluation_engine=evaluation_engine)


async def test_workers_are_admitted_while_the_environments_of_the_trainer_start(
    tmp_path: Path, model_dir: Path
) -> None:
    environment = SlowEnvironment()
    async with Swarm(tmp_path, model_dir) as swarm:
        swarm.environments["trainer"] = {"reverse-text": environment}
        await swarm.start_trainer()
        worker = swarm.add_worker("w")
        await swarm.until_row(worker, lambda row: True, 60.0)
        assert (await swarm.trainer.status())["version"] == -1
        environment.may_start.set()
        summary = await swarm.finished()
    assert summary["steps"] == 3


async def test_an_environment_that_does_not_start_ends_the_run_by_its_name(
    tmp_path: Path, model_dir: Path
) -> None:
    environment = SlowEnvironment("it has no tasks")
    async with Swarm(tmp_path, model_dir) as swarm:
        swarm.environments["trainer"] = {"reverse-text": environment}
        await swarm.start_trainer()
        environment.may_start.set()
        with pytest.raises(UsageError, match="'reverse-text' does not start: it has no tasks"):
            await swarm.trainer.ended()


async def test_steps_are_trained_while_the_first_version_is_evaluated(
    tmp_path: Path, model_dir: Path
) -> None:
    async with EvaluatedSwarm(tmp_path, model_dir) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w")
        await swarm.wait_step(2)
        assert not [event for event in swarm.fakes.loads("evaluation") if event.version > 1]
        swarm.evaluation.may_evaluate.set()
        summary = await swarm.finished()
        heads = swarm.heads()
    first, last = swarm.fakes.loads("evaluation")
    assert (first.state, last.state) == (heads[0, 0].state, heads[0, 3].state)
    assert summary["eval_prompts"] == 2
    assert summary["environments"]["reverse-text"].keys() >= {"reward_before", "reward_after"}


async def test_evaluations_of_the_same_version_share_their_rollouts(
    tmp_path: Path, model_dir: Path
) -> None:
    both = {"interval": 10, "samples": 2}
    async with EvaluatedSwarm(tmp_path, model_dir, evaluation=both) as swarm:
        swarm.evaluation.may_evaluate.set()
        await swarm.start_trainer()
        swarm.add_worker("w")
        summary = await swarm.finished()
    events = [event for event in swarm.fakes.events if event.name == "evaluation"]
    assert [event.kind for event in events] == 2 * ["load", *["generate"] * 4]
    before, after = summary["evaluations"]["reverse-text"]
    assert (before["version"], after["version"]) == (0, 3)
    assert summary["environments"]["reverse-text"].keys() >= {"reward_before", "reward_after"}


async def test_a_first_evaluation_that_fails_costs_its_figures_and_not_the_run(
    tmp_path: Path, model_dir: Path
) -> None:
    async with EvaluatedSwarm(tmp_path, model_dir, fails=True) as swarm:
        swarm.evaluation.may_evaluate.set()
        await swarm.start_trainer()
        swarm.add_worker("w")
        summary = await swarm.finished()
    assert summary["reward_before"] is None
    figures = summary["environments"]["reverse-text"]
    assert "reward_after" in figures
    assert "reward_before" not in figures


async def test_the_first_step_after_a_start_says_how_long_the_start_took(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w")
        await swarm.finished()
    first, *later = swarm.metrics()
    moments = [name for name in first if name.startswith("start/")]
    assert {"start/ticket", "start/first_lease", "start/first_verdict"} < {*moments}
    assert moments[-1] == "start/first_step"
    assert all(first[name] <= first["start/first_step"] for name in moments)
    assert not any(name.startswith("start/") for line in later for name in line)
