"""Audits by validators: hand out jobs, collect reports, repeat some measurements.

A report counts only if its job, submission and challenge are ours and its signer is the validator that was
given the job.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

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
from ...protocol.reputation import Outcome
from ..ops.errors import EngineError, UsageError
from ..p2p.rpc import send
from ..p2p.transport import Stream, TransportError
from ..p2p.uploads import GRACE_S, MIN_RATE, PIECE_BYTES
from ..verification.auditor import (
    MEASURES,
    AuditAnswer,
    AuditCall,
    AuditService,
    AuditTarget,
    Measured,
    Unreadable,
    evidence,
    plain_turns,
)
from ..verification.checks import CheckedRollout
from ..verification.judge import judge

logger = logging.getLogger(__name__)

HOLD_S = 0.25
"""Time that a validator's request waits for a job; the next request lists versions fetched meanwhile."""
RETRY_MS = 20
ALIVE_S = 5.0
"""A validator without a request for this long is not waited for."""
TAKE_S = 2.0
"""Time that a job waits for a validator to take it."""
BENCH_S = 60.0
"""First pause of a validator that let a job time out; it doubles with each further one in a row."""
MAX_BENCH_S = 3600.0
MAX_JOBS = 16
"""Maximum number of jobs at a time; the trainer audits others itself."""
KEPT_NUMBERS = 1024
"""Numbers of finished jobs that are remembered, to tell a replay from an unknown job."""
MIN_COMPARED = 32
"""Rollouts measured twice before small differences in judgement count."""
MAX_DIFFERING = 0.25
"""Maximum share of differing judgements among them; with honest noise it is a few in a hundred."""
OVERLAP = 0.05
"""Share of a validator's jobs that is measured again."""
FIRST_JOBS = 4
"""Jobs of a validator that is new in this run; all of them are measured again."""

Found = Sequence[Measured | Unreadable]
"""The measurements of one rollout: one entry per branch."""


@dataclass
class ValidatorRecord:
    """Results of a validator's reports, compared with the trainer's own audits."""

    jobs: int = 0
    """Reports received from it."""
    compared: int = 0
    differing: int = 0
    disqualified: str = ""
    """Reason why its reports no longer count in this run; empty while they count."""

    def compare(self, theirs: Sequence[Outcome], ours: Sequence[Outcome]) -> bool:
        """Compare one job that was measured twice; return whether all judgements agree.

        Two honest machines differ by noise: one may judge clean and the other suspect, but never guilty.
        """
        differing = 0
        for told, own in zip(theirs, ours, strict=True):
            differing += told != own
            if {told, own} == {"clean", "rejected"}:
                self.disqualified = f"it called {told} what the trainer finds {own}"
        self.compared += len(theirs)
        self.differing += differing
        enough = self.compared >= MIN_COMPARED
        if enough and self.differing > MAX_DIFFERING * self.compared and not self.disqualified:
            self.disqualified = (
                f"{self.differing} of {self.compared} rollouts were judged otherwise by the trainer"
            )
        return not differing


