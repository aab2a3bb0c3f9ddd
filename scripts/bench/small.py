"""Time the steps of a whole run of a small model, beside TRL's colocated mode.

    bash scripts/bench/gpu.sh small [--gpus 1|2] [--model DIR] [--steps N] [--trl N] [--reward] [--logs DIR]
        [--limit S] [--quick] [--json FILE] [FLAGS OF rl]...

The run is small.toml: 512 replies a step, trainer and one worker sharing a GPU, or on one each. --model is
SmolLM2-135M-Instruct as `primerl-node model import` makes it, which sorts names; without it random weights of
that shape are made, and rewards are hashes. --trl N also makes N steps of TRL's GRPO with vLLM in its process,
on the same tasks, afterwards on the first GPU. --reward evaluates every 10 steps and adds the time to a
held-out reward of 0.4. --quick is the demo on the CPU. A run that is not over after --limit seconds is stopped,
and its steps count.

Steps count from the WARM-th on, by the median of the time between their lines in metrics.jsonl; a version's
times come from the logs of trainer and worker; CPU is that of the trainer's own process in between.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil  # pyright: ignore[reportMissingModuleSource]

from primerl.scripts.bench.children import tail
from primerl.scripts.bench.report import (
    Goal,
    at_least,
    at_most,
    conclude,
    make_parser,
    show_figures,
)

HERE = Path(__file__).parent
WARM = 10
"""Steps before those that count."""
REWARD = 0.4
SHAPE = {
    "hidden-size": 576,
    "num-hidden-layers": 30,
    "num-attention-heads": 9,
    "num-key-value-heads": 3,
    "head-dim": 64,
    "intermediate-size": 1536,
}
"""SmolLM2-135M's, but for the vocabulary."""
TASK = {
    "environment.id": "alphabet-sort",
    "environment.args.min-turns": "1",
    "environment.args.max-turns": "1",
    "environment.args.min-names-per-turn": "2",
    "environment.args.max-names-per-turn": "3",
}
LOADED = re.compile(r"policy (\d+) loaded in ([\d.]+)s")


def main() -> int:
    """Run, print, and return exit code 0 if every goal was met."""
    options, flags = parse()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        directory = Path(name)
        figures = run(options, flags, directory)
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / "all.log").write_text(tail(directory, 400_000))
            (options.logs / "metrics.jsonl").write_text(
                (directory / "run/metrics.jsonl").read_text()
            )
    if options.trl:
        figures |= run_trl(options)
    show_figures(figures)
    return conclude(figures, goals(figures, options), options.json)


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Parse the options; what is unknown goes to `rl`."""
    parser = make_parser(__doc__, "the demo, on the CPU")
    parser.add_argument("--gpus", type=int, default=1, choices=[1, 2])
    parser.add_argument("--model", type=Path, help="directory of a real model")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--trl", type=int, default=0, metavar="STEPS")
    parser.add_argument("--reward", action="store_true", help="evaluate every 10 steps")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds")
    parser.add_argument("--logs", type=Path, help="where logs and metrics.jsonl are kept")
    return parser.parse_known_args()


# -- this program ----------------------------------------------------------------------------------


def run(options: argparse.Namespace, flags: list[str], directory: Path) -> dict[str, float]:
    """Run `primerl-node rl` and return its figures."""
    settings = HERE.parents[1] / "configs/demo.toml" if options.quick else HERE / "small.toml"
    command = [sys.executable, "-m", "primerl.cli.main", "rl", "@", str(settings)]
    command += ["--name", "run", "--output-dir", str(directory), "--max-steps", str(options.steps)]
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    if options.quick:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    elif options.model:
        command += ["--model.name", str(options.model), *as_flags(TASK)]
    else:  # rewards of which nothing can be learned, but every group has a signal
        command += as_flags({f"model.create.{name}": str(size) for name, size in SHAPE.items()})
        command += ["--environment.id", "run_taskset"]
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    if options.gpus == 1:
        environment.setdefault("CUDA_VISIBLE_DEVICES", "0")
    else:
        command += ["--trainer-gpus", "1", "--inference-gpus", "1"]
    if options.reward:
        command += ["--evaluation.interval", "10", "--evaluation.prompts", "256"]
    began = time.time()
    with (directory / "rl.log").open("wb") as log:
        rl = subprocess.Popen(
            [*command, *flags], stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            cpu = watch(rl, directory / "run/metrics.jsonl", options)
        finally:
            rl.send_signal(signal.SIGTERM)
            rl.wait()
    if len(steps_of(directory / "run/metrics.jsonl")) <= WARM:
        raise SystemExit(f"the run failed with {rl.returncode}\n{tail(directory)}")
    return measure(directory, began, cpu)


def as_flags(settings: Mapping[str, str]) -> list[str]:
    """Return settings as flags of the command line."""
    return [part for name, value in settings.items() for part in (f"--{name}", value)]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON lines."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that are of a step, without those of evaluations."""
    return [line for line in lines_of(metrics) if "rollouts/accepted" in line]


def watch(
    rl: "subprocess.Popen[bytes]", metrics: Path, options: argparse.Namespace
) -> dict[str, float]:
    """Wait for the end of the run; return the cores that its processes used from step WARM to the last."""
    end = time.time() + options.limit
    first: tuple[float, dict[str, float]] | None = None
    newest: tuple[float, dict[str, float]] | None = None
    while rl.poll() is None:
        time.sleep(0.5)
        if time.time() > end:
            rl.send_signal(signal.SIGTERM)
            rl.wait(60)
            break
        steps = len(steps_of(metrics))
        if WARM <= steps < options.steps:
            newest = time.time(), cpu_by_role(rl.pid)
            first = first or newest
    if first is None or newest is None or newest[0] - first[0] < 1.0:
        return {}
    seconds = newest[0] - first[0]
    return {
        role: (spent - first[1].get(role, 0.0)) / seconds
        for role, spent in newest[1].items()
        if spent > first[1].get(role, 0.0)
    }


