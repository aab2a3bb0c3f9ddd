"""What all audits of a run have in common: a file of its own, because the process that audits is told it."""

from dataclasses import dataclass
from pathlib import Path

from ...protocol.manifests import AdapterContract, RunManifest


@dataclass(frozen=True)
class AuditTerms:
    """What all audits of a run have in common."""

    model_dir: Path
    temperature: float
    dtype: str
    """The run's numerics class: the prefill rounds as the workers do, so much of the rounding cancels."""
    device: str
    adapters: AdapterContract | None = None
    """Of a run whose states are adapters: the weights in `model_dir` are what they adapt."""
    base_state: bytes = b""
    """Digest of these."""


def terms(model_dir: Path, run: RunManifest, device: str) -> AuditTerms:
    """The terms of `run` on `device` ("auto" is cuda where there is one)."""
    proofs = run.proofs
    return AuditTerms(
        model_dir,
        run.sampling.temperature,
        proofs.dtype,
        device,
        run.adapters,
        run.model.base_state,
    )
