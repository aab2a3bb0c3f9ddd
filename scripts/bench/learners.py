"""Benchmark learners: one trainer against a trainer with learners, at equal tokens.

    .venv/bin/python scripts/bench/learners.py [--quick] [--seeds N] [--json FILE]
    .venv/bin/python scripts/bench/learners.py --bound [--model DIR] [--cores N] [--versions N] [--json FILE]

Without --bound each run is the demo in processes of its own over iroh, on this machine, to its end: held-out
reward of one trainer, and of two learners (the trainer and one more) with H = 4 and H = 8 inner steps, each
with the same rollouts in all. --quick does one seed, and H = 4 alone. With --bound training is what a run waits
for: learners compute on N cores each, vLLM generates on a GPU; judged are trained tokens a second and the size
of contributions at a learning rate of 1e-6.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from primerl.crypto.keys import KEY_FILE, SecretKey
from primerl.scripts.bench.report import Goal, at_least, at_most, conclude, make_parser
from primerl.scripts.bench.succession import PROGRAM, end, steps_of, until

GROUPS, STEPS = 16, 160
"""Groups of an optimizer step, and steps of the demo."""
LEARNERS = 2
"""The trainer among them."""
LAG = 1
"""Versions that a rollout may be behind, besides the inner steps of its own."""
BAND = 1.96
MOST_S = 900.0


def main() -> int:
    """Run, print, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "one seed, H = 4")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--bound", action="store_true", help="where training is what a run waits for"
    )
    parser.add_argument("--model", default="", help="--bound: model directory")
    parser.add_argument("--cores", type=int, default=4, help="--bound: cores of each learner")
    parser.add_argument("--versions", type=int, default=5, help="--bound: versions of each run")
    parser.add_argument("--inner", type=int, default=4, help="--bound: inner steps")
    parser.add_argument("--worker", default="", help="--bound: more arguments of `join`")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the demo")
    options = parser.parse_args()
    if options.bound:
        rows, goals = bound(options)
    else:
        seeds = 1 if options.quick else options.seeds
        rows, goals = parity(seeds, [4] if options.quick else [4, 8], options.steps)
    return conclude(rows, goals, options.json)


def parity(seeds: int, inner: Sequence[int], steps: int) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Compare held-out rewards."""
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        for h in (0, *inner):
            arguments = [
                *("@", "configs/demo.toml", "--seed", str(seed), "--max-steps"),
                *(str(steps // h if h else steps), "--checkpoint.interval", "1"),
            ]
            if h:
                groups, stale = GROUPS * h * LEARNERS, (LAG + 1) * h - 1
                arguments[5] = str(max(1, steps // (h * LEARNERS)))
                arguments += [
                    *("--rollouts.groups-per-batch", str(groups)),
                    *("--rollouts.max-off-policy-steps", str(stale)),
                ]
            with tempfile.TemporaryDirectory() as directory, ExitStack() as cleanup:
                trial = Trial(Path(directory), cleanup, h, learners=LEARNERS if h else 1)
                row = {"seed": seed, "inner steps": h, **trial.run(arguments)}
            rows.append(row)
            print(row, flush=True)
    alone = [row["reward after"] for row in rows if not row["inner steps"]]
    spread = statistics.stdev(alone) if len(alone) > 1 else 0.0
    least = statistics.mean(alone) - BAND * spread
    goals = [
        at_least(
            f"reward with two learners, H = {h} (goal: the band of one trainer)",
            statistics.mean(row["reward after"] for row in rows if row["inner steps"] == h),
            least,
        )
        for h in inner
    ]
    return rows, goals


def bound(options: Any) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Compare trained tokens a second where training is what a run waits for."""
    model = ["--model.name", options.model] if options.model else []
    rows: list[dict[str, Any]] = []
    for count in (1, LEARNERS):
        h = options.inner
        arguments = [
            *("@", "scripts/bench/small.toml", *model, "--max-steps", str(options.versions)),
            *("--environment.id", "alphabet-sort", "--training.device", "cpu"),
            *("--environment.args.min-turns", "1", "--environment.args.max-turns", "1"),
            *("--training.threads", str(options.cores), "--training.lr", "1e-6"),
            *("--rollouts.groups-per-batch", str(h * LEARNERS), "--rollouts.group-size", "8"),
            *("--rollouts.groups-per-lease", "1", "--checkpoint.interval", "1"),
            *("--rollouts.max-off-policy-steps", str((LAG + 1) * h - 1 if count > 1 else LAG)),
            *("--training.dtype", "float32", "--verification.auditor", "hf"),
        ]
        with tempfile.TemporaryDirectory() as directory, ExitStack() as cleanup:
            trial = Trial(
                Path(directory),
                cleanup,
                h if count > 1 else 0,
                learners=count,
                cores=options.cores,
                worker=shlex.split(options.worker),
            )
            row = {"learners": count, **trial.run(arguments)}
        rows.append(row)
        print(row, flush=True)
    alone, both = rows
    goals = [
        at_least(
            "trained tokens/s of two learners, times one's",
            both["tokens/s"] / alone["tokens/s"],
            1.8,
        ),
        at_most(
            "bytes of a contribution, of dense FP32",
            both["MB a contribution"] / both["dense MB"],
            1 / 17,
        ),
    ]
    return rows, goals


