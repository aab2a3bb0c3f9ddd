"""The process that runs an environment for a node: a taskset's code may hang, spin or crash here only.

A request's code is marked as it runs, in memory that the node reads when this process is lost: so it knows
whose fault that was. Code that keeps the event loop for longer than the config allows ends the process, by a
timer that needs no Python to run; it writes where the code stood to the standard error.
"""

import asyncio
import faulthandler
import mmap
import os
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from ..config.run import EnvironmentConfig
from ..inference.engine import Completion
from ..ops.errors import named_line
from ..process.serve import Outbox, serve_parent
from .environment import (
    Environment,
    EnvironmentFailed,
    EnvironmentStuck,
    Policy,
    ScoreMismatch,
)
from .exchange import clock
from .host_frames import (
    FAILED,
    MARK_BYTES,
    MARK_VARIABLE,
    MISMATCH,
    STUCK,
    Answer,
    Done,
    Drop,
    Failed,
    Look,
    Looked,
    Ping,
    Play,
    Played,
    Pong,
    Reply,
    Request,
    Rescore,
    Scored,
    SetUp,
    Turn,
    pack_mark,
    read_request,
)
from .transcript import Transcript
from .verifiers import VerifiersEnvironment

TICK_S = 1.0
"""Between two settings of the timer that ends this process, at most."""

_asking: ContextVar[int] = ContextVar("_asking", default=0)
"""The number of the request that this code belongs to."""


class Steps:
    """Whose code runs just now, and for how long: every step of a request's tasks passes here.

    The mark lies in memory that the node sees too; a step that takes too long ends the process.
    """

    def __init__(self, descriptor: int) -> None:
        self._shared = mmap.mmap(descriptor, MARK_BYTES)
        self._number = 0
        self._count = 0
        self._spent: dict[int, float] = {}
        """Seconds of code, by request."""
        self._all_spent = 0.0
        self._limit_s = 0.0
        self._set_again = 0.0

    def limit(self, seconds: float) -> None:
        """End this process when a step, or the event loop, takes so long; counted from now."""
        self._limit_s = seconds
        self._set_timer(time.monotonic())

    def keep(self) -> None:
        """The event loop runs."""
        self._set_timer(time.monotonic())

    @contextmanager
    def step(self, number: int) -> Generator[None]:
        """A request's code runs inside."""
        before, began = self._number, time.monotonic()
        if began >= self._set_again:
            self._set_timer(began)
        self._mark(number)
        try:
            yield
        finally:
            self._mark(before)
            took = time.monotonic() - began
            self._all_spent += took
            self._spent[number] = self._spent.get(number, 0.0) + took

    def clock(self, number: int) -> float:
        """Seconds that count for a request: not those that others' code took."""
        return time.monotonic() - (self._all_spent - self._spent.get(number, 0.0))

    def forget(self, number: int) -> None:
        """A request has ended."""
        self._all_spent -= self._spent.pop(number, 0.0)

    def _mark(self, number: int) -> None:
        self._number = number
        self._count += 1
        self._shared[:MARK_BYTES] = pack_mark(number, self._count)

    def _set_timer(self, now: float) -> None:
        self._set_again = now + min(TICK_S, self._limit_s / 4)
        if self._limit_s:
            faulthandler.dump_traceback_later(self._limit_s, exit=True)


class Marked(Coroutine[Any, Any, Any]):
    """A coroutine of a request: every step of it is marked with the request's number."""

    def __init__(self, inner: Coroutine[Any, Any, Any], number: int, steps: Steps) -> None:
        self._inner = inner
        self._number = number
        self._steps = steps

    def send(self, value: Any) -> Any:
        """See Coroutine."""
        with self._steps.step(self._number):
            return self._inner.send(value)

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        """See Coroutine."""
        with self._steps.step(self._number):
            return self._inner.throw(kind)

    def close(self) -> None:
        """See Coroutine."""
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()


