"""The trainer's queue of audits for validators: whose reports count, and the fate of the others."""

import asyncio
import dataclasses
import math
import random
from typing import Any

import msgspec
import pytest
from support.audits import (
    CLEAN,
    GUILTY,
    ODD,
    SECOND,
    STRANGER,
    VALIDATOR,
    Own,
    Told,
    audit_queue,
    call,
    chosen,
    present,
    report,
    request,
    sealed,
    serve,
)
from support.protocol_cases import OTHER_RUN, PROOFS, WORKER, refuses
from support.waiting import until

from primerl.crypto.hashing import digest
from primerl.node.ops.errors import EngineError, UsageError
from primerl.node.p2p.transport import StreamClosed
from primerl.node.trainer.audits import BENCH_S, AuditQueue, RemoteAuditors, read_nodes
from primerl.node.verification.auditor import AuditCall, Measured, Unreadable
from primerl.protocol.audits import MeasuredRow, UnreadableRow
from primerl.protocol.envelope import Purpose
from primerl.protocol.errors import Reason
from primerl.protocol.messages import AuditJob, AuditWait

CUT_SHORT = Unreadable("cut short", proof=True)
NO_END = Unreadable("no end", proof=False)


def remote(own: Own, audits: AuditQueue, **settings: Any) -> RemoteAuditors:
    """Audits by validators; nothing is measured again unless the test says so."""
    base: dict[str, Any] = {"overlap": 0.0, "first_jobs": 0, **settings}
    chance = random.Random(1)
    return RemoteAuditors(own, audits, epoch=lambda: 0, chance=chance, **base)


async def job_of(audits: AuditQueue) -> tuple[AuditJob, "asyncio.Task[Any]"]:
    """A job in the validator's hands, and the trainer's wait for its report."""
    asked = await present(audits)
    waiting = asyncio.create_task(audits.report(call(), 0))
    reply, _ = await asked
    assert isinstance(reply, AuditJob)
    return reply, waiting


async def test_a_validator_gets_the_submission_and_its_report_is_the_answer() -> None:
    own, audits = Own(), audit_queue()
    asked = await present(audits)
    answer = asyncio.create_task(remote(own, audits).audit(call()))
    job, data = await asked
    assert isinstance(job, AuditJob)
    assert data == call().sealed
    assert (job.node, job.submission, job.size) == (WORKER.node_id, digest(data), len(data))
    assert (job.versions, job.challenge) == ((2, 3), call().challenge)
    assert [(one.claimed, one.others) for one in job.others] == [(3, (2,))]
    await audits.take_in(VALIDATOR.node_id, sealed(report(job, GUILTY, CUT_SHORT)))
    found = await answer
    assert found.measured == [[GUILTY], [CUT_SHORT]]
    assert found.validator == VALIDATOR.node_id
    assert own.calls == []


async def test_a_request_without_work_is_told_to_come_again() -> None:
    assert isinstance((await request(audit_queue()))[0], AuditWait)


async def test_only_named_validators_are_given_audits_and_believed() -> None:
    audits = audit_queue()
    job, waiting = await job_of(audits)
    with refuses(Reason.NOT_ADMITTED):
        await request(audits, STRANGER)
    with refuses(Reason.NOT_ADMITTED):
        await audits.take_in(STRANGER.node_id, sealed(report(job), STRANGER))
    with refuses(Reason.NOT_ADMITTED):
        await request(AuditQueue(), VALIDATOR)
    await audits.take_in(VALIDATOR.node_id, sealed(report(job)))
    assert (await waiting)[0] == VALIDATOR.node_id


async def test_a_report_counts_only_as_its_validator_signed_it_for_this_job() -> None:
    audits = audit_queue(VALIDATOR, SECOND)
    job, waiting = await job_of(audits)
    good = report(job)
    mine = VALIDATOR.node_id
    wrong = {
        Reason.WRONG_SIGNER: (mine, sealed(good, SECOND)),
        Reason.WRONG_RECIPIENT: (SECOND.node_id, sealed(good, SECOND)),
        Reason.WRONG_RUN: (mine, sealed(good, run=OTHER_RUN)),
        Reason.WRONG_PURPOSE: (mine, sealed(good, purpose=Purpose.VERDICT)),
        Reason.EXPIRED: (mine, sealed(good, expires=1)),
        Reason.NOT_FOUND: (mine, sealed(report(job, job=job.job + 1))),
        Reason.WRONG_DIGEST: (mine, sealed(report(job, submission=digest(b"another")))),
        Reason.REPLAYED: (mine, sealed(report(job, challenge=digest(b"another")))),
    }
    for reason, (peer, done) in wrong.items():
        with refuses(reason):
            await audits.take_in(peer, done)
    with refuses(Reason.WRONG_RECIPIENT):
        await audits.take_in(mine, sealed(good, recipient=STRANGER.node_id))
    await audits.take_in(mine, sealed(good))
    assert await waiting == (mine, good)
    with refuses(Reason.REPLAYED):
        await audits.take_in(mine, sealed(good))


