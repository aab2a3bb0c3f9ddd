"""Measure the time of `primerl-node --help`.

python scripts/bench/help.py [--quick] [--json FILE]
"""

import statistics
import subprocess
import sys
import time

from primerl.scripts.bench.report import at_most, conclude, make_parser, show_figures

GOAL_S = 0.5
RUNS = 10


def seconds_of_help() -> float:
    """Return the wall seconds of one `--help`, interpreter start included."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "primerl.cli.main", "--help"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - started


def main() -> int:
    """Measure, print, and return exit code 0 if the goal was met."""
    options = make_parser(__doc__, "three runs").parse_args()
    seconds_of_help()  # warms up byte code and file cache
    taken = sorted(seconds_of_help() for _ in range(3 if options.quick else RUNS))
    found = {"median, s": statistics.median(taken), "best, s": taken[0], "worst, s": taken[-1]}
    show_figures(found)
    goals = [at_most("median of primerl-node --help", found["median, s"], GOAL_S, "s")]
    return conclude(found, goals, options.json)


if __name__ == "__main__":
    sys.exit(main())
