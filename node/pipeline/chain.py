"""Stage 0's end of the ring: micro-batches go out, and tokens come back in the same order, or nothing does.

Once a chain is broken every micro-batch in flight is answered by None, and so is every later one,
until begin() makes another one.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from ..ops.errors import EngineError
from .frame import Frame, Kind
from .frame_codec import MAX_WORDS
from .micro_batches import MicroBatches
from .port import Port, PortClosed, PortTimeout

logger = logging.getLogger(__name__)

STALL_S = 120.0
"""A micro-batch that is not back by then never comes; the ring's own deadlines are shorter."""
LOOK_S = 1.0
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


class Chain:
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
                    self._take(port.receive(LOOK_S))
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
