"""Benchmark learners: one trainer against a trainer with learners, at equal tokens.

    .venv/bin/python scripts/bench/learners.py [--quick] [--seeds N] [--json FILE]
    .venv/bin/python scripts/bench/learners.py --hostile [--quick] [--json FILE]
    .venv/bin/python scripts/bench/learners.py --bound [--versions N] [--json FILE]

Without --bound each run is the demo in processes of its own over iroh, on this machine, to its end. First:
held-out reward of one trainer, and of two learners (the trainer and one more) with H = 4 and H = 8 inner steps.
All make the same number of optimizer steps on as many rollouts: learners share the batch of each. --quick does
one seed, and H = 4 alone. With --hostile one of four learners cheats, in each way of hostile_learner.py, and
the reward is compared with that of four honest ones; --quick tries one way. With --bound training is what a run
waits for: a larger model, and demonstrations that are nine tenths of its tokens; each learner has one thread.
Judged are trained tokens a second, on loopback and with each node behind a line of 100 Mbit/s and 50 ms (which
needs root, iproute2 and /dev/net/tun).
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from primerl.crypto.keys import KEY_FILE, SecretKey
from primerl.scripts.bench.emulated_links import EmulatedStar, emulated_star
from primerl.scripts.bench.hostile_learner import CHEATS
from primerl.scripts.bench.report import Goal, at_least, conclude, make_parser
from primerl.scripts.bench.succession import PROGRAM, start, steps_of, until
from primerl.scripts.bench.swarm_links import Link

HOSTILE = (sys.executable, "-P", "-m", "primerl.scripts.bench.hostile_learner")
GROUPS, STEPS = 16, 160
"""Groups of an optimizer step, and steps of the demo."""
LEARNERS, FOUR = 2, 4
"""The trainer among them."""
LAG = 1
"""Versions that a rollout may be behind, besides the inner steps of its own."""
BAND = 1.96
NOISE = 0.056
"""1.96 standard deviations of the held-out reward of one trainer over three seeds, measured on 2026-12-01."""
LINE = Link(up=100.0, down=100.0, delay_ms=25.0)
MOST_S = 900.0


def main() -> int:
    """Run, print, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "one seed, H = 4")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--bound", action="store_true", help="where training is what a run waits for"
    )
    parser.add_argument("--versions", type=int, default=8, help="--bound: versions of each run")
    parser.add_argument("--hostile", action="store_true", help="one of four learners cheats")
    options = parser.parse_args()
    if options.bound:
        rows, goals = bound(4, options.versions)
    elif options.hostile:
        rows, goals = hostile(4, [*CHEATS][: 1 if options.quick else None])
    else:
        seeds = 1 if options.quick else options.seeds
        rows, goals = parity(seeds, [4] if options.quick else [4, 8])
    return conclude(rows, goals, options.json)


def parity(seeds: int, inner: Sequence[int]) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Compare held-out rewards."""
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        for h in (0, *inner):
            row = {"seed": seed, "inner steps": h, **demo(seed, h, LEARNERS if h else 1)}
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


def hostile(inner: int, cheats: Sequence[str]) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Compare held-out rewards of four learners, one of which cheats."""
    rows: list[dict[str, Any]] = []
    for cheat in ("", *cheats):
        row = {"the fourth": cheat or "honest", **demo(0, inner, FOUR, cheat)}
        rows.append(row)
        print(row, flush=True)
    alone, *others = (row["reward after"] for row in rows)
    return rows, [
        at_least(
            f"reward with {cheat} (goal: of four honest ones, less the noise)",
            reward,
            alone - NOISE,
        )
        for cheat, reward in zip(cheats, others, strict=True)
    ]


