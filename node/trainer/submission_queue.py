"""The trainer's inbox: every submission with a receipt is verified once, and judged in order of arrival.

Several are verified at a time: one waits for an auditor while the next is looked through, and validators have
an audit each. What holds goes into the buffer; everybody gets a signed verdict. Nothing in here can stall the
trainer.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ...crypto.hashing import short
from ...crypto.keys import SecretKey
from ...protocol.audits import CHALLENGE_BYTES, Outliers, audit_rate
from ...protocol.envelope import Purpose, seal, unseal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease
from ...protocol.manifests import ProofContract
from ...protocol.reputation import ban_test
from ...protocol.rollouts import Submission, Verdict
from ..ops.errors import first_cause
from ..storage.ledger import Ledger, QueuedSubmission
from ..training.buffer import RolloutBuffer
from ..verification.verifier import ReceivedSubmission, Verified, Verifier, refuse_all
from .pipeline_faults import StageFaults, spared
from .scheduler import LeaseScheduler
from .state import ChainEpoch, Progress
from .submissions import open_lease

logger = logging.getLogger(__name__)

VERDICT_TTL_S = 7 * 86400
AT_ONCE = 8
"""Submissions that are verified at a time. What one shows of its worker counts for those that begin later."""


@dataclass(frozen=True)
class PendingVerification:
    """A submission that is being verified."""

    arrived: QueuedSubmission
    before: bytes | None
    """The sealed verdict that was told of it before the trainer was killed."""
    verifying: asyncio.Task[Verified]


class SubmissionQueue:
    """Takes submissions from the ledger, in order, to the buffer."""

    def __init__(
        self,
        *,
        key: SecretKey,
        run_id: bytes,
        ledger: Ledger,
        desk: LeaseScheduler,
        arrivals: "asyncio.Queue[QueuedSubmission]",
        buffer: RolloutBuffer,
        verifier: Verifier,
        progress: Progress,
        version: Callable[[], int],
        contract: ProofContract,
        expected_audits: int,
    ) -> None:
        """`version` is the newest published one; `expected_audits` of the whole run, at most."""
        self._key = key
        self._run_id = run_id
        self._ledger = ledger
        self._desk = desk
        self._arrivals = arrivals
        self._buffer = buffer
        self.verifier = verifier
        self._progress = progress
        self._version = version
        self._contract = contract
        self._test = ban_test(contract, expected_audits)
        self._stages = StageFaults(desk.reputation, desk.pipelines.dissolve, self._test)
        self._outliers = Outliers()
        self._verifying = 0
        self._room = asyncio.Semaphore(AT_ONCE)
        self._counted_up_to = ledger.judged_up_to()
        """Arrival number of the last submission that was judged before this start: it counts already."""
        self._taken_up_to = 0
        """Arrival number of the last submission that was begun."""
        self.grown = asyncio.Condition()
        """Notified after every judgement."""
        self.verified_up_to = 0
        """Arrival number of the last submission that was judged."""
        self.term = ChainEpoch()

    def waiting(self) -> int:
        """Submissions that are not judged yet."""
        return self._verifying + self._arrivals.qsize()

    async def run(self) -> None:
        """Verify what is left from before, then what comes, for ever."""
        begun: asyncio.Queue[PendingVerification] = asyncio.Queue()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._judge_all(begun))
                for arrived in self._ledger.arrived_after(self.verified_up_to):
                    await self._begin(arrived, begun, tasks)
                while True:
                    await self._begin(await self._arrivals.get(), begun, tasks)
        except BaseExceptionGroup as group:
            raise first_cause(group) from group

    async def _begin(
        self,
        arrived: QueuedSubmission,
        begun: "asyncio.Queue[PendingVerification]",
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Have it verified, as soon as there is room."""
        if arrived.arrival <= max(self.verified_up_to, self._taken_up_to):
            return
        self._taken_up_to = arrived.arrival
        self._verifying += 1
        await self._room.acquire()
        before = self._ledger.verdict_on(arrived.arrival)
        verifying = tasks.create_task(self._verify(arrived, before))
        begun.put_nowait(PendingVerification(arrived, before, verifying))

    async def _judge_all(self, begun: "asyncio.Queue[PendingVerification]") -> None:
        """In order of arrival; wakes whoever waits for groups or for the room that they leave."""
        while True:
            one = await begun.get()
            verified = await one.verifying
            self._verifying -= 1
            self._room.release()
            self._judge(one.arrived, verified, one.before)
            async with self.grown:
                self.grown.notify_all()
            await self._desk.work_changed()

    def _judge(self, arrived: QueuedSubmission, verified: Verified, before: bytes | None) -> None:
        """Count it, once however often the trainer is killed, and put what holds into the buffer."""
        self.verified_up_to = arrived.arrival
        if arrived.arrival > self._counted_up_to:
            self._remember(arrived.node, verified)
        self._note_rewards(arrived.node, verified)
        reasons = verified.reasons()
        progress = self._progress
        progress.received += verified.verdict.accepted + sum(reasons.values())
        progress.accepted += verified.verdict.accepted
        progress.rejected.update({reason.value: count for reason, count in reasons.items()})
        for group in verified.groups:
            refusal = self._buffer.add(group, self._progress.step)
            if refusal is not None:
                progress.accepted -= len(group.rollouts)
                progress.rejected[refusal] += len(group.rollouts)
        self._deliver(arrived, before or self._keep(arrived, verified))

    def _remember(self, node: bytes, verified: Verified) -> None:
        """What this tells of the worker."""
        reputation = self._desk.reputation(node)
        before = reputation.banned
        reasons, accepted = verified.reasons(), verified.verdict.accepted
        reputation.record(accepted, reasons, time.time(), spared=spared(verified.audited))
        self._stages.note(node, verified)
        if reputation.banned != before:
            logger.warning("%s is banned: %s", short(node), reputation.banned)

    def _note_rewards(self, node: bytes, verified: Verified) -> None:
        for group in verified.groups:
            self._outliers.note(
                node,
                group.environment,
                [rollout.reward for rollout in group.rollouts],
                [sum(map(sum, (b.mask for b in rollout.branches))) for rollout in group.rollouts],
            )

    def _rate(self, node: bytes) -> float:
        """Share of this worker's rollouts to audit now."""
        reputation = self._desk.reputation(node)
        base, odd = self._contract.audit_rate, self._outliers.outlierness(node)
        return audit_rate(reputation, base, odd, reputation.recent_fault)

    async def _verify(self, arrived: QueuedSubmission, told: bytes | None) -> Verified:
        submission, lease = self.open(arrived)
        before = None if told is None else unseal(told, Purpose.VERDICT, Verdict, now=0).body
        # Drawn now that the bundle is fixed: nobody could choose what to get right.
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        arrival = ReceivedSubmission(
            arrived.arrival, arrived.digest, arrived.node, arrived.sealed, challenge
        )
        if self.term.voids(submission, lease):
            error = RemoteProtocolError(Reason.STALE, "made by a policy that the trainer lost")
            return refuse_all(arrival, lease, error)
        version, rate = self._version(), self._rate(arrived.node)
        try:
            return await self.verifier.verify(
                submission, lease, arrival, version=version, rate=rate, before=before
            )
        except RemoteProtocolError as error:
            logger.warning("submission of %s refused: %s", short(arrived.node), error)
            return refuse_all(arrival, lease, error)

    def open(self, arrived: QueuedSubmission) -> tuple[Submission, Lease]:
        """What was submitted, and the lease that it answers."""
        submission = unseal(
            arrived.sealed, Purpose.SUBMISSION, Submission, now=0, run=self._run_id
        ).body
        return submission, open_lease(
            submission.lease, self._run_id, self._key.node_id, arrived.node
        )

    def _keep(self, arrived: QueuedSubmission, verified: Verified) -> bytes:
        """Make the verdict durable, with all that it says of nodes; returns it sealed."""
        sealed = seal(
            self._key,
            Purpose.VERDICT,
            self._run_id,
            verified.verdict,
            recipient=arrived.node,
            expires=int(time.time()) + VERDICT_TTL_S,
        )
        stages = verified.plan.stages if verified.plan else ()
        reputations = {
            node: msgspec.json.encode(self._desk.reputation(node).snapshot())
            for node in (arrived.node, *(stage.node for stage in stages))
        }
        self._ledger.add_verdict(arrived.node, sealed, arrived.arrival, reputations)
        return sealed

    def _deliver(self, arrived: QueuedSubmission, sealed: bytes) -> None:
        node = arrived.node
        if node in self._desk.workers:
            self._desk.workers[node].verdicts.append(sealed)
