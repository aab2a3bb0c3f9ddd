"""Benchmark nodes that wait: CPU and memory of a trainer without workers, and of a worker without leases.

    .venv/bin/python scripts/bench/idle.py [--quick] [--json FILE]

Starts the demo's trainer in a terminal, measures it, lets a worker join it and work, stops the trainer, and
measures the worker. Memory is proportional (shared pages are divided among processes), of all processes of a
node. The second figures are from after the time without requests in which environments and auditor end their
processes. --quick does not wait for that and measures for 20 s.
"""

import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # pyright: ignore[reportMissingModuleSource]

from primerl.node.errors import NodeError
from primerl.node.ops.control import ask
from primerl.node.process.child_process import REST_S
from primerl.scripts.bench.children import cpu_by_process
from primerl.scripts.bench.report import Goal, at_most, conclude, make_parser, show_figures

WINDOW_S, QUICK_WINDOW_S = 60.0, 20.0
SETTLE_S = 15.0
"""Between the start of a node's wait and its measurement."""
DEADLINE_S = 300.0
CPU_GOAL = 1.0
TRAINER_MB_GOAL, WORKER_MB_GOAL = 400.0, 120.0


def main() -> int:
    """Measure, print, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, f"windows of {QUICK_WINDOW_S:.0f} s; no process is waited for")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = measure_nodes(Path(directory), quick=options.quick)
    show_figures(figures)
    print()
    return conclude(figures, judge(figures), options.json)


def measure_nodes(directory: Path, *, quick: bool) -> dict[str, float]:
    """Return the figures of both nodes, by name."""
    run, worker = directory / "demo", directory / "worker"
    figures: dict[str, float] = {}
    train = ("train", "@", "configs/demo.toml", "--no-warmup", "--output-dir", str(directory))
    with node(train) as trainer:
        wait_until(lambda: _status(run / "trainer", "phase") == "running")
        figures |= measure("trainer", trainer.pid, quick=quick)
        join = ("join", "--ticket", str(run / "ticket.txt"), "--data-dir", str(worker))
        with node((*join, "--wait", "--network.host", "127.0.0.1")) as worker_node:
            wait_until(lambda: (_status(worker, "accepted") or 0) > 0)
            figures |= size("trainer with its auditor", trainer.pid)
            trainer.terminate()
            trainer.wait(DEADLINE_S)
            figures |= measure("worker", worker_node.pid, quick=quick)
    return figures


def _status(data_dir: Path, field: str) -> Any:
    """Return a field of a node's status; None if it does not answer."""
    with suppress(NodeError):
        return ask(data_dir, "status")[field]
    return None


@contextmanager
def node(arguments: tuple[str, ...]) -> Generator["subprocess.Popen[bytes]"]:
    """Run a node in a terminal, whose screen nobody looks at, until the block ends."""
    main_end, terminal = pty.openpty()
    command = [sys.executable, "-m", "primerl.cli.main", *arguments]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    threading.Thread(target=_drain, args=(main_end,), daemon=True).start()
    try:
        yield process
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def _drain(descriptor: int) -> None:
    with suppress(OSError):  # the terminal has gone
        while os.read(descriptor, 2**16):
            pass


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("a node of the benchmark is not ready: look at its logs")
        time.sleep(0.5)


def measure(name: str, pid: int, *, quick: bool) -> dict[str, float]:
    """Return CPU and memory of an idle node, now and after its other processes have ended."""
    time.sleep(SETTLE_S)
    window_s = QUICK_WINDOW_S if quick else WINDOW_S
    figures = {f"{name}, % of a core": _cpu_percent(pid, window_s)} | size(name, pid)
    if not quick:
        time.sleep(REST_S - window_s)
        figures |= {f"{name} at rest, % of a core": _cpu_percent(pid, window_s)}
        figures |= size(f"{name} at rest", pid)
    return figures


def _cpu_percent(pid: int, window_s: float) -> float:
    """Measure a node's CPU time in percent of a core; processes that end meanwhile are left out."""
    before, began = cpu_by_process(pid), time.monotonic()
    time.sleep(window_s)
    after = cpu_by_process(pid)
    spent = sum(seconds - before.get(process, 0.0) for process, seconds in after.items())
    return 100.0 * spent / (time.monotonic() - began)


def size(name: str, pid: int) -> dict[str, float]:
    """Return the memory of a node's processes together, and how many they are."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    shares = [process.memory_full_info().pss for process in processes]
    return {f"{name}, MB": sum(shares) / 1e6, f"{name}, processes": len(shares)}


def judge(figures: dict[str, float]) -> list[Goal]:
    """Return the goals, of a node at rest where it was waited for."""
    goals: list[Goal] = []
    for name, megabytes in (("trainer", TRAINER_MB_GOAL), ("worker", WORKER_MB_GOAL)):
        goals.append(at_most(f"idle {name}", figures[f"{name}, % of a core"], CPU_GOAL, "%"))
        if (rest := figures.get(f"{name} at rest, MB")) is not None:
            goals.append(at_most(f"idle {name} at rest", rest, megabytes, "MB"))
    return goals


if __name__ == "__main__":
    sys.exit(main())