@dataclass
class ValidatorState:
    """The last known state of one validator."""

    record: ValidatorRecord = field(default_factory=ValidatorRecord)
    asked: float = 0.0
    """Monotonic seconds of its last request."""
    epoch: int = 0
    versions: frozenset[int] = frozenset()
    missed: int = 0
    """Jobs in a row that timed out or failed."""
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

    def places(self) -> list[tuple[int, int]]:
        """Return (group, rollout) of each chosen rollout, in order."""
        return [(one.rollout.group, one.rollout.index) for one in self.call.chosen]


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
    ) -> None:
        """`validators` are the node ids whose reports count; `timeout_s` is the time for one job."""
        self._run_id = run_id
        self._trainer = trainer
        self._timeout_s = timeout_s
        self._clock = clock
        self._jobs: dict[int, AssignedAudit] = {}
        self._finished = RecentDict[int, None](KEPT_NUMBERS)
        self._numbers = 0
        self._changed = asyncio.Condition()
        self.validators = {node: ValidatorState() for node in validators}

    def records(self) -> dict[bytes, ValidatorRecord]:
        """Return the record of each validator so far."""
        return {node: state.record for node, state in self.validators.items()}

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
        if validator.record.disqualified:
            raise RemoteProtocolError(Reason.BANNED, validator.record.disqualified)
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
        """Assign the oldest job that this validator can do."""
        if self._clock() < validator.benched_until:
            return None
        for job in self._jobs.values():
            held = job.epoch == validator.epoch and job.versions <= validator.versions
            if held and not job.validator:
                job.validator = peer
                job.taken.set()
                return job
        return None

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

    def available(self, versions: frozenset[int], epoch: int) -> bool:
        """Return whether a validator is present that has these versions, apart from the newest ones."""
        now = self._clock()
        return any(
            (one.waiting > 0 or now - one.asked < ALIVE_S)
            and now >= one.benched_until
            and not one.record.disqualified
            and one.holds(versions, epoch)
            for one in self.validators.values()
        )

    async def report(self, call: AuditCall, epoch: int) -> tuple[bytes, AuditReport] | None:
        """Have a validator audit; return its id and report, or None if none reported in time."""
        versions = frozenset(call.states)
        fits = len(call.chosen) <= MAX_CHOSEN and len(versions) <= MAX_SHELF
        if not fits or len(self._jobs) >= MAX_JOBS or not self.available(versions, epoch):
            return None
        self._numbers += 1
        job = AssignedAudit(
            self._numbers, call, versions, epoch, asyncio.get_running_loop().create_future()
        )
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
        self.validators[job.validator].missed = 0
        return job.validator, report

    def _bench(self, job: AssignedAudit, why: str) -> None:
        validator = self.validators[job.validator]
        pause = min(BENCH_S * 2**validator.missed, MAX_BENCH_S)
        validator.missed += 1
        validator.benched_until = self._clock() + pause
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
        """`epoch` returns the current epoch; `chance` decides which jobs are measured again.

        `chance` must be secret.
        """
        self._own = own
        self._queue = queue
        self._epoch = epoch
        self._chance = chance
        self._overlap = overlap
        self._first_jobs = first_jobs

    async def audit(self, call: AuditCall) -> AuditAnswer:
        """See AuditService.audit().

        The trainer audits rollouts of several branches itself: the bundle lacks their turns.
        """
        plain = [one for one in call.chosen if _is_plain(one) and not call.by_trainer]
        told = (
            await self._queue.report(replace(call, chosen=plain), self._epoch()) if plain else None
        )
        if told is None:
            return await self._own.audit(call)
        answer = await self._confirm(replace(call, chosen=plain), *told)
        rest = [one for one in call.chosen if not _is_plain(one)]
        if not rest:
            return answer
        theirs = iter(answer.measured)
        ours = iter((await self._own.audit(replace(call, chosen=rest))).measured)
        measured = [next(theirs if _is_plain(one) else ours) for one in call.chosen]
        return AuditAnswer(measured, answer.validator)

    async def _confirm(self, call: AuditCall, validator: bytes, report: AuditReport) -> AuditAnswer:
        """Return the report as an answer, or for some jobs the trainer's own measurements."""
        told = _measured(call.chosen, report)
        record = self._queue.validators[validator].record
        record.jobs += 1
        drawn = record.jobs <= self._first_jobs or self._chance.random() < self._overlap
        outcomes = _outcomes(call, told)
        # Measured bounds come from the trainer's own audits: a validator's device may add its own noise.
        condemned = call.contract.bounds == "measured" and set(outcomes) != {"clean"}
        if not drawn and not condemned:
            return AuditAnswer(told, validator)
        try:
            own = await self._own.audit(call)
        except EngineError as error:
            logger.warning("a report of %s is not compared: %s", short(validator), error)
            if condemned:
                raise
            return AuditAnswer(told, validator)
        if not drawn:
            return own
        if record.compare(outcomes, _outcomes(call, own.measured)):
            return AuditAnswer(told, validator)
        if record.disqualified:
            logger.error(
                "VALIDATOR %s IS DISQUALIFIED for this run: %s. Take it from verification.validators "
                "unless its operator can explain it",
                validator.hex(),
                record.disqualified,
            )
        return own


def read_nodes(name: str, texts: Sequence[str]) -> list[bytes]:
    """Parse the node ids of the setting `name`. Raises UsageError."""
    try:
        nodes = [bytes.fromhex(text) for text in texts]
    except ValueError:
        nodes = [b""]
    if any(len(node) != 32 for node in nodes):
        raise UsageError(f"{name} holds node ids of 64 hex digits: `primerl-node id` shows them")
    return nodes


def _outcomes(call: AuditCall, measured: Sequence[Found]) -> list[Outcome]:
    return [
        _outcome(one.rollout, found, call.contract)
        for one, found in zip(call.chosen, measured, strict=True)
    ]


def _is_plain(one: AuditTarget) -> bool:
    return plain_turns(one.rollout.branches) is not None


def _outcome(rollout: CheckedRollout, measured: Found, contract: ProofContract) -> Outcome:
    """Judge one rollout; a rollout unreadable through no fault of the worker counts as suspect."""
    unreadable = [one for one in measured if isinstance(one, Unreadable)]
    if unreadable:
        return "rejected" if any(one.proof for one in unreadable) else "suspect"
    found = evidence(rollout, [one for one in measured if isinstance(one, Measured)])
    judgement = judge(found, contract)
    if judgement.reason is not None:
        return "rejected"
    return "suspect" if judgement.suspect else "clean"


def _measured(chosen: Sequence[AuditTarget], report: AuditReport) -> list[Found]:
    """Convert the rows of a report into the measurements of the chosen rollouts, in order."""
    rows = rows_by_place(report)
    crossed = {(row.group, row.rollout): row.distances for row in report.crossed or ()}
    found: list[Found] = []
    for one in chosen:
        place = one.rollout.group, one.rollout.index
        row = rows[place]
        if isinstance(row, UnreadableRow):
            found.append([Unreadable(row.detail, row.proof)])
            continue
        distances = crossed.get(place, ())
        if len(distances) != len(one.items[0].boundaries):
            distances = ()
        values = (getattr(row, name) for name in MEASURES)
        found.append([Measured(row.tokens, *values, boundaries=distances)])
    return found
