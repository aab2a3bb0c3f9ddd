"""The trainer's registry of workers: admission, reputations, silence, chunk sources.

Invariant: an admitted node can always fetch its verdicts, even when it is given no work any more.
"""

import asyncio
import itertools
import logging
import math
import random
import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Self

import msgspec

from ... import __version__
from ...crypto.hashing import short
from ...protocol import tickets
from ...protocol.envelope import no_common_version, utc
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import EnvironmentContract
from ...protocol.messages import LEAVING, Hello, Welcome, WorkerStats
from ...protocol.numerics import NumericsClass
from ...protocol.reputation import Reputation
from ...protocol.retirement import read_retirement
from ...protocol.version import CLOCK_SKEW_S, MAX_NAME
from ..errors import UsageError, printable
from ..memory_plan.stages import CutModel
from ..ops.figures import BanRow
from ..p2p.gossip import read_record
from ..p2p.limits import TokenBuckets
from ..p2p.peers import Tier
from ..p2p.services import NodeServices
from ..p2p.transport import Connection
from ..process.heap import trim_heap
from ..storage.ledger import AdmittedNode
from ..verification.self_calibration import SelfCalibration
from .audits import AuditQueue
from .bounds_book import BoundsBook
from .lease_book import LeaseBook, NodeRecord, Origin, Standing
from .lease_outcomes import WorkRecords
from .pipeline_coordinator import PipelineCoordinator
from .sessions import Sessions

logger = logging.getLogger(__name__)

TOO_MANY_HELLOS = "too many nodes say hello with this ticket: come again"
HELLO_RATE, HELLO_BURST = 10.0, 200.0
"""Rate limit of hellos per second with one ticket; each costs a write to the disk."""
MAX_WORKERS = 4096
"""Beyond this number, newcomers without leases are forgotten; they may say hello again."""
SOURCES_S = 0.25
"""Maximum age of the list of chunk sources."""
ABLE_S = 1.0
"""Maximum age of the counts of workers, of all and by environment."""
PRESENT_S = 30.0
"""A worker that was heard within this time has a part of the groups that are leased ahead."""
WARN_S = 60.0
"""Minimum interval of warnings in the log."""
ALIVE_S = 10.0
"""A worker without a lease request for this long is not listed as a chunk source."""
GONE_S = 60.0
"""A worker silent for this long is not counted among those of its numerics class."""
AWAY_S, SWEEP_S = 300.0, 10.0
"""Silence after which a worker's row is dropped if it remembers nothing, and how often that is looked at."""
MAX_UPSTREAMS = 8
"""Sources on each side of a worker in the line; more where there are fewer on the other."""
MAX_NEWCOMER_SOURCES = 64
NEAREST = 4
"""Sources with adjacent ranks; the others are far, so that chunks cross a large swarm in few steps."""

MIN_RETURNED, MAX_RETURNED_SHARE = 8, 0.1
"""Leases handed back, in number and as a share, above which a worker is named."""
JOINING_S = 10.0
"""A worker without a policy that was heard this long ago is fetching the run's files."""
MIN_PREFIX = 4
"""Hex digits of a worker's id that name it."""
MAX_TURNED_AWAY = 64
MAX_LENGTHS = 1024
"""Refused nodes that are remembered, to be shown."""
MAX_SUCCESSIONS = 16
"""Keys that give one place on, one after the other: each is remembered for ever."""
MIN_BAN_S, MAX_BAN_S = 60.0, 10 * 365 * 86400.0
MAX_REASON = 200
"""Characters of an operator's reason for a ban."""


@dataclass
class WorkerState:
    """An admitted worker."""

    rank: int
    """Order of admission: chunks flow from lower to higher ranks."""
    ticket: bytes = b""
    """Id of the ticket that admitted it; empty if unknown."""
    stats: WorkerStats = field(default_factory=lambda: WorkerStats(-1))
    asked: float = 0.0
    """Monotonic seconds of its last lease request."""
    heard: float = 0.0
    """Monotonic seconds of its last request of any kind, or of the trainer's start."""
    proven: bool = False
    """Whether work of it was accepted; see Reputation.proven."""
    numerics: NumericsClass | None = None
    """Numerics class that it claims; None if it claims none."""
    playable: frozenset[int] = frozenset()
    """Environments of the run that it says it can play, by index; empty before its first lease request."""
    paused: str = ""
    """Why its owner lets it work on nothing for now; empty while it works."""
    left: bool = False
    """Whether it said goodbye, and no hello or lease request since; its waiting request gets no lease."""
    failure: str = ""
    """Error that ended it, in its own words; empty if it just left."""
    verdicts: deque[bytes] = field(default_factory=lambda: deque[bytes](maxlen=1024))


