"""Benchmark succession: a trainer is killed and its directory removed, and its standby leads the run.

    .venv/bin/python scripts/bench/succession.py [--quick] [--runs N] [--lease S] [--json FILE]

Each run is the demo in processes of its own over iroh, on this machine: a trainer, a worker and a standby that
a root key has certified. After some steps the trainer's process group is killed with SIGKILL and all that it
wrote is removed. Judged are the time until the worker has the next head, what its work was rejected for, and
whether every step was trained once in the history that goes on. --quick does one run.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil  # pyright: ignore[reportMissingModuleSource]

from primerl.crypto.keys import SecretKey
from primerl.node.errors import NodeError
from primerl.node.ops import control
from primerl.node.removal import remove_own
from primerl.protocol.leaders import LeaderList, certify
from primerl.scripts.bench.report import at_least, at_most, conclude, make_parser, show_figures

PROGRAM = (sys.executable, "-P", "-m", "primerl.cli.main")
STEPS, MORE = 8, 4
"""Steps before the loss, and after it."""
PATIENCE_S = 400.0
HARMLESS = {"stale", "expired", "withdrawn"}


def main() -> int:
    """Run, print, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "one run")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--lease", type=int, default=30)
    options = parser.parse_args()
    count = 1 if options.quick else options.runs
    rows: list[dict[str, float]] = []
    for number in range(count):
        with tempfile.TemporaryDirectory() as directory, ExitStack() as cleanup:
            rows.append(Trial(Path(directory), options.lease, cleanup).run())
        print(f"run {number + 1} of {count}: {rows[-1]}", flush=True)
    names = rows[0].keys()
    figures = {f"{name}, median": statistics.median(row[name] for row in rows) for name in names}
    figures |= {f"{name}, most": max(row[name] for row in rows) for name in names}
    show_figures(figures)
    print()
    goals = [
        at_least("runs that went on", sum(row["went on"] for row in rows), count),
        at_most("next head at the worker, in leases", figures["next head, leases, most"], 2.0),
        at_most("rollouts rejected as wrong", figures["rejected as wrong, most"], 0),
        at_most("steps missing or twice", figures["steps missing or twice, most"], 0),
    ]
    return conclude(figures, goals, options.json)


class Trial:
    """One run whose trainer is lost."""

    def __init__(self, directory: Path, lease_s: int, cleanup: ExitStack) -> None:
        self._directory = directory
        self._lease_s = lease_s
        self._cleanup = cleanup
        self._root = SecretKey.generate()
        self._run = directory / "t" / "demo"

    def run(self) -> dict[str, float]:
        """Lose the trainer; return the figures."""
        standby = SecretKey.generate()
        (self._directory / "s").mkdir()
        standby.save(self._directory / "s" / "key.pem", None)
        trainer = self._start(
            *("train", "@", "configs/demo.toml", "--output-dir", str(self._directory / "t")),
            *("--checkpoint.root", self._root.node_id.hex(), "--max-steps", "400"),
        )
        ticket = self._run / "ticket.txt"
        until("ticket", ticket.exists)
        until("trainer", lambda: self._certify(standby.node_id))
        join = ("join", "--ticket", str(ticket), "--data-dir")
        self._start(*join, str(self._directory / "w"))
        copying = self._start(*join, str(self._directory / "s"), "--role", "standby")
        until("steps", lambda: steps_of(self._run)[-1:] >= [STEPS])
        copy = self._directory / "s" / "run"
        until("a copy", lambda: steps_of(copy)[-1:] >= [STEPS - MORE])
        figures = self._cost(trainer, copying, standby.node_id)
        last = steps_of(self._run)[-1]
        os.killpg(trainer.pid, signal.SIGKILL)
        lost = time.monotonic()
        trainer.wait()
        remove_own(self._directory / "t")
        worker = self._directory / "w"
        until(
            "a successor",
            lambda: asked(worker, "leaders").get("leader") == standby.node_id.hex(),
        )
        waited = time.monotonic() - lost
        begun = steps_of(copy)[-1]
        until("more steps", lambda: steps_of(copy)[-1:] >= [begun + MORE])
        steps = steps_of(copy)
        rejected = asked(worker, "status").get("rejected", {})
        for name in rejected.keys() - HARMLESS:
            print(f"{rejected[name]} rejected as {name}", flush=True)
            command = [*PROGRAM, "explain", "--data-dir", str(worker)]
            print(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
        return figures | {
            "next head, s": round(waited, 1),
            "next head, leases": round(waited / self._lease_s, 2),
            "steps lost with the disk": max(0, last - begun),
            "rejected as wrong": sum(n for name, n in rejected.items() if name not in HARMLESS),
            "rejected as stale": sum(n for name, n in rejected.items() if name in HARMLESS),
            "steps missing or twice": len(set(steps) ^ set(range(1, len(steps) + 1))),
            "went on": 1,
        }

    def _cost(
        self, trainer: "subprocess.Popen[bytes]", standby: "subprocess.Popen[bytes]", node: bytes
    ) -> dict[str, float]:
        """Return what following has cost so far, by step."""
        rows = asked(self._run / "trainer", "peers")
        sent = next((row["bytes_sent"] for row in rows if row["id"] == node.hex()), 0)
        steps = steps_of(self._run)[-1]
        times = psutil.Process(standby.pid).cpu_times()
        whole = psutil.Process(trainer.pid).cpu_times()
        return {
            "sent to the standby, MB a step": round(sent / 1e6 / steps, 3),
            "CPU of the standby, s": round(times.user + times.system, 2),
            "CPU of the trainer's process, s": round(whole.user + whole.system, 2),
        }

    def _certify(self, node: bytes) -> bool:
        seen = asked(self._run / "trainer", "leaders")
        if not seen:
            return False
        listed = LeaderList(1, (bytes.fromhex(seen["trainer"]), node), self._lease_s)
        sealed = certify(self._root, bytes.fromhex(seen["run"]), listed).hex()
        return bool(asked(self._run / "trainer", "leaders", sealed=sealed))

    def _start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        return start(arguments, self._directory, self._cleanup)


def start(
    arguments: Sequence[str],
    logs: Path,
    cleanup: ExitStack,
    program: Sequence[str] = PROGRAM,
    **environment: str,
) -> "subprocess.Popen[bytes]":
    """Start the program with a log in `logs`, to be killed by `cleanup`."""
    with (logs / f"{arguments[0]}-{time.monotonic_ns()}.log").open("wb") as log:
        process = subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | environment,
        )
    cleanup.callback(end, process)
    return process


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def until(what: str, true: Callable[[], Any]) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    limit = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > limit:
            raise TimeoutError(f"no {what} within {PATIENCE_S:.0f} s")
        time.sleep(0.1)


def asked(data_dir: Path, command: str, **arguments: Any) -> Any:
    """Ask a node; return {} while it does not answer."""
    try:
        return control.ask(data_dir, command, **arguments)
    except (NodeError, OSError):
        return {}


def steps_of(run_dir: Path) -> list[int]:
    """Return the steps in a run's metrics, in order."""
    with suppress(OSError):
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row["step"] for row in rows if "reward/mean" in row]
    return []


if __name__ == "__main__":
    sys.exit(main())
