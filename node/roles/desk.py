"""The trainer's desk: admits workers, hands out leases, passes on verdicts; others answer the rest.

Whoever was admitted hears what became of its work, also where it is leased nothing any more.
"""

import asyncio
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ... import __version__
from ...crypto.hashing import short
from ...crypto.keys import SecretKey
from ...protocol import tickets
from ...protocol.envelope import Purpose, seal, utc, wrong_version
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Held, LeaseBook, Share
from ...protocol.messages import (
    MAX_LEASES,
    MAX_SEALED,
    Accepted,
    AuditDone,
    AuditRequest,
    ControlRequest,
    GetHeads,
    GetMerged,
    GetVerdicts,
    Hello,
    LeaseReply,
    LeaseRequest,
    OfferStage,
    SubmitOffer,
    SyncRecords,
    Verdicts,
    WatchHeads,
    Welcome,
    WorkerStats,
)
from ...protocol.reputation import Reputation
from ...protocol.version import CLOCK_SKEW_S, WIRE_VERSION
from ..ledger import Arrived, Ledger
from ..network.gossip import read_record
from ..network.heads import HeadServer
from ..network.peers import PeerTable
from ..network.rpc import receive, send
from ..network.transport import Stream
from ..planning.stages import CutModel
from .auditing import AuditDesk
from .merging import MergeDesk
from .stages.pipelines import PipelineDesk
from .submissions import SubmissionDesk

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 15.0
HOLD_S = 1.0
"""How long a lease request waits for work before it is told to come again."""
RETRY_MS = 50
ALIVE_S = 10.0
"""A worker that asked for nothing for this long is not offered as an upstream."""
MAX_UPSTREAMS = 8
NEAREST = 4
"""Of these: the ranks next to ours. The others are far, so that chunks cross a large swarm in few steps."""
VERDICT_BYTES = 256 * 1024
"""Of verdicts in one reply."""


@dataclass
class Worker:
    """What the desk knows of an admitted worker."""

    rank: int
    """Order of admission: chunks flow from lower to higher ranks."""
    ticket: bytes = b""
    """Id of the ticket under which it was admitted; empty where that is not known."""
    stats: WorkerStats = field(default_factory=lambda: WorkerStats(-1))
    asked: float = 0.0
    """Monotonic seconds of its last lease request."""
    heard: float = 0.0
    """Monotonic seconds of its last request of any kind, or of our start."""
    left: bool = False
    """It said goodbye, and asked for nothing since: a request of it that still waits gets no lease."""
    verdicts: deque[bytes] = field(default_factory=lambda: deque[bytes](maxlen=1024))


