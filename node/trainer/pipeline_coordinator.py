"""Collect nodes' offers of memory, and seal the plans that assign layers to nodes.

A plan that does not work costs its group some time and nothing else: a spare replaces a lost stage, or the
remaining stages get a new plan, or they wait. Stage 0 keeps its place if possible, as it holds work in
progress: a single report of another stage cannot take that away.
"""

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import structs

from ...crypto.hashing import short
from ...crypto.keys import SecretKey
from ...protocol.envelope import Purpose, seal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.messages import MAX_RECORDS, OfferStage, StagePlanned, StageWait
from ...protocol.pipelines import PipelinePlan, StageOffer
from ...protocol.recent import RecentDict
from ..errors import EngineError
from ..memory_plan.planner import Offered, fits, is_measured, make_plan, replace, ring_ms
from ..memory_plan.stages import CutModel
from ..ops.figures import GroupRow
from ..p2p.limits import TokenBuckets
from ..p2p.services import NodeServices
from ..storage.ledger import readable

MAX_OFFERS = 256
POOL = 24
"""Maximum number of offers that one plan is chosen from: those that have waited longest."""
ALIVE_S = 20.0
"""A node without an offer for this long counts as gone."""
SETTLE_S = 3.0
"""Delay after the last newcomer, for others that start at the same time."""
MEASURE_S = 12.0
"""Time for all candidates to measure the links between them; afterwards the plan is made without."""
BENCH_S, MAX_BENCH_S = 30.0, 3600.0
"""Exclusion from plans after a first failure; it doubles with each further one."""
MANY_RESTARTS = 3
FORGIVE_S = 3600.0
"""A failure is forgotten after this time."""

PoolKind = tuple[str, str, str]


@dataclass
class StageCandidate:
    """A node that offers to be a stage."""

    offer: StageOffer
    since: float
    """Monotonic seconds of its first offer in a row."""
    seen: float


@dataclass
class StageFailures:
    """Failures of one node as a stage."""

    count: int = 0
    last: float = 0.0
    """Monotonic seconds of the last failure."""
    benched_until: float = -1e18

    def add(self, now: float) -> None:
        """Count one more failure; old ones are forgotten."""
        self.count = 1 if now - self.last > FORGIVE_S else self.count + 1
        self.last = now

    def bench(self, now: float) -> None:
        """Exclude the node from plans for a while."""
        self.benched_until = now + min(BENCH_S * 2 ** (self.count - 1), MAX_BENCH_S)


