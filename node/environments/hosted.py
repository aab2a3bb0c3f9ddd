"""Run an environment in its own process (host.py), to contain faults of a taskset's code.

Code that hangs, spins or crashes costs its own rollout only. The process is restarted and its other rollouts
are played again from the start; turns that the policy has sampled are not sampled again.
"""

import asyncio
import logging
import mmap
import os
import re
import sys
import sysconfig
import tempfile
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ...protocol.recent import RecentDict
from ..config.run import EnvironmentConfig
from ..config.sandbox import SandboxConfig
from ..errors import NodeError, StorageError
from ..process.child_process import REST_S, REST_STARTS, ChildProcess
from ..process.exit_reason import exit_reason
from ..process.frames import ProcessMessage
from ..process.heap import trim_heap
from ..process.spawn import PARENT_VARIABLE, PRIVATE, kill_group, to_the_end, without_secrets
from ..tasks import end_tasks
from .allowed import source_of
from .chat import CHAT_FILES, Chat, ChatFormat, Transcript
from .confine import protect_node
from .environment import (
    Branch,
    Demonstration,
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
from .host import (
    ANSWERS,
    MARK_BYTES,
    MARK_VARIABLE,
    MISMATCH,
    STUCK,
    EnvironmentAsk,
    EnvironmentDrop,
    EnvironmentFailure,
    EnvironmentLook,
    EnvironmentLooked,
    EnvironmentPing,
    EnvironmentPlay,
    EnvironmentPlayed,
    EnvironmentPong,
    EnvironmentReady,
    EnvironmentReply,
    EnvironmentRequest,
    EnvironmentRescore,
    EnvironmentScored,
    EnvironmentSetUp,
    EnvironmentTold,
    EnvironmentTurn,
    unpack_mark,
)
from .judge_model import JudgeModel, Judges
from .policies import JudgeRefused, PlayFailed, RememberedPolicy
from .sandbox import Sandbox, Scratch, Start, cpu_clock, python_path
from .stop_strings import StopStrings

logger = logging.getLogger(__name__)

A = TypeVar("A")

PROGRAM = (sys.executable, "-P", "-m", f"{__package__}.host")
HIDDEN = PRIVATE | {PARENT_VARIABLE}
"""Variables that a taskset's process never gets."""
LOOKED_TASKS = 1024
"""Cached tasks, with their prompt tokens."""
MOST_LOSSES = 5
"""Lost processes in a row, with no rollout finished or blamed between, before giving up."""
MOST_TRIES = 10
"""Attempts at a request that is not to blame for the loss of its process."""
PAUSE_S = 1.0
"""Pause after a failed start."""
PING_S = 2.0
GUARD_S = 0.25
"""Pause between two checks of the process's descendants and memory."""
LOOKS = 16
"""Latest such checks in which it is noted whether the environment's code runs."""
BUSY_LOOKS = 6
"""Of these, the least in which the code of a busy process ran: rollouts come in bursts."""
SILENT_S = 30.0
"""Tolerated silence of the process, beyond the environment's own limits."""
MOST_QUESTIONS = 64
"""Most open questions to the judge per rollout."""
END_S = 2.0
"""Grace period for the process to exit by itself."""


class EnvironmentLost(NodeError):
    """The environment's process was lost through the fault of another request."""


class EnvironmentChild(ChildProcess):
    """Process of an environment: start() first, close() or kill() last."""

    Error = EnvironmentFailed
    Lost = EnvironmentLost
    answers = ANSWERS

    def __init__(
        self,
        config: EnvironmentConfig,
        sandbox: Sandbox,
        start: Start,
        environ: Mapping[str, str],
        pass_fds: Sequence[int],
        judge: JudgeModel | None,
    ) -> None:
        """Pass `environ` to the process; without a network, credentials are left out."""
        self._mark_file = _shared_file()
        self._mark = mmap.mmap(self._mark_file.fileno(), MARK_BYTES)
        variables = dict(environ) if sandbox.config.network else without_secrets(environ)
        variables |= {
            MARK_VARIABLE: str(self._mark_file.fileno()),
            # makes the order of a set the same on every machine
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": python_path(),
            **start.variables,
        }
        super().__init__("environment", f"environment {config.id!r}", start.command, variables)
        self._config = config
        self._sandbox = sandbox
        self._scratch = start.scratch
        self._pass_fds = (self._mark_file.fileno(), *pass_fds)
        self._judge = judge
        self._asking: defaultdict[int, set[asyncio.Task[None]]] = defaultdict(set)
        """Open questions to the judge, by the number of the request whose code asks."""
        self._guarding: asyncio.Task[None] | None = None
        self._clocks: dict[int, float] = {}
        """CPU seconds of its processes before their limits were looked at last."""
        self._ran = deque[bool](maxlen=LOOKS)
        """Whether a request's code ran, in the latest checks."""
        self.status = ""
        """Environment.status in the latest EnvironmentPong."""

    async def start(self, set_up: EnvironmentSetUp) -> None:
        """Start the process and load the taskset. Raises EnvironmentFailed; call kill() then."""
        await self.spawn(self._pass_fds)
        self._guarding = asyncio.create_task(self._guard(), name="environment guard")
        limit_s = max(self._config.timeout_s, self._config.start_timeout_s) + SILENT_S
        self._watch(EnvironmentPing(), PING_S, limit_s)
        try:
            await self._ask(set_up, EnvironmentReady)
        except EnvironmentLost as error:
            raise EnvironmentFailed(str(error)) from error

    async def look(self, index: int, split: Split) -> EnvironmentLooked:
        """Prepare a task. Raises EnvironmentFailed, EnvironmentLost."""
        return await self._ask(EnvironmentLook(index, split), EnvironmentLooked)

    async def play(self, task: Task, policy: Policy) -> Episode:
        """Play a task. Raises EnvironmentFailed, EnvironmentLost, and the errors of `policy`."""
        number = next(self._numbers)
        request: EnvironmentPlay | EnvironmentReply = EnvironmentPlay(task)
        while True:
            answer = await self._ask(request, EnvironmentTurn | EnvironmentPlayed, number)
            if isinstance(answer, EnvironmentPlayed):
                return answer.episode
            try:
                request = EnvironmentReply(await policy(answer.prompt, answer.turn))
            except BaseException:  # also when cancelled: the process would keep the rollout
                self._drop(number)
                raise

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """Score a finished rollout. Raises ScoreMismatch, EnvironmentFailed, EnvironmentLost."""
        return (await self._ask(EnvironmentRescore(task, list(branches)), EnvironmentScored)).score

    async def close(self) -> None:
        """End the process; kill it if that takes too long."""
        if self._guarding is not None:
            self._guarding.cancel()
        self._cancel_questions()
        await self.end(0.0 if self.silent_s > 2 * PING_S else END_S)
        self._mark_file.close()
        if self._scratch is not None:
            scratch, self._scratch = self._scratch, None
            await to_the_end(asyncio.to_thread(scratch.close))

    # -- asking ------------------------------------------------------------------------------------

    async def _ask(self, request: EnvironmentRequest, kind: Any, number: int | None = None) -> Any:
        """Send a request and return its answer; no deadline, as a silent process counts as lost.

        Raises EnvironmentStuck if this request's own code ended the process, EnvironmentLost if another's did.
        """
        number = next(self._numbers) if number is None else number
        try:
            answer = await self._answer(request, None, number)
        except EnvironmentLost as error:
            if self._marked()[0] == number:
                raise EnvironmentStuck(str(error)) from error
            raise
        except asyncio.CancelledError:
            self._drop(number)
            raise
        if isinstance(answer, EnvironmentFailure):
            kinds = {MISMATCH: ScoreMismatch, STUCK: EnvironmentStuck}
            raise kinds.get(answer.kind, EnvironmentFailed)(answer.detail)
        await self._expect(answer, kind)
        return answer

    def _drop(self, number: int) -> None:
        self._cancel_questions(number)
        if self._failure is None:
            self._send(EnvironmentDrop(), number)

    def _take(self, message: ProcessMessage[Any]) -> None:
        if isinstance(message.body, EnvironmentPong):
            self.status = message.body.status
        elif isinstance(message.body, EnvironmentAsk):
            self._begin_question(message.number, message.body)
        else:
            super()._take(message)

    def _begin_question(self, number: int, question: EnvironmentAsk) -> None:
        asking = self._asking[number]
        if len(asking) >= MOST_QUESTIONS:
            refused = f"a rollout asks its judge {MOST_QUESTIONS} questions at a time at most"
            self._send(EnvironmentTold(question.place, b"", refused), number)
            return
        task = asyncio.create_task(self._ask_judge(number, question), name="question to the judge")
        asking.add(task)
        task.add_done_callback(lambda done: self._end_question(number, done))

    def _end_question(self, number: int, task: asyncio.Task[None]) -> None:
        self._asking[number].discard(task)
        if not self._asking[number]:
            del self._asking[number]

    async def _ask_judge(self, number: int, question: EnvironmentAsk) -> None:
        """Answer a question of a reward."""
        completion, refused = b"", "this node has no judge"
        try:
            if self._judge is not None:
                completion, refused = await self._judge.ask(question.request), ""
        except (JudgeRefused, StorageError) as error:
            refused = str(error)
        if self._failure is None:
            self._send(EnvironmentTold(question.place, completion, refused), number)

    def _cancel_questions(self, number: int | None = None) -> None:
        """Cancel the open questions of a request, or of all if None."""
        for asking in list(self._asking) if number is None else [number]:
            for task in self._asking.get(asking, ()):
                task.cancel()

    # -- watching ----------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether requests' code has run much of the time lately."""
        return sum(self._ran) >= BUSY_LOOKS

    def _marked(self) -> tuple[int, int]:
        """Read (number of the request whose code runs or ran last, steps so far)."""
        return unpack_mark(self._mark[:MARK_BYTES])

    async def _guard(self) -> None:
        """Kill the processes and report them lost once they exceed the sandbox's limits."""
        while self._failure is None and self.pid is not None:
            self._ran.append(self._marked()[0] != 0)
            if self._rested():
                fault = ""
            else:
                # in a thread: a machine with many threads takes milliseconds to list a process's children
                fault = await asyncio.to_thread(self._overrun, self.pid, self._scratch)
            if fault:
                kill_group(self.pid)
                await self._lose(fault)
            await asyncio.sleep(GUARD_S)

    def _rested(self) -> bool:
        """Return whether no process has run since _overrun() looked: then none takes or writes more."""
        clocks = self._clocks
        return bool(clocks) and all(cpu_clock(pid) == before for pid, before in clocks.items())

    def _overrun(self, pid: int, scratch: Scratch | None) -> str:
        family = self._sandbox.family(pid)
        self._clocks = {each: cpu_clock(each) for each in family}
        return self._sandbox.overrun(family) or ("" if scratch is None else scratch.overrun())

    def _life(self) -> object:
        """Return a value that changes while the process lives; running code may answer late."""
        return super()._life(), self._marked()[1]

    def _exit_reason(self, code: int | None, lines: Sequence[str]) -> str:
        late = next((line for line in reversed(lines) if line.startswith("Timeout (")), "")
        if late:
            return (
                f"the environment's code did not return within {late[9:].rstrip(')!')}{_where(lines)}: mend "
                "it, or raise environment.timeout_s (start_timeout_s while it loads tasks)"
            )
        return exit_reason("the environment's process", self._sandbox.exit_code(code), lines)


class HostedEnvironment:
    """An Environment in its own process: start() first, close() last."""

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        model_dir: Path | None,
        seed: int,
        max_tokens: int,
        temperature: float,
        sandbox: Sandbox | None = None,
        judges: Judges | None = None,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """Prepare the environment of a run: none of its code is imported or run before start().

        `model_dir` holds tokenizer.json and the chat template; None: characters are tokens. `seed` is the
        taskset's unless its options name one; `max_tokens` bounds a turn. Without a `sandbox` the process has
        the default limits. `judges` make the judge that the config names; without them such an environment
        plays and does not score.
        """
        self._config = config
        self._judge = judges.judge(config) if judges else None
        self._hidden = HIDDEN | judges.variables if judges else HIDDEN
        self._sandbox = sandbox or Sandbox(SandboxConfig())
        self._model_dir = model_dir
        self._model_files = [] if model_dir is None else [model_dir / name for name in CHAT_FILES]
        self._set_up = EnvironmentSetUp(
            # without the keys of a subclass, which the process does not know, and the judge's URL and key
            config.published().model_dump_json().encode(),
            str(model_dir.absolute()) if model_dir else "",
            seed,
            max_tokens,
            temperature,
            model_dir is None,
            self._judge is not None,
        )
        self._program = program
        self._child: EnvironmentChild | None = None
        self._starting: EnvironmentChild | None = None
        self._closed = False
        self._open = 0
        """Requests that are being answered."""
        self._used_at = 0.0
        """When the last of them ended, in the event loop's time."""
        self._rest_s = REST_S
        self._rests = False
        """Whether the process was ended because it was idle."""
        self._resting: asyncio.Task[None] | None = None
        self._replacing = asyncio.Lock()
        self._looked = RecentDict[tuple[int, Split], EnvironmentLooked](LOOKED_TASKS)
        self._losses = 0
        """Consecutive losses that no request is known to have caused."""
        self._given_up = ""
        self._fault = ""
        self.restarts = 0
        self.stops: StopStrings | None = None
        self.pass_fds: Sequence[int] = ()
        """File descriptors that the process inherits; set before start()."""

    @property
    def name(self) -> str:
        """Id of the taskset."""
        return self._config.id

    @property
    def status(self) -> str:
        """See Environment."""
        if self._given_up or self.judge_fault:
            return self._given_up or self.judge_fault
        if self._child is not None and self._child.status:
            return self._child.status
        if self._fault:
            return f"{self._fault} (its process was started again {self.restarts} time(s))"
        return ""

    @property
    def is_busy(self) -> bool:
        """See pool.HostedProcess."""
        return self._child is not None and self._child.is_busy

    @property
    def judge_fault(self) -> str:
        """See Environment."""
        return "" if self._judge is None else self._judge.fault

    async def start(self) -> None:
        """Start the process and load the taskset; requests that come meanwhile wait for it.

        Raises EnvironmentFailed, StorageError.
        """
        async with self._replacing:
            if refusal := self._sandbox.refusal(self.name):
                raise EnvironmentFailed(refusal)
            if self._judge is not None:
                await self._judge.start()
            if self._config.stop:
                self.stops = StopStrings(self._config.stop, (await self._chat()).piece)
            await self._start()
        self._used_at = asyncio.get_running_loop().time()
        self._resting = asyncio.create_task(self._rest_when_idle(), name="environment rests")

    async def _chat(self) -> Chat:
        """Read the tokenizer, which the process reads for itself. Raises EnvironmentFailed."""
        if self._model_dir is None:
            return Transcript()
        return await asyncio.to_thread(ChatFormat.load, self._model_dir, needs_template=False)

    async def close(self) -> None:
        """End the process."""
        self._closed = True
        await end_tasks(self._resting)
        for child in (self._starting, self._child):
            if child is not None:
                await child.close()
        self._child = None
        if self._judge is not None:
            await self._judge.close()

    async def task(self, index: int, split: Split = "train") -> Task:
        """Return task number `index`, from the cache if possible."""
        looked = await self._look(index, split)
        return Task(index, looked.digest, split, looked.place, looked.content)

    async def prompt(self, task: Task) -> list[int]:
        """See Environment."""
        return list((await self._own(task)).prompt)

    async def demonstration(self, task: Task) -> Demonstration | None:
        """See Environment."""
        return (await self._own(task)).demonstration

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Play and score a task.

        Raises the errors of the policy, and EnvironmentGivenUp once no process stays up; any other failure is
        the episode's `error`.
        """
        remembered = RememberedPolicy(policy)
        try:
            return await self._with_child(task.index, lambda child: child.play(task, remembered))
        except EnvironmentGivenUp:
            raise
        except (PlayFailed, ScoreMismatch, EnvironmentFailed) as error:
            return Episode(branches=[], score=Score(reward=0.0), error=str(error))

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """See Environment; also raises EnvironmentStuck."""
        return await self._with_child(task.index, lambda child: child.score(task, branches))

    async def _own(self, task: Task) -> EnvironmentLooked:
        looked = await self._look(task.index, task.split)
        if looked.digest != task.digest:
            raise ScoreMismatch(
                f"task {task.index} of {self.name!r} has other content here: "
                "install the run's version of the taskset"
            )
        return looked

    async def _look(self, index: int, split: Split) -> EnvironmentLooked:
        if self._given_up:
            raise EnvironmentGivenUp(self._given_up)
        key = (index, split)
        if (looked := self._looked.get(key)) is not None:
            self._looked.move_to_end(key)
            return looked
        looked = await self._with_child(index, lambda child: child.look(index, split))
        self._looked[key] = looked
        return looked

    # -- the process -------------------------------------------------------------------------------

    async def _with_child(self, index: int, ask: Callable[[EnvironmentChild], Awaitable[A]]) -> A:
        """Return the result of `ask`; retry with a new process if another request ended the old one."""
        self._open += 1
        try:
            return await self._try(index, ask)
        finally:
            self._open -= 1
            self._used_at = asyncio.get_running_loop().time()

    async def _try(self, index: int, ask: Callable[[EnvironmentChild], Awaitable[A]]) -> A:
        for _ in range(MOST_TRIES):
            child = await self._working()
            try:
                result = await ask(child)
            except EnvironmentStuck as error:
                self._losses = 0
                raise EnvironmentStuck(f"task {index}: {error}") from error
            except EnvironmentLost:
                continue
            if not isinstance(result, EnvironmentLooked):
                self._losses = 0
            return result
        raise EnvironmentFailed(f"task {index}: {self._fault} ({MOST_TRIES} times)")

    async def _working(self) -> EnvironmentChild:
        """Return the process, restarted if it was lost. Raises EnvironmentFailed."""
        async with self._replacing:
            if self._given_up:
                raise EnvironmentGivenUp(self._given_up)
            child = self._child
            if child is None:
                raise EnvironmentFailed(
                    f"environment {self.name!r} is not running: call start() first"
                )
            if self._rests or child.lost.is_set():
                child = await self._replace(child)
            return child

    async def _rest_when_idle(self) -> None:
        """End the process whenever there was no request for some time, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            left = self._used_at + self._rest_s - loop.time()
            await asyncio.sleep(max(left, self._rest_s / 10))
            async with self._replacing:
                idle = not self._open and loop.time() >= self._used_at + self._rest_s
                if idle and self._child is not None and not self._child.lost.is_set():
                    self._rests = True  # a request that comes meanwhile waits for the lock
                    await self._child.close()
                    trim_heap()

    async def _replace(self, child: EnvironmentChild) -> EnvironmentChild:
        """Start another process; if cancelled, the next request starts it."""
        self._fault = "" if self._rests else child.fault
        await child.close()
        while True:
            if not self._rests:
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
                self._fault, self._rests = str(error), False
                await asyncio.sleep(PAUSE_S)
                continue
            self.restarts += not self._rests
            self._rests = False
            return replacement

    async def _start(self) -> EnvironmentChild:
        protect_node()
        began = asyncio.get_running_loop().time()
        start = await asyncio.to_thread(self._prepare)
        if self._closed:
            if start.scratch is not None:
                start.scratch.close()
            raise EnvironmentGivenUp(f"environment {self.name!r} was closed")
        visible = {name: value for name, value in os.environ.items() if name not in self._hidden}
        child = self._starting = EnvironmentChild(
            self._config, self._sandbox, start, visible, self.pass_fds, self._judge
        )
        try:
            await child.start(self._set_up)
            self._child = child
            took_s = asyncio.get_running_loop().time() - began
            self._rest_s = max(REST_S, took_s * REST_STARTS)
        except BaseException:  # also when cancelled: a half-started process is of no use
            await child.close()
            raise
        finally:
            self._starting = None
        return child

    def _prepare(self) -> Start:
        """Prepare to start the process in its sandbox. Raises EnvironmentFailed."""
        source = source_of(self.name)
        needed = [*self._model_files, *([source] if source else [])]
        try:
            return self._sandbox.start(self._program, needed)
        except OSError as error:
            raise EnvironmentFailed(
                f"environment {self.name!r} gets no scratch directory ({error}): make room in TMPDIR"
            ) from error


def _shared_file() -> BinaryIO:
    """Make a file of MARK_BYTES for two processes to map."""
    if hasattr(os, "memfd_create"):
        file: BinaryIO = os.fdopen(os.memfd_create("primerl-mark"), "w+b")
    else:
        file = tempfile.TemporaryFile()
    file.truncate(MARK_BYTES)
    return file


_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')


def _where(lines: Sequence[str]) -> str:
    """Locate the main thread's innermost call outside the standard library.

    `lines` hold faulthandler's traceback. Returns an empty string if there is none.
    """
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