ROW = MeasuredRow(0, 0, 64, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
OTHER = MeasuredRow(1, 1, 64, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("measured", "unreadable"),
    [
        ((), ()),
        ((ROW,), ()),
        ((ROW, ROW), ()),
        ((ROW, OTHER, MeasuredRow(0, 1, 64, 0, 0, 0, 0, 0, 0)), ()),
        ((ROW, OTHER), (UnreadableRow(0, 0, True, ""),)),
        ((ROW, MeasuredRow(1, 1, 64, math.nan, 0, 0, 0, 0, 0)), ()),
        ((ROW, MeasuredRow(1, 1, 64, 0, 0, 0, 0, 0, math.inf)), ()),
    ],
)
async def test_a_report_has_one_row_of_numbers_for_each_rollout(
    measured: tuple[MeasuredRow, ...], unreadable: tuple[UnreadableRow, ...]
) -> None:
    audits = audit_queue()
    job, waiting = await job_of(audits)
    with refuses(Reason.MALFORMED):
        await audits.take_in(
            VALIDATOR.node_id, sealed(report(job, measured=measured, unreadable=unreadable))
        )
    await audits.take_in(VALIDATOR.node_id, sealed(report(job)))
    assert await waiting


# -- when no validator answers -------------------------------------------------------------------


async def test_without_a_validator_the_trainer_audits_at_once_itself() -> None:
    own = Own()
    assert (await remote(own, audit_queue()).audit(call())).validator == b""
    assert len(own.calls) == 1


@pytest.mark.parametrize(
    ("versions", "term"), [((3,), 0), ((2,), 1), ((), 0), ((2, 4), 0)], ids=str
)
async def test_a_validator_without_the_versions_is_not_waited_for(
    versions: tuple[int, ...], term: int
) -> None:
    own, audits = Own(), audit_queue()
    await request(audits, versions=versions, term=term)
    assert (await remote(own, audits).audit(call())).validator == b""


async def test_a_validator_that_never_answers_costs_one_deadline_and_then_nothing() -> None:
    now = [1000.0]
    own, audits = Own(), audit_queue(timeout_s=0.05, clock=lambda: now[0])
    asked = await present(audits)
    assert (await remote(own, audits).audit(call())).validator == b""
    job, _ = await asked
    assert isinstance(job, AuditJob)
    with refuses(Reason.REPLAYED):
        await audits.take_in(VALIDATOR.node_id, sealed(report(job)))  # too late
    await request(audits)
    assert not audits.available(frozenset({2, 3}), 0)
    assert (await remote(own, audits).audit(call())).validator == b""
    assert len(own.calls) == 2
    now[0] += BENCH_S + 1
    await request(audits)
    assert audits.available(frozenset({2, 3}), 0)


async def test_a_job_that_does_not_reach_its_validator_is_the_trainers() -> None:
    own, audits = Own(), audit_queue()
    stream = Told(broken=StreamClosed("gone"))
    asked = asyncio.create_task(request(audits, stream=stream))
    await until(lambda: audits.validators[VALIDATOR.node_id].waiting > 0)
    assert (await remote(own, audits).audit(call())).validator == b""
    with pytest.raises(StreamClosed):
        await asked


async def test_a_validator_that_cannot_audit_says_so_and_the_trainer_does() -> None:
    audits = audit_queue()
    job, waiting = await job_of(audits)
    failed = report(job, measured=(), failed="no memory left")
    await audits.take_in(VALIDATOR.node_id, sealed(failed))
    assert await waiting is None
    await request(audits)
    assert not audits.available(frozenset({2, 3}), 0)


async def test_rollouts_of_several_branches_stay_with_the_trainer_and_keep_their_place() -> None:
    own, audits = Own(ODD, ODD), audit_queue()
    validator = asyncio.create_task(serve(audits, VALIDATOR, GUILTY))
    await asyncio.sleep(0)
    mixed = call(chosen(0, 0, branches=2), chosen(0, 1), chosen(1, 0, branches=3))
    found = await remote(own, audits).audit(mixed)
    validator.cancel()
    assert found.measured == [[ODD] * 2, [GUILTY], [ODD] * 3]
    assert found.validator == VALIDATOR.node_id
    assert [len(one.chosen) for one in own.calls] == [2]


# -- audits of the validators --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "own"),
    [
        ((CLEAN, CLEAN), (CLEAN, GUILTY)),
        ((CLEAN, GUILTY), (CLEAN, CLEAN)),
        ((CLEAN, CUT_SHORT), (CLEAN, CLEAN)),
        ((CLEAN, CLEAN), (CLEAN, CUT_SHORT)),
    ],
    ids=["covers up", "accuses", "calls a proof none", "takes what is no proof"],
)
async def test_a_validator_that_lies_is_found_and_its_reports_count_no_more(
    told: tuple[Measured, ...], own: tuple[Measured, ...], caplog: pytest.LogCaptureFixture
) -> None:
    mine, audits = Own(*own), audit_queue()
    validator = asyncio.create_task(serve(audits, VALIDATOR, *told))
    await asyncio.sleep(0)
    found = await remote(mine, audits, overlap=1.0).audit(call())
    assert found.measured == [[one] for one in own]  # the trainer believes itself
    assert found.validator == b""
    assert "DISQUALIFIED" in caplog.text
    assert VALIDATOR.node_id.hex() in caplog.text
    with refuses(Reason.BANNED):
        await validator
    with refuses(Reason.BANNED):
        await audits.take_in(VALIDATOR.node_id, sealed(report(await a_job())))
    assert (await remote(mine, audits).audit(call())).validator == b""


