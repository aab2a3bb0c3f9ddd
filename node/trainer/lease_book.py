"""Lease tasks to nodes: which, how many, until when. No I/O; time is an argument.

The book is the back-pressure: proven nodes hold as many groups as keep workers and trainer busy (LeadTime), and
no more than can be trained within the staleness bound, so a lease that is honoured in time is not stale when it
comes back. Newcomers have a bounded pool of their own and take nothing from proven nodes: keys that never
answer cannot starve them.
"""

import itertools
import math
from collections import Counter, UserDict, deque
from collections.abc import (
    Callable,
    Collection,
    Container,
    ItemsView,
    Iterable,
    KeysView,
    Mapping,
    Sequence,
    Set,
    ValuesView,
)
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease, TaskRef
from ...protocol.manifests import MAX_ENVIRONMENTS
from ...protocol.recent import RecentDict

MEMORY = 16
"""Leases that a node's reliability remembers, about."""
HANDFULS = 8
"""Reliability remembers at least this many times the leases that a node may hold, so that the cost of a restart
does not depend on their number."""
STEADY = 0.75
"""Reliability from which on one kept lease ends the doubling of a node's rests."""
LOST_SHARE = 0.5
"""Share of a lease that is lost, from which on the lease counts as one that did not come back."""
FREE_RETURN_STEP = 1 / 16
"""Part of a free hand-back that a kept lease earns."""
MAX_FREE_RETURNS = 2.0
"""Most hand-backs that a node has free: its restarts."""
USUAL_OVER = 4
"""Batches whose groups' turnarounds are remembered."""
LATE = 2.0
"""Times the usual time after which its lease does not count as coming any more."""
LATE_LEAST_S = 0.5
FAIR_PART = 0.25
"""Part of its ratio at which nodes have to play an environment, so that the others wait for it."""
MAX_TRIES = 3
"""Most times that a task is leased whose group was lost through its workers: it may be the task's fault."""
MAX_FAILED_TASKS = 4096
"""Lost tasks whose tries are remembered."""
COOLING_SHARE = 0.25
MAX_FIRST_COOLING_S = 15.0
"""The first cooling-off: a quarter of a lease's time, at most this."""
MAX_DOUBLINGS = 5
PACE_STEP = 0.25
RESERVE = 1.0
"""Batches in reserve: with half a batch a trainer that is the limit waited for a tenth of its time."""
MIN_ADMITTED = 0.5
"""However few groups are admitted, less than twice those that could be trained in time are on lease: should all
be admitted, some become too old."""
HORIZON = 0.5
"""Share of a lease's time: a node holds at most the groups that it settles in it, at its pace."""
FRESH = 1.5
"""Times the versions that staleness admits: nor does it hold more than it settles while so many are trained."""
EARNED = 2
"""Groups that a proven node may hold for each group of it that was accepted, less those that it lost."""
STAFFED_S = 15.0
"""Proven nodes count as present for this long after one of them asked for work; a live one asks every five."""

POOL_SHARE = 0.5
"""Share of a batch's groups that newcomers hold while proven nodes work."""
MIN_POOL = 4
SLOT_SHARE = 0.25
"""Share of a lease's time for which it takes a slot."""
FORGET_S = 30.0
"""A newcomer that comes back within this time has kept its place."""
MAX_PLACES = 4096
"""Most places of nodes that left, and most turns of tickets and networks, to remember."""
TICKET_MEMORY = 16
"""Leases that a ticket's reliability remembers, about."""
FAILING = 0.5
"""Reliability below which a ticket is named to the operator: ten leases in a row that brought nothing."""


# -- newcomers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """Origin of a newcomer, as far as the trainer can tell."""

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
    """The record of the newcomers of one ticket: how they honour their leases."""

    reliability: float = 1.0
    lost: int = 0
    """Leases that did not come back, or of which nothing was accepted."""

    def count(self, kept: bool) -> None:
        """Count one lease."""
        self.reliability += (float(kept) - self.reliability) / TICKET_MEMORY
        self.lost += not kept

    @property
    def failing(self) -> bool:
        """Whether most of the last leases brought nothing."""
        return self.reliability < FAILING


