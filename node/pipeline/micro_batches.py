"""Stage 0's side of the ring: send micro-batches, receive sampled tokens in order.

After a failure every micro-batch in flight and every later one yields None, until begin() starts a new ring
epoch.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import ceil
from statistics import median
from typing import Any, NamedTuple, Protocol, TypeVar

from ..errors import EngineError
from .frames import MAX_WORDS, Frame, Kind
from .ports import Port, PortClosed, PortTimeout

WINDOW = 32
"""Micro-batches over which the idle share of the slowest stage is measured."""
MIN_TRIPS = 4
"""Fewest round trips from which the number of micro-batches is derived."""
FASTER = 0.5
"""Network time below this fraction of the earlier measurement replaces it."""
SLACK = 0.25
"""Hysteresis: the number changes only if the ratio is this far outside its range; a ratio this little above an
integer is rounded down."""


class MicroBatches:
    """Derives the number of micro-batches from measured round trips: ceil(round trip / slowest stage).

    It begins with one per stage.
    """

    def __init__(self, most: int, *, stages: int = 2, graph_rows: int = 0) -> None:
        """`most` is the plan's limit.

        `graph_rows`: sequences of the largest captured CUDA graph; larger steps take several times as long.
        0: no graphs.
        """
        self._most, self._graph_rows, self._stages = most, graph_rows, stages
        self._number = stages
        """The current number, before the limits of count()."""
        self._hops_s: float | None = None
        """Network time of a round trip, taking all stages to be as slow as the slowest; None: not measured."""
        self._changes = 0
        self._sent: dict[int, tuple[float, int]] = {}
        """Micro-batch -> (time it left stage 0, `_changes` at that time)."""
        self._trips: list[tuple[float, float]] = []
        """(round trip, compute time of the slowest stage), seconds, measured with the current number."""
        self._busy: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        """(return time, compute time of the slowest stage) of the last micro-batches, without idle gaps."""
        self._trip_s = 0.0

    def count(self, rows: int) -> int:
        """Return the number of micro-batches for `rows` sequences; at least 1, at most one per sequence.

        At least as many as keep each step within the captured graphs, if the plan's limit allows it.
        """
        graphed = ceil(rows / self._graph_rows) if self._graph_rows else 1
        return max(1, min(max(self._number, graphed), self._most, rows))

    def record_send(self, number: int, now: float) -> None:
        """Record that micro-batch `number` leaves stage 0 at `now`, seconds."""
        if not self._sent and self._busy and now > self._busy[-1][0] + self._trip_s:
            self._busy.clear()  # the pipeline had no work in between
        self._sent[number] = (now, self._changes)

    def record_return(self, number: int, busy_s: float, waited_s: float, now: float) -> None:
        """Record a return: compute time of the slowest stage and total queueing time, seconds."""
        sent = self._sent.pop(number, None)
        if sent is None or busy_s <= 0:
            return
        self._trip_s = max(busy_s, now - sent[0] - waited_s)
        self._busy.append((now, busy_s))
        if sent[1] == self._changes:
            self._trips.append((self._trip_s, busy_s))
            self._derive()

    def reset(self) -> None:
        """Discard all measurements and everything in flight, for a new ring epoch."""
        self._sent.clear()
        self._busy.clear()
        self._hops_s = None
        self._set(self._stages)

    @property
    def stall_share(self) -> float:
        """Idle share of the slowest stage's time, 0 to 1, over the last WINDOW micro-batches."""
        if len(self._busy) < 2:
            return 0.0
        whole = self._busy[-1][0] - self._busy[0][0]
        busy = sum(busy_s for _, busy_s in list(self._busy)[1:])
        return min(1.0, max(0.0, 1.0 - busy / whole)) if whole > 0 else 0.0

    def _derive(self) -> None:
        """Update the number once there are enough trips.

        Skip the first lap, which still has the old sizes.
        """
        lap = max(MIN_TRIPS, min(self._number, self._most))
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
    """The fields of vLLM's scheduler request that are used here."""

    request_id: str
    num_computed_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and those sampled so far."""
        ...


R = TypeVar("R", bound=SchedulerRequest)


def is_ready(request: SchedulerRequest) -> bool:
    """Return whether the request has tokens to compute, rather than waiting for a sampled token."""
    return request.num_tokens > request.num_computed_tokens


def without(running: list[R], lane: Sequence[R]) -> list[R]:
    """Return `running` without the requests of `lane`, in order."""
    if running[: len(lane)] == lane:  # the usual case: the chosen lane was scheduled longest ago
        return running[len(lane) :]
    names = {request.request_id for request in lane}
    return [request for request in running if request.request_id not in names]


class LaneAssignment:
    """Assigns sequences to lanes and picks the lane to schedule next.

    The scheduler reports its decisions. Between two calls requests may leave the running list, but they join it
    through set_members() only.
    """

    def __init__(self, count: Callable[[int], int]) -> None:
        """`count` maps a number of sequences to a number of lanes."""
        self._count = count
        self._lane: dict[str, int] = {}
        self._lanes = 1
        """Upper bound of the lane numbers in `_lane`, exclusive."""
        self._members: list[list[Any]] = []
        """Requests of each lane in running order, some of which may have left; empty: to be rebuilt."""
        self._in_flight: dict[int, int] = {}
        """Lane -> its micro-batches in flight that sample. Those of prompt chunks alone do not block a lane."""
        self._next = 0

    def target(self, sequences: int) -> tuple[int, int]:
        """Return the number of lanes for `sequences`, and the most sequences of a lane."""
        lanes = max(1, self._count(max(1, sequences)))
        return lanes, -(-max(1, sequences) // lanes)

    def pick(self, running: Sequence[SchedulerRequest], waiting: int, free: int) -> int | None:
        """Return the next lane with work, round-robin; None if no lane has any. Changes no state.

        Up to `free` of the `waiting` requests may be admitted.
        """
        lanes, most = self.target(len(running) + min(waiting, free))
        members = self._lane_members(running, lanes)
        in_flight = {lane % lanes for lane, count in self._in_flight.items() if count}
        for step in range(lanes):
            lane = (self._next + step) % lanes
            if lane in in_flight:
                continue
            room = waiting > 0 and free > 0 and len(members[lane]) < most
            if room or any(map(is_ready, members[lane])):
                return lane
        return None

    def take(self, lane: int, running: Sequence[R], waiting: int, free: int) -> tuple[list[R], int]:
        """Return the sequences of `lane` and its size limit; advance to the next lane.

        Sequences beyond the limit are moved to the smallest lanes.
        """
        lanes, most = self.target(len(running) + min(waiting, free))
        members = self._lane_members(running, lanes)
        lane %= lanes  # the number of lanes may have changed since pick()
        if lanes < self._lanes:
            self._renumber()
        self._lanes = lanes
        chosen = members[lane]
        if len(chosen) > most:
            self._move_surplus(lane, members, most)
            self._members = []  # moved sequences keep their position in the running list
        self._next = (lane + 1) % lanes
        return list(chosen), most

    def set_members(self, lane: int, requests: Iterable[SchedulerRequest]) -> None:
        """Set the members of `lane`."""
        members, known = list(requests), lane < len(self._members)
        if known and members == self._members[lane]:
            return
        for request in members:
            self._lane[request.request_id] = lane
        self._lanes = max(self._lanes, lane + 1)
        if known:
            self._members[lane] = members
        else:
            self._members = []

    def record_send(self, lane: int) -> None:
        """Record that a micro-batch of `lane` that samples was sent."""
        self._in_flight[lane] = self._in_flight.get(lane, 0) + 1

    def record_return(self, lane: int) -> None:
        """Record that a micro-batch of `lane` returned, or was given up."""
        self._in_flight[lane] -= 1

    def prune(self, known: Callable[[str], bool]) -> None:
        """Drop the assignments of requests that are no longer `known`."""
        self._lane = {name: lane for name, lane in self._lane.items() if known(name)}

    def __len__(self) -> int:
        """Count the assigned sequences, ended ones included."""
        return len(self._lane)

    def _lane_members(self, running: Sequence[R], lanes: int) -> list[list[R]]:
        """Return the members of each lane, rebuilt if they do not match `running`."""
        if len(self._members) != lanes or sum(map(len, self._members)) != len(running):
            members: list[list[R]] = [[] for _ in range(lanes)]
            lane_of = self._lane.get
            for request in running:
                members[lane_of(request.request_id, 0) % lanes].append(request)
            self._members = members
        return self._members

    def _renumber(self) -> None:
        """After the number of lanes fell, store every sequence's lane modulo the new number."""
        for lane, members in enumerate(self._members):
            for request in members:
                self._lane[request.request_id] = lane

    def _move_surplus(self, lane: int, members: list[list[R]], most: int) -> None:
        """Move the surplus of a lane that is not in flight to the smallest lanes."""
        surplus = members[lane]
        while len(surplus) > most:
            smallest = min(range(len(members)), key=lambda index: len(members[index]))
            if len(members[smallest]) >= most:
                return
            moved = surplus.pop()
            members[smallest].append(moved)
            self._lane[moved.request_id] = smallest


