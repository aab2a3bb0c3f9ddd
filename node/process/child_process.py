"""Run a child process and talk to it: send numbered requests, watch it, kill it, explain why it ended.

Many requests may be pending at once. Invariants:
- a process that ends, hangs or sends an unreadable frame is lost: every pending and every later request raises
  `Lost` with the same reason; the owner then calls kill();
- end() and kill() make every pending request raise `Error`;
- nothing outlives kill(), even if its caller is cancelled: the process leads a group, which is killed as a
  whole, and its pipes are read to the end.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from ..errors import NodeError
from ..tasks import end_tasks
from .exit_reason import LOOK, exit_reason
from .frames import MAX_FRAME, ProcessMessage, frame, read_frames
from .spawn import LogTail, kill_group, start_process, to_the_end
from .unix_sockets import SOCKET_VARIABLE, TOKEN_VARIABLE, listen

logger = logging.getLogger(__name__)

REST_S = 300.0
"""Time without a request after which a process ends that the next request can start again; longer, where its
start took more than a REST_STARTS-th of it."""
REST_STARTS = 20.0
TAIL_LINES = 200
EXIT_REASON_S = 1.0
"""Wait for the exit code and the last log lines of a process that closed its output."""
END_S = 10.0
"""Limit on draining the pipe of a process that has ended."""
BUFFER = 1 << 20
"""Bytes of its answers that may wait unread."""


class ChildProcess:
    """A process and its pending requests: spawn() first, kill() last. Subclasses define the messages."""

    Error: ClassVar[type[NodeError]] = NodeError
    """Raised if it cannot be started, is not started, or is closed."""
    Lost: ClassVar[type[NodeError]] = NodeError
    """Raised once it has ended, hangs or sent an unreadable frame."""
    answers: ClassVar[msgspec.msgpack.Decoder[ProcessMessage[Any]]]
    """Decoder of its frames."""
    max_frame: ClassVar[int] = MAX_FRAME
    log_level: ClassVar[int] = logging.INFO
    """Level of its own log lines."""

    def __init__(
        self, name: str, title: str, program: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Prepare to run `program`; logs call it `name`, errors call it `title`."""
        self._name = name
        self._title = title
        self._program = program
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._log: LogTail | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._writer: asyncio.StreamWriter | None = None
        self._connection: asyncio.StreamWriter | None = None
        """The writer if it is a socket; a pipe closes with its process, a socket is closed here."""
        self._reading: asyncio.Task[None] | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._out: list[bytes] = []
        self._failure: NodeError | None = None
        self._losing = asyncio.Lock()
        self._closing = False
        self._received = 0
        self._heard_at = time.monotonic()
        self.missed_s = 0.0
        """Seconds of heartbeats in a row without a sign of life; time in which we stood still is none."""
        self.lost = asyncio.Event()
        """Set when the process is lost."""

    @property
    def pid(self) -> int | None:
        """Process id, also its group id; None before the start."""
        return self._process.pid if self._process else None

    @property
    def fault(self) -> str:
        """Reason why it is lost or closed; empty while it runs."""
        return str(self._failure or "")

    @property
    def silent_s(self) -> float:
        """Seconds since its last sign of life."""
        return time.monotonic() - self._heard_at

    # -- for subclasses ----------------------------------------------------------------------------

    def _take(self, message: ProcessMessage[Any]) -> None:
        """Deliver an answer to the request with its number. Raises EOFError to stop reading."""
        if (future := self._pending.get(message.number)) is not None and not future.done():
            future.set_result(message.body)

    def _exit_reason(self, code: int | None, lines: Sequence[str]) -> str:
        """Explain its exit to the operator; `code` is negative for a signal, None while it runs."""
        return exit_reason(self._title, code, lines)

    async def _find_reason(self, fault: str) -> str:
        """Return `fault`, or if that is empty a reason from its exit code and last log lines."""
        if fault or self._process is None or self._log is None:
            return fault
        with suppress(TimeoutError):  # it closes its output a moment before it exits
            async with asyncio.timeout(EXIT_REASON_S):
                await self._process.wait()
        await self._log.wait(EXIT_REASON_S if self._process.returncode is not None else 0.0)
        return self._exit_reason(self._process.returncode, list(self._tail))

    def _closed(self) -> NodeError:
        """Make the error for requests before spawn() and after end()."""
        return self.Error(f"{self._title} was closed: start another")

    def _request_end(self) -> None:
        """Ask it to exit; by default by closing its input."""
        if self._writer is not None:
            self._writer.close()

    async def _kill_now(self, process: asyncio.subprocess.Process) -> None:
        """Kill and reap its group."""
        kill_group(process.pid)
        await process.wait()

    def _life(self) -> object:
        """Return a value that changes while the process is alive and making progress."""
        return self._received

    def _ailment(self) -> str:
        """Report a fault of a process that still answers; empty if there is none. Called at every heartbeat."""
        return ""

    def _note(self, line: str) -> None:
        """Log a line of its output and keep it for the exit reason."""
        self._tail.append(line)
        level = logging.DEBUG if self._closing else self.log_level
        logger.log(level, "%s: %s", self._name, line)

    # -- starting ----------------------------------------------------------------------------------

    async def spawn(self, pass_fds: Sequence[int] = ()) -> None:
        """Start the process and talk through its pipes. Raises Error."""
        try:
            process = await start_process(
                self._program, self._environment, piped=True, buffer=BUFFER, pass_fds=pass_fds
            )
        except OSError as error:
            raise self._unstartable(error) from error
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        await self._follow(process, process.stderr)
        self._talk(process.stdout, process.stdin)

    async def spawn_at_socket(self, path: Path, unconnected: str) -> None:
        """Start the process and wait until it, or a descendant, connects to the socket at `path` (serve.py).

        Has no deadline. Raises Error, and Lost with `unconnected` if the process ends first.
        """
        token = secrets.token_hex(32)
        server, accepted = await listen(path, token)
        try:
            variables = {SOCKET_VARIABLE: str(path), TOKEN_VARIABLE: token}
            try:
                process = await start_process(self._program, {**self._environment, **variables})
            except OSError as error:
                raise self._unstartable(error) from error
            assert process.stdout is not None
            await self._follow(process, process.stdout)
            ended = asyncio.create_task(process.wait())
            try:
                await asyncio.wait({accepted, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
            if not accepted.done():
                await self._lose(unconnected)
                raise self._failed()
            reader, self._connection = accepted.result()
            self._talk(reader, self._connection)
        finally:
            accepted.cancel()
            server.close()

    def _unstartable(self, error: OSError) -> NodeError:
        return self.Error(
            f"the process for {self._title} cannot be started ({error}): free memory or processes"
        )

    async def _follow(self, process: asyncio.subprocess.Process, log: asyncio.StreamReader) -> None:
        """Watch a new process. Raises Error if this was closed while the process was being started."""
        self._process = process
        self._log = LogTail(log, self._note)
        self._log.start()
        if self._closing:
            await self.kill()
            raise self._failed()

    def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._heard_at = time.monotonic()
        self._reading = asyncio.create_task(self._read(reader), name=f"{self._name} answers")

    # -- ending ------------------------------------------------------------------------------------

    async def end(self, grace_s: float) -> None:
        """Ask it to exit and kill it after `grace_s`; pending requests raise Error.

        A lost process is killed at once.
        """
        process, well = self._process, self._failure is None
        self._closing = True
        self._fail(self._closed())
        try:
            if grace_s and well and self._writer and process and process.returncode is None:
                self._request_end()
                async with asyncio.timeout(grace_s):
                    await process.wait()
        except TimeoutError:
            logger.warning("%s did not end within %g s: killing it", self._name, grace_s)
        finally:
            await self.kill()

    async def kill(self) -> None:
        """Kill it and everything it started, even if cancelled meanwhile; safe to call twice."""
        self._closing = True
        self._fail(self._closed())
        await to_the_end(self._bury())

    async def _bury(self) -> None:
        if self._process is not None:
            await self._kill_now(self._process)
        await end_tasks(self._heartbeat)
        if self._reading is not None:  # reads to the end of the pipe
            await asyncio.wait([self._reading], timeout=END_S)
        if self._connection is not None:
            self._connection.close()
            with suppress(OSError, TimeoutError):  # the other end is dead
                async with asyncio.timeout(END_S):
                    await self._connection.wait_closed()
        if self._log is not None:
            await self._log.close()

    # -- asking ------------------------------------------------------------------------------------

    async def _answer(
        self, request: Any, timeout_s: float | None, number: int | None = None
    ) -> Any:
        """Send a request and return its answer; `number` is the request's, by default the next one.

        Raises Lost, also after `timeout_s`; Error once it is closed; ValueError if the request is longer than
        `max_frame`.
        """
        number = next(self._numbers) if number is None else number
        data = frame(ProcessMessage(number, request), self.max_frame)
        return await self._exchange(number, data, type(request).__name__, timeout_s)

    async def _exchange(self, number: int, data: bytes, name: str, timeout_s: float | None) -> Any:
        """Send an encoded request as _answer() does; errors call it `name`."""
        if self._failure is not None or self._writer is None:
            raise self._failed()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            self._write(data)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            await self._lose(f"{self._title} gave no answer to {name} in {timeout_s:g} s: {LOOK}")
            raise self._failed() from error
        finally:
            self._pending.pop(number, None)

    async def _expect(self, answer: Any, kind: Any) -> None:
        """Check that an answer has the type `kind`. Raises Lost."""
        if not isinstance(answer, kind):
            await self._lose(
                f"the process for {self._title} speaks another language: install one version"
            )
            raise self._failed()

    def _send(self, request: Any, number: int = 0) -> None:
        """Send a request that has no answer; `number` is that of the request it is about."""
        self._write(frame(ProcessMessage(number, request), self.max_frame))

    def _write(self, data: bytes) -> None:
        """Queue a frame; the frames of one event loop turn are written together."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        data = b"".join(self._out)
        self._out.clear()
        if self._writer is not None:
            self._writer.write(data)  # ignored if the process has exited

    async def _read(self, stream: asyncio.StreamReader) -> None:
        try:
            async for body in read_frames(stream, self.max_frame):
                message = self.answers.decode(body)
                self._received += 1
                self._heard_at = time.monotonic()
                self._take(message)
        except (EOFError, OSError):  # IncompleteReadError is an EOFError
            await self._lose("")
        except ValueError as error:
            await self._lose(
                f"the process for {self._title} speaks no sense ({error}): install it anew"
            )
        with suppress(OSError):
            while await stream.read(BUFFER):
                pass  # asyncio closes the pipe only at its end

    def _failed(self) -> NodeError:
        """Make the error for requests from now on."""
        failure = self._failure or self._closed()
        return type(failure)(str(failure))

    async def _lose(self, fault: str) -> None:
        """Declare it lost, because of `fault` or of its exit."""
        async with self._losing:
            if self._failure is not None or self._closing:
                return
            reason = await self._find_reason(fault)
            if self._failure is None:  # it may have been closed meanwhile
                self._fail(self.Lost(reason))
                self.lost.set()

    def _fail(self, failure: NodeError) -> None:
        self._failure = self._failure or failure
        for future in self._pending.values():
            if not future.done():
                future.set_exception(failure)

    # -- watching ----------------------------------------------------------------------------------

    def _watch(self, ping: Any, every_s: float, silent_s: float) -> None:
        """Send it `ping` from now on and declare it lost after `silent_s` without a sign of life."""
        self._heartbeat = asyncio.create_task(
            self._beat(ping, every_s, silent_s), name=f"{self._name} heartbeat"
        )

    async def _beat(self, ping: Any, every_s: float, silent_s: float) -> None:
        # Counts beats, not seconds: while our own event loop is blocked no answer can be read.
        life = self._life()
        while self._failure is None:
            self._send(ping)
            await asyncio.sleep(every_s)
            before, life = life, self._life()
            if life != before:
                self.missed_s, self._heard_at = 0.0, time.monotonic()
            else:
                self.missed_s += every_s
            if self.missed_s >= silent_s:
                await self._lose(f"{self._title} gave no answer within {silent_s:g} s: {LOOK}")
            elif ailment := self._ailment():
                await self._lose(ailment)