@dataclass
class NewcomerQueue:
    """Orders the newcomers that ask for a lease by turns over tickets and networks."""

    tickets: dict[bytes, TicketRecord] = field(default_factory=dict[bytes, TicketRecord])
    _asking: dict[bytes, dict[bytes, tuple[Origin, float]]] = field(
        default_factory=dict[bytes, dict[bytes, tuple[Origin, float]]]
    )
    """By ticket, then by node: its origin, and the time since which it waits."""
    _places: RecentDict[bytes, tuple[float, float]] = field(
        default_factory=lambda: RecentDict(MAX_PLACES)
    )
    """Nodes that asked lately: since when they wait, and when they left."""
    _turns: RecentDict[Origin, int] = field(default_factory=lambda: RecentDict(MAX_PLACES))
    """Number of the last lease by origin, and by ticket alone."""
    _slots: deque[Slot] = field(default_factory=deque[Slot])
    """Slots in the order of their ends."""
    _served: int = 0

    def __len__(self) -> int:
        return sum(map(len, self._asking.values()))

    def enter(self, node: bytes, origin: Origin, now: float) -> None:
        """Add a node that asks; it keeps the place that it had a short while ago. `now` in Unix seconds."""
        since, left = self._places.pop(node, (now, now))
        waits_since = since if now - left <= FORGET_S else now
        self._asking.setdefault(origin.ticket, {})[node] = (origin, waits_since)

    def free(self, lease: int) -> None:
        """Pass on the slot of a lease that brought nothing: its answer need not be waited out."""
        self._slots = deque(slot for slot in self._slots if slot.lease != lease)

    def leave(self, node: bytes, origin: Origin, now: float) -> None:
        """Remove a node that stopped asking; it may come again. One that was served has left already."""
        since = self._pop(node, origin)
        if since is not None:
            self._places[node] = (since, now)

    def serve(self, slot: Slot) -> None:
        """Take note of a lease that was granted to a newcomer."""
        self._pop(slot.node, slot.origin)
        self._slots.append(slot)
        self._served += 1
        for turn in (slot.origin, Origin(slot.origin.ticket)):
            self._turns[turn] = self._served

    def proved(self, node: bytes) -> None:
        """Free the slots of a node that is no newcomer any more."""
        self._slots = deque(slot for slot in self._slots if slot.node != node)

    def slots(self, now: float) -> Iterable[Slot]:
        """List the slots that are taken."""
        while self._slots and self._slots[0].until <= now:
            self._slots.popleft()
        return self._slots

    def _pop(self, node: bytes, origin: Origin) -> float | None:
        """Take `node` out of those that ask; return since when it has waited."""
        asking = self._asking.get(origin.ticket, {})
        entry = asking.pop(node, None)
        if not asking:
            self._asking.pop(origin.ticket, None)
        return None if entry is None else entry[1]

    def next(
        self,
        free: int,
        taken: Iterable[Slot],
        may: Callable[[bytes], bool],
        *,
        alone: bool,
    ) -> bytes | None:
        """Find the node whose turn it is, if there is one and a slot for it.

        `free` groups fit into slots beside those that are `taken`. `alone`: there are no proven nodes, so
        that a ticket may take what there is. `may` says whether a node can be leased something at all.
        """
        by_ticket: Counter[bytes] = Counter()
        by_origin: Counter[Origin] = Counter()
        for slot in taken:
            by_ticket[slot.origin.ticket] += slot.groups
            by_origin[slot.origin] += slot.groups
        # A ticket may hold as much as it leaves free (dynamic thresholds: Choudhury and Hahne 1998).
        tickets = [
            ticket for ticket in self._asking if free >= 1 and (alone or by_ticket[ticket] < free)
        ]
        tickets.sort(key=lambda ticket: (by_ticket[ticket], self._turns.get(Origin(ticket), 0)))
        for ticket in tickets:
            asking = sorted(
                (by_origin[origin], self._turns.get(origin, 0), since, node)
                for node, (origin, since) in self._asking[ticket].items()
            )
            for *_, node in asking:
                if may(node):  # which takes longer than to sort: hundreds may ask
                    return node
        return None

    def count(self, ticket: bytes, kept: bool) -> None:
        """Count a newcomer's lease: `kept` if work of it was accepted."""
        if ticket not in self.tickets and len(self.tickets) >= MAX_PLACES:
            del self.tickets[next(iter(self.tickets))]
        self.tickets.setdefault(ticket, TicketRecord()).count(kept)


def pool(groups_per_batch: int) -> int:
    """Compute the groups that all newcomers together may hold while proven nodes work."""
    return max(MIN_POOL, int(POOL_SHARE * groups_per_batch))


# -- the book ---------------------------------------------------------------------------------------


@dataclass
class Held:
    """A lease that is out."""

    lease: Lease
    node: bytes
    granted: float
    newcomer: Origin | None = None
    """Origin of the node, if no work of it had been accepted when this was granted."""
    charges: Mapping[int, float] = field(default_factory=dict[int, float])
    """The change of each environment's balance by this lease; undone if the lease does not come back."""


class LeaseTable(UserDict[int, Held]):
    """Leases by number, and by node: what is done for one node does not take longer the more leases are out."""

    def __init__(self) -> None:
        self._by_node: dict[bytes, dict[int, Held]] = {}
        super().__init__()

    def __setitem__(self, number: int, grant: Held) -> None:
        self.data[number] = grant
        self._by_node.setdefault(grant.node, {})[number] = grant

    def __delitem__(self, number: int) -> None:
        node = self.data.pop(number).node
        of_node = self._by_node[node]
        del of_node[number]
        if not of_node:
            del self._by_node[node]

    def values(self) -> ValuesView[Held]:
        """Return the leases in the order in which they were granted."""
        return self.data.values()

    def items(self) -> ItemsView[int, Held]:
        """Return the leases with their numbers, in that order."""
        return self.data.items()

    def of(self, node: bytes) -> Mapping[int, Held]:
        """Return the leases of a node by number."""
        return self._by_node.get(node, {})

    @property
    def nodes(self) -> KeysView[bytes]:
        """The nodes that have leases."""
        return self._by_node.keys()


@dataclass(frozen=True)
class MixtureShare:
    """The part that an environment has in a run."""

    group_size: int
    """Rollouts per task."""
    ratio: float = 1.0
    """Weight: its share of the leased groups is this over the sum of all ratios."""


