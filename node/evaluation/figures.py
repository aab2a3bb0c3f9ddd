"""From the rollouts of one environment to the figures that are told of it."""

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from .rollouts import Rollout
from .statistics import Estimate, mean, pass_at, share, tries_of

MAX_REASONS = 5


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What k rollouts of each prompt say of a model; failed ones count as unsolved, with a reward of 0."""

    prompts: int
    samples: int
    """Of each prompt: the k of avg@k."""
    success: float
    """A rollout with at least this reward solves its task."""
    avg: Estimate
    """avg@k: the mean reward."""
    passes: dict[str, Estimate]
    """j -> pass@j."""
    reward: float | None
    """Mean reward of the rollouts that did not fail; None if all did."""
    truncated: float
    """Share of all rollouts whose last reply was cut off."""
    failed: float
    """Share of all rollouts that failed."""
    reasons: dict[str, int]
    """The commonest reasons of failure -> rollouts."""
    metrics: dict[str, float]
    """Means of the environment's metrics over the rollouts that have them."""
    prompt_tokens: int
    completion_tokens: int
    """Both over all turns."""
    completion_mean: float
    """Tokens that a rollout sampled."""

    def flat(self) -> dict[str, float]:
        """avg@k, pass@j and the shares, by the names that metrics have."""
        passes = {f"pass@{tries}": round(one.value, 6) for tries, one in self.passes.items()}
        return {
            f"avg@{self.samples}": round(self.avg.value, 6),
            **passes,
            "truncated": round(self.truncated, 6),
            "failed": round(self.failed, 6),
            "completion_len/mean": round(self.completion_mean, 3),
        }


def figures(rollouts: Sequence[Rollout], *, samples: int, success: float) -> Figures:
    """The figures of an environment, from all `samples` rollouts of every prompt; at least one prompt."""
    prompts: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        prompts.setdefault(rollout.digest, []).append(rollout)
    if not prompts or any(len(group) != samples for group in prompts.values()):
        raise ValueError(f"every prompt has to have {samples} rollouts")
    groups = list(prompts.values())
    solved = [sum(not one.error and one.reward >= success for one in group) for group in groups]
    passes = {
        str(tries): share([pass_at(samples, count, tries) for count in solved])
        for tries in tries_of(samples)
    }
    scored = [one.reward for one in rollouts if not one.error]
    reasons = Counter(one.error for one in rollouts if one.error)
    tokens = sum(one.completion_tokens for one in rollouts)
    return Figures(
        prompts=len(groups),
        samples=samples,
        success=success,
        avg=_average([math.fsum(one.reward for one in group) / samples for group in groups]),
        passes=passes,
        reward=math.fsum(scored) / len(scored) if scored else None,
        truncated=sum(one.truncated for one in rollouts) / len(rollouts),
        failed=sum(bool(one.error) for one in rollouts) / len(rollouts),
        reasons=dict(reasons.most_common(MAX_REASONS)),
        metrics=_metrics(rollouts),
        prompt_tokens=sum(one.prompt_tokens for one in rollouts),
        completion_tokens=tokens,
        completion_mean=tokens / len(rollouts),
    )


def _average(values: Sequence[float]) -> Estimate:
    """Rewards have no known range; those of 0 and 1 alone are a share."""
    return share(values) if all(value in (0.0, 1.0) for value in values) else mean(values)


def _metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            found.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in sorted(found.items())}
