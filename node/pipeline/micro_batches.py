"""Derive how many micro-batches to keep in flight: enough to cover one round trip.

A round trip is what one micro-batch takes without queues: the compute time of every stage, and transfer
and latency of every hop. With fewer micro-batches the slowest stage idles, with more they only queue.
Smaller micro-batches compute faster, so the number is derived again from trips that were made with the
number in force. The time on the way is measured with one micro-batch for each stage: with more of them frames
also queue where nothing measures it, in nodes and between threads, and more would seem to be needed for ever.
Pure: time is an argument.
"""

from collections import deque
from math import ceil
from statistics import median

WINDOW = 32
"""Micro-batches over which the idle share of the slowest stage is measured."""
LEAST = 4
"""Fewest trips that a number is derived from."""
FASTER = 0.5
"""The way has got faster if it takes less than this share of the time measured before."""
SLACK = 0.25
"""Measurements vary: the number changes only if the ratio is this far outside the range in which it is right,
and a ratio this little above a whole number counts as that number."""


def micro_batches(
    trip_s: float, slowest_s: float, *, rows: int, most: int, graph_rows: int = 0
) -> int:
    """ceil(trip / slowest stage), from 1 to `most` and to `rows`, the sequences that there are.

    Where devices have CUDA graphs for steps of at most `graph_rows` sequences, at least so many that each step
    has one: larger steps take several times as long. 0: there are no graphs.
    """
    covering = ceil(trip_s / slowest_s) if slowest_s > 0 else 1
    graphed = ceil(rows / graph_rows) if graph_rows else 1
    return max(1, min(max(covering, graphed), most, rows))


class MicroBatches:
    """Measures the trips of one pipeline and derives the number: at first, and at least, one for each stage."""

    def __init__(self, most: int, *, stages: int = 2, graph_rows: int = 0) -> None:
        """`most`: the bound of the plan; `graph_rows`: see micro_batches()."""
        self._most, self._graph_rows, self._stages = most, graph_rows, stages
        self._number = stages
        """The number in force, before the bounds."""
        self._hops_s: float | None = None
        """Time of a trip beyond compute, if all stages take as long as the slowest; None: not measured yet."""
        self._changes = 0
        self._sent: dict[int, tuple[float, int]] = {}
        """Micro-batch -> (when it left stage 0, `_changes` at that time)."""
        self._trips: list[tuple[float, float]] = []
        """(trip, time of the slowest stage), both seconds, of trips made with the number in force."""
        self._busy: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        """(came back at, time of the slowest stage) of the last micro-batches, without gaps between chains."""
        self._trip_s = 0.0

    def count(self, rows: int) -> int:
        """Into how many micro-batches `rows` sequences should be split now; at least 1."""
        return micro_batches(
            self._number, 1.0, rows=max(1, rows), most=self._most, graph_rows=self._graph_rows
        )

    def sent(self, number: int, now: float) -> None:
        """Micro-batch `number` leaves stage 0 at `now`, seconds."""
        if not self._sent and self._busy and now > self._busy[-1][0] + self._trip_s:
            self._busy.clear()  # there was nothing to do
        self._sent[number] = (now, self._changes)

    def back(self, number: int, busy_s: float, waited_s: float, now: float) -> None:
        """It came back: the slowest stage needed `busy_s`, and it lay in queues for `waited_s`."""
        sent = self._sent.pop(number, None)
        if sent is None or busy_s <= 0:
            return
        self._trip_s = max(busy_s, now - sent[0] - waited_s)
        self._busy.append((now, busy_s))
        if sent[1] == self._changes:
            self._trips.append((self._trip_s, busy_s))
            self._derive()

    def forget(self) -> None:
        """Begin a new chain: nothing in flight comes back, and all is measured anew."""
        self._sent.clear()
        self._busy.clear()
        self._hops_s = None
        self._set(self._stages)

    @property
    def stall_share(self) -> float:
        """Share of the time in which the slowest stage had nothing to do, 0 to 1, over the last trips."""
        if len(self._busy) < 2:
            return 0.0
        whole = self._busy[-1][0] - self._busy[0][0]
        busy = sum(one for _, one in list(self._busy)[1:])
        return min(1.0, max(0.0, 1.0 - busy / whole)) if whole > 0 else 0.0

    def _derive(self) -> None:
        """Derive the number anew once there are enough trips; the first round still has the old sizes."""
        lap = max(LEAST, min(self._number, self._most))
        first = self._hops_s is None
        if len(self._trips) < (WINDOW if first else 2 * lap):
            return
        recent = self._trips[lap:]
        self._trips.clear()
        slowest_s = median(busy for _, busy in recent)
        trip_s = median(trip for trip, _ in recent)
        hops_s = max(0.0, trip_s - self._stages * slowest_s)
        if self._hops_s is None or self._number == self._stages or hops_s < FASTER * self._hops_s:
            self._hops_s = hops_s
        ratio = self._stages + self._hops_s / slowest_s
        if not self._number - 1 - SLACK < ratio <= self._number + SLACK:
            self._set(max(1, min(ceil(ratio - SLACK), self._most)))

    def _set(self, number: int) -> None:
        self._number = number
        self._changes += 1
        self._trips.clear()