@dataclass(frozen=True)
class LeasePolicy:
    """Limits of leases. Sizes are in groups."""

    environments: tuple[MixtureShare, ...]
    groups_per_batch: int
    groups_per_lease: int
    max_off_policy_steps: int
    leases_per_worker: int
    timeout_s: float
    max_bytes: int

    @property
    def largest_group(self) -> int:
        """Rollouts per task, where an environment has most."""
        return max(environment.group_size for environment in self.environments)

    @property
    def step(self) -> float:
        """Weight of one lease in a node's reliability."""
        return 1.0 / max(MEMORY, HANDFULS * self.leases_per_worker)


@dataclass(frozen=True)
class Standing:
    """Leases of one environment that a node's work there allows it to hold."""

    trust: float
    """Trust.low, 0 to 1."""
    earned: float
    """Its accepted groups."""


@dataclass(frozen=True)
class LeaseShare:
    """The inputs of a node's share of the work, besides its record in the book."""

    trust: float = 1.0
    """Limits what it holds of all environments together."""
    waiting: Set[bytes] = frozenset()
    """Proven nodes that wait for a lease now."""
    earned: float = math.inf
    """Its accepted groups of all environments: limits what it holds of them together."""
    standings: Mapping[int, Standing] = field(default_factory=dict[int, Standing])
    """Limits what it holds of each environment."""
    newcomer: Origin | None = None
    """Origin of a node without accepted work: it holds one lease at a time."""
    playable: Collection[int] = range(MAX_ENVIRONMENTS)
    """Environments that it can play, and whose next tasks are known."""
    staffed: Collection[int] = range(MAX_ENVIRONMENTS)
    """Environments that some node can play."""


@dataclass(frozen=True)
class LeaseOutcome:
    """Judgement of a worker by the verdict on its lease."""

    groups: int
    accepted: int = 0
    """Accepted rollouts."""
    lost: float = 0.0
    """Groups' worth of rollouts that were lost through the worker, beyond what is usual in the run."""
    blameless: bool = False
    """Nothing was accepted, and the worker had no part in that: the lease counts neither way."""


@dataclass
class NodeRecord:
    """The record of a node: how it honours its leases. A lease is kept if its verdict says so."""

    reliability: float = 1.0
    """Share of its leases that were kept, over about the last MEMORY."""
    missed: int = 0
    """Doublings of its cooling-off; also halvings of its leases."""
    rest_until: float = 0.0
    """Unix seconds; it is granted nothing before."""
    pace: float = 0.0
    """Seconds per group, a running mean of its last leases; 0 while unknown."""
    turnaround_s: float = 0.0
    """Time from the grant of a lease until it comes back, a running mean; 0 while unknown."""
    settled: float = 0.0
    """Unix seconds of its last settled lease."""
    lost_groups: float = 0.0
    """Groups of its leases that did not come back, or came back with nothing."""
    kept_leases: int = 0
    returned_leases: int = 0
    """Leases that it gave back without an answer."""
    free_returns: float = MAX_FREE_RETURNS
    """Hand-backs that cost it no rest."""

    def settle(self, groups: int, granted: float, now: float) -> None:
        """Take the time of a lease that came back. Leases are worked off one after the other: the clock of the
        second starts when the first has come back."""
        spent = max(0.0, now - max(granted, self.settled)) / groups
        self.pace = spent if self.pace == 0.0 else self.pace + PACE_STEP * (spent - self.pace)
        self.settled = now
        weight = PACE_STEP if self.turnaround_s else 1.0
        self.turnaround_s += weight * (max(0.0, now - granted) - self.turnaround_s)

    def judge(self, outcome: LeaseOutcome, policy: LeasePolicy, now: float) -> None:
        """Count a lease by its verdict; one that is mostly lost counts as one that did not come back."""
        if outcome.blameless:
            return
        if outcome.lost >= LOST_SHARE * outcome.groups:
            self.lose(1, outcome.lost, policy, now)
            return
        kept_share = 1.0 - outcome.lost / outcome.groups
        self.lost_groups += outcome.lost
        self.kept_leases += 1
        self.reliability += policy.step * (kept_share - self.reliability)
        self.missed = 0 if self.reliability >= STEADY else max(0, self.missed - 1)
        self.free_returns = min(MAX_FREE_RETURNS, self.free_returns + FREE_RETURN_STEP * kept_share)

    def lose(self, leases: int, groups: float, policy: LeasePolicy, now: float) -> None:
        """Count leases, of `groups` in all, that did not come back or brought nothing: the node cools off.

        The cooling-off doubles with every loss, but for those that are noticed while the node rests: they were
        leased before, and one outage is one loss. A kept lease ends the doubling for a steady node only; for a
        node that loses more than a quarter it undoes one, so a node that drops every other lease (those with
        bad luck, say) rests ever longer.
        """
        self.lost_groups += groups
        self.reliability *= (1.0 - policy.step) ** leases
        first = min(COOLING_SHARE * policy.timeout_s, MAX_FIRST_COOLING_S)
        # never shorter than the work: to look at a lease and drop it gains no time
        work = self.pace * groups
        if now < self.rest_until:
            self.rest_until = max(self.rest_until, now + work)
            return
        self.rest_until = now + max(first * 2.0**self.missed, work)
        self.missed = min(self.missed + 1, MAX_DOUBLINGS)

    def give_back(self, leases: int, groups: float, policy: LeasePolicy, now: float) -> None:
        """Count leases that the node handed back, or lost in a restart: free now and then, else as lose()."""
        self.returned_leases += leases
        if self.free_returns < 1.0:
            self.lose(leases, groups, policy, now)
            return
        self.free_returns -= 1.0
        self.lost_groups += groups
        self.reliability *= (1.0 - policy.step) ** leases


