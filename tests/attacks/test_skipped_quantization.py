"""Workers that quantize where the manifest does not say so, or do not where it does."""

from pathlib import Path
from typing import Literal

import pytest
from msgspec import structs
from support.auditor_cases import OWN, generate, make_run, measured
from support.engine_cases import make_qwen3

from primerl.node.verification.auditor import audit_terms, evidence
from primerl.node.verification.bounds import BUILT_IN
from primerl.node.verification.checks import CheckedRollout
from primerl.node.verification.judgement import judge
from primerl.node.verification.prefill_audit import PrefillAudit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_only_rollouts_of_the_runs_quantization_pass_an_audit(
    tmp_path: Path, dtype: Literal["float32", "bfloat16"]
) -> None:
    state = make_qwen3(tmp_path, 0)
    played = {
        one: await generate(tmp_path, state, dtype, quantization=one) for one in ("none", "fp8")
    }
    reject, suspect = BUILT_IN[dtype]
    for wanted in ("none", "fp8"):
        run = make_run(dtype)
        proofs = structs.replace(
            run.proofs, quantization=wanted, reject=reject, suspect=suspect, bounds="fixed"
        )
        run = structs.replace(run, proofs=proofs)
        prefill = PrefillAudit(audit_terms(tmp_path, run, "cpu"))
        for name, items in played.items():
            seen = measured(prefill.measure(items, {OWN: state}))
            rollout = CheckedRollout(0, 0, [], 0.0)
            verdicts = [judge(evidence(rollout, [one]), proofs) for one in seen]
            rejected = sum(one.reason is not None for one in verdicts)
            if name == wanted:
                assert rejected == 0, seen
            else:  # rounding hides some of it in bfloat16
                assert rejected == len(seen) if dtype == "float32" else rejected > len(seen) / 2, (
                    seen
                )
