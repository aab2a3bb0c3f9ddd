"""End a trainer and two workers hard before each change that they make to the disk, go on, and count losses.

    .venv/bin/python scripts/bench/crashes.py [--quick] [--every N] [--seed N] [--jobs N] [--json FILE]

All nodes run in one process, over the tests' memory transport and with the tests' engine, auditor and learner;
ledgers, checkpoints, resume points, chunks and all other files are real. The process ends by os._exit() before
change number k, as by `kill -9`; another one goes on with the run. What was promised is in a journal beside the
nodes: signed versions, submissions with a receipt, verdicts, batches. --quick takes a few points by --seed.
"""

import json
import os
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support import crash_points
from support.crash_points import CrashedRun
from support.swarm import make_model

from primerl.node.trainer.kept_rollouts import STEPS_WAITING
from primerl.scripts.bench.report import at_least, at_most, conclude, make_parser

QUICK = 2
NEVER = 1 << 30


def main() -> int:
    """Run, print, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, f"{QUICK} points")
    parser.add_argument("--every", type=int, default=1, help="take every Nth point (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    crash_points.prepare()
    with tempfile.TemporaryDirectory(prefix="primerl-crashes-") as name, own_registry(name):
        directory = Path(name)
        model = make_model(directory / "model")
        whole = crash_points.crash(directory / "whole", model, NEVER)
        chance = random.Random(options.seed)
        points = range(1 + chance.randrange(options.every), whole.changes + 1, options.every)
        chosen = sorted(chance.sample(points, min(QUICK, len(points)))) if options.quick else points
        runs = [whole, *side_by_side(directory, model, chosen, options.jobs)]
    show(runs)
    faults = [fault for run in runs for fault in run.faults]
    print("\n".join(faults))
    reached = [run for run in runs if run.change]
    goals = [
        at_least("points at which the run ended", len(reached), min(len(chosen), QUICK)),
        at_most("promises that were broken", len(faults), 0),
        at_most("steps trained again, at most", max(run.again for run in runs), 1),
        at_most(
            "steps whose rollouts were not kept, at most",
            max(run.unkept for run in runs),
            STEPS_WAITING,  # those that wait to be written while training goes on
        ),
    ]
    rows = [asdict(run) for run in runs]
    return conclude(rows, goals, options.json, changes=whole.changes)


@contextmanager
def own_registry(directory: str) -> Generator[None]:
    """Keep the nodes out of the user's registry."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = directory
    try:
        yield
    finally:
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before


def side_by_side(
    directory: Path, model: Path, points: Sequence[int], jobs: int
) -> list[CrashedRun]:
    """End runs at these points, some processes at a time."""
    results = directory / "results"

    def share(number: int) -> None:
        for at in points[number::jobs]:
            run = crash_points.crash(directory / f"{at}", model, at)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(run)) + "\n")

    children = [
        crash_points.fork(lambda number=number: share(number), directory / f"log_{number}")
        for number in range(jobs)
    ]
    for number, child in enumerate(children):
        if code := crash_points.ended(child):
            print(crash_points.tail(directory / f"log_{number}"), file=sys.stderr)
            raise SystemExit(code)
    runs = [CrashedRun(**json.loads(line)) for line in results.read_text().splitlines()]
    return sorted(runs, key=lambda run: run.at)


def show(runs: Sequence[CrashedRun]) -> None:
    """Print a line for each kind of change."""
    kinds: dict[str, list[CrashedRun]] = defaultdict(list)
    for run in runs:
        kinds[run.kind].append(run)
    print(f"{'before':44} points  broken  again  unkept")
    for kind, ended in sorted(kinds.items()):
        broken = sum(bool(run.faults) for run in ended)
        again, unkept = max(run.again for run in ended), max(run.unkept for run in ended)
        print(f"{kind:44} {len(ended):6} {broken:7} {again:6} {unkept:7}")


if __name__ == "__main__":
    raise SystemExit(main())