@dataclass
class LeadTime:
    """Measures how far ahead of the trainer groups have to be leased, and bounds it by the staleness allowed.

    Batches that may be on lease or waiting, besides the one being trained, with S = max_off_policy_steps:

        lead  = turnaround / step + 1
        depth = max(1, min(lead, max(1.25 + S / 4, S - 3), S + 1 - (1 while a batch is trained)))

    turnaround is the time from a group's lease to its verdict, step the time that training and publishing a
    batch take: means that follow at once what calls for more groups, and slowly what calls for fewer. An
    engine with few sequences returns them faster, so a mean that followed that would keep it short of groups.
    By Little's law the trainer then waits for nothing, with a batch in reserve: leases are granted, and come
    back, in bursts of up to a batch. Where the trainer is the limit, the lead and with it staleness stay
    small; where generation is, workers hold all that S admits. Groups do not return in order and a batch waits
    for its slowest reply, so three versions of S, or most of a small S, are left for stragglers: in
    simulations of long-tailed replies none came too late then. With S = 0 nothing is generated while a batch
    is trained.
    """

    turnaround_s: float = 0.0
    """0 before the first group returned."""
    step_s: float = 0.0
    """0 before the first batch was trained."""
    _returned: deque[float] = field(default_factory=deque[float])
    """Turnarounds of the last groups."""
    usual_s: float = math.inf
    """Their median, which no minority of the accepted work can move; infinite before the first."""
    interval_s: float = 0.0
    """Time from one trained batch to the next, waiting included; 0 before the second."""
    admitted: float = 1.0
    """Share of the groups that come back and are trained: the others' places are leased again."""

    def returned(self, groups: int, per_batch: int, seconds: float) -> None:
        """Count groups that were judged `seconds` after they were leased.

        The mean rises over about one batch and falls over about four.
        """
        seconds = max(0.0, seconds)
        self._returned.extend([seconds] * groups)
        while len(self._returned) > USUAL_OVER * per_batch:
            self._returned.popleft()
        self.usual_s = median(self._returned)
        weight = min(1.0, groups / per_batch) if self.turnaround_s else 1.0
        weight *= PACE_STEP if seconds < self.turnaround_s else 1.0
        self.turnaround_s += weight * (seconds - self.turnaround_s)

    def trained(self, seconds: float, waited: float = 0.0) -> None:
        """Count a batch that took `seconds` to train and publish, and was waited for before.

        The mean falls at once and rises slowly: a first step that compiles must not keep the next ones short
        of groups.
        """
        weight = PACE_STEP if 0.0 < self.step_s < seconds else 1.0
        self.step_s += weight * (seconds - self.step_s)
        weight = PACE_STEP if self.interval_s else 1.0
        self.interval_s += weight * (seconds + waited - self.interval_s)

    def judged(self, admitted: bool, per_batch: int) -> None:
        """Count a group that is to be trained or not; the share is over about one batch."""
        self.admitted += (admitted - self.admitted) / per_batch

    def expected(self, groups: int) -> int:
        """Compute how many of the groups on lease may be trained: the mean and two standard deviations more."""
        share = max(MIN_ADMITTED, self.admitted)
        spread = math.sqrt(groups * share * (1.0 - share))
        return min(groups, math.ceil(groups * share + 2.0 * spread))

    def depth(self, max_off_policy_steps: int, training: bool) -> float:
        """Compute the batches that may be on lease or waiting, besides one that is being trained."""
        bound = max_off_policy_steps
        if bound == 0:
            return 0.0 if training else 1.0
        ratio = self.turnaround_s / self.step_s if self.step_s else math.inf
        most = max(1.25 + bound / 4, bound - 3.0)
        return max(1.0, min(ratio + RESERVE, most, bound + 1 - training))


