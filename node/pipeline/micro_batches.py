"""Stage 0's end of the ring: micro-batches go out, and tokens come back in the same order, or nothing does.

Once a chain is broken every micro-batch in flight is answered by None, and so is every later one,
until begin() makes another one.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any, Protocol, TypeVar

from ..ops.errors import EngineError
from .frames import MAX_WORDS, Frame, Kind
from .ports import Port, PortClosed, PortTimeout

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

    Where devices have CUDA graphs for steps of at most `graph_rows` sequences, at least enough that each step
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


class SchedulerRequest(Protocol):
    """The fields of a request that are read."""

    request_id: str
    num_computed_tokens: int

    @property
    def num_tokens(self) -> int:
        """Of its prompt, and drawn."""
        ...


R = TypeVar("R", bound=SchedulerRequest)


def is_ready(request: SchedulerRequest) -> bool:
    """Whether something of it can be computed now, and it does not wait for a token."""
    return request.num_tokens > request.num_computed_tokens


def rest(running: list[R], mine: Sequence[R]) -> list[R]:
    """`running` but for `mine`, in its order."""
    if running[: len(mine)] == mine:  # mostly: the lane whose turn it is was scheduled longest ago
        return running[len(mine) :]
    names = {one.request_id for one in mine}
    return [one for one in running if one.request_id not in names]


class LaneAssignment:
    """Keep which sequence is in which lane; the scheduler reports what it does.

    From one call to the next requests may leave what runs, but they join it only by settle().
    """

    def __init__(self, count: Callable[[int], int]) -> None:
        """`count`: sequences -> number of lanes that they should have."""
        self._count = count
        self._lane: dict[str, int] = {}
        self._below = 1
        """All lanes of these are below."""
        self._members: list[list[Any]] = []
        """Of each lane, in the order in which they run; some may have left. Empty if it is not known."""
        self._under_way: dict[int, int] = {}
        """Lane -> its micro-batches in flight that draw; None waits for those of parts of prompts."""
        self._next = 0

    def target(self, sequences: int) -> tuple[int, int]:
        """(how many lanes there should be, most sequences of each)."""
        lanes = max(1, self._count(max(1, sequences)))
        return lanes, -(-max(1, sequences) // lanes)

    def pick(self, running: Sequence[SchedulerRequest], waiting: int, free: int) -> int | None:
        """The lane whose turn it is; None if none has anything to do. Changes nothing.

        `waiting` requests could be taken in, `free` at most.
        """
        lanes, most = self.target(len(running) + min(waiting, free))
        members = self._look(running, lanes)
        under_way = {lane % lanes for lane, count in self._under_way.items() if count}
        for step in range(lanes):
            lane = (self._next + step) % lanes
            if lane in under_way:
                continue
            room = waiting > 0 and free > 0 and len(members[lane]) < most
            if room or any(map(is_ready, members[lane])):
                return lane
        return None

    def take(self, lane: int, running: Sequence[R], waiting: int, free: int) -> tuple[list[R], int]:
        """(its sequences, most that it may have); the next turn is another's.

        Its surplus sequences go to the smallest lanes.
        """
        lanes, most = self.target(len(running) + min(waiting, free))
        members = self._look(running, lanes)
        lane %= lanes  # their number may have changed since it was picked
        if lanes < self._below:
            self._renumber()
        self._below = lanes
        mine = members[lane]
        if len(mine) > most:
            self._even(lane, members, most)
            self._members = []  # moved sequences keep their place among those that run
        self._next = (lane + 1) % lanes
        return list(mine), most

    def settle(self, lane: int, requests: Iterable[SchedulerRequest]) -> None:
        """Set the members of that lane."""
        found, known = list(requests), lane < len(self._members)
        if known and found == self._members[lane]:
            return
        for one in found:
            self._lane[one.request_id] = lane
        self._below = max(self._below, lane + 1)
        if known:
            self._members[lane] = found
        else:
            self._members = []

    def sent(self, lane: int) -> None:
        """A micro-batch of it that draws is under way."""
        self._under_way[lane] = self._under_way.get(lane, 0) + 1

    def back(self, lane: int) -> None:
        """It is back, or will never be."""
        self._under_way[lane] -= 1

    def forget(self, known: Callable[[str], bool]) -> None:
        """Forget the sequences that are over."""
        self._lane = {name: lane for name, lane in self._lane.items() if known(name)}

    def __len__(self) -> int:
        """Sequences that are remembered."""
        return len(self._lane)

    def _look(self, running: Sequence[R], lanes: int) -> list[list[R]]:
        """The members of each lane."""
        if len(self._members) != lanes or sum(map(len, self._members)) != len(running):
            found: list[list[R]] = [[] for _ in range(lanes)]
            find = self._lane.get
            for one in running:
                found[find(one.request_id, 0) % lanes].append(one)
            self._members = found
        return self._members

    def _renumber(self) -> None:
        """There are fewer lanes: all are in the one that they were counted to."""
        for lane, found in enumerate(self._members):
            for one in found:
                self._lane[one.request_id] = lane

    def _even(self, lane: int, members: list[list[R]], most: int) -> None:
        """Move the surplus of a lane that is not under way to the smallest lanes."""
        found = members[lane]
        while len(found) > most:
            smallest = min(range(len(members)), key=lambda one: len(members[one]))
            if len(members[smallest]) >= most:
                return
            moved = found.pop()
            members[smallest].append(moved)
            self._lane[moved.request_id] = smallest


logger = logging.getLogger(__name__)

STALL_S = 120.0
"""A micro-batch that is not back by then never comes; the ring's own deadlines are shorter."""
LATE_POLL_S = 1.0
"""Between two looks whether one is late."""
UNMADE = "no chain was made yet"


