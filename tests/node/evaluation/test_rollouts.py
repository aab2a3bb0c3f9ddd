"""Running k rollouts per task, and their results."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from pydantic import ValidationError
from support.counting_environment import STOP, CountingEnvironment
from support.scripted_engine import ScriptedEngine

from primerl.node.app.trainer import eval_tasks
from primerl.node.config.evaluation import EvalConfig
from primerl.node.config.run import EvaluatedEnvironment, RunConfig
from primerl.node.environments.environment import Environment, EnvironmentFailed, Split, Task
from primerl.node.environments.policies import PlayFailed
from primerl.node.environments.stop_strings import FIRST_PART, StopStrings
from primerl.node.errors import EngineError, EngineLost, NetworkError
from primerl.node.evaluation.eval_suite import CellStore, EvalModel, EvalSuite
from primerl.node.evaluation.evaluator import (
    ALL,
    EnginePolicy,
    EvalSampling,
    EvalTask,
    Evaluator,
    Rollout,
    SampledTurn,
    TurnRequest,
    evaluated,
    run_rollouts,
    turn_seed,
)
from primerl.node.evaluation.statistics import summarize
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.weights.state import State, Tensor

NOTHING: State = {}


class Clever:
    """A PolicyClient that answers right for even seeds; notes how many rollouts run."""

    def __init__(self, fails: Sequence[int] = (), error: Exception | None = None) -> None:
        self.fails = set(fails)
        self.error = error
        self.asked: list[TurnRequest] = []
        self.running = self.most = 0

    async def reply(self, request: TurnRequest) -> SampledTurn:
        """See PolicyClient."""
        self.asked.append(request)
        if len(self.asked) in self.fails:
            raise self.error or PlayFailed("no mood")
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        number = request.prompt[-1] + (request.seed + 1) % 2
        ids = [number, STOP] if request.seed % 5 else [number] * 4
        finish = "stop" if request.seed % 5 else "length"
        return SampledTurn(Completion(ids, [0.0] * len(ids), finish, 0, 0), 10, len(ids))

    def text(self, ids: Sequence[int]) -> str:
        """See PolicyClient."""
        return " ".join(map(str, ids))


async def run_all(player: Clever, samples: int = 4, concurrency: int = 8) -> list[Rollout]:
    environment = CountingEnvironment()
    return await run_rollouts(
        environment,
        await evaluated(environment, 6),
        player,
        samples=samples,
        seed=3,
        concurrency=concurrency,
    )


async def test_every_task_is_played_k_times_in_a_fixed_order() -> None:
    for concurrency in (1, 7):
        found = await run_all(Clever(), concurrency=concurrency)
        assert [one.task for one in found] == [task for task in range(6) for _ in range(4)]
        assert [one.sample for one in found] == [0, 1, 2, 3] * 6
    told = summarize(found, samples=4, success=1.0)
    assert (told.prompts, told.samples, told.failed) == (6, 4, 0.0)
    assert told.avg.value == sum(one.reward for one in found) / 24 == told.passes["1"].value
    assert 0 < told.passes["1"].value < told.passes["2"].value <= told.passes["4"].value
    assert told.truncated == sum(one.truncated for one in found) / 24 > 0
    assert told.prompt_tokens == 240
    assert told.completion_tokens == sum(one.completion_tokens for one in found)
    assert told.metrics["exact"] == told.avg.value


async def test_no_more_rollouts_run_than_are_allowed() -> None:
    player = Clever()
    await run_all(player, concurrency=3)
    assert player.most == 3


async def test_seeds_hang_on_task_sample_and_turn_alone() -> None:
    first, again = Clever(), Clever()
    await run_all(first, concurrency=1)
    await run_all(again, concurrency=5)
    assert sorted(one.seed for one in first.asked) == sorted(one.seed for one in again.asked)
    assert len({one.seed for one in first.asked}) == 24
    assert len({one.group for one in first.asked}) == 6
    task = await CountingEnvironment().task(0, "eval")
    seeds = [turn_seed(3, task, sample, turn) for sample in range(3) for turn in range(3)]
    assert len(set(seeds)) == 9
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_a_failed_rollout_counts_as_unsolved_and_says_why() -> None:
    found = await run_all(Clever(fails=[2, 5]), concurrency=1)
    failed = [one for one in found if one.error]
    assert [(one.error, one.reward, one.truncated) for one in failed] == [
        ("no mood", 0.0, False)
    ] * 2
    told = summarize(found, samples=4, success=1.0)
    assert told.failed == pytest.approx(2 / 24)
    assert told.reasons == {"no mood": 2}
    assert told.reward == pytest.approx(sum(one.reward for one in found) / 22)
    assert told.avg.value == pytest.approx(sum(one.reward for one in found) / 24)
    lenient = summarize(found, samples=4, success=0.0)
    assert lenient.passes["1"].value == pytest.approx(22 / 24)


async def test_what_ends_everything_is_raised_as_it_is() -> None:
    with pytest.raises(NetworkError, match=r"^gone$"):
        await run_all(Clever(fails=[3], error=NetworkError("gone")))


class FewTasks(CountingEnvironment):
    """Three tasks, over and over."""

    async def task(self, index: int, split: Split = "train") -> Task:
        """See Environment."""
        return await super().task(index % 3, split)


class Benchmark(CountingEnvironment):
    """Thirty tasks, each asked twice under another number, that begin anew."""

    async def task(self, index: int, split: Split = "train") -> Task:
        """See Environment."""
        place = index % 60
        task = await super().task(place, split)
        return replace(task, place=place, content=bytes([place // 2]))


async def test_a_task_that_comes_again_is_not_counted_twice() -> None:
    assert len(await evaluated(FewTasks(), 10)) == 3
    assert [task.index for task in await evaluated(Benchmark(), 10)] == [0, 2, 4, 6, 8]


async def test_all_tasks_are_those_until_a_taskset_begins_anew() -> None:
    assert len(await evaluated(Benchmark(), ALL, "all")) == 30
    assert len(await evaluated(Benchmark(), 1000, "all")) == 30
    with pytest.raises(EnvironmentFailed, match=r"no end among 100,000 tasks"):
        await evaluated(CountingEnvironment(), ALL)


async def test_a_task_that_comes_again_counts_once_before_and_after_a_run() -> None:
    engine = ScriptedEngine(right)
    await engine.start(Path())
    evaluator = Evaluator(engine, EvalSampling(4, 1.0, (STOP,)))
    for first in (0, 1 << 41):
        tasks = [EvalTask("a", Benchmark(), 10, 1)]
        result = await evaluator.evaluate(NOTHING, tasks, split="eval", first=first, seed=0)
        assert (result.prompts, result.exact) == (5, 1.0)
    await engine.close()


class LongPrompts(CountingEnvironment):
    """Every third prompt has ten tokens more."""

    async def prompt(self, task: Task) -> list[int]:
        """See Environment."""
        return [2] * (10 if task.index % 3 == 0 else 0) + [*await super().prompt(task)]


@pytest.mark.parametrize("online", [False, True])
async def test_prompts_that_are_too_long_are_passed_over_and_counted(
    online: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine refused them, which ended the run."""
    engine = ScriptedEngine(right, max_model_len=10)
    await engine.start(Path())
    evaluator = Evaluator(engine, EvalSampling(4, 1.0, (STOP,)), longest=10)
    tasks = [EvalTask("a", LongPrompts(), 9, 1)]
    with caplog.at_level(logging.WARNING):
        if online:
            played = (await evaluator.evaluate_tasks(NOTHING, tasks, seed=0))["a"]
            assert [one.error for one in played] == [""] * 6
        else:
            result = await evaluator.evaluate(NOTHING, tasks, split="eval", first=0, seed=0)
            assert (result.prompts, result.exact) == (6, 1.0)
    (record,) = caplog.records
    assert "counting: the prompts of 3 of 9 tasks do not fit into 10 tokens" in record.getMessage()
    with pytest.raises(EnvironmentFailed, match="nothing is left to evaluate"):
        await evaluated(LongPrompts(), 9, longest=1)
    await engine.close()