@dataclass
class TaskQueue:
    """The tasks of one environment, in the order in which they are leased."""

    next_task: int = 0
    """Number of the first draw that is not leased yet; without `draw` also the index of its task."""
    requeued: deque[int] = field(default_factory=deque[int])
    """Tasks whose groups were lost; they go out before new ones."""
    owed: float = 0.0
    """Groups that its ratio gives it, less those that were leased."""
    draw: Callable[[int, Collection[int]], int | None] | None = None
    """Chooses the task of a draw by its number and the tasks that are out, None if it finds none. Without it
    tasks go out in the order of their indices."""
    drawn: deque[int] = field(default_factory=deque[int])
    """Tasks that were drawn and go out next: draws `next_task` and those after it."""
    staffed_at: float = -math.inf
    """Unix seconds at which nodes first said that they can play it; -infinite before. A claim that ends and
    comes again is no news: only accepted work is."""
    accepted_at: float = -math.inf
    """Unix seconds at which work of it was accepted last."""
    players: dict[bytes, float] = field(default_factory=dict[bytes, float])
    """Nodes of which work of it was accepted, and when last (Unix seconds); the latest last."""
    unfit: set[int] = field(default_factory=set[int])
    """Tasks that are passed over; without `draw` those from `next_task` on."""

    def played(self, node: bytes, now: float, since: float) -> None:
        """Note accepted work of a node; forget nodes without any after `since` (both Unix seconds)."""
        self.players.pop(node, None)
        self.accepted_at = self.players[node] = now
        for other, at in list(islice(self.players.items(), 2)):
            if at <= since:
                del self.players[other]

    def upcoming(self, count: int, on_lease: Iterable[int] = ()) -> list[int]:
        """List the indices of the next `count` tasks, or as many as there are."""
        again = list(islice(self.requeued, count))
        fresh = count - len(again)
        if self.draw is None:
            return [*again, *self._following(fresh)]
        out = set[int]()
        if len(self.drawn) < fresh:
            out = {*self.requeued, *self.drawn, *on_lease, *self.unfit}
        while len(self.drawn) < fresh:
            # no task is out twice, so that none is twice in a lease
            index = self.draw(self.next_task + len(self.drawn), out)
            if index is None:
                break
            self.drawn.append(index)
            out.add(index)
        return [*again, *islice(self.drawn, fresh)]

    def _following(self, count: int) -> list[int]:
        """List the next `count` tasks in the order of their indices."""
        fit = (index for index in itertools.count(self.next_task) if index not in self.unfit)
        return list(islice(fit, count))

    def pass_over(self, index: int) -> None:
        """Stop leasing a task that no worker can play."""
        self.unfit.add(index)
        for queue in (self.requeued, self.drawn):
            if index in queue:
                queue.remove(index)

    def requeue(self, indices: Iterable[int]) -> None:
        """Queue tasks again, each once: work of a lease that was taken back may still come, and be lost.

        A lease that names a task twice is refused, with all work on it.
        """
        for index in indices:
            if index not in self.requeued:
                self.requeued.append(index)

    def take(self, count: int) -> None:
        """Remove the next `count` tasks."""
        again = min(count, len(self.requeued))
        for _ in range(again):
            self.requeued.popleft()
        for _ in range(min(count - again, len(self.drawn))):
            self.drawn.popleft()
        if self.draw is not None:
            self.next_task += count - again
        elif indices := self._following(count - again):
            self.next_task = indices[-1] + 1
            self.unfit = {index for index in self.unfit if index >= self.next_task}


