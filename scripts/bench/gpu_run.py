"""Run the whole stack by `primerl-node rl`: learning, engine mismatch, and idle time.

    bash scripts/bench/gpu.sh gpu_run [--gpus 1|2] [--turns] [--out DIR] [--quick] [--json FILE]
        [FLAGS OF rl]...

Model and settings: gpu_run.toml. It learns to reverse text or, with --turns, a task of several turns and one
with a tool (gpu_run_turns.toml). With one GPU trainer and worker share it; with two each has its own. --quick
uses a small model on the CPU, to check that this script works. Writes DIR/run_N.json (figures, reward and
mismatch curves; or FILE), DIR/run_N.png and DIR/run_N.log; of a run that stalls the log holds the stacks of its
processes.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil  # pyright: ignore[reportMissingModuleSource]

from primerl.scripts.bench.children import tail
from primerl.scripts.bench.report import Goal, at_least, at_most, conclude, make_parser

HERE = Path(__file__).parent
ENDS = 10
"""Steps at either end whose rewards are compared."""
PUBLISHED = "policy 0 published"
STALL_S = 90.0
"""Maximum seconds between steps once the policy is published, a cold start of vLLM included; longer means a
hang."""
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
    "warmup.lr": 3e-3,
    "warmup.eval-interval": 3,
    "training.lr": 8e-4,
    "training.threads": 1,
    "max-steps": 30,
}


# -- the run ---------------------------------------------------------------------------------------


class Watch:
    """Utilisation of each GPU, from nvidia-smi once a second."""

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
        """Return GPU -> (mean percent busy, most MiB used)."""
        inside = [one for one in self.samples if begin <= one[0] <= end]
        return {
            gpu: (
                fmean(one[2] for one in inside if one[1] == gpu),
                max(one[3] for one in inside if one[1] == gpu),
            )
            for gpu in sorted({one[1] for one in inside})
        }


def run(options: argparse.Namespace, more: list[str], directory: Path) -> float:
    """Run `primerl-node rl` to its end; return its seconds, start and warm-up included."""
    command = [sys.executable, "-m", "primerl.cli.main", "rl", "@", str(HERE / "gpu_run.toml")]
    if options.turns:
        command += ["@", str(HERE / "gpu_run_turns.toml")]
    else:
        args = '{"min_len": 4, "max_len": 5}' if options.quick else '{"min_len": 5, "max_len": 8}'
        command += ["--environment.id", "reverse-text", "--environment.args", args]
    command += ["--output-dir", str(directory), "--engine.type", options.engine]
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    if options.quick:
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
        try:
            why = wait(rl, directory, began + options.limit)
            if why:
                abort(rl.pid)
                time.sleep(2.0)
                rl.kill()
        finally:
            rl.terminate()
            rl.wait()
    finally:
        (options.out / f"run_{options.gpus}.log").write_text(tail(directory, 200_000))
    if why or rl.returncode:
        raise SystemExit(f"{why}\n{tail(directory)}")
    return time.monotonic() - began


def abort(root: int) -> None:
    """Abort the nodes below `root`; each prints its stacks."""
    for one in psutil.Process(root).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "primerl.cli.main" in " ".join(one.cmdline()):
                one.send_signal(signal.SIGABRT)


def wait(rl: "subprocess.Popen[bytes]", directory: Path, deadline: float) -> str:
    """Wait until the run ends; return why waiting was given up, or empty."""
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


def figures(directory: Path, wall: float, watch: Watch) -> dict[str, Any]:
    """Return the figures of the run."""
    summary = json.loads((directory / "run" / "summary.json").read_text())
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").open()]
    rewards = [line["reward/mean"] for line in lines]
    mismatch = [line["mismatch_kl/all/mean"] for line in lines]
    seconds = summary["seconds"]
    workers = summary["workers"].values()
    return {
        "wall_s": wall,
        "seconds": seconds,
        "start": {key[6:]: value for key, value in lines[0].items() if key.startswith("start/")},
        "steps": summary["steps"],
        "rollouts": summary["accepted"],
        "rejected": summary["rejected"],
        "reward_first": fmean(rewards[:ENDS]),
        "reward_last": fmean(rewards[-ENDS:]),
        "exact_match_before": summary["exact_match_before"],
        "exact_match_after": summary["exact_match_after"],
        "batches": {
            name: [
                line[f"reward/{name}"] for line in lines if line.get(f"reward/{name}") is not None
            ]
            for name in summary["environments"]
        },
        "held_out": {
            name: (one["reward_before"], one["reward_after"])
            for name, one in summary["environments"].items()
        },
        "mismatch_kl_mean": fmean(mismatch),
        "mismatch_kl_most": max(mismatch),
        "staleness_max": summary["staleness_max"],
        "staleness_bound": json.loads((directory / "run" / "config.json").read_text())["rollouts"][
            "max_off_policy_steps"
        ],
        "trainer_waits": seconds["wait_for_batch"] / seconds["training"],
        "worker_idle": [1 - one["generating_s"] / max(one["working_s"], 1e-9) for one in workers],
        "delta_share": summary["delta_bytes"] / max(summary["full_bytes"], 1),
        "gpus": watch.between(lines[0]["time"], lines[-1]["time"]),
        "reward_curve": rewards,
        "mismatch_curve": mismatch,
    }


def judge(found: dict[str, Any], *, quick: bool) -> list[Goal]:
    """Return the goals of a run on GPUs; for a quick one only the goals of every run."""
    goals = [
        at_most("mismatch KL, mean over the run", found["mismatch_kl_mean"], 0.01, "nats"),
        at_most("staleness, most", found["staleness_max"], found["staleness_bound"]),
    ]
    if not quick:
        wall = 480.0
        if len(found["held_out"]) > 1:
            wall = 540.0
            goals += [
                at_least(f"{name}: reward after / before", after / max(before, 1e-3), 1.2, "x")
                for name, (before, after) in found["held_out"].items()
            ]
        else:
            gain = found["reward_last"] - found["reward_first"]
            goals.append(at_least("reward gained", gain, 0.2))
        goals.append(at_most("wall time", found["wall_s"], wall, "s"))
    return goals


def show(found: dict[str, Any]) -> None:
    """Print a short table."""
    idle = ", ".join(f"{one:.1%}" for one in found["worker_idle"])
    rows = [
        ("wall time, all", f"{found['wall_s']:.0f} s"),
        *((f"  {name}", f"{value:.1f} s") for name, value in found["seconds"].items()),
        *((f"from the start to: {name}", f"{at:.1f} s") for name, at in found["start"].items()),
        (
            "steps, rollouts",
            f"{found['steps']}, {found['rollouts']} (rejected {found['rejected']})",
        ),
        (
            "reward, first and last ten steps",
            f"{found['reward_first']:.3f} -> {found['reward_last']:.3f}",
        ),
        (
            "exact match, held out",
            f"{found['exact_match_before']:.3f} -> {found['exact_match_after']:.3f}",
        ),
        *(
            (f"reward on held-out {name}", f"{before:.3f} -> {after:.3f}")
            for name, (before, after) in found["held_out"].items()
        ),
        *(
            (f"reward on {name}", f"{fmean(curve[:ENDS]):.3f} -> {fmean(curve[-ENDS:]):.3f}")
            for name, curve in found["batches"].items()
            if curve
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


def stop(number: int, frame: object) -> None:
    """Exit as by an error, so that no process stays."""
    sys.exit(128 + number)


def main() -> int:
    """Run, print, and return exit code 0 if every goal was met."""
    signal.signal(signal.SIGTERM, stop)
    parser = make_parser(__doc__, "a small model on the CPU")
    parser.add_argument(
        "--gpus", type=int, default=1, help="1: shared; 2 or more: the trainer has one"
    )
    parser.add_argument("--turns", action="store_true", help="several turns, and a tool")
    parser.add_argument("--engine", default="vllm", choices=["vllm", "hf"])
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
    show(found)
    path = options.json or options.out / f"run_{options.gpus}.json"
    return conclude([found], judge(found, quick=options.quick), path)


if __name__ == "__main__":
    sys.exit(main())
