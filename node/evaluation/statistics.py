"""pass@j without bias, and 95 % intervals that say how they were made.

The prompts are the sample: rollouts of one prompt are alike, so no interval counts them as independent.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ..calibration.bands import upper_bound

CONFIDENCE = 0.95
RESAMPLES = 4000
SEED = 20
"""Of the bootstrap: the same figures give the same interval everywhere."""
EXACT, BOOTSTRAP, NONE = "exact", "bootstrap", "none"
BLOCK = 1 << 22
"""Indices drawn at a time."""


@dataclass(frozen=True)
class Estimate:
    """A mean over the prompts and its 95 % interval."""

    value: float
    low: float | None
    high: float | None
    method: str
    """`exact`: Clopper and Pearson; `bootstrap`: over the prompts; `none`: nothing can be said."""


def pass_at(samples: int, solved: int, tries: int) -> float:
    """The probability that one of `tries` samples solves the task, from `solved` of `samples` that did.

    1 - C(n - c, j) / C(n, j), without bias for tries <= samples (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    if not 1 <= tries <= samples or not 0 <= solved <= samples:
        raise ValueError(f"{tries} of {samples} samples, {solved} solved: give possible numbers")
    return 1.0 - math.comb(samples - solved, tries) / math.comb(samples, tries)


def tries_of(samples: int) -> list[int]:
    """1, 2, 4, ... and `samples`: the j for which pass@j is told."""
    powers = [1 << power for power in range(samples.bit_length()) if 1 << power <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def share(values: Sequence[float]) -> Estimate:
    """The mean of values from 0 to 1, one for each prompt.

    Exact (Clopper and Pearson 1934) where they are all 0 or 1. Where they are all the same, too: a bootstrap
    would see no spread, so the bound is on the share of prompts that differ, though none was met.
    """
    mean, count = math.fsum(values) / len(values), len(values)
    if all(value in (0.0, 1.0) for value in values):
        solved = round(math.fsum(values))
        return Estimate(mean, 1.0 - _at_most(count - solved, count), _at_most(solved, count), EXACT)
    if min(values) == max(values):
        others = _at_most(0, count)
        return Estimate(mean, mean * (1 - others), mean + (1 - mean) * others, EXACT)
    low, high = _bootstrap(values)
    return Estimate(mean, low, high, BOOTSTRAP)


def mean(values: Sequence[float]) -> Estimate:
    """The mean of values of any range, one for each prompt; no interval where all are the same."""
    middle = math.fsum(values) / len(values)
    if min(values) == max(values):
        return Estimate(middle, None, None, NONE)
    low, high = _bootstrap(values)
    return Estimate(middle, low, high, BOOTSTRAP)


def _at_most(events: int, trials: int) -> float:
    """Upper end of the two-sided interval of a share."""
    return upper_bound(events, trials, (1 + CONFIDENCE) / 2)


def _bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Percentiles of the means of resampled prompts, widened for small samples.

    The percentiles are those that give Student's interval where the means are normal: Hesterberg 2015, "What
    teachers should know about the bootstrap", "expanded percentile". Plain ones are too narrow below 50 or so.
    """
    data, count = np.asarray(values, np.float64), len(values)
    generator = np.random.default_rng(SEED)
    rows = max(1, BLOCK // count)
    means: list[NDArray[np.float64]] = []
    for start in range(0, RESAMPLES, rows):
        drawn = generator.integers(0, count, (min(rows, RESAMPLES - start), count))
        means.append(data[drawn].mean(axis=1))
    tail = NormalDist().cdf(-math.sqrt(count / (count - 1)) * _student((1 + CONFIDENCE) / 2, count))
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def _student(probability: float, count: int) -> float:
    """Quantile of Student's t with count - 1 degrees of freedom.

    Abramowitz and Stegun 26.7.5; within 1 % at 95 % from 4 degrees of freedom on.
    """
    z, free = NormalDist().inv_cdf(probability), max(1, count - 1)
    terms: Sequence[Callable[[], float]] = (
        lambda: (z**3 + z) / 4,
        lambda: (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        lambda: (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term() / free**power for power, term in enumerate(terms, start=1))
