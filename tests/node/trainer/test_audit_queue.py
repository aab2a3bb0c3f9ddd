"""The trainer's queue of audits for validators: whose reports count, and the fate of the others."""

import asyncio
import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from pathlib import Path
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
from primerl.node.config.node_ids import read_nodes
from primerl.node.errors import StorageError, UsageError
from primerl.node.p2p.transport import StreamClosed
from primerl.node.storage.ledger import VALIDATORS, Ledger
from primerl.node.trainer.audits import (
    BENCH_S,
    CONFIRMED_MOST,
    DRAWN_OF_JOB,
    OVERLAP,
    UNCONFIRMED_NATS,
    AuditQueue,
    RemoteAuditors,
)
from primerl.node.verification.auditor import AuditAnswer, AuditCall, Measured, Unreadable
from primerl.protocol.audits import MAX_MEASURE, MAX_MEASURED_TOKENS, UnreadableRow
from primerl.protocol.envelope import Purpose
from primerl.protocol.errors import Reason
from primerl.protocol.messages import AuditJob, AuditWait
from primerl.protocol.reputation import other_step
from primerl.protocol.rollouts import Evidence

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
    answer = asyncio.create_task(remote(own, audits).audit_rollouts(call()))
    job, data = await asked
    assert isinstance(job, AuditJob)
    assert data == call().sealed
    assert (job.node, job.submission, job.size) == (WORKER.node_id, digest(data), len(data))
    assert (job.versions, job.challenge) == ((2, 3), call().challenge)
    assert [(one.claimed, one.others) for one in job.others] == [(3, (2,))]
    theirs = msgspec.structs.replace(CLEAN, logprob=0.01), CLEAN
    await audits.take_in(VALIDATOR.node_id, sealed(report(job, *theirs)))
    found = await answer
    assert found.measured == [[one] for one in theirs]
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


