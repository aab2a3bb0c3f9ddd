"""Measures of a branch, computed from those of its tokens; and the checks of an item.

Every Auditor summarizes with these functions, so that measures mean the same. numpy only: no torch. A number
that is not finite counts as infinitely far off.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import inf, isfinite, log, sqrt

import numpy as np
from numpy.typing import NDArray

from ...protocol.manifests import RouteShape
from ..inference.fingerprint import (
    TOKEN_BYTES,
    BadProof,
    Compared,
    Hidden,
    Projection,
    Replayed,
    split,
    sums,
    token_distances,
)
from ..models.routes import route_fault
from ..models.support import support_fault
from .auditor import AuditItem, Measured, Unreadable

Numbers = NDArray[np.float64]

FEWEST = 64
"""Least divisor of a mean over tokens, so that one near tie in a short branch is no fault."""
CLIP = 1.0
"""Most that one token adds to the mean margin, nats."""
SPREAD = 8.0
"""Least divisor of a slope over logprobs: a branch of nearly equal ones has none."""
FLOOR = 2.0**-20
"""Mean squared relative difference below a proof's resolution (a quarter of bf16's last bit)."""

_PROJECTION = Projection()


# -- checks of an item -----------------------------------------------------------------------------


def check_items(
    items: Sequence[AuditItem], vocabulary: int, layers: int, routes: RouteShape | None = None
) -> list[Unreadable | None]:
    """Explain why items cannot be measured by a model of `layers` layers; None for each that can.

    `routes` is the shape of routes in their run.
    """
    details = [
        _fault(item, vocabulary)
        or _boundary_fault(item, layers)
        or _route_fault(item, routes)
        or _support_fault(item, vocabulary)
        for item in items
    ]
    sound = [item for item, detail in zip(items, details, strict=True) if not detail]
    proofs = iter(_proof_faults(sound))
    return [Unreadable(detail, proof=False) if detail else next(proofs) for detail in details]


def _proof_faults(items: Sequence[AuditItem]) -> list[Unreadable | None]:
    """Explain what is wrong with the proofs of items: all at once, or one by one if any is bad."""
    try:
        _PROJECTION.check_all([reply for item in items for reply in split_proof(item)])
    except BadProof as error:
        if len(items) == 1:
            return [Unreadable(str(error), proof=True)]
        return [fault for item in items for fault in _proof_faults([item])]
    return [None] * len(items)


def split_proof(item: AuditItem) -> list[tuple[bytes, int]]:
    """Split a proof into (bytes, tokens) of each reply. Raises BadProof if the sizes do not add up."""
    return split(item.proof, [reply.end - reply.start for reply in item.replies], _PROJECTION)


def _fault(item: AuditItem, vocabulary: int) -> str:
    tokens = item.token_ids
    if not tokens or not 0 <= min(tokens) <= max(tokens) < vocabulary:
        return f"tokens outside 0..{vocabulary - 1}"
    if not item.replies or not _in_order(item):
        return "its replies are empty, overlap or lie outside the branch"
    if any(not 0 <= reply.seed < 2**63 for reply in item.replies):
        return "a seed outside 0..2**63-1"
    sampled = sum(reply.end - reply.start for reply in item.replies)
    if not sampled == len(item.logprobs) == len(item.versions):
        return (
            f"{len(item.logprobs)} logprobs for {sampled} tokens of {len(item.versions)} versions"
        )
    if sorted(item.versions) != list(item.versions):
        return "its policy versions go back"
    claimed = item.drawn
    if claimed and not (len(claimed) == sampled and 0 <= min(claimed) <= max(claimed) < vocabulary):
        return f"{len(claimed)} tokens drawn at {sampled} positions, or outside 0..{vocabulary - 1}"
    return ""


def _route_fault(item: AuditItem, shape: RouteShape | None) -> str:
    if not item.routes:
        return ""
    if shape is None:
        return "routes in a run that has none"
    return route_fault(item.routes, len(item.versions), shape)


def _support_fault(item: AuditItem, vocabulary: int) -> str:
    if not item.support:
        return ""
    if not item.temperature or not (item.top_k or item.top_p < 1):
        return "supports of tokens that are drawn from all"
    return support_fault(item.support, drawn_tokens(item), vocabulary, item.top_k, item.top_p)


def drawn_tokens(item: AuditItem) -> list[int]:
    """List the tokens that an item claims to have drawn [S]."""
    if item.drawn:
        return [*item.drawn]
    return [token for reply in item.replies for token in item.token_ids[reply.start : reply.end]]


def _boundary_fault(item: AuditItem, layers: int) -> str:
    if not item.boundaries:
        return ""
    heights = [0, *(boundary.layers for boundary in item.boundaries), layers]
    if any(low >= high for low, high in pairwise(heights)):
        return f"boundaries after layers that the model does not have, or out of order: {heights[1:-1]}"
    if any(len(boundary.proof) != TOKEN_BYTES * len(item.versions) for boundary in item.boundaries):
        return "boundaries of another number of tokens"
    return ""


def _in_order(item: AuditItem) -> bool:
    """Return whether replies are in order, disjoint, and each after another token."""
    end = 1
    for reply in item.replies:
        if not end <= reply.start < reply.end:
            return False
        end = reply.end
    return end <= len(item.token_ids)


# -- from the numbers of each token to those of a branch -------------------------------------------


Compares = Sequence[tuple[int, Compared]]
"""(tokens, comparison) of each reply of a branch."""


def summarize(
    margins: Sequence[NDArray[np.floating]],
    claimed: Sequence[Sequence[float]],
    logprobs: Sequence[NDArray[np.floating]],
    compared: Sequence[Compares],
) -> list[Measured]:
    """Summarize branches of S sampled tokens, one entry each.

    `margins`, `claimed` and recomputed `logprobs` are [S]; `compared` is compare_replies() of the proofs.
    """
    if not margins:
        return []
    tokens = [len(branch) for branch in margins]
    margin = _infinite(np.concatenate(margins, dtype=np.float64))
    own = np.concatenate(logprobs, dtype=np.float64)
    stated = np.concatenate([np.asarray(branch, np.float64) for branch in claimed])
    logprob = _infinite(np.abs(own - stated))
    starts = np.cumsum([0, *tokens[:-1]])
    columns = (
        sums(np.minimum(margin, CLIP), tokens),
        np.maximum.reduceat(margin, starts),
        sums(logprob, tokens),
        np.maximum.reduceat(logprob, starts),
    )
    return [
        Measured(
            group=0,
            rollout=0,
            tokens=count,
            fingerprint=_distance(proof),
            sampling=sampling / max(count, FEWEST),
            sampling_max=sampling_max,
            logprob=logprob / max(count, FEWEST),
            logprob_max=logprob_max,
            other_policy=_other_policy([comparison for _, comparison in proof]),
            means=_means(count, proof, line),
        )
        for count, proof, line, sampling, sampling_max, logprob, logprob_max in zip(
            tokens,
            compared,
            _lines(stated, own, tokens),
            *(column.tolist() for column in columns),
            strict=True,
        )
    ]


def _lines(stated: Numbers, own: Numbers, tokens: Sequence[int]) -> list[tuple[float, float]]:
    """Return (mean, slope) of stated less own logprobs over their mean, for each branch."""
    with np.errstate(invalid="ignore"):
        apart, middle = np.clip(stated - own, -CLIP, CLIP), (stated + own) / 2
        products = np.stack([apart, middle, middle**2, middle * apart])
        lines: list[tuple[float, float]] = []
        for count, (y, x, xx, xy) in zip(tokens, sums(products, tokens).T, strict=True):
            slope = (xy - x * y / count) / max(xx - x * x / count, SPREAD)
            lines.append((float(y) / max(count, FEWEST), float(slope)))
    return lines


def _means(tokens: int, compared: Compares, line: tuple[float, float]) -> tuple[float, ...]:
    """Return Evidence.means of a branch; () if one of them is not finite."""
    if not compared:
        return ()
    shifts = np.sum([comparison.shift for _, comparison in compared], axis=0) / max(tokens, FEWEST)
    means = (*line, *shifts.tolist())
    return means if all(map(isfinite, means)) else ()


def compare_replies(
    proofs: Sequence[Sequence[tuple[bytes, int]]],
    projected: Sequence[Hidden],
    others: Sequence[Sequence[Hidden]],
) -> list[Compares]:
    """Compare the proofs of branches, one entry each, with projected states.

    `proofs` are those of the replies (bytes, tokens); `projected` states and each of `others` are [S, 7]. A
    branch has no comparison if its own states are not finite; other policies with states that are not finite
    are left out. The proofs must have been checked.
    """
    replies: list[Replayed] = []
    lengths: list[list[int]] = []
    for parts, own, rest in zip(proofs, projected, others, strict=True):
        known = parts if np.isfinite(own).all() else []
        finite = [states for states in rest if np.isfinite(states).all()]
        lengths.append([tokens for _, tokens in known])
        start = 0
        for proof, tokens in known:
            rows = slice(start, start := start + tokens)
            replies.append(Replayed(proof, own[rows], [states[rows] for states in finite]))
    comparisons = iter(_PROJECTION.compare_projected(replies))
    return [[(tokens, next(comparisons)) for tokens in branch] for branch in lengths]


def _infinite(values: Numbers) -> Numbers:
    """Replace values that are not finite by infinity."""
    return np.where(np.isfinite(values), values, inf)


def _distance(compared: Compares) -> float:
    """Return the root mean square over tokens, FEWEST at least.

    Over fewer tokens it scatters, and the honest extremes of short replies would set the bound that other
    weights have to exceed.
    """
    if not compared:
        return inf
    squares = sum(tokens * comparison.distance**2 for tokens, comparison in compared)
    distance = sqrt(squares / max(sum(tokens for tokens, _ in compared), FEWEST))
    return distance if isfinite(distance) else inf


def _other_policy(compared: Sequence[Compared]) -> float:
    """Compute the log-likelihood ratio, nats, of the likeliest other policy to the claimed one.

    The generalised likelihood ratio of two normal models whose variance is estimated from the same `samples`
    residuals: (samples / 2) ln(own / other), summed over replies.
    """
    if not compared or not compared[0].others:
        return 0.0
    totals = [0.0] * len(compared[0].others)
    for comparison in compared:
        floor = comparison.samples * FLOOR
        for place, other in enumerate(comparison.others):
            if comparison.samples:
                totals[place] += (
                    comparison.samples / 2 * log((comparison.own + floor) / (other + floor))
                )
    return max(totals) if all(map(isfinite, totals)) else inf


def routing(off_routes: NDArray[np.floating]) -> tuple[float, float]:
    """Summarize off_routes() [S, 2] of S tokens as (Measured.routing, routing_max)."""
    shares, margins = _infinite(off_routes.astype(np.float64)).T
    return float(shares.sum()) / max(len(shares), FEWEST), float(margins.max(initial=0))


def distances(item: AuditItem, own: NDArray[np.float32]) -> tuple[float, ...]:
    """Measure the distance of the claimed states from `own` [S, boundaries, 8] at each boundary.

    Root mean square over tokens, FEWEST at least; infinite if the own states are not finite.
    """
    if not np.isfinite(own).all():
        return (inf,) * len(item.boundaries)
    apart = (
        token_distances(boundary.proof, own[:, at]) for at, boundary in enumerate(item.boundaries)
    )
    return tuple(
        sqrt(float((by_token**2).sum()) / max(len(by_token), FEWEST)) for by_token in apart
    )
