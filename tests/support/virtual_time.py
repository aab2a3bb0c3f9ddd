"""Time that passes only while everything waits: what is computed costs none, on a busy machine neither."""

import asyncio
import functools
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock goes on at once to the next timer. Work for threads is done in place."""

    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__(_Leaping(self))

    def time(self) -> float:
        """Seconds of this loop's clock."""
        return self._now

    def leap(self, seconds: float) -> None:
        """Let so much time pass."""
        self._now += seconds

    def run_in_executor(
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Call `func` now."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


class _Leaping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout:
            self._loop.leap(timeout)
        return events


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on a clock of its own, which time.monotonic() tells too meanwhile."""
    real = time.monotonic
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        time.monotonic = runner.get_loop().time
        try:
            return runner.run(work)
        finally:
            time.monotonic = real


def on_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorate a test that run() is to run; its fixtures may not be asynchronous."""

    @functools.wraps(test)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return call
