"""Ranks of a stage in processes of their own, which another process of this host commands.

Of stage 0 these are all ranks, so that its scheduler has a process to itself; elsewhere all but the first.
Every rank is told the same in the same order, as what one computes waits for the others; so one that fails or
ends, ends all of them. They are this machine's own processes, the only ones that take objects from each other.
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

from ..ops.errors import EngineError, named_line

logger = logging.getLogger(__name__)

ANSWER_S = 1800.0
"""For a large model to be compiled; a rank that dies meanwhile is noticed at once."""
JOIN_S = 5.0
FAILED = 70
"""Exit code of a rank that ends because another one did."""

Call = Callable[[str, Sequence[Any]], Any]
"""Does what a method of the worker does."""
Main = Callable[..., None]
"""main(rank, turns, beside, *arguments) of a follower's process; it can be found by its name."""


class RankPipes:
    """A pipe to each follower, at whose other end a thread carries out orders one after the other."""

    def __init__(self, pipes: Sequence[Connection], answer_s: float = ANSWER_S) -> None:
        self._pipes = pipes
        self._answer_s = answer_s
        self._numbers = itertools.count(1)
        self._sending, self._reading = threading.Lock(), threading.Lock()

    def tell(self, method: str, *arguments: Any) -> None:
        """Have all of them do it without waiting; one that cannot ends."""
        with self._sending:
            self._send(self._pipes, 0, method, arguments)

    def tell_first(self, method: str, *arguments: Any) -> None:
        """As tell(), but only the first of them."""
        with self._sending:
            self._send(self._pipes[:1], 0, method, arguments)

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """What each of them answers. Raises EngineError if one refused, RuntimeError if one failed."""
        return self.begin(method, *arguments)()

    def begin(self, method: str, *arguments: Any) -> Callable[[], list[Any]]:
        """Ask; the returned function waits for the answers, and is called before anything else is asked."""
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
            found = [self._answer(pipe, number, method) for pipe in self._pipes]
        for fault, refused, _ in found:
            if fault:
                raise (
                    EngineError(fault) if refused else RuntimeError(f"another rank failed: {fault}")
                )
        return [value for _, _, value in found]

    def _answer(self, pipe: Connection, number: int, method: str) -> tuple[str, bool, Any]:
        until = time.monotonic() + self._answer_s
        while pipe.poll(max(0.0, until - time.monotonic())):
            found, *answer = pipe.recv()
            if found == number:  # and not of a question whose asker gave up
                return tuple(answer)
        raise RuntimeError(f"another rank did not answer {method} in {self._answer_s:.0f} s")


class Followers:
    """start() first, close() last."""

    def __init__(
        self, count: int, lost: Callable[[], None] | None = None, *, first: int = 1
    ) -> None:
        """Ranks `first` and up. `lost` is called in a thread of its own when one of them ends; else this
        process ends too."""
        self._count, self._first = count, first
        self._lost = lost or _end
        self._closing = False
        self._processes: list[Any] = []
        self.turns = RankPipes(())
        """For what all ranks do together, and so in one order: steps, and weights between two of them."""
        self.beside = RankPipes(())
        """For what they do beside that, in a thread of its own."""

    def __len__(self) -> int:
        return self._count

    def start(self, main: Main, *arguments: Any) -> None:
        """Start the processes; nothing is waited for."""
        context = multiprocessing.get_context("spawn")
        lines: tuple[list[Connection], list[Connection]] = ([], [])
        for rank in range(self._first, self._first + self._count):
            pairs = [context.Pipe() for _ in lines]
            theirs = [pair[1] for pair in pairs]
            process = context.Process(
                target=main, args=(rank, *theirs, *arguments), name=f"rank {rank}", daemon=True
            )
            process.start()
            self._processes.append(process)
            for line, (ours, other) in zip(lines, pairs, strict=True):
                line.append(ours)
                other.close()
        self.turns, self.beside = map(RankPipes, lines)
        if self._processes:
            threading.Thread(target=self._watch, name="primerl-ranks", daemon=True).start()

    def close(self) -> None:
        """End them by force: they keep nothing."""
        self._closing = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(JOIN_S)

    def _watch(self) -> None:
        connection.wait([process.sentinel for process in self._processes])
        if not self._closing:
            self._lost()


def obey(pipe: Connection, call: Call) -> None:
    """Carry out the orders that come through `pipe` until it ends. Raises what `call` raises for a tell()."""
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
        except Exception as error:  # any exception of vLLM's: the asking rank has to hear of it
            traceback.print_exc()
            words = named_line(error)
            answer = number, words, False, None
        pipe.send(answer)


def end_with_first() -> None:
    """End this process, a follower, with the one that started it, whatever it is waiting for."""
    first = multiprocessing.parent_process()
    if first is None:
        raise EngineError("this is not a rank that another one has started")

    def watch() -> None:
        connection.wait([first.sentinel])
        os._exit(FAILED)

    threading.Thread(target=watch, name="primerl-first-rank", daemon=True).start()


def _end() -> None:
    sys.stderr.write("a rank of this stage has ended: all end, as none can go on without it\n")
    sys.stderr.flush()
    os._exit(FAILED)
