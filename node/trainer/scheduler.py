"""The trainer's desk: admits workers, hands out leases, passes on verdicts; others answer the rest.

Whoever was admitted hears what became of its work, also where it is leased nothing any more.
"""

import asyncio
import itertools
import logging
import math
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ... import __version__
from ...crypto.hashing import short
from ...crypto.keys import SecretKey
from ...protocol import tickets
from ...protocol.envelope import Purpose, seal, utc, wrong_version
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Held, LeaseBook, LeaseShare, Origin
from ...protocol.messages import (
    LEAVING,
    MAX_LEASES,
    MAX_SEALED,
    Accepted,
    AuditDone,
    AuditRequest,
    ControlRequest,
    GetHeads,
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
from ...protocol.version import CLOCK_SKEW_S, MAX_NAME, WIRE_VERSION
from ..environments.environment import Environment, EnvironmentFailed
from ..memory_plan.stages import CutModel
from ..ops.errors import printable
from ..p2p.gossip import read_record
from ..p2p.heads import HeadServer
from ..p2p.limits import TokenBuckets
from ..p2p.peers import PeerTable, Tier
from ..p2p.rpc import receive, send
from ..p2p.transport import Stream
from ..storage.ledger import Ledger, QueuedSubmission
from .audits import AuditQueue
from .pipeline_coordinator import PipelineCoordinator
from .submissions import SubmissionReceiver

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 15.0
HOLD_S = 1.0
"""How long a lease request waits for work before it is told to come again."""
MAX_HOLD_S = 8.0
NEWCOMER_POLLS = 20
"""Requests a second of all newcomers that wait, about: the more there are, the longer each is held."""
RETRY_MS = 50
NEWCOMER_RETRY_MS, MAX_RETRY_MS = 10, 5000
"""Later by so much for each newcomer that waits."""
HELLO_RATE, HELLO_BURST = 10.0, 200.0
"""Nodes a second that are admitted by one ticket; each costs a write to the disk."""
MAX_WORKERS = 4096
"""Rows of workers; beyond that newcomers that hold nothing are forgotten, and may say hello again."""
LINE_S = 0.25
"""How old what is known of the line of workers may be."""
WARN_S = 60.0
"""Between two warnings in the log."""
ALIVE_S = 10.0
"""A worker that asked for nothing for this long is not offered as an upstream."""
PREPARED_TASKS = 128
"""Whose digests are at hand before they are leased."""
KEPT_DIGESTS = 4096
MAX_UPSTREAMS = 8
MAX_NEWCOMER_SOURCES = 64
NEAREST = 4
"""Of these: the ranks next to ours. The others are far, so that chunks cross a large swarm in few steps."""
VERDICT_BYTES = 256 * 1024
"""Of verdicts in one reply."""


@dataclass
class WorkerState:
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
    proven: bool = False
    """Work of it was accepted; see Reputation.proven."""
    left: bool = False
    """It said goodbye, and asked for nothing since: a request of it that still waits gets no lease."""
    failure: str = ""
    """What ended it, in its own words; empty where it only left."""
    verdicts: deque[bytes] = field(default_factory=lambda: deque[bytes](maxlen=1024))


@dataclass(frozen=True)
class ChunkHolder:
    """A worker that others may fetch weights from."""

    rank: int
    proven: bool
    record: bytes
    """Sealed."""


@dataclass
class PendingRequest:
    """A lease request that waits for work."""

    wanted: int
    origin: Origin
    leases: list[bytes] = field(default_factory=list[bytes])
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with leases, or because there is something else to say."""


class LeaseScheduler:
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
        environment: Environment,
        capacity: Callable[[bytes | None], int],
        order: Callable[[], tuple[int, int]],
        arrivals: "asyncio.Queue[QueuedSubmission]",
        audits: AuditQueue | None = None,
        model: CutModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capacity`: groups that a proven node may still be leased, or all newcomers together (None)."""
        self._key = key
        self._run_id = run_id
        self._sealed_manifest = sealed_manifest
        self.book = book
        self._ledger = ledger
        self._peers = peers
        self._heads = heads
        self._environment = environment
        self._digests: dict[int, bytes] = {}
        """Of the tasks that the next leases may name."""
        self._short = asyncio.Event()
        """Set when tasks are leased: more of them are to be prepared."""
        self._capacity = capacity
        self._order = order
        self.audits = audits or AuditQueue()
        self.pipelines = PipelineCoordinator(
            key=key,
            run_id=run_id,
            model=model,
            ledger=ledger,
            peers=peers,
            heard=self._heard,
            refused=self.refusal,
            clock=clock,
        )
        self._submissions = SubmissionReceiver(
            key=key,
            run_id=run_id,
            book=book,
            boot=boot,
            ledger=ledger,
            arrivals=arrivals,
            work_changed=self.work_changed,
        )
        self._pending: dict[bytes, PendingRequest] = {}
        self._hellos = TokenBuckets(HELLO_RATE, HELLO_BURST, limit=1024)
        self._warn_at = -math.inf
        self._clock = clock
        self._started = clock()
        self._sources: list[ChunkHolder] = []
        self._sources_at = -math.inf
        self._ranks = itertools.count()
        self.turned_away: deque[str] = deque(maxlen=64)
        """Why nodes were not admitted, the newest last."""
        self.workers: dict[bytes, WorkerState] = {}
        self.reputations: dict[bytes, Reputation] = {}
        for one in ledger.admitted():
            self.workers[one.node] = WorkerState(next(self._ranks), one.ticket, heard=clock())
            if one.record:
                self._remember(one.record)

    def reputation(self, node: bytes) -> Reputation:
        """Evidence about a worker, to be added to."""
        return self.reputations.setdefault(node, Reputation())

    def proven(self, node: bytes) -> bool:
        """Whether work of a worker was accepted; what it holds is then counted in the run's capacity."""
        worker = self.workers.get(node)
        if worker is None:
            return False
        if not worker.proven:
            known = self.reputations.get(node)
            worker.proven = known is not None and known.proven
            if worker.proven:
                self.book.newcomers.proved(node)
                self._sources_at = -math.inf  # others may be named it now
        return worker.proven

    async def work_changed(self) -> None:
        """Capacity may have grown: answer the lease requests that wait, as far as there is work."""
        for node, pending in list(self._pending.items()):
            worker = self.workers[node]
            if worker.left or worker.verdicts:
                self._answer(node, [])
            elif self.proven(node) and (leases := self._grant(node, pending.wanted)):
                self._answer(node, leases)
        self._serve_newcomers()

    def _answer(self, node: bytes, leases: list[bytes]) -> None:
        """End the wait of a node for leases, if it waits."""
        pending = self._pending.pop(node, None)
        if pending is not None:
            pending.leases = leases
            pending.answered.set()
            self.book.newcomers.leave(node, pending.origin, time.time())

    async def handle(self, peer: bytes, stream: Stream) -> None:
        """Answer one control request (a router handler)."""
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            request: ControlRequest = await receive(stream, ControlRequest)  # type: ignore[arg-type]
        self._peers.seen(peer)
        if peer in self.workers:
            self.workers[peer].heard = self._clock()
            self._peers.admit(peer, self._tier(peer), self.workers[peer].ticket)
        match request:
            case Hello():
                try:
                    reply = self._hello(peer, request)
                except RemoteProtocolError as error:
                    self.turned_away.append(error.reason.value)
                    raise
            case WatchHeads():
                return await self._heads.watch(peer, stream, request)
            case GetHeads():
                return await self._heads.get(stream, request)
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
                worker = self._worker(peer)
                worker.left, worker.failure = False, ""
                reply = self.pipelines.offered(peer, request)
                await self._unseat(peer)
            case SyncRecords():
                self._worker(peer)
                self._renew(peer, request.records)
                before, after = self._line(peer)
                reply = SyncRecords((*before, *after))
            case _:  # Goodbye, the last of the union
                self._say_goodbye(peer, request.detail)
                self.book.release(peer, time.time())
                await self.work_changed()
                reply = Accepted()
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            await send(stream, reply)
            await stream.finish()

    def _say_goodbye(self, node: bytes, detail: str) -> None:
        """It leaves: in order, or because something ended it."""
        worker = self._worker(node)
        worker.left = True
        self.pipelines.left(node)
        if detail not in ("", LEAVING):
            worker.failure = printable(detail, MAX_NAME)
            logger.warning("worker %s has failed: %s", short(node), worker.failure)

    def take_back(self, now: float) -> list[Held]:
        """Leases that nobody works on any more; `now` in Unix seconds. Their tasks will be leased again.

        Called all the time: newcomers are served here, too, as slots are passed on with time.
        """
        late = self.book.expire(now)
        self._warn(self._clock())
        for node in self.pipelines.orphans():
            lost = self.book.release(node, now)
            if lost:
                logger.warning(
                    "stage 0 %s is gone: %d lease(s) go to others", short(node), len(lost)
                )
            late += lost
        self._serve_newcomers()
        return late

    def warnings(self) -> list[str]:
        """Tickets by which nodes came that take leases and answer nothing, with what to do about it."""
        return [
            self._failing(ticket, record.lost)
            for ticket, record in self.book.newcomers.tickets.items()
            if record.failing
        ]

    def _failing(self, ticket: bytes, lost: int) -> str:
        name = ticket.hex()[:12]
        account = self._ledger.ticket(ticket)
        label = f" ({account.label})" if account is not None and account.label else ""
        return (
            f"{lost} leases of newcomers with ticket {name}{label} did not come back: if it leaked, "
            f"`primerl-node ticket revoke {name}` and give out another"
        )

    def _warn(self, now: float) -> None:
        if now < self._warn_at:
            return
        for warning in self.warnings():
            self._warn_at = now + WARN_S
            logger.warning("%s", warning)

    def _tier(self, peer: bytes) -> Tier:
        """Whose connections are kept when there are too many."""
        known = self.proven(peer) or peer in self.audits.validators or self.pipelines.place(peer)
        return Tier.MEMBER if known else Tier.NEWCOMER

    async def _unseat(self, peer: bytes) -> None:
        """Who offers to be a stage and is no stage 0 cannot work on what it was leased as one."""
        if not self.pipelines.leads(peer) and self.book.release(peer, time.time()):
            await self.work_changed()

    def members(self, within_s: float) -> set[bytes]:
        """Proven workers that have not left and were heard within `within_s` seconds (or before our start)."""
        since = self._clock() - within_s
        return {
            node
            for node, worker in self.workers.items()
            if self.proven(node) and not worker.left and worker.heard >= since
        }

    def _heard(self, node: bytes) -> float:
        """Monotonic seconds; see Worker."""
        worker = self.workers.get(node)
        return worker.heard if worker else self._started

    @property
    def version(self) -> int:
        """The newest policy version; -1 before the first."""
        return self._order()[1]

    def silence(self, node: bytes) -> float:
        """Seconds since an admitted node should have said something, and said nothing."""
        loading = self.workers[node].stats.version < 0  # until it has a policy it need not
        if loading and self._peers.get(node).path() is not None:
            return 0.0
        return self._clock() - self._heard(node)

    def refusal(self, node: bytes) -> str:
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

    def _worker(self, peer: bytes) -> WorkerState:
        worker = self.workers.get(peer)
        if worker is None:
            raise RemoteProtocolError(Reason.NOT_ADMITTED, "say hello with a ticket first")
        return worker

    def _hello(self, peer: bytes, hello: Hello) -> Welcome:
        if hello.wire_version != WIRE_VERSION:
            raise wrong_version("your node", hello.wire_version, here="the trainer")
        now = int(time.time())
        check_clock(hello.unix_time, now)
        self._heads.check_going_on()
        # Whoever was admitted needs no valid ticket: its key is its ticket.
        known = self.workers.get(peer)
        if known is not None:
            ticket = known.ticket
        else:
            ticket = self._ledger.ticket_of(peer) or self._check_ticket(hello.ticket, now)
        if not self.proven(peer) and not self._hellos.take(ticket, self._clock()):
            detail = "too many nodes say hello with this ticket: come again"
            raise RemoteProtocolError(Reason.BUSY, detail)
        record = read_record(hello.record, self._run_id, now)
        if record.node != peer:
            raise RemoteProtocolError(Reason.WRONG_SIGNER, "a record of somebody else")
        self._peers.learn(record, hello.record)
        if peer not in self.workers:
            self._make_room()
            self._ledger.admit(peer, now, ticket, hello.record)
            self.workers[peer] = WorkerState(next(self._ranks), ticket, heard=self._clock())
            self._peers.admit(peer, self._tier(peer), ticket)
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

    def _make_room(self) -> None:
        """Where there are too many, forget the newcomer that holds nothing and was silent longest."""
        if len(self.workers) < MAX_WORKERS:
            return
        holders = {held.node for held in self.book.held.values()}
        idle = [
            (worker.heard, node)
            for node, worker in self.workers.items()
            if not self.proven(node) and node not in holders and node not in self._pending
        ]
        if not idle:
            return
        _, gone = min(idle)
        del self.workers[gone]
        self.book.forget(gone)
        self._ledger.expel(gone)
        self._peers.admit(gone, Tier.STRANGER)
        known = self.reputations.get(gone)
        if known is not None and not known.banned:
            del self.reputations[gone]
            self._ledger.drop_reputation(gone)

    async def _lease(self, worker: WorkerState, peer: bytes, request: LeaseRequest) -> LeaseReply:
        if worker.stats.version < 0 <= request.stats.version:
            self._sources_at = -math.inf  # it holds weights now: others may fetch them from it
        worker.stats, worker.left, worker.failure = request.stats, False, ""
        worker.asked = self._clock()
        now = time.time()
        reputation = self.reputations.get(peer)
        if reputation is not None:
            reputation.age(now)
            if reputation.refused:
                raise RemoteProtocolError(Reason.BANNED, reputation.banned or reputation.refused)
        if self.proven(peer):
            self.book.present(peer, now)
        holding = request.holding
        if holding is not None and self.book.release_lost(peer, holding, now):
            await self.work_changed()
        if request.wanted:
            await self._make_ready(min(request.wanted, self.book.policy.leases_per_worker))
        leases = await self._wait_for_work(worker, peer, request.wanted) if request.wanted else []
        before, after = self._line(peer)
        verdicts = take_verdicts(worker.verdicts)
        why = "" if leases or not request.wanted else self._no_lease(peer, now)
        return LeaseReply(tuple(leases), verdicts, before, self._retry_ms(peer), after, why)

    async def _wait_for_work(self, worker: WorkerState, peer: bytes, wanted: int) -> list[bytes]:
        """Leases for `peer`, at once or as soon as there is work; none after a while, or with a verdict."""
        self._answer(peer, [])  # it asks anew: the earlier request is of no use to it
        proven = self.proven(peer)
        if proven and (leases := self._grant(peer, wanted)):
            return leases
        pending = self._pending[peer] = PendingRequest(wanted, self._origin(peer))
        if not proven:
            self.book.newcomers.enter(peer, pending.origin, time.time())
            self._serve_newcomers()
        try:
            if not worker.verdicts:
                async with asyncio.timeout(self._hold_s(proven)):
                    await pending.answered.wait()
        except TimeoutError:
            pass  # nothing to do right now; the reply says when to come again
        finally:
            if self._pending.get(peer) is pending:
                self._answer(peer, [])
        return pending.leases

    def _hold_s(self, proven: bool) -> float:
        """How long a request is held: those of many newcomers longer, so that all of them cost no more."""
        waiting = 0 if proven else len(self.book.newcomers)
        return min(max(HOLD_S, waiting / NEWCOMER_POLLS), MAX_HOLD_S)

    def _retry_ms(self, peer: bytes) -> int:
        waiting = 0 if self.proven(peer) else len(self.book.newcomers)
        return min(RETRY_MS + NEWCOMER_RETRY_MS * waiting, MAX_RETRY_MS)

    def _origin(self, peer: bytes) -> Origin:
        return Origin(self.workers[peer].ticket, self._peers.network_of(peer))

    def _serve_newcomers(self) -> None:
        """Lease to newcomers in their turn, as long as there is a slot."""
        while len(self.book.newcomers) and self._are_ready():
            node = self.book.next_newcomer(self._capacity(None), time.time())
            if node is None or not (leases := self._grant(node, 1)):
                return
            self._answer(node, leases)

    def _no_lease(self, peer: bytes, now: float) -> str:
        """Why an admitted node that asks is leased nothing just now, for its operator."""
        rest = self.book.record(peer).rest_until - now
        if self.version < 0:
            return "the run has no policy version yet"
        if rest > 0:
            return f"this node rests {rest:.0f} s, as leases of it did not come back"
        if any(held.node == peer for held in self.book.held.values()):
            return "it holds as many leases as its record allows"
        if self.book.staffed(now) and not self.proven(peer):
            waiting = len(self.book.newcomers)
            return f"newcomers take turns until work of theirs is accepted, {waiting} wait"
        return "all that may be generated now is leased, or waits to be trained"

    async def prepare_tasks(self) -> None:
        """Keep the digests of the next tasks at hand, for ever. Raises EnvironmentFailed."""
        leases = max(1, PREPARED_TASKS // self.book.policy.groups_per_lease)
        while True:
            self._short.clear()
            if await self._prepare(leases):
                await self.work_changed()
            await self._short.wait()

    async def _prepare(self, leases: int) -> bool:
        """Have the digests of the tasks of the next leases; whether any of them was not at hand."""
        wanted = self.book.upcoming(leases)
        missing = [index for index in wanted if index not in self._digests]
        tasks = await asyncio.gather(*map(self._environment.task, missing))
        if len(self._digests) > KEPT_DIGESTS:
            known = self._digests
            self._digests = {index: known[index] for index in wanted if index in known}
        self._digests |= {task.index: task.digest for task in tasks}
        return bool(missing)

    async def _make_ready(self, leases: int) -> None:
        """As _prepare(), for a request: an environment that takes long keeps none waiting."""
        try:
            async with asyncio.timeout(HOLD_S):
                await self._prepare(leases)
        except TimeoutError:
            logger.info("the next tasks are not ready: %s", self._environment.status or "slow")
        except EnvironmentFailed as error:
            self._short.set()  # prepare_tasks() meets the same error, and ends the run
            raise RemoteProtocolError(Reason.BUSY, "the trainer's environment fails") from error

    def _are_ready(self) -> bool:
        """Whether the digests for another lease are there; others may have taken what was made ready."""
        self._short.set()
        return all(index in self._digests for index in self.book.upcoming(1))

    def _grant(self, peer: bytes, wanted: int) -> list[bytes]:
        sealed: list[bytes] = []
        term, version = self._order()
        proven = self.proven(peer)
        reputation = self.reputations.get(peer) or Reputation()
        share = LeaseShare(
            reputation.trust_low,
            frozenset(node for node in self._pending if self.proven(node)),
            reputation.accepted / self.book.policy.group_size,
            None if proven else self._origin(peer),
        )
        while len(sealed) < wanted and version >= 0 and self._are_ready():
            lease = self.book.grant(
                peer,
                version=version,
                term=term,
                capacity=self._capacity(peer if proven else None),
                digest_of=self._digests.__getitem__,
                seed=secrets.token_bytes(32),
                now=time.time(),
                share=share,
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
        """Records of live workers that hold weights and may be shown: admitted before `peer`, and after it.

        Where newcomers outnumber proven workers these are named proven ones alone: keys may serve nothing.
        """
        now = self._clock()
        if now - self._sources_at >= LINE_S:
            self._sources, self._sources_at = self._find_sources(now), now
        proven = sum(one.proven for one in self._sources)
        outnumbered = self.proven(peer) and len(self._sources) > 2 * proven
        sources = [one for one in self._sources if one.proven or not outnumbered]
        me = self.workers[peer].rank
        before = [one.record for one in reversed(sources) if one.rank < me]
        after = [one.record for one in sources if one.rank > me]
        return _near_and_far(before, peer), _near_and_far(after, peer)

    def _find_sources(self, now: float) -> list[ChunkHolder]:
        """Workers that others can fetch from, by rank; of newcomers only some."""
        found: list[ChunkHolder] = []
        for node, worker in self.workers.items():
            if now - worker.asked >= ALIVE_S or worker.stats.version < 0:
                continue
            row = self._peers.get(node)
            if row.record is not None and row.record.share_address:
                proven = self._tier(node) == Tier.MEMBER
                found.append(ChunkHolder(worker.rank, proven, row.sealed))
        newcomers = sum(not one.proven for one in found)
        if newcomers > MAX_NEWCOMER_SOURCES:
            kept = set(random.sample(range(newcomers), MAX_NEWCOMER_SOURCES))
            numbers = itertools.count()
            found = [one for one in found if one.proven or next(numbers) in kept]
        return sorted(found, key=lambda one: one.rank)


def _near_and_far(records: Sequence[bytes], peer: bytes) -> tuple[bytes, ...]:
    """The nearest ranks in order, then some of the others, always the same for one peer."""
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
