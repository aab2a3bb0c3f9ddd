"""Bounds of a run: built in, or derived from honest rollouts.

Everything that turns measurements into bounds is in this file; judgement.py applies them. A rejecting bound is
never below a measurement of an honest rollout, and every error rate is stated with the number of rollouts
behind it. No engine, no clock.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...protocol.manifests import ProofContract, Thresholds
from ...protocol.reputation import CLIP_NATS
from ...protocol.rollouts import MEASURES, Evidence
from ..config.run import FINGERPRINT, RunConfig
from ..errors import UsageError
from ..inference.numerics import engine_class
from .judgement import judge

Values = NDArray[np.float64]

BUILT_IN = {
    "float32": (
        Thresholds(0.005, 2e-4, 0.01, 2e-4, 0.01, 12.0, 0.01, 0.01),
        Thresholds(0.002, 5e-5, 0.003, 5e-5, 0.003, 4.6, 0.005, 0.003),
    ),
    "bfloat16": (
        Thresholds(0.05, 0.03, 1.0, 0.12, 1.0, 100.0, 0.04, 1.5),
        Thresholds(0.027, 0.012, 0.4, 0.08, 0.5, 41.0, 0.02, 0.9),
    ),
}
"""dtype -> (reject, suspect), each in the order of MEASURES: wide enough for other kernels and batch sizes, see
docs/proofs.md."""
PROVISIONAL = Thresholds(0.4, 0.15, 3.0, 0.5, 4.0, 1e9, 0.2, 4.0)
"""Bounds beyond any noise, for classes without measurements. Honest rollouts of a 4B model in bfloat16 (vLLM,
decoding against prefill) measure at most 0.035, 0.003, -, 0.028, 0.13; the noisiest that was seen, a random
mixture of experts whose router flips, 0.13 and 0.61 for a logprob. A random or foreign proof is about 1.4 off;
tokens of another seed score several nats below the best; a neighbouring version (the sixth) cannot be detected.
Honest routes of random mixtures of 8 layers are off in 0.058 of their experts at most, and by 1.5 (vLLM's, by
the embedded auditor); random ones in 0.87, and by 3 to 8."""
BUILT_IN_SCALE = {"float32": 1.0, "bfloat16": 0.0}
"""other_scale by dtype; in bfloat16 only honest rollouts show their other_policy."""
EXACT = (
    Thresholds(1e-3, 1e-6, 2e-5, 1e-5, 1e-4, 30.0, 1e-3, 1e-4),
    Thresholds(5e-4, 5e-7, 1e-5, 5e-6, 5e-5, 10.0, 5e-4, 5e-5),
)
"""(reject, suspect) of exact numerics, for any dtype: states are equal to the last bit, and the rest is fp32
rounding of the measures. In 4,600 honest rollouts all measures were 0, except logprobs, which are off by 3e-7
on average and by 3e-6 at most, and other_policy, which is at most 3.1 if two versions hardly differ."""

FALSE_BANS = 1e-3
"""Probability over the whole run that the sequential test bans an honest worker."""
BEYOND = 1e-5
"""Share of honest rollouts that a rejecting bound may cost, for each measure."""
SUSPECT = 0.01
"""Share of honest rollouts that may be above any suspecting bound; protocol/reputation.py relies on it."""
SAFETY = 1.5
"""Least ratio of a rejecting bound to the 99.9 % quantile, for other devices and batches."""
SEEN = 1.2
"""Least ratio of a rejecting bound to the largest observed value."""
SEEN_MAX = 2.0
"""The same for the largest difference in a rollout: one improbable token makes a long tail."""
PRIOR = 10
"""Number of likelihood ratios of 1 nat that are added to the observed ones."""
FEWEST = 16
"""Least number of honest rollouts for bounds."""

REJECT_FLOOR, _suspect_floor = BUILT_IN["float32"]
SUSPECT_FLOOR = msgspec.structs.replace(_suspect_floor, other_policy=3.0)
"""Floors of all bounds: in float32 honest noise is so small that another BLAS would exceed it."""


def exact_contract(config: RunConfig) -> ProofContract:
    """Make the proof contract of a run of exact numerics, for this machine's engine class."""
    verification = config.verification
    reject, suspect = EXACT
    return ProofContract(
        fingerprint=FINGERPRINT,
        dtype=config.engine.dtype,
        reject=reject,
        suspect=suspect,
        other_scale=1.0,
        audit_rate=verification.audit_rate,
        false_bans=FALSE_BANS,
        honest_rollouts=0,
        honest_tokens=0,
        source="built in for exact numerics",
        numerics="exact",
        engine_class=engine_class(config.engine),
    )


