"""Simulate swarms of many nodes in virtual time: how versions spread, and how a swarm recovers.

    python scripts/bench/scale.py [--peers N]... [--only PART]... [--plot FILE] [--quick] [--json FILE]

The nodes are the product's own (tests/support/simulated_swarm.py): a trainer and workers whose lines have 20
Mbit/s up, 100 down and a round trip of 20 to 80 ms between two of them. Only engines, the learner and the
environment are fakes. A version is a delta of 8 MB. Parts:

    spread      how soon a version reaches swarms of several sizes, and what leaves the trainer. The ideal is
                the least time in which parts of that size can reach everybody over these lines. CPU is that of
                all nodes together
    lines       runs of a short step, of trainer and workers with wide and narrow lines: how much slower they
                are than the learner, and how many rollouts came too late to be learned from
    cheats      a share of the workers cheats in all that it generates, and comes back with a new key after
                each ban: tokens of theirs that were learned from, honest workers that were banned
    hidden      some workers do not share their address (network.share_address), so that the trainer has to send
                them all: how much more leaves it, and how soon all have a version
    recovery    how soon all have a version after half of them were cut off, and after the trainer was killed

The same seed gives the same figures, without those of CPU.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support import virtual_time
from support.cheating_workers import CheatedSwarm
from support.memory_network import GOSSIP
from support.simulated_swarm import Home, SimulatedSwarm, share_at

from primerl.protocol.version import ALPN_BLOBS, ALPN_CONTROL
from primerl.scripts.bench.report import Goal, at_most, conclude, make_parser

DEFAULT_PEERS = 256
"""`network.max_peers` of a trainer if nobody says otherwise."""
PEERS, QUICK = (10, 30, 100, 300), (5, 10)
VERSIONS = 2
"""Measured, after one that is not: nobody knows yet how long a fetch takes."""
COPIES = 2.0
"""Goal: copies of a version that leave the trainer."""
TIMES = 3.0
"""Goal: time until 99 % have a version, by the ideal."""
LATEST_S = 300.0
"""Longest wait for a version."""
LINES = ((20.0, 20.0), (5.0, 20.0), (20.0, 5.0), (5.0, 5.0))
"""Mbit/s up, of the trainer and of each worker."""
STEP_S, STEPS = 10.0, 6
"""Of runs on these lines: a version of 8 MB in 10 s is 6.4 Mbit/s."""
SHARES = (0.0, 0.1, 0.3, 0.5)
"""Of cheats."""
CHEATED, CHEATED_STEP_S, CHEATED_STEPS, CHEATED_BYTES = 20, 5.0, 12, 1_000_000
"""Workers, seconds and number of steps, and bytes of a version of runs with cheats."""
AUDIT_RATE = 0.1
"""Share of the rollouts of proven workers that is audited: the product's default."""
POISONED = 0.01
"""Goal: share of cheats' tokens in what is learned from."""
HIDDEN = (0.0, 0.25, 0.5, 1.0)
"""Shares of the workers that do not share their address."""
PARTS = ("spread", "lines", "cheats", "hidden", "recovery")
SOME = 16
"""Workers of the other parts."""
CUT_S = 60.0
AGAIN_S = 30.0
"""Goal: seconds after which all have the newest version again."""

T = TypeVar("T")


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
    """Bytes of chunks that left the trainer until the next version, by those of a version."""
    control: float
    """Bytes/s that left the trainer in other messages, for each worker."""
    gossip: float
    """Bytes/s of gossip that a node sent, on average."""
    curve: list[float] = field(repr=False)
    """Seconds until each worker had it."""
    cpu_s: float = field(compare=False)
    """Of all nodes, for one version."""


@dataclass(frozen=True)
class Recovery:
    """What happened after a fault."""

    fault: str
    peers: int
    half_s: float
    all_s: float
    """Until all have the newest version of that moment, or a later one."""
    copies: float
    """Bytes of chunks that left the trainer meanwhile, by those of a version."""


