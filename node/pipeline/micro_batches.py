"""How many micro-batches to have in flight, so that no stage waits while others compute or transfer.

One trip round the ring, without queues, takes `ring_s`; the slowest stage needs `step_s` of it. Meanwhile it
could have computed ring_s / step_s micro-batches: with so many it never idles, with more they only queue, and
each is smaller than it has to be. Pure: time is an argument.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil

WINDOW = 32
"""Trips that are looked at; the shortest of them says how long one takes when nothing is in the way."""
SETTLE = 4
"""Trips after a change before there is another one: what was sent before tells of the past."""
GRAIN = 0.1
"""Part of a micro-batch for which no further one is made: all would be smaller, and cost nearly as much."""
SLACK = 1.3
"""Fewer are only wanted where there are this many times more than needed."""
STEEPEST = 2.0
"""Most that the number grows by at a time: with smaller micro-batches the times are others."""


@dataclass(frozen=True)
class Trip:
    """One micro-batch that came back."""

    free_s: float
    """Time that it took, but for queues."""
    busy_s: float
    """What the slowest stage needed for it."""


class MicroBatches:
    """Follows what is sent and comes back. At most `most` are wanted, each of at least `least_rows` rows."""

    def __init__(self, most: int, *, least_rows: int = 1) -> None:
        self._most = most
        self._least = least_rows
        self._count = min(2, most)
        self._sent: dict[int, tuple[int, float]] = {}
        self._trips: deque[Trip] = deque(maxlen=WINDOW)
        self._settling = 0
        self._times: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        """(came back at, busy) of the last ones, without gaps between chains."""

    def count(self, rows: int) -> int:
        """How many micro-batches `rows` sequences should be split into now; at least 1."""
        return max(1, min(self._count, self._most, rows // self._least))

    def sent(self, number: int, rows: int, now: float) -> None:
        """Micro-batch `number` leaves stage 0 at `now`, seconds."""
        self._sent[number] = (rows, now)

    def back(self, number: int, busy_s: float, waited_s: float, now: float) -> None:
        """It came back: the slowest stage needed `busy_s`, and it lay in queues for `waited_s`."""
        rows, began = self._sent.pop(number, (0, now))
        if not rows or busy_s <= 0:
            return
        self._trips.append(Trip(max(busy_s, now - began - waited_s), busy_s))
        self._times.append((now, busy_s))
        self._settling = max(0, self._settling - 1)
        if not self._settling:
            self._decide()

    def forget(self) -> None:
        """A new chain begins: what was in flight does not come back, and gaps are nobody's fault."""
        self._sent.clear()
        self._times.clear()

    def pause(self) -> None:
        """There is no work for a while: the gap says nothing of the pipeline."""
        self._times.clear()

    @property
    def ring_s(self) -> float:
        """How long a micro-batch is under way when nothing is in the way; 0 before the first came back."""
        return min((trip.free_s for trip in self._trips), default=0.0)

    @property
    def step_s(self) -> float:
        """What the slowest stage needs for one, in the middle; 0 before the first came back."""
        busy = sorted(trip.busy_s for trip in self._trips)
        return busy[len(busy) // 2] if busy else 0.0

    @property
    def stall_share(self) -> float:
        """Share of the time in which the slowest stage had nothing to do, 0 to 1, over the last trips."""
        if len(self._times) < 2:
            return 0.0
        whole = self._times[-1][0] - self._times[0][0]
        busy = sum(one for _, one in list(self._times)[1:])
        return min(1.0, max(0.0, 1.0 - busy / whole)) if whole > 0 else 0.0

    def _decide(self) -> None:
        """Grow at once; shrink only where it is clearly too many."""
        needed = ceil(self.ring_s / self.step_s - GRAIN)
        if needed > self._count:
            self._change(min(needed, ceil(STEEPEST * self._count)))
        elif needed * SLACK < self._count and len(self._trips) == WINDOW:
            self._change(needed)

    def _change(self, count: int) -> None:
        count = max(1, min(count, self._most))
        if count == self._count:
            return
        self._settling = SETTLE + self._count
        self._count = count
        self._trips.clear()