class StageCandidates:
    """Offers and failures of nodes."""

    def __init__(self, refused: Callable[[bytes], str], started: float) -> None:
        """`refused` returns why a node is given no work, or "".

        Until ALIVE_S after `started` all nodes count as alive, since a restarted trainer has heard no node yet.
        """
        self._refused = refused
        self._grace_until = started + ALIVE_S
        self._offers: dict[bytes, StageCandidate] = {}
        self._failures: dict[bytes, StageFailures] = {}
        self.excluded: dict[bytes, str] = {}
        """Nodes that are permanently excluded from plans, with the reason."""

    def refusal(self, node: bytes) -> str:
        """Return the reason why a node is excluded from plans, or ""."""
        return self._refused(node) or self.excluded.get(node, "")

    def take(self, node: bytes, offer: StageOffer, now: float) -> None:
        """Store a node's offer. Raises RemoteProtocolError (BUSY) if there are too many."""
        known = self._offers.get(node)
        if known is None and len(self._offers) >= MAX_OFFERS:
            raise RemoteProtocolError(Reason.BUSY, "too many offers already")
        self._offers[node] = StageCandidate(offer, known.since if known else now, now)

    def get(self, node: bytes) -> StageOffer | None:
        """Return a node's offer."""
        known = self._offers.get(node)
        return known.offer if known else None

    def drop(self, node: bytes) -> None:
        """Forget a node's offer."""
        self._offers.pop(node, None)

    def sweep(self, now: float) -> None:
        """Forget silent nodes and old failures."""
        for node, entry in list(self._offers.items()):
            if now - entry.seen > ALIVE_S:
                del self._offers[node]
        for node, failures in list(self._failures.items()):
            if now - failures.last > FORGIVE_S:
                del self._failures[node]

    def alive(self, node: bytes, now: float) -> bool:
        """Return whether the node was heard recently."""
        known = self._offers.get(node)
        if known is None:
            return now < self._grace_until
        return now - known.seen <= ALIVE_S

    def waiting(self, kind: PoolKind, now: float, taken: Callable[[bytes], bool]) -> list[Offered]:
        """Return the offers of this kind, oldest first, of nodes that are not `taken`.

        Nodes that failed recently are left out.
        """
        offers: list[Offered] = []
        for node, entry in sorted(self._offers.items(), key=lambda item: item[1].since):
            offered = Offered(node, entry.offer)
            failures = self._failures.get(node)
            benched = failures is not None and now < failures.benched_until
            if offered.kind != kind or benched or taken(node) or self.refusal(node):
                continue
            if self.alive(node, now):
                offers.append(offered)
        return offers[:POOL]

    def settled(self, pool: list[Offered], now: float) -> bool:
        """Return whether there is no recent newcomer and all links are measured, or had time to be.

        If operators fixed the order of the stages there is nothing to wait for.
        """
        if all(offered.offer.rank >= 0 for offered in pool):
            return True
        newest = max(self._offers[offered.node].since for offered in pool)
        if now - newest >= MEASURE_S:
            return True
        nodes = {offered.node for offered in pool}
        measured = all(nodes <= {offered.node, *offered.offer.round_trips} for offered in pool)
        return measured and now - newest >= SETTLE_S

    def blame(self, by: bytes, node: bytes, now: float) -> bytes:
        """Bench a node after `by` reported `node` lost; return the benched one.

        If the trainer still hears `node`, the report may be false, so it counts against both.
        """
        mine = self._failures.setdefault(by, StageFailures())
        theirs = self._failures.setdefault(node, StageFailures())
        theirs.add(now)
        guilty = node
        if self.alive(node, now):
            mine.add(now)
            guilty = node if theirs.count >= mine.count else by
        self._failures[guilty].bench(now)
        return guilty

    def forgive(self, node: bytes) -> None:
        """Forget a node's failures."""
        self._failures.pop(node, None)

    def fell_silent(self, node: bytes, now: float) -> None:
        """Bench and drop a node that others report lost and that stays silent."""
        failures = self._failures.setdefault(node, StageFailures())
        failures.add(now)
        failures.bench(now)
        self.drop(node)

    def restarts(self, node: bytes, now: float) -> bool:
        """Count the return of a lost node; return whether it returned too often."""
        failures = self._failures.setdefault(node, StageFailures())
        failures.add(now)
        if failures.count < MANY_RESTARTS:
            return False
        failures.bench(now)
        return True

    def weigh(self, accusers: Collection[bytes], head: bytes, now: float) -> set[bytes]:
        """Bench nodes after `accusers` reported a still active stage 0 lost; return them.

        In doubt stage 0 stays, as it holds work in progress: a false accusation costs only its author.
        """
        theirs = self._failures.setdefault(head, StageFailures())
        for _ in accusers:
            theirs.add(now)
        sworn = {node: self._failures.setdefault(node, StageFailures()) for node in accusers}
        for mine in sworn.values():
            mine.add(now)
        guilty = {node for node, mine in sworn.items() if mine.count >= theirs.count} or {head}
        for node in guilty:
            self._failures[node].bench(now)
        return guilty


LEDGER = "pipelines"
PLAN_TTL_S = 7 * 86400
"""Lifetime of a sealed plan, which is sealed anew at half of it. Nodes need not learn of that in time: links
also open by the old seal, and only a newer generation ends a plan."""
NEVER = -1e18


class SavedPipeline(msgspec.Struct, frozen=True):
    """The part of a pipeline that survives a restart of the trainer."""

    plans: tuple[PipelinePlan, ...]
    excluded: dict[bytes, str]


