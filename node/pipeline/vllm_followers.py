"""Follower processes: tensor-parallel ranks commanded by another process of this host.

- On stage 0 all ranks are followers, so that the scheduler has a process to itself; elsewhere all but the
  first.
- Every rank gets the same calls in the same order, as collectives wait for all ranks. A rank that fails or ends
  therefore ends all of them.
- These pipes carry pickled objects, which is safe between our own processes of one machine only.
"""

import itertools
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ..errors import EngineError, named_line

logger = logging.getLogger(__name__)

ANSWER_S = 1800.0
"""Longest wait for an answer: compiling a large model takes minutes. A rank that dies is noticed at once."""
JOIN_S = 5.0
FAILED = 70
"""Exit code of a rank that ends because another one did."""

Call = Callable[[str, Sequence[Any]], Any]
"""Calls a method of the worker by name."""
Main = Callable[..., None]
"""main(rank, ordered, concurrent, *arguments) of a follower's process; importable by name."""


class RankPipes:
    """One pipe to each follower; a thread at its other end executes the calls in order."""

    def __init__(self, pipes: Sequence[Connection], answer_s: float = ANSWER_S) -> None:
        self._pipes = pipes
        self._answer_s = answer_s
        self._numbers = itertools.count(1)
        self._sending, self._reading = threading.Lock(), threading.Lock()

    def notify(self, method: str, *arguments: Any) -> None:
        """Call a method on all followers without waiting; a follower where it fails ends."""
        with self._sending:
            self._send(self._pipes, 0, method, arguments)

    def notify_first(self, method: str, *arguments: Any) -> None:
        """Call a method on the first follower without waiting, like notify()."""
        with self._sending:
            self._send(self._pipes[:1], 0, method, arguments)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all followers; return their results.

        Raises EngineError if one raised it, RuntimeError if one failed otherwise or did not answer in time.
        """
        return self.begin(method, *arguments)()

    def begin(self, method: str, *arguments: Any) -> Callable[[], list[Any]]:
        """Begin a call(); the returned function waits for the results. Run it before the next call."""
        with self._sending:
            number = next(self._numbers)
            self._send(self._pipes, number, method, arguments)
        return lambda: self._answers(number, method)

    def _send(
        self, pipes: Sequence[Connection], number: int, method: str, arguments: Sequence[Any]
    ) -> None:
        if pipes:
            order = ForkingPickler.dumps((number, method, arguments))
            for pipe in pipes:
                pipe.send_bytes(order)

    def _answers(self, number: int, method: str) -> list[Any]:
        with self._reading:
            answers = [self._answer(pipe, number, method) for pipe in self._pipes]
        for fault, refused, _ in answers:
            if fault:
                raise (
                    EngineError(fault) if refused else RuntimeError(f"another rank failed: {fault}")
                )
        return [value for _, _, value in answers]

    def _answer(self, pipe: Connection, number: int, method: str) -> tuple[str, bool, Any]:
        until = time.monotonic() + self._answer_s
        while pipe.poll(max(0.0, until - time.monotonic())):
            answered, *answer = pipe.recv()
            if answered == number:  # skip answers to calls that were given up
                return tuple(answer)
        raise RuntimeError(f"another rank did not answer {method} in {self._answer_s:.0f} s")


class Followers:
    """Starts and watches the follower processes. Call start() first, close() last."""

    def __init__(
        self, count: int, lost: Callable[[], None] | None = None, *, first: int = 1
    ) -> None:
        """Manage ranks `first` to `first + count - 1`.

        `lost` is called in a thread of its own when one of them ends; by default this process then ends too.
        """
        self._count, self._first = count, first
        self._lost = lost or _end
        self._closing = False
        self._processes: list[Any] = []
        self.ordered = RankPipes(())
        """For calls that all ranks execute in one order: steps, and weight writes between steps."""
        self.concurrent = RankPipes(())
        """For calls that run beside the steps, in a thread of their own."""

    def __len__(self) -> int:
        return self._count

    def start(self, main: Main, *arguments: Any) -> None:
        """Start the processes without waiting for them."""
        context = multiprocessing.get_context("spawn")
        pipes: tuple[list[Connection], list[Connection]] = ([], [])
        for rank in range(self._first, self._first + self._count):
            pairs = [context.Pipe() for _ in pipes]
            theirs = [pair[1] for pair in pairs]
            process = context.Process(
                target=main, args=(rank, *theirs, *arguments), name=f"rank {rank}", daemon=True
            )
            process.start()
            self._processes.append(process)
            for own, (ours, other) in zip(pipes, pairs, strict=True):
                own.append(ours)
                other.close()
        self.ordered, self.concurrent = map(RankPipes, pipes)
        if self._processes:
            threading.Thread(target=self._watch, name="primerl-ranks", daemon=True).start()

    def close(self) -> None:
        """Kill the processes, which have no state to save."""
        self._closing = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(JOIN_S)

    def _watch(self) -> None:
        connection.wait([process.sentinel for process in self._processes])
        if not self._closing:
            self._lost()


def serve_calls(pipe: Connection, call: Call) -> None:
    """Execute the calls that arrive on `pipe` until it closes.

    Raises the errors of notify() calls.
    """
    while True:
        try:
            number, method, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        if not number:
            call(method, arguments)
            continue
        try:
            answer = number, "", False, call(method, arguments)
        except EngineError as error:
            answer = number, str(error), True, None
        except Exception as error:  # vLLM raises anything: the caller has to get it
            traceback.print_exc()
            words = named_line(error)
            answer = number, words, False, None
        pipe.send(answer)


def end_with_first() -> None:
    """End this follower when the process that started it ends, even while it is blocked."""
    first = multiprocessing.parent_process()
    if first is None:
        raise EngineError("this process was not started by another rank")

    def watch() -> None:
        connection.wait([first.sentinel])
        os._exit(FAILED)

    threading.Thread(target=watch, name="primerl-first-rank", daemon=True).start()


def _end() -> None:
    sys.stderr.write("a rank of this stage has ended: all its ranks end\n")
    sys.stderr.flush()
    os._exit(FAILED)
