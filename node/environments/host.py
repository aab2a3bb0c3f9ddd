"""Serve an environment in its own process, where a taskset's code may hang, spin or crash.

hosted.py is the node's end. Many rollouts run at once; an answer has the number of its request. A play is
answered by a turn whenever the policy has to reply; the reply has the same number and is answered like the
play. Meanwhile the environment's code may ask the judge. Invariants:
- while a request's code runs, its number is in memory shared with the node, which thereby knows the request
  that ended this process;
- if code blocks the event loop longer than the config allows, a timer that runs without Python ends the process
  and writes a traceback to standard error.
"""

import asyncio
import faulthandler
import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..config.run import EnvironmentConfig
from ..errors import named_line
from ..inference.engine import Completion
from ..process.frames import ProcessMessage
from ..process.serve import Outbox, serve_parent
from ..tasks import end_tasks
from .chat import Transcript
from .environment import (
    Branch,
    Demonstration,
    Environment,
    EnvironmentFailed,
    EnvironmentStuck,
    Episode,
    Policy,
    Score,
    ScoreMismatch,
    Split,
    Task,
)
from .policies import JudgeRefused, episode_clock, episode_judge
from .verifiers import VerifiersEnvironment

FAILED, STUCK, MISMATCH = "failed", "stuck", "mismatch"
"""Kinds of EnvironmentFailure, one for each of EnvironmentFailed, EnvironmentStuck, ScoreMismatch."""

MARK_VARIABLE = "PRIMERL_ENVIRONMENT_MARK"
"""Environment variable with the descriptor of the memory shared with the node."""
_MARK = struct.Struct("<QQ")
MARK_BYTES = _MARK.size
"""Number of the request whose code runs, and count of steps so far; 8 bytes each, little-endian."""


