"""A node as a process under the rules of `primerl-node service`, for benchmarks and tests of real nodes.

Signals go to the whole node, with its child processes, as those of a service manager or a sleeping machine do.
"""

import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # pyright: ignore[reportMissingModuleSource]

from primerl.cli.service import IN_ORDER, NOT_AGAIN
from primerl.node.errors import NodeError
from primerl.node.ops import control

RESTART_S = 10.0
"""RestartSec of the unit."""
STOPPED = frozenset(map(int, (*NOT_AGAIN.split(), *IN_ORDER.split(), "0")))
"""Exit codes after which the unit does not start a node again."""


@dataclass
class Exit:
    """The end of a process."""

    at: float
    code: int
    meant: bool
    """Whether an event of the week ended it."""
    again: bool
    """Whether the unit started it again."""


@dataclass
class Node:
    """A node under the rules of its service."""

    name: str
    prefix: Sequence[str]
    """Puts a command into the node's network."""
    directory: Path
    """Its data directory."""
    log: Path
    command: list[str]
    environment: Mapping[str, str]
    exits: list[Exit] = field(default_factory=list[Exit])
    process: "subprocess.Popen[bytes] | None" = None
    meant: bool = False
    """Whether the next exit is an event's."""
    again: bool = True
    """Whether it is kept alive."""
    restart_s: float = RESTART_S
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start it, and keep it alive."""
        self.again, self.meant = True, False
        self.process = self._spawn()
        self._thread = threading.Thread(target=self._keep, name=self.name, daemon=True)
        self._thread.start()

    def _spawn(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*self.prefix, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.environment),
                start_new_session=True,
            )

    def _keep(self) -> None:
        while True:
            assert self.process is not None
            code = self.process.wait()
            code = 128 - code if code < 0 else code
            again = self.again and code not in STOPPED
            self.exits.append(Exit(time.monotonic(), code, self.meant, again))
            self.meant = False
            if not again:
                return
            time.sleep(self.restart_s)
            if not self.again:
                return
            self.process = self._spawn()

    @property
    def runs(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole node, as a service manager or a sleeping machine does."""
        assert self.process is not None
        self.meant = number in (signal.SIGKILL, signal.SIGTERM)
        if number == signal.SIGTERM:
            self.process.send_signal(number)  # KillMode=mixed
            return
        for process in (psutil.Process(self.process.pid), *self.children()):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill_alone(self) -> None:
        """Kill its process, not those that it started."""
        assert self.process is not None
        self.meant = True
        self.process.kill()

    def children(self) -> list[psutil.Process]:
        """Return its child processes."""
        assert self.process is not None
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def stop(self, patience_s: float = 60.0) -> None:
        """Stop it in order, for good; by force after `patience_s`."""
        self.again = False
        if not self.runs:
            return
        assert self.process is not None
        self.send(signal.SIGTERM)
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
        assert self._thread is not None
        self._thread.join(10.0)

    def ask(self, question: str) -> Any:
        """Ask the node; None if it does not answer."""
        with suppress(NodeError, OSError):
            return control.ask(self.directory, question)
        return None

    @property
    def started(self) -> float:
        """Unix time at which its present process began."""
        assert self.process is not None
        return psutil.Process(self.process.pid).create_time()

    def size(self) -> tuple[int, float, int]:
        """Return (process id, memory in MB that no other process shares, open files) of its processes."""
        assert self.process is not None
        memory, files = 0.0, 0
        for process in (psutil.Process(self.process.pid), *self.children()):
            with suppress(psutil.NoSuchProcess):
                memory += process.memory_full_info().uss / 1e6
                files += process.num_fds()
        return self.process.pid, memory, files
