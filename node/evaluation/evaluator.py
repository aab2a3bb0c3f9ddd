"""Run k rollouts of each held-out task with a model: weights on an engine, or an API.

A failed rollout is data: it counts as unsolved, with the reason. An error that affects all rollouts (an engine
that was given up, an API that is down, a wrong key) is raised.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from ...crypto.hashing import derive
from ..environments.environment import Environment, EnvironmentFailed, Split, Task
from ..environments.policies import PlayFailed
from ..environments.stop_strings import StopStrings, generate_until
from ..errors import EngineError, EngineLost, first_cause
from ..inference.engine import Completion, Engine, GenerateRequest
from ..verification.auditor import SameState
from ..weights.state import State

logger = logging.getLogger(__name__)

ALL = -1
"""As a number of prompts: all of them."""
MOST_TASKS = 100_000
"""Tasks of a split that are evaluated at most; one with more counts as endless."""
MAX_TEXT = 20_000
"""Most characters of a reply that are stored."""
RESTART_WAITS_S = (1.0, 3.0, 9.0, *[20.0] * 27)
"""Delays before retries while an engine restarts; ten minutes in all."""


@dataclass(frozen=True)
class EvalSampling:
    """Sampling parameters of an evaluation with an engine."""

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
    """Digest of the task; its turns share a prompt prefix."""
    stops: StopStrings | None = None
    """Strings at which the reply ends."""


@dataclass(frozen=True)
class SampledTurn:
    """A sampled turn with its token counts."""

    completion: Completion
    prompt_tokens: int
    completion_tokens: int


class PolicyClient(Protocol):
    """The evaluated model. Implementations: EnginePolicy, EndpointPolicy."""

    async def reply(self, request: TurnRequest) -> SampledTurn:
        """Sample a turn. Raises PlayFailed if this rollout cannot continue, NodeError if none can."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """Decode sampled tokens."""
        ...


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of an evaluation, as stored on disk."""

    task: int
    """Index in the held-out split."""
    digest: str
    """Digest of the task's content (hex)."""
    sample: int
    reward: float
    """0 if the rollout failed."""
    error: str = ""
    """Why the rollout failed; empty if it did not."""
    metrics: dict[str, float] = {}
    truncated: bool = False
    """Whether the last reply was cut off by a token limit."""
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    reply: str = ""
    """Text of the last turn."""


async def evaluated(
    environment: Environment,
    count: int,
    split: Split = "eval",
    *,
    first: int = 0,
    longest: float = math.inf,
) -> list[Task]:
    """Return the tasks among `count` of a split from `first` on that differ in content; ALL: all of the split.

    Those whose prompts leave no room for a reply within `longest` tokens are passed over, and their number is
    logged. Raises EnvironmentFailed if none is left, and for all tasks of a taskset without an end.
    """
    tasks: dict[bytes, Task] = {}
    too_long = set[bytes]()
    for index in range(MOST_TASKS + 1 if count == ALL else count):
        if index == MOST_TASKS:
            raise EnvironmentFailed(
                f"{environment.name!r} has no end among {MOST_TASKS:,} tasks: give a number of prompts, not -1"
            )
        task = await environment.task(first + index, split)
        if not first and 0 <= task.place < index:
            break  # a finite taskset begins anew
        content = task.content or task.digest
        if content in tasks or content in too_long:
            continue
        if longest < math.inf and len(await environment.prompt(task)) >= longest:
            too_long.add(content)
        else:
            tasks[content] = task
    if too_long:
        what = (
            f"the prompts of {len(too_long)} of {len(too_long) + len(tasks)} tasks do not fit into {longest} "
            "tokens (training.seq_len, the model's positions, engine.max_model_len)"
        )
        if not tasks:
            raise EnvironmentFailed(f"{environment.name}: {what}: nothing is left to evaluate")
        logger.warning("%s: %s, and are not evaluated", environment.name, what)
    return list(tasks.values())


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
    """Run `samples` rollouts of every task, up to `concurrency` at once.

    Return them in task order. Calls `done` with each finished rollout. Raises the errors of `policy` except
    PlayFailed.
    """
    todo = [(task, sample) for task in tasks for sample in range(samples)]
    rollouts: dict[int, Rollout] = {}
    queue: Iterator[tuple[int, tuple[Task, int]]] = iter(enumerate(todo))

    async def work() -> None:
        for number, (task, sample) in queue:
            rollouts[number] = await _rollout(environment, task, sample, policy, seed)
            done(rollouts[number])

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(todo))):
                workers.create_task(work())
    except BaseExceptionGroup as group:
        raise first_cause(group) from group
    return [rollouts[number] for number in range(len(todo))]