@dataclass
class PipelineGroup:
    """One pipeline."""

    plan: PipelinePlan
    """The newest plan."""
    heard: float
    """Monotonic seconds of the last message of any stage."""
    missing: set[bytes] = field(default_factory=set[bytes])
    """Lost stages without a replacement; the others keep their places and wait."""
    missing_since: float = 0.0
    doubts: dict[bytes, float] = field(default_factory=dict[bytes, float])
    """Stages that report stage 0 lost, with the monotonic seconds of their first report."""
    void: bool = False
    """Whether the plan no longer holds: its nodes are free for another one."""
    sealed: bytes = b""
    sealed_at: float = NEVER
    """Unix seconds."""

    @property
    def head(self) -> bytes:
        """Stage 0, which holds work in progress."""
        return self.plan.stages[0].node

    @property
    def nodes(self) -> list[bytes]:
        """Nodes of the stages, in order."""
        return [stage.node for stage in self.plan.stages]

    def use(self, plan: PipelinePlan, now: float) -> None:
        """Put a new plan into force."""
        self.plan, self.heard, self.sealed_at = plan, now, NEVER
        self.missing, self.doubts, self.void = set(), {}, False

    def seal(self, key: SecretKey, run_id: bytes, now: float) -> bytes:
        """Return the sealed plan; `now` in Unix seconds."""
        if now - self.sealed_at > PLAN_TTL_S / 2:
            expires, sequence = int(now) + PLAN_TTL_S, self.plan.generation
            self.sealed = seal(
                key, Purpose.PIPELINE, run_id, self.plan, expires=expires, sequence=sequence
            )
            self.sealed_at = now
        return self.sealed

    def row(self, offer_of: Callable[[bytes], StageOffer | None]) -> GroupRow:
        """Return the row of `status`."""
        plan = self.plan
        offers = ((node, offer_of(node)) for node in self.nodes)
        order = [Offered(node, offer) for node, offer in offers if offer is not None]
        known = len(order) == len(plan.stages) and is_measured(order)
        return GroupRow(
            group=short(plan.group),
            generation=plan.generation,
            stages=[short(node) for node in self.nodes],
            layers=[f"{stage.first}-{stage.end - 1}" for stage in plan.stages],
            spares=len(plan.spares),
            round_trip_ms=round(ring_ms(order, 0), 1) if known else None,
            kv_tokens=plan.shape.kv_tokens,
            state="waiting" if self.void or self.missing else "planned",
        )


logger = logging.getLogger(__name__)

PEER_RATE, PEER_BURST, PEERS = 2.0, 10, 1024
"""Rate limit of offers per second of one node."""
MAKE_RATE, MAKE_BURST = 1.0, 10
"""Rate limit of planning attempts per second over all nodes: a hard one takes up to a second."""
GONE_S = 120.0
"""A group is forgotten after this long without a message of any stage."""
WAIT_S = 120.0
"""Time that a group keeps the places of lost stages without a replacement."""
HEAD_S = 10.0
"""Time for a stage 0 that others report lost to send anything: three of its offers."""
WAIT_MS, PLANNED_MS = 1000, 3000
KEPT_POOLS = 64


