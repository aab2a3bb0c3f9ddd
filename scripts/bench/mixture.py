"""Train configs/mixture.toml with two workers, one without the environment with a tool.

    python scripts/bench/mixture.py [--seeds 0 1 2] [--steps 160] [--out DIR] [--warm RUN] [--quick]
        [--json FILE] [FLAGS OF train]...

Trainer and workers are real processes over loopback. The calculator environment comes from a separate package,
like any third-party environment: the second worker does not have it. For each seed it prints the mean reward of
each environment in the first and the last tenth of the steps, and on held-out tasks before and after. With
--warm RUN every seed begins at the end of that run's warm-up (kept by --checkpoint.keep-first true). Finally
the goals are judged, each for the worst seed. --quick only checks that everything runs: it has too few steps to
learn from.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primerl.scripts.bench.report import (
    Goal,
    at_least,
    at_most,
    conclude,
    make_parser,
    show_figures,
)

ROOT = Path(__file__).resolve().parents[2]
TASKSETS = ROOT / "node" / "environments" / "tasksets"
PACKAGE = "calc_tool"
LONGEST_S = 3600.0
GAIN = "{}: reward after / before"
GAINS = {"reverse-text": 1.1, "word-game": 1.5, "calculator": 1.1}
QUICK = (
    *("--warmup.max-steps", "20", "--warmup.eval-prompts", "4", "--evaluation.prompts", "8"),
    *("--rollouts.groups-per-batch", "6", "--rollouts.groups-per-lease", "1"),
    *("--training.filter-zero-advantages", "false"),  # hardly warmed up: groups have no signal
)
STEPS, QUICK_STEPS = 160, 4


def package(directory: Path) -> Path:
    """Write the calculator as a package of another name; return its parent folder."""
    own = directory / "packages" / PACKAGE
    own.mkdir(parents=True, exist_ok=True)
    shutil.copy(TASKSETS / "calculator.py", own / "__init__.py")
    shutil.copy(TASKSETS / "draws.py", own / "draws.py")
    return own.parent


def config(directory: Path) -> Path:
    """Write the recipe with that package in place of the bundled calculator."""
    text = (ROOT / "configs" / "mixture.toml").read_text()
    path = directory / "mixture.toml"
    path.write_text(text.replace('id = "calculator"', 'name = "calculator"\nid = "calc-tool"'))
    return path


def start(log: Path, packages: Path | None, *arguments: str) -> subprocess.Popen[bytes]:
    """Start `primerl-node` with `packages` in its PYTHONPATH."""
    found = [os.environ.get("PYTHONPATH", ""), str(packages or "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, found)),
        "OMP_NUM_THREADS": "1",
        "XDG_RUNTIME_DIR": str(log.parent),
    }
    program = [sys.executable, "-m", "primerl.cli.main", *arguments]
    with log.open("wb") as output:
        return subprocess.Popen(program, stdout=output, stderr=output, env=environment)


def run(directory: Path, seed: int, more: list[str]) -> dict[str, Any]:
    """Run from the beginning to the summary."""
    directory.mkdir(parents=True)
    packages = package(directory)
    train = ["train", "@", str(config(directory)), "--seed", str(seed), *more]
    running = [start(directory / "trainer.log", packages, *train, "--output-dir", str(directory))]
    own = directory / "mixture"
    try:
        while not (own / "ticket.txt").is_file():
            if running[0].poll() is not None:
                raise SystemExit((directory / "trainer.log").read_text())
            time.sleep(1.0)
        join = ["join", "--role", "inference", "--ticket", str(own / "ticket.txt")]
        for name, has in (("all", packages), ("two", None)):
            options = ["--data-dir", str(directory / name), "--allow-environment", "calc-tool"]
            running.append(start(directory / f"{name}.log", has, *join, *options))
        running[0].wait(LONGEST_S)
    finally:
        for one in running:
            one.terminate()
        for one in running:
            one.wait(60.0)
    return json.loads((own / "summary.json").read_text())


def show(directory: Path, summary: dict[str, Any]) -> None:
    """Print the rewards of a run, and counts of accepted and rejected rollouts."""
    rows = [json.loads(line) for line in (directory / "mixture" / "metrics.jsonl").open()]
    for name, figures in summary["environments"].items():
        curve = [row[f"reward/{name}"] for row in rows if row.get(f"reward/{name}") is not None]
        part = max(1, len(curve) // 10)
        first, last = sum(curve[:part]) / part, sum(curve[-part:]) / part
        print(
            f"  {name}: reward {first:.3f} -> {last:.3f} in training, "
            f"{figures['reward_before']:.3f} -> {figures['reward_after']:.3f} held out, "
            f"{figures['accepted']} accepted"
        )
    print(f"  rejected: {summary.get('rejected')}; workers: {json.dumps(summary.get('workers'))}")


def compare(runs: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, float]:
    """Return the goals' figures for the worst seed; `runs` are (seconds, summary)."""
    found = {
        GAIN.format(name): min(
            one["environments"][name]["reward_after"]
            / max(one["environments"][name]["reward_before"], 1e-9)
            for _, one in runs
        )
        for name in runs[0][1]["environments"]
    }
    found["rollouts rejected"] = float(sum(sum(one["rejected"].values()) for _, one in runs))
    found["minutes of a run"] = max(seconds for seconds, _ in runs) / 60.0
    return found


def judge(found: dict[str, float]) -> list[Goal]:
    """Return the goals with the values reached."""
    gains = {GAIN.format(name): least for name, least in GAINS.items()}
    return [
        *(at_least(name, found[name], gain, "x") for name, gain in gains.items() if name in found),
        at_most("rollouts rejected", found["rollouts rejected"], 0),
        at_most("minutes of a run", found["minutes of a run"], 10),
    ]


def main() -> int:
    """Run all seeds; return 0 if the goals were met, or with --quick if everything ran."""
    parser = make_parser(__doc__, "few steps, to see that it all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warm", type=Path)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench-mixture"))
    options, more = parser.parse_known_args()
    if options.quick:
        more = [*QUICK, *more]
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    more += ["--max-steps", str(steps)]
    if options.warm is not None:
        more += ["--resume.dir", str(options.warm.absolute()), "--resume.step", "0"]
    runs: list[tuple[float, dict[str, Any]]] = []
    for seed in options.seeds:
        directory = options.out.absolute() / f"seed_{seed}"
        began = time.monotonic()
        summary = run(directory, seed, more)
        runs.append((time.monotonic() - began, summary))
        print(f"seed {seed}: {runs[-1][0]:.0f} s", flush=True)
        show(directory, summary)
    found = compare(runs)
    show_figures(found)
    met = conclude(found, judge(found), options.json)
    if options.quick:
        played = (one["accepted"] for _, run in runs for one in run["environments"].values())
        return 0 if all(played) and not found["rollouts rejected"] else 1
    return met


if __name__ == "__main__":
    sys.exit(main())
