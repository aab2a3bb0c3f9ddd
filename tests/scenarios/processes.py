"""Real nodes as real processes, for the tests of this folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from primerl.node.errors import NodeError
from primerl.node.ops import control

HERE = Path(__file__).parent
CONFIG = HERE / "early.toml"
PATIENCE_S = 300.0


class Program:
    """One `primerl-node` process; its output goes to a file that a failing test shows."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        environment = {
            **os.environ,
            "PYTHONPATH": str(HERE / "tasksets"),
            "OMP_NUM_THREADS": "1",
            "XDG_RUNTIME_DIR": str(log.parent),
        }
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "primerl.cli.main", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Exit code."""
        return self.process.wait(timeout)

    def output(self) -> str:
        """Everything printed so far."""
        return self.log.read_text(errors="replace")


class Nodes:
    """Starts programs below one directory and kills what is left at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run_dir = directory / "outputs" / "early"
        self.programs: list[Program] = []

    def start(self, name: str, *arguments: str) -> Program:
        """A program whose log is `name`.log."""
        program = Program(self.directory / f"{name}.log", *arguments)
        self.programs.append(program)
        return program

    def trainer(self, *arguments: str) -> Program:
        """`primerl-node train` on the test config."""
        output = str(self.directory / "outputs")
        return self.start("trainer", "train", "@", str(CONFIG), "--output-dir", output, *arguments)

    def worker(self, name: str) -> Program:
        """`primerl-node join` with the run's ticket."""
        ticket = str(self.run_dir / "ticket.txt")
        data_dir = str(self.directory / name)
        return self.start(
            name, "join", "--role", "inference", "--ticket", ticket, "--data-dir", data_dir,
            "--network.host", "127.0.0.1", "--allow-environment", "early_letters",
        )  # fmt: skip

    def status(self, name: str = "trainer") -> dict[str, Any]:
        """What a running node says of itself; empty while it does not answer."""
        data_dir = self.run_dir / "trainer" if name == "trainer" else self.directory / name
        try:
            return control.ask(data_dir, "status")
        except NodeError:
            return {}

    def summary(self) -> dict[str, Any]:
        """The run's summary.json."""
        return json.loads((self.run_dir / "summary.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def until(self, what: str, condition: Callable[[], bool], timeout: float = PATIENCE_S) -> None:
        """Wait for a condition; a program that died meanwhile ends the wait with its output."""
        deadline = time.monotonic() + timeout
        lived = [program for program in self.programs if program.process.poll() is None]
        while not condition():
            assert time.monotonic() < deadline, f"no {what}: {self.logs()}"
            dead = [program.log.name for program in lived if program.process.poll() is not None]
            assert not dead or condition(), f"no {what}, and {dead} ended: {self.logs()}"
            time.sleep(0.1)

    def has_ticket(self) -> bool:
        """Whether the trainer has written its ticket."""
        return (self.run_dir / "ticket.txt").exists()

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"== {p.log.name}\n{p.output()[-3000:]}" for p in self.programs)


@contextmanager
def nodes(directory: Path) -> Generator[Nodes]:
    """Nodes below `directory`; none is left running afterwards."""
    started = Nodes(directory)
    try:
        yield started
    finally:
        for program in started.programs:
            if program.process.poll() is None:
                os.killpg(program.process.pid, signal.SIGKILL)
                program.process.wait(60)
