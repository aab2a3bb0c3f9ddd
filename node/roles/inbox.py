"""The trainer's inbox: every submission with a receipt is verified once, in order of arrival, and judged.

What holds goes into the buffer; everybody gets a signed verdict. Nothing in here can stall the trainer.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from ...crypto.hashing import short
from ...crypto.keys import SecretKey
from ...protocol.envelope import Purpose, seal, unseal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease
from ...protocol.rollouts import Submission, Verdict
from ..ledger import Arrived, Ledger
from ..proofs.verifier import Verified, Verifier, refuse_all
from ..training.buffer import RolloutBuffer
from .desk import LeaseDesk, open_lease
from .progress import Progress
from .terms import Term

logger = logging.getLogger(__name__)

VERDICT_TTL_S = 7 * 86400
FULL_AUDIT_BELOW = 64.0
"""A worker with less evidence than this is audited fully; one with more, by sample."""


class Inbox:
    """Takes submissions from the ledger, in order, to the buffer."""

    def __init__(
        self,
        *,
        key: SecretKey,
        run_id: bytes,
        ledger: Ledger,
        desk: LeaseDesk,
        arrivals: "asyncio.Queue[Arrived]",
        buffer: RolloutBuffer,
        verifier: Verifier,
        progress: Progress,
        version: Callable[[], int],
        audit_fraction: float,
    ) -> None:
        """`version` is the newest published one; `audit_fraction` is for workers with a record."""
        self._key = key
        self._run_id = run_id
        self._ledger = ledger
        self._desk = desk
        self._arrivals = arrivals
        self._buffer = buffer
        self._verifier = verifier
        self._progress = progress
        self._version = version
        self._fraction = audit_fraction
        self._verifying = 0
        self.grown = asyncio.Condition()
        """Notified after every judgement."""
        self.verified_up_to = 0
        """Arrival number of the last submission that was judged."""
        self.term = Term()

    def waiting(self) -> int:
        """Submissions that are not judged yet."""
        return self._verifying + self._arrivals.qsize()

    async def run(self) -> None:
        """Verify what is left from before, then what comes, for ever."""
        for arrived in self._ledger.arrived_after(self.verified_up_to):
            await self._take_in(arrived)
        while True:
            await self._take_in(await self._arrivals.get())

    async def _take_in(self, arrived: Arrived) -> None:
        """Verify one submission and wake whoever waits for its groups or for the room that it leaves."""
        self._verifying = 1
        try:
            await self._judge(arrived)
        finally:
            self._verifying = 0
        async with self.grown:
            self.grown.notify_all()
        await self._desk.work_changed()

    async def _judge(self, arrived: Arrived) -> None:
        """Verify one submission, count it, and put what holds into the buffer."""
        if arrived.arrival <= self.verified_up_to:
            return
        verified = await self._verify(arrived)
        self.verified_up_to = arrived.arrival
        reasons = verified.reasons()
        self._desk.reputation(arrived.node).record(verified.verdict.accepted, reasons, time.time())
        progress = self._progress
        progress.received += verified.verdict.accepted + sum(reasons.values())
        progress.accepted += verified.verdict.accepted
        progress.rejected.update({reason.value: count for reason, count in reasons.items()})
        for group in verified.groups:
            refusal = self._buffer.add(group, self._progress.step)
            if refusal is not None:
                progress.accepted -= len(group.rollouts)
                progress.rejected[refusal] += len(group.rollouts)
        self._deliver(arrived.node, verified.verdict)

    async def _verify(self, arrived: Arrived) -> Verified:
        submission, lease = self.open(arrived)
        if self.term.voids(submission, lease):
            error = RemoteProtocolError(Reason.STALE, "made by a policy that the trainer lost")
            return refuse_all(arrived.digest, lease, error)
        reputation = self._desk.reputation(arrived.node)
        seasoned = reputation.good >= FULL_AUDIT_BELOW and reputation.trust > 0.9
        fraction = self._fraction if seasoned else 1.0
        try:
            return await self._verifier.verify(
                submission,
                lease,
                digest=arrived.digest,
                node=arrived.node,
                version=self._version(),
                audit_fraction=fraction,
            )
        except RemoteProtocolError as error:
            logger.warning("submission of %s refused: %s", short(arrived.node), error)
            return refuse_all(arrived.digest, lease, error)

    def open(self, arrived: Arrived) -> tuple[Submission, Lease]:
        """What was submitted, and the lease that it answers."""
        submission = unseal(
            arrived.sealed, Purpose.SUBMISSION, Submission, now=0, run=self._run_id
        ).body
        return submission, open_lease(
            submission.lease, self._run_id, self._key.node_id, arrived.node
        )

    def _deliver(self, node: bytes, verdict: Verdict) -> None:
        sealed = seal(
            self._key,
            Purpose.VERDICT,
            self._run_id,
            verdict,
            recipient=node,
            expires=int(time.time()) + VERDICT_TTL_S,
        )
        self._ledger.add_verdict(node, sealed)
        if node in self._desk.workers:
            self._desk.workers[node].verdicts.append(sealed)
