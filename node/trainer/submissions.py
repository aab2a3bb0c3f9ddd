"""Submissions: refused cheaply, or kept and receipted.

What a receipt acknowledges is in the ledger first.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from ...crypto.keys import SecretKey
from ...protocol.envelope import Purpose, seal, unseal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease, LeaseBook
from ...protocol.messages import SubmitOffer
from ...protocol.rollouts import Receipt, Submission
from ..ops.errors import StorageError
from ..p2p.transport import Stream
from ..p2p.uploads import UploadReceiver
from ..storage.ledger import Ledger, QueuedSubmission
from .state import LEASES_PER_BOOT

logger = logging.getLogger(__name__)

LATE_GRACE_S = 5.0


class SubmissionReceiver:
    """Takes in what workers made of their leases."""

    def __init__(
        self,
        *,
        key: SecretKey,
        run_id: bytes,
        book: LeaseBook,
        boot: int,
        ledger: Ledger,
        arrivals: "asyncio.Queue[QueuedSubmission]",
        work_changed: Callable[[], Awaitable[None]],
    ) -> None:
        """`boot` counts the starts of this trainer; `work_changed` is called when a lease has come back."""
        self._key = key
        self._run_id = run_id
        self._book = book
        self._boot = boot
        self._ledger = ledger
        self._arrivals = arrivals
        self._work_changed = work_changed
        self._uploads = UploadReceiver()

    async def handle(self, peer: bytes, stream: Stream, offer: SubmitOffer) -> bool:
        """Take the bytes of `offer`, or repeat the receipt that they have; the caller has admitted `peer`.

        Whether that was news.
        """
        known = self._ledger.receipt(offer.digest)
        if known is not None:
            raise_unless_own(known, self._run_id, self._key.node_id, peer)
            await self._uploads.repeat(stream, known)
            return False
        if self._ledger.lease_done(offer.lease_id):
            raise RemoteProtocolError(Reason.LEASE_DONE, f"lease {offer.lease_id} was answered")
        held = self._book.held.get(offer.lease_id)
        if held is None and offer.lease_id >> LEASES_PER_BOOT == self._boot:
            raise RemoteProtocolError(Reason.LEASE_EXPIRED, f"lease {offer.lease_id} is not out")
        limit = self._book.policy.max_bytes

        async def accept(data: bytes) -> bytes:
            return await self._receive(peer, offer, data)

        await self._uploads.receive(peer, stream, offer, limit=limit, accept=accept)
        return True

    async def _receive(self, peer: bytes, offer: SubmitOffer, data: bytes) -> bytes:
        """Check the bundle against its lease, make it durable, and only then sign a receipt."""
        now = time.time()
        lease = self._check_bundle(peer, offer, data, now)
        if lease.deadline + LATE_GRACE_S < now:
            raise RemoteProtocolError(Reason.LEASE_EXPIRED, f"lease {lease.lease_id} is over")
        if self._ledger.lease_done(lease.lease_id):
            raise RemoteProtocolError(Reason.LEASE_DONE, f"lease {lease.lease_id} was answered")
        receipt = seal(
            self._key,
            Purpose.RECEIPT,
            self._run_id,
            Receipt(offer.digest, lease.lease_id, int(now)),
            recipient=peer,
            sequence=lease.lease_id,
            expires=int(now) + 7 * 86400,
        )
        if self._arrivals.full():
            raise RemoteProtocolError(Reason.BUSY, "the inbox is full: come again")
        try:
            arrival = self._ledger.receive(offer.digest, lease.lease_id, peer, data, receipt)
        except StorageError as error:
            logger.error("a submission could not be kept: %s", error)
            raise RemoteProtocolError(
                Reason.DISK_FULL, "the trainer cannot store it now"
            ) from error
        if lease.lease_id in self._book.held:
            self._book.settle(lease.lease_id, peer, now)
        self._arrivals.put_nowait(
            QueuedSubmission(arrival, offer.digest, lease.lease_id, peer, data)
        )
        await self._work_changed()
        return receipt

    def _check_bundle(self, peer: bytes, offer: SubmitOffer, data: bytes, now: float) -> Lease:
        submission = unseal(
            data,
            Purpose.SUBMISSION,
            Submission,
            now=int(now),
            run=self._run_id,
            signer=peer,
            recipient=self._key.node_id,
        ).body
        lease = open_lease(submission.lease, self._run_id, self._key.node_id, peer)
        if lease.lease_id != offer.lease_id:
            raise RemoteProtocolError(Reason.UNKNOWN_LEASE, "not the lease that was offered")
        return lease


def open_lease(sealed: bytes, run: bytes, trainer: bytes, worker: bytes) -> Lease:
    """The lease inside a submission: our own signature, to this worker. Its deadline is checked apart."""
    return unseal(
        sealed, Purpose.LEASE, Lease, now=0, run=run, signer=trainer, recipient=worker
    ).body


def raise_unless_own(receipt: bytes, run: bytes, trainer: bytes, peer: bytes) -> None:
    """A receipt is repeated to the node that it was given to, and to nobody else."""
    try:
        unseal(receipt, Purpose.RECEIPT, Receipt, now=0, run=run, signer=trainer, recipient=peer)
    except RemoteProtocolError as error:
        raise RemoteProtocolError(Reason.REPLAYED, "another node submitted this") from error
