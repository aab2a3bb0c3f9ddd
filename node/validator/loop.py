"""The validator role: ask the trainer for audits, measure, report.

It trusts nothing unsigned: the submission carries the worker's signature, the lease the trainer's, and the
weights are those of signed heads. It reports measurements; the trainer judges.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isnan
from pathlib import Path

from msgspec import UNSET

from ...crypto.hashing import digest, short
from ...protocol.audits import (
    MAX_MEASURE,
    MAX_UNREADABLE_DETAIL,
    AuditReport,
    CrossedRow,
    Place,
    UnreadableRow,
)
from ...protocol.envelope import Purpose
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leaders import Leaders
from ...protocol.leases import environment_of, open_lease
from ...protocol.manifests import RunManifest
from ...protocol.messages import (
    MAX_SHELF,
    Accepted,
    AuditDone,
    AuditJob,
    AuditRequest,
    AuditWait,
    WorkerStats,
)
from ...protocol.rollouts import MEASURES, Evidence, Submission
from ...protocol.trust import AdmittedHead
from ...protocol.version import ALPN_CONTROL
from ..errors import EngineError, first_cause
from ..inference.engine import Completion, EngineStats, GenerateRequest
from ..p2p.rpc import Refused, TooSlow, receive_reply, send
from ..p2p.services import NodeServices, Obstacle
from ..p2p.transport import Stream, StreamClosed, TransportError
from ..p2p.uploads import GRACE_S, MIN_RATE, PIECE_BYTES
from ..verification.auditor import (
    AuditItem,
    Auditor,
    Measured,
    Unreadable,
    audit_items,
    plain_turns,
    plan_of,
)
from ..verification.checks import check_submission
from ..weights.replica import Policy
from ..weights.state import Changed, State
from ..weights.state_history import StateHistory
from ..worker.weight_sync import WeightSync

logger = logging.getLogger(__name__)

NOTHING = -1
ASK_TIMEOUT_S = 20.0
REPORT_TTL_S = 3600
MAX_FAILURES = 3
"""Consecutive audits that fail as a whole, after which the node ends with an error."""


class StateCache:
    """Cache of the last `keep` policies; WeightSync loads it like an Engine, but it generates nothing."""

    def __init__(self, keep: int) -> None:
        self._states = StateHistory(keep)
        self._digests: dict[int, bytes] = {}
        self._loaded = NOTHING

    @property
    def policy_version(self) -> int:
        """See Engine."""
        return self._loaded

    def put(self, policy: Policy, changed: Changed | None) -> None:
        """Store a verified policy; `changed`: its differences from the previous one, None: anywhere.

        A policy that is not newer than all stored ones (of another epoch) replaces them.
        """
        self._states.add(policy.version, policy.state, changed)
        known = {**self._digests, policy.version: policy.digest}
        self._digests = {version: known[version] for version in self._states}

    def held(self, heads: Mapping[tuple[int, int], AdmittedHead], epoch: int) -> tuple[int, ...]:
        """List the stored versions of `epoch` whose states are those of the epoch's heads."""
        return tuple(
            version
            for version, state in self._digests.items()
            if (head := heads.get((epoch, version))) and head.head.state == state
        )

    def states(self, versions: tuple[int, ...]) -> dict[int, State] | None:
        """Return the states of these versions; None if one of them is missing."""
        if any(version not in self._states for version in versions):
            return None
        return {version: self._states[version] for version in versions}

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine. Does nothing."""

    async def load(self, version: int, state: State) -> None:
        """See Engine. The states arrive by put(), including those of versions between."""
        self._loaded = version

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Engine."""
        self._loaded = version

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine. Raises EngineError."""
        raise EngineError("a validator generates nothing: join with --role inference")

    def stats(self) -> EngineStats:
        """See Engine."""
        return EngineStats()

    async def close(self) -> None:
        """See Engine."""
        self._states, self._digests = StateHistory(1), {}


class ValidatorRole:
    """Validator of a run: asks for audits, makes and reports them, until the run ends."""

    def __init__(
        self,
        services: NodeServices,
        run: RunManifest,
        sync: WeightSync,
        cache: StateCache,
        auditor: Auditor,
    ) -> None:
        """Take the node's parts; `sync` follows the policy into `cache` during run()."""
        self._services = services
        self._heads = services.heads
        self._run = run
        self._sync = sync
        self._cache = cache
        self._auditor = auditor
        self._failures = 0
        self.jobs_at_once = 1
        """Most jobs that are audited at the same time."""
        self._jobs: set[asyncio.Task[None]] = set()
        self._obstacle = Obstacle(services, "audits", "verification.validators of the trainer")
        self.audits = 0
        """Number of jobs that were measured and reported."""
        self.rollouts = 0
        """Number of rollouts in these jobs."""

    @property
    def waits_for(self) -> str:
        """Reason why nothing is audited; empty during an audit."""
        return "" if self._jobs else self._obstacle.reason

    async def run(self) -> None:
        """Audit until the run ends. Raises EngineError if the auditor keeps failing."""
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._take_jobs(tasks)
                for job in self._jobs:
                    job.cancel()
        except BaseExceptionGroup as group:
            raise first_cause(group) from group

    async def _take_jobs(self, tasks: asyncio.TaskGroup) -> None:
        """Ask for jobs and begin each, until the run ends."""
        while not self._heads.ended:
            await self._heads.end_without_trainer(self._sync.version, self._run.max_steps)
            if self._heads.ended:
                break
            if len(self._jobs) >= self.jobs_at_once:
                await asyncio.wait(self._jobs, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                continue
            if why := self._services.paused():
                self._obstacle.reason = f"paused: {why}"
                await self._heads.wait(lambda: not self._services.paused(), 1.0)
                continue
            if not await self._sync.wait_order((0, 0), 1.0):
                self._obstacle.reason = self._sync.waits_for
                continue
            try:
                job = await self._ask()
            except (TransportError, Refused, RemoteProtocolError) as error:
                await self._heads.wait(lambda: False, self._obstacle.explain(error))
                continue
            self._obstacle.end("nothing is to be audited")
            if job is not None:
                begun = tasks.create_task(self._finish(*job))
                self._jobs.add(begun)
                begun.add_done_callback(self._jobs.discard)

    async def _finish(self, job: AuditJob, sealed: bytes) -> None:
        try:
            await self._do(job, sealed)
        except (TransportError, Refused, RemoteProtocolError) as error:
            self._obstacle.explain(error)

    # -- jobs --------------------------------------------------------------------------------------

    async def _ask(self) -> tuple[AuditJob, bytes] | None:
        """Ask for a job and its submission; None if there is nothing to audit now.

        Raises:
            Refused, RemoteProtocolError, TransportError.
        """
        epoch = self._heads.order()[0]
        versions = self._cache.held(self._heads.trusted.heads, epoch)[-MAX_SHELF:]
        sources = self._services.fetcher.by_source(self._services.trainer)
        stats = WorkerStats(self._sync.version, chunk_bytes=sources)
        trainer = self._services.trainer
        connection = await self._services.links.get(trainer, ALPN_CONTROL)
        stream = await connection.open_stream()
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                with suppress(StreamClosed):  # refused before it was read: the reply says why
                    await send(stream, AuditRequest(epoch, versions, stats))
                    await stream.finish()
                reply = await receive_reply(stream, AuditJob | AuditWait)  # type: ignore[arg-type]
            if isinstance(reply, AuditJob):
                return reply, await read_submission(stream, reply)
        except TimeoutError as error:
            raise TooSlow("the trainer does not say what to audit") from error
        except TransportError:
            await self._services.links.drop(trainer, ALPN_CONTROL)
            raise
        finally:
            await stream.abort()
        await asyncio.sleep(reply.retry_after_ms / 1000)
        return None

    async def _do(self, job: AuditJob, sealed: bytes) -> None:
        """Audit a job; report the result, or the failure, so that the trainer need not wait."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(job.seconds):
                report = await self._audit(job, sealed)
            self._failures = 0
        except TimeoutError:
            logger.warning("job %d was not done in %.0f s", job.job, job.seconds)
            return
        except RemoteProtocolError as error:
            logger.warning("job %d makes no sense: %s", job.job, error)
            report = _failed(job, f"{error}")
        except EngineError as error:
            logger.error("job %d could not be audited: %s", job.job, error)
            self._failures += 1
            report = _failed(job, f"{error}")
        await self._report(report)
        if self._failures >= MAX_FAILURES:
            raise EngineError("every audit fails: see the log, then start this node again")
        if not report.failed:
            self.audits += 1
            self.rollouts += len(job.chosen)
            logger.debug(
                "%d rollout(s) of %s audited in %.2fs",
                len(job.chosen),
                short(job.node),
                time.monotonic() - start,
            )

    async def _audit(self, job: AuditJob, sealed: bytes) -> AuditReport:
        states = self._cache.states(job.versions)
        if states is None:
            raise RemoteProtocolError(Reason.NOT_FOUND, "a version of the job is not held any more")
        items = await asyncio.to_thread(
            job_items, job, sealed, run=self._run, leaders=self._services.leaders
        )
        return make_report(job, await self._auditor.audit(items, states))

    async def _report(self, report: AuditReport) -> None:
        sealed = self._services.seal(
            Purpose.AUDIT,
            report,
            recipient=self._services.trainer,
            sequence=report.job,
            expires=time.time() + REPORT_TTL_S,
        )
        await self._services.ask_trainer(AuditDone(sealed), Accepted, deadline=ASK_TIMEOUT_S)


async def read_submission(stream: Stream, job: AuditJob) -> bytes:
    """Read the submission that follows a job.

    The frame has limited its size; memory is allocated as the bytes arrive. Raises RemoteProtocolError
    (WRONG_DIGEST), TransportError, TimeoutError.
    """
    data = bytearray()
    async with asyncio.timeout(GRACE_S + job.size / MIN_RATE):
        while len(data) < job.size:
            data += await stream.read_exact(min(PIECE_BYTES, job.size - len(data)))
    if digest(data) != job.submission:
        raise RemoteProtocolError(Reason.WRONG_DIGEST, "the bytes are not those of the job")
    return bytes(data)


def job_items(
    job: AuditJob, sealed: bytes, *, run: RunManifest, leaders: Leaders
) -> list[AuditItem]:
    """Make one item for each chosen rollout, from the bundle and its lease only.

    Raises RemoteProtocolError if the bundle is not the worker's, its lease not a leader's, a chosen rollout
    does not pass the cheap checks, or it claims a version that is not one of the job's.
    """
    submission = leaders.open_for_leader(
        sealed, Purpose.SUBMISSION, Submission, now=0, signer=job.node
    ).body
    lease = open_lease(submission.lease, leaders, job.node)
    plan = plan_of(submission, leaders, job.node)
    checked = check_submission(submission, lease, run, max(job.versions), plan)
    sampling = environment_of(run, lease).sampling
    rollouts = {(rollout.group, rollout.index): rollout for rollout in checked.rollouts}
    others = {policies.claimed: policies.others for policies in job.others}
    items: list[AuditItem] = []
    for place in job.chosen:
        rollout = rollouts.get((place.group, place.rollout))
        turns = None if rollout is None else plain_turns(rollout.branches)
        if rollout is None or turns is None:
            raise _malformed(place, "is not fit for an audit")
        (item,) = audit_items(
            rollout,
            turns,
            lease=lease,
            run=leaders.run,
            sampling=sampling,
            node=job.node,
            plan=plan,
            others=others,
        )
        if not item.claimed <= set(job.versions):
            raise _malformed(place, "claims a version that the job does not name")
        items.append(item)
    return items


def make_report(job: AuditJob, answers: Sequence[Measured | Unreadable]) -> AuditReport:
    """Make the report of a job; `answers` holds one entry per chosen rollout."""
    measured: list[Evidence] = []
    unreadable: list[UnreadableRow] = []
    crossed: list[CrossedRow] = []
    for place, answer in zip(job.chosen, answers, strict=True):
        if isinstance(answer, Unreadable):
            detail = answer.detail.encode("ascii", "replace").decode()[:MAX_UNREADABLE_DETAIL]
            unreadable.append(UnreadableRow(place.group, place.rollout, answer.proof, detail))
            continue
        values = (_finite(getattr(answer, name)) for name in MEASURES)
        measured.append(
            Evidence(place.group, place.rollout, answer.tokens, *values, means=answer.means)
        )
        if answer.boundaries:
            distances = tuple(map(_finite, answer.boundaries))
            crossed.append(CrossedRow(place.group, place.rollout, distances))
    return AuditReport(
        job.job,
        job.submission,
        job.challenge,
        tuple(measured),
        tuple(unreadable),
        crossed=tuple(crossed) or UNSET,
    )


def _finite(value: float) -> float:
    return MAX_MEASURE if isnan(value) else max(-MAX_MEASURE, min(MAX_MEASURE, float(value)))


def _failed(job: AuditJob, why: str) -> AuditReport:
    return AuditReport(job.job, job.submission, job.challenge, (), failed=why[:250])


def _malformed(place: Place, fault: str) -> RemoteProtocolError:
    return RemoteProtocolError(Reason.MALFORMED, f"rollout {place.group}/{place.rollout} {fault}")
