"""From groups with rewards to samples with advantages. No torch.

An advantage compares a rollout with its own group only; it is computed here from the trainer's rewards and
never taken from a worker.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .backend import Sample
from .buffer import Group

Credit = Literal["grpo", "grpo_std"]

STD_EPSILON = 1e-4
NO_SIGNAL = 1e-9
"""A group whose advantages are all below this teaches nothing."""


@dataclass(frozen=True)
class CreditedBatch:
    """The samples of a batch, and what was left out of it."""

    samples: list[Sample]
    groups: int
    """Groups that gave samples."""
    pruned: int
    """Groups without signal: every reward the same."""
    thin: int
    """Groups with fewer than two rollouts that have tokens and a finite reward."""


def grpo(rewards: Sequence[float]) -> list[float]:
    """r - mean(group): prime-rl's default, no division by the standard deviation (Dr. GRPO)."""
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def grpo_std(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-4) with the sample standard deviation, n - 1 (GRPO, arXiv 2402.03300).

    Needs at least two rewards.
    """
    centred = grpo(rewards)
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + STD_EPSILON) for value in centred]


def credit(groups: Iterable[Group], kind: Credit) -> CreditedBatch:
    """One sample per branch of every rollout; all branches of a rollout share its advantage.

    A rollout without tokens or with a reward that is not finite is left out of its group's baseline;
    the survivors are compared with each other. Groups without signal are pruned, not back-filled.
    """
    baseline = grpo if kind == "grpo" else grpo_std
    samples: list[Sample] = []
    used = pruned = thin = 0
    for group in groups:
        survivors = [r for r in group.rollouts if r.branches and math.isfinite(r.reward)]
        if len(survivors) < 2:
            thin += 1
            continue
        advantages = baseline([rollout.reward for rollout in survivors])
        if max(map(abs, advantages)) < NO_SIGNAL:
            pruned += 1
            continue
        used += 1
        samples += [
            Sample(branch.token_ids, branch.mask, branch.logprobs, advantage)
            for rollout, advantage in zip(survivors, advantages, strict=True)
            for branch in rollout.branches
        ]
    return CreditedBatch(samples, used, pruned, thin)
