"""Bounds of one class of workers, made of honest rollouts. No I/O, no clock."""

from collections.abc import Sequence

import msgspec

from ...protocol.manifests import ProofContract, Thresholds, Version
from ...protocol.numerics import ClassBounds, NumericsClass
from ...protocol.rollouts import MEASURES, Evidence
from .bounds import PROVISIONAL, Bands, bands, false_positives

ENOUGH = 64
"""Rollouts for the first bounds of a class: bands() then extrapolates both tails, and the share of honest
rollouts that they reject is below 5 %, shown with 95 % confidence."""
WIDER = 1.5
"""Bounds to reject are WIDER + ENOUGH / N times those of bands() for N rollouts, as the first rollouts of one
machine do not show the tail. Bounds to suspect are not widened: they cover the range between."""


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """One measured rollout of a reference worker."""

    node: bytes
    version: Version
    """Newest policy version that sampled any of it."""
    evidence: Evidence


def provisional(numerics: NumericsClass) -> ClassBounds:
    """Make the bounds of a class without measurements."""
    return ClassBounds(numerics, 0, PROVISIONAL, PROVISIONAL, 0.0, 0, 0)


def make_bounds(
    numerics: NumericsClass,
    references: Sequence[Reference],
    contract: ProofContract,
    *,
    number: int,
    term: int,
) -> ClassBounds:
    """Derive a class's bounds from at least ENOUGH rollouts; no wider than provisional ones."""
    measured = bands([reference.evidence for reference in references])
    factor = widening(len(references))
    reject = {name: factor * getattr(measured.reject, name) for name in MEASURES}
    # common rounding of auditor and worker scatters it without limit: the sequential test weighs it instead
    reject["other_policy"] = PROVISIONAL.other_policy
    bounds = Bands(Thresholds(**reject), measured.suspect, measured.other_scale)
    return bounds_made_of(references, bounds, numerics, contract, number=number, term=term)


def widening(rollouts: int) -> float:
    """Return how much wider bounds to reject are than those of bands() for that many rollouts."""
    return WIDER + ENOUGH / rollouts


def bounds_made_of(
    references: Sequence[Reference],
    bounds: Bands,
    numerics: NumericsClass,
    contract: ProofContract,
    *,
    number: int,
    term: int,
) -> ClassBounds:
    """Return `bounds`, no wider than provisional ones, with what they were made of."""
    honest = [reference.evidence for reference in references]
    errors = false_positives(honest, contract)
    versions = [reference.version for reference in references]
    return ClassBounds(
        numerics=numerics,
        number=number,
        reject=_narrower(bounds.reject),
        suspect=_narrower(bounds.suspect),
        other_scale=bounds.other_scale,
        rollouts=len(honest),
        tokens=sum(evidence.tokens for evidence in honest),
        term=term,
        first_version=min(versions),
        last_version=max(versions),
        rejected_at_most=errors.rejected_at_most,
        suspected_at_most=errors.suspected_at_most,
    )


def _narrower(bounds: Thresholds) -> Thresholds:
    return Thresholds(
        *(min(getattr(bounds, name), getattr(PROVISIONAL, name)) for name in MEASURES)
    )
