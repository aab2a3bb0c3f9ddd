"""Evaluation on a split of the environment with an engine of one's own: one state at a time, each whole."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ..engines.engine import Engine
from ..environments.environment import Environment, Split
from ..weights.state import State
from .pinned import EnginePlayer
from .rollouts import Rollout, held_out, play


@dataclass(frozen=True)
class EvalResult:
    """Means over the prompts; `exact` is the metric of that name where the environment has it."""

    prompts: int
    reward: float
    exact: float


@dataclass(frozen=True)
class Contest:
    """One environment of an evaluation; started by whoever made it."""

    name: str
    environment: Environment
    prompts: int
    samples: int
    success: float = 1.0


class Evaluator:
    """Plays tasks with an engine that nobody else loads; whoever comes second waits."""

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        *,
        max_tokens: int,
        temperature: float,
        stop_token_ids: tuple[int, ...],
        at_once: int = 256,
    ) -> None:
        """`at_once` rollouts are in flight; the engine makes batches of them."""
        self._engine = engine
        self._environment = environment
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._stops = stop_token_ids
        self._at_once = at_once
        self._loads = 0
        self._turn = asyncio.Lock()

    async def evaluate(
        self, state: State, *, split: Split, first: int, prompts: int, seed: int
    ) -> EvalResult:
        """Tasks `first` .. `first + prompts` of `split`, one sampled rollout each."""
        tasks = [await self._environment.task(first + number, split) for number in range(prompts)]
        async with self._turn:
            player = await self._load(state)
            found = await play(
                self._environment, tasks, player, samples=1, seed=seed, concurrency=self._at_once
            )
        exacts = [one.metrics.get("exact", float(one.reward >= 1.0)) for one in found]
        return EvalResult(
            prompts, sum(one.reward for one in found) / prompts, sum(exacts) / prompts
        )

    async def contest(
        self, state: State, contests: Sequence[Contest], *, seed: int
    ) -> dict[str, list[Rollout]]:
        """Every contest's held-out tasks with one and the same policy, by name. Raises EnvironmentFailed."""
        found: dict[str, list[Rollout]] = {}
        async with self._turn:
            player = await self._load(state)
            for one in contests:
                tasks = await held_out(one.environment, one.prompts)
                found[one.name] = await play(
                    one.environment,
                    tasks,
                    player,
                    samples=one.samples,
                    seed=seed,
                    concurrency=self._at_once,
                )
        return found

    async def _load(self, state: State) -> EnginePlayer:
        self._loads += 1
        await self._engine.load(self._loads, state)
        return EnginePlayer(
            self._engine,
            self._loads,
            max_tokens=self._max_tokens,
            temperature=self._temperature,
            stop_token_ids=self._stops,
        )