class Watched(Benchmark):
    """Takes note of the splits that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.splits = set[str]()

    async def task(self, index: int, split: Split = "train") -> Task:
        """See Environment."""
        self.splits.add(split)
        return await super().task(index, split)


@pytest.mark.parametrize(("trained", "split"), [("", "all"), ("counting", "eval")])
async def test_held_out_tasks_are_measured_of_what_was_trained_and_all_of_others(
    tmp_path: Path, trained: str, split: str
) -> None:
    watched = Watched()

    async def environment(_: object) -> Environment:
        return watched

    async def policy() -> Clever:
        return Clever()

    model = EvalModel("m", "local", "", {}, 8, policy, environment)
    config = EvalConfig.model_validate(
        {"models": ["m"], "environments": [{"id": "counting", "prompts": -1, "samples": 1}]}
    )
    suite = EvalSuite(config, CellStore(tmp_path), lambda _: None, 1, [trained])
    await suite.measure(model)
    assert watched.splits == {split}
    assert suite.found[0].figures.prompts == 30


async def test_a_cell_that_failed_whole_or_was_sampled_otherwise_is_measured_again(
    tmp_path: Path,
) -> None:
    measured = 0

    async def environment(_: object) -> Environment:
        nonlocal measured
        measured += 1
        return CountingEnvironment()

    async def failing() -> Clever:
        return Clever(fails=list(range(1000)))

    async def working() -> Clever:
        return Clever()

    wanted = {"models": ["m"], "environments": [{"id": "counting", "prompts": 3, "samples": 1}]}
    cells = [
        (failing, 1.0, 1),
        (working, 1.0, 2),
        (working, 1.0, 2),
        (working, 0.5, 3),
    ]
    for policy, temperature, times in cells:
        config = EvalConfig.model_validate({**wanted, "sampling": {"temperature": temperature}})
        model = EvalModel("m", "local", "", {}, 8, policy, environment)
        suite = EvalSuite(config, CellStore(tmp_path), lambda _: None, 1)
        await suite.measure(model)
        assert suite.found[0].figures.failed == (policy is failing)
        assert measured == times


def test_beside_training_all_tasks_are_measured_of_environments_that_it_does_not_use(
    tmp_path: Path,
) -> None:
    config = RunConfig.model_validate(
        {
            "environment": {"id": "arithmetic"},
            "evaluation": {
                "interval": 1,
                "environments": [{"id": "arithmetic"}, {"id": "math", "prompts": -1}],
            },
        }
    )
    factories: Any = SimpleNamespace(environment=lambda *_: CountingEnvironment())  # pyright: ignore[reportUnknownLambdaType]
    tasks = eval_tasks(config, factories, [], tmp_path)
    assert [(task.split, task.prompts) for task in tasks] == [("eval", 64), ("all", -1)]


@pytest.mark.parametrize("prompts", [0, -2])
def test_a_number_of_prompts_is_positive_or_all(prompts: int) -> None:
    with pytest.raises(ValidationError):
        EvaluatedEnvironment.model_validate({"id": "math", "prompts": prompts})


def test_success_is_a_threshold_of_the_reward() -> None:
    rollouts = [
        Rollout(task=0, digest="a", sample=sample, reward=reward)
        for sample, reward in enumerate((0.2, 0.6))
    ]
    assert summarize(rollouts, samples=2, success=1.0).passes["1"].value == 0.0
    assert summarize(rollouts, samples=2, success=0.5).passes["1"].value == 0.5
    assert summarize(rollouts, samples=2, success=0.5).passes["2"].value == 1.0
    with pytest.raises(ValueError, match="every prompt"):
        summarize(rollouts, samples=4, success=1.0)


Scripted = TypeVar("Scripted", bound=ScriptedEngine)


# -- an engine that plays -------------------------------------------------------------------------


def right(request: GenerateRequest, version: int) -> list[int]:
    return [request.prompt[-1] + 1, STOP]


async def loaded(engine: Scripted) -> Scripted:
    await engine.start(Path())
    await engine.load(1, NOTHING)
    return engine


def pinned(engine: ScriptedEngine, **options: Any) -> EnginePolicy:
    return EnginePolicy(engine, 1, EvalSampling(4, 1.0, (STOP,)), **options)


ASKED = TurnRequest((2, 5), 1, b"task")


async def test_weights_that_change_meanwhile_are_noticed() -> None:
    engine = await loaded(ScriptedEngine(right))
    player = pinned(engine)
    assert (await player.reply(ASKED)).completion.token_ids == [6, STOP]
    await engine.load(2, NOTHING)
    with pytest.raises(EngineError, match="changed its weights"):
        await player.reply(ASKED)
    await engine.close()


async def test_a_conversation_that_is_too_long_fails_alone() -> None:
    engine = await loaded(ScriptedEngine(right, max_model_len=8))
    with pytest.raises(PlayFailed, match=r"raise engine\.max_model_len \(8\)"):
        await pinned(engine, max_model_len=8).reply(TurnRequest((2,) * 8, 1, b""))
    await engine.close()


class Tagged(CountingEnvironment):
    """Its replies end with a closing tag."""

    stops = StopStrings(["</b>"], lambda token: bytes([token]))


async def test_replies_end_at_the_strings_of_their_environment() -> None:
    environment, player = Tagged(), Clever()
    tasks = await evaluated(environment, 2)
    await run_rollouts(environment, tasks, player, samples=1, seed=0, concurrency=1)
    assert {one.stops for one in player.asked} == {environment.stops}

    text, parts = b"an answer is <b>4</b> and " * 20, list[int]()

    def story(request: GenerateRequest, version: int) -> list[int]:
        parts.append(request.max_tokens)
        return [*text[len(request.prompt) - 2 :]]

    engine = await loaded(ScriptedEngine(story))
    patient = EnginePolicy(engine, 1, EvalSampling(400, 1.0, (STOP,)))
    reply = await patient.reply(replace(ASKED, stops=environment.stops))
    assert bytes(reply.completion.token_ids) == b"an answer is <b>4</b>"
    assert (reply.completion.finish, reply.completion_tokens) == ("stop", 21)
    assert parts == [FIRST_PART], "not all 400 tokens"
    await engine.close()


class Dying(ScriptedEngine):
    """Lost for the first `times` requests."""

    def __init__(self, times: int) -> None:
        super().__init__(right)
        self.times = times

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine."""
        self.times -= 1
        if self.times >= 0:
            raise EngineLost("the process died")
        return await super().generate(request)