def cpu_by_role(root: int) -> dict[str, float]:
    """Return the CPU seconds of the processes below `root`, by what they are."""
    spent: dict[str, float] = {}
    for process in psutil.Process(root).children(recursive=True):
        try:
            command, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        spent[role_of(command)] = spent.get(role_of(command), 0.0) + times.user + times.system
    return spent


def role_of(command: str) -> str:
    """Name the process with this command line."""
    roles = {
        "cli.main train": "trainer's node",
        "cli.main join": "worker's node",
        "training.rank": "learner",
        "environments.host": "environments",
        "inference.host": "engines",
        "audit_process": "auditor",
    }
    return next((role for part, role in roles.items() if part in command), "others")


def measure(directory: Path, began: float, cpu: dict[str, float]) -> dict[str, float]:
    """Return the figures of a run that has ended."""
    lines = steps_of(directory / "run/metrics.jsonl")
    counted = lines[WARM:]
    intervals = [later["time"] - sooner["time"] for sooner, later in pairwise(lines[WARM - 1 :])]

    def middle(name: str) -> float:
        values = [line[name] for line in counted if line.get(name) is not None]
        return median(values) if values else 0.0

    step_s = median(intervals)
    accepted = [line["rollouts/accepted"] for line in lines]
    seconds = lines[-1]["time"] - lines[WARM - 1]["time"]
    figures = {
        "s from the start to the first step": lines[0]["time"] - began,
        "steps": float(len(lines)),
        "s a step": step_s,
        "accepted rollouts/s": (accepted[-1] - accepted[WARM - 1]) / seconds,
        "rejected rollouts": float(lines[-1]["rollouts/rejected"]),
        "learner, s a step": middle("time/step"),
        "learner, tokens/s": middle("perf/throughput"),
        "learner, MFU %": middle("perf/mfu"),
        "waits for a batch, s": middle("time/wait_for_batch"),
        "checkpoint, s": middle("time/save_ckpt"),
        "from snapshot to announced, s": middle("time/broadcast_weights"),
        "from arrival to verdict, s": middle("time/verdict"),
        "staleness, mean": mean(line["off_policy/mean"] for line in counted),
        "reward, last 10": mean(line["reward/mean"] for line in lines[-10:]),
    }
    loads = [
        float(seconds)
        for log in directory.glob("run/logs/*worker*.log")
        for _, seconds in LOADED.findall(log.read_text(errors="replace"))
    ]
    if loads:
        figures["from announced to in the engine, s"] = median(loads[len(loads) // 4 :])
    figures |= {f"cores, {role}": cores for role, cores in sorted(cpu.items())}
    held_out = time_to_reward(directory / "run/evaluations.jsonl", lines)
    if held_out is not None:
        figures[f"s from the first step to {REWARD} held out"] = held_out
    return figures


def time_to_reward(evaluations: Path, lines: list[dict[str, Any]]) -> float | None:
    """Return the seconds from the first step to the first version with REWARD; None if there is none."""
    for line in lines_of(evaluations):
        rewards = [figures["reward"] for figures in line["environments"].values()]
        if line["version"] and mean(rewards) >= REWARD:
            return lines[line["version"] - 1]["time"] - lines[0]["time"]
    return None


# -- TRL -------------------------------------------------------------------------------------------


def run_trl(options: argparse.Namespace) -> dict[str, float]:
    """Run TRL's GRPO in a process of its own; return the median of its steps."""
    with tempfile.TemporaryDirectory() as name:
        answer = Path(name) / "steps.json"
        code = subprocess.run(
            [
                *(sys.executable, str(HERE / "small_trl.py"), str(options.model)),
                *(str(options.trl), str(answer)),
            ],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
            stdout=sys.stderr,
            check=False,
        ).returncode
        if code or not answer.exists():
            print(f"TRL ended with {code}")
            return {}
        steps = json.loads(answer.read_text())
    return {
        "TRL: s a step": median(
            later["at"] - sooner["at"] for sooner, later in pairwise(steps[len(steps) // 4 :])
        ),
        "TRL: reward at the end": mean(step["reward"] for step in steps[-5:]),
    }


def goals(figures: dict[str, float], options: argparse.Namespace) -> list[Goal]:
    """Return the goals of this run."""
    step_s = figures["s a step"]
    if options.quick:
        return [at_most("s a step", step_s, 3.0, "s")]
    names = {
        "from snapshot to announced, s": 0.25,
        "from announced to in the engine, s": 0.2,
        "from arrival to verdict, s": 0.3,
        "cores, trainer's node": 1.5,
        "s from the start to the first step": 90.0,
    }
    two = options.gpus == 2
    rows = [at_most("s a step", step_s, 0.55 if two else 1.0, "s")]
    rows += [at_most(name, figures[name], goal) for name, goal in names.items() if name in figures]
    rows.append(at_least("learner, tokens/s", figures["learner, tokens/s"], 150e3))
    if two:
        rows.append(at_least("accepted rollouts/s", figures["accepted rollouts/s"], 900))
    if trl := figures.get("TRL: s a step"):
        rows.append(at_least("TRL's s a step / ours", trl / step_s, 8.0 if two else 4.4, "x"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
