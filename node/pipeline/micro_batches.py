"""How many micro-batches to have in flight, so that no stage waits while others compute or transfer.

One trip round the ring, without queues, takes `ring_s`; the slowest stage needs `step_s` of it. Meanwhile it
could have computed ring_s / step_s micro-batches: with so many it never idles, with more they only queue. That
is what is proposed. Whether it is right depends on what nobody tells stage 0: whether half the rows take half
the time, what schedulers and lines take that are busy with one micro-batch at a time. So it is tried, and what
counts is rows per second, as they came back (climb.py). It begins with one micro-batch a stage. What a device
has recorded graphs for takes it a fraction of the time of anything larger: from so many micro-batches on that
all of them are that small things are otherwise. Pure: time is an argument.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil
from statistics import median

from .climb import Climb

WINDOW = 32
"""Trips that are looked at."""
LEAST = 4
"""Micro-batches of a turn at least."""
OTHER = 1.25
"""Rates of so many times more, or fewer, sequences are not compared."""


@dataclass(frozen=True)
class Trip:
    """One micro-batch that came back."""

    free_s: float
    """Time that it took, but for queues."""
    busy_s: float
    """What the slowest stage needed for it."""


class MicroBatches:
    """Follows what is sent and comes back. At most `most` are wanted."""

    def __init__(self, most: int, *, stages: int = 2, graph_rows: int = 0) -> None:
        """`graph_rows`: most rows of a step that devices have a recorded graph for; 0: of none."""
        self._most, self._graph_rows = most, graph_rows
        self._climb = Climb(max(1, min(stages, most)))
        self._sent: dict[int, tuple[int, float]] = {}
        self._trips: deque[Trip] = deque(maxlen=WINDOW)
        self._times: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        """(came back at, busy) of the last ones, without gaps between chains."""
        self._rows = 1
        self._laps = Laps()
        self._laps.begin(self._climb.number, 0)
        self._home_rows = 1
        """Sequences that there were when home was measured."""

    def count(self, rows: int) -> int:
        """How many micro-batches `rows` sequences should be split into now; at least 1."""
        self._rows = max(1, rows)
        return min(self._climb.number, self._most, self._rows)

    def sent(self, number: int, rows: int, now: float) -> None:
        """Micro-batch `number` leaves stage 0 at `now`, seconds."""
        if not self._sent and self._times and now > self._times[-1][0] + self.ring_s:
            self._start_over()  # there was nothing to do
        self._sent[number] = (rows, now)
        self._laps.peak = max(self._laps.peak, len(self._sent))

    def back(self, number: int, busy_s: float, waited_s: float, now: float) -> None:
        """It came back: the slowest stage needed `busy_s`, and it lay in queues for `waited_s`."""
        rows, began = self._sent.pop(number, (0, now))
        if not rows or busy_s <= 0:
            return
        self._times.append((now, busy_s))
        if self._laps.skip:
            self._trips.clear()
        self._trips.append(Trip(max(busy_s, now - began - waited_s), busy_s))
        if self._laps.back(rows, now):
            self._decide()

    def forget(self) -> None:
        """A new chain begins: what was in flight does not come back, and gaps are nobody's fault."""
        self._sent.clear()
        self._start_over()

    @property
    def ring_s(self) -> float:
        """How long a micro-batch is under way when nothing is in the way; 0 before the first came back."""
        return median(trip.free_s for trip in self._trips) if self._trips else 0.0

    @property
    def step_s(self) -> float:
        """What the slowest stage needs for one; 0 before the first came back."""
        return median(trip.busy_s for trip in self._trips) if self._trips else 0.0

    @property
    def stall_share(self) -> float:
        """Share of the time in which the slowest stage had nothing to do, 0 to 1, over the last trips."""
        if len(self._times) < 2:
            return 0.0
        whole = self._times[-1][0] - self._times[0][0]
        busy = sum(one for _, one in list(self._times)[1:])
        return min(1.0, max(0.0, 1.0 - busy / whole)) if whole > 0 else 0.0

    def _start_over(self) -> None:
        """What was measured so far has no end."""
        self._times.clear()
        self._climb.give_up()
        self._laps.begin(self._climb.number, len(self._sent))

    def _decide(self) -> None:
        """A number was measured: keep it, try another, or go back."""
        climb, rates = self._climb, self._laps.rates
        if not climb.is_enough(rates):
            return
        before = climb.number
        if before == climb.home:
            self._home_rows = self._rows
        if self._home_rows / OTHER < self._rows < self._home_rows * OTHER:
            # of each trip its own: they differ in size
            ratio = median(trip.free_s / trip.busy_s for trip in self._trips)
            leap = ceil(self._rows / self._graph_rows) if self._graph_rows else 0
            climb.measured(rates, ratio, min(self._most, self._rows), leap=leap)
        else:
            climb.give_up()
        self._laps.begin(climb.number, len(self._sent) if climb.number != before else 0)


class Laps:
    """Rows a second, from what comes back: by turns, each as long as there are micro-batches in flight."""

    def __init__(self) -> None:
        self.peak = 1
        """Most that were in flight at once."""
        self.skip = 0
        """That many come back before anything is measured."""
        self.rates: list[float] = []
        """Of each turn: what else happens meanwhile, such as a prompt that is read, spoils some of them."""
        self._since: float | None = None
        self._back = self._rows = 0

    def begin(self, number: int, before: int) -> None:
        """`number` are wanted from now on; `before` are in flight that were sent when it was another one."""
        self.skip = before + number if before else 0
        self.peak = 1
        self.rates.clear()
        self._since = None
        self._back = self._rows = 0

    def back(self, rows: int, now: float) -> bool:
        """A micro-batch came back; whether that ends a turn."""
        if self.skip or self._since is None:
            self.skip = max(0, self.skip - 1)
            self._since = now
            return False
        self._back += 1
        self._rows += rows
        if self._back < self.peak * ceil(LEAST / self.peak) or now <= self._since:
            return False
        self.rates.append(self._rows / (now - self._since))
        self._since, self._back, self._rows = now, 0, 0
        return True
