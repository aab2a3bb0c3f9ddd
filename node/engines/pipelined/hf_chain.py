"""The thread of stage 0: sends micro-batches into the ring, takes what was drawn, and begins chains.

Everything that changes anything runs in this thread, in the order in which it was asked for; frames travel in
order, so a SWITCH between two micro-batches is between them at every stage. What was read by other weights is
read again by the new ones: a token's whole context is of the version that draws it. After a fault nothing is
sent until rejoin(), which begins with an empty ring and repeats what was under way.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from ...errors import EngineError, EngineLost
from ...pipeline.frame import Frame, Kind
from ...pipeline.frame_codec import words_of
from ...pipeline.micro_batches import MicroBatches
from ...pipeline.place import Place
from ...pipeline.port import Port, PortClosed
from ...pipeline.stage_loop import fault
from .hf_compute import HfCompute
from .hf_events import Came, Events, Gone, LaneStats, Listener, Rejoin, Sent, Write
from .hf_record import record
from .hf_rows import Pending
from .hf_schedule import Schedule
from .lane_step import pack_step
from .slices import Slice

logger = logging.getLogger(__name__)

TURN_S = 0.5
"""Longest wait before the clock is looked at."""
NO_PORT = "this node's own line is closed"
STATS_S = 0.2
"""Between two looks at the books."""


class HfChain:
    """Owns the weights of stage 0, the books and the port. start(), close()."""

    def __init__(
        self,
        place: Place,
        held: Slice,
        open_port: Callable[[], Port],
        finished: Callable[[Pending], None],
        *,
        most_rows: int,
        window_s: float,
        stall_s: float,
    ) -> None:
        self._place = place
        self._held = held
        self._finished = finished
        self._window = window_s
        self._stall = stall_s
        self._compute = HfCompute(place, held)
        self._schedule = Schedule(place.shape, min(most_rows, place.shape.max_sequences))
        self._batches = MicroBatches(place.shape.micro_batches, stages=len(place.plan.stages))
        self._events: Events = queue.SimpleQueue()
        self._listener = Listener(open_port, self._events)
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._epoch = -1
        self._joined = False
        """Whether there ever was a chain."""
        self._whole = False
        self._rejoin: Rejoin | None = None
        self._writes: list[Write] = []
        self._flight: dict[int, Sent] = {}
        self._number = 0
        self._heard = 0.0
        """When something last came, or went into an empty ring."""
        self._looked = 0.0
        self._came = 0.0
        """When the oldest of those that wait came."""
        self._generated = 0
        self._replayed = 0
        self.version = -1
        self.stats = LaneStats()
        self.broken: Future[str] = Future()
        """Set with the reason once the chain is of no use; another one for each chain."""

    # -- for other threads --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen and to compute."""
        for target, name in ((self._run, "hf pipeline"), (self._listener.run, "hf port")):
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self, event: Pending | Write | Rejoin) -> None:
        """Take it up, in order."""
        self._events.put(event)

    @property
    def alive(self) -> bool:
        """Whether it works; after an error that took it along it does not."""
        return bool(self._threads) and self._threads[0].is_alive()

    def close(self, timeout_s: float) -> None:
        """End both threads; what is pending is failed."""
        self._closing.set()
        self._listener.close()
        self._events.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    # -- this thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        why = "the engine died (its log says why): start another one"
        try:
            while not self._closing.is_set():
                self._turn()
            why = "the engine is closed: start another one"
        finally:
            self._end(why)

    def _turn(self) -> None:
        """What came meanwhile, then one micro-batch if there is one to send."""
        wait = not self._send_next()
        while True:
            try:
                event = self._events.get(block=wait, timeout=self._pause() if wait else None)
            except queue.Empty:
                break
            wait = False
            self._take(event)
        self._look_at_clock()

    def _pause(self) -> float:
        left = self._came + self._window - time.monotonic()
        return min(TURN_S, left) if self._schedule.waiting and left > 0 else TURN_S

    def _take(self, event: Came | Gone | Pending | Write | Rejoin | None) -> None:
        match event:
            case Came():
                self._listener.taken()
                if event.port is self._listener.port:
                    self._receive(event.frame, event.at)
            case Gone():
                self._break(f"this node's own line closed ({event.why})")
            case Pending():
                if not self._schedule.waiting:
                    self._came = time.monotonic()
                self._schedule.add(event)
            case Write():
                self._write(event)
            case Rejoin():
                self._begin(event)
            case _:
                pass

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        rejoin = self._rejoin
        if rejoin is not None and now > rejoin.until:
            self._break("the ring did not answer in time")
        elif self._whole and (self._flight or self._writes) and now > self._heard + self._stall:
            self._break(f"nothing came back for {self._stall:g} s")
        if now < self._looked + STATS_S:
            return
        self._looked = now
        schedule, batches = self._schedule, self._batches
        self.stats = LaneStats(
            schedule.lanes,
            len(self._flight),
            batches.ring_s,
            batches.step_s,
            batches.stall_share,
            schedule.running,
            len(schedule.waiting),
            schedule.kv_tokens / self._place.shape.kv_tokens,
            self._generated,
            self._replayed,
        )

    # -- chains -------------------------------------------------------------------------------------

    def _begin(self, rejoin: Rejoin) -> None:
        if self._rejoin is not None:
            self._break("another chain was begun")
        self._epoch = rejoin.epoch
        self._joined, self._whole = True, False
        self._rejoin = rejoin
        if self.broken.done():
            self.broken = Future()
        self._flight.clear()
        self._batches.forget()
        self._compute.reset()
        again = self._schedule.replay()
        self._replayed += again
        if again:
            logger.info("%d requests are read again from what was drawn for them", again)
        self._send(Frame(Kind.RESET, rejoin.epoch, 0))

    def _break(self, why: str, rank: int = 0, *, tell: bool = True) -> None:
        """The chain is of no use any more; who holds the other end of the port learns it too."""
        was = self._whole or self._rejoin is not None
        rejoin, self._rejoin = self._rejoin, None
        self._whole = False
        if not was:
            return
        if not self._closing.is_set():
            logger.warning("the chain of epoch %d broke: %s", self._epoch, why)
        if tell:
            self._send(fault(self._epoch, rank, why))
        if rejoin is not None and not rejoin.done.done():
            rejoin.done.set_exception(EngineLost(f"the chain did not begin: {why}"))
        if not self.broken.done():
            self.broken.set_result(why)

    def _receive(self, frame: Frame, at: float) -> None:
        if frame.epoch != self._epoch or not (self._whole or self._rejoin):
            return
        self._heard = at
        match frame.kind:
            case Kind.FAULT:
                self._break(words_of(frame.body), frame.number, tell=False)
            case Kind.RESET if self._rejoin is not None:
                if self.version < 0:
                    self._joined_again()
                else:
                    self._send(Frame(Kind.SWITCH, self._epoch, self.version))
            case Kind.SWITCH:
                self._switched(frame.number)
            case Kind.DRAWN:
                self._drawn(frame, at)
            case _:
                self._break(f"the last stage sent a {frame.kind} frame", self._last)

    @property
    def _last(self) -> int:
        return len(self._place.plan.stages) - 1

    def _joined_again(self) -> None:
        rejoin, self._rejoin = self._rejoin, None
        self._whole = True
        self._heard = time.monotonic()
        if rejoin is not None and not rejoin.done.done():
            rejoin.done.set_result(None)

    # -- weights ------------------------------------------------------------------------------------

    def _write(self, write: Write) -> None:
        try:
            self._held.write(write.prepared)
        except (EngineError, RuntimeError) as error:
            write.done.set_exception(
                EngineError(f"policy {write.prepared.version} was not written: {error}")
            )
            return
        self.version = write.prepared.version
        if not self._joined:
            write.done.set_result(None)
            return
        self._expect()
        self._writes.append(write)
        if self._whole:
            self._schedule.renew()
            self._send(Frame(Kind.SWITCH, self._epoch, self.version))

    def _switched(self, version: int) -> None:
        """All stages compute by `version` from here on."""
        while self._writes:
            write = self._writes.pop(0)
            if not write.done.done():
                write.done.set_result(None)
            if write.prepared.version == version:
                break
        if self._rejoin is not None and version == self.version:
            self._joined_again()

    # -- micro-batches ------------------------------------------------------------------------------

    def _send_next(self) -> bool:
        """Send one micro-batch, if there is one and room for it."""
        if not self._whole or len(self._flight) >= self._place.shape.micro_batches:
            return False
        if time.monotonic() >= self._came + self._window:
            self._schedule.admit(self._batches.count)
        step = self._schedule.next(self._batches.count)
        if step is None:
            return False
        began = time.monotonic()
        try:
            tensors, trail = self._compute.first(step.step, step.tokens)
        except EngineError as error:
            self._schedule.fail(step.rows, str(error))
            self._break(f"stage 0 cannot go on: {error}")
            self._close_finished(step.rows)
            return True
        now = time.monotonic()
        self._number += 1
        self._expect()
        self._flight[self._number] = Sent(step, self.version)
        if step.lane is not None:
            self._batches.sent(self._number, len(step.rows), began)
        frame = Frame(Kind.STEP, self._epoch, self._number, pack_step(step.step), tensors, trail)
        self._send(replace(frame, busy_us=int((now - began) * 1e6)))
        return True

    def _expect(self) -> None:
        """Something is sent that comes back: if nothing else is awaited, the wait begins now."""
        if not self._flight and not self._writes:
            self._heard = time.monotonic()

    def _send(self, frame: Frame) -> None:
        port = self._listener.port
        try:
            if port is None:
                raise PortClosed(NO_PORT)
            port.send(frame)
        except PortClosed as error:
            if frame.kind is not Kind.FAULT:
                self._break(str(error), tell=False)

    def _drawn(self, frame: Frame, at: float) -> None:
        sent = self._flight.pop(frame.number, None)
        if sent is None:
            self._break("the last stage answered what was never asked", self._last)
            return
        if sent.step.lane is None:
            return
        self._batches.back(frame.number, frame.busy_us / 1e6, frame.waited_us / 1e6, at)
        try:
            self._generated += record(
                frame,
                sent.step.rows,
                sent.version,
                shape=self._place.shape,
                vocab_size=self._held.vocab_size,
                crossed=self._last,
            )
        except EngineError as error:
            self._break(str(error), self._last)
            return
        self._schedule.drawn(sent.step.lane)
        self._close_finished(sent.step.rows)

    def _close_finished(self, rows: tuple[Pending, ...]) -> None:
        for row in rows:
            if not row.open:
                self._finished(row)

    def _end(self, why: str) -> None:
        """Nothing more is answered."""
        self._break(why)
        for row in self._schedule.drop_all():
            row.failed = row.failed or why
            self._finished(row)
        waiting = [one.done for one in self._writes]
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                break
            if isinstance(event, Pending):
                event.failed = why
                self._finished(event)
            elif isinstance(event, Write | Rejoin):
                waiting.append(event.done)
        for done in waiting:
            if not done.done():
                done.set_exception(EngineError(why))
