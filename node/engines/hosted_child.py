"""The parent's end of one process that holds an engine (host.py): asked many things at once, watched, killed.

Whatever goes wrong with the process as a whole makes it lost: everything that was asked raises EngineLost,
and nothing else comes of it; whoever owns it must kill() it then.
"""

import asyncio
import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..engine_config import EngineConfig
from ..errors import EngineError, EngineLost, UsageError
from ..frames import HEAD_BYTES, body_length, frame
from ..processes import LogTail, kill_group, start_piped, to_the_end
from .engine import Completion, GenerateRequest
from .host_frames import (
    LOST,
    MAX_FRAME,
    USAGE,
    Answer,
    Busy,
    Check,
    Checked,
    Done,
    Draw,
    Drawn,
    Drop,
    Failed,
    Load,
    Ping,
    Pong,
    Rejoin,
    Request,
    SetUp,
    Stage,
    Write,
    Wrote,
    as_completion,
    as_draw,
    read_answer,
)
from .last_words import explain, meaning
from .replica import Finding, Written

logger = logging.getLogger(__name__)

A = TypeVar("A")

PROGRAM = (sys.executable, "-P", "-m", f"{__package__}.host")
TAIL_LINES = 200
LAST_WORDS_S = 1.0
END_S = 10.0
"""For what an ended process has left in its pipe."""
BUFFER = 1 << 20


@dataclass(frozen=True)
class Patience:
    """How long things may take, in seconds."""

    start: float = 1800.0
    """From nothing to an engine that generates; a large model is compiled and captured for minutes."""
    load: float = 600.0
    ping: float = 5.0
    """Between two questions whether it is there."""
    silent: float = 60.0
    """Without an answer to that it hangs."""
    stuck: float = 600.0
    """Without a token though there is work it hangs; one step of a large prompt on a CPU takes minutes."""
    end: float = 20.0
    """To end in peace."""


