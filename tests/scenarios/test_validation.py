"""A trainer, a worker and a validator: which of them audits, and what a validator's failures cost the run."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.audits import VALIDATOR, AuditedSwarm, BentAuditor, Found
from support.hostile import Rogue, altered_branch, reason_of
from support.waiting import until
from support.witness import Fakes

from primerl.node.verification.auditor import Measured
from primerl.protocol.audits import AuditReport
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason
from primerl.protocol.messages import Accepted, AuditDone, AuditRequest, AuditWait, WorkerStats
from primerl.protocol.rollouts import MEASURES, pack_f32


def praise(found: Found) -> Found:
    """Nothing is wrong with anything."""
    clean: dict[str, Any] = dict.fromkeys(MEASURES, 0.0)
    return [structs.replace(one, **clean) if isinstance(one, Measured) else one for one in found]


async def test_a_validator_audits_for_the_trainer(tmp_path: Path, model_dir: Path) -> None:
    fakes = Fakes()
    auditor = BentAuditor(fakes)
    async with AuditedSwarm(tmp_path, model_dir, fakes=fakes, max_steps=24) as swarm:
        await swarm.start_trainer()
        validator = swarm.add_validator(auditor)
        await swarm.seated()
        swarm.add_worker("worker")
        summary = await swarm.finished()
        await validator.ended()  # by itself, as a worker does
        verdicts = swarm.verdicts()
    assert summary["steps"] == 24
    assert summary["rejected"].keys() <= {"stale"}
    remote = [one for one in verdicts if one.validator == VALIDATOR.node_id]
    assert len(remote) > 4
    assert auditor.items >= sum(one.audited for one in remote)
    assert all(one.evidence and one.challenge for one in remote)
    # Its first jobs were audited again, later ones as a rule not.
    assert swarm.own[0].items < sum(one.audited for one in verdicts)


async def test_a_validator_that_covers_for_a_cheat_is_found_by_the_trainers_own_audits(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fakes = Fakes()
    rollouts = {"groups_per_lease": 1, "groups_per_batch": 16}
    async with AuditedSwarm(tmp_path, model_dir, fakes=fakes, rollouts=rollouts) as swarm:
        await swarm.start_trainer()
        swarm.add_validator(BentAuditor(fakes, praise))
        await swarm.seated()
        async with Rogue(swarm, "cheat") as cheat:
            await cheat.hello()
            lease, sealed = await cheat.lease()
            (group,) = await cheat.play(lease)
            count = sum(group.rollouts[0].branches[0].sampled)
            forged = altered_branch(group, 0, logprobs=pack_f32([-9.0] * count))
            await cheat.submit(cheat.bundle(sealed, [forged]), lease.lease_id)
            verdict = await cheat.verdict(lease.lease_id)
        assert [one.reason for one in verdict.rejections] == [Reason.BAD_LOGPROBS]
        assert verdict.validator == b""  # the trainer believed itself
        assert "DISQUALIFIED" in caplog.text
        rows = {row["id"]: row for row in await swarm.trainer.peers()}
        assert rows[VALIDATOR.node_id.hex()]["refused"].startswith("disqualified: it called clean")
        async with Rogue(swarm, "honest") as honest:
            await honest.hello()
            receipt = await honest.work()
            verdict = await honest.verdict(receipt.lease_id)
        assert (verdict.accepted, verdict.validator) == (4, b"")


async def test_the_run_goes_on_when_a_validator_never_answers(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fakes = Fakes()
    auditor = BentAuditor(fakes)
    auditor.hold = asyncio.Event()
    async with AuditedSwarm(tmp_path, model_dir, fakes=fakes, audit_s=0.3) as swarm:
        await swarm.start_trainer()
        swarm.add_validator(auditor)
        await swarm.seated()
        swarm.add_worker("worker")
        summary = await swarm.finished()
        verdicts = swarm.verdicts()
    assert summary["steps"] == 3
    assert auditor.started.is_set()
    assert all(one.validator == b"" and one.audited for one in verdicts)
    assert "did not answer in time" in caplog.text


async def test_a_validator_whose_auditor_fails_says_so_at_once_and_the_trainer_audits(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fakes = Fakes()
    async with AuditedSwarm(tmp_path, model_dir, fakes=fakes) as swarm:
        await swarm.start_trainer()
        validator = swarm.add_validator(BentAuditor(fakes, dies=True))
        await swarm.seated()
        swarm.add_worker("worker")
        summary = await swarm.finished()
        assert summary["steps"] == 3
        assert "could not audit: the audit process died" in caplog.text
        await validator.ended()  # one failure is no reason to leave


async def test_a_node_that_is_no_validator_gets_no_submissions_and_is_not_believed(
    tmp_path: Path, model_dir: Path
) -> None:
    async with AuditedSwarm(tmp_path, model_dir) as swarm:
        await swarm.start_trainer()
        async with Rogue(swarm, "stranger") as stranger:
            asking = AuditRequest(0, (0,), WorkerStats(0))
            assert await reason_of(stranger.ask(asking, AuditWait)) == Reason.NOT_ADMITTED
            await stranger.hello()
            assert await reason_of(stranger.ask(asking, AuditWait)) == Reason.NOT_ADMITTED
            report = AuditReport(1, bytes(32), bytes(32), (), failed="nothing")
            done = AuditDone(
                seal(
                    stranger.key,
                    Purpose.AUDIT,
                    stranger.run,
                    report,
                    recipient=stranger.trainer,
                    expires=2**40,
                )
            )
            assert await reason_of(stranger.ask(done, Accepted)) == Reason.NOT_ADMITTED


async def test_a_node_that_is_no_validator_of_the_run_tells_its_operator_what_to_do(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fakes = Fakes()
    async with AuditedSwarm(tmp_path, model_dir, fakes=fakes, validators=[bytes(32)]) as swarm:
        await swarm.start_trainer()
        swarm.add_validator(BentAuditor(fakes))
        # the trainer's log has the other half, too
        await until(lambda: VALIDATOR.node_id.hex() in caplog.text)
        assert "verification.validators" in caplog.text