def proof_contract(config: RunConfig) -> ProofContract:
    """Make the run's proof contract. Raises UsageError."""
    if config.verification.numerics == "exact":
        return exact_contract(config)
    verification, dtype = config.verification, config.engine.dtype
    reject, suspect = BUILT_IN[dtype]
    source = f"built in for {dtype}"
    measured = measures_bounds(config)
    truncates = any(config.sampling_of(environment).truncates for environment in config.mixture)
    if truncates and not measured and dtype == "bfloat16":
        raise UsageError(
            "verification.bounds = built-in is for draws from all tokens, and honest work with top_p or top_k "
            "exceeds these bounds: leave the key out"
        )
    if measured:
        reject = suspect = PROVISIONAL
        source = "provisional, until the run has measured its own"
    return ProofContract(
        fingerprint=FINGERPRINT,
        dtype=dtype,
        reject=reject,
        suspect=suspect,
        other_scale=BUILT_IN_SCALE[dtype],
        audit_rate=verification.audit_rate,
        false_bans=FALSE_BANS,
        honest_rollouts=0,
        honest_tokens=0,
        source=source,
        quantization=config.engine.quantization,
        kv_cache="kept" if config.engine.keep_kv_cache else "recomputed",
        bounds="measured" if measured else "fixed",
    )


def measures_bounds(config: RunConfig) -> bool:
    """Return whether a run measures its bounds of noise itself: in bfloat16, unless fixed.

    Noise grows with the model there. In float32 the 8 bytes of a fingerprint round more than any kernel does,
    and the built-in bounds are far above both. Exact numerics have no noise to measure.
    """
    verification = config.verification
    fixed = verification.bounds == "built-in" or verification.numerics == "exact"
    return not fixed and config.engine.dtype == "bfloat16"


# -- bounds made of honest rollouts ----------------------------------------------------------------


@dataclass(frozen=True)
class Bands:
    """Bounds in the form of a run manifest."""

    reject: Thresholds
    suspect: Thresholds
    other_scale: float
    """See other_scale()."""

    def contract(self, contract: ProofContract) -> ProofContract:
        """Return `contract` with these bounds."""
        return msgspec.structs.replace(
            contract, reject=self.reject, suspect=self.suspect, other_scale=self.other_scale
        )


@dataclass(frozen=True)
class FalsePositives:
    """Errors on honest rollouts outside of the bounds' data: two halves, each judging the other."""

    rollouts: int
    rejected: int
    suspected: int
    rejected_at_most: float
    """95 % upper bound of the share, Clopper-Pearson."""
    suspected_at_most: float


def bands(honest: Sequence[Evidence]) -> Bands:
    """Derive bounds from honest rollouts. Raises UsageError if they are too few or not finite."""
    if len(honest) < FEWEST:
        raise UsageError(
            f"{len(honest)} honest rollouts are too few for bounds: {FEWEST} or more make them"
        )
    columns = {name: column(honest, name) for name in MEASURES}
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
    """Find the largest s <= 1 for which the mean of e^(s x) is surely at most 1; 0 if none.

    x is other_policy of honest rollouts; 0 of those that were not compared, which are left out. The sequential
    test for another policy needs such an s (protocol/reputation.py: ban_test). A log-likelihood ratio has it at
    s = 1; rounding that is common to auditor and workers makes it smaller. "Surely": the mean and 1.64 of its
    standard errors; each x s is clipped as in the test.
    """
    nats = nats[nats != 0.0]
    if not len(nats):
        return 0.0

    def holds(scale: float) -> bool:
        ratios = np.exp(np.clip(nats * scale, -CLIP_NATS, CLIP_NATS))
        return float(ratios.mean() + 1.64 * ratios.std() / math.sqrt(len(ratios))) <= 1.0

    return next((step / 64 for step in range(64, 0, -1) if holds(step / 64)), 0.0)


def column(honest: Sequence[Evidence], name: str) -> Values:
    """Collect one measure of all rollouts [N]. Raises UsageError if one value is not finite."""
    values = np.array([getattr(evidence, name) for evidence in honest], np.float64)
    if not np.isfinite(values).all():
        raise UsageError(
            f"an honest rollout measured {name} = {values[~np.isfinite(values)][0]}: "
            "this engine and the auditor do not compute the same model"
        )
    return values


