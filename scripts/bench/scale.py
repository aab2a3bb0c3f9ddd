"""Simulate swarms of many nodes in virtual time, and measure how a version spreads.

    python scripts/bench/scale.py [--peers N]... [--seed N] [--quick] [--json FILE]

The nodes are the product's own (tests/support/simulated_swarm.py): a trainer and workers whose lines have 20
Mbit/s up, 100 down and a round trip of 20 to 80 ms between two of them. Only engines, the learner and the
environment are fakes. A version is a delta of 8 MB. The ideal tree is the least time in which parts of that
size can reach everybody over these lines. CPU is the time of this process for all nodes together: a machine of
a swarm spends that of one. The same seed gives the same figures, without those of CPU and wall time.
"""

import argparse
import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support import virtual_time
from support.simulated_swarm import Home, SimulatedSwarm, share_at

from primerl.scripts.bench.report import Goal, at_most, conclude, make_parser

PEERS = (10, 30, 100, 300)
QUICK = (10, 30)
VERSIONS = 2
"""Measured, after one that is not: nobody knows yet how long a fetch takes."""
COPIES = 2.0
"""Goal: copies of a version that leave the trainer."""
TIMES = 3.0
"""Goal: time until 99 % have a version, by that of the ideal tree."""
LATEST_S = 300.0


@dataclass(frozen=True)
class Row:
    """Spread of a version to a number of peers; the slowest of those measured."""

    peers: int
    half_s: float
    most_s: float
    """99 % have it."""
    all_s: float
    ideal_s: float
    copies: float
    """Bytes that left the trainer until the next version, by those of a version."""
    gossip: float
    """Bytes of gossip that a node sent meanwhile, by those of a version."""
    cpu_s: float = field(compare=False)
    """Of all nodes, for one version."""
    wall_s: float = field(compare=False)


async def spread(directory: Path, home: Home, peers: int, versions: int) -> Row:
    """Measure versions in a swarm of `peers` workers that have joined before."""
    names = [f"w{number}" for number in range(peers)]
    rows: list[Row] = []
    async with SimulatedSwarm(directory, home) as swarm:
        await swarm.start_trainer()
        await swarm.join_all(peers)
        first = max(swarm.published) + 1
        for version in range(first, first + 1 + versions):
            await swarm.until_published(version)
            sent, gossiped = swarm.lines.sent[swarm.trainer.node_id], swarm.network.gossiped
            cpu, wall = time.process_time(), time.perf_counter()
            await swarm.until_covered(version, names, LATEST_S)
            await swarm.until_published(version + 1)
            sent = swarm.lines.sent[swarm.trainer.node_id] - sent
            gossiped = swarm.network.gossiped - gossiped
            seconds = swarm.coverage(version, names)
            rows.append(
                Row(
                    peers,
                    share_at(seconds, 0.5),
                    share_at(seconds, 0.99),
                    share_at(seconds, 1.0),
                    home.ideal_s(peers),
                    sent / home.version_bytes,
                    gossiped / (peers + 1) / home.version_bytes,
                    time.process_time() - cpu,
                    time.perf_counter() - wall,
                )
            )
    return max(rows[1:], key=lambda row: row.most_s)


def judge(rows: Sequence[Row]) -> list[Goal]:
    """Return every goal with the value reached."""
    goals: list[Goal] = []
    for row in rows:
        name = f"{row.peers} peers"
        goals.append(at_most(f"{name}: copies that leave the trainer", row.copies, COPIES))
        goals.append(at_most(f"{name}: 99 % to the ideal", row.most_s / row.ideal_s, TIMES, "x"))
    return goals


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    head = (
        "peers",
        "50 % s",
        "99 % s",
        "100 % s",
        "ideal s",
        "copies",
        "gossip",
        "CPU s",
        "wall s",
    )
    print("".join(f"{cell:>10}" for cell in head))
    for row in rows:
        print(
            f"{row.peers:>10}{row.half_s:>10.2f}{row.most_s:>10.2f}{row.all_s:>10.2f}{row.ideal_s:>10.2f}"
            f"{row.copies:>10.2f}{row.gossip:>10.3f}{row.cpu_s:>10.1f}{row.wall_s:>10.1f}"
        )


def simulate(home: Home, peers: int, *, versions: int = VERSIONS) -> Row:
    """Return the row of one swarm."""
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        # by a relative path: a run's id depends on the name of its model, and all that is drawn on the id
        return virtual_time.run(spread(Path(), home, peers, versions), seed=home.seed)


def repeatable() -> None:
    """Start this program again with hashes that are the same in each process, unless they are."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.argv])


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__, f"{QUICK[0]} and {QUICK[-1]} peers: a minute")
    parser.add_argument("--peers", type=int, action="append", metavar="N", help="of a swarm")
    parser.add_argument("--seed", type=int, default=1, help="of lines and of all randomness")
    return parser.parse_args()


def main() -> int:
    """Simulate, print, and return exit code 0 if every goal was met."""
    options = parse()
    repeatable()
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory  # not in the user's list of running nodes
        counts = options.peers or (QUICK if options.quick else PEERS)
        rows = [simulate(Home(seed=options.seed), peers) for peers in counts]
    show(rows)
    return conclude([asdict(row) for row in rows], judge(rows), options.json)


if __name__ == "__main__":
    sys.exit(main())
