"""Audits by validators: hand out jobs, collect reports, repeat some measurements.

Invariants:
- a report counts only if its job, submission and challenge are ours and its signer is the validator that was
  given the job;
- nothing in a report counts against a worker: what a validator does not call clean is measured by the trainer,
  and where that is not possible it is an audit that failed;
- which rollouts that a validator calls clean are measured again is drawn after its report, and secretly;
- a disqualified validator stays so when the trainer starts again: the ledger keeps its record.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from msgspec.structs import astuple

from ...crypto.hashing import short
from ...protocol.audits import (
    MAX_CHOSEN,
    AuditReport,
    Place,
    UnreadableRow,
    check_rows,
    rows_by_place,
)
from ...protocol.envelope import Purpose, unseal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import ProofContract
from ...protocol.messages import (
    MAX_SHELF,
    AuditDone,
    AuditJob,
    AuditRequest,
    AuditWait,
    OtherPolicies,
)
from ...protocol.recent import RecentDict
from ...protocol.reputation import other_step
from ...protocol.validators import (
    Comparison,
    Judged,
    ValidatorRecord,
    decode_records,
    encode_records,
)
from ..errors import EngineError, StorageError
from ..p2p.rpc import send
from ..p2p.transport import Stream, TransportError
from ..p2p.uploads import GRACE_S, MIN_RATE, PIECE_BYTES
from ..storage.ledger import VALIDATORS, Ledger
from ..verification.auditor import (
    AuditAnswer,
    AuditCall,
    AuditService,
    AuditTarget,
    Measured,
    Unreadable,
    boundary_distances,
    evidence,
    plain_turns,
)
from ..verification.bounds import PROVISIONAL
from ..verification.judgement import blame, first_above, judge

logger = logging.getLogger(__name__)

HOLD_S = 0.25
"""Time that a validator's request waits for a job; the next request lists versions fetched meanwhile."""
RETRY_MS = 20
ALIVE_S = 5.0
"""A validator without a request for this long is not waited for."""
TAKE_S = 2.0
"""Time that a job waits for a validator to take it."""
RESERVED_S = 0.25
"""Time in which only the validator that was drawn for a job may take it."""
BENCH_S = 60.0
"""First pause of a validator that let a job time out; it doubles with each further one."""
MAX_BENCH_S = 3600.0
"""Longest such pause; one is forgotten in each such time that passes after a pause."""
MAX_JOBS = 16
"""Maximum number of jobs at a time; the trainer audits others itself."""
KEPT_NUMBERS = 1024
"""Numbers of finished jobs that are remembered, to tell a replay from an unknown job."""
OVERLAP = 0.05
"""Share of the rollouts that a validator calls clean that is measured again."""
DRAWN_OF_JOB = 0.2
"""Share of the rollouts of a drawn job that is measured again: OVERLAP / DRAWN_OF_JOB of the jobs are drawn.
With few rollouts of many jobs a cheat is found sooner than with all rollouts of a few; with one of each job the
trainer would load almost as many versions as without validators."""
FIRST_JOBS = 4
"""Jobs of a validator that is new in this run; all of them are measured again."""
CONFIRMED_MOST = 8
"""Rejections of one job that are measured again first; if all are confirmed, the others are left alone."""
UNCONFIRMED_NATS = 4.0
"""Most evidence of another policy against a worker that counts on the word of validators; a ban takes 8 at
least."""
SAME_NATS = 1.0
"""Least excess of a validator's evidence of another policy over the trainer's that counts as a difference."""
MAX_WORKERS = 4096
"""Workers whose unconfirmed evidence is remembered."""
UNCONFIRMED = "a validator did not find it clean, and it was not measured again"

Found = Sequence[Measured | Unreadable]
"""The measurements of one rollout: one entry per branch."""


@dataclass
class ValidatorState:
    """The last known state of one validator."""

    asked: float = 0.0
    """Monotonic seconds of its last request."""
    epoch: int = 0
    versions: frozenset[int] = frozenset()
    missed: int = 0
    """Jobs that timed out or failed, apart from those that are forgotten."""
    benched_until: float = 0.0
    waiting: int = 0
    """Requests that wait for a job."""

    def holds(self, versions: frozenset[int], epoch: int) -> bool:
        """Return whether it has these versions; those beyond its newest are ignored."""
        newest = max(self.versions, default=-1)
        old = {version for version in versions if version <= newest}
        return self.epoch == epoch and bool(old) and old <= self.versions