@dataclass(frozen=True)
class Sent:
    """A micro-batch in flight."""

    number: int
    at: float
    answer: "Future[Frame | None]"


@dataclass
class Awaited:
    """A frame that has to come round."""

    kind: Kind
    number: int
    over: threading.Event


class RingClient:
    """Call it from one thread, close() last. It owns one more thread, which receives."""

    def __init__(
        self, connect: Callable[[], Port], micro_batches: MicroBatches, stall_s: float = STALL_S
    ) -> None:
        """`connect` opens a port to the node's process; it raises PortClosed."""
        self._connect = connect
        self._batches = micro_batches
        self._stall_s = stall_s
        self._port: Port | None = None
        self._lock = threading.Lock()
        self._sent: deque[Sent] = deque()
        self._awaited: Awaited | None = None
        self._epoch = -1
        self._number = self._cut = 0
        self._fault = UNMADE

    @property
    def whole(self) -> bool:
        """Whether micro-batches come back, as far as is known."""
        return not self._fault

    @property
    def fault(self) -> str:
        """Why not; empty while it is whole."""
        return self._fault

    def lanes(self, rows: int) -> int:
        """Into how many micro-batches `rows` sequences should be split."""
        with self._lock:
            self._cut = self._batches.count(rows)
            return self._cut

    @property
    def cut(self) -> tuple[int, int, float]:
        """(lanes wanted last, micro-batches in flight, share of its time that the slowest stage waits)."""
        with self._lock:
            return self._cut, len(self._sent), self._batches.stall_share

    def open(self) -> None:
        """Connect, so that the node sees that somebody is there. Raises EngineError."""
        if self._port is not None:
            return
        try:
            port = self._port = self._connect()
        except PortClosed as error:
            raise EngineError(
                f"the node's end of the pipeline cannot be reached ({error})"
            ) from error
        threading.Thread(
            target=self._receive, args=(port,), name="primerl-chain", daemon=True
        ).start()

    def begin(self, epoch: int, version: int, timeout_s: float) -> None:
        """Make a chain: all stages forget their sequences, and have the weights of `version`.

        Micro-batches in flight are answered by None. Raises EngineError, also where a stage cannot do it.
        """
        if epoch <= self._epoch:
            raise EngineError(f"chain {epoch} is over: begin a newer one than {self._epoch}")
        self._break("a new chain begins")
        self.open()
        with self._lock:
            self._epoch, self._number, self._fault = epoch, 0, ""
            self._batches.forget()
        until = time.monotonic() + timeout_s
        for kind, number in ((Kind.RESET, 0), (Kind.SWITCH, version)):
            if not self.ask(kind, number, until - time.monotonic()):
                raise EngineError(f"the pipeline did not begin: {self._fault}")

    def ask(self, kind: Kind, number: int, timeout_s: float) -> bool:
        """Send a RESET or SWITCH, and wait until it has come round; False, and broken, if it does not."""
        awaited = self._tell(kind, number)
        if not awaited.over.wait(max(0.0, timeout_s)):
            self._stalled(f"{kind} {number} did not come round in {timeout_s:.0f} s")
        return self.whole

    def switch(self, version: int) -> Callable[[float], bool]:
        """Send SWITCH; the returned function waits for it to come round, like ask()."""
        awaited = self._tell(Kind.SWITCH, version)

        def wait(timeout_s: float) -> bool:
            if not awaited.over.wait(timeout_s):
                self._stalled(f"switch {version} did not come round in {timeout_s:.0f} s")
            return self.whole

        return wait

    def submit(self, body: bytes, rows: int) -> "tuple[Frame | None, Future[Frame | None]]":
        """Number a micro-batch in which `rows` sequences draw; its frame is for the computing side to send.

        None if there is nowhere to send it to. The future's result is its DRAWN, or None if none comes.
        """
        answer: Future[Frame | None] = Future()
        now = time.monotonic()
        with self._lock:
            port = self._port
            if self._fault or port is None:
                answer.set_result(None)
                return None, answer
            number, self._number = self._number, self._number + 1
            self._sent.append(Sent(number, now, answer))
            if rows:  # parts of prompts alone take another time
                self._batches.sent(number, now)
            return Frame(Kind.STEP, self._epoch, number, body), answer

    def fail(self, words: str) -> None:
        """Give the chain up, and tell the others why."""
        if self._fault:
            return
        self._break(words)
        self._leave(Frame(Kind.FAULT, self._epoch, 0, words.encode()[:MAX_WORDS]))

    def close(self) -> None:
        """End it; everything in flight is answered by None."""
        self._stalled("the engine was closed")

    # -- this thread -------------------------------------------------------------------------------

    def _tell(self, kind: Kind, number: int) -> Awaited:
        awaited = Awaited(kind, number, threading.Event())
        with self._lock:
            if self._fault:
                awaited.over.set()
                return awaited
            self._awaited = awaited
        self._leave(Frame(kind, self._epoch, number))
        return awaited

    def _leave(self, frame: Frame) -> None:
        port = self._port
        if port is not None:
            try:
                port.send(frame)
            except PortClosed as error:
                self._gone(port, error)

    def _gone(self, port: Port, error: PortClosed) -> None:
        if self._port is port:  # and not one before it
            self._port = None
            self._break(f"the node's process has gone ({error})")

    def _break(self, words: str) -> None:
        with self._lock:
            if not self._fault:
                logger.warning("the pipeline is broken: %s", words)
            self._fault = self._fault or words
            sent, self._sent = self._sent, deque()
            awaited, self._awaited = self._awaited, None
        for one in sent:
            one.answer.set_result(None)
        if awaited is not None:
            awaited.over.set()

    def _stalled(self, words: str) -> None:
        """Close the port, as nothing comes any more: threads that wait to send are freed."""
        port, self._port = self._port, None
        self._break(words)
        if port is not None:
            port.close()

    # -- the other one --------------------------------------------------------------------------

    def _receive(self, port: Port) -> None:
        try:
            while True:
                try:
                    self._take(port.receive(LATE_POLL_S))
                except PortTimeout:
                    self._look()
        except PortClosed as error:
            self._gone(port, error)

    def _look(self) -> None:
        with self._lock:
            late = bool(self._sent) and time.monotonic() - self._sent[0].at > self._stall_s
        if late:
            self._stalled(f"a micro-batch was not back after {self._stall_s:.0f} s")

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.PING:
            self._leave(frame)
        elif frame.epoch != self._epoch or self._fault:
            return
        elif frame.kind is Kind.FAULT:
            words = frame.body.decode(errors="replace")
            self._break(f"stage {frame.number}: {words}")
        elif frame.kind is Kind.DRAWN:
            self._answer(frame)
        elif (awaited := self._awaited) is not None:
            if (frame.kind, frame.number) == (awaited.kind, awaited.number):
                self._awaited = None
                awaited.over.set()

    def _answer(self, frame: Frame) -> None:
        now = time.monotonic()
        with self._lock:
            one = self._sent.popleft() if self._sent else None
            if one is not None and one.number == frame.number:
                busy_s, waited_s = frame.busy_us / 1e6, frame.waited_us / 1e6
                self._batches.back(frame.number, busy_s, waited_s, now)
            elif one is not None:
                self._sent.appendleft(one)
                one = None
        if one is None:
            self.fail(f"the last stage answered micro-batch {frame.number} out of turn")
        else:
            one.answer.set_result(frame)