async def _rollout(
    environment: Environment, task: Task, sample: int, policy: PolicyClient, seed: int
) -> Rollout:
    turns: list[SampledTurn] = []
    began = time.monotonic()

    async def sample_turn(prompt: Sequence[int], turn: int) -> Completion:
        own = turn_seed(seed, task, sample, turn)
        request = TurnRequest(tuple(prompt), own, task.digest, environment.stops)
        turns.append(await policy.reply(request))
        return turns[-1].completion

    episode = await environment.run(task, sample_turn)
    last = turns[-1].completion.token_ids if turns else []
    return Rollout(
        task=task.index,
        digest=task.digest.hex(),
        sample=sample,
        reward=0.0 if episode.error else episode.score.reward,
        error=episode.error,
        metrics=episode.score.metrics,
        truncated=not episode.error and bool(turns) and turns[-1].completion.finish == "length",
        turns=len(turns),
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        completion_tokens=sum(turn.completion_tokens for turn in turns),
        seconds=round(time.monotonic() - began, 4),
        reply=policy.text(last)[:MAX_TEXT] if last else "",
    )


def turn_seed(seed: int, task: Task, sample: int, turn: int) -> int:
    """Derive the seed of a turn; sample 0 has the same seeds however many samples there are."""
    parts = [seed.to_bytes(8, "big", signed=True), task.digest, bytes([turn])]
    name = derive("eval seed", *parts, *([sample.to_bytes(4, "big")] if sample else []))
    return int.from_bytes(name[:8], "big") >> 1