async def a_job() -> AuditJob:
    """Some job of another queue."""
    job, waiting = await job_of(audit_queue())
    waiting.cancel()
    return job


async def test_honest_noise_disqualifies_no_validator() -> None:
    own, audits = Own(ODD, CLEAN), audit_queue()
    validator = asyncio.create_task(serve(audits, VALIDATOR, CLEAN, CLEAN))
    await asyncio.sleep(0)
    auditors = remote(own, audits, overlap=1.0)
    for _ in range(3):
        await auditors.audit(call())
    own.found = (CLEAN, CLEAN)
    for _ in range(40):
        assert (await auditors.audit(call())).validator == VALIDATOR.node_id
    validator.cancel()
    record = audits.validators[VALIDATOR.node_id].record
    assert (record.compared, record.differing, record.disqualified) == (86, 3, "")


async def test_a_validator_that_suspects_everybody_is_found_in_time() -> None:
    own, audits = Own(), audit_queue()
    validator = asyncio.create_task(serve(audits, VALIDATOR, ODD, NO_END))
    await asyncio.sleep(0)
    auditors = remote(own, audits, overlap=1.0)
    for _ in range(16):
        await auditors.audit(call())
    assert "32 of 32" in audits.validators[VALIDATOR.node_id].record.disqualified
    with refuses(Reason.BANNED):
        await validator


async def test_the_first_jobs_and_then_a_share_are_measured_again() -> None:
    own, audits = Own(), audit_queue()
    validator = asyncio.create_task(serve(audits, VALIDATOR))
    await asyncio.sleep(0)
    auditors = remote(own, audits, overlap=0.1, first_jobs=4)
    counts: list[int] = []
    for _ in range(204):
        await auditors.audit(call())
        counts.append(len(own.calls))
    validator.cancel()
    assert counts[3] == 4
    assert 8 <= counts[-1] - 4 <= 35


async def test_a_trainer_whose_own_auditor_died_still_has_its_validators() -> None:
    own, audits = Own(dead=True), audit_queue()
    validator = asyncio.create_task(serve(audits, VALIDATOR))
    await asyncio.sleep(0)
    found = await remote(own, audits, overlap=1.0).audit(call())
    validator.cancel()
    assert found.validator == VALIDATOR.node_id


def test_validators_are_named_by_their_ids() -> None:
    node = VALIDATOR.node_id
    assert read_nodes("verification.validators", [node.hex(), node.hex().upper()]) == [node, node]
    for wrong in ("", "xyz", node.hex()[:-2], "0x" + node.hex()):
        with pytest.raises(UsageError, match="64 hex digits"):
            read_nodes("verification.validators", [wrong])


def measured(by_trainer: bool = False) -> AuditCall:
    """The audit of a run that measures its bounds."""
    contract = msgspec.structs.replace(PROOFS, bounds="measured")
    return dataclasses.replace(call(), contract=contract, by_trainer=by_trainer)


async def test_a_reference_is_measured_by_the_trainer_alone_so_no_validator_moves_a_bound() -> None:
    own, audits = Own(CLEAN, ODD), audit_queue()
    asked = await present(audits)
    found = await remote(own, audits).audit(measured(by_trainer=True))
    assert found.measured == [[CLEAN], [ODD]]
    assert found.validator == b""
    assert isinstance((await asked)[0], AuditWait)


async def test_what_a_validator_finds_odd_the_trainer_measures_itself() -> None:
    """Bounds are of the trainer's own audits: on another device honest work may look odd. Nobody is blamed."""
    own, audits = Own(CLEAN, CLEAN), audit_queue()
    for theirs, asked in (((CLEAN, CLEAN), 0), ((CLEAN, ODD), 1), ((GUILTY, CLEAN), 2)):
        waiting = await present(audits)
        answer = asyncio.create_task(remote(own, audits).audit(measured()))
        job, _ = await waiting
        assert isinstance(job, AuditJob)
        await audits.take_in(VALIDATOR.node_id, sealed(report(job, *theirs)))
        assert (await answer).measured == [[CLEAN], [CLEAN]]
        assert len(own.calls) == asked
    record = audits.records()[VALIDATOR.node_id]
    assert (record.compared, record.disqualified) == (0, "")


async def test_no_worker_is_rejected_on_a_validators_word_while_the_trainer_cannot_audit() -> None:
    own, audits = Own(dead=True), audit_queue()
    waiting = await present(audits)
    answer = asyncio.create_task(remote(own, audits).audit(measured()))
    job, _ = await waiting
    assert isinstance(job, AuditJob)
    await audits.take_in(VALIDATOR.node_id, sealed(report(job, CLEAN, ODD)))
    with pytest.raises(EngineError):
        await answer