async def test_a_lost_engine_is_asked_again_later() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    engine = await loaded(Dying(3))
    said = await pinned(engine, sleep=sleep).reply(ASKED)
    assert said.completion.token_ids == [6, STOP]
    assert waits == [1.0, 3.0, 9.0]
    engine.times = 1000
    with pytest.raises(EngineLost):
        await pinned(engine, sleep=sleep).reply(ASKED)
    await engine.close()


async def test_two_evaluations_of_one_engine_take_turns() -> None:
    engine = ScriptedEngine(
        lambda request, version: [request.prompt[-1] + version, STOP], delay_s=0.005
    )
    await engine.start(Path())
    environment = CountingEnvironment()
    evaluator = Evaluator(engine, EvalSampling(4, 1.0, (STOP,)))
    own = [EvalTask("a", environment, 3, 2), EvalTask("b", environment, 5, 1)]
    another: State = {"w": Tensor("BF16", (1,), np.zeros(1, "<u2"))}
    before, found = await asyncio.gather(
        evaluator.evaluate(
            NOTHING, [EvalTask("a", environment, 4, 1)], split="eval", first=0, seed=0
        ),
        evaluator.evaluate_tasks(another, own, seed=0),
    )
    assert (before.prompts, before.exact, before.reward) == (4, 1.0, 1.0)  # load 1 says n + 1
    assert {name: len(rollouts) for name, rollouts in found.items()} == {"a": 6, "b": 5}
    assert all(one.reward == 0.0 and not one.error for one in found["a"])  # load 2 says n + 2
    await engine.close()


