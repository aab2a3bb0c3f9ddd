"""An environment in a process of its own: what a node plays, and scores with, whatever the taskset's code does.

Code that hangs, spins or crashes costs the rollout that it belongs to. Its process is started again, and what
else was under way there is begun again; what the policy has said by then is not asked for again.
"""

import asyncio
import itertools
import logging
import mmap
import os
import re
import sys
import sysconfig
import tempfile
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ..config.run import EnvironmentConfig
from ..inference.engine import Completion
from ..ops.errors import NodeError
from ..process.child_process import ChildProcess
from ..process.exit_reason import exit_reason
from ..process.spawn import PARENT_VARIABLE
from .environment import (
    Branch,
    Environment,
    EnvironmentFailed,
    EnvironmentGivenUp,
    EnvironmentStuck,
    Episode,
    Policy,
    Score,
    ScoreMismatch,
    Split,
    Task,
)
from .host_frames import (
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
    read_answer,
    unpack_mark,
)
from .replay import PlayFailed

logger = logging.getLogger(__name__)

A = TypeVar("A")

PROGRAM = (sys.executable, "-P", "-m", f"{__package__}.host")
PRIVATE = frozenset({"PRIMERL_PASSPHRASE"})
"""Variables that a taskset's code does not get to see."""
LOOKED_TASKS = 4096
"""Tasks kept with their prompt tokens."""
MOST_LOSSES = 5
"""Processes lost in a row, with no rollout in between that ended or was to blame, before it is given up."""
MOST_TRIES = 10
"""Times that a rollout is begun which is not to blame for the loss of its process."""
SET_UP = 1
"""Number of the first request."""
PAUSE_S = 1.0
"""After a start that failed."""
PING_S = 2.0
SILENT_S = 30.0
"""So much longer than the environment's own limits the process may say nothing."""
END_S = 2.0
"""To end in peace."""


class EnvironmentLost(NodeError):
    """The process of the environment is gone, by the fault of another request."""


