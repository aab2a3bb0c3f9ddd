"""Start processes without leaving orphans: read their logs, kill their groups, end with the parent.

Every process started here leads its own group: a terminal's ctrl-C does not reach it, and its descendants are
killed with it.
"""

import asyncio
import ctypes
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PARENT_VARIABLE = "PRIMERL_PARENT_PID"
PRIVATE = frozenset({"PRIMERL_PASSPHRASE", "PRIMERL_PASSPHRASE_FILE", "WANDB_SERVICE"})
"""Variables for nodes alone: a secret, where it is, and the way to W&B's service."""
_CREDENTIAL = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSPHRASE)$", re.IGNORECASE)
"""Names of variables with credentials of services."""
TAIL_BYTES = 16384
MAX_LINE = 1000
LAST_LINES_S = 10.0
PR_SET_PDEATHSIG = 1
"""<linux/prctl.h>"""
EXIT_ORPHANED = 75
"""Exit code of a process whose parent has ended."""


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process that asks no service: those with credentials are left out."""
    return {
        name: value
        for name, value in environ.items()
        if name not in PRIVATE and not _CREDENTIAL.search(name)
    }


def began(pid: int) -> float:
    """Return when a process was started, in seconds of time.monotonic(); now, where /proc does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.monotonic() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.monotonic()


class LogTail:
    """Reads the output of a process line by line: start() first, close() last."""

    def __init__(self, stream: asyncio.StreamReader, note: Callable[[str], None]) -> None:
        self._stream = stream
        self._note = note
        self._reading: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to read."""
        self._reading = asyncio.create_task(self._read(), name="process log")

    async def wait(self, timeout_s: float) -> None:
        """Wait until the process closes its output, for at most `timeout_s`."""
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=timeout_s)

    async def close(self) -> None:
        """Read the rest and stop; safe to call twice."""
        await self.wait(LAST_LINES_S)
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        rest = b""
        while data := await self._stream.read(4096):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-MAX_LINE:]
            for line in lines:
                self._tell(line)
        self._tell(rest)

    def _tell(self, line: bytes) -> None:
        text = line[:MAX_LINE].decode(errors="replace").strip()
        if text:
            self._note(text)


class LoggedProcess:
    """A process that writes to a log file and takes no requests, but one text as its standard input."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = log
        self._command = command
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id, also its group id; None before start()."""
        return self._process.pid if self._process else None

    @property
    def ended(self) -> bool:
        """Whether it has started and ended."""
        return self._process is not None and self._process.returncode is not None

    async def start(self, *, fed: bool = False) -> None:
        """Start it and append its output to the log; `fed`: feed() gives it its standard input later."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE if fed else asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(self._environment),
                start_new_session=True,
            )

    async def feed(self, text: str) -> None:
        """Write the standard input of a process that was started to be fed, and end it."""
        assert self._process is not None, "start() comes first"
        assert self._process.stdin is not None, "start(fed=True) makes it"
        with suppress(ConnectionError):  # it has ended, which wait() tells
            self._process.stdin.write(text.encode())
            await self._process.stdin.drain()
        self._process.stdin.close()

    async def wait(self) -> int:
        """Return its exit code; negative for the signal that killed it."""
        assert self._process is not None, "start() comes first"
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL to the whole group after `grace_s`; return once it has ended."""
        if self._process is not None:
            await end_process(self._process, grace_s)

    def put_log_aside(self, limit: int, keep: int) -> None:
        """Rotate a log of more than `limit` bytes to NAME.1, older ones to NAME.2 .. NAME.keep. Raises OSError.

        The process keeps its file open, so the file is copied and truncated; lines written in between are lost.
        """
        if not self.log.exists() or self.log.stat().st_size <= limit:
            return
        names = [self.log, *(self.log.with_name(f"{self.log.name}.{n + 1}") for n in range(keep))]
        partial = self.log.with_name(f".{self.log.name}.partial")
        try:
            shutil.copyfile(self.log, partial)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        for older, name in zip(names[:1:-1], names[-2:0:-1], strict=True):
            if name.exists():
                name.replace(older)
        partial.replace(names[1])
        os.truncate(self.log, 0)

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines of its log."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
                return log.read().decode(errors="replace").splitlines()[-count:]
        except OSError:
            return []


async def start_process(
    program: Sequence[str],
    environment: Mapping[str, str],
    *,
    piped: bool = False,
    buffer: int = 1 << 16,
    pass_fds: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    """Start a process that leads its own group. Raises OSError.

    If `piped`, it has a pipe for input, output and log; else no input, and one pipe for output and log.
    `buffer` bytes of each may wait unread. It inherits the open files `pass_fds`.
    """
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *program,
        stdin=pipe if piped else asyncio.subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe if piped else asyncio.subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
        limit=buffer,
        pass_fds=pass_fds,
    )


def signal_process(pid: int, number: signal.Signals) -> None:
    """Send a signal to one process, if it still exists."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


async def end_process(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """Ask a process to exit, then kill the rest of its group."""
    try:
        if process.returncode is None:
            signal_process(process.pid, signal.SIGTERM)
            async with asyncio.timeout(grace_s):
                await process.wait()
    except TimeoutError:
        pass
    finally:  # also when cancelled
        kill_group(process.pid)
        await to_the_end(process.wait())


async def to_the_end(ending: Coroutine[Any, Any, object]) -> None:
    """Await `ending` to completion, then raise a cancellation that came meanwhile.

    The loop may be closed right after a cancellation, and asyncio closes pipes and reaps processes only
    while it runs.
    """
    task = asyncio.create_task(ending)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def kill_group(pid: int) -> None:
    """Send SIGKILL to the group that `pid` leads or led."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # the group is empty; macOS raises EPERM for a group of zombies


def leave_with_parent(
    environ: Mapping[str, str], *, poll_s: float = 0.5, grace_s: float = 20
) -> None:
    """End with the parent that PARENT_VARIABLE names: SIGTERM to this process, SIGKILL after `grace_s`.

    Runs in a daemon thread because the event loop of a busy node may be slow.
    """
    parent = environ.get(PARENT_VARIABLE, "")
    if not parent.isdigit():
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(poll_s)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        if os.getpgrp() == os.getpid():
            kill_group(os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(EXIT_ORPHANED)
    leave_with_parent({PARENT_VARIABLE: str(parent)})