logger = logging.getLogger(__name__)

STALL_S = 120.0
"""A micro-batch that has not returned by then counts as lost; the ring's own deadlines are shorter."""
LATE_POLL_S = 1.0
"""Interval between checks for late micro-batches."""
NOT_BEGUN = "no ring epoch has begun yet"


class LaneStats(NamedTuple):
    """Micro-batch figures of stage 0."""

    lanes: int
    """Number of lanes last asked for."""
    in_flight: int
    """Micro-batches in flight."""
    stall_share: float
    """Idle share of the slowest stage's time, 0 to 1."""


@dataclass(frozen=True)
class InFlight:
    """A micro-batch in flight."""

    number: int
    at: float
    answer: "Future[Frame | None]"


@dataclass
class PendingControl:
    """A RESET or SWITCH that has not returned from the ring yet."""

    kind: Kind
    number: int
    done: threading.Event
    """Set when the frame returned, or the ring failed."""


class RingClient:
    """Stage 0's client of the ring. Call it from one thread, close() last.

    It owns a receiving thread.
    """

    def __init__(
        self, connect: Callable[[], Port], micro_batches: MicroBatches, stall_s: float = STALL_S
    ) -> None:
        """`connect` opens a port to the node's process and raises PortClosed."""
        self._connect = connect
        self._batches = micro_batches
        self._stall_s = stall_s
        self._port: Port | None = None
        self._lock = threading.Lock()
        self._sent: deque[InFlight] = deque()
        self._pending: PendingControl | None = None
        self._epoch = -1
        self._number = self._lanes = 0
        self._fault = NOT_BEGUN

    @property
    def healthy(self) -> bool:
        """Whether a ring epoch has begun and no failure of it is known."""
        return not self._fault

    @property
    def fault(self) -> str:
        """Why the ring is not healthy; empty while it is."""
        return self._fault

    def lanes(self, rows: int) -> int:
        """Return the number of micro-batches for `rows` sequences."""
        with self._lock:
            self._lanes = self._batches.count(rows)
            return self._lanes

    @property
    def lane_stats(self) -> LaneStats:
        """Current micro-batch figures."""
        with self._lock:
            return LaneStats(self._lanes, len(self._sent), self._batches.stall_share)

    def open(self) -> None:
        """Connect to the node's process, so that it sees a running engine. Raises EngineError."""
        if self._port is not None:
            return
        try:
            port = self._port = self._connect()
        except PortClosed as error:
            raise EngineError(
                f"the node's end of the pipeline cannot be reached ({error})"
            ) from error
        threading.Thread(
            target=self._receive, args=(port,), name="primerl-ring", daemon=True
        ).start()

    def begin(self, epoch: int, version: int, timeout_s: float) -> None:
        """Begin a ring epoch: all stages drop their sequences and switch to `version`.

        Micro-batches in flight yield None. Raises EngineError if the epoch is not newer or a stage fails.
        """
        if epoch <= self._epoch:
            raise EngineError(f"ring epoch {epoch} is over: begin one after {self._epoch}")
        self._set_fault("a new ring epoch begins")
        self.open()
        with self._lock:
            self._epoch, self._number, self._fault = epoch, 0, ""
            self._batches.reset()
        until = time.monotonic() + timeout_s
        for kind, number in ((Kind.RESET, 0), (Kind.SWITCH, version)):
            if not self.round_trip(kind, number, until - time.monotonic()):
                raise EngineError(f"the pipeline did not begin: {self._fault}")

    def round_trip(self, kind: Kind, number: int, timeout_s: float) -> bool:
        """Send a RESET or SWITCH and wait for its return.

        On a timeout fail the ring and return False.
        """
        return self._wait(self._send_control(kind, number), max(0.0, timeout_s))

    def switch(self, version: int) -> Callable[[float], bool]:
        """Send a SWITCH; the returned function waits for its return, like round_trip()."""
        return partial(self._wait, self._send_control(Kind.SWITCH, version))

    def submit(self, body: bytes, rows: int) -> "tuple[Frame | None, Future[Frame | None]]":
        """Number a micro-batch in which `rows` sequences sample.

        The first rank sends the returned frame. The frame is None without a healthy ring. The future yields the
        DRAWN frame, or None if it is lost.
        """
        answer: Future[Frame | None] = Future()
        now = time.monotonic()
        with self._lock:
            port = self._port
            if self._fault or port is None:
                answer.set_result(None)
                return None, answer
            number, self._number = self._number, self._number + 1
            self._sent.append(InFlight(number, now, answer))
            if rows:  # steps of prompt chunks alone take a different time
                self._batches.record_send(number, now)
            return Frame(Kind.STEP, self._epoch, number, body), answer

    def fail(self, words: str) -> None:
        """Give up the ring epoch and send the reason to the other stages."""
        if self._fault:
            return
        self._set_fault(words)
        self._send(Frame(Kind.FAULT, self._epoch, 0, words.encode()[:MAX_WORDS]))

    def close(self) -> None:
        """Close the port; everything in flight yields None."""
        self._give_up("the engine was closed")

    # -- the caller's thread -----------------------------------------------------------------------

    def _send_control(self, kind: Kind, number: int) -> PendingControl:
        pending = PendingControl(kind, number, threading.Event())
        with self._lock:
            if self._fault:
                pending.done.set()
                return pending
            self._pending = pending
        self._send(Frame(kind, self._epoch, number))
        return pending

    def _wait(self, pending: PendingControl, timeout_s: float) -> bool:
        if not pending.done.wait(timeout_s):
            self._give_up(f"{pending.kind} {pending.number} did not return in {timeout_s:.0f} s")
        return self.healthy

    def _send(self, frame: Frame) -> None:
        port = self._port
        if port is not None:
            try:
                port.send(frame)
            except PortClosed as error:
                self._port_lost(port, error)

    def _port_lost(self, port: Port, error: PortClosed) -> None:
        if self._port is port:  # and not an earlier one
            self._port = None
            self._set_fault(f"the connection to the node's process was lost ({error})")

    def _set_fault(self, words: str) -> None:
        """Fail everything in flight; the first fault stays."""
        with self._lock:
            if not self._fault:
                logger.warning("the pipeline failed: %s", words)
            self._fault = self._fault or words
            sent, self._sent = self._sent, deque()
            pending, self._pending = self._pending, None
        for batch in sent:
            batch.answer.set_result(None)
        if pending is not None:
            pending.done.set()

    def _give_up(self, words: str) -> None:
        """Set the fault and close the port, which frees threads that wait to send."""
        port, self._port = self._port, None
        self._set_fault(words)
        if port is not None:
            port.close()

    # -- the receiving thread ----------------------------------------------------------------------

    def _receive(self, port: Port) -> None:
        try:
            while True:
                try:
                    self._handle(port.receive(LATE_POLL_S))
                except PortTimeout:
                    self._check_late()
        except PortClosed as error:
            self._port_lost(port, error)

    def _check_late(self) -> None:
        with self._lock:
            late = bool(self._sent) and time.monotonic() - self._sent[0].at > self._stall_s
        if late:
            self._give_up(f"a micro-batch did not return in {self._stall_s:.0f} s")

    def _handle(self, frame: Frame) -> None:
        if frame.kind is Kind.PING:
            self._send(frame)
        elif frame.epoch != self._epoch or self._fault:
            return
        elif frame.kind is Kind.FAULT:
            words = frame.body.decode(errors="replace")
            self._set_fault(f"stage {frame.number}: {words}")
        elif frame.kind is Kind.DRAWN:
            self._answer(frame)
        elif (pending := self._pending) is not None:
            if (frame.kind, frame.number) == (pending.kind, pending.number):
                self._pending = None
                pending.done.set()

    def _answer(self, frame: Frame) -> None:
        now = time.monotonic()
        with self._lock:
            batch = self._sent.popleft() if self._sent else None
            if batch is not None and batch.number == frame.number:
                busy_s, waited_s = frame.busy_us / 1e6, frame.waited_us / 1e6
                self._batches.record_return(frame.number, busy_s, waited_s, now)
            elif batch is not None:
                self._sent.appendleft(batch)
                batch = None
        if batch is None:
            self.fail(f"the last stage answered micro-batch {frame.number} out of order")
        else:
            batch.answer.set_result(frame)
