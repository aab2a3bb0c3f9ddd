"""The processes of a benchmark swarm, each on its own node of a star, spoken to in JSON lines.

Every question has a deadline, and every process is killed when its block ends.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm_links import Star

START_S = 60.0
LINE_BYTES = 2**24

Answer = dict[str, Any]


class Failed(Exception):
    """A process did not do what it was asked; the message ends with its log."""


@dataclass(frozen=True)
class Version:
    """A file to spread."""

    name: str
    file: Path
    chunk: int
    """Bytes of a chunk."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.file.stat().st_size


class Program:
    """One process; what it logs is in `log`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    async def hear(self, timeout: float) -> Answer:
        """Its next answer. Raises Failed."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise Failed(f"{self._log.name}: no answer in {timeout:.0f} s{self._tail()}") from error
        if not line:
            raise Failed(f"{self._log.name}: ended early{self._tail()}")
        return json.loads(line)

    async def ask(self, timeout: float, **command: Any) -> Answer:
        """Its answer to `command`. Raises Failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        try:
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Failed(f"{self._log.name}: ended early{self._tail()}") from error
        return await self.hear(timeout)

    async def kill(self) -> None:
        """End it and what it started."""
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    def _tail(self) -> str:
        return "\n" + self._log.read_text(errors="replace")[-2000:]


class Launcher:
    """Starts processes, the i-th one on node i."""

    def __init__(self, star: Star, folder: Path) -> None:
        self._star = star
        self._folder = folder
        self.started: list[Program] = []

    async def start(self, command: Sequence[str]) -> Program:
        """`command` on the next node, with a folder of its own as its /tmp and current directory."""
        index = len(self.started)
        home = self._folder / str(index)
        home.mkdir(parents=True)
        log = self._folder / f"node-{index}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *self._star.inside(index),
                str(home),
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                cwd=home,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                limit=LINE_BYTES,
                start_new_session=True,
            )
        self.started.append(Program(process, log))
        return self.started[-1]


@asynccontextmanager
async def launcher(star: Star, folder: Path) -> AsyncGenerator[Launcher]:
    """For processes that are killed when the block ends."""
    launched = Launcher(star, folder)
    try:
        yield launched
    finally:
        for program in launched.started:
            await program.kill()


def busy_seconds() -> float:
    """CPU seconds that all cores of this machine have worked since it started."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, _ = map(int, first)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class Meter:
    """What the links carried and how busy the cores were, from construction on."""

    def __init__(self, star: Star) -> None:
        self._star = star
        self._before = star.traffic()
        self._busy = busy_seconds()
        self._start = time.monotonic()

    def read(self, size: int, workers: Sequence[int]) -> dict[str, float]:
        """In copies of a file of `size` bytes: node 0 sent, a worker received; and the cores' share."""
        traffic = [
            now.since(before)
            for now, before in zip(self._star.traffic(), self._before, strict=True)
        ]
        received = [traffic[worker].received / size for worker in workers]
        cores = (os.cpu_count() or 1) * (time.monotonic() - self._start)
        return {
            "egress": traffic[0].sent / size,
            "received": sum(received) / len(received),
            "received_most": max(received),
            "busy": (busy_seconds() - self._busy) / cores,
        }