@dataclass
class ChunkHolders:
    """Workers that others may fetch weights from, in the order of their ranks."""

    ranks: list[int] = field(default_factory=list[int])
    records: list[bytes] = field(default_factory=list[bytes])
    """Sealed peer records."""

    @classmethod
    def of(cls, records: Mapping[int, bytes]) -> Self:
        """Make them of sealed peer records by rank."""
        ranks = sorted(records)
        return cls(ranks, [records[rank] for rank in ranks])

    def beside(self, rank: int) -> tuple[list[bytes], list[bytes]]:
        """Return the records before a rank and those after it, the nearest ones first."""
        begin, end = bisect_left(self.ranks, rank), bisect_right(self.ranks, rank)
        return self.records[:begin][::-1], self.records[end:]


@dataclass
class PendingRequest:
    """A lease request that waits for work."""

    wanted: int
    origin: Origin
    proven: bool
    """As the request came: a verdict, which may change that, answers it."""
    leases: list[bytes] = field(default_factory=list[bytes])
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with leases, or when the reply has other content."""


class WorkerRegistry:
    """Admits workers by ticket and keeps a record of each."""

    def __init__(
        self,
        services: NodeServices,
        sealed_manifest: bytes,
        book: LeaseBook,
        audits: AuditQueue,
        model: CutModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        calibration: SelfCalibration | None = None,
        environments: Sequence[EnvironmentContract] = (),
    ) -> None:
        """Load the admitted workers from the ledger.

        `model` is None if it cannot be cut into stages, `calibration` if the manifest fixes the bounds.
        `environments` are those of the run: warnings name the ones that no worker can play.
        """
        self.services = services
        self._sealed_manifest = sealed_manifest
        self.book = book
        self.audits = audits
        audits.keep_in(services.ledger)
        self.clock = clock
        self._started = clock()
        self.pipelines = PipelineCoordinator(
            services=services,
            model=model,
            heard=self._heard,
            refused=self.refusal,
            clock=clock,
        )
        self.pending: dict[bytes, PendingRequest] = {}
        """Lease requests that wait for work, by node."""
        self.sessions = Sessions(services.peers, clock)
        self._hellos = TokenBuckets(HELLO_RATE, HELLO_BURST, limit=1024)
        self._warn_at = -math.inf
        self._sweep_at = -math.inf
        self.trim: Callable[[], None] = trim_heap
        """Called when rows were dropped."""
        self._sources = self._proven_sources = ChunkHolders()
        self._sources_at = -math.inf
        self._able: Counter[int] = Counter()
        self._able_at = -math.inf
        self._present = 0
        self._present_at = -math.inf
        self._ranks = itertools.count()
        self.retired = {
            node: read_retirement(sealed) for node, sealed in services.ledger.retired().items()
        }
        """Keys that their owners ended."""
        self.turned_away: dict[bytes, RemoteProtocolError] = {}
        """Why the last hello of a node was refused, the newest last."""
        self.workers: dict[bytes, WorkerState] = {}
        self.reputations: dict[bytes, Reputation] = {}
        self.environments = environments
        self.work = WorkRecords()
        self.lengths: deque[tuple[float, int]] = deque(maxlen=MAX_LENGTHS)
        """Unix time of the verdict and sampled tokens of the newest accepted rollouts."""
        self._calibration = calibration
        self.bounds = BoundsBook(services, calibration, self.reputation, clock)
        for row in services.ledger.admitted():
            self._restore(row)

    def reputation(self, node: bytes) -> Reputation:
        """Return the evidence about a worker, to be added to; that of its successor if its key is retired."""
        return self.reputations.setdefault(self.present_key(node), Reputation())

    def present_key(self, node: bytes) -> bytes:
        """Return the key that has taken the place of a node's retired key, or the node itself."""
        # ends: a retired key takes no place, and no key is retired twice
        while (retirement := self.retired.get(node)) is not None and retirement.successor:
            node = retirement.successor
        return node

    def restore(self, reputations: Mapping[bytes, Reputation]) -> None:
        """Take the reputations of a checkpoint, but those that have passed to a successor since."""
        for node, known in reputations.items():
            if self.present_key(node) == node:
                self.reputations[node] = known

    def proven(self, node: bytes) -> bool:
        """Return whether work of a worker was accepted, or the operator named the worker.

        Its leases then count in the run's capacity.
        """
        worker = self.workers.get(node)
        if worker is None:
            return False
        if not worker.proven:
            known = self.reputations.get(node)
            worker.proven = self.named(node) or (known is not None and known.proven)
            if worker.proven:
                self.book.newcomers.proved(node)
                self._sources_at = -math.inf  # it may be listed as a source for others now
        return worker.proven

    def named(self, node: bytes) -> bool:
        """Return whether the operator named the node as a reference.

        A reference need not earn its leases one by one.
        """
        return self._calibration is not None and node in self._calibration.references

    async def gate(self, connection: Connection) -> None:
        """Let a control request in, or refuse its key before anything is read. Raises RemoteProtocolError."""
        if refusal := self._retired(connection.peer):
            raise RemoteProtocolError(Reason.KEY_RETIRED, refusal)
        await self.sessions.check(connection)

    async def retire(self, sealed: bytes) -> bytes:
        """Refuse a key from now on, as its owner states; return its node.

        Its leases are released, and its session ends. What it handed in before is judged as all else. A
        successor takes its place: its admission, its reputation with any ban, and what is still judged.

        Raises:
            RemoteProtocolError: NOT_FOUND for a key without any standing in this run (keeping those would let
                anybody fill the disk, and such a key is worth no more than a new one), KEY_RETIRED where either
                key was retired before, KEY_IN_USE for a successor that has a standing of its own.
        """
        retirement = read_retirement(sealed)
        node, successor = retirement.node, retirement.successor
        if node in self.retired:
            if successor not in (b"", self.retired[node].successor):
                raise RemoteProtocolError(
                    Reason.KEY_RETIRED, f"{self._retired(node)}: its place is not given twice"
                )
            return node
        if not self._has_standing(node):
            raise RemoteProtocolError(Reason.NOT_FOUND, "no node of this key takes part in the run")
        if successor:
            self._check_successor(node, successor)
            self._succeed(node, successor, sealed)
        else:
            self.services.ledger.retire(node, sealed)
        self.retired[node] = retirement
        self.book.release(node, time.time())
        if successor and node in self.book.nodes:
            self.book.nodes[successor] = self.book.nodes.pop(node)
        if node in self.workers:
            self.workers[node].left = True
            self.answer(node)
            self.pipelines.left(node)
        self._sources_at = -math.inf  # it may be listed as a source for others no more
        self.services.peers.retire(node)
        logger.warning("%s: %s", short(node), self._retired(node))
        if successor and (self.named(node) or node in self.audits.validators):
            logger.warning(
                "verification.references or .validators names %s: name %s",
                short(node),
                successor.hex(),
            )
        await self.sessions.end(node)
        if self.services.discovery is not None:
            await self.services.discovery.publish(sealed)
        return node

    def _check_successor(self, node: bytes, successor: bytes) -> None:
        """Raise RemoteProtocolError unless `successor`, which has done nothing yet, may take a node's place."""
        if successor in self.retired:
            raise RemoteProtocolError(
                Reason.KEY_RETIRED, "the new key is itself retired: make another"
            )
        if sum(self.present_key(earlier) == node for earlier in self.retired) >= MAX_SUCCESSIONS:
            raise RemoteProtocolError(
                Reason.RATE_LIMITED,
                f"this place has had {MAX_SUCCESSIONS} keys: join with a ticket",
            )
        known = self.reputations.get(successor)
        worked = known is not None and known.snapshot() != Reputation().snapshot()
        others = (*self.audits.validators, self.services.key.node_id)
        if worked or self.named(successor) or successor in others:
            raise RemoteProtocolError(
                Reason.KEY_IN_USE, "the new key has a standing of its own in this run: make another"
            )

    def _succeed(self, node: bytes, successor: bytes, sealed: bytes) -> None:
        """Move all that is known of a node to the key that takes its place, on disk and here."""
        known = self.reputation(node)
        self.audits.succeed(node, successor)  # first: what a crash leaves behind is a copy
        self.services.ledger.retire(node, sealed, successor, msgspec.json.encode(known.snapshot()))
        self.reputations[successor] = self.reputations.pop(node)
        self.work.succeed(node, successor)
        self.workers.pop(successor, None)
        if (admitted := self.services.ledger.admitted_node(successor)) is not None:
            self._restore(admitted)

    def _has_standing(self, node: bytes) -> bool:
        known = node in self.workers or node in self.reputations or node in self.audits.validators
        return known or self.named(node) or bool(self.services.ledger.ticket_of(node))

    def _retired(self, node: bytes) -> str:
        """Say that a key was retired, and when; "" if it was not."""
        retirement = self.retired.get(node)
        if retirement is None:
            return ""
        place = f"; {short(retirement.successor)} has its place" if retirement.successor else ""
        return f"this key was retired by its owner at {utc(retirement.made)}, for ever{place}"

    def seen(self, peer: bytes) -> None:
        """Record that a node sent a request."""
        self.services.peers.seen(peer)
        if peer in self.workers:
            self.workers[peer].heard = self.clock()
            self.services.peers.admit(peer, self._tier(peer), self.workers[peer].ticket)

    def get(self, peer: bytes) -> WorkerState:
        """Return an admitted worker. Raises RemoteProtocolError."""
        worker = self.workers.get(peer)
        if worker is not None:
            return worker
        admitted = self.services.ledger.admitted_node(peer)
        if admitted is None:
            raise RemoteProtocolError(Reason.NOT_ADMITTED, "say hello with a ticket first")
        # its row was dropped while it was away
        return self._restore(admitted)

    def _restore(self, admitted: AdmittedNode) -> WorkerState:
        """Make the row of a node that the ledger knows."""
        worker = WorkerState(next(self._ranks), admitted.ticket, heard=self.clock())
        self.workers[admitted.node] = worker
        if admitted.record:
            self._remember(admitted.record)
        return worker

    def update(self, peer: bytes, stats: WorkerStats) -> WorkerState:
        """Record the stats of a worker that asks for work. Raises RemoteProtocolError."""
        worker = self.get(peer)
        if worker.stats.version < 0 <= stats.version:
            self._sources_at = -math.inf  # it holds weights now: others may fetch them from it
        worker.stats, worker.asked = stats, self.clock()
        return worker

    def origin(self, peer: bytes) -> Origin:
        """Return the ticket and the network of a newcomer."""
        return Origin(self.workers[peer].ticket, self.services.peers.network_of(peer))

    def hello(self, peer: bytes, hello: Hello) -> Welcome:
        """Admit a node by its ticket, or again by its key; a trial is only answered.

        Raises RemoteProtocolError.
        """
        if hello.trial:
            return self._try(peer, hello)
        self.turned_away.pop(peer, None)
        try:
            return self._admit(peer, hello)
        except RemoteProtocolError as error:
            if len(self.turned_away) >= MAX_TURNED_AWAY:
                del self.turned_away[next(iter(self.turned_away))]
            self.turned_away[peer] = error
            raise

    def _try(self, peer: bytes, hello: Hello) -> Welcome:
        """Answer a trial hello as that of a newcomer, without admitting it. Raises RemoteProtocolError."""
        common = self._common_version(hello)
        now = int(time.time())
        check_clock(hello.unix_time, now)
        self.services.head_server.check_going_on()
        ticket = self._check_ticket(hello.ticket, now)
        if not self._hellos.take(ticket, self.clock()):
            raise RemoteProtocolError(Reason.BUSY, TOO_MANY_HELLOS)
        seen_from = self.services.peers.seen_from(peer)
        leaders = self.services.leaders.sealed
        return Welcome(
            self._sealed_manifest, __version__, common, now, seen_from, leaders, *self._pace()
        )

    def _pace(self) -> tuple[int, float, float]:
        """Compute the workers that work, the rollouts an hour of the median one, and the mean length of a
        rollout.

        Of the rollouts that the run gets each has the part of its pace: no worker works all the time where
        they make more than the run takes.
        """
        now = time.time()
        paces = self.book.paces(now - self.book.policy.timeout_s)
        working = [pace for node, pace in paces.items() if self.proven(node)]
        count = len(self.lengths)
        length = sum(tokens for _, tokens in self.lengths) / count if count else 0.0
        if not working or count < 2:
            return len(working), 0.0, length
        hourly = 3600 * (count - 1) / max(1.0, now - self.lengths[0][0])
        return len(working), hourly * median(working) / sum(working), length

    def _common_version(self, hello: Hello) -> int:
        """Return the newest wire version that both speak. Raises RemoteProtocolError."""
        own = self.services.wire
        common = own.common(hello.spoken)
        if common is None:
            raise no_common_version(own, hello.spoken, called="your node", software=__version__)
        return common

    def _admit(self, peer: bytes, hello: Hello) -> Welcome:
        common = self._common_version(hello)
        now = int(time.time())
        check_clock(hello.unix_time, now)
        self.services.head_server.check_going_on()
        # An admitted node needs no valid ticket: its key admits it.
        known = self.workers.get(peer)
        if known is not None:
            ticket = known.ticket
        else:
            ticket = self.services.ledger.ticket_of(peer) or self._check_ticket(hello.ticket, now)
        if not self.proven(peer) and not self._hellos.take(ticket, self.clock()):
            raise RemoteProtocolError(Reason.BUSY, TOO_MANY_HELLOS)
        record = read_record(hello.record, self.services.run_id, now)
        if record.node != peer:
            raise RemoteProtocolError(Reason.WRONG_SIGNER, "a record of another node")
        self.services.peers.learn(record, hello.record)
        if peer not in self.workers:
            self._make_room()
            self.services.ledger.admit(peer, now, ticket, hello.record)
            self.workers[peer] = WorkerState(next(self._ranks), ticket, heard=self.clock())
            self.services.peers.admit(peer, self._tier(peer), ticket)
            logger.info(
                "admitted %s (%s, %s, wire %d)", short(peer), hello.role, hello.software, common
            )
        else:
            self.services.ledger.keep_record(peer, hello.record)
            self.workers[peer].left, self.workers[peer].failure = False, ""
        # A node that says hello again has lost its earlier leases. It is the same session's node: see gate().
        self.sessions.began(peer)
        self.pipelines.began(peer)
        self.book.release(peer, now)
        leaders = self.services.leaders.sealed
        return Welcome(self._sealed_manifest, __version__, common, now, leaders=leaders)

    def goodbye(self, node: bytes, detail: str) -> None:
        """Record that a worker leaves, in order or because of the error in `detail`."""
        worker = self.get(node)
        worker.left = True
        self.answer(node)
        self.pipelines.left(node)
        if detail not in ("", LEAVING):
            worker.failure = printable(detail, MAX_NAME)
            logger.warning("worker %s has failed: %s", short(node), worker.failure)

    def renew(self, peer: bytes, records: tuple[bytes, ...], version: int) -> None:
        """Store a node's own new record, before its last one expires, and the policy version that it loaded."""
        if version >= 0:
            worker = self.get(peer)
            worker.stats = msgspec.structs.replace(worker.stats, version=version)
        for sealed in records[:1]:
            record = read_record(sealed, self.services.run_id, int(time.time()))
            if record.node != peer:
                raise RemoteProtocolError(Reason.WRONG_SIGNER, "a record of another node")
            self.services.peers.learn(record, sealed)

    def answer(self, node: bytes, leases: Sequence[bytes] = ()) -> None:
        """End a node's wait for leases, if it waits."""
        pending = self.pending.pop(node, None)
        if pending is not None:
            pending.leases.extend(leases)
            pending.answered.set()
            self.book.newcomers.leave(node, pending.origin, time.time())

    def deliver(self, node: bytes, verdict: bytes) -> None:
        """Hand an admitted worker a sealed verdict: at once if it waits, else with its next reply."""
        self.workers[node].verdicts.append(verdict)
        self.answer(node)

    def warnings(self) -> list[str]:
        """Return warnings about failing tickets, unplayable environments and workers that choose their work.

        A failing ticket is one whose newcomers take leases and return nothing.
        """
        failing = [
            self._failing(ticket, record.lost)
            for ticket, record in self.book.newcomers.tickets.items()
            if record.failing
        ]
        staffed = self.staffed()
        unplayed = [
            _unplayed(environment, quarantined=self._barred(number))
            for number, environment in enumerate(self.environments)
            if staffed and number not in staffed
        ]
        names = [environment.name for environment in self.environments]
        return [*failing, *unplayed, *self.work.warnings(names), *self._choices()]

    def _choices(self) -> list[str]:
        """Describe the workers that play only what the run has enough of, and those that hand leases back."""
        staffed, now, lines = self.staffed(), time.time(), list[str]()
        since = self.clock() - GONE_S
        present: Counter[frozenset[int]] = Counter(
            worker.playable
            for worker in self.workers.values()
            if not worker.left and worker.heard >= since
        )
        for playable, count in present.items():
            if not self.book.ahead(playable, staffed, now):
                continue
            names = ", ".join(repr(self.environments[number].name) for number in sorted(playable))
            lines.append(
                f"{count} worker(s) play {names} alone, of which the run has a batch more than its ratio: they "
                "wait for the other environments; ask their owners to allow these, or change the ratio"
            )
        for node, record in self.book.nodes.items():
            returned, leases = record.returned_leases, record.returned_leases + record.kept_leases
            if returned >= MIN_RETURNED and returned > MAX_RETURNED_SHARE * leases:
                lines.append(
                    f"worker {short(node)} handed back {returned} of {leases} leases after it had seen them, "
                    "and rests for each: its owner may look why (a lost engine, restarts), or you ban it"
                )
        return lines

    def _barred(self, environment: int) -> bool:
        """Return whether a worker that is here is quarantined in an environment that it can play."""
        return any(
            environment in worker.playable & self.quarantined(node)
            for node, worker in self.workers.items()
            if not worker.left
        )

    def note_playable(self, worker: WorkerState, environments: frozenset[int]) -> None:
        """Record the environments that a worker says it can play."""
        if worker.playable != environments:
            worker.playable = environments
            if not environments <= self._able.keys():
                # it can play environments that others cannot: that counts at once
                self._able_at = -math.inf

    def note_paused(self, worker: WorkerState, why: str) -> None:
        """Record that a worker's owner paused it, in its words; empty: that it works."""
        if worker.paused != why:
            worker.paused = why
            self._able_at = self._present_at = self._sources_at = -math.inf

    def able(self, age_s: float = ABLE_S) -> Counter[int]:
        """Count the present workers by the environments that they are leased, at most `age_s` ago."""
        now = self.clock()
        if now - self._able_at >= age_s:
            self._able_at = now
            self._able = Counter(
                number
                for node, worker in self.workers.items()
                if not worker.left
                and not worker.paused
                and worker.heard >= now - GONE_S
                and not self.refusal(node)
                for number in self.leasable(node)
            )
        return self._able

    def staffed(self) -> frozenset[int]:
        """Return the environments that some present worker can play."""
        return frozenset(self.able())

    def classes(self, *, strangers: bool = False) -> Counter[NumericsClass]:
        """Count the present workers by claimed numerics class.

        With `strangers`, references and refused workers are left out.
        """
        return Counter(
            worker.numerics
            for node, worker in self.workers.items()
            if worker.numerics is not None
            and not worker.left
            and self.clock() - worker.heard < GONE_S
            and not (strangers and (self.bounds.is_reference(node) or self.refusal(node)))
        )

    def _failing(self, ticket: bytes, lost: int) -> str:
        name = ticket.hex()[:12]
        account = self.services.ledger.ticket(ticket)
        label = f" ({account.label})" if account is not None and account.label else ""
        return (
            f"{lost} leases of newcomers with ticket {name}{label} did not come back or brought nothing: if it "
            f"leaked, `primerl-node ticket revoke {name}` and give out another"
        )

    def warn(self) -> None:
        """Log the warnings, once in WARN_S."""
        now = self.clock()
        if now < self._warn_at:
            return
        for warning in self.warnings():
            self._warn_at = now + WARN_S
            logger.warning("%s", warning)

    def sweep(self) -> None:
        """Drop the data of workers that are gone, once in SWEEP_S.

        Unfetched verdicts are in the ledger. A row is removed only if it remembers nothing: a worker that comes
        back finds the same place as before. The use of tickets and networks is not stored in rows.
        """
        now = self.clock()
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_S
        self.end_bans(time.time())
        self.sessions.sweep()
        rows = len(self.workers)
        for node, worker in list(self.workers.items()):
            if now - worker.heard < AWAY_S or node in self.pending:
                continue
            worker.verdicts.clear()
            if node not in self.book.held.nodes and self._remembers_nothing(node):
                del self.workers[node]
                self.book.forget(node)
                self.reputations.pop(node, None)
                self.services.peers.forget(node)
        if len(self.workers) < rows:
            self.trim()

    def _remembers_nothing(self, node: bytes) -> bool:
        """Whether a worker is a newcomer that was never judged, lost no lease and is not connected."""
        known, leases = self.reputations.get(node), self.book.nodes.get(node)
        return (
            self._tier(node) == Tier.NEWCOMER
            and (known is None or known.snapshot() == Reputation().snapshot())
            and (leases is None or leases == NodeRecord())
            and not self.services.peers.get(node).connected
        )

    def members(self, within_s: float) -> set[bytes]:
        """Return the proven workers that have not left and were heard within `within_s` seconds."""
        since = self.clock() - within_s
        return {
            node
            for node, worker in self.workers.items()
            if self.proven(node) and not worker.left and worker.heard >= since
        }

    def joining(self) -> set[bytes]:
        """Return the nodes that have no policy yet, and were heard a moment ago."""
        since = self.clock() - JOINING_S
        return {
            node
            for node, worker in self.workers.items()
            if worker.stats.version < 0
            and not worker.left
            and node not in self.turned_away
            and worker.heard >= since
        }

    def takes_leases(self, node: bytes) -> bool:
        """Return whether a node joined to be leased work, by the role in its record."""
        record = self.services.peers.get(node).record
        return record is None or record.role == "inference"

    def present(self) -> int:
        """Count the members that were heard within PRESENT_S and are not paused, at most ABLE_S ago."""
        now = self.clock()
        if now - self._present_at >= ABLE_S:
            working = (not self.workers[node].paused for node in self.members(PRESENT_S))
            self._present_at, self._present = now, sum(working)
        return self._present

    @property
    def uptime_s(self) -> float:
        """Seconds since the registry was made, which is when the trainer can be reached."""
        return self.clock() - self._started

    def left(self) -> set[bytes]:
        """Return the nodes that said goodbye and sent no lease request since."""
        return {node for node, worker in self.workers.items() if worker.left}

    def _heard(self, node: bytes) -> float:
        """Return the monotonic seconds of a node's last request, or of the trainer's start."""
        worker = self.workers.get(node)
        return worker.heard if worker else self._started

    def silence(self, node: bytes) -> float:
        """Return the seconds since a node's last request; 0 while it loads its first policy."""
        loading = self.workers[node].stats.version < 0  # until then it need not send any
        if loading and self.services.peers.get(node).connected:
            return 0.0
        return self.clock() - self._heard(node)

    def refusal(self, node: bytes) -> str:
        """Return the reason why a node is given no work, or ""."""
        known = self.reputations.get(node)
        if node in self.retired:
            return self._retired(node)
        if known is None:
            return ""
        worker, barred = self.workers.get(node), self.quarantined(node)
        wanted = worker.playable if worker and worker.playable else range(len(self.environments))
        if not known.refused and barred and barred.issuperset(wanted):
            names = [self.environments[number].name for number in barred]
            return f"too much was rejected: {known.top_reason(names)}"
        return known.refused

    def ban(self, name: str, why: str, lasts_s: float | None = None) -> BanRow:
        """Ban the worker or validator whose id begins with `name`: for `lasts_s` seconds, or until a pardon.

        Returns the ban that is now in force: an earlier one without an end stands. Raises UsageError.
        """
        if lasts_s is not None and not MIN_BAN_S <= lasts_s <= MAX_BAN_S:
            raise UsageError(
                "a ban lasts at least a minute and at most ten years; without --for it has no end"
            )
        node, now = self._find(name), time.time()
        text = printable(why, MAX_REASON)
        reason = f"by the operator ({text})" if text else "by the operator"
        known, until = self.reputation(node), 0.0 if lasts_s is None else now + lasts_s
        known.ban(reason, until)
        if (known.banned, known.banned_until) == (reason, until):
            known.banned_at = now
        self.audits.ban(node, reason, until)
        self._changed_by_hand(node)
        return self._ban_row(node, known)

    def end_bans(self, now: float) -> None:
        """Give work again to those whose ban is over, with the trust that they have; `now` in Unix seconds."""
        for node, known in self.reputations.items():
            if known.end_ban(now):
                self._changed_by_hand(node)
        self.audits.end_bans(now)

    def pardon(self, name: str) -> bytes:
        """Forget all evidence about the worker whose id begins with `name`; return its id.

        It is a newcomer again, whose work is all audited; a validator is believed again. Raises UsageError.
        """
        node = self._find(name)
        self.reputations[node] = Reputation()
        self.audits.pardon(node)
        if node in self.workers:
            self.workers[node].proven = False
        return self._changed_by_hand(node, "pardoned: a newcomer again")

    def bans(self) -> list[BanRow]:
        """List the banned workers, and the validators that are believed no more; the newest ban first."""
        self.end_bans(time.time())
        rows = [
            self._ban_row(node, known) for node, known in self.reputations.items() if known.banned
        ]
        rows += [
            BanRow(
                node.hex(),
                short(node),
                0.0,
                f"as a validator: {record.disqualified}",
                until=record.disqualified_until,
            )
            for node, record in self.audits.records().items()
            if record.disqualified and not self.reputation(node).banned
        ]
        return sorted(rows, key=lambda row: -row.since)

    def _ban_row(self, node: bytes, known: Reputation) -> BanRow:
        return BanRow(
            id=node.hex(),
            short=short(node),
            since=known.banned_at,
            why=known.banned,
            ticket=self.ticket_labels().get(self.services.ledger.ticket_of(node), ""),
            accepted=known.accepted,
            rejected=sum(known.rejected.values()),
            until=known.banned_until,
        )

    def ticket_labels(self) -> dict[bytes, str]:
        """Map the ids of tickets to what people call them: the label, and the beginning of the id."""
        return {
            ticket.id: f"{ticket.label} {ticket.id.hex()[:8]}".strip()
            for ticket in self.services.ledger.tickets()
        }

    def _find(self, name: str) -> bytes:
        """Return the id of the only worker whose id begins with `name`. Raises UsageError."""
        begun = name.strip().lower()
        matches = [
            node
            for node in self.workers.keys() | self.reputations.keys() | self.audits.records().keys()
            if node.hex().startswith(begun)
        ]
        if len(begun) < MIN_PREFIX or not matches:
            raise UsageError(
                f"no worker has an id that begins with {name!r}: give at least {MIN_PREFIX} digits of one that "
                "`primerl-node peers` shows"
            )
        if len(matches) > 1:
            raise UsageError(
                f"{len(matches)} workers have ids that begin with {name!r}: give more digits"
            )
        return self.present_key(matches[0])

    def _changed_by_hand(self, node: bytes, freed: str = "not banned any more") -> bytes:
        known = self.reputation(node)
        self.services.ledger.set_reputation(node, msgspec.json.encode(known.snapshot()))
        self._sources_at = -math.inf  # it may be listed as a source for others no more
        logger.warning("%s is %s", short(node), known.refused or freed)
        return node

    def quarantined(self, node: bytes) -> frozenset[int]:
        """Return the environments that a worker is leased nothing of until time has healed its trust."""
        known = self.reputations.get(node)
        if known is None:
            return frozenset()
        names = enumerate(environment.name for environment in self.environments)
        return frozenset(number for number, name in names if known.of(name).quarantined)

    def leasable(self, node: bytes) -> frozenset[int]:
        """Return the environments that an admitted worker may be leased tasks of.

        It can play them, is not quarantined in them, and its work can be judged.
        """
        if self.waits_for_bounds(node):
            return frozenset()
        return self.workers[node].playable - self.quarantined(node)

    def waits_for_bounds(self, node: bytes) -> str:
        """Say why work of an admitted worker could not be judged: its class has no bounds; "" if it can."""
        return self.bounds.waits_for(self.pipelines.makers(node), self.workers[node].numerics)

    def standings(self, node: bytes) -> dict[int, Standing]:
        """Return by environment what a worker's accepted work allows it to hold."""
        known, shares = self.reputation(node), self.book.policy.environments
        named = zip(self.environments, shares, strict=True) if self.environments else ()
        standings: dict[int, Standing] = {}
        for number, (environment, share) in enumerate(named):
            trust = known.of(environment.name)
            standings[number] = Standing(trust.low, trust.accepted / share.group_size)
        return standings

    def _tier(self, peer: bytes) -> Tier:
        """Rank a node for keeping its connections when there are too many."""
        known = self.proven(peer) or peer in self.audits.validators or self.pipelines.place(peer)
        return Tier.MEMBER if known else Tier.NEWCOMER

    def _check_ticket(self, sealed: bytes, now: int) -> bytes:
        """Check that a ticket may admit one more node; return its id. Raises RemoteProtocolError."""
        ticket = tickets.check(sealed, now=now)
        if ticket.run != self.services.run_id or ticket.trainer not in self.services.leaders:
            raise RemoteProtocolError(Reason.WRONG_RUN, "the ticket is for another run")
        name = tickets.id_of(ticket)
        self.services.ledger.add_ticket(name, ticket)
        known = self.services.ledger.ticket(name)
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
        """Load an admitted node's role and addresses from the ledger after a restart."""
        try:
            # it may have expired: a returning node sends a new one
            self.services.peers.learn(read_record(sealed, self.services.run_id, now=0), sealed)
        except RemoteProtocolError as error:
            logger.warning("forgetting a peer record in the ledger: %s", error)

    def _make_room(self) -> None:
        """If there are too many workers, forget the newcomer without leases that was silent longest."""
        if len(self.workers) < MAX_WORKERS:
            return
        busy = self.book.held.nodes | self.pending.keys()
        idle = [
            (worker.heard, node)
            for node, worker in self.workers.items()
            if node not in busy and not self.proven(node)
        ]
        if not idle:
            return
        _, gone = min(idle)
        del self.workers[gone]
        self.book.forget(gone)
        self.services.ledger.expel(gone)
        self.services.peers.admit(gone, Tier.STRANGER)
        known = self.reputations.get(gone)
        if known is not None and not known.banned:
            del self.reputations[gone]
            self.services.ledger.drop_reputation(gone)

    def sources(self, peer: bytes) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Return sealed records of live workers with weights, admitted before `peer` and after it.

        If newcomers outnumber proven workers, a proven worker is given proven ones only: fresh keys may serve
        nothing.
        """
        now = self.clock()
        if now - self._sources_at >= SOURCES_S:
            self._find_sources(now)
            self._sources_at = now
        sources, proven = self._sources, self._proven_sources
        if self.proven(peer) and len(sources.ranks) > 2 * len(proven.ranks):
            sources = proven
        before, after = sources.beside(self.workers[peer].rank)
        # The last to be admitted has nobody after it: it needs as many to choose from as the others.
        return (
            _near_and_far(before, peer, 2 * MAX_UPSTREAMS - min(len(after), MAX_UPSTREAMS)),
            _near_and_far(after, peer, 2 * MAX_UPSTREAMS - min(len(before), MAX_UPSTREAMS)),
        )

    def successors(self) -> tuple[bytes, ...]:
        """Return the sealed records of nodes that may lead the run after this one, where they are known."""
        services = self.services
        rows = [services.peers.get(node) for node in services.leaders.others(services.key.node_id)]
        return tuple(
            row.sealed for row in rows if row.record is not None and row.record.share_address
        )

    def _find_sources(self, now: float) -> None:
        """Find the workers that others can fetch from; only some of the newcomers."""
        proven: dict[int, bytes] = {}
        newcomers: dict[int, bytes] = {}
        for node, worker in self.workers.items():
            silent = now - worker.asked >= ALIVE_S or worker.paused
            if silent or worker.stats.version < 0 or self.refusal(node):
                continue
            row = self.services.peers.get(node)
            if row.record is not None and row.record.share_address:
                holders = proven if self._tier(node) == Tier.MEMBER else newcomers
                holders[worker.rank] = row.sealed
        some = random.sample(list(newcomers.items()), min(len(newcomers), MAX_NEWCOMER_SOURCES))
        self._proven_sources = ChunkHolders.of(proven)
        self._sources = ChunkHolders.of(proven | dict(some))


def _unplayed(environment: EnvironmentContract, *, quarantined: bool) -> str:
    """Return the warning that no worker plays an environment, with the remedy."""
    id = environment.id
    package = f" ({environment.package})" if environment.package else ""
    if quarantined:
        return (
            f"too much of the environment {environment.name!r}{package} was rejected, so workers are leased "
            "none of it for some hours, and the others have its part of the batches: `primerl-node explain` "
            "on one says why"
        )
    return (
        f"no worker can play the environment {environment.name!r}{package}, so the others have its part of the "
        f"batches: install it on a worker and start that with --allow-environment {id}"
    )


def _near_and_far(records: Sequence[bytes], peer: bytes, most: int) -> tuple[bytes, ...]:
    """Return the nearest ranks in order, then some of the others, always the same for one peer."""
    near, far = records[:NEAREST], records[NEAREST:]
    few = min(len(far), most - NEAREST)
    return (*near, *random.Random(peer).sample(far, few))


def check_clock(theirs: int, ours: int) -> None:
    """Refuse a node with a wrong clock, because leases and submissions expire by it.

    Both in Unix seconds; 0 for `theirs` means unknown. Raises RemoteProtocolError(WRONG_CLOCK).
    """
    if theirs and abs(theirs - ours) > CLOCK_SKEW_S:
        side = "ahead of" if theirs > ours else "behind"
        raise RemoteProtocolError(
            Reason.WRONG_CLOCK,
            f"your clock is {abs(theirs - ours)} s {side} the trainer's ({utc(ours)}): set the clock of "
            "your machine, or if it is right tell the trainer's operator",
        )
