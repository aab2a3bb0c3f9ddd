"""How long `primerl-node --help` takes, against the goal of 0.5 s: a CLI is judged by its first second.

python scripts/bench/help.py [--json]
"""

import json
import statistics
import subprocess
import sys
import time

GOAL_S = 0.5
RUNS = 10


def seconds_of_help() -> float:
    """Wall seconds of one `--help`, interpreter start included."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "primerl.cli.main", "--help"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - started


def main() -> None:
    """Measure, print, and exit with 1 when the goal is missed."""
    seconds_of_help()  # byte code and file cache
    taken = sorted(seconds_of_help() for _ in range(RUNS))
    result = {
        "goal_s": GOAL_S,
        "median_s": round(statistics.median(taken), 3),
        "best_s": round(taken[0], 3),
        "worst_s": round(taken[-1], 3),
        "runs": RUNS,
    }
    if "--json" in sys.argv[1:]:
        print(json.dumps(result))
    else:
        print("  ".join(f"{name} {value}" for name, value in result.items()))
    sys.exit(result["median_s"] > GOAL_S)


if __name__ == "__main__":
    main()
