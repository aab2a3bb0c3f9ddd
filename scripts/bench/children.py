"""Child processes of benchmarks: commands as JSON lines on stdin, events on stdout.

A child ends when its stdin does: a killed benchmark leaves no process behind. Other output of a child or its
libraries goes to its log, since stdout carries the events.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil  # pyright: ignore[reportMissingModuleSource]

LINE_BYTES = 2**24
END_S = 30.0

Event = dict[str, Any]
Handler = Callable[[Event], Awaitable[Event]]


def cpu_by_process(root: int) -> dict[str, float]:
    """Return CPU seconds of a process and its living descendants, by name and process id.

    Descendants include vLLM's processes.
    """
    found: dict[str, float] = {}
    process = psutil.Process(root)
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            spent = one.cpu_times()
            found[f"{one.name()}:{one.pid}"] = spent.user + spent.system
    return found


def cpu_seconds(root: int) -> float:
    """Return the CPU seconds of a process and its living descendants together."""
    return sum(cpu_by_process(root).values())


def tail(directory: Path, length: int = 2500) -> str:
    """Return the ends of the logs of a `primerl-node rl` with its output in `rl.log`."""
    logs = [directory / "rl.log", *directory.glob("run/logs/*.log")]
    return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-length:]}" for log in logs)


class Wire:
    """A child's end of the connection. Create it before anything prints."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # output of libraries and of vLLM's child processes goes to the log

    def tell(self, event: str, **more: Any) -> None:
        """Report an event with its time (seconds of the wall clock)."""
        print(json.dumps({"event": event, "at": time.time(), **more}), file=self._out)

    async def serve(self, handlers: Mapping[str, Handler]) -> None:
        """Answer commands until `stop` or the parent's end."""
        reader = asyncio.StreamReader(limit=LINE_BYTES)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        coming = asyncio.create_task(reader.readline())
        while (line := await coming) and (command := json.loads(line))["do"] != "stop":
            coming = asyncio.create_task(reader.readline())
            answering = asyncio.ensure_future(handlers[command["do"]](command))
            await asyncio.wait((answering, coming), return_when=asyncio.FIRST_COMPLETED)
            if coming.done() and not coming.result():  # the parent is gone: cancel the command
                answering.cancel()
                await asyncio.wait((answering,))
                return
            self.tell("answer", **await answering)


class ChildFailed(RuntimeError):
    """A process ended, or did not answer in time; the message ends with its log."""


class Child:
    """The parent's end of one process."""

    def __init__(self, name: str, log: Path) -> None:
        self.name, self.log = name, log
        self.events: list[Event] = []
        self.begun = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._news = asyncio.Condition()

    async def start(
        self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """Start the process in a new process group."""
        self.begun = time.time()
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=cwd,
                env=env,
                limit=LINE_BYTES,
                start_new_session=True,
            )
        self._reading = asyncio.create_task(self._read(), name=self.name)

    async def event(self, name: str, timeout_s: float) -> Event:
        """Return the first event of that name.

        Raises ChildFailed when the process ends or time is up.
        """
        return await self._wait(lambda: self._found(name, 0), name, timeout_s)

    async def ask(self, do: str, timeout_s: float = 60.0, **more: Any) -> Event:
        """Send a command and return its answer, which is the next one."""
        assert self._process is not None, "start() comes first"
        assert self._process.stdin is not None
        before = len(self.events)
        self._process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
        with suppress(BrokenPipeError, ConnectionResetError):  # the process has ended: see below
            await self._process.stdin.drain()
        return await self._wait(lambda: self._found("answer", before), do, timeout_s)

    async def end(self, patience_s: float = END_S) -> None:
        """Stop the process, by force after `patience_s`, and all processes it started."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(patience_s):
                await process.wait()
        except TimeoutError:
            pass
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if self._reading is not None:
            await self._reading

    def _found(self, name: str, after: int) -> Event | None:
        return next((one for one in self.events[after:] if one["event"] == name), None)

    async def _wait(self, found: Callable[[], Event | None], what: str, timeout_s: float) -> Event:
        try:
            async with asyncio.timeout(timeout_s), self._news:
                while (event := found()) is None:
                    if self._reading is None or self._reading.done():
                        raise ChildFailed(f"{self.name} ended before {what!r}:\n{self.tail()}")
                    await self._news.wait()
        except TimeoutError:
            raise ChildFailed(
                f"{self.name}: no {what!r} within {timeout_s:.0f} s:\n{self.tail()}"
            ) from None
        return event

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                await self._add(json.loads(line))
        finally:
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._waking = asyncio.ensure_future(self._add(None))

    async def _add(self, event: Event | None) -> None:
        async with self._news:
            if event is not None:
                self.events.append(event)
            self._news.notify_all()

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""
