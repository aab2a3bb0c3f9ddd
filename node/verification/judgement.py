"""Judge measurements by the manifest's bounds, and attribute faults to pipeline stages.

Pure functions, with the same result on every machine. bounds.py makes the bounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ...protocol.errors import Reason
from ...protocol.manifests import ProofContract, Thresholds
from ...protocol.reputation import Outcome
from ...protocol.rollouts import Evidence

CLEAR = 0.5
"""Share of the suspect bound below which an input counts as right if the output is suspect."""

REASONS: dict[str, Reason] = {
    "fingerprint": Reason.WRONG_MODEL,
    "other_policy": Reason.WRONG_POLICY,
    "sampling_max": Reason.BAD_SAMPLING,
    "sampling": Reason.BAD_SAMPLING,
    "logprob_max": Reason.BAD_LOGPROBS,
    "logprob": Reason.BAD_LOGPROBS,
    "routing_max": Reason.BAD_ROUTES,
    "routing": Reason.BAD_ROUTES,
}
"""Reason of each measure, in the order of blame: the model first, as it affects all others."""


@dataclass(frozen=True)
class Judgement:
    """Reason and detail of a rejection, or None; `suspect` counts in the sequential test."""

    reason: Reason | None
    detail: str
    suspect: bool


def judge(evidence: Evidence, contract: ProofContract) -> Judgement:
    """Judge one audited rollout."""
    fault = first_above(evidence, contract.reject)
    suspect = first_above(evidence, contract.suspect) != ""
    if not fault:
        return Judgement(None, "", suspect)
    value, bound = getattr(evidence, fault), getattr(contract.reject, fault)
    detail = f"{fault} is {value:.4g} over {evidence.tokens} tokens, at most {bound:.4g} is allowed"
    return Judgement(REASONS[fault], detail, True)


def first_above(evidence: Evidence, bounds: Thresholds) -> str:
    """Find the first measure above its bound; an empty string if none is."""
    for name in REASONS:
        # written so that NaN is above every bound
        if not getattr(evidence, name) <= getattr(bounds, name):
            return name
    return ""


@dataclass(frozen=True)
class StageAttribution:
    """Stages that may have caused an audit's finding on a rollout."""

    group: int
    rollout: int
    distances: tuple[float, ...]
    outcome: Outcome
    stages: tuple[int, ...]
    """Candidate stages, one of them at fault; empty if nothing is wrong, or no boundaries were stated."""
    other_policy: float = 0.0
    """Copy of the evidence's value: the stage that stayed on another version cannot be identified."""

    @property
    def named(self) -> int | None:
        """The only stage that may have caused it; None if there are several or none."""
        return self.stages[0] if len(self.stages) == 1 else None


def blame(
    evidence: Evidence, judgement: Judgement, distances: Sequence[float], contract: ProofContract
) -> StageAttribution:
    """Attribute a judgement to stages by the `distances` at a rollout's boundaries.

    A stage with a right input and a wrong output computed something wrong. If several stages may have caused a
    fault, all of them are returned, so that no honest one is blamed. Without distances no stage is returned:
    stages that have left may have made some of the rollout. The last output feeds the head; `evidence` measures
    it. Boundaries have the same bounds: honest noise grows with every layer, and at the last boundary is about
    as large as at the end (docs/proofs.md).
    """
    outputs = (*distances, evidence.fingerprint)
    outcome: Outcome = "clean"
    stages: tuple[int, ...] = ()
    if not distances:
        outcome = "rejected" if judgement.reason else "suspect" if judgement.suspect else "clean"
    elif judgement.reason is not None:
        outcome = "rejected"
        stages = _rejected(judgement.reason, outputs, contract)
    elif judgement.suspect:
        outcome = "suspect"
        stages = _suspect(evidence, outputs, contract.suspect)
    elif off := _first_off(distances, contract.reject.fingerprint, inf):
        # The output is right, so all states were: any stage that passed the statement on may have changed it.
        outcome = "suspect"
        stages = (0, *range(max(1, off[0]), len(outputs)))
    return StageAttribution(
        evidence.group,
        evidence.rollout,
        tuple(distances),
        outcome,
        stages,
        evidence.other_policy,
    )


def name_stages(attribution: StageAttribution, nodes: Sequence[bytes]) -> str:
    """Name the stages for a rejection's detail; `nodes` are those of all stages."""
    last = len(nodes) - 1
    named = [f"{stage} of 0..{last} ({nodes[stage].hex()[:8]})" for stage in attribution.stages]
    return f"stage {' or '.join(named)}" if named else ""


def _rejected(reason: Reason, outputs: Sequence[float], contract: ProofContract) -> tuple[int, ...]:
    if reason is Reason.WRONG_POLICY:
        return tuple(range(len(outputs)))  # any of them can have stayed on another version
    stages = _first_off(outputs, contract.reject.fingerprint, contract.suspect.fingerprint)
    return stages or _drawing(outputs)


def _suspect(evidence: Evidence, outputs: Sequence[float], bounds: Thresholds) -> tuple[int, ...]:
    if not evidence.other_policy <= bounds.other_policy:
        return tuple(range(len(outputs)))
    bound = bounds.fingerprint
    return _first_off(outputs, bound, CLEAR * bound) or _drawing(outputs)


def _first_off(outputs: Sequence[float], bound: float, clear: float) -> tuple[int, ...]:
    """Find the first stage with output above `bound`, and those just before it not below `clear`."""
    # written so that NaN is above every bound
    off = next((stage for stage, out in enumerate(outputs) if not out <= bound), None)
    if off is None:
        return ()
    first = off
    while first > 0 and not outputs[first - 1] <= clear:
        first -= 1
    return tuple(range(first, off + 1))


def _drawing(outputs: Sequence[float]) -> tuple[int, ...]:
    """Blame sampling if states are right: the last stage samples, the first states the tokens."""
    return (0, len(outputs) - 1)
