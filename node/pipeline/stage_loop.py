"""What a stage that does not schedule does all day: take a frame, do what it says, pass on what came of it.

Everything in order. After a fault nothing more of that chain is computed, until a RESET begins another one.
"""

import logging
import time
from dataclasses import dataclass, replace

from ..errors import EngineError
from .frame import Frame, Kind
from .frame_codec import MAX_WORDS
from .place import StageCompute
from .port import Port, PortClosed

logger = logging.getLogger(__name__)


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
    """Compute what comes through `port` until it closes; it is closed on every way out.

    An EngineError becomes a FAULT of that chain. Any other error is a bug: it is raised, and whoever holds
    the other end of the port sees it close.
    """
    loop = _Loop(compute, rank, stats or LoopStats())
    try:
        while True:
            since = time.monotonic()
            frame = port.receive()
            if frame.kind is Kind.STEP:
                loop.idle(time.monotonic() - since)
            answer = loop.answer(frame)
            if answer is not None:
                port.send(answer)
    except PortClosed as error:
        logger.debug("stage %d ends: %s", rank, error)
    finally:
        port.close()


def fault(epoch: int, rank: int, words: str) -> Frame:
    """The frame that says so."""
    return Frame(Kind.FAULT, epoch, max(0, rank), words.encode()[:MAX_WORDS])


class _Loop:
    """Which chain it is, and whether it is still of use."""

    def __init__(self, compute: StageCompute, rank: int, stats: LoopStats) -> None:
        self._compute = compute
        self._rank = rank
        self._stats = stats
        self._epoch = -1
        self._broken = False
        self._began = False
        """Whether this chain has had a micro-batch; waiting for the first one is not idling."""

    def idle(self, seconds: float) -> None:
        """The next micro-batch was waited for so long."""
        if self._began:
            self._stats.idle_s += seconds

    def answer(self, frame: Frame) -> Frame | None:
        """What to send for `frame`; None for what belongs to another chain."""
        if frame.kind in (Kind.PING, Kind.FAULT, Kind.DRAWN):
            return frame
        if frame.kind is Kind.RESET:
            if frame.epoch <= self._epoch:
                return None
            self._epoch, self._broken, self._began = frame.epoch, False, False
        elif frame.epoch != self._epoch or self._broken:
            return None
        try:
            return self._do(frame)
        except EngineError as error:
            logger.warning("stage %d cannot go on: %s", self._rank, error)
            self._broken = True
            return fault(frame.epoch, self._rank, str(error))

    def _do(self, frame: Frame) -> Frame:
        if frame.kind is Kind.RESET:
            self._compute.reset()
            return frame
        if frame.kind is Kind.SWITCH:
            self._compute.switch(frame.number)
            return frame
        begin = time.monotonic()
        answer = self._compute.step(frame)
        took = time.monotonic() - begin
        self._began = True
        self._stats.steps += 1
        self._stats.busy_s += took
        busy = max(frame.busy_us, int(took * 1e6))
        return replace(answer, busy_us=busy, waited_us=frame.waited_us)
