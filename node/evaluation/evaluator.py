"""Roll out held-out tasks k times with a model: an engine with weights, or an API.

A rollout that fails is data: it counts as not solved, with the reason. An error that ends every rollout (an
engine that is given up, an API that is down, a wrong key) is raised.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from ...crypto.hashing import derive
from ..environments.environment import Environment, Split, Task
from ..environments.policies import PlayFailed
from ..inference.engine import Completion, Engine, GenerateRequest
from ..ops.errors import EngineError, EngineLost, first_cause
from ..weights.state import State

MAX_TEXT = 20_000
"""Characters of a reply that are kept."""
RESTART_WAITS_S = (1.0, 3.0, 9.0, *[20.0] * 27)
"""Before a turn is asked for again of an engine that is being started again: ten minutes in all."""


@dataclass(frozen=True)
class EvalSampling:
    """The sampling of every turn of an evaluation with an engine."""

    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class TurnRequest:
    """The prompt of one turn, and the seed of its sampling."""

    prompt: tuple[int, ...]
    seed: int
    """0 <= seed < 2**63; the same for the same evaluation seed, task, sample and turn."""
    group: bytes
    """The task: turns of it share a prompt."""


@dataclass(frozen=True)
class SampledTurn:
    """A sampled turn, and its tokens."""

    completion: Completion
    prompt_tokens: int
    completion_tokens: int


class PolicyClient(Protocol):
    """The model that is evaluated: EnginePolicy, EndpointPolicy."""

    async def reply(self, asked: TurnRequest) -> SampledTurn:
        """Sample a turn. Raises PlayFailed if this rollout cannot go on, NodeError if none can."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """Decode sampled tokens."""
        ...


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of an evaluation, as it is written down."""

    task: int
    """Index in the held-out split."""
    digest: str
    """Of the task's content (hex)."""
    sample: int
    reward: float
    """0 where it failed."""
    error: str = ""
    """Why it failed; empty where it did not."""
    metrics: dict[str, float] = {}
    truncated: bool = False
    """The last reply was cut off by a limit of tokens."""
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    reply: str = ""
    """Text of the last turn."""


async def held_out(environment: Environment, count: int, split: Split = "eval") -> list[Task]:
    """Take the first `count` tasks of a split; fewer where it has no more that differ.

    Raises EnvironmentFailed.
    """
    found: dict[bytes, Task] = {}
    for index in range(count):
        task = await environment.task(index, split)
        found.setdefault(task.digest, task)
    return list(found.values())


async def run_rollouts(
    environment: Environment,
    tasks: Sequence[Task],
    policy: PolicyClient,
    *,
    samples: int,
    seed: int,
    concurrency: int,
    done: Callable[[Rollout], None] = lambda _: None,
) -> list[Rollout]:
    """Roll out every task `samples` times, at most `concurrency` at once; return them in that order.

    `done` is told of each as it ends. Raises the errors of `policy` but PlayFailed.
    """
    todo = [(task, sample) for task in tasks for sample in range(samples)]
    found: dict[int, Rollout] = {}
    queue: Iterator[tuple[int, tuple[Task, int]]] = iter(enumerate(todo))

    async def work() -> None:
        for number, (task, sample) in queue:
            found[number] = await _rollout(environment, task, sample, policy, seed)
            done(found[number])

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(todo))):
                workers.create_task(work())
    except BaseExceptionGroup as group:
        raise first_cause(group) from group
    return [found[number] for number in range(len(todo))]


async def _rollout(
    environment: Environment, task: Task, sample: int, policy: PolicyClient, seed: int
) -> Rollout:
    said: list[SampledTurn] = []
    began = time.monotonic()

    async def sample_turn(prompt: Sequence[int], turn: int) -> Completion:
        asked = TurnRequest(tuple(prompt), turn_seed(seed, task, sample, turn), task.digest)
        said.append(await policy.reply(asked))
        return said[-1].completion

    episode = await environment.run(task, sample_turn)
    last = said[-1].completion.token_ids if said else []
    return Rollout(
        task=task.index,
        digest=task.digest.hex(),
        sample=sample,
        reward=0.0 if episode.error else episode.score.reward,
        error=episode.error,
        metrics=episode.score.metrics,
        truncated=not episode.error and bool(said) and said[-1].completion.finish == "length",
        turns=len(said),
        prompt_tokens=sum(one.prompt_tokens for one in said),
        completion_tokens=sum(one.completion_tokens for one in said),
        seconds=round(time.monotonic() - began, 4),
        reply=policy.text(last)[:MAX_TEXT] if last else "",
    )


def turn_seed(seed: int, task: Task, sample: int, turn: int) -> int:
    """Derive the seed of a turn. The first sample is the one that an evaluation with one sample has."""
    parts = [seed.to_bytes(8, "big", signed=True), task.digest, bytes([turn])]
    name = derive("eval seed", *parts, *([sample.to_bytes(4, "big")] if sample else []))
    return int.from_bytes(name[:8], "big") >> 1


