"""Choose an environment's tasks by their newest rewards, and the groups worth training.

No torch. Invariant: the task of a draw follows from the seed, the draw's number, the newest rewards and the
tasks that are out. So a checkpoint needs only the rewards; the lease book has the number of draws.
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
    """The sampler and the gates of one environment, as in prime-rl's `orchestrator/curriculum`."""

    def __init__(self, training: TrainingConfig, *, environment: str, seed: int) -> None:
        """`environment` is the environment's name, and `seed` the run's."""
        self.environment = environment
        self._training = training
        self._config = training.curriculum
        self._seed = seed
        sampler = self._config.sampler
        self._pools = sorted(sampler.pools.items(), key=lambda pool: pool[1].threshold)
        self._weights = np.ones(sampler.num_tasks if self.chooses else 0)
        """Weight of each task; 1 for tasks without a finished group."""
        self.rewards: dict[int, float] = {}
        """Mean reward of each task's newest group, by task."""
        self.rejected_in_a_row = 0
        """Groups rejected since the last admitted one."""
        self._counts: Counter[bool] = Counter()
        """Groups since the last metrics(), by whether they were admitted."""

    @property
    def chooses(self) -> bool:
        """Whether the sampler chooses tasks; otherwise they come in the order of their numbers."""
        return self._config.sampler.type == "difficulty_pool"

    @property
    def exhausted(self) -> bool:
        """Whether every task is in a pool of weight 0."""
        return self.chooses and not self._weights.any()

    def draw(self, number: int, out: Collection[int]) -> int | None:
        """Choose the task of draw `number`, in proportion to weights, among those not `out`.

        Returns None if no task with a positive weight is left.
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
        """Record a verified group; return whether every gate admits it to training."""
        if self.chooses and 0 <= group.task_index < len(self._weights):
            mean = math.fsum(rollout.reward for rollout in group.rollouts) / len(group.rollouts)
            self._put(group.task_index, mean)
        admitted = self._admits(group)
        self._counts[admitted] += 1
        self.rejected_in_a_row = 0 if admitted else self.rejected_in_a_row + 1
        return admitted

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, by prime-rl's names.

        Empty without a sampler or a gate.
        """
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
        """Restore a checkpoint's `rewards`, except for tasks that are no longer in range."""
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
        """Return the first pool whose threshold the reward does not exceed, else the last."""
        names = (name for name, pool in self._pools if reward <= pool.threshold)
        return next(names, self._pools[-1][0])

    def _admits(self, group: RolloutGroup) -> bool:
        if not self._config.gates or not self._training.loss.reads_advantages:
            return True
        advantages = group_advantages(group, self._training)
        return not advantages or all(
            any(
                not gate.reject_min - NO_SIGNAL < advantage < gate.reject_max + NO_SIGNAL
                for advantage in advantages
            )
            for gate in self._config.gates.values()
        )