@dataclass(frozen=True)
class CheatsRow:
    """A run in which some workers cheat, with new keys after each ban."""

    share: float
    """Of the workers, at any time."""
    step_s: float
    """Between two versions, on average; the learner takes CHEATED_STEP_S."""
    keys: int
    """That cheats have used."""
    poisoned: float
    """Share of cheats' tokens in all that were learned from, without replies that were as an honest one."""
    tokens_per_key: float
    """Of cheats, learned from."""
    banned: int
    """Honest workers."""
    stale: float
    """Share of the honest rollouts that came too late."""
    curve: list[float] = field(repr=False)
    """`poisoned` of all until each step."""


@dataclass(frozen=True)
class HiddenRow:
    """Spread of a version where some workers do not share their address; the slower of those measured."""

    share: float
    """Of the workers."""
    peers: int
    copies: float
    """Bytes of chunks that left the trainer, by those of a version."""
    by_trainer: float
    """Share of the trainer in all bytes of chunks that were sent."""
    half_s: float
    most_s: float
    """99 % have it."""
    others_s: float
    """All that share their address have it."""


@dataclass(frozen=True)
class LinesRow:
    """A run on lines of some rates."""

    trainer_mbit: float
    worker_mbit: float
    most_s: float
    """Until 99 % had a version or a later one, median of the versions."""
    step_s: float
    """Between two versions, on average; the learner takes STEP_S."""
    off_policy: float
    """Versions between the one that drew a token and the one that learns from it, mean."""
    stale: float
    """Share of the rollouts that came too late."""
    copies: float
    """Bytes of chunks that left the trainer, by those of all versions."""


def chunks_sent(swarm: SimulatedSwarm) -> int:
    """Return the bytes of chunks that the trainer has sent."""
    return swarm.lines.sent[swarm.trainer.node_id, ALPN_BLOBS]


def other_sent(swarm: SimulatedSwarm) -> tuple[int, int]:
    """Return the bytes of other messages of the trainer, and of gossip of all."""
    sent = swarm.lines.sent
    gossip = sum(size for (_, kind), size in sent.items() if kind == GOSSIP)
    return sent[swarm.trainer.node_id, ALPN_CONTROL], gossip


def all_chunks_sent(swarm: SimulatedSwarm) -> int:
    """Return the bytes of chunks that all nodes have sent."""
    return sum(size for (_, kind), size in swarm.lines.sent.items() if kind == ALPN_BLOBS)


async def joined(
    swarm: SimulatedSwarm, peers: int, hidden: int = 0, **overrides: Mapping[str, int]
) -> list[str]:
    """Start a trainer and workers; return their names once all have a version and one more was published.

    The last `hidden` to join do not share their address; `overrides` are of the trainer's config.
    """
    await swarm.start_trainer(**overrides)
    await swarm.join_all(peers, hidden)
    await swarm.until_published(max(swarm.published) + 1)
    return list(swarm.workers)


async def spread(directory: Path, home: Home, peers: int, versions: int) -> Row:
    """Measure versions in a swarm of `peers` workers that have joined before."""
    rows: list[Row] = []
    room = {"max_peers": max(DEFAULT_PEERS, 2 * peers)}
    async with SimulatedSwarm(directory, home) as swarm:
        names = await joined(swarm, peers, network=room)
        first = max(swarm.published) + 1
        for version in range(first, first + versions):
            await swarm.until_published(version)
            cpu, sent, others = time.process_time(), chunks_sent(swarm), other_sent(swarm)
            await swarm.until_covered(version, names, LATEST_S)
            await swarm.until_published(version + 1)
            lasted = swarm.published[version + 1] - swarm.published[version]
            control, gossip = (
                (after - before) / lasted
                for before, after in zip(others, other_sent(swarm), strict=True)
            )
            curve = swarm.coverage(version, names)
            rows.append(
                Row(
                    peers=peers,
                    half_s=share_at(curve, 0.5),
                    most_s=share_at(curve, 0.99),
                    all_s=share_at(curve, 1.0),
                    ideal_s=home.ideal_s(peers),
                    copies=(chunks_sent(swarm) - sent) / home.version_bytes,
                    control=control / peers,
                    gossip=gossip / (peers + 1),
                    curve=curve,
                    cpu_s=time.process_time() - cpu,
                )
            )
    return max(rows, key=lambda row: row.most_s)