class EnginePolicy:
    """The weights that `engine` holds as `version`, and no others."""

    def __init__(
        self,
        engine: Engine,
        version: int,
        sampling: EvalSampling,
        *,
        max_model_len: int = 0,
        decode: Callable[[Sequence[int]], str] = lambda _: "",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """A conversation of `max_model_len` tokens fails; 0 leaves that to the engine."""
        self._engine = engine
        self._version = version
        self._sampling = sampling
        self._max_model_len = max_model_len
        self._decode = decode
        self._sleep = sleep

    async def reply(self, asked: TurnRequest) -> SampledTurn:
        """Sample a turn. Raises PlayFailed, EngineError."""
        if 0 < self._max_model_len <= len(asked.prompt):
            raise PlayFailed(
                f"the conversation has {len(asked.prompt)} tokens: raise engine.max_model_len "
                f"({self._max_model_len})"
            )
        sampling = self._sampling
        completion = await self._generate(
            GenerateRequest(
                asked.prompt,
                sampling.max_tokens,
                sampling.temperature,
                asked.seed,
                sampling.stop_token_ids,
                group=asked.group,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
        )
        if not completion.policy_first == completion.policy_last == self._version:
            raise EngineError(
                f"the engine changed its weights while load {self._version} was evaluated: evaluate again"
            )
        return SampledTurn(completion, len(asked.prompt), len(completion.token_ids))

    def text(self, ids: Sequence[int]) -> str:
        """Decode sampled tokens."""
        return self._decode(ids)

    async def _generate(self, request: GenerateRequest) -> Completion:
        for wait_s in RESTART_WAITS_S:
            try:
                return await self._engine.generate(request)
            except EngineLost:
                await self._sleep(wait_s)
        return await self._engine.generate(request)


@dataclass(frozen=True)
class EvalResult:
    """Means over the prompts; `exact` is the metric of that name where the environment has it."""

    prompts: int
    reward: float
    exact: float
    environments: "dict[str, EvalResult]" = field(default_factory=dict[str, "EvalResult"])
    """The same of each environment, where several were evaluated together."""

    @classmethod
    def of(cls, found: "Mapping[str, EvalResult]") -> "EvalResult":
        """Join the results of environments: means over the prompts of all."""
        results = found.values()
        prompts = sum(one.prompts for one in results)
        reward = sum(one.prompts * one.reward for one in results) / max(prompts, 1)
        exact = sum(one.prompts * one.exact for one in results) / max(prompts, 1)
        return cls(prompts, reward, exact, dict(found))


@dataclass(frozen=True)
class EvalTask:
    """One environment of an evaluation, started, and how often it is sampled."""

    name: str
    environment: Environment
    prompts: int
    samples: int
    success: float = 1.0
    sampling: EvalSampling | None = None
    """None: the evaluator's, whose stop tokens it has anyway."""
    interval: int = 0
    """Versions from one evaluation beside training to the next; 0: as many as for the others."""


class Evaluator:
    """Evaluates states with an engine of its own, one evaluation after the other."""

    def __init__(
        self,
        engine: Engine,
        sampling: EvalSampling,
        at_once: int = 256,
    ) -> None:
        """`at_once` rollouts are in flight; the engine makes batches of them."""
        self._engine = engine
        self._sampling = sampling
        self._at_once = at_once
        self._loads = 0
        self._turn = asyncio.Lock()

    async def evaluate(
        self, state: State, tasks: Sequence[EvalTask], *, split: Split, first: int, seed: int
    ) -> EvalResult:
        """Roll out `prompts` tasks of each environment from `first` on, one sample each."""
        found: dict[str, EvalResult] = {}
        async with self._turn:
            version = await self._load(state)
            for one in tasks:
                numbers = range(first, first + one.prompts)
                asked = [await one.environment.task(number, split) for number in numbers]
                rollouts = await self._roll_out(one, asked, version, samples=1, seed=seed)
                found[one.name] = _means(rollouts)
        return EvalResult.of(found)

    async def evaluate_tasks(
        self, state: State, tasks: Sequence[EvalTask], *, seed: int
    ) -> dict[str, list[Rollout]]:
        """Roll out every environment's held-out tasks with one state, by name. Raises EnvironmentFailed."""
        found: dict[str, list[Rollout]] = {}
        async with self._turn:
            version = await self._load(state)
            for one in tasks:
                prompts = await held_out(one.environment, one.prompts)
                found[one.name] = await self._roll_out(
                    one, prompts, version, samples=one.samples, seed=seed
                )
        return found

    async def _load(self, state: State) -> int:
        self._loads += 1
        await self._engine.load(self._loads, state)
        return self._loads

    async def _roll_out(
        self, one: EvalTask, tasks: Sequence[Task], version: int, *, samples: int, seed: int
    ) -> list[Rollout]:
        own, stops = one.sampling or self._sampling, self._sampling.stop_token_ids
        return await run_rollouts(
            one.environment,
            tasks,
            EnginePolicy(self._engine, version, replace(own, stop_token_ids=stops)),
            samples=samples,
            seed=seed,
            concurrency=self._at_once,
        )


def _means(found: Sequence[Rollout]) -> EvalResult:
    exacts = [one.metrics.get("exact", float(one.reward >= 1.0)) for one in found]
    count = len(found)
    return EvalResult(count, sum(one.reward for one in found) / count, sum(exacts) / count)