def mark_tasks(steps: Steps) -> Callable[..., asyncio.Task[Any]]:
    """A task factory under which whatever a request starts is marked as the request's, too."""

    def make(
        loop: asyncio.AbstractEventLoop, inner: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        number = _asking.get()
        marked = Marked(inner, number, steps) if number else inner
        return asyncio.Task(marked, loop=loop, **options)

    return make


class EnvironmentHost:
    """Answers requests until close(); a SetUp comes first."""

    def __init__(self, outbox: Outbox, make: Callable[[SetUp], Environment], steps: Steps) -> None:
        self._outbox = outbox
        self._make = make
        self._steps = steps
        self._environment: Environment | None = None
        self._timeout_s = 0.0
        self._start_timeout_s = 0.0
        self._loading = 0
        """Requests under way that may load the taskset, and so take start_timeout_s."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._replies: dict[int, asyncio.Future[Completion]] = {}
        self._ticking: asyncio.Task[None] | None = None

    def take(self, request: Request) -> None:
        """Begin to answer."""
        match request:
            case Drop():
                if (task := self._tasks.get(request.number)) is not None:
                    task.cancel()
            case Ping():
                status = self._environment.status if self._environment else ""
                self._outbox.put(Pong(request.number, status))
            case Reply():
                reply = self._replies.pop(request.number, None)
                if reply is not None and not reply.done():
                    reply.set_result(request.completion)
            case _:
                token = _asking.set(request.number)
                task = asyncio.create_task(self._answer(request))
                _asking.reset(token)
                self._tasks[request.number] = task
                task.add_done_callback(lambda _: self._ended(request.number))

    async def close(self) -> None:
        """Give everything up."""
        tasks = [*self._tasks.values(), *([self._ticking] if self._ticking else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._environment is not None:
            await self._environment.close()

    def _ended(self, number: int) -> None:
        self._tasks.pop(number, None)
        self._steps.forget(number)

    async def _tick(self) -> None:
        while True:
            self._steps.keep()
            await asyncio.sleep(min(TICK_S, self._timeout_s / 4))

    @contextmanager
    def _loads(self) -> Generator[None]:
        """The taskset may be loaded inside, which has a limit of its own."""
        self._loading += 1
        self._steps.limit(self._start_timeout_s)
        try:
            yield
        finally:
            self._loading -= 1
            if not self._loading:
                self._steps.limit(self._timeout_s)

    async def _answer(self, request: SetUp | Look | Play | Rescore) -> None:
        number = request.number
        clock.set(partial(self._steps.clock, number))
        try:
            self._outbox.put(await self._do(request))
            return
        except ScoreMismatch as error:
            answer = Failed(number, str(error), MISMATCH)
        except EnvironmentStuck as error:
            answer = Failed(number, str(error), STUCK)
        except EnvironmentFailed as error:
            answer = Failed(number, str(error), FAILED)
        except Exception as error:  # an environment's own code raises what it likes
            answer = Failed(number, named_line(error), FAILED)
        self._outbox.put(answer)

    async def _do(self, request: SetUp | Look | Play | Rescore) -> Answer:
        if isinstance(request, SetUp):
            return await self._set_up(request)
        environment, number = self._environment, request.number
        if environment is None:
            raise EnvironmentFailed("nothing was set up: send a SetUp first")
        match request:
            case Look():
                return await self._look(environment, request)
            case Play():
                episode = await environment.run(request.task, self._policy(number))
                return Played(number, episode)
            case Rescore():
                return Scored(number, await environment.score(request.task, request.branches))

    async def _set_up(self, request: SetUp) -> Done:
        config = EnvironmentConfig.model_validate_json(request.config)
        self._timeout_s, self._start_timeout_s = config.timeout_s, config.start_timeout_s
        environment = self._environment = self._make(request)
        with self._loads():
            self._ticking = asyncio.create_task(self._tick(), name="timer")
            await environment.start()
        return Done(request.number)

    async def _look(self, environment: Environment, request: Look) -> Looked:
        with self._loads():
            task = await environment.task(request.index, request.split)
        return Looked(
            request.number,
            task.digest,
            await environment.prompt(task),
            await environment.demonstration(task),
        )

    def _policy(self, number: int) -> Policy:
        """Asks the node, one turn after the other."""
        turns = asyncio.Lock()

        async def policy(prompt: Any, turn: int) -> Completion:
            async with turns:
                reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
                self._replies[number] = reply
                self._outbox.put(Turn(number, turn, list(prompt)))
                try:
                    return await reply
                finally:
                    self._replies.pop(number, None)

        return policy


def make_environment(request: SetUp) -> Environment:
    """The environment that a SetUp asks for, not started."""
    return VerifiersEnvironment(
        EnvironmentConfig.model_validate_json(request.config),
        model_dir=Path(request.model_dir),
        seed=request.seed,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        chat=Transcript() if request.text else None,
    )


def main(environment: Callable[[SetUp], Environment]) -> None:
    """Answer at the standard input and output; what a taskset prints goes to the standard error."""
    steps = Steps(int(os.environ[MARK_VARIABLE]))

    def make(outbox: Outbox) -> EnvironmentHost:
        asyncio.get_running_loop().set_task_factory(mark_tasks(steps))
        return EnvironmentHost(outbox, environment, steps)

    serve_parent(read_request, make)


if __name__ == "__main__":
    main(make_environment)
