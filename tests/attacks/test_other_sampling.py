"""Workers that sample otherwise than lease and manifest say: by other limits, temperatures or weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import structs
from support.auditor_cases import OWN, generate, make_case, make_run, measured
from support.engine_cases import FP32, make_qwen3
from support.prefill_core import PrefillCore
from support.swarm import Swarm
from support.witness import WitnessEngine

from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.verification.auditor import AuditItem, audit_terms, evidence
from primerl.node.verification.bounds import BUILT_IN
from primerl.node.verification.checks import CheckedRollout
from primerl.node.verification.judgement import first_above, judge
from primerl.node.verification.prefill_audit import PrefillAudit
from primerl.protocol.errors import Reason


@pytest.mark.parametrize(
    ("dtype", "share"), [("float32", 0.8), pytest.param("bfloat16", 0.3, marks=pytest.mark.slow)]
)
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


ENVIRONMENTS: list[dict[str, Any]] = [
    {"id": "reverse-text", "name": "letters"},
    {"id": "arithmetic", "name": "sums", "sampling": {"temperature": 0.5}},
]


class OneTemperature(WitnessEngine):
    """Samples everything at the temperature of the first environment."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine."""
        return await super().generate(replace(request, temperature=1.0))


async def test_a_rollout_at_another_environments_temperature_is_fraud_and_at_its_own_is_not(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, environments=ENVIRONMENTS, max_steps=4) as swarm:
        await swarm.start_trainer()
        cheat = swarm.add_worker("cheat", engine=OneTemperature(swarm.fakes, "cheat"))
        row = await swarm.until_row(cheat, lambda row: row["refused"].startswith("banned"), 60.0)
        assert row["top_reason"] == Reason.BAD_LOGPROBS.value
        told = {one["name"]: one for one in (await swarm.trainer.status())["environments"]}
        assert told["sums"]["accepted"] == 0
        honest = swarm.add_worker("honest")
        summary = await swarm.finished()
        await honest.ended()
    assert summary["rejected"].keys() <= {Reason.BAD_LOGPROBS.value, Reason.STALE.value}
    assert all(summary["environments"][name]["accepted"] for name in ("letters", "sums"))


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