def tail(values: Values, beyond: float) -> float:
    """Estimate the value that a share `beyond` of rollouts exceeds, even below 1 / len(values).

    Peaks over a threshold with an exponential tail (Pickands 1975, shape 0): above the u that k of N values
    exceed, with mean excess m, a share p lies above u + m ln(k / (N p)). k is the top 1 %, but 10 at least; m
    is its upper 95 % bound, mean / (1 - 1.64 / sqrt(k)).
    """
    ordered = np.sort(values)
    count = len(ordered)
    top = min(max(10, math.ceil(count / 100)), count - 1)
    start = float(ordered[count - top - 1])
    excess = float(np.mean(ordered[count - top :])) - start
    excess /= 1 - 1.64 / math.sqrt(top)
    return start + excess * max(0.0, math.log(top / (count * beyond)))


def upper_bound(events: int, trials: int, confidence: float = 0.95) -> float:
    """Find the upper confidence bound of a probability, given `events` in `trials`.

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
    """Compute P(X >= events) for X ~ Binomial(trials, probability), 0 < probability < 1."""
    below = math.fsum(_exactly(count, trials, probability) for count in range(events))
    return max(0.0, 1 - below)


def _exactly(events: int, trials: int, probability: float) -> float:
    ways = math.lgamma(trials + 1) - math.lgamma(events + 1) - math.lgamma(trials - events + 1)
    log = ways + events * math.log(probability) + (trials - events) * math.log1p(-probability)
    return math.exp(log)


def surely_below(trials: int, share: float, confidence: float = 0.95) -> int:
    """Find the most events for which upper_bound() is at most `share`; -1 if there are none."""
    chance, events = 0.0, -1
    while (chance := chance + _exactly(events + 1, trials, share)) <= 1 - confidence:
        events += 1
    return events


def false_positives(honest: Sequence[Evidence], contract: ProofContract) -> FalsePositives:
    """Count errors by judging each half of `honest` by bounds derived from the other half."""
    rejected = suspected = 0
    for mine, other in ((honest[::2], honest[1::2]), (honest[1::2], honest[::2])):
        if len(other) < FEWEST:
            continue
        bound = bands(other).contract(contract)
        judgements = [judge(evidence, bound) for evidence in mine]
        rejected += sum(judgement.reason is not None for judgement in judgements)
        suspected += sum(judgement.suspect for judgement in judgements)
    trials = len(honest) if len(honest) >= 2 * FEWEST else 0
    return FalsePositives(
        trials, rejected, suspected, upper_bound(rejected, trials), upper_bound(suspected, trials)
    )


def ratio_tail(values: Values, beyond: float) -> float:
    """Estimate a tail, as tail(), for log-likelihood ratios; only those above 0 incriminate.

    If the noise were as modelled, at most a share exp(-t) of honest ones would exceed t (Ville 1939). It is not
    quite (neighbouring tokens share their noise), so the scale is fitted: the mean of those above 0, with PRIOR
    more of 1 nat.
    """
    above = values[values > 0]
    scale = max(1.0, (float(above.sum()) + PRIOR) / (len(above) + PRIOR))
    share = (len(above) + 1) / (len(values) + 1)
    return scale * max(0.0, math.log(share / beyond))


def _reject(name: str, values: Values) -> float:
    rare = float(np.quantile(values, 0.999, method="higher"))
    factor = SEEN_MAX if name.endswith("_max") else SEEN
    return max(SAFETY * rare, _tail(name, values, BEYOND), factor * float(values.max()))


def _tail(name: str, values: Values, beyond: float) -> float:
    return (ratio_tail if name == "other_policy" else tail)(values, beyond)


def _suspect(columns: Mapping[str, Values]) -> dict[str, float]:
    """Find bounds that at most a share SUSPECT of honest rollouts exceeds in any measure.

    With 95 % confidence. All bounds are at the same rank: a separate rank for each measure would suspect six
    times as many. If there are too few rollouts for a rank that rare, it is extrapolated. No factor is added:
    other models start just above, and a device that doubles the share drives no test upwards (that takes one
    suspect in five).
    """
    count = len(next(iter(columns.values())))
    beyond = surely_below(count, SUSPECT)
    level = _joint_rank(list(columns.values()), max(beyond, 0))
    bounds = {name: float(np.sort(values)[level]) for name, values in columns.items()}
    if beyond < 0:
        rare = SUSPECT / len(columns)
        bounds = {
            name: max(value, _tail(name, columns[name], rare)) for name, value in bounds.items()
        }
    return bounds


def _joint_rank(columns: Sequence[Values], beyond: int) -> int:
    """Find the rank that at most `beyond` rollouts exceed in any column."""
    ranks = [np.searchsorted(np.sort(values), values, side="left") for values in columns]
    worst = np.sort(np.max(np.stack(ranks), axis=0))
    return int(worst[len(worst) - 1 - beyond])