class LeaseDesk:
    """Answers the control requests of workers."""

    def __init__(
        self,
        *,
        key: SecretKey,
        run_id: bytes,
        sealed_manifest: bytes,
        book: LeaseBook,
        boot: int,
        ledger: Ledger,
        peers: PeerTable,
        heads: HeadServer,
        merges: MergeDesk,
        task_digest: Callable[[int], bytes],
        capacity: Callable[[bytes], int],
        order: Callable[[], tuple[int, int]],
        arrivals: "asyncio.Queue[Arrived]",
        audits: AuditDesk | None = None,
        model: CutModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = key
        self._run_id = run_id
        self._sealed_manifest = sealed_manifest
        self.book = book
        self._ledger = ledger
        self._peers = peers
        self._heads = heads
        self._merges = merges
        self._task_digest = task_digest
        self._capacity = capacity
        self._order = order
        self.audits = audits or AuditDesk()
        self.pipelines = PipelineDesk(
            key=key,
            run_id=run_id,
            model=model,
            ledger=ledger,
            peers=peers,
            heard=self._heard,
            refused=self._refusal,
            clock=clock,
        )
        self._submissions = SubmissionDesk(
            key=key,
            run_id=run_id,
            book=book,
            boot=boot,
            ledger=ledger,
            arrivals=arrivals,
            work_changed=self.work_changed,
        )
        self._work = asyncio.Condition()
        self._waiting: set[bytes] = set()
        self._clock = clock
        self._started = clock()
        self.workers: dict[bytes, Worker] = {}
        self.reputations: dict[bytes, Reputation] = {}
        for one in ledger.admitted():
            self.workers[one.node] = Worker(len(self.workers), one.ticket, heard=clock())
            if one.record:
                self._remember(one.record)

    def reputation(self, node: bytes) -> Reputation:
        """Evidence about a worker."""
        return self.reputations.setdefault(node, Reputation())

    async def work_changed(self) -> None:
        """Capacity may have grown: wake the lease requests that wait."""
        async with self._work:
            self._work.notify_all()

    async def handle(self, peer: bytes, stream: Stream) -> None:
        """Answer one control request (a router handler)."""
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            request: ControlRequest = await receive(stream, ControlRequest)  # type: ignore[arg-type]
        self._peers.seen(peer)
        if peer in self.workers:
            self.workers[peer].heard = self._clock()
        match request:
            case Hello():
                reply = self._hello(peer, request)
            case WatchHeads():
                return await self._heads.watch(stream, request)
            case GetHeads():
                return await self._heads.get(stream, request)
            case GetMerged():
                self._worker(peer)
                return await self._merges.handle(peer, stream, request)
            case LeaseRequest():
                reply = await self._lease(self._worker(peer), peer, request)
            case SubmitOffer():
                self._worker(peer)
                if await self._submissions.handle(peer, stream, request):
                    self.pipelines.worked(peer)
                return
            case GetVerdicts():
                self._worker(peer)
                reply = self._verdicts(peer, request.after)
            case AuditRequest():
                worker = self._worker(peer)
                worker.stats, worker.asked = request.stats, self._clock()
                return await self.audits.hand_out(peer, stream, request)
            case AuditDone():
                self._worker(peer)
                await self.audits.take_in(peer, request)
                reply = Accepted()
            case OfferStage():
                self._worker(peer).left = False
                reply = self.pipelines.offered(peer, request)
                await self._unseat(peer)
            case SyncRecords():
                self._worker(peer)
                self._renew(peer, request.records)
                before, after = self._line(peer)
                reply = SyncRecords((*before, *after))
            case _:  # Goodbye, the last of the union
                self._worker(peer).left = True
                self.pipelines.left(peer)
                self.book.release(peer, time.time())
                await self.work_changed()
                reply = Accepted()
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            await send(stream, reply)
            await stream.finish()

    def take_back(self, now: float) -> list[Held]:
        """Leases that nobody works on any more; `now` in Unix seconds. Their tasks will be leased again."""
        late = self.book.expire(now)
        for node in self.pipelines.orphans():
            lost = self.book.release(node, now)
            if lost:
                logger.warning(
                    "stage 0 %s is gone: %d lease(s) go to others", short(node), len(lost)
                )
            late += lost
        return late

    async def _unseat(self, peer: bytes) -> None:
        """Who offers to be a stage and is no stage 0 cannot work on what it was leased as one."""
        if not self.pipelines.leads(peer) and self.book.release(peer, time.time()):
            await self.work_changed()

    def _heard(self, node: bytes) -> float:
        """Monotonic seconds; see Worker."""
        worker = self.workers.get(node)
        return worker.heard if worker else self._started

    def silence(self, node: bytes) -> float:
        """Seconds since an admitted node said anything."""
        return self._clock() - self._heard(node)

    def _refusal(self, node: bytes) -> str:
        """Why a node is given no work, or ""."""
        known = self.reputations.get(node)
        return (known.banned or known.refused) if known else ""

    def _renew(self, peer: bytes, records: tuple[bytes, ...]) -> None:
        """A node's own record, before the one that it said hello with runs out; others' are not its to tell."""
        for sealed in records[:1]:
            record = read_record(sealed, self._run_id, int(time.time()))
            if record.node != peer:
                raise RemoteProtocolError(Reason.WRONG_SIGNER, "a record of somebody else")
            self._peers.learn(record, sealed)

    def _worker(self, peer: bytes) -> Worker:
        worker = self.workers.get(peer)
        if worker is None:
            raise RemoteProtocolError(Reason.NOT_ADMITTED, "say hello with a ticket first")
        return worker

    def _hello(self, peer: bytes, hello: Hello) -> Welcome:
        if hello.wire_version != WIRE_VERSION:
            raise wrong_version("your node", hello.wire_version, here="the trainer")
        now = int(time.time())
        check_clock(hello.unix_time, now)
        # Whoever was admitted needs no valid ticket: its key is its ticket.
        ticket = b"" if peer in self.workers else self._check_ticket(hello.ticket, now)
        record = read_record(hello.record, self._run_id, now)
        if record.node != peer:
            raise RemoteProtocolError(Reason.WRONG_SIGNER, "a record of somebody else")
        self._peers.learn(record, hello.record)
        if peer not in self.workers:
            self._ledger.admit(peer, now, ticket, hello.record)
            self.workers[peer] = Worker(len(self.workers), ticket, heard=self._clock())
            logger.info("admitted %s (%s, %s)", short(peer), hello.role, hello.software)
        else:
            self._ledger.keep_record(peer, hello.record)
        # What it held before it said hello is lost to it.
        self.pipelines.began(peer)
        self.book.release(peer, now)
        return Welcome(self._sealed_manifest, __version__, WIRE_VERSION, now)

    def _check_ticket(self, sealed: bytes, now: int) -> bytes:
        """The id of a ticket that may admit one more node. Raises RemoteProtocolError."""
        ticket = tickets.check(sealed, now=now)
        if (ticket.run, ticket.trainer) != (self._run_id, self._key.node_id):
            raise RemoteProtocolError(Reason.WRONG_RUN, "the ticket is for another run")
        name = tickets.id_of(ticket)
        self._ledger.add_ticket(name, ticket)
        known = self._ledger.ticket(name)
        assert known is not None
        if known.revoked:
            raise RemoteProtocolError(
                Reason.NOT_ADMITTED, "this ticket was revoked: ask the trainer's operator for one"
            )
        if known.uses and known.admitted >= known.uses:
            raise RemoteProtocolError(
                Reason.NOT_ADMITTED,
                f"this ticket has admitted the {known.uses} node(s) that it is for: ask the trainer's "
                "operator for another one",
            )
        return name

    def _remember(self, sealed: bytes) -> None:
        """Know an admitted node's role and addresses again after a restart of ours."""
        try:
            # it may have expired since: whoever comes back tells a new one
            self._peers.learn(read_record(sealed, self._run_id, now=0), sealed)
        except RemoteProtocolError as error:
            logger.warning("forgetting a peer record in the ledger: %s", error)

    async def _lease(self, worker: Worker, peer: bytes, request: LeaseRequest) -> LeaseReply:
        worker.stats, worker.left = request.stats, False
        worker.asked = self._clock()
        reputation = self.reputation(peer)
        reputation.age(time.time())
        if reputation.refused:
            raise RemoteProtocolError(Reason.BANNED, reputation.banned or reputation.refused)
        holding = request.holding
        if holding is not None and self.book.release_lost(peer, holding, time.time()):
            await self.work_changed()
        leases = self._grant(peer, request.wanted)
        self._waiting.add(peer)
        try:
            async with asyncio.timeout(HOLD_S), self._work:
                while not leases and request.wanted and not worker.verdicts:
                    await self._work.wait()
                    if worker.left:
                        break
                    leases = self._grant(peer, request.wanted)
        except TimeoutError:
            pass  # nothing to do right now; the reply says when to come again
        finally:
            self._waiting.discard(peer)
        before, after = self._line(peer)
        return LeaseReply(tuple(leases), take_verdicts(worker.verdicts), before, RETRY_MS, after)

    def _grant(self, peer: bytes, wanted: int) -> list[bytes]:
        sealed: list[bytes] = []
        term, version = self._order()
        while len(sealed) < wanted and version >= 0:
            lease = self.book.grant(
                peer,
                version=version,
                term=term,
                capacity=self._capacity(peer),
                digest_of=self._task_digest,
                seed=secrets.token_bytes(32),
                now=time.time(),
                share=Share(self.reputation(peer).trust_low, frozenset(self._waiting)),
            )
            if lease is None:
                break
            sealed.append(
                seal(
                    self._key,
                    Purpose.LEASE,
                    self._run_id,
                    lease,
                    recipient=peer,
                    sequence=lease.lease_id,
                    expires=int(lease.deadline) + 60,
                )
            )
        return sealed

    def _verdicts(self, peer: bytes, after: int) -> Verdicts:
        """What one reply holds of a node's verdicts after a number: it may have missed them, or be banned."""
        numbered = self._ledger.verdicts_after(peer, after, count=MAX_LEASES, size=VERDICT_BYTES)
        last = numbered[-1][0] if numbered else after
        # One that no message holds must not keep its node from hearing the others.
        return Verdicts(tuple(s for _, s in numbered if len(s) <= MAX_SEALED), last)

    def _line(self, peer: bytes) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Records of live workers that hold weights and may be shown: admitted before `peer`, and after it."""
        me = self.workers[peer].rank
        now = self._clock()
        before: list[tuple[int, bytes]] = []
        after: list[tuple[int, bytes]] = []
        for node, worker in self.workers.items():
            row = self._peers.get(node)
            alive = now - worker.asked < ALIVE_S and worker.stats.version >= 0
            if node != peer and alive and row.record is not None and row.record.share_address:
                (before if worker.rank < me else after).append((abs(worker.rank - me), row.sealed))
        return _near_and_far(before, peer), _near_and_far(after, peer)


def _near_and_far(found: list[tuple[int, bytes]], peer: bytes) -> tuple[bytes, ...]:
    """The nearest ranks in order, then some of the others, always the same for one peer."""
    records = [sealed for _, sealed in sorted(found)]
    near, far = records[:NEAREST], records[NEAREST:]
    few = min(len(far), MAX_UPSTREAMS - NEAREST)
    return (*near, *random.Random(peer).sample(far, few))


def check_clock(theirs: int, ours: int) -> None:
    """Refuse a node whose clock is off: it would take our leases for expired, or we its submissions.

    Unix seconds; 0 for `theirs` says nothing. Raises RemoteProtocolError(WRONG_CLOCK).
    """
    if theirs and abs(theirs - ours) > CLOCK_SKEW_S:
        side = "ahead of" if theirs > ours else "behind"
        raise RemoteProtocolError(
            Reason.WRONG_CLOCK,
            f"your clock is {abs(theirs - ours)} s {side} the trainer's ({utc(ours)}): set the clock of "
            "your machine, or if it is right tell the trainer's operator",
        )


def take_verdicts(waiting: deque[bytes]) -> tuple[bytes, ...]:
    """As many verdicts as fit one reply beside its leases; the rest come with the next."""
    taken: list[bytes] = []
    size = 0
    while waiting and len(taken) < MAX_LEASES and size + len(waiting[0]) <= VERDICT_BYTES:
        size += len(waiting[0])
        taken.append(waiting.popleft())
    return tuple(taken)
