"""The taskset of run.py: every reply earns a reward by its own hash, so that every group has a signal.

It costs next to nothing to score, and nothing can be learned from it: what is measured is the machinery.
"""

# A hook must name the library's bare Trace, which is generic.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false

import hashlib
import itertools
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf


class HashedRewardConfig(vf.TasksetConfig):
    """Nothing to choose."""

    seed: int = 0
    split: Literal["train", "eval"] = "train"


class HashedRewardTask(vf.Task[vf.TaskData]):
    """One turn."""

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        """One reply is all there is."""
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def hashed(self, trace: vf.Trace) -> float:
        """One of 256 values from 0 to 1."""
        return hashlib.sha256(repr(trace.nodes[-1].token_ids).encode()).digest()[0] / 255


class HashedRewardTaskset(vf.Taskset[HashedRewardTask, HashedRewardConfig]):
    """Endless numbered prompts."""

    INFINITE = True

    def load(self) -> Iterator[HashedRewardTask]:
        """All tasks in order."""
        return map(self.task_at, itertools.count())

    def task_at(self, index: int) -> HashedRewardTask:
        """Task number `index`."""
        prompt = f"{self.config.split} {self.config.seed} {index}"
        data = vf.TaskData.model_validate({"idx": index, "prompt": prompt})
        return HashedRewardTask(data, self.config.task)


__all__ = ["HashedRewardTaskset"]
