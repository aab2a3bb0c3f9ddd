"""A validator that the run's owner named lies: what honest workers, cheats and the run come to."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.audits import VALIDATOR, AuditedSwarm, BentAuditor, Found
from support.hostile import Rogue, altered_branch
from support.witness import Fakes

from primerl.node.ops.control import ask
from primerl.node.reports.explain import explain, standing
from primerl.node.verification.auditor import Measured, Unreadable
from primerl.protocol.errors import Reason
from primerl.protocol.rollouts import Verdict, pack_f32

CALLS = 8
"""More than the jobs that are all measured again."""


def foreign(found: Found) -> Found:
    """Say that another model made all of it."""
    return [
        structs.replace(one, fingerprint=1.4) if isinstance(one, Measured) else one for one in found
    ]


def no_proofs(found: Found) -> Found:
    """Say that none of it has a proof: that bans at once."""
    return [Unreadable("zeros", proof=True) for _ in found]


def later(lie: Callable[[Found], Found]) -> Callable[[Found], Found]:
    """Measure right in the first calls, and lie from then on."""
    calls = 0

    def bend(found: Found) -> Found:
        nonlocal calls
        calls += 1
        return lie(found) if calls > CALLS else found

    return bend


async def rows_of(swarm: AuditedSwarm) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in await swarm.trainer.peers()}


async def disqualified(swarm: AuditedSwarm) -> None:
    """Wait until `peers` of the trainer says that the validator is disqualified."""
    async with asyncio.timeout(60.0):
        while True:
            row = (await rows_of(swarm)).get(VALIDATOR.node_id.hex())
            if row is not None and row["refused"].startswith("disqualified"):
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("lie", [foreign, pytest.param(no_proofs, marks=pytest.mark.slow)])
async def test_a_validator_that_calls_honest_work_fraud_bans_nobody_and_loses_its_standing(
    tmp_path: Path, model_dir: Path, lie: Callable[[Found], Found]
) -> None:
    fakes = Fakes(last_step=8)  # the run ends when the test has looked
    validator = VALIDATOR.node_id
    async with AuditedSwarm(tmp_path, model_dir, fakes=fakes, max_steps=9) as swarm:
        await swarm.start_trainer()
        swarm.add_validator(BentAuditor(fakes, later(lie)))
        await swarm.seated()
        workers = [swarm.add_worker(name) for name in ("a", "b", "c")]
        await disqualified(swarm)
        await swarm.wait_step(8)  # the run goes on
        rows = await rows_of(swarm)
        for worker in workers:
            row = rows[worker.node_id.hex()]
            assert (row["refused"], row["suspicion"]) == ("", 0.0)
            assert row["top_reason"] in ("", "stale")
        assert any("is disqualified" in one for one in (await swarm.trainer.status())["warnings"])
        before = len(swarm.verdicts())
        known = standing(swarm.trainer.data_dir, validator.hex()[:8])
        await asyncio.to_thread(ask, swarm.trainer.data_dir, "pardon", name=validator.hex())
        assert (await rows_of(swarm))[validator.hex()]["refused"] == ""
        await asyncio.to_thread(ask, swarm.trainer.data_dir, "ban", name=validator.hex())
        fakes.go.set()
        summary = await swarm.finished()
        verdicts = swarm.verdicts()
        after = standing(swarm.trainer.data_dir, validator.hex()[:8])
    assert summary["steps"] == 9
    assert summary["rejected"].keys() <= {"stale"}
    assert known is not None
    assert "what the trainer finds clean" in known.disqualified
    assert known.overturned > 0
    assert after is not None
    assert after.disqualified == "by the operator"
    assert any(one.validator == validator for one in verdicts[:before])
    assert all(one.validator == b"" for one in verdicts[before:])


async def test_a_cheat_that_an_honest_validator_finds_is_banned_and_the_validator_believed(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes()
    async with AuditedSwarm(tmp_path, model_dir, fakes=fakes) as swarm:
        await swarm.start_trainer()
        swarm.add_validator(BentAuditor(fakes))
        await swarm.seated()
        async with Rogue(swarm, "cheat") as cheat:
            await cheat.hello()
            verdict = await forge(cheat)
            rows = await rows_of(swarm)
        assert {one.reason for one in verdict.rejections} == {Reason.BAD_LOGPROBS}
        assert verdict.validator == VALIDATOR.node_id
        assert rows[cheat.key.node_id.hex()]["refused"].startswith("banned")
        row = rows[VALIDATOR.node_id.hex()]
        assert (row["audits"], row["refused"]) == (1, "")
        known = explain(swarm.trainer.data_dir, cheat.key.node_id.hex()[:8]).standing
    assert known is not None
    assert (known.disqualified, known.overturned) == ("", 0)
    assert known.rechecked == known.rollouts == verdict.audited


async def forge(cheat: Rogue) -> Verdict:
    """Submit a lease's rollouts with other logprobs; return the verdict."""
    lease, sealed = await cheat.lease()
    groups = [*await cheat.play(lease)]
    for number, group in enumerate(groups):
        for index in range(len(group.rollouts)):
            count = sum(group.rollouts[index].branches[0].sampled)
            group = altered_branch(group, index, logprobs=pack_f32([-9.0] * count))
        groups[number] = group
    await cheat.submit(cheat.bundle(sealed, groups), lease.lease_id)
    return await cheat.verdict(lease.lease_id)