class EnvironmentSetUp(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    """First request: load the taskset; answered by EnvironmentReady."""

    config: bytes
    """EnvironmentConfig as JSON."""
    model_dir: str
    seed: int
    max_tokens: int
    temperature: float
    text: bool
    """Whether characters are tokens (chat.Transcript), without a tokenizer."""
    judged: bool = False
    """Whether the node answers EnvironmentAsk, so that a judge of the config can score rollouts."""


class EnvironmentLook(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """Request to prepare a task; answered by EnvironmentLooked."""

    index: int
    split: Split


class EnvironmentPlay(msgspec.Struct, frozen=True, array_like=True, tag="play"):
    """Request to play and score a task; answered by EnvironmentTurn or EnvironmentPlayed."""

    task: Task


class EnvironmentReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """Completion for the EnvironmentTurn with this message's number; answered like EnvironmentPlay."""

    completion: Completion


class EnvironmentRescore(msgspec.Struct, frozen=True, array_like=True, tag="rescore"):
    """Request to score a finished rollout; answered by EnvironmentScored."""

    task: Task
    branches: list[Branch]


class EnvironmentTold(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """Answer to the EnvironmentAsk with this message's number and this place; the request goes on."""

    place: int
    completion: bytes
    """Completion in the API's form, JSON."""
    refused: str
    """Reason why there is no completion; empty if there is one."""


class EnvironmentDrop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Cancellation of the request with this message's number."""


class EnvironmentPing(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Ping; answered by EnvironmentPong once the environment's code lets the event loop run."""


EnvironmentWork = EnvironmentSetUp | EnvironmentLook | EnvironmentPlay | EnvironmentRescore
"""Requests that run an environment's code."""
EnvironmentRequest = (
    EnvironmentWork | EnvironmentReply | EnvironmentTold | EnvironmentDrop | EnvironmentPing
)


class EnvironmentReady(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The taskset is loaded."""


class EnvironmentLooked(msgspec.Struct, frozen=True, array_like=True, tag="looked"):
    """A task, its prompt, and a good conversation if one is known."""

    digest: bytes
    prompt: list[int]
    demonstration: Demonstration | None
    place: int
    content: bytes


class EnvironmentTurn(msgspec.Struct, frozen=True, array_like=True, tag="turn"):
    """Request for the policy's reply to `prompt`."""

    turn: int
    prompt: list[int]


class EnvironmentAsk(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Question of a reward to the judge; answered by EnvironmentTold.

    It does not answer the request with this message's number.
    """

    place: int
    """Number of the question, unique in this process."""
    request: bytes
    """Request to /chat/completions, JSON."""


class EnvironmentPlayed(msgspec.Struct, frozen=True, array_like=True, tag="played"):
    """The episode of a finished rollout."""

    episode: Episode


class EnvironmentScored(msgspec.Struct, frozen=True, array_like=True, tag="scored"):
    """The score of a finished rollout."""

    score: Score


class EnvironmentFailure(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Failure of a request; `detail` has the reason."""

    detail: str
    kind: str


class EnvironmentPong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """Sign of life with Environment.status."""

    status: str


EnvironmentAnswer = (
    EnvironmentReady
    | EnvironmentLooked
    | EnvironmentTurn
    | EnvironmentAsk
    | EnvironmentPlayed
    | EnvironmentScored
    | EnvironmentFailure
    | EnvironmentPong
)
REQUESTS: msgspec.msgpack.Decoder[ProcessMessage[EnvironmentRequest]] = msgspec.msgpack.Decoder(
    ProcessMessage[EnvironmentRequest]
)
ANSWERS: msgspec.msgpack.Decoder[ProcessMessage[EnvironmentAnswer]] = msgspec.msgpack.Decoder(
    ProcessMessage[EnvironmentAnswer]
)


def unpack_mark(mark: bytes) -> tuple[int, int]:
    """Decode the shared mark to (number, steps)."""
    number, steps = _MARK.unpack(mark)
    return number, steps


# -- the process ------------------------------------------------------------------------------------

TICK_S = 1.0
"""Longest interval between two settings of the timer that ends this process."""

_asking: ContextVar[int] = ContextVar("_asking", default=0)
"""Number of the request that the current code belongs to."""


class Steps:
    """Marker and clock of requests' code; every step of a request's tasks passes here.

    The mark is in memory shared with the node; a step that takes too long ends the process.
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
        """End this process when a step, or the event loop, takes longer than `seconds` from now."""
        self._limit_s = seconds
        self._set_timer(time.monotonic())

    def keep(self) -> None:
        """Restart the timer: the event loop runs."""
        self._set_timer(time.monotonic())

    def step(self, number: int, code: Callable[[Any], Any], value: Any) -> Any:
        """Return `code(value)`, marked as a step of a request. Every step of every task comes by: be quick."""
        before, began = self._number, time.monotonic()
        if began >= self._set_again:
            self._set_timer(began)
        self._mark(number)
        try:
            return code(value)
        finally:
            self._mark(before)
            took = time.monotonic() - began
            self._all_spent += took
            self._spent[number] = self._spent.get(number, 0.0) + took

    def clock(self, number: int) -> float:
        """Return a request's clock in seconds, which leaves out other requests' code."""
        return time.monotonic() - (self._all_spent - self._spent.get(number, 0.0))

    def forget(self, number: int) -> None:
        """Forget a request that has ended."""
        self._all_spent -= self._spent.pop(number, 0.0)

    def _mark(self, number: int) -> None:
        self._number = number
        self._count += 1
        _MARK.pack_into(self._shared, 0, number, self._count)

    def _set_timer(self, now: float) -> None:
        self._set_again = now + min(TICK_S, self._limit_s / 4)
        if self._limit_s:
            faulthandler.dump_traceback_later(self._limit_s, exit=True)


class Marked(Coroutine[Any, Any, Any]):
    """Coroutine that marks each of its steps with the number of its request."""

    def __init__(self, inner: Coroutine[Any, Any, Any], number: int, steps: Steps) -> None:
        self._inner = inner
        self._number = number
        self._steps = steps

    def send(self, value: Any) -> Any:
        """See Coroutine."""
        return self._steps.step(self._number, self._inner.send, value)

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        """See Coroutine."""
        return self._steps.step(self._number, self._inner.throw, kind)

    def close(self) -> None:
        """See Coroutine."""
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()


def mark_tasks(steps: Steps) -> Callable[..., asyncio.Task[Any]]:
    """Make a task factory that marks the tasks started by a request."""

    def make(
        loop: asyncio.AbstractEventLoop, inner: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        number = _asking.get()
        marked = Marked(inner, number, steps) if number else inner
        return asyncio.Task(marked, loop=loop, **options)

    return make


class EnvironmentHost:
    """Server of requests until close(); EnvironmentSetUp is the first."""

    def __init__(
        self, outbox: Outbox, make: Callable[[EnvironmentSetUp], Environment], steps: Steps
    ) -> None:
        self._outbox = outbox
        self._make = make
        self._steps = steps
        self._environment: Environment | None = None
        self._timeout_s = 0.0
        self._start_timeout_s = 0.0
        self._loading = 0
        """Pending requests that may load the taskset and so have start_timeout_s."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._replies: dict[int, asyncio.Future[Completion]] = {}
        self._told: dict[int, asyncio.Future[bytes]] = {}
        """Questions to the judge, by place."""
        self._places = itertools.count()
        self._ticking: asyncio.Task[None] | None = None

    def take(self, request: ProcessMessage[EnvironmentRequest]) -> None:
        """Start answering a request."""
        number = request.number
        match request.body:
            case EnvironmentDrop():
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
            case EnvironmentPing():
                status = self._environment.status if self._environment else ""
                self._outbox.put(number, EnvironmentPong(status))
            case EnvironmentReply(completion):
                reply = self._replies.pop(number, None)
                if reply is not None and not reply.done():
                    reply.set_result(completion)
            case EnvironmentTold(place, completion, refused):
                waiting = self._told.pop(place, None)
                if waiting is None or waiting.done():
                    pass  # its reward has ended
                elif refused:
                    waiting.set_exception(JudgeRefused(refused))
                else:
                    waiting.set_result(completion)
            case work:
                token = _asking.set(number)
                task = asyncio.create_task(self._answer(number, work))
                _asking.reset(token)
                self._tasks[number] = task
                task.add_done_callback(lambda _: self._ended(number))

    async def close(self) -> None:
        """Cancel all requests and close the environment."""
        await end_tasks(*self._tasks.values(), self._ticking)
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
        """Apply the time limit for loading a taskset inside."""
        self._loading += 1
        self._steps.limit(self._start_timeout_s)
        try:
            yield
        finally:
            self._loading -= 1
            if not self._loading:
                self._steps.limit(self._timeout_s)

    async def _answer(self, number: int, request: EnvironmentWork) -> None:
        episode_clock.set(partial(self._steps.clock, number))
        episode_judge.set(partial(self._ask_judge, number))
        try:
            answer = await self._do(number, request)
        except ScoreMismatch as error:
            answer = EnvironmentFailure(str(error), MISMATCH)
        except EnvironmentStuck as error:
            answer = EnvironmentFailure(str(error), STUCK)
        except EnvironmentFailed as error:
            answer = EnvironmentFailure(str(error), FAILED)
        except Exception as error:  # an environment's own code may raise anything
            answer = EnvironmentFailure(named_line(error), FAILED)
        self._outbox.put(number, answer)

    async def _do(self, number: int, request: EnvironmentWork) -> EnvironmentAnswer:
        if isinstance(request, EnvironmentSetUp):
            return await self._set_up(request)
        environment = self._environment
        if environment is None:
            raise EnvironmentFailed("nothing was set up: send EnvironmentSetUp first")
        match request:
            case EnvironmentLook():
                return await self._look(environment, request)
            case EnvironmentPlay():
                episode = await environment.run(request.task, self._policy(number))
                return EnvironmentPlayed(episode)
            case EnvironmentRescore():
                return EnvironmentScored(await environment.score(request.task, request.branches))

    async def _set_up(self, request: EnvironmentSetUp) -> EnvironmentReady:
        config = EnvironmentConfig.model_validate_json(request.config)
        self._timeout_s, self._start_timeout_s = config.timeout_s, config.start_timeout_s
        environment = self._environment = self._make(request)
        with self._loads():
            self._ticking = asyncio.create_task(self._tick(), name="timer")
            try:
                async with asyncio.timeout(config.start_timeout_s):
                    await environment.start()
            except TimeoutError as error:  # code that waits; the timer only ends code that runs
                raise EnvironmentStuck(
                    f"the environment did not start within {config.start_timeout_s:g} s: mend it, or raise "
                    "environment.start_timeout_s"
                ) from error
        return EnvironmentReady()

    async def _look(self, environment: Environment, request: EnvironmentLook) -> EnvironmentLooked:
        with self._loads():
            task = await environment.task(request.index, request.split)
        return EnvironmentLooked(
            task.digest,
            await environment.prompt(task),
            await environment.demonstration(task),
            task.place,
            task.content,
        )

    def _policy(self, number: int) -> Policy:
        """Make a policy that asks the node, one turn at a time."""
        turns = asyncio.Lock()

        async def policy(prompt: Any, turn: int) -> Completion:
            async with turns:
                reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
                self._replies[number] = reply
                self._outbox.put(number, EnvironmentTurn(turn, list(prompt)))
                try:
                    return await reply
                finally:
                    self._replies.pop(number, None)

        return policy

    async def _ask_judge(self, number: int, request: bytes) -> bytes:
        """Ask the node's judge for a request's code. Raises JudgeRefused."""
        place = next(self._places)
        answer = self._told[place] = asyncio.get_running_loop().create_future()
        self._outbox.put(number, EnvironmentAsk(place, request))
        try:
            return await answer
        finally:
            self._told.pop(place, None)


def make_environment(request: EnvironmentSetUp) -> Environment:
    """Make the environment of a set-up request, not started."""
    return VerifiersEnvironment(
        EnvironmentConfig.model_validate_json(request.config),
        model_dir=Path(request.model_dir),
        seed=request.seed,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        chat=Transcript() if request.text else None,
        judged=request.judged,
    )


def main(environment: Callable[[EnvironmentSetUp], Environment]) -> None:
    """Serve requests on standard input and output; a taskset's prints go to standard error."""
    steps = Steps(int(os.environ[MARK_VARIABLE]))

    def make(outbox: Outbox) -> EnvironmentHost:
        asyncio.get_running_loop().set_task_factory(mark_tasks(steps))
        return EnvironmentHost(outbox, environment, steps)

    serve_parent(REQUESTS.decode, make)


if __name__ == "__main__":
    main(make_environment)
