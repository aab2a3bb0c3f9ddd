"""Serve a stage that does not schedule: take a frame, carry it out, pass on the result.

Everything in order. After a fault nothing more of that chain is computed, until a RESET begins another one.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from ..ops.errors import EngineError
from .frames import Frame, Kind, fault_frame
from .ports import DEPTH, Port, PortClosed

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks whether anything leaves any more."""
FLUSH_S = 1.0
"""How long last words may take to leave."""


Later = Callable[[], Frame]
"""Waits for a micro-batch that a device computes, in another thread. Raises EngineError."""


class StageCompute(Protocol):
    """What a stage that does not schedule computes with; see stage_loop.py. Called by one thread."""

    def reset(self) -> None:
        """Forget all sequences."""
        ...

    def switch(self, version: int) -> None:
        """Write the weights that were prepared for `version`. Raises EngineError if none were."""
        ...

    def step(self, frame: Frame) -> "Frame | Later":
        """Compute a micro-batch: the frame for the next stage, or the drawn tokens. Raises EngineError.

        A stage on a device may return a function that waits for it: the next micro-batch is begun meanwhile.
        """
        ...


@dataclass
class LoopStats:
    """How a stage spent its time."""

    steps: int = 0
    busy_s: float = 0.0
    """Computing micro-batches."""
    idle_s: float = 0.0
    """Between two micro-batches of one chain, with nothing to do."""

    @property
    def stall_share(self) -> float:
        """Share of the time in which it had nothing to do, 0 to 1."""
        whole = self.busy_s + self.idle_s
        return self.idle_s / whole if whole else 0.0


def serve(port: Port, compute: StageCompute, *, rank: int, stats: LoopStats | None = None) -> None:
    """Carry out the frames that come through `port` until it closes; it is closed on every way out.

    An EngineError becomes a FAULT of that chain. Any other error is a bug: it is raised, and the
    other end of the port sees it close.
    """
    loop = _Loop(compute, rank, stats or LoopStats())
    sender = _Sender(port, loop)
    try:
        while True:
            sender.put(loop.answer(port.receive()))
    except PortClosed as error:
        logger.debug("stage %d ends: %s", rank, error)
    finally:
        sender.close()


@dataclass(frozen=True)
class _Begun:
    """A micro-batch that a device computes."""

    frame: Frame
    later: Later
    at: float


class _Sender:
    """Sends answers in order; waits for device and port, so that the computing thread need not."""

    def __init__(self, port: Port, loop: "_Loop") -> None:
        self._port = port
        self._loop = loop
        self._queue: queue.SimpleQueue[Frame | _Begun | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(DEPTH)
        self._bug: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="primerl-answers", daemon=True)
        self._thread.start()

    def put(self, answer: Frame | _Begun | None) -> None:
        """Send it behind earlier answers; None is nothing. Waits while too much waits. Raises PortClosed."""
        if answer is None:
            return
        while not self._room.acquire(timeout=LOOK_S):
            if not self._thread.is_alive():
                raise PortClosed("nothing can be sent any more")
        self._queue.put(answer)

    def close(self) -> None:
        """Close the port behind the answers that can leave in time. Raises the error of the sending thread."""
        self._queue.put(None)
        self._thread.join(FLUSH_S)
        self._port.close()
        self._thread.join()
        if self._bug is not None:
            raise self._bug

    def _run(self) -> None:
        try:
            while (one := self._queue.get()) is not None:
                self._room.release()
                answer = self._loop.finish(one) if isinstance(one, _Begun) else one
                if answer is not None:
                    self._port.send(answer)
        except PortClosed:
            pass
        except BaseException as error:  # a bug: serve() raises it as soon as it sees the port close
            self._bug = error
            self._port.close()


class _Loop:
    """Which chain it is, and whether it is still of use. finish() may be called by another thread."""

    def __init__(self, compute: StageCompute, rank: int, stats: LoopStats) -> None:
        self._compute = compute
        self._rank = rank
        self._stats = stats
        self._epoch = -1
        self._broken = -1
        """The newest chain that cannot go on."""
        self._done: float | None = None
        """When the last micro-batch of this chain was; waiting for the first one is not idling."""

    def answer(self, frame: Frame) -> Frame | _Begun | None:
        """What to send for `frame`; None for what belongs to another chain."""
        if frame.kind in (Kind.PING, Kind.FAULT, Kind.DRAWN):
            return frame
        if frame.kind is Kind.RESET:
            if frame.epoch <= self._epoch:
                return None
            self._epoch, self._done = frame.epoch, None
        elif frame.epoch != self._epoch or self._broken == self._epoch:
            return None
        try:
            return self._do(frame)
        except EngineError as error:
            return self._break(frame.epoch, error)

    def finish(self, begun: _Begun) -> Frame | None:
        """Wait for a micro-batch that was begun: its answer; None if its chain is of no use any more."""
        if self._broken == begun.frame.epoch:
            return None
        try:
            return self._timed(begun.frame, begun.later(), begun.at)
        except EngineError as error:
            return self._break(begun.frame.epoch, error)

    def _do(self, frame: Frame) -> Frame | _Begun:
        if frame.kind is Kind.RESET:
            self._compute.reset()
            return frame
        if frame.kind is Kind.SWITCH:
            self._compute.switch(frame.number)
            return frame
        begin = time.monotonic()
        answer = self._compute.step(frame)
        if isinstance(answer, Frame):
            return self._timed(frame, answer, begin)
        return _Begun(frame, answer, begin)

    def _timed(self, frame: Frame, answer: Frame, at: float) -> Frame:
        """`answer` with how long it took, from when those before it were done; until then it waited."""
        before, now = self._done, time.monotonic()
        begin = at if before is None else max(at, before)
        if frame.epoch == self._epoch:
            self._done = now
        self._stats.steps += 1
        self._stats.busy_s += now - begin
        if before is not None:
            self._stats.idle_s += begin - before
        busy = max(frame.busy_us, int((now - begin) * 1e6))
        waited = frame.waited_us + int((begin - at) * 1e6)
        return replace(answer, busy_us=busy, waited_us=waited)

    def _break(self, epoch: int, error: EngineError) -> Frame:
        logger.warning("stage %d cannot go on: %s", self._rank, error)
        self._broken = max(self._broken, epoch)
        return fault_frame(epoch, self._rank, str(error))