class Trial:
    """One run."""

    def __init__(
        self,
        directory: Path,
        cleanup: ExitStack,
        inner: int,
        *,
        learners: int,
        cores: int = 1,
        worker: Sequence[str] = (),
    ) -> None:
        self._directory = directory
        self._cleanup = cleanup
        self._inner = inner
        self._others = learners - 1
        self._cores = cores
        self._worker = worker
        self._run = directory / "t" / "run"

    def run(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Train to the end; return the figures."""
        keys = [SecretKey.generate() for _ in range(self._others)]
        nodes = json.dumps([key.node_id.hex() for key in keys])
        config = self._directory / "learners.toml"
        config.write_text(f"fsync = false\n[learners]\nnodes = {nodes}\n")
        if self._inner:
            arguments = [*arguments, "--learners.inner-steps", str(self._inner)]
        began = time.monotonic()
        output = ("--name", "run", "--output-dir", str(self._directory / "t"))
        trainer = self._start("train", *arguments[:2], "@", str(config), *arguments[2:], *output)
        ticket = self._run / "ticket.txt"
        until("ticket", lambda: ticket.exists() or trainer.poll() is not None)
        if trainer.poll() is not None:
            raise RuntimeError("the trainer ended: LOGS=DIRECTORY keeps its log")
        join = ("join", "--ticket", str(ticket), "--data-dir")
        self._start(*join, str(self._directory / "w"), *self._worker)
        learning: list[Path] = []
        for number, key in enumerate(keys):
            learning.append(self._directory / f"l{number}")
            learning[-1].mkdir()
            key.save(learning[-1] / KEY_FILE, None)
            threads = ("--training.threads", str(self._cores))
            device = ("--training.device", "cpu", "--training.backend", "local")
            self._start(*join, str(learning[-1]), "--role", "learner", *device, *threads)
        while trainer.poll() is None and time.monotonic() - began < MOST_S:
            time.sleep(0.5)
        took = time.monotonic() - began
        figures = self._figures()
        if trainer.poll() is None:
            print(f"ended after {took:.0f} s, at step {steps_of(self._run)[-1:]}", flush=True)
        return {"seconds": round(took, 1), **figures}

    def _figures(self) -> dict[str, Any]:
        lines = (self._run / "metrics.jsonl").read_text().splitlines()
        rows = [row for line in lines if "reward/mean" in (row := json.loads(line))]
        steady = rows[1:]
        figures: dict[str, Any] = {"versions": len(rows)}
        if len(steady) > 1:
            trained = sum(row["tokens"] for row in steady[1:])
            figures["tokens/s"] = round(trained / (steady[-1]["time"] - steady[0]["time"]), 1)
        if self._inner and steady:
            merged = [row["learners/merged"] for row in steady]
            figures["merged"] = statistics.mean(merged) if merged else 0
            sizes = [row["learners/mib"] / row["learners/merged"] for row in steady]
            figures["MB a contribution"] = round(2**20 / 1e6 * statistics.mean(sizes), 3)
            for name in ("ready", "collect", "merge"):
                times = [row[f"time/learners/{name}"] for row in steady]
                figures[f"{name}, s"] = round(statistics.median(times), 2)
            figures["dense MB"] = round(masters_bytes(self._run) / 1e6, 1)
        summary = self._run / "summary.json"
        if summary.exists():
            figures["reward after"] = json.loads(summary.read_text())["reward_after"]
        return figures

    def _start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        logs = Path(os.environ.get("LOGS", self._directory))
        path = logs / f"{arguments[0]}-{time.monotonic_ns()}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [*PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if "learner" in arguments else {}),
            )
        self._cleanup.callback(end, process)
        return process


def masters_bytes(run_dir: Path) -> int:
    """Return the size of the masters in the newest checkpoint."""
    files = sorted(run_dir.glob("checkpoints/step_*/backend/outer.safetensors"))
    return files[-1].stat().st_size // 2


if __name__ == "__main__":
    sys.exit(main())