class EnvironmentChild(ChildProcess):
    """One process: start() first, close() or kill() last."""

    Error = EnvironmentFailed
    Lost = EnvironmentLost

    def __init__(
        self, config: EnvironmentConfig, program: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        self._mark_file = _shared_file()
        self._mark = mmap.mmap(self._mark_file.fileno(), MARK_BYTES)
        variables = {name: value for name, value in environ.items() if name not in PRIVATE}
        variables |= {
            PARENT_VARIABLE: str(os.getpid()),
            MARK_VARIABLE: str(self._mark_file.fileno()),
            # what can be imported here can be imported there
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        super().__init__("environment", f"environment {config.id!r}", program, variables)
        self._config = config
        self._numbers = itertools.count(SET_UP + 1)
        self.status = ""
        """What it told last; see Environment.status."""

    async def start(self, set_up: SetUp) -> None:
        """Start it and load the taskset. Raises EnvironmentFailed; kill() it then."""
        await self.spawn([self._mark_file.fileno()])
        limit_s = max(self._config.timeout_s, self._config.start_timeout_s) + SILENT_S
        self._watch(lambda: Ping(0), PING_S, limit_s)
        try:
            await self._ask(set_up, Done)
        except EnvironmentLost as error:
            raise EnvironmentFailed(str(error)) from error

    async def look(self, index: int, split: Split) -> Looked:
        """What a task is. Raises EnvironmentFailed, EnvironmentLost."""
        return await self._ask(Look(next(self._numbers), index, split), Looked)

    async def play(self, task: Task, policy: Policy) -> Episode:
        """Play a task. Raises EnvironmentFailed, EnvironmentLost, and what `policy` raises."""
        number = next(self._numbers)
        request: Play | Reply = Play(number, task)
        while True:
            answer = await self._ask(request, Turn | Played)
            if isinstance(answer, Played):
                return answer.episode
            try:
                request = Reply(number, await policy(answer.prompt, answer.turn))
            except BaseException:
                self._drop(number)
                raise

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """Score a finished rollout. Raises ScoreMismatch, EnvironmentFailed, EnvironmentLost."""
        request = Rescore(next(self._numbers), task, list(branches))
        return (await self._ask(request, Scored)).score

    async def close(self) -> None:
        """End it, by force if it takes too long."""
        await self.end(0.0 if self.silent_s > 2 * PING_S else END_S)
        self._mark_file.close()

    # -- asking ------------------------------------------------------------------------------------

    async def _ask(self, request: Request, kind: Any) -> Any:
        """Its answer; there is no deadline, but a process that stands still is lost.

        Raises EnvironmentStuck if this request's own code ended the process, EnvironmentLost if another's did.
        """
        try:
            answer = await self._answer(request, None)
        except EnvironmentLost as error:
            if self._marked()[0] == request.number:
                raise EnvironmentStuck(str(error)) from error
            raise
        except asyncio.CancelledError:
            self._drop(request.number)
            raise
        if isinstance(answer, Failed):
            kinds = {MISMATCH: ScoreMismatch, STUCK: EnvironmentStuck}
            raise kinds.get(answer.kind, EnvironmentFailed)(answer.detail)
        await self._expect(answer, kind)
        return answer

    def _drop(self, number: int) -> None:
        if self._failure is None:
            self._send(Drop(number))

    def _decode(self, body: bytes) -> Answer:
        return read_answer(body)

    def _take(self, message: Any) -> None:
        if isinstance(message, Pong):
            self.status = message.status
        else:
            super()._take(message)

    # -- watching ----------------------------------------------------------------------------------

    def _marked(self) -> tuple[int, int]:
        """(number of the request whose code runs, or ran last; steps of code so far)."""
        return unpack_mark(self._mark[:MARK_BYTES])

    def _life(self) -> object:
        """An environment that runs code is alive, though it may answer late."""
        return super()._life(), self._marked()[1]

    def _exit_reason(self, code: int | None, lines: Sequence[str]) -> str:
        late = next((line for line in reversed(lines) if line.startswith("Timeout (")), "")
        if late:
            return (
                f"the environment's code did not return within {late[9:].rstrip(')!')}{_where(lines)}: mend "
                "it, or raise environment.timeout_s (start_timeout_s while it loads tasks)"
            )
        return exit_reason("the environment's process", code, lines)


class HostedEnvironment:
    """Implements Environment: start() first, close() last."""

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        model_dir: Path,
        seed: int,
        max_tokens: int,
        temperature: float,
        text: bool = False,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """See build_environment()."""
        self._config = config
        self._set_up = SetUp(
            SET_UP,
            # a subclass has keys of its own, which its process neither knows nor needs
            config.model_dump_json(include=set(EnvironmentConfig.model_fields)).encode(),
            str(model_dir.absolute()),
            seed,
            max_tokens,
            temperature,
            text,
        )
        self._program = program
        self._child: EnvironmentChild | None = None
        self._starting: EnvironmentChild | None = None
        self._closed = False
        self._replacing = asyncio.Lock()
        self._looked: OrderedDict[tuple[int, Split], Looked] = OrderedDict()
        self._losses = 0
        """In a row, and nobody knows by whose code."""
        self._given_up = ""
        self._fault = ""
        self.restarts = 0

    @property
    def name(self) -> str:
        """The taskset's id."""
        return self._config.id

    @property
    def status(self) -> str:
        """See Environment."""
        if self._given_up:
            return self._given_up
        if self._child is not None and self._child.status:
            return self._child.status
        if self._fault:
            return f"{self._fault} (its process was started again {self.restarts} time(s))"
        return ""

    async def start(self) -> None:
        """Start its process and load the taskset. Raises EnvironmentFailed."""
        await self._start()

    async def close(self) -> None:
        """End its process."""
        self._closed = True
        for child in (self._starting, self._child):
            if child is not None:
                await child.close()
        self._child = None

    async def task(self, index: int, split: Split = "train") -> Task:
        """Task number `index`; asked for once, as long as it is remembered."""
        return Task(index=index, digest=(await self._look(index, split)).digest, split=split)

    async def prompt(self, task: Task) -> list[int]:
        """See Environment."""
        return list((await self._own(task)).prompt)

    async def demonstration(self, task: Task) -> list[int] | None:
        """See Environment."""
        shown = (await self._own(task)).demonstration
        return None if shown is None else list(shown)

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Play and score; what the policy raises comes through, and EnvironmentGivenUp once no process stays
        up. All else is the episode's `error`."""
        said = RememberedPolicy(policy)
        try:
            return await self._with_child(task.index, lambda child: child.play(task, said))
        except EnvironmentGivenUp:
            raise
        except (PlayFailed, ScoreMismatch, EnvironmentFailed) as error:
            return Episode(branches=[], score=Score(reward=0.0), error=str(error))

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """See Environment; also raises EnvironmentStuck."""
        return await self._with_child(task.index, lambda child: child.score(task, branches))

    async def _own(self, task: Task) -> Looked:
        looked = await self._look(task.index, task.split)
        if looked.digest != task.digest:
            raise ScoreMismatch(
                f"task {task.index} of {self.name!r} has other content here: "
                "install the run's version of the taskset"
            )
        return looked

    async def _look(self, index: int, split: Split) -> Looked:
        if self._given_up:
            raise EnvironmentGivenUp(self._given_up)
        key = (index, split)
        if (looked := self._looked.get(key)) is not None:
            self._looked.move_to_end(key)
            return looked
        looked = await self._with_child(index, lambda child: child.look(index, split))
        self._looked[key] = looked
        if len(self._looked) > LOOKED_TASKS:
            self._looked.popitem(last=False)
        return looked

    # -- the process -------------------------------------------------------------------------------

    async def _with_child(self, index: int, ask: Callable[[EnvironmentChild], Awaitable[A]]) -> A:
        """What `ask` finds out; asked again where its process was lost by another's fault."""
        for _ in range(MOST_TRIES):
            child = await self._working()
            try:
                found = await ask(child)
            except EnvironmentStuck as error:
                self._losses = 0
                raise EnvironmentStuck(f"task {index}: {error}") from error
            except EnvironmentLost:
                continue
            if not isinstance(found, Looked):
                self._losses = 0
            return found
        raise EnvironmentFailed(f"task {index}: {self._fault} ({MOST_TRIES} times)")

    async def _working(self) -> EnvironmentChild:
        """A process that is there; it is started again if it was lost. Raises EnvironmentFailed."""
        async with self._replacing:
            if self._given_up:
                raise EnvironmentGivenUp(self._given_up)
            child = self._child
            if child is None:
                raise EnvironmentFailed(
                    f"environment {self.name!r} is not running: call start() first"
                )
            if child.lost.is_set():
                child = await self._replace(child)
            return child

    async def _replace(self, child: EnvironmentChild) -> EnvironmentChild:
        """Another process; whoever is cancelled meanwhile leaves that to the next that asks."""
        self._fault = child.fault
        await child.close()
        while True:
            self._losses += 1
            if self._losses >= MOST_LOSSES:
                fault = f"{self._fault} ({self._losses} times in a row)"
                self._given_up = f"environment {self.name!r} is given up: {fault}"
                raise EnvironmentGivenUp(self._given_up)
            logger.warning(
                "environment %s: %s; its process is started again", self.name, self._fault
            )
            try:
                replacement = await self._start()
            except EnvironmentFailed as error:
                self._fault = str(error)
                await asyncio.sleep(PAUSE_S)
                continue
            self.restarts += 1
            return replacement

    async def _start(self) -> EnvironmentChild:
        if self._closed:
            raise EnvironmentGivenUp(f"environment {self.name!r} was closed")
        child = self._starting = EnvironmentChild(self._config, self._program, os.environ)
        try:
            await child.start(self._set_up)
            self._child = child
        except BaseException:
            await child.close()
            raise
        finally:
            self._starting = None
        return child


class RememberedPolicy:
    """A policy that is asked each turn once, however often its rollout is begun again."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._said: dict[tuple[int, tuple[int, ...]], Completion] = {}

    async def __call__(self, prompt: Sequence[int], turn: int) -> Completion:
        """See Policy."""
        key = (turn, tuple(prompt))
        if key not in self._said:
            self._said[key] = await self._policy(prompt, turn)
        return self._said[key]


def _shared_file() -> BinaryIO:
    """A file of MARK_BYTES that two processes map."""
    if hasattr(os, "memfd_create"):
        file: BinaryIO = os.fdopen(os.memfd_create("primerl-mark"), "w+b")
    else:
        file = tempfile.TemporaryFile()
    file.truncate(MARK_BYTES)
    return file


_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')


def _where(lines: Sequence[str]) -> str:
    """Where the code of the main thread stood, as faulthandler writes it down: the innermost call that is not
    the standard library's; empty where nothing is known."""
    library = sysconfig.get_path("stdlib")
    begun = [number for number, line in enumerate(lines) if "most recent call first" in line]
    frames = [_FRAME.search(line) for line in lines[begun[-1] :]] if begun else []
    for frame in frames:
        if frame is None:
            continue
        file = frame["file"]
        if "site-packages" in file or not file.startswith(library):
            return f" (in {frame['name']}, {Path(file).name} line {frame['line']})"
    return ""


def build_environment(
    config: EnvironmentConfig,
    *,
    model_dir: Path,
    seed: int,
    max_tokens: int,
    temperature: float,
    text: bool = False,
) -> Environment:
    """The environment of a run, not yet started: nothing of it is imported or run before start().

    `model_dir` holds tokenizer.json and the chat template; with `text` conversations are of characters, and it
    holds nothing. `max_tokens` bounds one turn.
    """
    return HostedEnvironment(
        config,
        model_dir=model_dir,
        seed=seed,
        max_tokens=max_tokens,
        temperature=temperature,
        text=text,
    )
