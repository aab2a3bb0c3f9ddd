"""Evaluations during training: versions, weights, and resumed runs."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.counting_environment import STOP, CountingEnvironment
from support.scripted_engine import ScriptedEngine
from support.swarm import Running, Swarm, make_model
from support.witness import Fakes, WitnessEngine

from primerl.node.app.factories import Factories
from primerl.node.config.run import (
    EngineConfig,
    EnvironmentConfig,
    EvaluatedEnvironment,
    RunConfig,
)
from primerl.node.environments.environment import Environment
from primerl.node.errors import EngineError
from primerl.node.evaluation.evaluator import EvalSampling, EvalTask, Evaluator
from primerl.node.evaluation.online import EvaluationLog, OnlineEvaluation
from primerl.node.inference.engine import Completion, Engine, GenerateRequest
from primerl.node.ops.metrics import MetricsLog
from primerl.node.weights.state import State, Tensor


def state_of(version: int) -> State:
    return {"version": Tensor("U8", (1,), np.array([version], np.uint8))}


class Slow(ScriptedEngine):
    """Right where the loaded state's number is even; answers when `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.number = -1
        self.fails = False

    async def load(self, version: int, state: State) -> None:
        """See Engine."""
        self.number = int(state["version"].data[0])
        await super().load(version, state)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine."""
        await self.gate.wait()
        if self.fails:
            raise EngineError("out of memory")
        ids = [request.prompt[-1] + 1 + self.number % 2, STOP]
        version = self.policy_version
        return Completion(ids, [0.0, 0.0], "stop", version, version)


class Beside:
    """An OnlineEvaluation with its parts."""

    def __init__(
        self, directory: Path, *, interval: int = 2, last: int = 7, more: Sequence[EvalTask] = ()
    ) -> None:
        self.engine = Slow()
        environment = CountingEnvironment()
        evaluator = Evaluator(self.engine, EvalSampling(4, 1.0, (STOP,)))
        self.path, self.metrics = directory, MetricsLog(directory / "metrics.jsonl")
        self.online = OnlineEvaluation(
            evaluator,
            [EvalTask("counting", environment, 3, 2), *more],
            EvaluationLog(directory / "evaluations.jsonl"),
            self.metrics,
            interval=interval,
            last=last,
            seed=0,
        )

    async def start(self) -> "Beside":
        await self.engine.start(self.path)
        return self

    async def quiet(self) -> None:
        """Wait until no evaluation is running."""
        async with asyncio.timeout(60):
            while True:
                await asyncio.sleep(0.001)
                if self.online.version < 0:
                    return

    def versions(self) -> list[int]:
        return [one.version for one in self.online.log.held]


async def test_the_first_version_every_interval_and_the_last_are_evaluated(tmp_path: Path) -> None:
    beside = await Beside(tmp_path).start()
    async with beside.online as online:
        for version in range(8):
            online.begin(version, state_of(version))
            await beside.quiet()
        await online.finish(7, state_of(7))
    assert beside.versions() == [0, 2, 4, 6, 7]
    assert [one.environments["counting"].passes["1"].value for one in online.log.held] == [
        1.0,
        1.0,
        1.0,
        1.0,
        0.0,
    ]
    beside.metrics.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 2, 4, 6, 7]
    assert [row["eval/counting/version"] for row in rows] == [0, 2, 4, 6, 7]
    assert rows[0]["eval/counting/avg@2"] == rows[0]["eval/counting/pass@2"] == 1.0
    assert online.log.latest()["counting"]["version"] == 7


async def test_an_environment_may_have_an_interval_of_its_own(tmp_path: Path) -> None:
    beside = await Beside(
        tmp_path, more=[EvalTask("seldom", CountingEnvironment(), 1, 1, interval=5)]
    ).start()
    async with beside.online as online:
        for version in range(8):
            online.begin(version, state_of(version))
            await beside.quiet()
        await online.finish(7, state_of(7))
    found = {one.version: set(one.environments) for one in online.log.held}
    assert found == {
        0: {"counting", "seldom"},
        2: {"counting"},
        4: {"counting"},
        5: {"seldom"},
        6: {"counting"},
        7: {"counting", "seldom"},
    }
    beside.metrics.close()


async def test_an_interval_of_its_own_needs_none_of_the_section(tmp_path: Path) -> None:
    own = EvalTask("own", CountingEnvironment(), 1, 1, interval=3)
    beside = await Beside(tmp_path, interval=0, more=[own]).start()
    async with beside.online as online:
        for version in range(8):
            online.begin(version, state_of(version))
            await beside.quiet()
    assert {one.version: set(one.environments) for one in online.log.held} == {
        version: {"own"} for version in (0, 3, 6, 7)
    }
    assert set(online.log.latest()) == {"own"}
    beside.metrics.close()


async def test_what_comes_due_while_one_runs_is_left_out_but_never_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beside = await Beside(tmp_path).start()
    beside.engine.gate.clear()
    async with beside.online as online:
        for version in range(8):
            online.begin(version, state_of(version))
            await asyncio.sleep(0)
        assert online.version == 0
        assert caplog.text.count("is not evaluated, as version 0 still is") == 3
        beside.engine.gate.set()
        await online.finish(7, state_of(7))
    assert beside.versions() == [0, 7]
    assert online.log.held[0].environments["counting"].avg.value == 1.0, "still version 0's weights"
    assert online.log.held[1].environments["counting"].avg.value == 0.0
    beside.metrics.close()


async def test_a_run_that_goes_on_measures_nothing_twice_and_forgets_what_is_void(
    tmp_path: Path,
) -> None:
    first = await Beside(tmp_path).start()
    first.online.log.open(0)
    async with first.online as online:
        for version in range(7):
            online.begin(version, state_of(version))
            await first.quiet()
    first.metrics.close()
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"version": 7, "sec')  # killed while it wrote
    again = await Beside(tmp_path).start()
    again.online.log.open(4)
    assert again.versions() == [0, 2, 4]
    async with again.online as online:
        for version in (4, 5, 6):
            online.begin(version, state_of(1))
            await again.quiet()
    assert again.versions() == [0, 2, 4, 6]
    assert online.log.latest()["counting"]["pass@1"] == 0.0, "measured anew"
    again.metrics.close()
    book = EvaluationLog(tmp_path / "evaluations.jsonl")
    book.open(100)
    assert book.held == online.log.held


async def test_an_evaluation_that_fails_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beside = await Beside(tmp_path).start()
    beside.engine.fails = True
    async with beside.online as online:
        online.begin(0, state_of(0))
        await beside.quiet()
        beside.engine.fails = False
        online.begin(2, state_of(2))
        await beside.quiet()
    assert "version 0 could not be evaluated: out of memory" in caplog.text
    assert beside.versions() == [2]
    beside.metrics.close()


async def test_leaving_early_leaves_nothing_behind(tmp_path: Path) -> None:
    beside = await Beside(tmp_path).start()
    beside.engine.gate.clear()
    before = asyncio.all_tasks()
    async with beside.online as online:
        online.begin(0, state_of(0))
        await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == before
    assert not (tmp_path / "evaluations.jsonl").exists()
    beside.metrics.close()


async def test_without_an_interval_nothing_happens(tmp_path: Path) -> None:
    beside = Beside(tmp_path, interval=0)
    async with beside.online as online:
        online.begin(0, state_of(0))
        await online.finish(7, state_of(7))
    assert online.log.latest() == {}
    assert beside.engine.number == -1
    beside.metrics.close()


# -- whole runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


class Watched(Swarm):
    """An OnlineEvaluation whose evaluations wait at a gate."""

    gate: asyncio.Event
    started: list[EnvironmentConfig]

    def __init__(self, directory: Path, model: Path, **settings: Any) -> None:
        super().__init__(directory, model, **settings)
        self.gate, self.started = asyncio.Event(), []
        self.gate.set()

    async def __aenter__(self) -> "Watched":
        return self

    def _factories(self, running: Running, ledger: Any = None) -> Factories:
        def evaluation_engine(config: EngineConfig) -> Engine:
            async def pause() -> None:
                await self.gate.wait()

            return WitnessEngine(self.fakes, "evaluation", pause)

        def environment(
            config: EnvironmentConfig, model: Path, seed: int, max_tokens: int, temperature: float
        ) -> Environment:
            self.started.append(config)
            return CountingEnvironment(max_tokens=max_tokens)

        return replace(
            super()._factories(running, ledger),
            evaluation_engine=evaluation_engine,
            environment=environment,
        )

    def evaluated(self) -> list[Mapping[str, Any]]:
        lines = (self.run_dir / "evaluations.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


ENVIRONMENTS = [
    {"id": "counting", "prompts": 5, "samples": 2},
    {"id": "counting", "name": "few", "prompts": 2, "samples": 1, "success": 0.5},
]


async def test_a_run_evaluates_the_versions_that_it_published(tmp_path: Path, model: Path) -> None:
    told = {"interval": 2, "environments": ENVIRONMENTS}
    fakes = Fakes()
    async with Watched(tmp_path, model, fakes=fakes, max_steps=4, evaluation=told) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w")
        summary = await swarm.finished()
        found, rows = swarm.evaluated(), swarm.metrics()
        heads = swarm.heads()
        titles = [one.title for one in swarm.started if isinstance(one, EvaluatedEnvironment)]
        assert titles == ["counting", "few"]
    versions = [one["version"] for one in found]
    assert versions[0] == 0
    assert versions[-1] == 4
    # each version's own weights were loaded for it, nobody else's, in this order
    loads = [event.state for event in fakes.loads("evaluation")]
    assert loads == [heads[0, version].state for version in versions]
    told_of = summary["evaluations"]
    assert set(told_of) == {"counting", "few"}
    assert [one["version"] for one in told_of["counting"]] == versions
    assert {"avg@2", "pass@1", "pass@2"} <= set(told_of["counting"][0])
    assert {"avg@1", "pass@1"} <= set(told_of["few"][0])
    with_evals = [row for row in rows if "eval/few/pass@1" in row]
    assert [row["eval/few/version"] for row in with_evals] == versions
    assert summary["eval_prompts"] == 0


async def test_training_does_not_wait_for_an_evaluation(tmp_path: Path, model: Path) -> None:
    told = {"interval": 1, "environments": ENVIRONMENTS[:1]}
    async with Watched(tmp_path, model, max_steps=4, evaluation=told) as swarm:
        swarm.gate.clear()
        await swarm.start_trainer()
        swarm.add_worker("w")
        await swarm.wait_step(4)
        status = await swarm.trainer.status()
        assert status["evaluating"] == 0
        assert status["evaluations"] == {}
        swarm.gate.set()
        summary = await swarm.finished()
    assert [one["version"] for one in summary["evaluations"]["counting"]] == [0, 4]


async def test_a_resumed_run_goes_on_with_its_evaluations(tmp_path: Path, model: Path) -> None:
    told = {"interval": 1, "environments": ENVIRONMENTS[:1]}
    fakes = Fakes(last_step=2)
    async with Watched(tmp_path, model, fakes=fakes, max_steps=4, evaluation=told) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w")
        await swarm.wait_step(2)
        await swarm.crash_trainer()
        before = [one["version"] for one in swarm.evaluated()]
        fakes.go.set()
        await swarm.start_trainer(resume=True)
        summary = await swarm.finished()
    versions = [one["version"] for one in summary["evaluations"]["counting"]]
    assert versions[: len(before)] == before
    assert versions[-1] == 4
    assert sorted(set(versions)) == versions


async def test_weights_are_exported_as_often_as_is_wanted(tmp_path: Path, model: Path) -> None:
    settings: dict[str, Any] = {"checkpoint": {"weights_interval": 2}, "max_steps": 5}
    async with Watched(tmp_path, model, **settings) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w")
        await swarm.finished()
    there = sorted(path.name for path in (tmp_path / "r" / "weights").iterdir())
    assert there == ["step_2", "step_4", "step_5"]


def test_an_evaluation_beside_training_needs_prompts() -> None:
    with pytest.raises(ValueError, match=r"interval needs evaluation\.prompts"):
        RunConfig.model_validate({"evaluation": {"interval": 5, "prompts": 0}})
    twice = {"environments": [{"id": "a"}, {"id": "a"}]}
    with pytest.raises(ValueError, match="different names"):
        RunConfig.model_validate({"evaluation": twice})
