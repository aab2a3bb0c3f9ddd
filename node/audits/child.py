"""The parent's end of the process that audits: one question at a time, each with a deadline.

Whatever goes wrong is a ChildFailed; whoever gets one, or gives up waiting, must kill() the child.
"""

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from ..errors import EngineError
from ..frames import HEAD_BYTES, body_length, frame
from ..processes import PARENT_VARIABLE, LogTail, kill_group, start_piped, to_the_end
from .frames import (
    MAX_FRAME,
    Answer,
    Failed,
    Request,
    read_answer,
)

logger = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-P", "-m", f"{__package__}.process")
TAIL_LINES = 5
END_TIMEOUT_S = 5.0
"""For what an ended process has left in its pipe."""


class ChildFailed(Exception):
    """The child ended, hung, or says that it cannot do it; the text says which."""


async def _bury(process: asyncio.subprocess.Process, log: LogTail) -> None:
    """Wait until a killed process is gone and its pipes are closed."""
    await process.wait()
    await log.close()
    await _drain(process)


async def _drain(process: asyncio.subprocess.Process) -> None:
    """Read its answers to the end: only then asyncio closes the pipe, and the loop may end before that."""
    assert process.stdout is not None
    # RuntimeError: whoever waits for an answer reads to the end, too
    with suppress(TimeoutError, OSError, RuntimeError):
        async with asyncio.timeout(END_TIMEOUT_S):
            while await process.stdout.read(HEAD_BYTES << 12):
                pass


class AuditChild:
    """One process: start(), ask(), kill()."""

    def __init__(self, program: Sequence[str] = PROGRAM) -> None:
        self._program = program
        self._process: asyncio.subprocess.Process | None = None
        self._log: LogTail | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def pid(self) -> int | None:
        """Its process id, which is its group too; None before start()."""
        return self._process.pid if self._process else None

    @property
    def ended(self) -> bool:
        """Whether it was started and its end was seen."""
        return self._process is not None and self._process.returncode is not None

    async def start(self) -> None:
        """Start it. Raises EngineError."""
        try:
            environment = os.environ | {PARENT_VARIABLE: str(os.getpid())}
            self._process = await start_piped(self._program, environment)
        except OSError as error:
            raise EngineError(
                f"the process that audits cannot be started ({error}): free memory or processes"
            ) from error
        assert self._process.stderr is not None
        self._log = LogTail(self._process.stderr, self._note)
        self._log.start()
        logger.debug("audit process %d started", self._process.pid)

    async def ask(self, request: Request, timeout_s: float) -> Answer:
        """Its answer. Raises ChildFailed, also after `timeout_s`; EngineError if it will never answer."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(frame(request, MAX_FRAME))
        except TimeoutError as error:
            raise ChildFailed(f"the audit took more than {timeout_s:g} s") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ChildFailed(f"the process that audits ended{await self._last_words()}") from error
        except ValueError as error:
            raise ChildFailed(f"the process that audits speaks no sense ({error})") from error
        if isinstance(answer, Failed):
            raise EngineError(answer.detail) if answer.always else ChildFailed(answer.detail)
        return answer

    async def kill(self) -> None:
        """End it and all that it started, also when cancelled meanwhile; safe to call twice."""
        process, log = self._process, self._log
        if process is None or log is None:
            return
        kill_group(process.pid)
        await to_the_end(_bury(process, log))

    async def _exchange(self, request: bytes) -> Answer:
        process = self._process
        assert process is not None  # start() comes first
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request)
        await process.stdin.drain()
        head = await process.stdout.readexactly(HEAD_BYTES)
        return read_answer(await process.stdout.readexactly(body_length(head, MAX_FRAME)))

    async def _last_words(self) -> str:
        """What it wrote last, if it wrote anything."""
        assert self._log is not None
        await self._log.wait(1.0)
        return f" ({self._tail[-1]})" if self._tail else ""

    def _note(self, line: str) -> None:
        self._tail.append(line)
        logger.warning("audit process: %s", line)
