"""Handler of the control requests of workers, validators, stages, standbys and learners."""

import asyncio
import time

from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.messages import (
    MAX_LEASES,
    MAX_SEALED,
    Accepted,
    AuditDone,
    AuditRequest,
    Backup,
    BackupWait,
    Contribute,
    ControlRequest,
    GetAssignment,
    GetBackup,
    GetBounds,
    GetHeads,
    GetVerdicts,
    Hello,
    LeaseRequest,
    MeasuredBounds,
    OfferStage,
    RetireKey,
    SubmitOffer,
    SyncRecords,
    Verdicts,
    WatchHeads,
)
from ..p2p.rpc import receive, send
from ..p2p.transport import Stream
from .backups import Backups
from .learners import LearnerDesk
from .scheduler import VERDICT_BYTES, LeaseScheduler
from .submissions import SubmissionReceiver
from .succession import HandOver

REQUEST_TIMEOUT_S = 15.0


class ControlHandler:
    """Reads one control request from a stream and passes it to the part that answers it."""

    def __init__(
        self,
        scheduler: LeaseScheduler,
        submissions: SubmissionReceiver,
        backups: Backups | None = None,
        hand_over: HandOver | None = None,
        learners: LearnerDesk | None = None,
    ) -> None:
        self._learners = learners
        self._hand_over = hand_over or HandOver(lambda: [])
        self._scheduler = scheduler
        self._registry = scheduler.registry
        self._services = scheduler.registry.services
        self._submissions = submissions
        self._backups = backups
        self._reach = submissions.progress.clock.reach

    async def handle(self, peer: bytes, stream: Stream) -> None:
        """Answer one control request (a router handler)."""
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            request: ControlRequest = await receive(stream, ControlRequest)  # type: ignore[arg-type]
        registry = self._registry
        registry.seen(peer)
        match request:
            case Hello():
                reply = registry.hello(peer, request)
                if not request.trial:
                    self._reach("first worker")
            case WatchHeads():
                return await self._services.head_server.watch(peer, stream, request)
            case GetHeads():
                return await self._services.head_server.get(stream, request)
            case LeaseRequest():
                self._hand_over.check_working()
                reply = await self._scheduler.lease(peer, request)
                if reply.leases:
                    self._reach("first lease")
            case SubmitOffer():
                self._hand_over.check_working()
                registry.get(peer)
                if await self._submissions.handle(peer, stream, request):
                    self._reach("first rollouts")
                    registry.pipelines.worked(peer)
                return
            case GetVerdicts():
                registry.get(peer)
                reply = self._verdicts(peer, request.after)
            case GetBounds():
                registry.get(peer)
                reply = MeasuredBounds(registry.bounds.sealed())
            case AuditRequest():
                registry.update(peer, request.stats)
                return await registry.audits.hand_out(peer, stream, request)
            case AuditDone():
                registry.get(peer)
                await registry.audits.take_in(peer, request)
                reply = Accepted()
            case OfferStage():
                worker = registry.get(peer)
                worker.left, worker.failure = False, ""
                reply = registry.pipelines.offered(peer, request)
                await self._scheduler.take_back_from_stage(peer)
            case GetBackup():
                registry.get(peer)
                reply = await self._backup(peer, request)
            case GetAssignment():
                registry.get(peer)
                reply = await self._desk().answer(peer, request)
            case Contribute():
                registry.get(peer)
                reply = self._desk().contribute(peer, request)
            case RetireKey():
                await registry.retire(request.retirement)
                await self._scheduler.work_changed()
                reply = Accepted()
            case SyncRecords():
                registry.get(peer)
                registry.renew(peer, request.records, request.version)
                before, after = registry.sources(peer)
                reply = SyncRecords((*before, *after), successors=registry.successors())
            case _:  # Goodbye, the last of the union
                registry.goodbye(peer, request.detail)
                registry.book.release(peer, time.time())
                await self._scheduler.work_changed()
                reply = Accepted()
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            await send(stream, reply)
            await stream.finish()

    async def _backup(self, peer: bytes, request: GetBackup) -> Backup | BackupWait:
        if self._backups is None:
            raise RemoteProtocolError(Reason.NOT_ADMITTED, "there is nothing to back up here")
        return await self._backups.answer(peer, request)

    def _desk(self) -> LearnerDesk:
        if self._learners is None:
            raise RemoteProtocolError(Reason.NOT_ADMITTED, "the trainer of this run trains alone")
        return self._learners

    def _verdicts(self, peer: bytes, after: int) -> Verdicts:
        """Return a node's verdicts after a number, at most one reply's worth."""
        numbered = self._services.ledger.verdicts_after(
            peer, after, count=MAX_LEASES, size=VERDICT_BYTES
        )
        last = numbered[-1][0] if numbered else after
        # One that is too large for any message must not keep its node from receiving the others.
        return Verdicts(tuple(s for _, s in numbered if len(s) <= MAX_SEALED), last)
