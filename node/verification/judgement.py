"""From what was measured to a judgement: pure, the same on every machine, every bound from the manifest."""

from dataclasses import dataclass

from ...protocol.errors import Reason
from ...protocol.manifests import ProofContract, Thresholds
from ...protocol.rollouts import Evidence

REASONS: dict[str, Reason] = {
    "fingerprint": Reason.WRONG_MODEL,
    "other_policy": Reason.WRONG_POLICY,
    "sampling_max": Reason.BAD_SAMPLING,
    "sampling": Reason.BAD_SAMPLING,
    "logprob_max": Reason.BAD_LOGPROBS,
    "logprob": Reason.BAD_LOGPROBS,
}
"""What is measured, in the order in which it is blamed: the model first, for it moves all the others."""


@dataclass(frozen=True)
class Judgement:
    """`reason` and `detail` of a rejection, or None; `suspect` counts in the sequential test."""

    reason: Reason | None
    detail: str
    suspect: bool


def judge(evidence: Evidence, contract: ProofContract) -> Judgement:
    """Judge one audited rollout."""
    fault = _first_above(evidence, contract.reject)
    suspect = _first_above(evidence, contract.suspect) != ""
    if not fault:
        return Judgement(None, "", suspect)
    found, bound = getattr(evidence, fault), getattr(contract.reject, fault)
    detail = f"{fault} is {found:.4g} over {evidence.tokens} tokens, at most {bound:.4g} is allowed"
    return Judgement(REASONS[fault], detail, True)


def _first_above(evidence: Evidence, bounds: Thresholds) -> str:
    for name in REASONS:
        # written so that NaN is above every bound
        if not getattr(evidence, name) <= getattr(bounds, name):
            return name
    return ""
