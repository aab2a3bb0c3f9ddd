"""Benchmark the demo: phases, steps and rollouts per second, idle time, bytes by peer.

    .venv/bin/python scripts/bench/demo.py [--quick] [--seed N] [--engine hf] [--json FILE]

Runs `primerl-node rl @ configs/demo.toml` in a temporary directory and reads its summary. --quick trains 40
steps without judging the learning.
"""

import argparse
import json
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
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


def main() -> int:
    """Run, print, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "40 steps; what was learned is not judged")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="hf")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        summary, wall, growth = run(Path(directory), options)
    rows = table(summary, wall) | {"ledger grows, kB a step": growth}
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows["CPU of all processes, s"] = spent.ru_utime + spent.ru_stime
    show_figures(rows)
    print()
    goals = judge(summary, wall, learned=not options.quick)
    if not options.quick:
        goals.append(at_most("ledger's growth a step", growth, 3.0, "kB"))
        goals.append(at_most("160 steps", rows["phase training, s"], 40.0, "s"))
    return conclude(rows, goals, options.json)


def run(directory: Path, options: argparse.Namespace) -> tuple[dict[str, Any], float, float]:
    """Return the demo's summary, the seconds from process start to process end, and the bytes by which the
    trainer's ledger grew a step in the last quarter of the steps, in kB."""
    steps = ["--max-steps", "40"] if options.quick else []
    command = [
        *(sys.executable, "-m", "primerl.cli.main", "rl", "@", "configs/demo.toml"),
        *("--output-dir", str(directory), "--seed", str(options.seed)),
        *("--engine.type", options.engine, *steps),
    ]
    started = time.monotonic()
    sizes: dict[int, int] = {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(0.5)
            with suppress(OSError, sqlite3.Error):
                steps_done = len((directory / "demo" / "metrics.jsonl").read_text().splitlines())
                sizes[steps_done] = ledger_bytes(directory / "demo" / "trainer" / "ledger.db")
    wall = time.monotonic() - started
    if process.returncode:
        raise SystemExit(process.returncode)
    summary = json.loads((directory / "demo" / "summary.json").read_text())
    last = max(sizes)
    first = min(step for step in sizes if step >= last * 3 // 4)
    return summary, wall, (sizes[last] - sizes[first]) / 1e3 / max(1, last - first)


def ledger_bytes(path: Path) -> int:
    """Return the bytes of a ledger that hold something, also while its node runs."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as ledger:
        pages, free, page_bytes = (
            ledger.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
    return (pages - free) * page_bytes


def table(summary: dict[str, Any], wall: float) -> dict[str, float]:
    """Return all figures of one run."""
    seconds = summary["seconds"]
    training = seconds["training"]
    rows = {
        "wall, process start to end, s": wall,
        **{f"phase {name}, s": value for name, value in seconds.items()},
        "optimizer steps, 1/s": summary["steps"] / training,
        "trainer waits for rollouts, share of training": seconds["wait_for_batch"] / training,
        "exact match before": summary["exact_match_before"],
        "exact match after": summary["exact_match_after"],
        "mismatch KL, nats": summary["mismatch_kl"],
        "stale rollouts, share of received": summary["stale_fraction"],
        "delta / full, bytes": summary["delta_bytes"] / summary["full_bytes"],
    }
    for name, worker in summary["workers"].items():
        working = max(worker["working_s"], 1e-9)
        rows[f"worker {name} rollouts, 1/s"] = worker["accepted"] / working
        rows[f"worker {name} idle, share of its time"] = 1 - worker["generating_s"] / working
    for name, sources in summary["chunk_bytes_by_source"].items():
        for source, size in sources.items():
            rows[f"chunks of {name} from {source}, MB"] = size / 1e6
    return rows


def judge(summary: dict[str, Any], wall: float, *, learned: bool) -> list[Goal]:
    """Return the goals of the first end-to-end system."""
    peers = [peer_share(sources) for sources in summary["chunk_bytes_by_source"].values()]
    goals = [
        at_most("stale rollouts, share", summary["stale_fraction"], 0.05),
        at_least("best worker's chunk bytes from peers", max(peers, default=0.0), 0.5),
        at_most("wall time", wall, 180.0, "s"),
    ]
    if learned:
        goals.append(at_least("sampled exact match after", summary["exact_match_after"], 0.8))
    return goals


def peer_share(sources: dict[str, int]) -> float:
    """Return the share of a worker's chunk bytes that did not come from the trainer."""
    total = sum(sources.values())
    return 1 - sources.get("trainer", 0) / total if total else 0.0


if __name__ == "__main__":
    sys.exit(main())
