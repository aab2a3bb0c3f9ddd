"""Sign submissions, keep them on disk and upload each until the trainer's receipt arrives.

Signing and writing happen in the ledger's thread, so that generation waits for neither. A submission that put()
has taken is on disk, and stays there until the trainer has it or refuses it for good; in a run with successors
until the versions that it was made for are stale, as the next leader may not know what this one had.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ...crypto.hashing import digest
from ...protocol.envelope import Purpose
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease
from ...protocol.rollouts import Receipt, Submission
from ..p2p.rpc import Refused
from ..p2p.services import NodeServices
from ..p2p.transport import TransportError
from ..p2p.waiting import LogBackoff

logger = logging.getLogger(__name__)

PAUSE_S = 0.2
PAUSE_MAX_S = 3.0
SUBMISSION_TTL_S = 3600
UPLOADS = 3
"""Concurrent uploads.

The trainer allows one extra per node, so a retry may overlap a dropped stream.
"""
FINAL_REASONS = frozenset(
    set(Reason)
    - {
        Reason.BUSY,
        Reason.RATE_LIMITED,
        Reason.DISK_FULL,
        Reason.KEY_IN_USE,
        Reason.NOT_ADMITTED,
    }
)
"""Refusals after which the same bytes will never be accepted. A new leader first has to admit this node."""
MAX_DELIVERED = 256
"""Most submissions that are kept after their receipt."""

Upload = Callable[[bytes, int], Awaitable[bytes]]
"""(sealed submission, its lease) -> the trainer's sealed receipt.

Raises the errors of uploads.upload().
"""


@dataclass
class SpooledSubmission:
    """A submission in the upload queue."""

    lease_id: int
    deadline: float
    """Deadline of its lease, Unix seconds: the most urgent is uploaded first."""
    moving: bool = False
    """Whether it is being uploaded."""


class UploadQueue:
    """Queue of the submissions that the trainer does not have yet."""

    def __init__(
        self,
        services: NodeServices,
        upload: Upload,
        refused: Callable[[Reason], None],
        *,
        keep_versions: int = 0,
    ) -> None:
        """`refused` is called with the reason for which a submission was refused for good.

        With successors to the trainer, a submission is kept for `keep_versions` after its receipt.
        """
        self._keep_versions = keep_versions
        self._delivered: dict[bytes, tuple[int, int]] = {}
        """Submissions that have a receipt: (lease, version after which nobody can use it), oldest first."""
        self._services = services
        self._ledger = services.ledger
        self._upload = upload
        self._refused = refused
        self._kept: dict[bytes, SpooledSubmission] = {}
        self._news = asyncio.Condition()
        self._pause = PAUSE_S
        self._lines = LogBackoff()
        self._rest_until = 0.0

    def open(self) -> None:
        """Load the submissions of an earlier start of this node."""
        for name, lease_id, deadline in self._ledger.queued_uploads():
            self._kept[name] = SpooledSubmission(lease_id, deadline)

    def leases(self) -> set[int]:
        """List the leases of the queued submissions."""
        return {submission.lease_id for submission in self._kept.values()}

    async def resend(self) -> None:
        """Queue again what has a receipt, for another leader: it may not have got it."""
        for name, (lease_id, _) in self._delivered.items():
            self._kept[name] = SpooledSubmission(lease_id, 0.0)
        self._delivered.clear()
        async with self._news:
            self._news.notify_all()

    async def put(self, lease: Lease, submission: Submission) -> None:
        """Sign the work of a lease and write it to disk before returning. Raises StorageError."""
        name = await self._ledger.beside(self._write, lease, submission)
        self._kept[name] = SpooledSubmission(lease.lease_id, lease.deadline)
        async with self._news:
            self._news.notify()

    async def run(self) -> None:
        """Upload pending and new submissions until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(UPLOADS):
                tasks.create_task(self._uploads())

    def _write(self, lease: Lease, submission: Submission) -> bytes:
        bundle = self._services.seal(
            Purpose.SUBMISSION,
            submission,
            recipient=self._services.trainer,
            sequence=lease.lease_id,
            expires=time.time() + SUBMISSION_TTL_S,
        )
        name = digest(bundle)
        self._ledger.queue_upload(name, lease.lease_id, lease.deadline, bundle)
        return name

    async def _uploads(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            async with self._news:
                await self._news.wait_for(lambda: self._next() is not None)
            if (rest := self._rest_until - loop.time()) > 0:
                await asyncio.sleep(rest)
            elif (name := self._next()) is not None:
                await self._try(name, loop)

    def _next(self) -> bytes | None:
        """Return the most urgent submission that is not being uploaded."""
        idle = (
            (submission.deadline, name)
            for name, submission in self._kept.items()
            if not submission.moving
        )
        return min(idle, default=(0.0, None))[1]

    async def _try(self, name: bytes, loop: asyncio.AbstractEventLoop) -> None:
        """Upload one submission; a failure pauses all uploads for a while."""
        submission = self._kept[name]
        submission.moving = True
        try:
            await self._deliver(name, submission.lease_id)
            self._pause = PAUSE_S
            self._lines.reset()
        except (TransportError, Refused, RemoteProtocolError) as error:
            if self._lines.due():
                logger.info("upload of lease %d waits: %s", submission.lease_id, error)
            self._rest_until = loop.time() + self._pause
            self._pause = min(self._pause * 1.6, PAUSE_MAX_S)
        finally:
            submission.moving = False

    async def _deliver(self, name: bytes, lease_id: int) -> None:
        sealed = await self._ledger.beside(self._ledger.queued_upload, name)
        newest = self._services.heads.order()[1]
        if sealed is not None:
            taken = await self._hand_over(name, lease_id, sealed)
            listed = self._services.leaders.listed
            if taken and listed is not None and len(listed.leaders) > 1:
                self._delivered[name] = (lease_id, newest + self._keep_versions)
            else:
                await self._ledger.beside(self._ledger.drop_upload, name)
        del self._kept[name]
        await self._drop_delivered(newest)

    async def _drop_delivered(self, newest: int) -> None:
        """Remove the submissions that no leader can use at version `newest`, and the oldest of too many."""
        spare = len(self._delivered) - MAX_DELIVERED
        unneeded = [
            name
            for index, (name, (_, last)) in enumerate(self._delivered.items())
            if last < newest or index < spare
        ]
        for name in unneeded:
            await self._ledger.beside(self._ledger.drop_upload, name)
            self._delivered.pop(name, None)

    async def _hand_over(self, name: bytes, lease_id: int, sealed: bytes) -> bool:
        """Upload a submission; return whether the trainer has it, or False if it refused it for good."""
        try:
            receipt = await self._upload(sealed, lease_id)
        except Refused as refusal:
            self._services.report_refusal(refusal)
            if refusal.reason not in FINAL_REASONS:
                raise
            logger.warning("lease %d was refused: %s", lease_id, refusal)
            self._refused(refusal.reason)
            return False
        opened = self._services.unseal(receipt, Purpose.RECEIPT, Receipt)
        if opened.body.submission != name:
            raise RemoteProtocolError(Reason.WRONG_DIGEST, "a receipt for something else")
        return True
