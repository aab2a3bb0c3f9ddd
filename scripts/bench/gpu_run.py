"""A run of the whole stack by `primerl-node rl`: what was learned, how engine and trainer differ, who idles.

    bash scripts/bench/gpu.sh gpu_run [--gpus 1|2] [--out DIR] [--toy] [FLAGS OF rl]...

Model, data and settings: gpu_run.toml. With one GPU trainer and worker share it; with two each has its own.
--toy is a small model on the CPU, to see that this script works. Writes DIR/run_N.json (figures, reward and
mismatch curves), DIR/run_N.png and DIR/run_N.log; of a run that comes to a stop DIR/hang_N.txt: what it
waits for.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import what_hangs
from goals import show_goals

HERE = Path(__file__).parent
ENDS = 10
"""Steps at either end whose rewards are compared."""
PUBLISHED = "policy 0 published"
STALL_S = 90.0
"""Once the policy is out a step comes within this time, a cold start of vLLM included, or something hangs."""
TOY = {
    "model.create.hidden-size": 96,
    "model.create.num-hidden-layers": 2,
    "model.create.num-attention-heads": 4,
    "model.create.num-key-value-heads": 2,
    "model.create.head-dim": 32,
    "model.create.intermediate-size": 192,
    "model.create.rope-theta": 100,
    "engine.dtype": "float32",
    "engine.max-batch": 64,
    "rollouts.group-size": 8,
    "rollouts.groups-per-batch": 16,
    "rollouts.groups-per-lease": 4,
    "environment.args": '{"min_len": 4, "max_len": 5}',
    "warmup.lr": 3e-3,
    "warmup.eval-interval": 3,
    "training.lr": 8e-4,
    "training.threads": 1,
    "max-steps": 30,
}


class Watch:
    """How busy each GPU is, asked of nvidia-smi once a second."""

    COMMAND = (
        *("nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used"),
        "--format=csv,noheader,nounits",
    )

    def __init__(self) -> None:
        self.samples: list[tuple[float, int, float, float]] = []
        """(wall clock, GPU, percent busy, MiB used)."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Watch":
        if shutil.which("nvidia-smi"):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            found = subprocess.run(self.COMMAND, capture_output=True, text=True, check=False)
            for line in found.stdout.splitlines():
                index, busy, used = (part.strip() for part in line.split(","))
                if busy.isdigit() and used.isdigit():
                    self.samples.append((time.time(), int(index), float(busy), float(used)))

    def between(self, begin: float, end: float) -> dict[int, tuple[float, float]]:
        """GPU -> (mean percent busy, most MiB used)."""
        inside = [one for one in self.samples if begin <= one[0] <= end]
        return {
            gpu: (
                fmean(one[2] for one in inside if one[1] == gpu),
                max(one[3] for one in inside if one[1] == gpu),
            )
            for gpu in sorted({one[1] for one in inside})
        }


def run(options: argparse.Namespace, more: list[str], directory: Path) -> float:
    """`primerl-node rl` to its end; the seconds that it took, start and warm-up included."""
    command = [sys.executable, "-m", "primerl.cli.main", "rl", "@", str(HERE / "gpu_run.toml")]
    command += ["--output-dir", str(directory), "--engine.type", options.engine]
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    if options.toy:
        for name, value in TOY.items():
            command += [f"--{name}", str(value)]
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    elif options.gpus == 1:
        environment.setdefault("CUDA_VISIBLE_DEVICES", "0")
    else:
        command += ["--trainer-gpus", "1", "--inference-gpus", str(options.gpus - 1)]
        command += ["--launch.workers", str(options.gpus - 1)]
    began = time.monotonic()
    try:
        with (directory / "rl.log").open("wb") as log:
            rl = subprocess.Popen(
                [*command, *more], stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        why = wait(rl, directory, began + options.limit)
        if why:
            (options.out / f"hang_{options.gpus}.txt").write_text(what_hangs.report(rl.pid))
            what_hangs.abort(rl.pid, "primerl.cli.main")
            time.sleep(2.0)
            rl.kill()
            rl.wait()
    finally:
        (options.out / f"run_{options.gpus}.log").write_text(tail(directory, 200_000))
    if why or rl.returncode:
        raise SystemExit(f"{why}\n{tail(directory)}")
    return time.monotonic() - began


def wait(rl: "subprocess.Popen[bytes]", directory: Path, deadline: float) -> str:
    """Until the run ends: empty, or why it was not waited for any longer."""
    trainer, metrics = directory / "run/logs/trainer.log", directory / "run/metrics.jsonl"
    seen, since = 0, float("inf")
    while rl.poll() is None:
        time.sleep(0.5)
        now = time.monotonic()
        size = metrics.stat().st_size if metrics.exists() else 0
        training = trainer.exists() and PUBLISHED in trainer.read_text(errors="replace")
        if training and (size != seen or since > now):
            seen, since = size, now
        if now > deadline:
            return "not over in time"
        if now - since > STALL_S:
            return f"no step for {STALL_S:.0f} s"
    return ""


def tail(directory: Path, length: int = 2500) -> str:
    """The ends of all logs."""
    logs = [directory / "rl.log", *directory.glob("run/logs/*.log")]
    return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-length:]}" for log in logs)


