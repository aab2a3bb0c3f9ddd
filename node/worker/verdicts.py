"""The worker's verdicts: each is checked, kept and counted once, however often and by whatever way it comes.

They are kept for `primerl-node explain`, so that an honest operator learns what the trainer found, above all
when it leases this node nothing any more.
"""

import logging
import time
from collections import Counter

from ...crypto.hashing import short
from ...protocol.envelope import Purpose, unseal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.messages import GetVerdicts, Verdicts
from ...protocol.reputation import Reputation
from ...protocol.rollouts import Verdict
from ...protocol.version import ALPN_CONTROL
from ..ops.errors import StorageError
from ..p2p.links import Links
from ..p2p.rpc import Refused
from ..p2p.transport import TransportError
from ..storage.ledger import Ledger

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 10.0
MAX_ROUNDS = 256
"""Replies of one fetch: more verdicts than a trainer keeps."""
CURSOR = "verdicts"
"""Number of the last verdict that was asked for, as the trainer counts."""
BAN_PAUSE_S = 60.0
MAX_BAN_PAUSE_S = 900.0


class VerdictBox:
    """What the trainer said of this node's work."""

    def __init__(
        self,
        *,
        node: bytes,
        run_id: bytes,
        trainer: bytes,
        links: Links,
        ledger: Ledger,
        explain: str = "primerl-node explain",
    ) -> None:
        """`explain` is the command that shows these verdicts to the operator."""
        self._node = node
        self._run_id = run_id
        self._trainer = trainer
        self._links = links
        self._ledger = ledger
        self._explain = explain
        self._refusals = 0
        self._record = Reputation()
        self.accepted = 0
        self.rejected: Counter[str] = Counter()

    @property
    def trust(self) -> float | None:
        """What these verdicts come to, as the trainer counts; None before the first."""
        if not self._record.updated:
            return None
        self._record.age(time.time())
        return self._record.trust

    async def take(self, sealed: bytes) -> None:
        """Take in a verdict; one that was here before counts for nothing.

        Raises:
            RemoteProtocolError: it is not the trainer's verdict on our work.
        """
        # However old it is, it tells what became of our work: its expiry does not matter here.
        verdict = unseal(
            sealed,
            Purpose.VERDICT,
            Verdict,
            now=0,
            run=self._run_id,
            signer=self._trainer,
            recipient=self._node,
        ).body
        try:
            news = await self._ledger.beside(self._ledger.add_verdict, self._node, sealed)
        except StorageError as error:
            logger.warning("a verdict is not kept for `explain`: %s", error)
            news = True
        if news:
            self._count(verdict)

    async def fetch(self) -> None:
        """Ask for the verdicts that we did not hear. What cannot be had now is asked for the next time."""
        after = int.from_bytes(self._ledger.get(CURSOR) or b"", "big")
        try:
            for _ in range(MAX_ROUNDS):
                reply = await self._links.request(
                    self._trainer,
                    ALPN_CONTROL,
                    GetVerdicts(after),
                    Verdicts,
                    deadline=ASK_TIMEOUT_S,
                )
                for sealed in reply.verdicts:
                    await self.take(sealed)
                if reply.next <= after:
                    return
                after = reply.next
                self._ledger.set(CURSOR, after.to_bytes(8, "big"))
        except (TransportError, Refused, RemoteProtocolError, StorageError) as error:
            logger.info("no verdicts from %s: %s", short(self._trainer), error)

    async def refused(self, why: str) -> float:
        """The trainer leases us nothing: learn what it found, tell the operator; seconds to wait."""
        await self.fetch()
        pause = min(BAN_PAUSE_S * 2**self._refusals, MAX_BAN_PAUSE_S)
        self._refusals = min(self._refusals + 1, 8)
        logger.error(
            "the trainer gives this node no work (%s). What it found: `%s`. Asking again in %.0f s",
            why,
            self._explain,
            pause,
        )
        return pause

    def count_refusal(self, reason: Reason) -> None:
        """A whole submission was refused for good, with no verdict on it."""
        self.rejected[reason.value] += 1

    def welcome(self) -> None:
        """The trainer leases us something again."""
        self._refusals = 0

    def _count(self, verdict: Verdict) -> None:
        reasons = Counter(rejection.reason for rejection in verdict.rejections)
        if reasons:
            unlisted = verdict.rejected - len(verdict.rejections)
            reasons[verdict.rejections[-1].reason] += max(0, unlisted)
        self.accepted += verdict.accepted
        self.rejected.update({reason.value: count for reason, count in reasons.items()})
        self._record.record(verdict.accepted, reasons, time.time())
        if not verdict.rejections:
            return
        first = verdict.rejections[0]
        logger.info(
            "lease %d: %d accepted, %d rejected, first %s (%s)",
            verdict.lease_id,
            verdict.accepted,
            verdict.rejected,
            first.reason.value,
            first.detail,
        )