class PipelineCoordinator:
    """Answers OfferStage requests."""

    def __init__(
        self,
        *,
        services: NodeServices,
        model: CutModel | None,
        heard: Callable[[bytes], float],
        refused: Callable[[bytes], str] = lambda node: "",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`model` is None if the run's model cannot be cut.

        `refused` returns why a node is given no work, or "". `heard` returns the time of a node's last request,
        by `clock`; the trainer's start for a node that sent none yet.
        """
        self._services = services
        self._model = model
        self._ledger, self._peers = services.ledger, services.peers
        self._clock = clock
        self._wall = wall
        self._heard = heard
        self._book = StageCandidates(refused, clock())
        self._groups: dict[bytes, PipelineGroup] = {}
        self._hopeless = RecentDict[object, None](KEPT_POOLS)
        """Pools for which no plan exists: not tried again."""
        self._buckets = TokenBuckets(PEER_RATE, PEER_BURST, PEERS)
        self._makes = TokenBuckets(MAKE_RATE, MAKE_BURST, 1)
        self._expected: Callable[[], None] = lambda: None
        self._led: set[bytes] = set()
        """Stages 0 of present or past plans: they may have leases."""
        self._load()

    def expect(self, call: Callable[[], None]) -> None:
        """Call `call` as soon as there is a plan, and with each new one."""
        self._expected = call
        if self._groups:
            call()

    # -- requests ----------------------------------------------------------------------------------

    def offered(self, peer: bytes, request: OfferStage) -> StageWait | StagePlanned:
        """Take an offer, or a complaint; return the newest plan of `peer`, if there is one.

        Raises:
            RemoteProtocolError: RATE_LIMITED, BANNED; NOT_FOUND if this model is not cut, NOT_ADMITTED for a
                node whose address may not be shared, NOT_YET for a node without a known record, BUSY if there
                are too many offers.
        """
        now = self._clock()
        if not self._buckets.take(peer, now):
            raise RemoteProtocolError(Reason.RATE_LIMITED, "too many offers")
        self._check(peer, request.offer)
        self._sweep(now)
        self._book.take(peer, request.offer, now)
        group = self._group_of(peer)
        if group is not None:
            group.heard = now
            self._look_after(peer, group, request, now)
            self._hear_head(group, now)
            self._wait_for_missing(peer, group, now)
        kind = Offered(peer, request.offer).kind
        if self._group_of(peer) is None:
            self._form(kind, now)
        group = self._group_of(peer)
        return self._wait(peer, kind, now) if group is None else self._planned(peer, group)

    def left(self, node: bytes) -> None:
        """Record a goodbye."""
        self._book.drop(node)
        self._without({node}, "left")

    def began(self, node: bytes) -> None:
        """Record that a node started, maybe again: its work is gone, and it is not lost."""
        self._led.discard(node)
        for group in list(self._groups.values()):
            if group.head == node and group.doubts:
                group.doubts = {}
                if self._book.restarts(node, self._clock()):
                    self._without({node}, "stage 0 starts again and again")

    def worked(self, node: bytes) -> None:
        """Record accepted work of a node; if it is stage 0 of a pipeline, forgive its failures.

        The accepted work proves that its earlier reports were right.
        """
        if self.leads(node):
            self._book.forgive(node)

    def leads(self, node: bytes) -> bool:
        """Return whether the node is stage 0 of a valid plan.

        Other nodes that offer to be stages cannot work on leases.
        """
        return any(group.head == node and not group.void for group in self._groups.values())

    def makers(self, node: bytes) -> list[bytes]:
        """List the nodes that work on leases of `node`: itself, and the later stages of its pipeline."""
        for group in self._groups.values():
            if group.head == node and not group.void:
                return group.nodes
        return [node]

    def orphans(self) -> list[bytes]:
        """Return the silent stages 0 whose plan ended, each once: their work goes to others."""
        now = self._clock()
        self._sweep(now)
        leading = {group.head for group in self._groups.values() if not group.void}
        self._led |= leading
        gone = {node for node in self._led - leading if now - self._heard(node) > ALIVE_S}
        self._led -= gone
        return sorted(gone)

    def dissolve(self, group: bytes, node: bytes, reason: str) -> None:
        """Exclude `node`, which lied as a stage of `group`, permanently; the others get a new plan."""
        logger.warning("pipeline %s: %s is excluded: %s", short(group), short(node), reason)
        self._book.excluded[node] = reason[:200]
        self.left(node)
        self._keep()

    def rows(self) -> list[GroupRow]:
        """Return the rows of `status`."""
        return [group.row(self._book.get) for group in self._groups.values()]

    def place(self, node: bytes) -> str:
        """Return a node's stage, for `peers`: "1/2, layers 14-27", or empty."""
        group = self._group_of(node)
        rank = group.plan.rank_of(node) if group else None
        if group is None or rank is None:
            return ""
        stage = group.plan.stages[rank]
        return f"{rank}/{len(group.plan.stages)}, layers {stage.first}-{stage.end - 1}"

    def _check(self, peer: bytes, offer: StageOffer) -> None:
        why = self._book.refusal(peer)
        if why:
            self.left(peer)
            raise RemoteProtocolError(Reason.BANNED, why)
        if self._model is None:
            raise RemoteProtocolError(Reason.NOT_FOUND, "this run's model is not cut into stages")
        try:
            self._model.costs(offer.engine)
        except EngineError as error:
            raise RemoteProtocolError(Reason.NOT_FOUND, str(error)) from error
        record = self._peers.get(peer).record
        if record is None:  # the trainer restarted since the node's hello
            raise RemoteProtocolError(Reason.NOT_YET, "tell your peer record first")
        if not record.share_address:
            detail = "stages must know each other's addresses: set network.share_address"
            raise RemoteProtocolError(Reason.NOT_ADMITTED, detail)

    def _sweep(self, now: float) -> None:
        """Forget silent nodes."""
        self._book.sweep(now)
        for name, group in list(self._groups.items()):
            if now - group.heard > GONE_S:
                del self._groups[name]
                self._keep()

    # -- making plans ------------------------------------------------------------------------------

    def _form(self, kind: PoolKind, now: float) -> None:
        """Make a plan from the waiting nodes, first for broken groups."""
        pool = self._book.waiting(kind, now, self._taken)
        nodes = {offered.node for offered in pool}
        for group in list(self._groups.values()):
            if group.missing and nodes:
                self._mend(group, group.missing)
            elif group.void and group.head in nodes:
                group.heard = now
                self._again(group, pool)
        pool = [offered for offered in pool if not self._taken(offered.node)]
        if len(pool) < 2 or not self._book.settled(pool, now):
            return
        plan = self._make(pool, secrets.token_bytes(32), 0)
        if plan is None:
            return
        for name, old in list(self._groups.items()):
            if old.void and plan.rank_of(old.head) is not None:
                del self._groups[name]  # its stage 0 is in another plan now: drop the old group
        group = self._groups[plan.group] = PipelineGroup(plan, now)
        self._use(group, plan, "made")

    def _again(self, group: PipelineGroup, pool: Sequence[Offered]) -> bool:
        """Make a new plan for a broken group, with its old stage 0; return whether there is one."""
        old = group.plan
        plan = self._make(pool, old.group, old.generation + 1, head=group.head)
        if plan is not None:
            self._use(group, plan, "made again")
        return plan is not None

    def _make(
        self, pool: Sequence[Offered], group: bytes, generation: int, head: bytes | None = None
    ) -> PipelinePlan | None:
        """Call make_plan(), but never again for offers that yielded no plan."""
        assert self._model is not None
        offers = (
            (
                offered.kind,
                offered.node,
                offered.offer.memory_bytes,
                offered.offer.rank,
                offered.offer.world_size,
            )
            for offered in pool
        )
        tried = frozenset(offers), head
        if tried in self._hopeless or not self._makes.take(b"", self._clock()):
            return None
        costs = self._model.costs(pool[0].offer.engine)
        terms = self._model.terms
        plan = make_plan(pool, costs, terms, group=group, generation=generation, head=head)
        if plan is None:
            self._hopeless[tried] = None
        return plan

    def _taken(self, node: bytes) -> bool:
        return self._group_of(node) is not None

    def _group_of(self, node: bytes) -> PipelineGroup | None:
        """Return the working group that a node is in."""
        groups = self._groups.values()
        return next((g for g in groups if not g.void and g.plan.rank_of(node) is not None), None)

    # -- mending plans -----------------------------------------------------------------------------

    def _look_after(
        self, peer: bytes, group: PipelineGroup, request: OfferStage, now: float
    ) -> None:
        """Check that `peer` can still hold its stage, and process its reports on others."""
        plan = group.plan
        if not self._can_be(plan, peer, now):
            self._without({peer}, "offers too little for its stage by now")
            return
        if (request.group, request.generation) != (plan.group, plan.generation):
            return  # the request refers to an older plan
        accused = set(group.nodes) & set(request.lost) - {peer} - group.missing
        if group.head in accused:
            accused.discard(group.head)
            group.doubts.setdefault(peer, now)
        if accused:
            gone = {self._book.blame(peer, node, now) for node in sorted(accused)}
            why = (
                "reports nodes lost that are still heard"
                if peer in gone
                else f"lost, says {short(peer)}"
            )
            self._without(gone, why)

    def _hear_head(self, group: PipelineGroup, now: float) -> None:
        """Decide whether a stage 0 that others report lost is lost.

        If it was heard after those reports, its evidence counts like theirs.
        """
        head, doubts = group.head, group.doubts
        if not doubts or group.void:
            return
        heard = self._heard(head)
        if heard > min(doubts.values()):
            gone = self._book.weigh(set(doubts), head, now)
        elif now - heard >= HEAD_S:
            gone = {head}
            self._book.fell_silent(head, now)
        else:
            return
        group.doubts = {}
        names = ", ".join(short(node) for node in doubts)
        self._without(gone, f"stage 0 is lost, say {names}")

    def _wait_for_missing(self, peer: bytes, group: PipelineGroup, now: float) -> None:
        """Restore a lost stage that returned to its place; the others wait for a limited time."""
        if peer in group.missing and self._can_be(group.plan, peer, now):
            group.missing.discard(peer)
        if group.missing and now - group.missing_since > WAIT_S:
            group.void, group.missing = True, set()

    def _without(self, gone: set[bytes], why: str) -> None:
        """Mend every group that contains one of these nodes."""
        for group in list(self._groups.values()):
            lost = [node for node in group.nodes if node in gone]
            if lost and not group.void:
                names = ", ".join(map(short, lost))
                logger.warning("pipeline %s: %s: %s", short(group.plan.group), names, why)
                self._mend(group, gone)

    def _mend(self, group: PipelineGroup, gone: set[bytes]) -> None:
        """Mend a group that lost stages.

        The options, in order: replace them by spares, plan anew with the remaining nodes, keep the plan, wait.
        """
        now, old = self._clock(), group.plan
        assert self._model is not None
        known, group.void = group.missing, True
        gone = {node for node in group.nodes if node in gone or not self._book.alive(node, now)}
        pool = self._helpers(old, gone, now)
        spares = [offered for offered in pool if old.rank_of(offered.node) is None]
        plan = replace(old, gone, spares, self._model.costs(old.shape.engine))
        if plan is not None:
            self._use(group, plan, "mended")
        elif group.head in {offered.node for offered in pool} and self._again(group, pool):
            return
        elif all(self._can_be(old, node, now) for node in group.nodes):
            plan = structs.replace(old, generation=old.generation + 1)
            self._use(group, plan, "tried again")
        elif group.head not in gone and not any(map(self._book.refusal, group.nodes)):
            group.void, group.missing = False, gone
            if not known:
                group.missing_since = now
                logger.warning("pipeline %s waits for another node", short(old.group))

    def _can_be(self, plan: PipelinePlan, node: bytes, now: float) -> bool:
        """Return whether a stage of `plan` is alive and still offers enough for it."""
        offer, rank = self._book.get(node), plan.rank_of(node)
        if offer is None or rank is None or self._book.refusal(node):
            return False
        assert self._model is not None
        costs = self._model.costs(plan.shape.engine)
        return self._book.alive(node, now) and fits(plan, rank, offer, costs)

    def _helpers(self, old: PipelinePlan, gone: set[bytes], now: float) -> list[Offered]:
        """Return candidates for the next generation: spares in order, then other waiting nodes.

        The group's remaining stages are among them.
        """
        offers = (self._book.get(stage.node) for stage in old.stages)
        name = next((offer.name for offer in offers if offer is not None), "")
        kind = old.shape.engine, old.shape.software, name
        order = {node: place for place, node in enumerate(old.spares)}
        pool = self._book.waiting(kind, now, self._taken)
        left = [offered for offered in pool if offered.node not in gone]
        return sorted(left, key=lambda offered: order.get(offered.node, len(order)))

    # -- answers -----------------------------------------------------------------------------------

    def _wait(self, peer: bytes, kind: PoolKind, now: float) -> StageWait:
        """Return the reply without a plan: other waiting nodes, to which `peer` measures its links."""
        pool = self._book.waiting(kind, now, self._taken)
        return StageWait(
            WAIT_MS, self._records(offered.node for offered in pool if offered.node != peer)
        )

    def _planned(self, peer: bytes, group: PipelineGroup) -> StagePlanned:
        sealed = group.seal(self._services.key, self._services.run_id, self._wall())
        return StagePlanned(sealed, self._records(n for n in group.nodes if n != peer), PLANNED_MS)

    def _records(self, nodes: Iterable[bytes]) -> tuple[bytes, ...]:
        records = (self._peers.get(node).sealed for node in nodes)
        return tuple(sealed for sealed in records if sealed)[:MAX_RECORDS]

    # -- the ledger -------------------------------------------------------------------------------

    def _use(self, group: PipelineGroup, plan: PipelinePlan, what: str) -> None:
        """Put a new plan into force and store it."""
        group.use(plan, self._clock())
        self._keep()
        self._expected()
        layers = ", ".join(
            f"{short(stage.node)} {stage.first}-{stage.end - 1}" for stage in plan.stages
        )
        name, generation = short(plan.group), plan.generation
        logger.info("pipeline %s, generation %d, %s: layers %s", name, generation, what, layers)

    def _keep(self) -> None:
        plans = tuple(group.plan for group in self._groups.values())
        self._ledger.set(LEDGER, msgspec.msgpack.encode(SavedPipeline(plans, self._book.excluded)))

    def _load(self) -> None:
        """Load the plans sealed before a restart; stages that are gone will be reported by others."""
        stored = self._ledger.get(LEDGER)
        if stored is None:
            return
        with readable(self._ledger.path, "pipelines"):
            saved = msgspec.msgpack.decode(stored, type=SavedPipeline)
        self._book.excluded.update(saved.excluded)
        for plan in saved.plans:
            self._groups[plan.group] = PipelineGroup(plan, self._clock())
