"""Receive submissions, verify each once, use its work, and judge them in order of arrival.

Invariants: a submission is in the ledger before its receipt is signed. Several are verified at a time, as one
waits for an auditor while the next is checked; each gets a signed verdict, and none can stall the trainer. The
work of one that is verified is used at once, though an earlier one may still be audited: verdicts, and the
evidence about workers, are in order of arrival.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from ...crypto.hashing import short
from ...protocol.audits import CHALLENGE_BYTES, Outliers, audit_rate
from ...protocol.envelope import Purpose, read_envelope, unseal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease, open_lease
from ...protocol.manifests import ProofContract
from ...protocol.messages import SubmitOffer
from ...protocol.reputation import BanTest
from ...protocol.rollouts import Receipt, Submission, Verdict
from ..errors import first_cause
from ..p2p.transport import Stream
from ..p2p.uploads import UploadReceiver
from ..storage.ledger import QueuedSubmission
from ..training.buffer import RolloutBuffer, RolloutGroup
from ..training.curriculum import Curriculum
from ..verification.self_calibration import AuditConditions
from ..verification.verdict import ReceivedSubmission, Verified, refuse_all
from ..verification.verifier import Verifier
from .bounds_book import MeasuredRows
from .kept_rollouts import NOT_ADMITTED, RolloutKeeper
from .lease_book import LeaseOutcome
from .lease_outcomes import EXCUSED
from .pipeline_faults import StageFaults, spared
from .scheduler import LeaseScheduler
from .state import LEASES_PER_BOOT, ChainEpoch, Progress

logger = logging.getLogger(__name__)

LATE_GRACE_S = 5.0
RECEIPT_TTL_S = VERDICT_TTL_S = 7 * 86400
CAPACITY = 64
"""Submissions that may wait for verification; further ones are asked to retry."""
CONCURRENT_CHECKS = 16
"""Submissions verified at a time; their audits are made together."""
UNJUDGED = 2 * CONCURRENT_CHECKS
"""Most submissions that have begun to be verified and are not judged. Evidence from one affects the audits of
those that begin after it was judged."""


@dataclass(frozen=True)
class PendingVerification:
    """A submission that is being verified."""

    arrived: QueuedSubmission
    submission: Submission
    lease: Lease
    before: bytes | None
    """Sealed verdict from before the trainer was killed."""
    verifying: asyncio.Task[Verified]


class VerificationQueue:
    """Verifies submissions, and judges them in order of arrival; subclasses use the work."""

    def __init__(
        self,
        scheduler: LeaseScheduler,
        verifier: Verifier,
        contract: ProofContract,
        test: BanTest,
        progress: Progress,
    ) -> None:
        """`test` decides which workers are banned."""
        self._scheduler = scheduler
        self._registry = scheduler.registry
        self._services = scheduler.registry.services
        self._ledger = scheduler.registry.services.ledger
        self._bounds = scheduler.registry.bounds
        self.verifier = verifier
        self._contract = contract
        self.progress = progress
        self._arrivals: asyncio.Queue[QueuedSubmission] = asyncio.Queue(CAPACITY)
        self._stages = StageFaults(
            self._registry.reputation, self._registry.pipelines.dissolve, test
        )
        self._outliers = Outliers()
        self._verifying = 0
        self._room = asyncio.Semaphore(CONCURRENT_CHECKS)
        self._counted_up_to = self._ledger.judged_up_to()
        """Arrival number of the last submission that was judged, and counted, before this start."""
        self._begun_up_to = 0
        """Arrival number of the last submission whose verification began."""
        self._queued_at: dict[int, float] = {}
        """Monotonic seconds at which submissions without a verdict came, by arrival number."""
        self.grown = asyncio.Condition()
        """Notified when work was used or judged, and from time to time."""
        self.epoch = ChainEpoch()

    def take(self, node: bytes, submission: Submission, lease: Lease, verified: Verified) -> None:
        """Use the work of a verified submission of `node`."""
        raise NotImplementedError

    @property
    def full(self) -> bool:
        """Whether no further submission can wait."""
        return self._arrivals.full()

    def resume(self, epoch: ChainEpoch, version: int) -> None:
        """Continue after policy `version` in that epoch of the chain."""
        self.epoch = epoch
        self._bounds.go_back(epoch.number, version)

    def put(self, arrived: QueuedSubmission) -> None:
        """Queue a submission that is in the ledger."""
        self._arrivals.put_nowait(arrived)
        self._queued_at[arrived.arrival] = time.monotonic()

    def waiting(self) -> int:
        """Count the submissions that are not verified yet."""
        return self._verifying + self._arrivals.qsize()

    async def run(self) -> None:
        """Verify the submissions left from before, then new ones, until cancelled."""
        # beside those in the queue, one waits to be judged and one for room
        begun: asyncio.Queue[PendingVerification] = asyncio.Queue(UNJUDGED - 2)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._judge_all(begun))
                for arrived in self._ledger.arrived_after(self.progress.verified_up_to):
                    await self._begin(arrived, begun, tasks)
                while True:
                    await self._begin(await self._arrivals.get(), begun, tasks)
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        finally:
            await self.verifier.close()

    async def _begin(
        self,
        arrived: QueuedSubmission,
        begun: "asyncio.Queue[PendingVerification]",
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Start to verify a submission, as soon as there is room."""
        if arrived.arrival <= max(self.progress.verified_up_to, self._begun_up_to):
            self._queued_at.pop(arrived.arrival, None)
            return
        self._begun_up_to = arrived.arrival
        self._verifying += 1
        await self._room.acquire()
        before = self._ledger.verdict_on(arrived.arrival)
        submission, lease = self.open(arrived)
        verifying = tasks.create_task(self._use(arrived, submission, lease, before))
        await begun.put(PendingVerification(arrived, submission, lease, before, verifying))

    async def _use(
        self, arrived: QueuedSubmission, submission: Submission, lease: Lease, before: bytes | None
    ) -> Verified:
        """Verify a submission and use its work, exactly once; wake the trainer and lease requests."""
        verified = await self._verify(arrived, submission, lease, before)
        self._verifying -= 1
        self._room.release()
        progress = self.progress
        progress.clock.reach("first verdict")
        if (queued_at := self._queued_at.pop(arrived.arrival, None)) is not None:
            progress.verdict_s.append(time.monotonic() - queued_at)
        if arrived.arrival not in progress.used:
            environment, reasons = self._environment(lease), verified.reasons()
            progress.received += verified.verdict.accepted + sum(reasons.values())
            progress.accepted += verified.verdict.accepted
            progress.accepted_of[environment] += verified.verdict.accepted
            progress.rejected_of[environment] += sum(reasons.values())
            progress.rejected.update({reason.value: count for reason, count in reasons.items()})
            self.take(arrived.node, submission, lease, verified)
            progress.used[arrived.arrival] = arrived.node
        await self._tell()
        return verified

    async def _tell(self) -> None:
        async with self.grown:
            self.grown.notify_all()
        await self._scheduler.work_changed()

    async def _judge_all(self, begun: "asyncio.Queue[PendingVerification]") -> None:
        """Judge the verified submissions in order of arrival."""
        while True:
            pending = await begun.get()
            self._judge(pending, await pending.verifying)
            await self._tell()

    def _judge(self, pending: PendingVerification, verified: Verified) -> None:
        """Count the evidence of a submission, exactly once across restarts of the trainer."""
        arrived = pending.arrived
        worker = self._registry.present_key(arrived.node)
        self.progress.verified_up_to = arrived.arrival
        del self.progress.used[arrived.arrival]
        if versions := verified.audited.versions:
            self.progress.audited.append((arrived.digest.hex(), max(versions)))
        measured = MeasuredRows()
        if arrived.arrival > self._counted_up_to:
            self._remember(arrived.node, self._environment(pending.lease), verified)
            measured = self._bounds.judged(arrived.node, verified, pending.submission.numerics)
        if self.epoch.voids(pending.submission, pending.lease):  # the trainer lost the policy
            outcome = LeaseOutcome(len(pending.lease.tasks), blameless=True)
        else:
            outcome = self._registry.work.judge(
                worker,
                pending.submission,
                pending.lease,
                verified,
                uncalibrated_excused=self._bounds.excused(
                    arrived.node, pending.submission.numerics
                ),
            )
        self._scheduler.book.judge(pending.lease, worker, outcome, time.time())
        self._note_rewards(arrived.node, verified)
        self._deliver(arrived, pending.before or self._keep(arrived, verified, measured))

    def _environment(self, lease: Lease) -> str:
        """Return the name of the environment that a lease is of."""
        return self._registry.environments[lease.environment].name

    def _remember(self, node: bytes, environment: str, verified: Verified) -> None:
        """Add the result to the worker's reputation."""
        reputation = self._registry.reputation(node)
        before = reputation.banned
        reasons, accepted = verified.reasons(), verified.verdict.accepted
        now, others = time.time(), spared(verified.audited)
        reputation.record(environment, accepted, reasons, now, spared=others)
        self._stages.note(node, verified)
        if reputation.banned != before:
            logger.warning("%s is banned: %s", short(node), reputation.banned)
            reputation.banned_at = now

    def _note_rewards(self, node: bytes, verified: Verified) -> None:
        for group in verified.groups:
            rewards = [rollout.reward for rollout in group.rollouts]
            lengths = [sum(map(sum, (b.mask for b in row.branches))) for row in group.rollouts]
            self._outliers.note(node, group.environment, rewards, lengths)
            self._registry.lengths.extend((time.time(), length) for length in lengths)

    def _rate(self, node: bytes, environment: str, conditions: AuditConditions | None) -> float:
        """Return the share of this worker's rollouts of an environment to audit now."""
        base = self._contract.audit_rate
        if conditions is not None and conditions.all_audited:
            return 1.0
        if conditions is not None and conditions.audit_rate is not None:
            base = conditions.audit_rate
        reputation, odd = self._registry.reputation(node), self._outliers.outlierness(node)
        return audit_rate(reputation.of(environment), base, odd, reputation.recent_fault)

    async def _verify(
        self,
        arrived: QueuedSubmission,
        submission: Submission,
        lease: Lease,
        sealed_before: bytes | None,
    ) -> Verified:
        before = (
            None
            if sealed_before is None
            else unseal(sealed_before, Purpose.VERDICT, Verdict, now=0).body
        )
        # Drawn now that the bundle is fixed, so that no worker knows which rollouts are audited.
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        arrival = ReceivedSubmission(
            arrived.arrival, arrived.digest, arrived.node, arrived.sealed, challenge
        )
        if self.epoch.voids(submission, lease):
            error = RemoteProtocolError(Reason.STALE, "made by a policy that the trainer lost")
            return refuse_all(arrival, lease, error)
        version = self._scheduler.version
        conditions = self._bounds.conditions(arrived.node, submission)
        rate = self._rate(arrived.node, self._environment(lease), conditions)
        try:
            with self._services.tracing.lease("verify", lease.lease_id, version=version):
                return await self.verifier.verify(
                    submission,
                    lease,
                    arrival,
                    version=version,
                    rate=rate,
                    conditions=conditions,
                    before=before,
                )
        except RemoteProtocolError as error:
            logger.warning("submission of %s refused: %s", short(arrived.node), error)
            return refuse_all(arrival, lease, error)

    def open(self, arrived: QueuedSubmission) -> tuple[Submission, Lease]:
        """Open a submission in the ledger, and the lease that it answers.

        Who signed the lease was checked when it came: a leader, if perhaps one that was revoked since then.
        """
        run, node = self._services.run_id, arrived.node
        submission = unseal(arrived.sealed, Purpose.SUBMISSION, Submission, now=0, run=run).body
        lease = unseal(submission.lease, Purpose.LEASE, Lease, now=0, run=run, recipient=node)
        return submission, lease.body

    def _keep(self, arrived: QueuedSubmission, verified: Verified, measured: MeasuredRows) -> bytes:
        """Write the verdict and its changes into the ledger; return it sealed."""
        sealed = self._services.seal(
            Purpose.VERDICT,
            verified.verdict,
            recipient=arrived.node,
            expires=int(time.time()) + VERDICT_TTL_S,
        )
        stages = verified.plan.stages if verified.plan else ()
        reputations = {
            self._registry.present_key(node): msgspec.json.encode(
                self._registry.reputation(node).snapshot()
            )
            for node in (arrived.node, *(stage.node for stage in stages))
        }
        self._ledger.add_verdict(
            arrived.node,
            sealed,
            arrived.arrival,
            reputations,
            measured.honest,
            measured.bounds,
            clean=verified.clean,
        )
        return sealed

    def _deliver(self, arrived: QueuedSubmission, sealed: bytes) -> None:
        node = arrived.node
        if node in self._registry.workers:
            self._registry.deliver(node, sealed)