class EnginePolicy:
    """A PolicyClient for the weights that `engine` holds as `version`."""

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
        """Conversations that reach `max_model_len` tokens fail; 0 leaves the limit to the engine."""
        self._engine = engine
        self._version = version
        self._sampling = sampling
        self._max_model_len = max_model_len
        self._decode = decode
        self._sleep = sleep

    async def reply(self, request: TurnRequest) -> SampledTurn:
        """Sample a turn. Raises PlayFailed, EngineError."""
        if 0 < self._max_model_len <= len(request.prompt):
            raise PlayFailed(
                f"the conversation has {len(request.prompt)} tokens: raise engine.max_model_len "
                f"({self._max_model_len})"
            )
        sampling = self._sampling
        generation = GenerateRequest(
            request.prompt,
            sampling.max_tokens,
            sampling.temperature,
            request.seed,
            sampling.stop_token_ids,
            group=request.group,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        completion = await generate_until(self._generate, generation, request.stops)
        if not completion.policy_first == completion.policy_last == self._version:
            raise EngineError(
                f"the engine changed its weights while load {self._version} was evaluated: evaluate again"
            )
        return SampledTurn(completion, len(request.prompt), len(completion.token_ids))

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
    """Mean reward and exactness over the prompts.

    `exact` is the environment's metric of that name; without one, the share of rewards of at least 1.
    """

    prompts: int
    reward: float
    exact: float
    environments: "dict[str, EvalResult]" = field(default_factory=dict[str, "EvalResult"])
    """Results by environment, if several were evaluated together."""

    @classmethod
    def of(cls, by_environment: "Mapping[str, EvalResult]") -> "EvalResult":
        """Join the results of environments: means over the prompts of all."""
        results = by_environment.values()
        prompts = sum(result.prompts for result in results)
        reward = sum(result.prompts * result.reward for result in results) / max(prompts, 1)
        exact = sum(result.prompts * result.exact for result in results) / max(prompts, 1)
        return cls(prompts, reward, exact, dict(by_environment))


@dataclass(frozen=True)
class EvalTask:
    """A started environment of an evaluation, with its numbers of prompts and samples."""

    name: str
    environment: Environment
    prompts: int
    samples: int
    success: float = 1.0
    sampling: EvalSampling | None = None
    """None: the evaluator's. Stop tokens are always the evaluator's."""
    interval: int = 0
    """Versions between evaluations during training; 0: the default interval."""
    split: Split = "eval"
    """`all` where the run does not train on these tasks."""


class Evaluator:
    """Evaluates states with an engine of its own, one evaluation at a time.

    Rollouts that an earlier evaluation of the same state made are not made again.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: EvalSampling,
        at_once: int = 256,
        longest: float = math.inf,
    ) -> None:
        """`at_once`: rollouts in flight, which the engine batches. `longest`: tokens of prompt and reply."""
        self._engine = engine
        self._sampling = sampling
        self._at_once = at_once
        self._longest = longest
        self._loads = 0
        self._held: SameState | None = None
        """The state that the engine holds; None if that is not known."""
        self._rollouts: dict[tuple[object, ...], Rollout] = {}
        """Rollouts of that state."""
        self._turn = asyncio.Lock()

    async def evaluate(
        self, state: State, tasks: Sequence[EvalTask], *, split: Split, first: int, seed: int
    ) -> EvalResult:
        """Evaluate those of tasks `first` to `first + prompts - 1` of each environment that differ, one sample
        each; ALL: all of the split. Raises EnvironmentFailed.
        """
        results: dict[str, EvalResult] = {}
        async with self._turn:
            version = await self._load(state)
            for task in tasks:
                first = 0 if task.prompts == ALL else first
                chosen = await self._fitting(task, split, first)
                rollouts = await self._roll_out(task, split, chosen, version, samples=1, seed=seed)
                results[task.name] = _means(rollouts)
        return EvalResult.of(results)

    async def evaluate_tasks(
        self, state: State, tasks: Sequence[EvalTask], *, seed: int
    ) -> dict[str, list[Rollout]]:
        """Run rollouts of every environment's held-out tasks with `state`.

        Return them by environment name. Raises EnvironmentFailed.
        """
        rollouts: dict[str, list[Rollout]] = {}
        async with self._turn:
            version = await self._load(state)
            for task in tasks:
                prompts = await self._fitting(task, task.split)
                rollouts[task.name] = await self._roll_out(
                    task, task.split, prompts, version, samples=task.samples, seed=seed
                )
        return rollouts

    async def _fitting(self, task: EvalTask, split: Split, first: int = 0) -> list[Task]:
        return await evaluated(
            task.environment, task.prompts, split, first=first, longest=self._longest
        )

    async def _load(self, state: State) -> int:
        if self._held is None or not self._held.matches(state):
            self._held, self._rollouts = None, {}
            self._loads += 1
            await self._engine.load(self._loads, state)
            self._held = SameState(state)
        return self._loads

    async def _roll_out(
        self,
        task: EvalTask,
        split: Split,
        tasks: Sequence[Task],
        version: int,
        *,
        samples: int,
        seed: int,
    ) -> list[Rollout]:
        own, stops = task.sampling or self._sampling, self._sampling.stop_token_ids
        wanted = [
            (id(task.environment), split, own, seed, each.index, each.digest, sample)
            for each in tasks
            for sample in range(samples)
        ]
        if not self._rollouts.keys() >= set(wanted):
            policy = EnginePolicy(
                self._engine,
                version,
                replace(own, stop_token_ids=stops),
                max_model_len=int(self._longest) if self._longest < math.inf else 0,
            )
            rollouts = await run_rollouts(
                task.environment,
                tasks,
                policy,
                samples=samples,
                seed=seed,
                concurrency=self._at_once,
            )
            self._rollouts |= dict(zip(wanted, rollouts, strict=True))
        return [self._rollouts[key] for key in wanted]


def _means(rollouts: Sequence[Rollout]) -> EvalResult:
    exacts = [rollout.metrics.get("exact", float(rollout.reward >= 1.0)) for rollout in rollouts]
    count = len(rollouts)
    return EvalResult(
        count, sum(rollout.reward for rollout in rollouts) / count, sum(exacts) / count
    )
