"""Audits for programs that use primerl as a library: draw a reply with its proof, verify the proof of a reply.

These names stay as they are from release to release (docs/library.md). It takes the model's files and the
weights of the versions that the replies claim, and no network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..config.engine import EngineConfig
from ..inference.engine import GenerateRequest
from ..verification.auditor import AuditItem, AuditTerms, Measured, SampledSpan
from ..verification.bounds import BUILT_IN, FINGERPRINT
from ..verification.judgement import REASONS, first_above
from ..weights.state import State

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class AuditResult:
    """The verdict on one item."""

    reason: str
    """Reason code of a rejection, as in docs/troubleshooting.md; empty if the item is accepted."""
    detail: str
    """The measure and its bound, in words."""
    suspect: bool
    """Beyond what one of a hundred honest rollouts is: many of them are evidence, one is not."""
    measured: Measured | None
    """All measures; None of an item that cannot be read."""


def audit(
    model_dir: Path,
    items: Sequence[AuditItem],
    states: Mapping[int, State],
    *,
    dtype: Dtype = "float32",
    device: str = "auto",
) -> list[AuditResult]:
    """Measure each item by a prefill under the versions that it claims, and judge it by the built-in bounds.

    `model_dir` has config and tokenizer, `states` the weights of every version that is claimed. It computes in
    this process. A run in bfloat16 measures bounds of its own, which are narrower (docs/proofs.md). Raises
    EngineError if it cannot compute at all, or a state is missing.
    """
    from ..verification.prefill_audit import PrefillAudit

    prefill = PrefillAudit(AuditTerms(str(model_dir), dtype, device))
    prefill.prepare()
    reject, suspect = BUILT_IN[dtype]
    results: list[AuditResult] = []
    for measured in prefill.measure(items, states):
        if not isinstance(measured, Measured):
            results.append(AuditResult("bad_proof", measured.detail, True, None))
            continue
        fault, detail = first_above(measured, reject), ""
        if fault:
            bound = getattr(reject, fault)
            detail = f"{fault} is {getattr(measured, fault):.4g}, at most {bound:.4g} is allowed"
        reason = str(REASONS[fault]) if fault else ""
        results.append(AuditResult(reason, detail, bool(first_above(measured, suspect)), measured))
    return results


async def draw(
    model_dir: Path,
    state: State,
    prompt: Sequence[int],
    *,
    version: int = 0,
    seed: int = 0,
    max_tokens: int = 64,
    temperature: float = 1.0,
    dtype: Dtype = "float32",
    device: str = "auto",
) -> AuditItem:
    """Draw one reply with the embedded engine, as a worker does: tokens, logprobs and proof, to be audited.

    `prompt` is token ids; the model's stop tokens end the reply. Raises EngineError.
    """
    from ..inference.build import build_engine
    from ..models.huggingface import stop_token_ids

    engine = build_engine(
        EngineConfig(dtype=dtype, device=device, max_model_len=len(prompt) + max_tokens)
    )
    await engine.start(model_dir, fingerprint=FINGERPRINT)
    try:
        await engine.load(version, state)
        reply = await engine.generate(
            GenerateRequest(tuple(prompt), max_tokens, temperature, seed, stop_token_ids(model_dir))
        )
    finally:
        await engine.close()
    end = len(prompt) + len(reply.token_ids)
    return AuditItem(
        token_ids=[*prompt, *reply.token_ids],
        replies=[SampledSpan(len(prompt), end, seed)],
        logprobs=reply.logprobs,
        versions=[version] * len(reply.token_ids),
        proof=reply.proof,
        temperature=temperature,
    )