@dataclass
class AssignedAudit:
    """An audit that waits for a validator or its report."""

    number: int
    call: AuditCall
    versions: frozenset[int]
    epoch: int
    done: "asyncio.Future[AuditReport | None]"
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    validator: bytes = b""
    """The validator that took the job; empty while none has."""
    drawn: bytes = b""
    """The validator that alone may take it until `open_at`; empty for none."""
    open_at: float = 0.0

    def places(self) -> list[tuple[int, int]]:
        """Return (group, rollout) of each chosen rollout, in order."""
        return [(target.rollout.group, target.rollout.index) for target in self.call.chosen]


class AuditQueue:
    """Hands audits to validators and collects reports; without validators it refuses all."""

    def __init__(
        self,
        *,
        run_id: bytes = b"",
        trainer: bytes = b"",
        validators: Iterable[bytes] = (),
        timeout_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        """`validators` are the node ids whose reports count; `timeout_s` is the time for one job.

        `chance` draws who measures what, by default secretly.
        """
        self._run_id = run_id
        self._trainer = trainer
        self._timeout_s = timeout_s
        self._clock = clock
        self._chance = chance or random.SystemRandom()
        self._ledger: Ledger | None = None
        self._jobs: dict[int, AssignedAudit] = {}
        self._finished = RecentDict[int, None](KEPT_NUMBERS)
        self._numbers = 0
        self._changed = asyncio.Condition()
        self.validators = {node: ValidatorState() for node in validators}
        self._records = {node: ValidatorRecord() for node in self.validators}
        """Also of validators that are no longer named, since they may be named again."""

    # -- records of validators ------------------------------------------------------------------------

    def keep_in(self, ledger: Ledger) -> None:
        """Load the records of earlier starts of this run, and keep all in `ledger` from now on.

        Raises StorageError.
        """
        if self._ledger is ledger:
            return
        self._ledger = ledger
        try:
            stored = decode_records(ledger.get(VALIDATORS))
            self._records |= {bytes.fromhex(node): record for node, record in stored.items()}
        except ValueError as error:  # msgspec.DecodeError is one
            raise StorageError(
                f"the records of validators in {ledger.path} cannot be read ({error}): restore "
                "the ledger from a copy"
            ) from error
        for warning in self.warnings():
            logger.warning("%s", warning)

    def record(self, node: bytes) -> ValidatorRecord:
        """Return the record of a validator of this run."""
        return self._records[node]

    def records(self) -> dict[bytes, ValidatorRecord]:
        """Return the record of each validator so far."""
        return {node: self._records[node] for node in self.validators}

    def passed(self, worker: bytes) -> bool:
        """Return whether a validator called rejected work of this worker clean."""
        name = worker.hex()
        return any(name in record.passed for record in self._records.values())

    def warnings(self) -> list[str]:
        """Name the validators that are disqualified, with what to do."""
        return [
            f"validator {node.hex()} is disqualified for this run: {record.disqualified}. Take it from "
            "verification.validators, or `primerl-node pardon` it if its operator can explain it"
            for node, record in self.records().items()
            if record.disqualified
        ]

    def save(self, node: bytes) -> None:
        """Keep the changed record of a validator; if it is disqualified, take its jobs back."""
        self._save()
        if self._records[node].disqualified:
            for job in self._jobs.values():
                if job.validator == node:
                    _give_up(job)

    def ban(self, node: bytes, why: str, until: float = 0.0) -> None:
        """Disqualify a node if it is a validator; `why` is a sentence, `until` as in Reputation.ban()."""
        if node in self._records:
            self._records[node].disqualify(why, until)
            self.save(node)

    def succeed(self, node: bytes, successor: bytes) -> None:
        """Let what is known of a node, as a validator and to validators, hold for its successor."""
        for record in self._records.values():
            if node.hex() in record.passed:
                record.note_pass(successor)
        if node in self._records:
            self._records[successor] = copy(self._records[node])
        self._save()

    def _save(self) -> None:
        if self._ledger is not None:
            named = {validator.hex(): record for validator, record in self._records.items()}
            self._ledger.set(VALIDATORS, encode_records(named))

    def end_bans(self, now: float) -> None:
        """Believe validators again whose ban is over; `now` in Unix seconds."""
        for node, record in self._records.items():
            if record.end_ban(now):
                logger.warning("the ban of validator %s is over", short(node))
                self.save(node)

    def pardon(self, node: bytes) -> None:
        """Begin the record of a validator anew, and forget that validators covered for a worker."""
        for validator, record in self._records.items():
            if node.hex() in record.passed:
                record.forget_pass(node)
                self.save(validator)
        if node in self._records:
            self._records[node] = ValidatorRecord()
            self.save(node)

    # -- requests of validators -----------------------------------------------------------------------

    async def hand_out(self, peer: bytes, stream: Stream, request: AuditRequest) -> None:
        """Answer one request with a job and the submission's bytes, or with a request to wait.

        Raises:
            RemoteProtocolError: NOT_ADMITTED if the node is not a validator of this run, BANNED if it was
                disqualified.
        """
        validator = self._admit(peer)
        validator.epoch, validator.versions = request.term, frozenset(request.versions)
        job = await self._wait_job(peer, validator)
        if job is None:
            await send(stream, AuditWait(RETRY_MS))
            await stream.finish()
            return
        try:
            await self._send_job(stream, job)
        except (TransportError, TimeoutError):
            _give_up(job)
            raise

    async def take_in(self, peer: bytes, message: AuditDone) -> None:
        """Accept a report.

        Raises:
            RemoteProtocolError: NOT_ADMITTED, BANNED, MALFORMED and errors of unseal(); NOT_FOUND for an
                unknown job, WRONG_RECIPIENT for another validator's, REPLAYED for one already answered or
                another challenge, WRONG_DIGEST for another submission.
        """
        self._admit(peer)
        report = unseal(
            message.report,
            Purpose.AUDIT,
            AuditReport,
            now=int(time.time()),
            run=self._run_id,
            signer=peer,
            recipient=self._trainer,
        ).body
        job = self._find(peer, report)
        check_rows(report, job.places())
        self._finish(job.number)
        job.done.set_result(report)

    def _admit(self, peer: bytes) -> ValidatorState:
        validator = self.validators.get(peer)
        if validator is None:
            detail = "no validator of this run: ask its operator to add your id to verification.validators"
            raise RemoteProtocolError(Reason.NOT_ADMITTED, detail)
        if why := self._records[peer].disqualified:
            raise RemoteProtocolError(Reason.BANNED, why)
        validator.asked = self._clock()
        return validator

    def _find(self, peer: bytes, report: AuditReport) -> AssignedAudit:
        job = self._jobs.get(report.job)
        if job is None or job.done.done():
            if report.job in self._finished:
                raise RemoteProtocolError(Reason.REPLAYED, f"job {report.job} was answered")
            raise RemoteProtocolError(Reason.NOT_FOUND, f"job {report.job} is not out")
        if job.validator != peer:
            raise RemoteProtocolError(Reason.WRONG_RECIPIENT, f"job {report.job} is another's")
        if report.submission != job.call.digest:
            raise RemoteProtocolError(Reason.WRONG_DIGEST, "a report on another submission")
        if report.challenge != job.call.challenge:
            raise RemoteProtocolError(Reason.REPLAYED, "a report on another challenge")
        return job

    async def _wait_job(self, peer: bytes, validator: ValidatorState) -> AssignedAudit | None:
        validator.waiting += 1
        try:
            async with asyncio.timeout(HOLD_S), self._changed:
                while (job := self._next_job(peer, validator)) is None:
                    await self._changed.wait()
                return job
        except TimeoutError:
            return None
        finally:
            validator.waiting -= 1
            validator.asked = self._clock()

    def _next_job(self, peer: bytes, validator: ValidatorState) -> AssignedAudit | None:
        """Assign the oldest job that this validator can do and another one was not drawn for."""
        now = self._clock()
        if now < validator.benched_until:
            return None
        for job in self._jobs.values():
            others = job.drawn not in (b"", peer) and now < job.open_at
            if not job.validator and not others and self._can_do(peer, job):
                job.validator = peer
                job.taken.set()
                return job
        return None

    def _can_do(self, peer: bytes, job: AssignedAudit) -> bool:
        """Return whether a validator has the versions of a job now; it never measures its own work."""
        validator = self.validators[peer]
        has_versions = job.epoch == validator.epoch and job.versions <= validator.versions
        return has_versions and job.call.node != peer

    def _draw(self, job: AssignedAudit) -> bytes:
        """Draw one of the validators that wait for a job like this; empty if fewer than two do.

        So no validator has the work of a worker by asking at the right moment, or oftener than others.
        """
        now = self._clock()
        able = [
            node
            for node, validator in self.validators.items()
            if validator.waiting > 0 and now >= validator.benched_until and self._can_do(node, job)
        ]
        return self._chance.choice(able) if len(able) > 1 else b""

    async def _send_job(self, stream: Stream, job: AssignedAudit) -> None:
        call = job.call
        message = AuditJob(
            job=job.number,
            node=call.node,
            submission=call.digest,
            size=len(call.sealed),
            challenge=call.challenge,
            chosen=tuple(Place(*place) for place in job.places()),
            versions=tuple(sorted(job.versions)),
            others=tuple(
                OtherPolicies(claimed, tuple(others)) for claimed, others in call.others.items()
            ),
            seconds=self._timeout_s,
        )
        async with asyncio.timeout(GRACE_S + len(call.sealed) / MIN_RATE):
            await send(stream, message)
            for start in range(0, len(call.sealed), PIECE_BYTES):
                await stream.write(call.sealed[start : start + PIECE_BYTES])
            await stream.finish()

    # -- requests of the trainer ---------------------------------------------------------------------

    def available(self, versions: frozenset[int], epoch: int, worker: bytes = b"") -> bool:
        """Return whether a validator other than `worker` is present that has these versions, apart from the
        newest ones."""
        now = self._clock()
        return any(
            (validator.waiting > 0 or now - validator.asked < ALIVE_S)
            and now >= validator.benched_until
            and not self._records[node].disqualified
            and node != worker
            and validator.holds(versions, epoch)
            for node, validator in self.validators.items()
        )

    async def report(self, call: AuditCall, epoch: int) -> tuple[bytes, AuditReport] | None:
        """Have a validator audit; return its id and report, or None if none reported in time."""
        versions = frozenset(call.states)
        fits = len(call.chosen) <= MAX_CHOSEN and len(versions) <= MAX_SHELF
        if not fits or len(self._jobs) >= MAX_JOBS:
            return None
        if not self.available(versions, epoch, call.node):
            return None
        self._numbers += 1
        job = AssignedAudit(
            self._numbers, call, versions, epoch, asyncio.get_running_loop().create_future()
        )
        job.drawn, job.open_at = self._draw(job), self._clock() + RESERVED_S
        self._jobs[job.number] = job
        await self._notify()
        try:
            return await self._answer(job)
        finally:
            self._finish(job.number)
            job.done.cancel()

    async def _answer(self, job: AssignedAudit) -> tuple[bytes, AuditReport] | None:
        try:
            async with asyncio.timeout(TAKE_S):
                await job.taken.wait()
        except TimeoutError:
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                report = await asyncio.shield(job.done)
        except TimeoutError:
            self._bench(job, "did not answer in time")
            return None
        if report is None or report.failed:
            self._bench(job, f"could not audit: {report.failed if report else 'the stream broke'}")
            return None
        return job.validator, report

    def _bench(self, job: AssignedAudit, why: str) -> None:
        """Give a validator no jobs for a time, once for all jobs that it had then.

        Finished jobs do not shorten the next pause: else it could delay every second job without end.
        """
        validator, now = self.validators[job.validator], self._clock()
        if now < validator.benched_until or self._records[job.validator].disqualified:
            return
        forgotten = int((now - validator.benched_until) / MAX_BENCH_S)
        validator.missed = max(0, validator.missed - forgotten)
        pause = min(BENCH_S * 2**validator.missed, MAX_BENCH_S)
        validator.missed += 1
        validator.benched_until = now + pause
        logger.warning(
            "validator %s %s; it is given nothing for %.0f s", short(job.validator), why, pause
        )

    def _finish(self, number: int) -> None:
        if self._jobs.pop(number, None) is None:
            return
        self._finished[number] = None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _give_up(job: AssignedAudit) -> None:
    """Release the trainer from waiting for a job that did not reach its validator."""
    if not job.done.done():
        job.done.set_result(None)


class RemoteAuditors:
    """An AuditService that uses validators if available, else the trainer itself."""

    def __init__(
        self,
        own: AuditService,
        queue: AuditQueue,
        *,
        epoch: Callable[[], int],
        chance: random.Random,
        overlap: float = OVERLAP,
        first_jobs: int = FIRST_JOBS,
    ) -> None:
        """`epoch` returns the current epoch; `chance` decides which rollouts are measured again.

        `chance` must be secret; `overlap` is the share of them.
        """
        self._own = own
        self._queue = queue
        self._epoch = epoch
        self._chance = chance
        self._of_job = max(DRAWN_OF_JOB, overlap)
        self._of_jobs = overlap / self._of_job
        self._first_jobs = first_jobs
        self._unconfirmed = RecentDict[bytes, float](MAX_WORKERS)
        """Evidence of another policy against workers that only validators found: a CUSUM, in nats."""

    async def audit_rollouts(self, call: AuditCall) -> AuditAnswer:
        """See AuditService.audit_rollouts().

        The trainer audits rollouts of several branches itself: the bundle lacks their turns. And those of a
        worker that a validator has covered for.
        """
        own = call.by_trainer or self._queue.passed(call.node)
        plain = [target for target in call.chosen if _is_plain(target) and not own]
        reported = (
            await self._queue.report(replace(call, chosen=plain), self._epoch()) if plain else None
        )
        if reported is None:
            return await self._own.audit_rollouts(call)
        answer = await self._confirm(replace(call, chosen=plain), *reported)
        rest = [target for target in call.chosen if not _is_plain(target)]
        if not rest:
            return answer
        theirs = iter(answer.measured)
        ours = iter((await self._own.audit_rollouts(replace(call, chosen=rest))).measured)
        measured = [next(theirs if _is_plain(target) else ours) for target in call.chosen]
        return AuditAnswer(measured, answer.validator)

    async def _confirm(self, call: AuditCall, validator: bytes, report: AuditReport) -> AuditAnswer:
        """Return the report's measurements, with the trainer's own in place of those that it repeats.

        It repeats a share drawn by lot, and what counts against the worker. Of many rejections it first repeats
        a few: if they are confirmed, the worker is as good as banned, and the others are left alone.
        """
        record, reported = self._queue.record(validator), _measured(call.chosen, report)
        theirs = dict(enumerate(_judge_all(call, reported)))
        by_lot = self._draw(record.jobs < self._first_jobs, theirs)
        record.jobs += 1
        loud = self._loud(call, theirs, reported)
        theirs |= dict.fromkeys(loud, Judged("suspect"))
        condemned = {n for n, judged in theirs.items() if judged.outcome != "clean"}
        rejected = {n for n in condemned if theirs[n].outcome == "rejected"}
        sample = set(self._chance.sample(sorted(rejected), min(CONFIRMED_MOST, len(rejected))))
        own = await self._repeat(call, by_lot | condemned - rejected | sample)
        ours = _judge_some(call, own)
        if any(n in ours and ours[n].outcome != "rejected" for n in sample):
            own |= await self._repeat(call, rejected - own.keys())
            ours = _judge_some(call, own)
        for n in loud & own.keys():
            if (
                ours[n].outcome == "clean"
                and _step(call, own[n]) > _step(call, reported[n]) - SAME_NATS
            ):
                ours[n] = theirs[n]
        pairs = {n: Comparison(theirs[n], judged) for n, judged in ours.items()}
        believed = not record.disqualified
        record.note(
            call.node,
            len(reported),
            [pair for n, pair in pairs.items() if n in by_lot],
            [pair for n, pair in pairs.items() if n in condemned],
        )
        self._queue.save(validator)
        if record.disqualified:
            if believed:
                logger.error(
                    "VALIDATOR %s IS DISQUALIFIED for this run: %s. Take it from verification.validators "
                    "unless its operator can explain it",
                    validator.hex(),
                    record.disqualified,
                )
            condemned = set(theirs)
            own |= await self._repeat(call, condemned - own.keys())
        unmeasured: Found = [Unreadable(UNCONFIRMED, proof=False)]
        answer = [
            own[n] if n in own else unmeasured if n in condemned else measured
            for n, measured in enumerate(reported)
        ]
        agreed = all(pair.theirs.outcome == pair.ours.outcome for pair in pairs.values())
        used = not record.disqualified and (agreed or len(own) < len(reported))
        return AuditAnswer(answer, validator if used else b"")

    def _draw(self, all_of_it: bool, rollouts: Collection[int]) -> set[int]:
        """Draw the rollouts of a job that are measured again whatever the report says."""
        if all_of_it:
            return set(rollouts)
        if self._chance.random() >= self._of_jobs:
            return set()
        return {n for n in rollouts if self._chance.random() < self._of_job}

    def _loud(
        self, call: AuditCall, theirs: Mapping[int, Judged], reported: Sequence[Found]
    ) -> set[int]:
        """Find the clean rollouts that would add too much evidence of another policy on a validator's word."""
        steps = {
            n: _step(call, measured)
            for n, measured in enumerate(reported)
            if theirs[n].outcome == "clean"
        }
        nats = most = self._unconfirmed.get(call.node, 0.0)
        for step in steps.values():
            nats = max(0.0, nats + step)
            most = max(most, nats)
        loud = (
            {n for n, step in steps.items() if step > 0} if most > UNCONFIRMED_NATS else set[int]()
        )
        if loud:
            nats = self._unconfirmed.get(call.node, 0.0)
            nats = max(0.0, nats + sum(step for n, step in steps.items() if n not in loud))
        self._unconfirmed[call.node] = nats
        return loud

    async def _repeat(self, call: AuditCall, rollouts: Collection[int]) -> dict[int, Found]:
        """Measure some rollouts of a job; returns nothing if the trainer cannot audit now."""
        numbers = sorted(rollouts)
        if not numbers:
            return {}
        chosen = [call.chosen[n] for n in numbers]
        try:
            answer = await self._own.audit_rollouts(replace(call, chosen=chosen))
        except EngineError as error:
            logger.warning(
                "%d rollouts that a validator measured are not measured again: %s",
                len(numbers),
                error,
            )
            return {}
        return dict(zip(numbers, answer.measured, strict=True))


def _judge_all(call: AuditCall, measured: Sequence[Found]) -> list[Judged]:
    return [
        _judged(target, branches, call.contract)
        for target, branches in zip(call.chosen, measured, strict=True)
    ]


def _judge_some(call: AuditCall, measured: Mapping[int, Found]) -> dict[int, Judged]:
    return {n: _judged(call.chosen[n], branches, call.contract) for n, branches in measured.items()}


def _step(call: AuditCall, measured: Found) -> float:
    """Return what a measured rollout adds to the test for another policy, nats; 0 if it is unreadable."""
    if any(isinstance(branch, Unreadable) for branch in measured):
        return 0.0
    nats = max(branch.other_policy for branch in measured if isinstance(branch, Measured))
    return other_step(nats, call.contract.other_scale)


def _is_plain(target: AuditTarget) -> bool:
    return plain_turns(target.rollout.branches) is not None


def _judged(target: AuditTarget, measured: Found, contract: ProofContract) -> Judged:
    """Judge one rollout as the verifier does; one unreadable through no fault of the worker is suspect."""
    unreadable = [branch for branch in measured if isinstance(branch, Unreadable)]
    if unreadable:
        proof = any(branch.proof for branch in unreadable)
        return Judged("rejected", certain=True) if proof else Judged("suspect", failed=True)
    numbers = [branch for branch in measured if isinstance(branch, Measured)]
    measures = evidence(target.rollout, numbers)
    judgement = judge(measures, contract)
    outcome = blame(measures, judgement, boundary_distances(numbers), contract).outcome
    certain = judgement.reason is not None and first_above(measures, PROVISIONAL) != ""
    return Judged(outcome, certain=certain)


def _measured(chosen: Sequence[AuditTarget], report: AuditReport) -> list[Found]:
    """Convert the rows of a report into the measurements of the chosen rollouts, in order."""
    rows = rows_by_place(report)
    crossed = {(row.group, row.rollout): row.distances for row in report.crossed or ()}
    measured: list[Found] = []
    for target in chosen:
        place = target.rollout.group, target.rollout.index
        row = rows[place]
        if isinstance(row, UnreadableRow):
            measured.append([Unreadable(row.detail, row.proof)])
            continue
        distances = crossed.get(place, ())
        if len(distances) != len(target.items[0].boundaries):
            distances = ()
        measured.append([Measured(0, 0, *astuple(row)[2:], boundaries=distances)])
    return measured