def demo(seed: int, inner: int, learners: int, cheat: str = "") -> dict[str, Any]:
    """Run the demo with as many learners, the trainer among them; `inner` is 0 without any."""
    steps = max(1, inner)
    arguments = [
        *("@", "configs/demo.toml", "--seed", str(seed), "--max-steps", str(STEPS // steps)),
        *("--checkpoint.interval", "1", "--rollouts.groups-per-batch", str(GROUPS * steps)),
    ]
    if inner:
        arguments += ["--rollouts.max-off-policy-steps", str(staleness(inner))]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as cleanup:
        trial = Trial(Path(directory), cleanup, inner, learners=learners, cheat=cheat)
        return trial.run(arguments)


def bound(inner: int, versions: int) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Compare trained tokens a second where training is what a run waits for, on loopback and over lines."""
    rows: list[dict[str, Any]] = []
    for nodes, link in ((1, None), (LEARNERS, None), (LEARNERS, LINE)):
        with tempfile.TemporaryDirectory() as directory, ExitStack() as cleanup:
            demonstrations = Path(directory) / "rows.jsonl"
            demonstrations.write_text("".join(reversed_words()))
            arguments = [
                *("@", "configs/demo.toml", "--max-steps", str(versions)),
                *("--model.create.hidden-size", "512", "--model.create.num-hidden-layers", "8"),
                *("--training.sft.files", json.dumps([str(demonstrations)])),
                *("--training.sft.share", "0.9", "--training.lr", "1e-5"),
                *("--warmup.max-steps", "60", "--warmup.eval-interval", "30"),
                *("--rollouts.max-off-policy-steps", str(staleness(inner if nodes > 1 else 1))),
                *("--checkpoint.interval", "1", "--evaluation.prompts", "0"),
            ]
            trial = Trial(Path(directory), cleanup, inner if nodes > 1 else 0, learners=nodes)
            row: dict[str, Any] = {"learners": nodes, "line": "none"}
            if link is not None:
                row["line"] = f"{link.up:g} Mbit/s, {2 * link.delay_ms:g} ms each way"
                trial.network = cleanup.enter_context(emulated_star([link] * (nodes + 1)))
                arguments += ["--network.host", "0.0.0.0"]
            row |= trial.run(arguments)
        rows.append(row)
        print(row, flush=True)
    alone, both, far = (row["s a version"] for row in rows)  # of equal batches
    return rows, [
        at_least("trained tokens/s of two learners, times one's", alone / both, 1.8),
        at_least("the same over lines", alone / far, 1.8),
    ]


def staleness(inner: int) -> int:
    """Return the bound with which rollouts may be LAG versions behind."""
    return (LAG + 1) * inner - 1


def reversed_words() -> list[str]:
    """Make demonstrations of the demo's task."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(4096)]
    return [json.dumps({"prompt": word, "completion": word[::-1]}) + "\n" for word in words]


class Trial:
    """One run."""

    def __init__(
        self,
        directory: Path,
        cleanup: ExitStack,
        inner: int,
        *,
        learners: int,
        cheat: str = "",
    ) -> None:
        """The last of the learners cheats, if it is said how."""
        self._directory = directory
        self._cleanup = cleanup
        self._inner = inner
        self._others = learners - 1
        self._cheat = cheat
        self._run = directory / "t" / "run"
        self.network: EmulatedStar | None = None
        """Where each node has a line of its own; None: all are on loopback."""
        self._nodes = count()

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
        self._start(*join, str(self._directory / "w"))
        learning: list[Path] = []
        for number, key in enumerate(keys):
            learning.append(self._directory / f"l{number}")
            learning[-1].mkdir()
            key.save(learning[-1] / KEY_FILE, None)
            threads = ("--training.threads", "1")
            device = ("--training.device", "cpu", "--training.backend", "local")
            cheat = self._cheat if number == self._others - 1 else ""
            self._start(
                *(*join, str(learning[-1]), "--role", "learner", *device, *threads), cheat=cheat
            )
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
            seconds = (steady[-1]["time"] - steady[0]["time"]) / (len(steady) - 1)
            figures["s a version"] = round(seconds, 2)
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

    def _start(self, *arguments: str, cheat: str = "") -> "subprocess.Popen[bytes]":
        logs = Path(os.environ.get("LOGS", self._directory))
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if "learner" in arguments else {}
        program = (*HOSTILE, cheat) if cheat else PROGRAM
        if self.network is not None:
            program = (*self.network.inside(next(self._nodes)), *program)
        return start(arguments, logs, self._cleanup, program, **hidden)


def masters_bytes(run_dir: Path) -> int:
    """Return the size of the masters in the newest checkpoint."""
    files = sorted(run_dir.glob("checkpoints/step_*/backend/outer.safetensors"))
    return files[-1].stat().st_size // 2


if __name__ == "__main__":
    sys.exit(main())
