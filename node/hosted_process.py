"""Both ends of a process that answers a node: numbered frames over pipes, many requests under way at once.

HostedProcess is the parent's end. Whatever goes wrong with the process as a whole makes it lost: everything
that was asked raises the `Lost` of its class, and nothing else comes of it; its owner must kill() it then.
serve() is the process' own end: it ends with its input and with its parent.
"""

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from .errors import NodeError
from .frames import HEAD_BYTES, body_length, frame
from .processes import LogTail, kill_group, start_piped, to_the_end

logger = logging.getLogger(__name__)

Request = TypeVar("Request", contravariant=True)

MAX_FRAME = 64 << 20
TAIL_LINES = 200
EXIT_REASON_S = 1.0
"""For the exit code and the last lines of a process that has closed its output."""
END_S = 10.0
"""For what an ended process has left in its pipe."""
BUFFER = 1 << 20


class HostedProcess:
    """One process and what it was asked; subclasses say which frames there are and what its end means."""

    Lost: ClassVar[type[NodeError]] = NodeError

    def __init__(
        self, name: str, title: str, program: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """`name` is what logs call it, `title` what errors call it."""
        self._name = name
        self._title = title
        self._program = program
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._log: LogTail | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._out: list[bytes] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._fault = ""
        self._closing = False
        self.lost = asyncio.Event()
        """Set once it is of no use any more."""

    @property
    def pid(self) -> int | None:
        """Its process id, which is its group too; None before it is started."""
        return self._process.pid if self._process else None

    @property
    def fault(self) -> str:
        """Why it is lost, with what to do; empty while it is not."""
        return self._fault

    def _decode(self, body: bytes) -> Any:
        """The message in a frame, with a `number`. Raises ValueError."""
        raise NotImplementedError

    def _exit_reason(self, code: int | None, lines: Sequence[str]) -> str:
        """One sentence for the operator; `code` is negative for a signal, None while it runs."""
        raise NotImplementedError

    def _take(self, message: Any) -> None:
        """A message that came: the answer to what has its number."""
        if (future := self._asked.get(message.number)) is not None and not future.done():
            future.set_result(message)

    async def spawn(self, pass_fds: Sequence[int] = ()) -> None:
        """Start the process. Raises OSError."""
        self._process = await start_piped(
            self._program, self._environment, buffer=BUFFER, pass_fds=pass_fds
        )
        assert self._process.stderr is not None
        self._log = LogTail(self._process.stderr, self._note)
        self._log.start()
        self._tasks.append(asyncio.create_task(self._read(), name=f"{self._name} answers"))

    async def kill(self) -> None:
        """End it and all that it started, also when cancelled meanwhile; safe to call twice."""
        self._closing = True
        if self._process is not None:
            kill_group(self._process.pid)
            await to_the_end(self._bury(self._process))

    async def _end(self, error: NodeError, grace_s: float) -> None:
        """Close its input and wait for its end, then kill it; what was asked raises `error`."""
        self._closing = True
        self._fail(error)
        process = self._process
        if process is None:
            return
        try:
            if grace_s and process.stdin is not None and process.returncode is None:
                process.stdin.close()
                async with asyncio.timeout(grace_s):
                    await process.wait()
        except TimeoutError:
            logger.warning("%s did not end within %g s: killing it", self._name, grace_s)
        finally:
            await self.kill()

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

    async def _answer(self, request: Any, timeout_s: float | None) -> Any:
        """What comes for a request's number. Raises Lost, also if nothing comes in time."""
        if self._fault:
            raise self.Lost(self._fault)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[request.number] = future
        try:
            self._send(request)
            if timeout_s is None:
                return await future
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            await self._lose(
                f"{self._title} gave no answer within {timeout_s:g} s: see its log lines above"
            )
            raise self.Lost(self._fault) from error
        finally:
            self._asked.pop(request.number, None)

    def _send(self, request: msgspec.Struct) -> None:
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
                body = await stream.readexactly(body_length(head, MAX_FRAME))
                self._take(self._decode(body))
        except (asyncio.IncompleteReadError, OSError):
            await self._lose("")
        except ValueError as error:
            await self._lose(
                f"the process for {self._title} speaks no sense ({error}): install it anew"
            )
        with suppress(OSError):
            while await stream.read(BUFFER):
                pass  # asyncio closes the pipe only at its end

    async def _lose(self, fault: str) -> None:
        """It is of no use any more, for `fault` or for what its end says."""
        if self._fault or self._closing:
            return
        if not fault and self._process is not None and self._log is not None:
            with suppress(TimeoutError):  # its end, and its last lines, may come a moment later
                async with asyncio.timeout(EXIT_REASON_S):
                    await self._process.wait()
            await self._log.wait(EXIT_REASON_S if self._process.returncode is not None else 0.0)
            fault = self._exit_reason(self._process.returncode, list(self._tail))
        if self._fault:
            return  # somebody else found it meanwhile
        self._fault = fault
        self._fail(self.Lost(fault))
        self.lost.set()

    def _fail(self, error: NodeError) -> None:
        self._fault = self._fault or str(error)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)

    def _note(self, line: str) -> None:
        self._tail.append(line)
        level = logging.DEBUG if self._closing else logging.INFO
        logger.log(level, "%s: %s", self._name, line)


# -- in the process ---------------------------------------------------------------------------------


class Outbox:
    """Frames on their way out, those of one turn of the event loop together."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._frames: list[bytes] = []

    def put(self, message: msgspec.Struct) -> None:
        """Send a message when this turn ends."""
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._flush)
        self._frames.append(frame(message, MAX_FRAME))

    def _flush(self) -> None:
        self._write(b"".join(self._frames))
        self._frames.clear()


class FrameHost(Protocol[Request]):
    """Answers requests."""

    def take(self, request: Request) -> None:
        """Begin to answer."""
        ...

    async def close(self) -> None:
        """Give everything up."""
        ...


async def serve(
    source: Any,
    sink: Any,
    read: Callable[[bytes], Request],
    make: Callable[[Outbox], FrameHost[Request]],
) -> None:
    """Answer at two files of pipes until the input ends; `read` raises ValueError for what is no request."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sink)
    host = make(Outbox(transport.write))
    try:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(HEAD_BYTES)
                host.take(read(await reader.readexactly(body_length(head, MAX_FRAME))))
    finally:
        await host.close()
        transport.close()


def take_standard_output() -> Any:
    """The file for answers; what libraries print goes to the standard error from now on."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(answers, "wb")
