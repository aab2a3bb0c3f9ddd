"""The validator role: follow the policy, ask the trainer for audits, measure, report.

It believes nobody: the submission is the worker's by signature, the lease the trainer's, the weights are those
of signed heads. What it reports are measurements; the trainer judges.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import isnan
from pathlib import Path

from msgspec import UNSET

from ...crypto.hashing import digest, short
from ...crypto.keys import SecretKey
from ...protocol.envelope import Purpose, seal, unseal
from ...protocol.errors import Reason, RemoteProtocolError
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
from ...protocol.reports import (
    MAX_UNREADABLE_DETAIL,
    AuditReport,
    CrossedRow,
    MeasuredRow,
    Place,
    UnreadableRow,
)
from ...protocol.rollouts import Submission
from ...protocol.trust import AdmittedHead
from ...protocol.version import ALPN_CONTROL
from ..inference.engine import Completion, EngineStats, GenerateRequest
from ..ops.errors import EngineError
from ..p2p.connections import ConnectionPool
from ..p2p.download import BlobFetcher
from ..p2p.heads import HeadStore
from ..p2p.rpc import Refused, TooSlow, receive_reply, send
from ..p2p.transport import Stream, StreamClosed, TransportError
from ..p2p.waiting import LogBackoff
from ..trainer.submissions import open_lease
from ..verification.auditor import AuditItem, Auditor, Measured, Unreadable
from ..verification.checks import check_submission
from ..verification.items import audit_items, plain_turns, plan_of
from ..weights.replica import Policy
from ..weights.state import Changed, State
from ..worker.weight_sync import Upstreams, WeightSync

NOTHING = -1


class StateCache:
    """The last `keep` policies. An Engine to those who load weights; it generates nothing."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._policies: dict[int, Policy] = {}
        self._loaded = NOTHING

    @property
    def policy_version(self) -> int:
        """See Engine."""
        return self._loaded

    def put(self, policy: Policy) -> None:
        """Keep a proved policy, and let go of the one that was put here the longest ago."""
        self._policies.pop(policy.version, None)
        self._policies[policy.version] = policy
        while len(self._policies) > self._keep:
            del self._policies[next(iter(self._policies))]

    def held(self, heads: Mapping[tuple[int, int], AdmittedHead], term: int) -> tuple[int, ...]:
        """Versions of `term` that are here, as the heads of that term name them."""
        return tuple(
            version
            for version, policy in sorted(self._policies.items())
            if (head := heads.get((term, version))) and head.head.state == policy.digest
        )

    def states(self, versions: tuple[int, ...]) -> dict[int, State] | None:
        """The states of these versions; None if one of them is gone."""
        if any(version not in self._policies for version in versions):
            return None
        return {version: self._policies[version].state for version in versions}

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine. There is nothing to start."""

    async def load(self, version: int, state: State) -> None:
        """See Engine. What is kept comes by put(), also the versions between."""
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
        self._policies.clear()


logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 20.0
PAUSE_S = 0.2
PAUSE_MAX_S = 3.0
REFUSED_PAUSE_S = 30.0
"""After the trainer said that this node is no validator: its operator may add it."""
PIECE_BYTES = 256 * 1024
MIN_RATE = 32 * 1024
"""Bytes per second below which a submission is given up."""
GRACE_S = 10.0
REPORT_TTL_S = 3600
MAX_FAILURES = 3
"""Audits in a row that the auditor cannot make at all; then the node says so and ends."""
LARGEST = 1e30
"""Stands for what is not finite: above every bound, and still a number on the wire."""


class ValidatorRole:
    """One validator's loops."""

    def __init__(
        self,
        *,
        key: SecretKey,
        run_id: bytes,
        run: RunManifest,
        links: ConnectionPool,
        book: HeadStore,
        fetcher: BlobFetcher,
        catchup: WeightSync,
        shelf: StateCache,
        auditor: Auditor,
        upstreams: Upstreams,
        record: Callable[[], bytes],
    ) -> None:
        """`record` makes our own sealed peer record."""
        self._key = key
        self._run_id = run_id
        self._run = run
        self._links = links
        self._book = book
        self._fetcher = fetcher
        self._catchup = catchup
        self._shelf = shelf
        self._auditor = auditor
        self._upstreams = upstreams
        self._record = record
        self._failures = 0
        self.waits_for = ""
        """Why nothing is audited just now, in words; empty while something is."""
        self._lines = LogBackoff()
        self.audits = 0
        """Jobs that were reported."""
        self.rollouts = 0
        """Rollouts in them."""

    async def run(self) -> None:
        """Audit until the run ends. Raises EngineError when the auditor cannot audit any more."""
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(self._catchup.run()),
                tasks.create_task(self._upstreams.keep_asking()),
            ]
            await self._audit_loop()
            for task in loops:
                task.cancel()

    async def _audit_loop(self) -> None:
        pause = PAUSE_S
        while not self._book.ended:
            if self._catchup.version >= self._run.max_steps:
                await self._book.end("the run has reached its last step")
                break
            if not await self._catchup.wait_order((0, 0), 1.0):
                self.waits_for = self._catchup.waits_for
                continue
            try:
                job = await self._ask()
                pause, self.waits_for = PAUSE_S, "" if job else "nothing is to be audited"
                self._lines.reset()
                if job is not None:
                    await self._do(*job)
            except (TransportError, Refused, RemoteProtocolError) as error:
                await self._rest(self._after(error, pause))
                pause = min(pause * 1.6, PAUSE_MAX_S)

    def _after(self, error: Exception, pause: float) -> float:
        """Seconds to wait after the trainer gave no job."""
        self.waits_for = f"the trainer gives no audits: {error}"
        if isinstance(error, Refused) and error.reason in (Reason.NOT_ADMITTED, Reason.BANNED):
            self.waits_for += "; verification.validators of the trainer has to name this node"
            logger.error(
                "the trainer takes no audits from this node (%s). Its id, for verification.validators "
                "of the trainer: %s. Asking again in %.0f s",
                error.detail,
                self._key.node_id.hex(),
                REFUSED_PAUSE_S,
            )
            return REFUSED_PAUSE_S
        if self._lines.due():
            logger.info("no audits: %s", error)
        return pause

    async def _rest(self, seconds: float) -> None:
        """Wait, but not beyond the end of the run."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._book.ended:
                    await self._book.wait_news(self._book.order(), seconds)

    # -- jobs --------------------------------------------------------------------------------------

    async def _ask(self) -> tuple[AuditJob, bytes] | None:
        """A job and its submission; None if there is nothing to audit now.

        Raises:
            Refused, RemoteProtocolError, TransportError.
        """
        term = self._book.order()[0]
        versions = self._shelf.held(self._book.trusted.heads, term)[-MAX_SHELF:]
        sources = self._fetcher.by_source(self._run.trainer)
        stats = WorkerStats(self._catchup.version, chunk_bytes=sources)
        connection = await self._links.get(self._run.trainer, ALPN_CONTROL)
        stream = await connection.open_stream()
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                with suppress(StreamClosed):  # refused before it was read: the reply says why
                    await send(stream, AuditRequest(term, versions, stats))
                    await stream.finish()
                reply = await receive_reply(stream, AuditJob | AuditWait)  # type: ignore[arg-type]
            if isinstance(reply, AuditJob):
                return reply, await read_submission(stream, reply)
        except TimeoutError as error:
            raise TooSlow("the trainer does not say what to audit") from error
        except TransportError:
            await self._links.drop(self._run.trainer, ALPN_CONTROL)
            raise
        finally:
            await stream.abort()
        await asyncio.sleep(reply.retry_after_ms / 1000)
        return None

    async def _do(self, job: AuditJob, sealed: bytes) -> None:
        """Audit and report. What cannot be audited is reported as that, so that the trainer need not wait."""
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
            raise EngineError(
                "the auditor fails at everything: see the log, and start this node again"
            )
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
        states = self._shelf.states(job.versions)
        if states is None:
            raise RemoteProtocolError(Reason.NOT_FOUND, "a version of the job is not held any more")
        items = await asyncio.to_thread(job_items, job, sealed, run=self._run, run_id=self._run_id)
        others = {one.claimed: one.others for one in job.others}
        found = await self._auditor.audit(items, states, others)
        return make_report(job, found)

    async def _report(self, report: AuditReport) -> None:
        sealed = seal(
            self._key,
            Purpose.AUDIT,
            self._run_id,
            report,
            recipient=self._run.trainer,
            sequence=report.job,
            expires=int(time.time()) + REPORT_TTL_S,
        )
        await self._links.request(
            self._run.trainer, ALPN_CONTROL, AuditDone(sealed), Accepted, deadline=ASK_TIMEOUT_S
        )


async def read_submission(stream: Stream, job: AuditJob) -> bytes:
    """The bytes that follow a job, which the frame has bounded; only what has come takes memory.

    Raises:
        RemoteProtocolError(WRONG_DIGEST), TransportError, TimeoutError.
    """
    data = bytearray()
    async with asyncio.timeout(GRACE_S + job.size / MIN_RATE):
        while len(data) < job.size:
            data += await stream.read_exact(min(PIECE_BYTES, job.size - len(data)))
    if digest(data) != job.submission:
        raise RemoteProtocolError(Reason.WRONG_DIGEST, "the bytes are not those of the job")
    return bytes(data)


def job_items(job: AuditJob, sealed: bytes, *, run: RunManifest, run_id: bytes) -> list[AuditItem]:
    """One item for each chosen rollout, made of nothing but the bundle and the lease in it.

    Raises:
        RemoteProtocolError: the bundle is not the worker's, its lease not the trainer's, a chosen rollout
            does not pass the cheap checks, or it claims a version that is none of the job's.
    """
    submission = unseal(
        sealed,
        Purpose.SUBMISSION,
        Submission,
        now=0,
        run=run_id,
        signer=job.node,
        recipient=run.trainer,
    ).body
    lease = open_lease(submission.lease, run_id, run.trainer, job.node)
    plan = plan_of(submission, run=run_id, trainer=run.trainer, node=job.node)
    checked = check_submission(submission, lease, run, max(job.versions), plan)
    rollouts = {(one.group, one.index): one for one in checked.rollouts}
    items: list[AuditItem] = []
    for place in job.chosen:
        rollout = rollouts.get((place.group, place.rollout))
        turns = None if rollout is None else plain_turns(rollout.branches)
        if rollout is None or turns is None:
            raise _senseless(place, "is not fit for an audit")
        (item,) = audit_items(rollout, turns, lease=lease, run=run_id, node=job.node, plan=plan)
        if not set(item.versions) <= set(job.versions):
            raise _senseless(place, "claims a version that the job does not name")
        items.append(item)
    return items


def make_report(job: AuditJob, found: Sequence[Measured | Unreadable]) -> AuditReport:
    """The report of a job; `found` holds one entry per chosen rollout."""
    measured: list[MeasuredRow] = []
    unreadable: list[UnreadableRow] = []
    crossed: list[CrossedRow] = []
    for place, one in zip(job.chosen, found, strict=True):
        if isinstance(one, Unreadable):
            detail = one.detail.encode("ascii", "replace").decode()[:MAX_UNREADABLE_DETAIL]
            unreadable.append(UnreadableRow(place.group, place.rollout, one.proof, detail))
            continue
        values = (
            *(one.fingerprint, one.sampling, one.sampling_max),
            *(one.logprob, one.logprob_max, one.other_policy),
        )
        measured.append(MeasuredRow(place.group, place.rollout, one.tokens, *map(_finite, values)))
        if one.boundaries:
            distances = tuple(map(_finite, one.boundaries))
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
    return LARGEST if isnan(value) else max(-LARGEST, min(LARGEST, float(value)))


def _failed(job: AuditJob, why: str) -> AuditReport:
    return AuditReport(job.job, job.submission, job.challenge, (), failed=why[:250])


def _senseless(place: Place, what: str) -> RemoteProtocolError:
    return RemoteProtocolError(Reason.MALFORMED, f"rollout {place.group}/{place.rollout} {what}")