class SubmissionQueue(VerificationQueue):
    """Puts accepted groups into the buffer from which batches are cut."""

    def __init__(
        self,
        scheduler: LeaseScheduler,
        verifier: Verifier,
        contract: ProofContract,
        test: BanTest,
        buffer: RolloutBuffer,
        progress: Progress,
        kept: RolloutKeeper,
        curricula: Mapping[str, Curriculum],
    ) -> None:
        """`test` decides which workers are banned; `kept` collects rollouts that are not buffered.

        `curricula`, by environment, observe every group before it is buffered.
        """
        super().__init__(scheduler, verifier, contract, test, progress)
        self.buffer = buffer
        self.kept = kept
        self.curricula = curricula

    def take(self, node: bytes, submission: Submission, lease: Lease, verified: Verified) -> None:
        """See VerificationQueue.take(); buffers the accepted groups."""
        selective = self._registry.work.selective(node, lease.environment)
        used: set[int] = set()
        for group in verified.groups:
            if selective and len(group.rollouts) < lease.group_size:
                self._refuse(group, Reason.WITHDRAWN.value)
                continue
            if not self._admits(group):
                self.kept.lost([group], NOT_ADMITTED)
            elif refusal := self.buffer.add(group, self.progress.step):
                self._refuse(group, refusal)
                continue
            used.add(group.task_index)
        self.kept.judged(node, submission, lease, verified)
        self._lease_again(submission, lease, verified, used)
        if verified.groups:
            self._measure_turnaround(lease, len(verified.groups))

    def _refuse(self, group: RolloutGroup, reason: str) -> None:
        """Count an accepted group that is not buffered after all as rejected."""
        progress, count = self.progress, len(group.rollouts)
        progress.accepted -= count
        progress.accepted_of[group.environment] -= count
        progress.rejected[reason] += count
        progress.rejected_of[group.environment] += count
        self.kept.lost([group], reason)

    def _lease_again(
        self, submission: Submission, lease: Lease, verified: Verified, used: Collection[int]
    ) -> None:
        """Queue the tasks whose groups were not used: no worker's failures take a task out of a run."""
        reasons = {rejection.group: rejection.reason for rejection in verified.rejections}
        voided = self.epoch.voids(submission, lease)
        for number, task in enumerate(lease.tasks):
            if task.index not in used:
                blameless = voided or reasons.get(number) in EXCUSED
                self._scheduler.book.lease_again(lease.environment, task.index, blameless=blameless)

    def _admits(self, group: RolloutGroup) -> bool:
        """Show a group to its environment's curriculum; return whether it is to be trained."""
        admitted, book = self.curricula[group.environment].observe(group), self._scheduler.book
        book.lead.judged(admitted, book.policy.groups_per_batch)
        return admitted

    def _measure_turnaround(self, lease: Lease, groups: int) -> None:
        """Record in the lease book the time of accepted groups from their lease until now."""
        book = self._scheduler.book
        granted = lease.deadline - book.policy.timeout_s
        book.lead.returned(groups, book.policy.groups_per_batch, time.time() - granted)