async def run_hidden(directory: Path, home: Home, peers: int, share: float) -> HiddenRow:
    """Measure versions in a swarm of which the last to join do not share their address."""
    rows: list[HiddenRow] = []
    hidden = round(share * peers)
    async with SimulatedSwarm(directory, home) as swarm:
        names = await joined(swarm, peers, hidden)
        first = max(swarm.published) + 1
        for version in range(first, first + VERSIONS):
            await swarm.until_published(version)
            sent, before = chunks_sent(swarm), all_chunks_sent(swarm)
            await swarm.until_covered(version, names, LATEST_S)
            sent, total = chunks_sent(swarm) - sent, all_chunks_sent(swarm) - before
            curve = swarm.coverage(version, names)
            others = swarm.coverage(version, names[: peers - hidden] or names)
            row = HiddenRow(
                share=share,
                peers=peers,
                copies=sent / home.version_bytes,
                by_trainer=sent / total,
                half_s=share_at(curve, 0.5),
                most_s=share_at(curve, 0.99),
                others_s=share_at(others, 1.0),
            )
            rows.append(row)
            await swarm.until_published(version + 1)
    return max(rows, key=lambda row: row.most_s)


async def run_lines(directory: Path, home: Home, peers: int) -> LinesRow:
    """Measure a run of STEPS steps that needs all its workers."""
    names: list[str] = []
    batch = {"groups_per_batch": peers, "groups_per_lease": 1, "lease_timeout_s": 120.0}
    async with SimulatedSwarm(directory, home, rollouts=batch) as swarm:
        names = await joined(swarm, peers)
        first, sent = max(swarm.published), chunks_sent(swarm)
        last = first + STEPS
        await swarm.until_published(last)
        sent = chunks_sent(swarm) - sent
        await swarm.until_covered(last, names, LATEST_S)
        took = [share_at(swarm.coverage(version, names), 0.99) for version in range(first, last)]
        line = swarm.metrics()[-1]
        rejected = line["rollouts/rejected"]
        return LinesRow(
            trainer_mbit=home.trainer_up_mbit,
            worker_mbit=home.up_mbit,
            most_s=statistics.median(took),
            step_s=(swarm.published[last] - swarm.published[first]) / STEPS,
            off_policy=statistics.mean(step["off_policy/mean"] for step in swarm.metrics()[1:]),
            stale=rejected / (rejected + line["rollouts/accepted"]),
            copies=sent / STEPS / home.version_bytes,
        )


async def run_cheats(directory: Path, home: Home, peers: int, share: float) -> CheatsRow:
    """Measure CHEATED_STEPS steps of which a share of the workers tries to spoil all."""
    batch = {"groups_per_batch": peers, "groups_per_lease": 1, "lease_timeout_s": 60.0}
    audits = {"audit_rate": AUDIT_RATE}
    async with SimulatedSwarm(directory, home, rollouts=batch, verification=audits) as swarm:
        cheated = CheatedSwarm(swarm)
        number = round(share * peers)
        with cheated.watch():
            await swarm.start_trainer()
            await swarm.join_all(peers - number)
            async with asyncio.TaskGroup() as tasks:
                cheats = [
                    tasks.create_task(cheated.cheat(each, again=True)) for each in range(number)
                ]
                first = max(swarm.published)
                curve: list[float] = []
                for step in range(1, CHEATED_STEPS + 1):
                    await swarm.until_published(first + step)
                    curve.append(cheated.poisoned)
                for cheat in cheats:
                    cheat.cancel()
        honest = cheated.honest
        return CheatsRow(
            share=share,
            step_s=(swarm.published[first + CHEATED_STEPS] - swarm.published[first])
            / CHEATED_STEPS,
            keys=cheated.keys,
            poisoned=curve[-1],
            tokens_per_key=cheated.cheats.tokens / max(cheated.keys, 1),
            banned=cheated.honest_banned(),
            stale=honest.stale / (honest.stale + honest.rollouts),
            curve=curve,
        )