class EngineChild:
    """Implements Replica: one process. start() first, close() or kill() last."""

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str],
        program: Sequence[str] = PROGRAM,
        patience: Patience | None = None,
        *,
        title: str = "vLLM",
    ) -> None:
        """`name` is what logs call it, `title` what holds the model there."""
        self._title = title
        self._name = name
        self._environment = environment
        self._program = program
        self._patience = patience or Patience()
        self._process: asyncio.subprocess.Process | None = None
        self._log: LogTail | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._out: list[bytes] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._fault = ""
        self._ready = False
        self._closing = False
        self.lost = asyncio.Event()
        """Set once it is of no use any more."""
        self.busy = Busy()
        """What it told last."""

    @property
    def pid(self) -> int | None:
        """Its process id, which is its group too; None before start()."""
        return self._process.pid if self._process else None

    @property
    def fault(self) -> str:
        """Why it is lost, with what to do; empty while it is not."""
        return self._fault

    async def start(
        self, config: EngineConfig, model_dir: Path, fingerprint: str, place: bytes = b""
    ) -> None:
        """Start it, with its engine; `place`: of a stage. Raises EngineError, UsageError; kill() it then."""
        try:
            self._process = await start_piped(self._program, self._environment, buffer=BUFFER)
        except OSError as error:
            raise EngineError(
                f"the process for {self._title} cannot be started ({error}): free memory or processes"
            ) from error
        assert self._process.stderr is not None
        self._log = LogTail(self._process.stderr, self._note)
        self._log.start()
        self._tasks.append(asyncio.create_task(self._read(), name=f"{self._name} answers"))
        setup = SetUp(
            next(self._numbers),
            config.model_dump_json().encode(),
            str(model_dir),
            fingerprint,
            place,
        )
        await self._ask(setup, Done, self._patience.start)
        self._ready = True
        self._tasks.append(asyncio.create_task(self._ping(), name=f"{self._name} ping"))

    async def check(self, path: str) -> Finding:
        """See Replica."""
        found = await self._ask(Check(next(self._numbers), path), Checked, self._patience.load)
        return Finding(found.fault, found.placeless)

    async def load(self, version: int, path: str) -> Written:
        """See Replica."""
        request = Load(next(self._numbers), version, path)
        wrote = await self._ask(request, Wrote, self._patience.load)
        return Written(wrote.paused_s, wrote.writing_s)

    async def stage(self, path: str) -> Finding:
        """See Replica."""
        found = await self._ask(Stage(next(self._numbers), path), Checked, self._patience.load)
        return Finding(found.fault, found.placeless)

    async def write(self, version: int) -> Written:
        """See Replica."""
        request = Write(next(self._numbers), version)
        wrote = await self._ask(request, Wrote, self._patience.load)
        return Written(wrote.paused_s, wrote.writing_s)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Replica. There is no deadline, but a child that gives nothing at all for long is lost."""
        draw = as_draw(next(self._numbers), request)
        return as_completion(await self._ask(draw, Drawn, None))

    async def rejoin(self, epoch: int) -> None:
        """Stage 0 of a pipeline: begin a chain. Raises EngineError, EngineLost."""
        await self._ask(Rejoin(next(self._numbers), epoch), Done, self._patience.load)

    async def close(self) -> None:
        """End it in peace, by force if it takes too long; what was asked raises EngineError."""
        self._closing = True
        self._fail(EngineError(f"the {self._title} engine was closed: start another"))
        process = self._process
        if process is None:
            return
        try:
            # one that is still starting would go on until it has started
            if self._ready and process.stdin is not None and process.returncode is None:
                process.stdin.close()
                async with asyncio.timeout(self._patience.end):
                    await process.wait()
        except TimeoutError:
            logger.warning("%s did not end within %g s: killing it", self._name, self._patience.end)
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End it and all that it started, also when cancelled meanwhile; safe to call twice."""
        self._closing = True
        if self._process is not None:
            kill_group(self._process.pid)
            await to_the_end(self._bury(self._process))

    async def _bury(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        for task in self._tasks[1:]:
            task.cancel()
        if self._tasks:
            # the first one reads to the end of the pipe
            await asyncio.wait(self._tasks, timeout=END_S)
        if self._log is not None:
            await self._log.close()

    # -- asking ------------------------------------------------------------------------------------

    async def _ask(self, request: Request, kind: type[A], timeout_s: float | None) -> A:
        """Its answer. Raises EngineError, UsageError; EngineLost if none comes in time, or none ever."""
        if self._fault:
            raise EngineLost(self._fault)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[request.number] = future
        try:
            self._send(request)
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError as error:
            await self._lose(
                f"{self._title} gave no answer within {timeout_s:g} s: see its log lines above"
            )
            raise EngineLost(self._fault) from error
        except asyncio.CancelledError:
            if isinstance(request, Draw) and not self._closing:
                self._send(Drop(request.number))
            raise
        finally:
            self._asked.pop(request.number, None)
        if isinstance(answer, Failed):
            raise await self._failed(answer)
        if not isinstance(answer, kind):
            await self._lose(
                f"the process for {self._title} speaks another language: install one version"
            )
            raise EngineLost(self._fault)
        return answer

    async def _failed(self, answer: Failed) -> EngineError | UsageError:
        if answer.kind == USAGE:
            return UsageError(answer.detail)
        if answer.kind != LOST:
            return EngineError(answer.detail if self._ready else await self._cause(answer.detail))
        self._tail.append(answer.detail)
        await self._lose("")
        return EngineLost(self._fault)

    async def _cause(self, detail: str) -> str:
        """Why it did not start: vLLM's engine process says it in the log, and only there."""
        until = time.monotonic() + LAST_WORDS_S
        # the lines come by another pipe
        while not (known := meaning(self._tail, self._title)) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return f"{known} ({detail})" if known else detail

    def _send(self, request: Request) -> None:
        """Those of one turn of the event loop together."""
        data = frame(request, MAX_FRAME)
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        data = b"".join(self._out)
        self._out.clear()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(data)  # to a process that has gone: nothing happens

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        stream = self._process.stdout
        try:
            while True:
                head = await stream.readexactly(HEAD_BYTES)
                self._take(read_answer(await stream.readexactly(body_length(head, MAX_FRAME))))
        except (asyncio.IncompleteReadError, OSError):
            await self._lose("")
        except ValueError as error:
            await self._lose(
                f"the process for {self._title} speaks no sense ({error}): install it anew"
            )
        with suppress(OSError):
            while await stream.read(BUFFER):
                pass  # asyncio closes the pipe only at its end

    def _take(self, answer: Answer | Busy) -> None:
        if isinstance(answer, Busy):
            self.busy = answer
        elif (future := self._asked.get(answer.number)) is not None and not future.done():
            future.set_result(answer)

    # -- watching ----------------------------------------------------------------------------------

    async def _ping(self) -> None:
        patience = self._patience
        while not self._fault:
            await asyncio.sleep(patience.ping)
            try:
                pong = await self._ask(Ping(next(self._numbers)), Pong, patience.silent)
            except EngineLost:
                return
            if pong.stuck_s > patience.stuck:
                await self._lose(
                    f"{self._title} gave no token for {pong.stuck_s:.0f} s though there is work: see its log "
                    "lines above"
                )

    async def _lose(self, fault: str) -> None:
        """It is of no use any more, for `fault` or for what its last lines say."""
        if self._fault or self._closing:
            return
        if not fault and self._process is not None and self._log is not None:
            with suppress(TimeoutError):  # its end, and its last lines, may come a moment later
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._process.wait()
            await self._log.wait(LAST_WORDS_S if self._process.returncode is not None else 0.0)
            fault = explain(self._process.returncode, self._tail, self._title)
        if self._fault:
            return  # somebody else found it meanwhile
        self._fault = fault
        self._fail(EngineLost(fault))
        self.lost.set()

    def _fail(self, error: EngineError) -> None:
        self._fault = self._fault or str(error)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)

    def _note(self, line: str) -> None:
        self._tail.append(line)
        level = logging.DEBUG if self._closing else logging.INFO
        logger.log(level, "%s: %s", self._name, line)
