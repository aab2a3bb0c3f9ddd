"""Time that passes only while everything waits: what is computed costs none, on a busy machine neither."""

import asyncio
import functools
import gc
import hashlib
import heapq
import itertools
import math
import random
import selectors
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack
from types import FunctionType
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

P = ParamSpec("P")
T = TypeVar("T")

LOOK_EVERY, LOOK_SELDOM = 16, 256
"""Turns of a loop between two looks at its sockets: while it has work, and in a simulation from a seed, which
has no use for them."""
FAR_S = 1.0
"""Timers further away are sorted later: most of them are deadlines that are cancelled before."""
COLLECT_S = 60.0
FIXED_DATE = 1_800_000_000.0
"""Unix seconds."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock goes on at once to the next timer. Work for threads is done in place."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._collected = math.inf
        self._far: dict[int, list[asyncio.TimerHandle]] = {}
        """Timers by the second in which they are due."""
        self.selector = _Leaping(self)
        super().__init__(self.selector)

    def time(self) -> float:
        """Seconds of this loop's clock."""
        return self._now

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """See BaseEventLoop."""
        if when - self._now < FAR_S or when == math.inf:
            return super().call_at(when, callback, *args, context=context)
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        second = int(when)
        if second not in self._far:
            self._far[second] = []
            super().call_at(second, self._come_near, second)
        self._far[second].append(timer)
        return timer

    def _come_near(self, second: int) -> None:
        for timer in self._far.pop(second):
            if not timer.cancelled():
                timer._scheduled = True  # type: ignore[attr-defined]
                heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]

    def leap(self, seconds: float) -> None:
        """Let so much time pass."""
        self._now += seconds
        if self._now - self._collected >= COLLECT_S:
            self.collect()

    def collect(self) -> None:
        """Collect what nothing refers to, and again every COLLECT_S: what has a finalizer ends then."""
        gc.collect()
        self._collected = self._now

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


class _NumberedTask(asyncio.Task[Any]):
    """A task that is in sets by its number, not by its address, which another process gives to another one."""

    def __init__(self, number: int, coroutine: Any, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


def _number_tasks(loop: asyncio.AbstractEventLoop, patched: ExitStack) -> None:
    numbers = itertools.count()

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> _NumberedTask:
        return _NumberedTask(next(numbers), coroutine, loop=loop, **options)

    loop.set_task_factory(make)
    patched.callback(loop.set_task_factory, None)


class _Leaping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop
        self._calls = 0
        self.seldom = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._calls += 1
        if timeout is not None and self._calls % LOOK_SELDOM and self.seldom:
            if timeout > 0:
                self._loop.leap(timeout)
            return []
        if timeout == 0 and self._calls % LOOK_EVERY:
            return []
        events = super().select(0)
        if not events and timeout:
            self._loop.leap(timeout)
        return events


def run(work: Coroutine[Any, Any, T], *, seed: int | None = None) -> T:
    """Run `work` on a clock of its own, which time.monotonic() tells too meanwhile.

    With a `seed`, time.time() and the clocks that are defaults of arguments tell it too, from FIXED_DATE on,
    and all randomness comes from the seed: what is run again does the same, in another process too.
    """
    with ExitStack() as patched, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        clock = loop.time
        clocks: dict[Any, Any] = {time.monotonic: clock}
        if seed is not None:
            began = clock()
            clocks[time.time] = lambda: FIXED_DATE + clock() - began
            _replace_defaults(clocks, patched)
            _seed(seed, patched)
            _collect_by(loop, patched)
            loop.selector.seldom = True
            _number_tasks(loop, patched)
        for real, virtual in clocks.items():
            patched.enter_context(patch.object(time, real.__name__, virtual))
        return runner.run(work)


def _replace_defaults(clocks: Mapping[Any, Any], patched: ExitStack) -> None:
    """Put virtual clocks in place of real ones that functions of the product have as defaults."""
    for function in _functions():
        defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
        if any(value in clocks for value in (*defaults, *named.values()) if callable(value)):
            patched.callback(setattr, function, "__defaults__", function.__defaults__)
            patched.callback(setattr, function, "__kwdefaults__", function.__kwdefaults__)
            function.__defaults__ = tuple(_clock(value, clocks) for value in defaults)
            function.__kwdefaults__ = {name: _clock(value, clocks) for name, value in named.items()}


def _functions() -> Iterator[FunctionType]:
    """Yield the functions and methods of all modules of the product that are loaded."""
    modules = [module for name, module in sys.modules.items() if name.startswith("primerl.")]
    for value in [value for module in modules for value in vars(module).values()]:
        # by type(), as isinstance() wakes objects that warn of their own deprecation
        members = vars(value).values() if issubclass(type(value), type) else (value,)
        yield from (member for member in members if type(member) is FunctionType)


def _clock(value: Any, clocks: Mapping[Any, Any]) -> Any:
    return clocks.get(value, value) if callable(value) else value


def _collect_by(loop: VirtualLoop, patched: ExitStack) -> None:
    """Let the garbage collector run by the virtual clock alone, until `patched` ends.

    It runs by itself once so much was allocated, which differs between processes, and ends streams that their
    owners forgot.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    loop.collect()
    patched.callback(gc.unfreeze)
    patched.callback(gc.enable)


def _seed(seed: int, patched: ExitStack) -> None:
    """Take what the system would draw at random from `seed`, until `patched` ends.

    Each place in the code has a sequence of its own: what a library draws when it is first imported changes
    nothing for others.
    """
    counts: Counter[tuple[str, int]] = Counter()
    own = random.Random.seed

    def draw(size: int) -> bytes:
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame.f_back and frame.f_globals["__name__"] in (__name__, "random", "secrets"):
            frame = frame.f_back
        place = frame.f_globals["__name__"], frame.f_lineno
        counts[place] += 1
        return hashlib.shake_256(repr((seed, place, counts[place])).encode()).digest(size)

    def begin(self: random.Random, a: Any = None, version: int = 2) -> None:
        own(self, draw(8) if a is None else a, version)

    patched.enter_context(patch.object(random, "_urandom", draw))
    patched.enter_context(patch.object(random.Random, "seed", begin))
    patched.callback(random.setstate, random.getstate())
    random.seed(seed)


def on_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorate a test that run() is to run; its fixtures may not be asynchronous."""

    @functools.wraps(test)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return call
