"""From what was measured to a judgement: pure, the same on every machine, every bound from the manifest."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ...protocol.errors import Reason
from ...protocol.manifests import ProofContract, Thresholds
from ...protocol.rollouts import Evidence
from ..config.run import RunConfig
from ..ops.errors import UsageError

FIELDS = tuple(field.name for field in msgspec.structs.fields(Thresholds))

BUILT_IN: dict[str, tuple[Thresholds, Thresholds]] = {
    "float32": (
        Thresholds(
            fingerprint=0.005,
            sampling=2e-4,
            sampling_max=0.01,
            logprob=2e-4,
            logprob_max=0.01,
            other_policy=12.0,
        ),
        Thresholds(
            fingerprint=0.002,
            sampling=5e-5,
            sampling_max=0.003,
            logprob=5e-5,
            logprob_max=0.003,
            other_policy=4.6,
        ),
    ),
    "bfloat16": (
        Thresholds(
            fingerprint=0.05,
            sampling=0.03,
            sampling_max=1.0,
            logprob=0.12,
            logprob_max=1.0,
            other_policy=100.0,
        ),
        Thresholds(
            fingerprint=0.027,
            sampling=0.012,
            sampling_max=0.4,
            logprob=0.08,
            logprob_max=0.5,
            other_policy=41.0,
        ),
    ),
}
"""dtype -> (reject, suspect): wide enough for other kernels and batch sizes, see docs/proofs.md."""
BUILT_IN_SCALE = {"float32": 1.0, "bfloat16": 0.0}
"""In bfloat16 only a calibration can tell how other_policy is distributed among honest workers."""


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `primerl-node calibrate` found for one model, as JSON."""

    model: str
    """Digest (hex) of the config.json that it holds for."""
    fingerprint: Literal["projection"]
    dtype: Literal["float32", "bfloat16"]
    reject: Thresholds
    suspect: Thresholds
    other_scale: Annotated[float, msgspec.Meta(ge=0, le=1)]
    honest_rollouts: Annotated[int, msgspec.Meta(ge=1)]
    honest_tokens: Annotated[int, msgspec.Meta(ge=1)]
    source: Annotated[str, msgspec.Meta(max_length=200)]
    """Executors, devices and date."""


def read_calibration(path: Path) -> Calibration:
    """Read what `calibrate` wrote. Raises UsageError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(
            f"verification.calibration: {path} cannot be used ({error}): run primerl-node calibrate"
        ) from error


def proof_contract(config: RunConfig, model: str) -> ProofContract:
    """The run's proof contract; `model` is the digest (hex) of its config.json. Raises UsageError."""
    verification, dtype = config.verification, config.engine.dtype
    reject, suspect = BUILT_IN[dtype]
    other_scale, rollouts, tokens = BUILT_IN_SCALE[dtype], 0, 0
    source = f"built in for {dtype}"
    if verification.calibration is not None:
        found = read_calibration(verification.calibration)
        wanted = (model, verification.fingerprint, dtype)
        if (found.model, found.fingerprint, found.dtype) != wanted:
            raise UsageError(
                f"verification.calibration: {verification.calibration} is of another model, "
                "fingerprint or engine.dtype: run primerl-node calibrate for this one"
            )
        reject, suspect, source = found.reject, found.suspect, found.source
        other_scale = found.other_scale
        rollouts, tokens = found.honest_rollouts, found.honest_tokens
    return ProofContract(
        fingerprint=verification.fingerprint,
        dtype=dtype,
        reject=reject,
        suspect=suspect,
        other_scale=other_scale,
        audit_rate=verification.audit_rate,
        false_bans=verification.false_bans,
        honest_rollouts=rollouts,
        honest_tokens=tokens,
        source=source,
    )


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
