"""Newcomers: nodes of which no work was accepted yet, and which of them is leased something next. Sans I/O.

A key costs nothing, so nothing here depends on how many there are:

- while proven nodes work, all newcomers together hold a pool of groups that is bounded, and that is no part of
  what proven nodes are leased from;
- a lease takes a slot of the pool for a part of its time, or until its node is proven, but is good for all of
  its time: keys that answer nothing, or nothing of worth, pass the slot on, and a slow node is not hurried;
- slots go round: over the tickets by which nodes were admitted, of one ticket over the networks that nodes dial
  from, of one network in the order of asking. No ticket holds more than it leaves free to others.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

POOL_SHARE = 0.5
"""Of a batch: groups in slots of newcomers while proven nodes work."""
MIN_POOL = 4
SLOT_SHARE = 0.25
"""Of a lease's time, how long it takes a slot."""
FORGET_S = 30.0
"""A newcomer that comes back within this time has kept its place."""
MAX_PLACES = 4096
"""Places of those that ask no more, and turns of tickets and networks, that are remembered."""
TICKET_MEMORY = 16
"""Leases that a ticket's reliability remembers, about."""
FAILING = 0.5
"""Reliability below which a ticket is named to the operator: ten leases in a row that did not come back."""


@dataclass(frozen=True)
class Origin:
    """Where a newcomer is from, as far as the trainer can tell."""

    ticket: bytes = b""
    """Name of the ticket by which it was admitted."""
    network: str = ""
    """Part of the address that it dials from; empty where that says nothing."""


@dataclass(frozen=True)
class Slot:
    """A lease of a newcomer that takes a part of the pool."""

    lease: int
    node: bytes
    origin: Origin
    groups: int
    until: float
    """Unix seconds."""


@dataclass
class TicketRecord:
    """How newcomers that came by one ticket honour their leases."""

    reliability: float = 1.0
    lost: int = 0
    """Leases that did not come back."""

    def count(self, came_back: bool) -> None:
        """Count one lease."""
        self.reliability += (float(came_back) - self.reliability) / TICKET_MEMORY
        self.lost += not came_back

    @property
    def failing(self) -> bool:
        """Whether most of the last leases did not come back."""
        return self.reliability < FAILING


@dataclass
class NewcomerQueue:
    """Newcomers that ask for a lease now, and whose turn it is."""

    tickets: dict[bytes, TicketRecord] = field(default_factory=dict[bytes, TicketRecord])
    _asking: dict[bytes, dict[bytes, tuple[Origin, float]]] = field(
        default_factory=dict[bytes, dict[bytes, tuple[Origin, float]]]
    )
    """By ticket, then by node: where it is from, and since when it waits."""
    _places: OrderedDict[bytes, tuple[float, float]] = field(
        default_factory=OrderedDict[bytes, tuple[float, float]]
    )
    """Of nodes that asked lately: since when they wait, and when they left."""
    _turns: OrderedDict[Origin, int] = field(default_factory=OrderedDict[Origin, int])
    """Number of the last lease by origin, and by ticket alone."""
    _slots: deque[Slot] = field(default_factory=deque[Slot])
    """In the order of their ends."""
    _served: int = 0

    def __len__(self) -> int:
        return sum(map(len, self._asking.values()))

    def enter(self, node: bytes, origin: Origin, now: float) -> None:
        """`node` asks; it keeps the place that it had a short while ago. `now` in Unix seconds."""
        since, left = self._places.pop(node, (now, now))
        kept = since if now - left <= FORGET_S else now
        self._asking.setdefault(origin.ticket, {})[node] = (origin, kept)

    def leave(self, node: bytes, origin: Origin, now: float) -> None:
        """`node` asks no more for now; it may come again. One that was served has left already."""
        since = self._pop(node, origin)
        if since is not None:
            self._places[node] = (since, now)
            _bound(self._places)

    def serve(self, slot: Slot) -> None:
        """A newcomer was granted a lease."""
        self._pop(slot.node, slot.origin)
        self._slots.append(slot)
        self._served += 1
        for turn in (slot.origin, Origin(slot.origin.ticket)):
            self._turns[turn] = self._served
            self._turns.move_to_end(turn)
        _bound(self._turns)

    def proved(self, node: bytes) -> None:
        """`node` is no newcomer any more: what it holds takes no slot."""
        self._slots = deque(slot for slot in self._slots if slot.node != node)

    def slots(self, now: float) -> Iterable[Slot]:
        """The slots that are taken."""
        while self._slots and self._slots[0].until <= now:
            self._slots.popleft()
        return self._slots

    def _pop(self, node: bytes, origin: Origin) -> float | None:
        """Take `node` out of those that ask; since when it has waited."""
        asking = self._asking.get(origin.ticket, {})
        found = asking.pop(node, None)
        if not asking:
            self._asking.pop(origin.ticket, None)
        return None if found is None else found[1]

    def next(
        self,
        free: int,
        taken: Iterable[Slot],
        may: Callable[[bytes], bool],
        *,
        alone: bool,
    ) -> bytes | None:
        """The node whose turn it is, if there is one and a slot for it.

        `free` groups fit into slots beside those that are `taken`. `alone`: there are no proven nodes, so
        that a ticket may take what there is. `may` says whether a node can be leased something at all.
        """
        by_ticket: Counter[bytes] = Counter()
        by_origin: Counter[Origin] = Counter()
        for slot in taken:
            by_ticket[slot.origin.ticket] += slot.groups
            by_origin[slot.origin] += slot.groups
        # A ticket may hold as much as it leaves free (dynamic thresholds: Choudhury and Hahne 1998).
        tickets = [one for one in self._asking if free >= 1 and (alone or by_ticket[one] < free)]
        tickets.sort(key=lambda one: (by_ticket[one], self._turns.get(Origin(one), 0)))
        for ticket in tickets:
            able = [
                (by_origin[origin], self._turns.get(origin, 0), since, node)
                for node, (origin, since) in self._asking[ticket].items()
                if may(node)
            ]
            if able:
                return min(able)[-1]
        return None

    def count(self, ticket: bytes, came_back: bool) -> None:
        """Count a newcomer's lease that came back or did not."""
        if ticket not in self.tickets and len(self.tickets) >= MAX_PLACES:
            del self.tickets[next(iter(self.tickets))]
        self.tickets.setdefault(ticket, TicketRecord()).count(came_back)


def _bound(remembered: OrderedDict[Any, Any]) -> None:
    while len(remembered) > MAX_PLACES:
        remembered.popitem(last=False)


def pool(groups_per_batch: int) -> int:
    """Groups that all newcomers together hold in slots while proven nodes work."""
    return max(MIN_POOL, int(POOL_SHARE * groups_per_batch))
