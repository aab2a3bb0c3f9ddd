"""Evaluation on a split of the environment: sampled rollouts with fixed seeds, scored by the environment."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ...crypto.hashing import derive
from ..engines.engine import Completion, Engine, GenerateRequest
from ..environments.environment import Environment, Split
from ..weights.state import State


@dataclass(frozen=True)
class EvalResult:
    """Means over the prompts; `exact` is the metric of that name where the environment has it."""

    prompts: int
    reward: float
    exact: float


class Evaluator:
    """Plays tasks with an engine of its own."""

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        *,
        max_tokens: int,
        temperature: float,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._stops = stop_token_ids
        self._loads = 0

    async def evaluate(
        self, state: State, *, split: Split, first: int, prompts: int, seed: int
    ) -> EvalResult:
        """Tasks `first` .. `first + prompts` of `split`, one sampled rollout each."""
        self._loads += 1
        await self._engine.load(self._loads, state)
        plays = [self._play(first + number, split, seed) for number in range(prompts)]
        results = await asyncio.gather(*plays)
        rewards = [reward for reward, _ in results]
        exacts = [exact for _, exact in results]
        return EvalResult(prompts, sum(rewards) / prompts, sum(exacts) / prompts)

    async def _play(self, index: int, split: Split, seed: int) -> tuple[float, float]:
        task = self._environment.task(index, split)

        async def policy(prompt: Sequence[int], turn: int) -> Completion:
            name = derive(
                "eval seed", seed.to_bytes(8, "big", signed=True), task.digest, bytes([turn])
            )
            return await self._engine.generate(
                GenerateRequest(
                    tuple(prompt),
                    self._max_tokens,
                    self._temperature,
                    int.from_bytes(name[:8], "big") >> 1,
                    self._stops,
                )
            )

        episode = await self._environment.run(task, policy)
        reward = episode.score.reward
        return reward, episode.score.metrics.get("exact", float(reward >= 1.0))