async def test_an_environment_is_evaluated_with_sampling_of_its_own() -> None:
    asked: list[tuple[float, float, int, tuple[int, ...]]] = []

    def reply(request: GenerateRequest, version: int) -> list[int]:
        drawn = (request.temperature, request.top_p, request.max_tokens, request.stop_token_ids)
        asked.append(drawn)
        return [STOP]

    engine = ScriptedEngine(reply)
    await engine.start(Path())
    evaluator = Evaluator(engine, EvalSampling(4, 1.0, (STOP,)))
    environment, greedy = CountingEnvironment(), EvalSampling(9, 0.0, top_p=0.5)
    tasks = [
        EvalTask("a", environment, 1, 1),
        EvalTask("b", environment, 1, 1, sampling=greedy),
    ]
    await evaluator.evaluate_tasks(NOTHING, tasks, seed=0)
    assert asked == [(1.0, 1.0, 4, (STOP,)), (0.0, 0.5, 9, (STOP,))]
    await engine.close()


class Broken(CountingEnvironment):
    """Has no held-out tasks."""

    async def task(self, index: int, split: Split = "train") -> Task:
        """See Environment."""
        raise EnvironmentFailed("no tasks")


async def test_an_environment_without_tasks_says_so() -> None:
    with pytest.raises(EnvironmentFailed):
        await evaluated(Broken(), 1)