class SubmissionReceiver:
    """Receives submissions: refuses them cheaply, or stores them and signs a receipt."""

    def __init__(self, scheduler: LeaseScheduler, queue: VerificationQueue, boot: int) -> None:
        """`boot` counts the starts of this trainer."""
        self._scheduler = scheduler
        self._services = scheduler.registry.services
        self._book = scheduler.book
        self._ledger = self._services.ledger
        self._queue = queue
        self.progress = queue.progress
        self._boot = boot
        self._uploads = UploadReceiver()
        self._turn = asyncio.Lock()
        """Held from the check of the queue until a submission is in it: they are queued as they arrived."""
        self._keeping: set[asyncio.Task[bytes]] = set()

    async def handle(self, peer: bytes, stream: Stream, offer: SubmitOffer) -> bool:
        """Receive the bytes of `offer`, or repeat their receipt; return whether they are new.

        The caller has checked that `peer` is admitted.
        """
        known = self._ledger.received(offer.digest)
        if known is not None:
            if known.node != peer:
                raise RemoteProtocolError(Reason.REPLAYED, "another node submitted this")
            receipt = self._receipt(peer, offer.digest, known.lease_id, known.received)
            await self._uploads.repeat(stream, receipt)
            return False
        if self._ledger.lease_done(offer.lease_id):
            raise RemoteProtocolError(Reason.LEASE_DONE, f"lease {offer.lease_id} was answered")
        grant = self._book.held.get(offer.lease_id)
        if grant is None and offer.lease_id >> LEASES_PER_BOOT == self._boot:
            raise RemoteProtocolError(Reason.LEASE_EXPIRED, f"lease {offer.lease_id} is not out")
        limit = self._book.policy.max_bytes

        async def accept(data: bytes) -> bytes:
            return await self._receive(peer, offer, data)

        with self._services.tracing.lease("receive", offer.lease_id, worker=short(peer)):
            await self._uploads.receive(peer, stream, offer, limit=limit, accept=accept)
        return True

    async def _receive(self, peer: bytes, offer: SubmitOffer, data: bytes) -> bytes:
        """Check the bundle against its lease, make it durable, and only then sign a receipt."""
        now = time.time()
        lease, leased_by = self._check_bundle(peer, offer, data, now)
        # The leader before may have had it in time, and the worker had nobody to send it to since then: whether
        # its versions can still be used decides.
        own = leased_by == self._services.key.node_id
        if own and lease.deadline + LATE_GRACE_S < now:
            raise RemoteProtocolError(Reason.LEASE_EXPIRED, f"lease {lease.lease_id} is over")
        # What is durable is queued, too, whoever waits for the receipt: else it would be lost until a restart.
        keeping = asyncio.create_task(self._keep(peer, lease, offer.digest, data, now))
        self._keeping.add(keeping)
        keeping.add_done_callback(self._kept)
        return await asyncio.shield(keeping)

    def _kept(self, keeping: "asyncio.Task[bytes]") -> None:
        self._keeping.discard(keeping)
        if not keeping.cancelled():
            keeping.exception()  # retrieve it: who sent the submission may be gone

    async def _keep(self, peer: bytes, lease: Lease, name: bytes, data: bytes, now: float) -> bytes:
        """Make a submission durable, which takes the disk's time, queue it, and return its receipt."""
        async with self._turn:
            if (known := self._ledger.received(name)) is not None:
                # its sender came again while it was written
                return self._receipt(peer, name, known.lease_id, known.received)
            if self._ledger.lease_done(lease.lease_id):
                raise RemoteProtocolError(Reason.LEASE_DONE, f"lease {lease.lease_id} was answered")
            if self._queue.full:
                raise RemoteProtocolError(
                    Reason.BUSY, "the submission queue is full: try again later"
                )
            arrival = await self._ledger.beside(
                self._ledger.receive, name, lease.lease_id, peer, data, int(now)
            )
            if lease.lease_id in self._book.held:
                self._book.settle(lease.lease_id, peer, now)
            self._queue.put(QueuedSubmission(arrival, name, lease.lease_id, peer, data))
        await self._scheduler.work_changed()
        return self._receipt(peer, name, lease.lease_id, int(now))

    def _receipt(self, peer: bytes, name: bytes, lease_id: int, received: int) -> bytes:
        """Sign the receipt for a submission that is in the ledger: the same bytes each time."""
        return self._services.seal(
            Purpose.RECEIPT,
            Receipt(name, lease_id, received),
            recipient=peer,
            sequence=lease_id,
            expires=received + RECEIPT_TTL_S,
        )

    def _check_bundle(
        self, peer: bytes, offer: SubmitOffer, data: bytes, now: float
    ) -> tuple[Lease, bytes]:
        """Open a bundle; return its lease, and the leader that signed it. Raises RemoteProtocolError."""
        leaders = self._services.leaders
        opened = leaders.open_for_leader(
            data, Purpose.SUBMISSION, Submission, now=int(now), signer=peer
        )
        lease = open_lease(opened.body.lease, leaders, peer)
        if lease.lease_id != offer.lease_id:
            raise RemoteProtocolError(Reason.UNKNOWN_LEASE, "not the lease that was offered")
        return lease, read_envelope(opened.body.lease).signer
