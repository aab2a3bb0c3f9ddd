"""From honest rollouts to bounds: quantiles, tails, error rates. Pure: no engine, no clock.

A rejecting bound is never below what an honest rollout was seen to measure, and every error rate is stated
with the number of rollouts that it was counted on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...protocol.manifests import ProofContract, Thresholds
from ...protocol.reputation import CLIP_NATS
from ...protocol.rollouts import Evidence
from ..ops.errors import UsageError
from .judge import BUILT_IN, FIELDS, judge

Values = NDArray[np.float64]

BEYOND = 1e-5
"""Share of honest rollouts that a rejecting bound may cost, for each measure."""
SUSPECT = 0.01
"""Share of honest rollouts that may be above any suspecting bound: protocol/reputation.py counts on it."""
SAFETY = 1.5
"""Rejecting bounds are at least this x the 99.9 % quantile: other devices, other batches."""
SEEN = 1.2
"""... and this x the largest that was seen,"""
SEEN_MAX = 2.0
"""or this, for the largest difference in a rollout: one improbable token makes a long tail."""
PRIOR = 10
"""So many likelihood ratios as they should be are added to those that were seen."""
FEWEST = 16
"""Honest rollouts below which there is nothing to calculate with."""
SHARES = (0.5, 0.9, 0.99, 0.999)
"""Quantiles of the table; the largest value follows."""

REJECT_FLOOR, _suspect_floor = BUILT_IN["float32"]
SUSPECT_FLOOR = msgspec.structs.replace(_suspect_floor, other_policy=3.0)
"""No bound is below these: in float32 honest noise is so small that another BLAS would be above it."""


@dataclass(frozen=True)
class Bands:
    """Bounds in the form in which a run manifest holds them."""

    reject: Thresholds
    suspect: Thresholds
    other_scale: float
    """See other_scale()."""

    def contract(self, contract: ProofContract) -> ProofContract:
        """`contract` with these bounds."""
        return msgspec.structs.replace(
            contract, reject=self.reject, suspect=self.suspect, other_scale=self.other_scale
        )


@dataclass(frozen=True)
class FalsePositives:
    """Errors on honest rollouts that had no part in the bounds (two halves, each judged by the other)."""

    rollouts: int
    rejected: int
    suspected: int
    rejected_at_most: float
    """95 % upper bound of the share, Clopper-Pearson."""
    suspected_at_most: float


def bands(honest: Sequence[Evidence]) -> Bands:
    """Bounds for rollouts like `honest`. Raises UsageError if they are too few or not numbers."""
    if len(honest) < FEWEST:
        raise UsageError(
            f"{len(honest)} honest rollouts are too few for bounds: ask for {FEWEST} or more (--rollouts)"
        )
    columns = {name: column(honest, name) for name in FIELDS}
    reject = {
        name: max(_reject(name, values), getattr(REJECT_FLOOR, name))
        for name, values in columns.items()
    }
    wanted = {
        name: max(value, getattr(SUSPECT_FLOOR, name)) for name, value in _suspect(columns).items()
    }
    suspect = {name: min(value, reject[name]) for name, value in wanted.items()}
    scale = other_scale(columns["other_policy"])
    return Bands(Thresholds(**reject), Thresholds(**suspect), scale)


def other_scale(nats: Values) -> float:
    """The largest s <= 1 for which the mean of e^(s x) over honest rollouts is surely at most 1; 0 if none is.

    The sequential test for another policy needs just that (protocol/reputation.py: ban_test). A log-likelihood
    ratio has it at s = 1; what auditor and workers round in common spoils it. Surely: the mean and 1.64 of its
    standard errors; each x s counts up to the test's own clip.
    """

    def holds(scale: float) -> bool:
        found = np.exp(np.clip(nats * scale, -CLIP_NATS, CLIP_NATS))
        return float(found.mean() + 1.64 * found.std() / math.sqrt(len(found))) <= 1.0

    return next((step / 64 for step in range(64, 0, -1) if holds(step / 64)), 0.0)


def column(honest: Sequence[Evidence], name: str) -> Values:
    """One measure of all rollouts [N]. Raises UsageError if one of them is not a number."""
    values = np.array([getattr(one, name) for one in honest], np.float64)
    if not np.isfinite(values).all():
        raise UsageError(
            f"an honest rollout measured {name} = {values[~np.isfinite(values)][0]}: "
            "this engine and the auditor do not compute the same model"
        )
    return values


def tail(values: Values, beyond: float) -> float:
    """What a share `beyond` of rollouts will exceed, also where that is rarer than one in len(values).

    Peaks over a threshold with an exponential tail (Pickands 1975, shape 0): above the u that k of N
    values exceed, with mean excess m, a share p lies above u + m ln(k / (N p)). k is the top 1 %, but
    10 at least; m is its upper 95 % bound, mean / (1 - 1.64 / sqrt(k)).
    """
    ordered = np.sort(values)
    count = len(ordered)
    top = min(max(10, math.ceil(count / 100)), count - 1)
    start = float(ordered[count - top - 1])
    excess = float(np.mean(ordered[count - top :])) - start
    excess /= 1 - 1.64 / math.sqrt(top)
    return start + excess * max(0.0, math.log(top / (count * beyond)))


def upper_bound(events: int, trials: int, confidence: float = 0.95) -> float:
    """Largest probability under which `events` or fewer in `trials` are not rarer than 1 - confidence.

    One-sided Clopper and Pearson (1934), by bisection; 3 / trials for no events ("rule of three").
    """
    if trials == 0 or events >= trials:
        return 1.0
    low, high = events / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if 1 - at_least(events + 1, trials, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def at_least(events: int, trials: int, probability: float) -> float:
    """P(X >= events) for X ~ Binomial(trials, probability), 0 < probability < 1."""
    below = math.fsum(_exactly(count, trials, probability) for count in range(events))
    return max(0.0, 1 - below)


def _exactly(events: int, trials: int, probability: float) -> float:
    ways = math.lgamma(trials + 1) - math.lgamma(events + 1) - math.lgamma(trials - events + 1)
    log = ways + events * math.log(probability) + (trials - events) * math.log1p(-probability)
    return math.exp(log)


def surely_below(trials: int, share: float, confidence: float = 0.95) -> int:
    """The most events of which upper_bound() says that they are no more than `share`; -1 if none are."""
    chance, events = 0.0, -1
    while (chance := chance + _exactly(events + 1, trials, share)) <= 1 - confidence:
        events += 1
    return events


def false_positives(honest: Sequence[Evidence], contract: ProofContract) -> FalsePositives:
    """Judge each half of `honest` by bounds made of the other half."""
    rejected = suspected = 0
    for mine, other in ((honest[::2], honest[1::2]), (honest[1::2], honest[::2])):
        if len(other) < FEWEST:
            continue
        bound = bands(other).contract(contract)
        found = [judge(one, bound) for one in mine]
        rejected += sum(one.reason is not None for one in found)
        suspected += sum(one.suspect for one in found)
    trials = len(honest) if len(honest) >= 2 * FEWEST else 0
    return FalsePositives(
        trials, rejected, suspected, upper_bound(rejected, trials), upper_bound(suspected, trials)
    )


def quantiles(honest: Sequence[Evidence]) -> dict[str, list[float]]:
    """Per measure: the quantiles SHARES and the largest value."""
    found: dict[str, list[float]] = {}
    for name in FIELDS:
        values = column(honest, name)
        found[name] = [*map(float, np.quantile(values, SHARES)), float(values.max())]
    return found


def d_prime(honest: Sequence[Evidence], others: Sequence[Evidence]) -> float:
    """Distance of two groups by their fingerprints, in standard deviations (pooled)."""
    ours, theirs = column(honest, "fingerprint"), column(others, "fingerprint")
    spread = math.sqrt((float(ours.var()) + float(theirs.var())) / 2)
    return (float(theirs.mean()) - float(ours.mean())) / max(spread, 1e-12)


def ratio_tail(values: Values, beyond: float) -> float:
    """As tail(), for log-likelihood ratios, of which only those above 0 speak against anybody.

    Were the noise as modelled, a share exp(-t) of honest ones at most would exceed t (Ville 1939). It is
    not quite (neighbouring tokens share their noise), so the scale is fitted: the mean of those above 0,
    with PRIOR more of 1 nat.
    """
    above = values[values > 0]
    scale = max(1.0, (float(above.sum()) + PRIOR) / (len(above) + PRIOR))
    share = (len(above) + 1) / (len(values) + 1)
    return scale * max(0.0, math.log(share / beyond))


def _reject(name: str, values: Values) -> float:
    rare = float(np.quantile(values, 0.999, method="higher"))
    seen = SEEN_MAX if name.endswith("_max") else SEEN
    return max(SAFETY * rare, _tail(name, values, BEYOND), seen * float(values.max()))


def _tail(name: str, values: Values, beyond: float) -> float:
    return (ratio_tail if name == "other_policy" else tail)(values, beyond)


def _suspect(columns: Mapping[str, Values]) -> dict[str, float]:
    """Bounds that a share SUSPECT of honest rollouts, at most, exceeds in any measure (95 % confident).

    All at the same rank: a rank of its own for every measure would suspect six times as many. So few
    rollouts that not even their largest measures are that rare are extrapolated instead. No factor is
    put on top: other models start just above, and a device that doubles the share drives no test upwards
    (that takes one suspect in five).
    """
    count = len(next(iter(columns.values())))
    beyond = surely_below(count, SUSPECT)
    level = _joint_rank(list(columns.values()), max(beyond, 0))
    found = {name: float(np.sort(values)[level]) for name, values in columns.items()}
    if beyond < 0:
        rare = SUSPECT / len(columns)
        found = {
            name: max(value, _tail(name, columns[name], rare)) for name, value in found.items()
        }
    return found


def _joint_rank(columns: Sequence[Values], beyond: int) -> int:
    """The rank that `beyond` rollouts, at most, are above in any column."""
    ranks = [np.searchsorted(np.sort(values), values, side="left") for values in columns]
    worst = np.sort(np.max(np.stack(ranks), axis=0))
    return int(worst[len(worst) - 1 - beyond])
