"""Choose the tasks of an environment by their newest rewards, and the groups that are worth training. No torch.

Invariant: which task a draw chooses follows from the seed, its number, the newest rewards and the tasks that
are out. So a checkpoint needs the rewards alone; the lease book knows the number of draws.
"""

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np

from ..config.training import TrainingConfig
from .advantages import NO_SIGNAL, group_advantages
from .buffer import RolloutGroup

UNSEEN = "unseen"


class Curriculum:
    """The sampler and the gates of one environment, as prime-rl's `orchestrator/curriculum` has them."""

    def __init__(self, training: TrainingConfig, *, environment: str, seed: int) -> None:
        """`environment` is its name, and `seed` the run's."""
        self.environment = environment
        self._training = training
        self._config = training.curriculum
        self._seed = seed
        sampler = self._config.sampler
        self._pools = sorted(sampler.pools.items(), key=lambda pool: pool[1].threshold)
        self._weights = np.ones(sampler.num_tasks if self.chooses else 0)
        """Of each task; 1 for those that no group came back of."""
        self.rewards: dict[int, float] = {}
        """By task: the mean reward of its newest group."""
        self.rejected_in_a_row = 0
        """Groups that were not admitted, since the last one that was."""
        self._counts: Counter[bool] = Counter()
        """Groups since the last metrics(), by whether they were admitted."""

    @property
    def chooses(self) -> bool:
        """Whether it chooses tasks; else they come in the order of their numbers."""
        return self._config.sampler.type == "difficulty_pool"

    @property
    def exhausted(self) -> bool:
        """Whether every task is in a pool of weight 0."""
        return self.chooses and not self._weights.any()

    def draw(self, number: int, out: Collection[int]) -> int | None:
        """Choose the task of draw `number`, with probabilities in proportion to weights, among those not `out`.

        None if no task is left that has a weight.
        """
        weights = self._weights
        if busy := [index for index in out if index < len(weights)]:
            weights = weights.copy()
            weights[busy] = 0.0
        sums = np.cumsum(weights)
        total = float(sums[-1])
        if total <= 0.0:
            return None
        at = random.Random(f"curriculum {self._seed} {number}").random() * total
        return int(np.searchsorted(sums, min(at, math.nextafter(total, 0.0)), side="right"))

    def observe(self, group: RolloutGroup) -> bool:
        """Take note of a verified group; returns whether every gate admits it to training."""
        if self.chooses and 0 <= group.task_index < len(self._weights):
            mean = math.fsum(one.reward for one in group.rollouts) / len(group.rollouts)
            self._put(group.task_index, mean)
        admitted = self._admits(group)
        self._counts[admitted] += 1
        self.rejected_in_a_row = 0 if admitted else self.rejected_in_a_row + 1
        return admitted

    def metrics(self) -> dict[str, float]:
        """Figures since the last call, by prime-rl's names; nothing without a sampler or a gate."""
        figures: dict[str, float] = {}
        if self._config.gates and self._counts:
            figures["admission_rate"] = self._counts[True] / self._counts.total()
        self._counts.clear()
        if self.chooses:
            sizes = Counter(map(self._pool, self.rewards.values()))
            sizes[UNSEEN] = len(self._weights) - len(self.rewards)
            names = (UNSEEN, *self._config.sampler.pools)
            figures |= {f"sampler/pool/{name}": float(sizes[name]) for name in names}
        return {f"curriculum/{self.environment}/{name}": value for name, value in figures.items()}

    def restore(self, rewards: Mapping[int, float]) -> None:
        """Go back to the `rewards` of a checkpoint, without those of tasks that are no longer chosen from."""
        self.rewards.clear()
        self._weights[:] = 1.0
        for index, reward in rewards.items():
            if 0 <= index < len(self._weights):
                self._put(index, reward)

    def _put(self, index: int, reward: float) -> None:
        if math.isfinite(reward):
            self.rewards[index] = reward
            self._weights[index] = self._config.sampler.pools[self._pool(reward)].weight

    def _pool(self, reward: float) -> str:
        """Name the pool of a reward: the first that it does not exceed, or the last one."""
        names = (name for name, pool in self._pools if reward <= pool.threshold)
        return next(names, self._pools[-1][0])

    def _admits(self, group: RolloutGroup) -> bool:
        if not self._config.gates or not self._training.loss.reads_advantages:
            return True
        advantages = group_advantages(group, self._training)
        return not advantages or all(
            any(
                not gate.reject_min - NO_SIGNAL < one < gate.reject_max + NO_SIGNAL
                for one in advantages
            )
            for gate in self._config.gates.values()
        )