# -- faults --------------------------------------------------------------------------------------------


async def partition(directory: Path, home: Home, peers: int) -> Recovery:
    """Cut every second worker off from the trainer and the others for CUT_S."""
    async with SimulatedSwarm(directory, home) as swarm:
        names = await joined(swarm, peers)
        ids = [swarm.workers[name].node_id for name in names]
        near, far = [swarm.trainer.node_id, *ids[::2]], ids[1::2]
        links = [(one, other) for one in near for other in far]
        for link in links:
            swarm.network.partition(*link)
        await asyncio.sleep(CUT_S)
        for link in links:
            swarm.network.heal(*link)
        return await recovered(swarm, f"half cut off for {CUT_S:.0f} s", names)


async def restart(directory: Path, home: Home, peers: int) -> Recovery:
    """Kill the trainer, and start it again from what its disk had."""
    async with SimulatedSwarm(directory, home) as swarm:
        names = await joined(swarm, peers)
        await asyncio.sleep(home.step_s / 2)
        await swarm.crash_trainer()
        await swarm.start_trainer(resume=True)
        await swarm.until_published(max(swarm.published) + 1)
        return await recovered(swarm, "trainer killed and resumed", names)


async def recovered(swarm: SimulatedSwarm, fault: str, names: Sequence[str]) -> Recovery:
    """Measure from now until all have the newest version."""
    began, sent = asyncio.get_running_loop().time(), chunks_sent(swarm)
    version = max(swarm.published)
    await swarm.until_covered(version, names, LATEST_S)
    times = sorted(max(0.0, swarm.reached(name, version) - began) for name in names)
    copies = (chunks_sent(swarm) - sent) / swarm.home.version_bytes
    return Recovery(fault, len(names), share_at(times, 0.5), share_at(times, 1.0), copies)


# -- output --------------------------------------------------------------------------------------------


def judge(
    rows: Sequence[Row], recoveries: Sequence[Recovery], cheats: Sequence[CheatsRow]
) -> list[Goal]:
    """Return every goal with the value reached."""
    goals: list[Goal] = []
    for row in rows:
        name = f"{row.peers} peers"
        goals.append(at_most(f"{name}: copies of chunks from the trainer", row.copies, COPIES))
        goals.append(at_most(f"{name}: 99 % to the ideal", row.most_s / row.ideal_s, TIMES, "x"))
    for row in cheats:
        name = f"{row.share:.0%} cheat"
        goals.append(at_most(f"{name}: their tokens in what is learned", row.poisoned, POISONED))
        goals.append(at_most(f"{name}: honest workers banned", float(row.banned), 0.0))
    for row in recoveries:
        goals.append(at_most(f"{row.fault}: all have the newest", row.all_s, AGAIN_S, "s"))
    return goals