ROW = Evidence(0, 0, 64, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
OTHER = Evidence(1, 1, 64, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("measured", "unreadable"),
    [
        ((), ()),
        ((ROW,), ()),
        ((ROW, ROW), ()),
        ((ROW, OTHER, Evidence(0, 1, 64, 0, 0, 0, 0, 0, 0)), ()),
        ((ROW, OTHER), (UnreadableRow(0, 0, True, ""),)),
        ((ROW, Evidence(1, 1, 64, math.nan, 0, 0, 0, 0, 0)), ()),
        ((ROW, Evidence(1, 1, 64, 0, 0, 0, 0, 0, math.inf)), ()),
        ((ROW, Evidence(1, 1, 64, 0, 0, 0, 0, 0, -1.1 * MAX_MEASURE)), ()),
        ((ROW, Evidence(1, 1, 64, 0, 0, 0, 0, 0, 0, 1.1 * MAX_MEASURE)), ()),
        ((ROW, Evidence(1, 1, MAX_MEASURED_TOKENS + 1, 0, 0, 0, 0, 0, 0)), ()),
    ],
)
async def test_a_report_has_one_row_of_numbers_for_each_rollout(
    measured: tuple[Evidence, ...], unreadable: tuple[UnreadableRow, ...]
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
    assert (await remote(own, audit_queue()).audit_rollouts(call())).validator == b""
    assert len(own.calls) == 1


@pytest.mark.parametrize(
    ("versions", "term"), [((3,), 0), ((2,), 1), ((), 0), ((2, 4), 0)], ids=str
)
async def test_a_validator_without_the_versions_is_not_waited_for(
    versions: tuple[int, ...], term: int
) -> None:
    own, audits = Own(), audit_queue()
    await request(audits, versions=versions, term=term)
    assert (await remote(own, audits).audit_rollouts(call())).validator == b""


async def test_a_validator_that_never_answers_costs_one_deadline_and_then_nothing() -> None:
    now = [1000.0]
    own, audits = Own(), audit_queue(timeout_s=0.05, clock=lambda: now[0])
    asked = await present(audits)
    assert (await remote(own, audits).audit_rollouts(call())).validator == b""
    job, _ = await asked
    assert isinstance(job, AuditJob)
    with refuses(Reason.REPLAYED):
        await audits.take_in(VALIDATOR.node_id, sealed(report(job)))  # too late
    await request(audits)
    assert not audits.available(frozenset({2, 3}), 0)
    assert (await remote(own, audits).audit_rollouts(call())).validator == b""
    assert len(own.calls) == 2
    now[0] += BENCH_S + 1
    await request(audits)
    assert audits.available(frozenset({2, 3}), 0)


async def test_a_job_that_does_not_reach_its_validator_is_the_trainers() -> None:
    own, audits = Own(), audit_queue()
    stream = Told(broken=StreamClosed("gone"))
    asked = asyncio.create_task(request(audits, stream=stream))
    await until(lambda: audits.validators[VALIDATOR.node_id].waiting > 0)
    assert (await remote(own, audits).audit_rollouts(call())).validator == b""
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
    validator = asyncio.create_task(serve(audits, VALIDATOR, CLEAN))
    await asyncio.sleep(0)
    mixed = call(chosen(0, 0, branches=2), chosen(0, 1), chosen(1, 0, branches=3))
    found = await remote(own, audits).audit_rollouts(mixed)
    validator.cancel()
    assert found.measured == [[ODD] * 2, [CLEAN], [ODD] * 3]
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
    found = await remote(mine, audits, overlap=1.0).audit_rollouts(call())
    assert found.measured == [[one] for one in own]  # the trainer believes itself
    assert found.validator == b""
    assert "DISQUALIFIED" in caplog.text
    assert VALIDATOR.node_id.hex() in caplog.text
    with refuses(Reason.BANNED):
        await validator
    with refuses(Reason.BANNED):
        await audits.take_in(VALIDATOR.node_id, sealed(report(await a_job())))
    assert (await remote(mine, audits).audit_rollouts(call())).validator == b""


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
        await auditors.audit_rollouts(call())
    own.found = (CLEAN, CLEAN)
    for _ in range(40):
        assert (await auditors.audit_rollouts(call())).validator == VALIDATOR.node_id
    validator.cancel()
    record = audits.record(VALIDATOR.node_id)
    assert (record.compared, record.overturned, record.disqualified) == (86, 3, "")


async def test_a_validator_that_suspects_everybody_is_found_in_time() -> None:
    own, audits = Own(), audit_queue()
    validator = asyncio.create_task(serve(audits, VALIDATOR, ODD, ODD))
    await asyncio.sleep(0)
    auditors = remote(own, audits)
    for _ in range(16):
        assert (await auditors.audit_rollouts(call())).measured == [[CLEAN], [CLEAN]]
    assert "32 of the 32" in audits.record(VALIDATOR.node_id).disqualified
    with refuses(Reason.BANNED):
        await validator


async def test_the_first_jobs_and_then_a_share_are_measured_again() -> None:
    own, audits = Own(), audit_queue()
    validator = asyncio.create_task(serve(audits, VALIDATOR))
    await asyncio.sleep(0)
    auditors = remote(own, audits, overlap=0.1, first_jobs=4)
    counts: list[int] = []
    for _ in range(204):
        await auditors.audit_rollouts(call())
        counts.append(len(own.calls))
    validator.cancel()
    assert counts[3] == 4
    # half of the jobs are drawn, and a fifth of their rollouts: 20 rollouts of 100 jobs
    assert 20 <= own.rollouts - 8 <= 60
    assert counts[-1] - 4 < own.rollouts - 8 + 1


async def test_a_trainer_whose_own_auditor_died_still_has_its_validators() -> None:
    own, audits = Own(dead=True), audit_queue()
    validator = asyncio.create_task(serve(audits, VALIDATOR))
    await asyncio.sleep(0)
    found = await remote(own, audits, overlap=1.0).audit_rollouts(call())
    validator.cancel()
    assert found.validator == VALIDATOR.node_id


def test_validators_are_named_by_their_ids() -> None:
    node = VALIDATOR.node_id
    assert read_nodes("verification.validators", [node.hex(), node.hex().upper()]) == [node]
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
    found = await remote(own, audits).audit_rollouts(measured(by_trainer=True))
    assert found.measured == [[CLEAN], [ODD]]
    assert found.validator == b""
    assert isinstance((await asked)[0], AuditWait)


async def test_what_a_validator_finds_odd_the_trainer_measures_itself() -> None:
    """Bounds are of the trainer's own audits: on another device honest work may look odd. Nobody is blamed."""
    own, audits = Own(CLEAN, CLEAN), audit_queue()
    noisy = msgspec.structs.replace(CLEAN, fingerprint=0.3)
    for theirs, asked in (((CLEAN, CLEAN), 0), ((CLEAN, ODD), 1), ((noisy, CLEAN), 2)):
        waiting = await present(audits)
        answer = asyncio.create_task(remote(own, audits).audit_rollouts(measured()))
        job, _ = await waiting
        assert isinstance(job, AuditJob)
        await audits.take_in(VALIDATOR.node_id, sealed(report(job, *theirs)))
        assert (await answer).measured == [[CLEAN], [CLEAN]]
        assert len(own.calls) == asked
    record = audits.records()[VALIDATOR.node_id]
    assert (record.compared, record.disqualified) == (0, "")


@pytest.mark.parametrize("theirs", [ODD, GUILTY, CUT_SHORT], ids=["odd", "guilty", "no proof"])
async def test_no_worker_is_rejected_on_a_validators_word_while_the_trainer_cannot_audit(
    theirs: Measured | Unreadable,
) -> None:
    for asked in (call(), measured()):
        found, audits = await answered(Own(dead=True), asked, CLEAN, theirs)
        clean, (other,) = found.measured
        assert clean == [CLEAN]
        assert isinstance(other, Unreadable)
        assert not other.proof
        assert audits.record(VALIDATOR.node_id).disqualified == ""


# -- what counts against a worker ------------------------------------------------------------------


async def answered(
    own: Own, asked: AuditCall, *theirs: Measured | Unreadable, **settings: Any
) -> tuple[AuditAnswer, AuditQueue]:
    """The answer on one job, of which a validator reports `theirs`."""
    audits = audit_queue()
    waiting = await present(audits)
    answer = asyncio.create_task(remote(own, audits, **settings).audit_rollouts(asked))
    job, _ = await waiting
    assert isinstance(job, AuditJob)
    await audits.take_in(VALIDATOR.node_id, sealed(report(job, *theirs)))
    return await answer, audits


@pytest.mark.parametrize("theirs", [GUILTY, CUT_SHORT], ids=["guilty", "no proof"])
async def test_a_rejection_counts_only_if_the_trainer_finds_it_too_and_an_invented_one_ends_the_validator(
    theirs: Measured | Unreadable,
) -> None:
    found, audits = await answered(Own(CLEAN, CLEAN), call(), CLEAN, theirs)
    assert found.measured == [[CLEAN], [CLEAN]]
    assert (
        "called rejected what the trainer finds clean"
        in audits.record(VALIDATOR.node_id).disqualified
    )
    found, audits = await answered(Own(CLEAN, theirs), call(), CLEAN, theirs)
    assert found.measured == [[CLEAN], [theirs]]
    assert found.validator == VALIDATOR.node_id
    record = audits.record(VALIDATOR.node_id)
    assert (record.rechecked, record.overturned, record.disqualified) == (1, 0, "")


async def test_a_validator_that_was_right_for_long_ends_with_its_first_invented_rejection() -> None:
    """It behaves while all of its jobs are measured again, and after that."""
    own, audits = Own(), audit_queue()
    auditors = remote(own, audits, first_jobs=4)
    lies: list[Measured] = []
    validator = await seated(serve_as(audits, lambda: lies or [CLEAN, CLEAN]), audits)
    for _ in range(40):
        assert (await auditors.audit_rollouts(call())).validator == VALIDATOR.node_id
    lies += [GUILTY, GUILTY]
    assert (await auditors.audit_rollouts(call())).measured == [[CLEAN], [CLEAN]]
    with refuses(Reason.BANNED):
        await validator


async def serve_as(audits: AuditQueue, say: Callable[[], Sequence[Measured]]) -> None:
    """Run a validator that decides for each job what it reports."""
    while True:
        reply, _ = await request(audits)
        if isinstance(reply, AuditJob):
            await audits.take_in(VALIDATOR.node_id, sealed(report(reply, *say())))


async def seated(serving: Coroutine[Any, Any, None], audits: AuditQueue) -> "asyncio.Task[None]":
    """Start a validator; return once the queue has its request."""
    task = asyncio.create_task(serving)
    await until(lambda: audits.validators[VALIDATOR.node_id].waiting > 0)
    return task


def flood(count: int) -> AuditCall:
    """A job of many rollouts of one group."""
    return call(*(chosen(0, n) for n in range(count)))


async def test_of_a_flood_of_cheats_a_few_are_measured_again_and_no_other_counts() -> None:
    own = Own(GUILTY)
    found, audits = await answered(own, flood(64), *[GUILTY] * 64)
    assert own.rollouts == CONFIRMED_MOST
    assert found.measured.count([GUILTY]) == CONFIRMED_MOST
    others = [one for (one,) in found.measured if one != GUILTY]
    assert all(isinstance(one, Unreadable) and not one.proof for one in others)
    assert audits.record(VALIDATOR.node_id).disqualified == ""


async def test_of_many_rejections_one_that_the_trainer_does_not_find_has_all_measured_again() -> (
    None
):
    own = Own(CLEAN)
    found, audits = await answered(own, flood(64), *[GUILTY] * 64)
    assert found.measured == [[CLEAN]] * 64
    assert own.rollouts == 64  # each once
    assert audits.record(VALIDATOR.node_id).disqualified


async def test_a_job_of_a_validator_that_lies_is_measured_by_the_trainer_as_a_whole() -> None:
    """Else a validator would cover for three by accusing the fourth."""
    own = Own(GUILTY, CLEAN)
    found, _ = await answered(own, call(), CLEAN, GUILTY)
    assert found.measured == [[GUILTY], [CLEAN]]
    assert found.validator == b""


async def test_evidence_of_another_policy_counts_on_a_validators_word_up_to_a_few_nats() -> None:
    """Each of these is within the bounds: only their sum bans a worker."""
    hint = msgspec.structs.replace(CLEAN, other_policy=3.0)
    own, audits = Own(CLEAN), audit_queue()
    auditors = remote(own, audits)
    validator = await seated(serve_as(audits, lambda: [hint]), audits)
    nats = 0.0
    for _ in range(20):
        answer = await auditors.audit_rollouts(flood(1))
        nats += sum(other_step(one.other_policy, PROOFS.other_scale) for one in seen(answer))
        nats = max(0.0, nats)
        assert nats <= UNCONFIRMED_NATS
    validator.cancel()
    assert own.rollouts > 10
    assert audits.record(VALIDATOR.node_id).alarming > 0


async def test_evidence_of_another_policy_that_the_trainer_finds_too_counts_in_full() -> None:
    hint = msgspec.structs.replace(CLEAN, other_policy=3.0)
    own, audits = Own(hint), audit_queue()
    auditors = remote(own, audits)
    validator = await seated(serve_as(audits, lambda: [hint]), audits)
    answers = [await auditors.audit_rollouts(flood(1)) for _ in range(20)]
    validator.cancel()
    assert [one.measured for one in answers] == [[[hint]]] * 20
    assert audits.record(VALIDATOR.node_id).overturned == 0


def seen(answer: AuditAnswer) -> list[Measured]:
    return [one for found in answer.measured for one in found if isinstance(one, Measured)]


# -- what a validator lets pass --------------------------------------------------------------------


async def test_a_validator_that_passes_cheats_is_found_at_the_rate_that_the_docs_state() -> None:
    """docs/proofs.md: 1 - q (1 - (1 - s)^k) of the jobs of k cheats pass, with q = OVERLAP / s."""
    chance = random.Random(3)
    survived: list[int] = []
    for _ in range(20):
        own, audits = Own(GUILTY), audit_queue()
        auditors = RemoteAuditors(own, audits, epoch=lambda: 0, chance=chance, first_jobs=0)
        validator = await seated(serve_as(audits, lambda: [CLEAN] * 4), audits)
        jobs = 0
        while not audits.record(VALIDATOR.node_id).disqualified and jobs < 60:
            await auditors.audit_rollouts(flood(4))
            jobs += 1
        survived.append(jobs - 1)
        with refuses(Reason.BANNED):
            await validator
    found = OVERLAP / DRAWN_OF_JOB * (1 - (1 - DRAWN_OF_JOB) ** 4)
    expected = 1 / found - 1
    assert 0.5 * expected < sum(survived) / 20 < 1.5 * expected


async def test_a_worker_that_a_validator_covered_for_is_measured_by_the_trainer_from_then_on() -> (
    None
):
    own, audits = Own(GUILTY, GUILTY), audit_queue(VALIDATOR, SECOND)
    validator = asyncio.create_task(serve(audits, VALIDATOR))
    await asyncio.sleep(0)
    auditors = remote(own, audits, overlap=1.0)
    await auditors.audit_rollouts(call())
    with refuses(Reason.BANNED):
        await validator
    second = asyncio.create_task(serve(audits, SECOND))
    await until(lambda: audits.validators[SECOND.node_id].waiting > 0)
    answer = await remote(own, audits).audit_rollouts(call())
    assert answer.measured == [[GUILTY], [GUILTY]]
    assert answer.validator == b""
    audits.pardon(WORKER.node_id)
    assert not audits.passed(WORKER.node_id)
    second.cancel()


async def test_a_validator_never_measures_its_own_work() -> None:
    own, audits = Own(), audit_queue()
    waiting = await present(audits)
    mine = dataclasses.replace(call(), node=VALIDATOR.node_id)
    assert (await remote(own, audits).audit_rollouts(mine)).validator == b""
    assert isinstance((await waiting)[0], AuditWait)


async def test_who_of_several_validators_measures_a_job_is_drawn_and_not_who_asks_oftenest() -> (
    None
):
    audits = audit_queue(VALIDATOR, SECOND, chance=random.Random(5))
    servers = [asyncio.create_task(serve(audits, VALIDATOR)) for _ in range(6)]
    servers.append(asyncio.create_task(serve(audits, SECOND)))
    auditors = remote(Own(), audits)
    by: Counter[bytes] = Counter()
    for _ in range(60):
        await until(lambda: all(one.waiting for one in audits.validators.values()))
        by[(await auditors.audit_rollouts(call())).validator] += 1
    for server in servers:
        server.cancel()
    assert by[VALIDATOR.node_id] + by[SECOND.node_id] == 60
    assert 18 <= by[SECOND.node_id] <= 42


async def test_a_validator_that_finishes_jobs_between_is_benched_longer_all_the_same() -> None:
    now = [1000.0]
    audits = audit_queue(clock=lambda: now[0])
    for pause in (BENCH_S, 2 * BENCH_S, 4 * BENCH_S):
        for failed in ("", "no memory left"):
            job, waiting = await job_of(audits)
            rows = {"measured": (), "failed": failed} if failed else {}
            await audits.take_in(VALIDATOR.node_id, sealed(report(job, **rows)))
            assert bool(await waiting) is not bool(failed)
        assert audits.validators[VALIDATOR.node_id].benched_until == now[0] + pause
        now[0] += pause + 1


# -- restarts and operators ------------------------------------------------------------------------


async def test_a_disqualified_validator_stays_so_when_the_trainer_starts_again(
    tmp_path: Path,
) -> None:
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        audits = audit_queue()
        audits.keep_in(ledger)
        validator = asyncio.create_task(serve(audits, VALIDATOR, GUILTY, CLEAN))
        await asyncio.sleep(0)
        await remote(Own(), audits).audit_rollouts(call())
        with refuses(Reason.BANNED):
            await validator
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        again = audit_queue()
        again.keep_in(ledger)
        with refuses(Reason.BANNED):
            await request(again)
        assert again.record(VALIDATOR.node_id) == audits.record(VALIDATOR.node_id)
        assert VALIDATOR.node_id.hex() in again.warnings()[0]
        again.pardon(VALIDATOR.node_id)
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        pardoned = audit_queue()
        pardoned.keep_in(ledger)
        assert isinstance((await request(pardoned))[0], AuditWait)


async def test_jobs_of_a_validator_that_is_disqualified_are_taken_back_at_once() -> None:
    audits = audit_queue()
    job, waiting = await job_of(audits)
    audits.ban(VALIDATOR.node_id, "by the operator")
    assert await waiting is None
    with refuses(Reason.BANNED):
        await audits.take_in(VALIDATOR.node_id, sealed(report(job)))


async def test_a_validator_is_believed_again_when_its_ban_is_over() -> None:
    audits = audit_queue()
    audits.ban(VALIDATOR.node_id, "by the operator", 1_000.0)
    audits.end_bans(999.0)
    with refuses(Reason.BANNED):
        await request(audits)
    audits.end_bans(1_000.0)
    assert isinstance((await request(audits))[0], AuditWait)


def test_what_is_held_against_a_validator_holds_for_the_key_that_takes_its_place(
    tmp_path: Path,
) -> None:
    new = bytes([7]) * 32
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        audits = audit_queue()
        audits.keep_in(ledger)
        audits.ban(VALIDATOR.node_id, "by the operator")
        audits.record(VALIDATOR.node_id).note_pass(WORKER.node_id)
        audits.succeed(VALIDATOR.node_id, new)
        audits.succeed(WORKER.node_id, new)
        again = audit_queue()
        again.keep_in(ledger)
    assert again.record(new).disqualified == "by the operator"
    assert again.passed(new), "the trainer measures the work of the worker's new key itself, too"


def test_records_that_cannot_be_read_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        ledger.set(VALIDATORS, b'{"00": 1}')
        with pytest.raises(StorageError, match="restore the ledger from a copy"):
            audit_queue().keep_in(ledger)