def figures(directory: Path, wall: float, watch: Watch) -> dict[str, Any]:
    """What is told of the run."""
    summary = json.loads((directory / "run" / "summary.json").read_text())
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").open()]
    rewards = [line["reward/mean"] for line in lines]
    mismatch = [line["mismatch_kl/all/mean"] for line in lines]
    seconds = summary["seconds"]
    workers = summary["workers"].values()
    return {
        "wall_s": wall,
        "seconds": seconds,
        "steps": summary["steps"],
        "rollouts": summary["accepted"],
        "rejected": summary["rejected"],
        "reward_first": fmean(rewards[:ENDS]),
        "reward_last": fmean(rewards[-ENDS:]),
        "exact_match_before": summary["exact_match_before"],
        "exact_match_after": summary["exact_match_after"],
        "mismatch_kl_mean": fmean(mismatch),
        "mismatch_kl_most": max(mismatch),
        "staleness_max": summary["staleness_max"],
        "trainer_waits": seconds["wait_for_batch"] / seconds["training"],
        "worker_idle": [1 - one["generating_s"] / max(one["working_s"], 1e-9) for one in workers],
        "delta_share": summary["delta_bytes"] / max(summary["full_bytes"], 1),
        "gpus": watch.between(lines[0]["time"], lines[-1]["time"]),
        "reward_curve": rewards,
        "mismatch_curve": mismatch,
    }


def judge(found: dict[str, Any], *, toy: bool) -> list[dict[str, Any]]:
    """The goals of a run on GPUs; of a toy only what every run has to keep."""
    goals = [
        ("mismatch KL, mean over the run", found["mismatch_kl_mean"], 0.01, False),
        ("staleness, most", found["staleness_max"], 2, False),
    ]
    if not toy:
        gain = found["reward_last"] - found["reward_first"]
        goals += [
            ("reward gained", gain, 0.2, True),
            ("wall time, s", found["wall_s"], 480.0, False),
        ]
    return [
        {
            "name": name,
            "value": value,
            "goal": goal,
            "ok": value >= goal if least else value <= goal,
        }
        for name, value, goal, least in goals
    ]


def show(found: dict[str, Any], goals: list[dict[str, Any]]) -> None:
    """A short table."""
    idle = ", ".join(f"{one:.1%}" for one in found["worker_idle"])
    rows = [
        ("wall time, all", f"{found['wall_s']:.0f} s"),
        *((f"  {name}", f"{value:.1f} s") for name, value in found["seconds"].items()),
        (
            "steps, rollouts",
            f"{found['steps']}, {found['rollouts']} (rejected {found['rejected']})",
        ),
        (
            "reward, first and last ten steps",
            f"{found['reward_first']:.3f} -> {found['reward_last']:.3f}",
        ),
        (
            "exact match on held-out text",
            f"{found['exact_match_before']:.3f} -> {found['exact_match_after']:.3f}",
        ),
        (
            "mismatch KL, mean and most",
            f"{found['mismatch_kl_mean']:.2e}, {found['mismatch_kl_most']:.2e}",
        ),
        ("trainer waits for rollouts", f"{found['trainer_waits']:.1%} of training"),
        ("workers idle", f"{idle} of their time"),
        ("delta / full", f"{found['delta_share']:.4f}"),
        *(
            (f"GPU {gpu} while training", f"{busy:.0f} % busy, {used / 1024:.1f} GiB")
            for gpu, (busy, used) in found["gpus"].items()
        ),
    ]
    for name, value in rows:
        print(f"{name:36} {value}")
    curve = found["reward_curve"]
    step = max(1, len(curve) // 15)
    means = [fmean(curve[at : at + step]) for at in range(0, len(curve), step)]
    print(f"{'reward':36} {' '.join(f'{one:.2f}' for one in means)}")
    show_goals(goals)


def main() -> int:
    """Run, print, and say by the exit code whether every goal was met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--gpus", type=int, default=1, help="1: shared; 2 or more: the trainer has one"
    )
    parser.add_argument("--engine", default="vllm", choices=["vllm", "hf"])
    parser.add_argument("--toy", action="store_true", help="a small model on the CPU")
    parser.add_argument("--out", type=Path, default=Path("."), help="where the figures go")
    parser.add_argument(
        "--limit", type=float, default=540.0, help="seconds after which it is ended"
    )
    options, more = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, Watch() as watch:
        directory = Path(name)
        wall = run(options, more, directory)
        found = figures(directory, wall, watch)
        shutil.copyfile(directory / "run" / "reward.png", options.out / f"run_{options.gpus}.png")
    goals = judge(found, toy=options.toy)
    show(found, goals)
    report = {"figures": found, "goals": goals}
    (options.out / f"run_{options.gpus}.json").write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(goal["ok"] for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
