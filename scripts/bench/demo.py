"""The demo as a benchmark: phases, steps and rollouts per second, who idles, delta ratio, bytes by peer.

    .venv/bin/python scripts/bench/demo.py [--quick] [--seed N] [--engine hf] [--json FILE]

Runs `primerl-node rl @ configs/demo.toml` in a temporary directory and reads its summary. --quick trains 40
steps without judging what was learned.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

Row = tuple[str, float, str]
Goal = dict[str, Any]


def main() -> int:
    """Run, print, and say by the exit code whether every goal was met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="hf")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        summary, wall = run(Path(directory), options)
    rows, goals = table(summary, wall), judge(summary, wall, learned=not options.quick)
    show(rows, goals)
    if options.json:
        document = {
            "rows": [{"name": name, "value": value, "unit": unit} for name, value, unit in rows],
            "goals": goals,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(goal["ok"] for goal in goals) else 1


def run(directory: Path, options: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """The demo's summary, and the seconds from process start to process end."""
    steps = ["--max-steps", "40"] if options.quick else []
    command = [
        *(sys.executable, "-m", "primerl.cli.main", "rl", "@", "configs/demo.toml"),
        *("--output-dir", str(directory), "--seed", str(options.seed)),
        *("--engine.type", options.engine, *steps),
    ]
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall = time.monotonic() - started
    return json.loads((directory / "demo" / "summary.json").read_text()), wall


def table(summary: dict[str, Any], wall: float) -> list[Row]:
    """All figures of one run."""
    seconds = summary["seconds"]
    training = seconds["training"]
    rows: list[Row] = [("wall, process start to end", wall, "s")]
    rows += [(f"phase {name}", value, "s") for name, value in seconds.items()]
    rows += [
        ("optimizer steps", summary["steps"] / training, "1/s"),
        ("trainer waits for rollouts", seconds["wait_for_batch"] / training, "of training"),
        ("exact match before", summary["exact_match_before"], ""),
        ("exact match after", summary["exact_match_after"], ""),
        ("mismatch KL", summary["mismatch_kl"], "nats"),
        ("stale rollouts", summary["stale_fraction"], "of received"),
        ("delta / full", summary["delta_bytes"] / summary["full_bytes"], "bytes"),
    ]
    for name, worker in summary["workers"].items():
        working = max(worker["working_s"], 1e-9)
        rows.append((f"worker {name} rollouts", worker["accepted"] / working, "1/s"))
        rows.append((f"worker {name} idle", 1 - worker["generating_s"] / working, "of its time"))
    for name, sources in summary["chunk_bytes_by_source"].items():
        for source, size in sources.items():
            rows.append((f"chunks of {name} from {source}", size / 1e6, "MB"))
    return rows


def judge(summary: dict[str, Any], wall: float, *, learned: bool) -> list[Goal]:
    """The goals of the first end-to-end system."""
    peers = [peer_share(sources) for sources in summary["chunk_bytes_by_source"].values()]
    goals = [
        goal("stale rollouts, share", summary["stale_fraction"], 0.05, "", below=True),
        goal("best worker's chunk bytes from peers", max(peers, default=0.0), 0.5, ""),
        goal("wall time", wall, 180.0, "s", below=True),
    ]
    if learned:
        goals.append(goal("sampled exact match after", summary["exact_match_after"], 0.8, ""))
    return goals


def peer_share(sources: dict[str, int]) -> float:
    """Share of a worker's chunk bytes that did not come from the trainer."""
    total = sum(sources.values())
    return 1 - sources.get("trainer", 0) / total if total else 0.0


def goal(name: str, value: float, wanted: float, unit: str, *, below: bool = False) -> Goal:
    """One goal: at least `wanted`, or with `below` less than it."""
    ok = value < wanted if below else value >= wanted
    return {"name": name, "value": round(value, 4), "goal": wanted, "unit": unit, "ok": ok}


def show(rows: list[Row], goals: list[Goal]) -> None:
    """Print the table, goals last."""
    for name, value, unit in rows:
        print(f"{name:44} {value:12.4g} {unit}")
    print()
    for one in goals:
        mark = "ok" if one["ok"] else "MISSED"
        print(f"{one['name']:44} {one['value']:12.4g} {one['unit']:3} goal {one['goal']:g}  {mark}")


if __name__ == "__main__":
    sys.exit(main())
