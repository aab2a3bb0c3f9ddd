"""From what was found of each token to the few numbers of a branch.

A mean counts a short branch as if it had 64 tokens, so that one near tie or odd token in it is no fault.
Infinity stays infinity: no mean and no maximum here may turn what is not a number into a small one.
"""

from collections.abc import Sequence
from math import inf, isfinite, log, sqrt

import numpy as np
from numpy.typing import NDArray

from ..inference.fingerprint import Compared, Hidden, Projection
from .auditor import Measured

FEWEST = 64
"""Tokens over which a mean is taken at least."""
CLIP = 1.0
"""Nats; most that one token adds to the mean margin."""
FLOOR = 2.0**-20
"""Mean squared relative difference that is below what any proof resolves (a quarter of a bf16's last bit)."""


Numbers = NDArray[np.float64]


def summarize(
    *,
    margins: Numbers,
    apart: Numbers,
    fingerprint: Projection,
    proofs: Sequence[tuple[bytes, int]],
    projected: Hidden,
    others: Sequence[Hidden],
) -> Measured:
    """The measures of one branch of S sampled tokens.

    `margins` and `apart` (differences of logprobs) are [S]; `projected` hidden states and each of `others` are
    [S, 7]; `proofs` are (bytes, tokens) of each reply and must have been checked. Other policies whose states
    are not finite are left out.
    """
    margins, apart = _infinite(margins), _infinite(np.abs(apart))
    tokens = len(margins)
    compared = _compare(fingerprint, proofs, projected, others)
    return Measured(
        tokens=tokens,
        fingerprint=_distance(compared, proofs),
        sampling=float(np.minimum(margins, CLIP).sum()) / max(tokens, FEWEST),
        sampling_max=float(margins.max()),
        logprob=float(apart.sum()) / max(tokens, FEWEST),
        logprob_max=float(apart.max()),
        other_policy=_other_policy(compared),
    )


def _infinite(values: Numbers) -> Numbers:
    """Whatever is not a number is infinitely large."""
    return np.where(np.isfinite(values), values, inf)


def _compare(
    fingerprint: Projection,
    proofs: Sequence[tuple[bytes, int]],
    projected: Hidden,
    others: Sequence[Hidden],
) -> list[Compared]:
    """One per reply; empty if the own states are not finite."""
    if not np.isfinite(projected).all():
        return []
    finite = [one for one in others if np.isfinite(one).all()]
    found: list[Compared] = []
    at = 0
    for proof, tokens in proofs:
        rows = slice(at, at + tokens)
        rest = [one[rows] for one in finite]
        found.append(fingerprint.compare_projected(proof, projected[rows], rest))
        at += tokens
    return found


def root_mean(apart: Numbers) -> float:
    """Root mean square of the relative distances of tokens [S], FEWEST at least, as _distance()."""
    return float(np.sqrt((apart**2).sum() / max(len(apart), FEWEST)))


def _distance(compared: Sequence[Compared], proofs: Sequence[tuple[bytes, int]]) -> float:
    """Root mean square over tokens, FEWEST at least: of few tokens it scatters, and the honest extremes of
    short replies would set the bound that other weights have to exceed."""
    if not compared:
        return inf
    tokens = [count for _, count in proofs]
    squares = sum(n * one.distance**2 for n, one in zip(tokens, compared, strict=True))
    distance = sqrt(squares / max(sum(tokens), FEWEST))
    return distance if isfinite(distance) else inf


def _other_policy(compared: Sequence[Compared]) -> float:
    """Nats by which the likeliest other policy explains the proof better than the claimed one.

    The generalised likelihood ratio of two normal models whose variance is estimated from the same
    `samples` residuals: (samples / 2) ln(own / other), summed over replies.
    """
    if not compared or not compared[0].others:
        return 0.0
    totals = [0.0] * len(compared[0].others)
    for one in compared:
        floor = one.samples * FLOOR
        for place, other in enumerate(one.others):
            if one.samples:
                totals[place] += one.samples / 2 * log((one.own + floor) / (other + floor))
    return max(totals) if all(map(isfinite, totals)) else inf