def show(table: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of rows with the same fields."""
    names = [name for name in table[0] if name != "curve"]
    print("".join(f"{name:>12}" for name in names))
    for row in table:
        cells = [
            f"{row[name]:.2f}" if isinstance(row[name], float) else row[name] for name in names
        ]
        print("".join(f"{cell:>12}" for cell in cells))


def plot(rows: Sequence[Row], cheats: Sequence[CheatsRow], path: Path) -> None:
    """Draw the share of workers that have a version over time, and that of cheats' tokens over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.5), layout="constrained")
    axes, poisoned = figure.subplots(1, 2, width_ratios=(3, 2))
    for cheated in cheats:
        steps = range(1, len(cheated.curve) + 1)
        shares = [100 * share for share in cheated.curve]
        poisoned.plot(steps, shares, label=f"{cheated.share:.0%} cheat")
    poisoned.set(xlabel="steps", ylabel="% of the learned tokens that are cheats'")
    poisoned.legend()
    for row in rows:
        shares = [100 * (number + 1) / row.peers for number in range(row.peers)]
        axes.step([0.0, *row.curve], [0.0, *shares], where="post", label=f"{row.peers} peers")
    axes.axvline(max(row.ideal_s for row in rows), color="grey", linestyle=":", label="ideal")
    axes.set(xlabel="seconds after a version was published", ylabel="% of workers that have it")
    axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def simulate(home: Home, work: Callable[[Path, Home], Coroutine[Any, Any, T]]) -> T:
    """Return what `work` finds in a swarm at `home`."""
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        # by a relative path: a run's id depends on the name of its model, and all that is drawn on the id
        return virtual_time.run(work(Path(), home), seed=home.seed)


def simulate_spread(home: Home, peers: int, *, versions: int = VERSIONS) -> Row:
    """Return the row of one swarm."""
    return simulate(home, partial(spread, peers=peers, versions=versions))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(
        __doc__, f"spread to {QUICK[0]} and {QUICK[-1]} peers alone: a quarter of a minute of CPU"
    )
    parser.add_argument("--peers", type=int, action="append", metavar="N", help="of a swarm")
    parser.add_argument("--only", action="append", choices=PARTS, help="some parts")
    parser.add_argument("--seed", type=int, default=1, help="of lines and of all randomness")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw how versions spread (matplotlib)"
    )
    return parser.parse_args()


def measure(
    part: str, home: Home, peers: Sequence[int]
) -> list[Row] | list[LinesRow] | list[CheatsRow] | list[HiddenRow] | list[Recovery]:
    """Return the rows of a part."""
    if part == "spread":
        return [simulate_spread(home, count) for count in peers]
    if part == "lines":
        runs = partial(run_lines, peers=SOME)
        short = replace(home, step_s=STEP_S)
        return [
            simulate(replace(short, trainer_up_mbit=trainer, up_mbit=worker), runs)
            for trainer, worker in LINES
        ]
    if part == "cheats":
        small = replace(home, step_s=CHEATED_STEP_S, version_bytes=CHEATED_BYTES)
        return [
            simulate(small, partial(run_cheats, peers=CHEATED, share=share)) for share in SHARES
        ]
    if part == "hidden":
        runs = [partial(run_hidden, peers=SOME, share=share) for share in HIDDEN]
        return [simulate(home, run) for run in runs]
    return [simulate(home, partial(fault, peers=SOME)) for fault in (partition, restart)]


def main() -> int:
    """Simulate, print, and return exit code 0 if every goal was met."""
    options = parse()
    logging.disable(logging.ERROR)
    home = Home(seed=options.seed)
    peers = options.peers or (QUICK if options.quick else PEERS)
    tables: dict[str, list[Any]] = {part: [] for part in PARTS}
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory  # not in the user's list of running nodes
        for part in options.only or (PARTS[:1] if options.quick else PARTS):
            tables[part] = list(measure(part, home, peers))
            show([asdict(row) for row in tables[part]])
    if options.plot and tables["spread"]:
        plot(tables["spread"], tables["cheats"], options.plot)
    goals = judge(tables["spread"], tables["recovery"], tables["cheats"])
    shown = {part: [asdict(row) for row in table] for part, table in tables.items()}
    return conclude(shown.pop("spread"), goals, options.json, **shown)


if __name__ == "__main__":
    sys.exit(main())
