"""Serve a later stage: receive frames, execute them in order, send the results.

After a fault nothing more of that ring epoch is computed, until a RESET begins a new one.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from ..errors import EngineError
from .frames import Frame, Kind, fault_frame
from .ports import DEPTH, Port, PortClosed

logger = logging.getLogger(__name__)

CHECK_S = 1.0
"""Interval between checks that the sending thread is alive."""
FLUSH_S = 1.0
"""Longest wait of close() for queued answers to be sent."""


Later = Callable[[], Frame]
"""Waits for a micro-batch that a device computes; called in the sending thread. Raises EngineError."""


class StageCompute(Protocol):
    """The computation of a later stage. Called by one thread."""

    def reset(self) -> None:
        """Drop all sequences."""
        ...

    def switch(self, version: int) -> None:
        """Apply the weights prepared for `version`. Raises EngineError if there are none."""
        ...

    def step(self, frame: Frame) -> "Frame | Later":
        """Compute a micro-batch; return the frame for the next stage, or the sampled tokens.

        On a device, may return a function that waits for the result, so that the next micro-batch can begin.
        Raises EngineError.
        """
        ...


def serve(port: Port, compute: StageCompute, *, rank: int) -> None:
    """Execute the frames received on `port` until it closes; always closes it.

    An EngineError becomes a FAULT of the ring epoch. Any other exception is a bug and is raised.
    """
    loop = _Loop(compute, rank)
    sender = _Sender(port, loop)
    try:
        while True:
            sender.put(loop.answer(port.receive()))
    except PortClosed as error:
        logger.debug("stage %d ends: %s", rank, error)
    finally:
        sender.close()


@dataclass(frozen=True)
class _Computing:
    """A micro-batch that a device is computing."""

    frame: Frame
    later: Later
    at: float


class _Sender:
    """Sends answers in order, waiting for device and port in place of the computing thread."""

    def __init__(self, port: Port, loop: "_Loop") -> None:
        self._port = port
        self._loop = loop
        self._queue: queue.SimpleQueue[Frame | _Computing | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(DEPTH)
        self._bug: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="primerl-answers", daemon=True)
        self._thread.start()

    def put(self, answer: Frame | _Computing | None) -> None:
        """Queue an answer (None: no answer), waiting while the queue is full. Raises PortClosed."""
        if answer is None:
            return
        while not self._room.acquire(timeout=CHECK_S):
            if not self._thread.is_alive():
                raise PortClosed("the sending thread has ended")
        self._queue.put(answer)

    def close(self) -> None:
        """Send queued answers within FLUSH_S, close the port, raise the thread's error, if any."""
        self._queue.put(None)
        self._thread.join(FLUSH_S)
        self._port.close()
        self._thread.join()
        if self._bug is not None:
            raise self._bug

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._room.release()
                answer = self._loop.finish(item) if isinstance(item, _Computing) else item
                if answer is not None:
                    self._port.send(answer)
        except PortClosed:
            pass
        except BaseException as error:  # a bug: serve() raises it as soon as it sees the port close
            self._bug = error
            self._port.close()


class _Loop:
    """Executes frames and tracks the ring epoch and its failure.

    finish() may run in another thread.
    """

    def __init__(self, compute: StageCompute, rank: int) -> None:
        self._compute = compute
        self._rank = rank
        self._epoch = -1
        self._failed = -1
        """Newest epoch that failed."""
        self._done: float | None = None
        """Time when the last micro-batch of this epoch ended."""

    def answer(self, frame: Frame) -> Frame | _Computing | None:
        """Execute `frame` and return the answer; None for frames of another epoch."""
        if frame.kind in (Kind.PING, Kind.FAULT, Kind.DRAWN):
            return frame
        if frame.kind is Kind.RESET:
            if frame.epoch <= self._epoch:
                return None
            self._epoch, self._done = frame.epoch, None
        elif frame.epoch != self._epoch or self._failed == self._epoch:
            return None
        try:
            return self._execute(frame)
        except EngineError as error:
            return self._fail(frame.epoch, error)

    def finish(self, computing: _Computing) -> Frame | None:
        """Wait for a micro-batch and return its answer; None if its epoch failed meanwhile."""
        if self._failed == computing.frame.epoch:
            return None
        try:
            return self._timed(computing.frame, computing.later(), computing.at)
        except EngineError as error:
            return self._fail(computing.frame.epoch, error)

    def _execute(self, frame: Frame) -> Frame | _Computing:
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
        return _Computing(frame, answer, begin)

    def _timed(self, frame: Frame, answer: Frame, at: float) -> Frame:
        """Add the micro-batch's compute and waiting time to `answer`.

        It waited from `at` until the previous micro-batch ended, and was computed from then on.
        """
        before, now = self._done, time.monotonic()
        begin = at if before is None else max(at, before)
        if frame.epoch == self._epoch:
            self._done = now
        busy = max(frame.busy_us, int((now - begin) * 1e6))
        waited = frame.waited_us + int((begin - at) * 1e6)
        return replace(answer, busy_us=busy, waited_us=waited)

    def _fail(self, epoch: int, error: EngineError) -> Frame:
        logger.warning("stage %d failed: %s", self._rank, error)
        self._failed = max(self._failed, epoch)
        return fault_frame(epoch, self._rank, str(error))