@dataclass
class LeaseBook:
    """Keeps the leases that are out, the tasks that come next, and decides what may be granted.

    Groups are divided among the environments by smooth weighted round-robin: each group that is leased gives
    every environment its share of one, and costs the environment that it is of a whole one. A node gets the
    environment that is owed most of those that it can play: so nodes that can play all make up for those that
    cannot. An environment that no node can play gets no share, nor does one that is owed a batch already. One
    that was leased a batch more than its ratio gives it waits for the others, however many nodes ask for it
    alone; for none of which work came back within a lease's time, as that may be a false claim to play it.
    """

    policy: LeasePolicy
    next_lease: int = 0
    tasks: list[TaskQueue] = field(default_factory=list[TaskQueue])
    """Queues by environment."""
    held: LeaseTable = field(default_factory=LeaseTable)
    unjudged: LeaseTable = field(default_factory=LeaseTable)
    """Leases whose work has arrived and has no verdict yet."""
    full: set[bytes] = field(default_factory=set[bytes])
    """Nodes that hold all they may, as far as is known; until a lease of theirs comes back or is judged."""
    expired: int = 0
    nodes: dict[bytes, NodeRecord] = field(default_factory=dict[bytes, NodeRecord])
    """One for each node that was granted something and is not forgotten."""
    newcomers: NewcomerQueue = field(default_factory=NewcomerQueue)
    lead: LeadTime = field(default_factory=LeadTime)
    _staffed_until: float = -math.inf
    _tries: RecentDict[tuple[int, int], int] = field(
        default_factory=lambda: RecentDict(MAX_FAILED_TASKS)
    )
    """(environment, task) -> times that its group was lost through its workers."""

    def __post_init__(self) -> None:
        self.tasks = self.tasks or [TaskQueue() for _ in self.policy.environments]

    def outstanding_groups(self, now: float = -math.inf) -> int:
        """Count the groups that proven nodes hold and that are not late at `now`."""
        return self.leased(newcomers=False, now=now).total()

    def _late(self, now: float, times: float) -> set[int]:
        """Return the leases that are out for longer than `times` what is usual, for their node or in the run.

        A node that holds leases without working, whatever the reason, is soon late with all of them. One that
        is slow, or makes itself so, is late by the measure of the others.
        """
        late: set[int] = set()
        for number, grant in self.held.items() if now > -math.inf else ():
            own = self.record(grant.node).turnaround_s or math.inf
            usual = max(times * min(own, self.lead.usual_s), LATE_LEAST_S)
            if now - grant.granted > usual:
                late.add(number)
        return late

    def trained(self, seconds: float, waited: float = 0.0) -> None:
        """Count a batch; see LeadTime.trained(). Nodes may hold more where batches take longer."""
        self.lead.trained(seconds, waited)
        self.full.clear()

    def present(self, node: bytes, now: float) -> None:
        """Take note that a proven node asked for something."""
        if not self.resting(node, now):
            self._staffed_until = now + STAFFED_S

    def staffed(self, now: float) -> bool:
        """Whether proven nodes are present; while there are none newcomers are leased all the work."""
        return now < self._staffed_until

    def coming_groups(self, now: float = -math.inf) -> int:
        """Count the groups that are expected back of those that proven nodes hold."""
        return self.lead.expected(self.outstanding_groups(now))

    def newcomer_capacity(
        self, *, waiting_groups: int, training: bool, now: float, coming: int | None = None
    ) -> int:
        """Count the groups that all newcomers together may still be granted; `coming`: see capacity()."""
        if self.allowed_groups(training) == 0:
            return 0
        used = sum(slot.groups for slot in self._slots(now))
        if self.staffed(now):
            return pool(self.policy.groups_per_batch) - used
        free = self.capacity(
            waiting_groups=waiting_groups, training=training, now=now, coming=coming
        )
        return free - used

    def next_newcomer(
        self, capacity: int, now: float, able: Callable[[bytes], bool] = lambda node: True
    ) -> bytes | None:
        """Find the newcomer whose turn it is, where they may be granted `capacity` groups.

        `able` says whether there are tasks that a node can play.
        """
        if capacity < 1 or not len(self.newcomers):
            return None

        def may(node: bytes) -> bool:
            return node not in self.held.nodes and not self.resting(node, now) and able(node)

        return self.newcomers.next(capacity, self._slots(now), may, alone=not self.staffed(now))

    def _slots(self, now: float) -> list[Slot]:
        """List the slots of newcomers; without proven nodes, only those of leases that are still out, as work
        that came back is counted where it waits."""
        staffed = self.staffed(now)
        slots = self.newcomers.slots(now)
        return [slot for slot in slots if staffed or slot.lease in self.held]

    def forget(self, node: bytes) -> None:
        """Drop the record of a node that holds nothing."""
        self.nodes.pop(node, None)
        self.full.discard(node)

    def allowed_groups(self, training: bool) -> int:
        """Count the groups that may be on lease or waiting, besides a batch that is being trained."""
        depth = self.lead.depth(self.policy.max_off_policy_steps, training)
        return int(depth * self.policy.groups_per_batch)

    def capacity(
        self,
        *,
        waiting_groups: int,
        training: bool,
        now: float = -math.inf,
        coming: int | None = None,
    ) -> int:
        """Count the groups that proven nodes may still be granted at `now`.

        `waiting_groups` have come back and wait to be trained; `training` says that a batch is being trained,
        so that work granted now is at least one version old when its turn comes. `coming`: coming_groups(now),
        where the caller has it.
        """
        if coming is None:
            coming = self.coming_groups(now)
        return self.allowed_groups(training) - waiting_groups - coming

    def leased(
        self, *, newcomers: bool = True, now: float = -math.inf, times: float = LATE
    ) -> Counter[bytes]:
        """Count the groups on lease, by node; with or without newcomers, and without late leases (see LATE)."""
        out: Counter[bytes] = Counter()
        late = self._late(now, times)
        for number, grant in self.held.items():
            if (newcomers or grant.newcomer is None) and number not in late:
                out[grant.node] += len(grant.lease.tasks)
        return out

    def record(self, node: bytes) -> NodeRecord:
        """Return the record of a node; a fresh one for a stranger."""
        record = self.nodes.get(node)
        return NodeRecord() if record is None else record

    def resting(self, node: bytes, now: float) -> bool:
        """Whether a node cools off after leases that did not come back."""
        record = self.nodes.get(node)
        return record is not None and now < record.rest_until

    def quota(self, node: bytes, trust: float, earned: float = math.inf) -> tuple[int, int]:
        """Compute the (leases, groups) that a node may hold, by trust, reliability, speed and past work.

        A group that it drops is paid for by half as much accepted work, and one that is not judged yet counts
        as dropped. Never less than one lease and one group: a slow node is given little, but not nothing.
        """
        record = self.record(node)
        leases = math.ceil(self.policy.leases_per_worker * min(1.0, trust * record.reliability))
        most = self.policy.leases_per_worker * self.policy.groups_per_lease
        if record.pace > 0.0:
            most = min(most, int(self._horizon_s() / record.pace))
        if earned < math.inf:
            unjudged = sum(len(grant.lease.tasks) for grant in self.unjudged.of(node).values())
            most = min(most, int(EARNED * earned - record.lost_groups) - unjudged)
        return max(1, leases), max(1, most)

    def _horizon_s(self) -> float:
        """Compute the seconds of work that a node may hold: it has to come back in time, and not too stale."""
        horizon = HORIZON * self.policy.timeout_s
        versions = FRESH * (self.policy.max_off_policy_steps + 1)
        return min(horizon, versions * self.lead.interval_s) if self.lead.interval_s else horizon

    def grant(
        self,
        node: bytes,
        *,
        version: int,
        capacity: int,
        digest_of: Callable[[int, int], bytes],
        seed: bytes,
        now: float,
        epoch: int = 0,
        share: LeaseShare = LeaseShare(),
    ) -> Lease | None:
        """Grant the next lease; None when the node or the system holds enough, or it is the turn of others.

        `digest_of` maps (environment, task) to the task's digest.
        """
        mine = [grant.lease for grant in self.held.of(node).values()]
        most = self._size(node, mine, capacity, share, now)
        sizes = {
            number: min(most, self._room(node, number, mine, share))
            for number in range(len(self.tasks))
            if most >= 1 and number in share.playable
        }
        if not sizes:
            return None
        self._note_staffed(share.staffed, now)
        coming = self._coming(share.staffed, now)
        ahead = self._ahead(coming)
        able = [number for number, size in sizes.items() if size >= 1 and number not in ahead]
        environment = max(able, key=lambda number: self.tasks[number].owed, default=None)
        if environment is None:
            return None
        # Nothing is taken before every digest is known: a task that cannot be made is not lost.
        queue = self.tasks[environment]
        indices = queue.upcoming(sizes[environment], self._on_lease(environment))
        tasks = tuple(TaskRef(index, digest_of(environment, index)) for index in indices)
        if not tasks:
            return None
        size = len(tasks)
        lease = Lease(
            lease_id=self.next_lease,
            tasks=tasks,
            group_size=self.policy.environments[environment].group_size,
            seed=seed,
            min_version=version,
            deadline=now + self.policy.timeout_s,
            max_bytes=self.policy.max_bytes,
            term=epoch,
            environment=environment,
        )
        queue.take(size)
        charges = self._charges(environment, size, share.staffed, coming)
        self._owe(charges)
        self.next_lease += 1
        self.held[lease.lease_id] = Held(lease, node, now, share.newcomer, charges)
        self.nodes.setdefault(node, NodeRecord())
        if share.newcomer is not None:
            until = now + SLOT_SHARE * self.policy.timeout_s
            self.newcomers.serve(Slot(lease.lease_id, node, share.newcomer, size, until))
        return lease

    def _ahead(self, coming: Collection[int]) -> set[int]:
        """Return the environments that are ahead of their ratio by a batch while `coming` ones are behind."""
        batch = self.policy.groups_per_batch
        behind = any(self.tasks[number].owed > 0 for number in coming)
        return {
            number for number, queue in enumerate(self.tasks) if behind and queue.owed <= -batch
        }

    def paces(self, since: float) -> dict[bytes, float]:
        """Return the groups a second of each node whose work came back after `since` (Unix seconds)."""
        return {
            node: 1.0 / record.pace
            for node, record in self.nodes.items()
            if record.pace > 0.0 and record.settled > since
        }

    def _note_staffed(self, staffed: Collection[int], now: float) -> None:
        """Take note of the environments that nodes say they can play."""
        for number, queue in enumerate(self.tasks):
            if number in staffed and queue.staffed_at == -math.inf:
                queue.staffed_at = now

    def _coming(self, staffed: Collection[int], now: float) -> set[int]:
        """Return the environments that the others may wait for.

        Work of such a one was first promised within a lease's time; or it came back within one, from nodes
        whose pace is a fair part (FAIR_PART) of what its ratio would take of the pace of all. Else a single
        node that plays an environment slowly, on purpose or not, would set the pace of the run. None while no
        environment is owed a batch or ahead by one, as only then the others may wait.
        """
        since = now - self.policy.timeout_s
        if all(abs(queue.owed) < self.policy.groups_per_batch for queue in self.tasks):
            return set()  # as nearly always: none is owed so much that it matters
        paces = self.paces(since)
        ratios = sum(
            share.ratio
            for number, share in enumerate(self.policy.environments)
            if number in staffed
        )
        coming: set[int] = set()
        for number, queue in enumerate(self.tasks):
            fair = FAIR_PART * self.policy.environments[number].ratio / ratios if ratios else 0.0
            supplied = sum(paces.get(node, 0.0) for node, at in queue.players.items() if at > since)
            comes = queue.accepted_at > since and supplied >= fair * sum(paces.values())
            if number in staffed and (comes or queue.staffed_at > since):
                coming.add(number)
        return coming

    def ahead(self, environments: Collection[int], staffed: Collection[int], now: float) -> bool:
        """Return whether all of some environments are ahead of their ratio and wait for the others."""
        if not environments:
            return False
        self._note_staffed(staffed, now)
        return self._ahead(self._coming(staffed, now)).issuperset(environments)

    def _charges(
        self, environment: int, groups: int, staffed: Collection[int], coming: Collection[int]
    ) -> dict[int, float]:
        """Divide `groups` that an environment is leased among what environments are owed; the sum is 0.

        One that is owed a batch has no part in it, unless work of it comes: then the others wait for it, all
        of them, however many share its debt.
        """
        most = self.policy.groups_per_batch
        shares = {
            number: share.ratio
            for number, share in enumerate(self.policy.environments)
            if number == environment
            or number in coming
            or (number in staffed and self.tasks[number].owed < most)
        }
        total = sum(shares.values())
        return {
            number: groups * (ratio / total - (number == environment))
            for number, ratio in shares.items()
        }

    def _owe(self, charges: Mapping[int, float], sign: int = 1) -> None:
        for number, groups in charges.items():
            self.tasks[number].owed += sign * groups

    def _size(
        self, node: bytes, mine: Sequence[Lease], capacity: int, share: LeaseShare, now: float
    ) -> int:
        """Size the next lease for `node`, which holds `mine`, in groups; below 1 if there is none."""
        if self.resting(node, now):
            return 0
        whole = max(1, self.policy.groups_per_lease >> self.record(node).missed)
        if share.newcomer is not None:
            return self._newcomer_size(bool(mine), whole, capacity, now)
        left = self._left(node, mine, share.trust, share.earned)
        if left < 1:
            self.full.add(node)
        return min(self._fair(bool(mine), node, capacity, share, now), whole, left)

    def _room(self, node: bytes, environment: int, mine: Sequence[Lease], share: LeaseShare) -> int:
        """Count the groups of an environment that a node's work in it allows beside `mine`."""
        standing = share.standings.get(environment)
        if share.newcomer is not None or standing is None:
            return self.policy.groups_per_lease
        own = [lease for lease in mine if lease.environment == environment]
        return self._left(node, own, standing.trust, standing.earned)

    def _left(self, node: bytes, mine: Sequence[Lease], trust: float, earned: float) -> int:
        """Count the groups that a node may be leased beside `mine`; 0 if it has all its leases."""
        leases, groups = self.quota(node, trust, earned)
        return groups - sum(len(lease.tasks) for lease in mine) if len(mine) < leases else 0

    def _newcomer_size(self, holds: bool, whole: int, capacity: int, now: float) -> int:
        """Grant one group to see whether a node works; without proven nodes, newcomers divide all there is."""
        if holds or capacity < 1:
            return 0
        asking = max(1, len(self.newcomers))
        return 1 if self.staffed(now) else min(whole, max(1, capacity // asking))

    def _fair(self, holds: bool, node: bytes, capacity: int, share: LeaseShare, now: float) -> int:
        """Share the capacity with other nodes that wait and hold nothing.

        A lease for each of them comes before a second one for any node; if there is not enough for all, those
        that hold nothing divide it evenly.
        """
        hungry = sum(
            other != node and not self.resting(other, now)
            for other in share.waiting - self.held.nodes
        )
        if holds:
            return capacity - hungry * self.policy.groups_per_lease
        return min(capacity, max(1, capacity // (1 + hungry)))

    def settle(self, lease_id: int, node: bytes, now: float) -> Lease:
        """Take back a lease whose work has arrived, at `now` (Unix seconds).

        Raises:
            RemoteProtocolError: UNKNOWN_LEASE, WRONG_RECIPIENT; LEASE_DONE is the ledger's to say.
        """
        grant = self.held.get(lease_id)
        if grant is None:
            raise RemoteProtocolError(Reason.UNKNOWN_LEASE, f"lease {lease_id} is not out")
        if grant.node != node:
            raise RemoteProtocolError(Reason.WRONG_RECIPIENT, f"lease {lease_id} is another node's")
        del self.held[lease_id]
        self.full.discard(node)
        self.unjudged[lease_id] = grant
        groups = len(grant.lease.tasks)
        self.nodes.setdefault(node, NodeRecord()).settle(groups, grant.granted, now)
        return grant.lease

    def judge(self, lease: Lease, node: bytes, outcome: LeaseOutcome, now: float) -> None:
        """Count a lease by the verdict on its work, at `now` (Unix seconds)."""
        grant = self.unjudged.pop(lease.lease_id, None)
        self.full.discard(node)
        if outcome.accepted:
            self.tasks[lease.environment].played(node, now, now - self.policy.timeout_s)
        self.nodes.setdefault(node, NodeRecord()).judge(outcome, self.policy, now)
        if grant is None or grant.newcomer is None or outcome.blameless:
            return
        self.newcomers.count(grant.newcomer.ticket, outcome.accepted > 0)
        if not outcome.accepted:
            self.newcomers.free(lease.lease_id)

    def lease_again(self, environment: int, index: int, *, blameless: bool = False) -> None:
        """Queue a task whose group was lost, unless it was lost MAX_TRIES times through its workers."""
        tries = self._tries.get((environment, index), 0) + (not blameless)
        self._tries[environment, index] = tries
        if tries < MAX_TRIES:
            self.tasks[environment].requeue((index,))

    def expire(self, now: float) -> list[Held]:
        """Take back leases past their deadline: their tasks are leased again, and their nodes cool off."""
        late = [grant for grant in self.held.values() if grant.lease.deadline < now]
        self._take_back(late, now, expired=True)
        return late

    def release(self, node: bytes, now: float) -> list[Held]:
        """Take back the leases of a node that said goodbye or began anew: their tasks are leased again."""
        left = list(self.held.of(node).values())
        self._take_back(left, now)
        return left

    def release_lost(self, node: bytes, holding: Container[int], now: float) -> list[Held]:
        """Take back leases that a node does not hold: the grant never reached it, or it gave up."""
        own = self.held.of(node).items()
        lost = [grant for number, grant in own if number not in holding]
        self._take_back(lost, now)
        return lost

    def _take_back(self, leases: list[Held], now: float, *, expired: bool = False) -> None:
        groups: Counter[bytes] = Counter()
        for grant in leases:
            groups[grant.node] += len(grant.lease.tasks)
        for node, count in Counter(grant.node for grant in leases).items():
            self.full.discard(node)
            record = self.nodes.setdefault(node, NodeRecord())
            count_loss = record.lose if expired else record.give_back
            count_loss(count, groups[node], self.policy, now)
        for grant in leases:
            del self.held[grant.lease.lease_id]
            if grant.newcomer is not None and expired:
                self.newcomers.count(grant.newcomer.ticket, False)
            queue = self.tasks[grant.lease.environment]
            queue.requeue(task.index for task in grant.lease.tasks)
            self._owe(grant.charges, -1)
        self.expired += len(leases)

    def upcoming(self, environment: int, leases: int) -> list[int]:
        """List the indices of the tasks that the next `leases` of an environment may name."""
        count = leases * self.policy.groups_per_lease
        return self.tasks[environment].upcoming(count, self._on_lease(environment))

    def _on_lease(self, environment: int) -> Iterable[int]:
        """Iterate over the tasks of an environment that are on lease."""
        leases = (grant.lease for grant in self.held.values())
        return (
            task.index
            for lease in leases
            if lease.environment == environment
            for task in lease.tasks
        )
