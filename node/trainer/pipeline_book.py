"""Who offers to be a stage, who can be relied on to be one, and who never is again. Time is an argument.

Nothing here is believed: an offer is a claim, and of two nodes that blame each other the one that failed more
often is let go.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.pipelines import StageOffer
from ..pipeline.planner import Offered

MAX_OFFERS = 256
POOL = 24
"""Offers that one plan is chosen from: those that wait the longest."""
ALIVE_S = 20.0
"""Who has offered nothing for so long is not there."""
SETTLE_S = 3.0
"""After the last newcomer, for others that start at the same time."""
MEASURE_S = 12.0
"""For all of them to measure the way to each other; then they are planned without."""
BENCH_S, MAX_BENCH_S = 30.0, 3600.0
"""Out of plans after a first failure; twice as long after each further one."""
MANY_RESTARTS = 3
FORGIVE_S = 3600.0
"""A failure is forgotten after so long."""

Kind = tuple[str, str, str]


@dataclass
class Offering:
    """A node that offers."""

    offer: StageOffer
    since: float
    """Monotonic seconds of its first offer in a row."""
    seen: float


@dataclass
class Failures:
    """Of one node, as a stage."""

    count: int = 0
    last: float = 0.0
    """Monotonic seconds."""
    benched_until: float = -1e18

    def add(self, now: float) -> None:
        """One more; old ones are forgotten."""
        self.count = 1 if now - self.last > FORGIVE_S else self.count + 1
        self.last = now

    def bench(self, now: float) -> None:
        """Out of plans for a while."""
        self.benched_until = now + min(BENCH_S * 2 ** (self.count - 1), MAX_BENCH_S)


class StageBook:
    """Offers and failures."""

    def __init__(self, refused: Callable[[bytes], str], started: float) -> None:
        """`refused`: why a node is given no work, or ""; until ALIVE_S after `started` everybody counts as
        alive, as a trainer that was away has heard nobody."""
        self._refused = refused
        self._grace_until = started + ALIVE_S
        self._offers: dict[bytes, Offering] = {}
        self._failures: dict[bytes, Failures] = {}
        self.excluded: dict[bytes, str] = {}
        """Nodes that are in no plan ever after, and why."""

    def refusal(self, node: bytes) -> str:
        """Why a node is put into no plan, or ""."""
        return self._refused(node) or self.excluded.get(node, "")

    def take(self, node: bytes, offer: StageOffer, now: float) -> None:
        """Keep what a node offers. Raises RemoteProtocolError (BUSY) where too many do."""
        known = self._offers.get(node)
        if known is None and len(self._offers) >= MAX_OFFERS:
            raise RemoteProtocolError(Reason.BUSY, "too many offer already")
        self._offers[node] = Offering(offer, known.since if known else now, now)

    def get(self, node: bytes) -> StageOffer | None:
        """What a node offers."""
        known = self._offers.get(node)
        return known.offer if known else None

    def drop(self, node: bytes) -> None:
        """It offers nothing any more."""
        self._offers.pop(node, None)

    def sweep(self, now: float) -> None:
        """Forget who is silent, and old failures."""
        for node, one in list(self._offers.items()):
            if now - one.seen > ALIVE_S:
                del self._offers[node]
        for node, failures in list(self._failures.items()):
            if now - failures.last > FORGIVE_S:
                del self._failures[node]

    def alive(self, node: bytes, now: float) -> bool:
        """Whether it was heard lately."""
        known = self._offers.get(node)
        if known is None:
            return now < self._grace_until
        return now - known.seen <= ALIVE_S

    def waiting(self, kind: Kind, now: float, taken: Callable[[bytes], bool]) -> list[Offered]:
        """Offers of this kind of nodes that are not `taken`, the oldest first; who failed lately has none."""
        found: list[Offered] = []
        for node, one in sorted(self._offers.items(), key=lambda item: item[1].since):
            offered = Offered(node, one.offer)
            failures = self._failures.get(node)
            benched = failures is not None and now < failures.benched_until
            if offered.kind != kind or benched or taken(node) or self.refusal(node):
                continue
            if self.alive(node, now):
                found.append(offered)
        return found[:POOL]

    def settled(self, pool: list[Offered], now: float) -> bool:
        """Whether nobody came lately, and all have measured the way to all others, or had time to.

        Where operators said who is which stage there is nothing to wait for.
        """
        if all(one.offer.rank >= 0 for one in pool):
            return True
        newest = max(self._offers[one.node].since for one in pool)
        if now - newest >= MEASURE_S:
            return True
        nodes = {one.node for one in pool}
        measured = all(nodes <= {one.node, *one.offer.round_trips} for one in pool)
        return measured and now - newest >= SETTLE_S

    def blame(self, by: bytes, node: bytes, now: float) -> bytes:
        """`by` says that `node` is lost: who of them is benched.

        Who talks to us is perhaps slandered, so that the complaint then counts against both.
        """
        mine = self._failures.setdefault(by, Failures())
        theirs = self._failures.setdefault(node, Failures())
        theirs.add(now)
        guilty = node
        if self.alive(node, now):
            mine.add(now)
            guilty = node if theirs.count >= mine.count else by
        self._failures[guilty].bench(now)
        return guilty

    def forgive(self, node: bytes) -> None:
        """Its failures so far count no more."""
        self._failures.pop(node, None)

    def fell_silent(self, node: bytes, now: float) -> None:
        """It is lost: others say so, and it does not say otherwise."""
        failures = self._failures.setdefault(node, Failures())
        failures.add(now)
        failures.bench(now)
        self.drop(node)

    def restarts(self, node: bytes, now: float) -> bool:
        """It was lost, and is there again: whether that was once too often."""
        failures = self._failures.setdefault(node, Failures())
        failures.add(now)
        if failures.count < MANY_RESTARTS:
            return False
        failures.bench(now)
        return True

    def weigh(self, accusers: Collection[bytes], head: bytes, now: float) -> set[bytes]:
        """`accusers` say that stage 0 is lost, which talks to us: who of them all is benched.

        A doubt is for stage 0, as it has work in its hands: one false word costs whoever says it.
        """
        theirs = self._failures.setdefault(head, Failures())
        for _ in accusers:
            theirs.add(now)
        sworn = {node: self._failures.setdefault(node, Failures()) for node in accusers}
        for mine in sworn.values():
            mine.add(now)
        guilty = {node for node, mine in sworn.items() if mine.count >= theirs.count} or {head}
        for node in guilty:
            self._failures[node].bench(now)
        return guilty
