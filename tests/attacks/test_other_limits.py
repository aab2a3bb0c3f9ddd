"""A worker that draws from more of the likeliest tokens than its lease says, or from fewer."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.auditor_cases import OWN, generate, make_case, measured
from support.engine_cases import FP32
from support.prefill_core import PrefillCore

from primerl.node.verification.auditor import AuditItem, evidence
from primerl.node.verification.bounds import BUILT_IN
from primerl.node.verification.checks import CheckedRollout
from primerl.node.verification.judgement import first_above


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.8), ("bfloat16", 0.3)])
async def test_replies_under_another_top_p_than_the_leases_are_rejected(
    tmp_path: Path, dtype: str, share: float
) -> None:
    """By the built-in bounds, in 19 to 96 tokens; honest replies of the same seeds are not."""
    case = await make_case(tmp_path, dtype)
    drawn = {1.0: case.honest}
    for top_p in (0.9, 0.7):
        drawn[top_p] = await generate(case.model_dir, case.states[OWN], dtype, top_p=top_p)
    auditor = PrefillCore(FP32)
    await auditor.start(case.model_dir, case.run)

    async def faults(items: list[AuditItem]) -> list[str]:
        leased = [replace(one, top_p=0.9) for one in items]
        found = measured(await auditor.audit(leased, case.states))
        rollout = CheckedRollout(0, 0, [], 0.0)
        return [first_above(evidence(rollout, [one]), BUILT_IN[dtype][0]) for one in found]

    try:
        assert set(await faults(drawn[0.9])) == {""}
        for top_p in (1.0, 0.7):
            told = await faults(drawn[top_p])
            assert set(told) <= {"", "sampling", "sampling_max"}
            assert sum(map(bool, told)) > share * len(told), told
    finally:
        await auditor.close()
