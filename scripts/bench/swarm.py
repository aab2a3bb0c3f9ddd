"""Measure the spread of a new version over a swarm with a slow trainer.

    sudo .venv/bin/python scripts/bench/swarm.py [--quick] [--json FILE] [--workers 1,4,16,32]
        [--trainer-mbit F] [--worker-mbit F] [--model-mb F] [--chunk-kib N]

The trainer's uplink is the bottleneck. Every node is a process in a separate network namespace
(swarm_links.py), behind a token bucket in each direction; all are removed at the end. Encoding and decoding are
not counted. Node 0 is the trainer. Times count from one moment of the machine's monotonic clock, which all
processes share.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from primerl.node.removal import SCRATCH, remove_scratch
from primerl.node.weights.codec import encode_delta, encode_full
from primerl.node.weights.state import State, Tensor
from primerl.scripts.bench.children import Child, ChildFailed
from primerl.scripts.bench.report import Goal, at_most, conclude, make_parser
from primerl.scripts.bench.swarm_links import (
    START_S,
    Link,
    Meter,
    Star,
    Unavailable,
    Version,
    launcher,
    star,
)

HERE = Path(__file__).parent
KIB = 1024
LEAST_CHUNK = 128 * KIB
MOST_CHUNK = 4 * KIB * KIB
CHUNKS = 64
CHANGED = 0.01
WARM_UP_BYTES = 64_000
FULL_MB, QUICK_MB = 6.0, 4.0
"""Small because QUIC at these rates costs 0.1 CPU seconds per MB that a worker fetches and passes on."""
VICTIMS, QUICK_VICTIMS = 8, 4
"""Workers beside one that serves wrong bytes."""
LEAD_S = 0.5
"""Delay of the start, so that the command reaches every process first."""
SETTLE_S = 3.0
"""Time for the links' queues to drain before the next version."""
ASK_S = 30.0

JUDGED = 16
"""Number of workers of the judged runs."""
SLOWDOWN = 1.6
COPIES = 2.0
EXTRA = 1.0
LATE = 0.0

Row = dict[str, Any]


# -- our nodes ------------------------------------------------------------------------------------


class Swarm:
    """Running nodes that know each other."""

    def __init__(self, star: Star, nodes: list[Child], names: list[str]) -> None:
        self._star = star
        self._nodes = nodes
        self._names = names
        self._liar: int | None = None

    @property
    def liar(self) -> str:
        """Id of the node that serves wrong bytes; empty without one."""
        return "" if self._liar is None else self._names[self._liar]

    def workers(self) -> list[int]:
        """Return the indices of all nodes that fetch."""
        return [i for i in range(1, len(self._nodes)) if i != self._liar]

    async def corrupt(self, index: int, version: Version) -> None:
        """Make a node claim to hold `version`, and serve wrong bytes."""
        self._liar = index
        await self._hold(index, version, lie=True)

    async def spread(self, version: Version, deadline: float) -> Row:
        """Publish `version` at the trainer; return when every worker holds it."""
        chunks = await self._hold(0, version, lie=False)
        await asyncio.sleep(SETTLE_S)
        before = await self.reports()
        meter = Meter(self._star)
        start = time.monotonic() + LEAD_S
        answers = await asyncio.gather(
            *(self._fetch(worker, chunks, start, deadline) for worker in self.workers())
        )
        figures = meter.read(version.size, self.workers())
        after = await self.reports()
        if any(answer["missing"] for answer in answers):
            raise RuntimeError("a node said that it had fetched what it does not hold")
        times = [answer["done"] - start for answer in answers]
        cpu = sum(one["cpu"] for one in after) - sum(one["cpu"] for one in before)
        given = sum(after[0]["served"].values()) - sum(before[0]["served"].values())
        return {
            "system": "primerl",
            "file": version.name,
            "workers": len(answers),
            "bytes": version.size,
            "first_s": min(times),
            "last_s": max(times),
            "given": given / version.size,
            "wasted": sum(answer["wasted"] for answer in answers),
            "cpu_s": cpu,
            "peak_mib": max(one["peak_kib"] for one in after) / 1024,
            **figures,
        }

    async def reports(self) -> list[Row]:
        """Return the report of every process."""
        return [await node.ask("report", ASK_S) for node in self._nodes]

    async def _hold(self, index: int, version: Version, *, lie: bool) -> list[list[Any]]:
        answer = await self._nodes[index].ask(
            "hold", ASK_S, file=str(version.file), chunk=version.chunk, lie=lie
        )
        return answer["chunks"]

    async def _fetch(
        self, worker: int, chunks: list[list[Any]], start: float, deadline: float
    ) -> Row:
        neighbours = [name for i, name in enumerate(self._names) if i not in (0, worker)]
        return await self._nodes[worker].ask(
            "fetch",
            deadline,
            chunks=chunks,
            neighbours=neighbours,
            origin=self._names[0],
            place=worker - 1,
            at=start,
        )


async def measure_ours(
    star: Star, folder: Path, workers: int, versions: Sequence[Version], deadline: float
) -> list[Row]:
    """Return one row for each of `versions` but the first, which only connects the nodes."""
    rows: list[Row] = []
    async with _swarm(star, folder, workers + 1) as swarm:
        for version in versions:
            rows.append(await swarm.spread(version, deadline))
    return rows[1:]


async def measure_corruption(
    star: Star, folder: Path, workers: int, versions: Sequence[Version], deadline: float
) -> Row:
    """Measure with an additional worker that claims the second version and serves wrong bytes.

    `extra` is the largest number of wrong chunks that one fetcher took from it over all versions; `late` is the
    number taken after that version, when it should be known.
    """
    warm_up, attacked, *later = versions
    liar = workers + 1
    async with _swarm(star, folder, workers + 2) as swarm:
        await swarm.spread(warm_up, deadline)
        honest = (await swarm.reports())[liar]["served"]
        for version in (attacked, *later):
            await swarm.corrupt(liar, version)
        row = await swarm.spread(attacked, deadline)
        first = (await swarm.reports())[liar]["served"]
        for version in later:
            await swarm.spread(version, deadline)
        last = (await swarm.reports())[liar]["served"]
    wrong = {peer: size - honest.get(peer, 0) for peer, size in last.items()}
    return row | {
        "system": "primerl, one liar",
        "extra": max(wrong.values(), default=0) / attacked.chunk,
        "extra_mean": sum(wrong.values()) / attacked.chunk / workers,
        "late": (sum(last.values()) - sum(first.values())) / attacked.chunk,
    }


@asynccontextmanager
async def _swarm(star: Star, folder: Path, count: int) -> AsyncGenerator[Swarm]:
    """Yield `count` running nodes that know each other's addresses."""
    async with launcher(star, folder) as programs:
        nodes = [
            await programs.start(sys.executable, str(HERE / "swarm_node.py"), star.address(index))
            for index in range(count)
        ]
        hellos = await asyncio.gather(*(node.event("up", START_S) for node in nodes))
        roster = [[hello["node"], hello["addresses"]] for hello in hellos]
        await asyncio.gather(*(node.ask("meet", ASK_S, nodes=roster) for node in nodes))
        yield Swarm(star, nodes, [hello["node"] for hello in hellos])


# -- runs -----------------------------------------------------------------------------------------


WORKERS, QUICK_WORKERS = (1, 4, 16, 32), (1, 4, 16)


class Bench:
    """Runs one after another, each on a separate network."""

    def __init__(self, options: argparse.Namespace, folder: Path, versions: list[Version]) -> None:
        self._trainer = Link(options.trainer_mbit, 2 * options.worker_mbit)
        self._worker = Link(options.worker_mbit, 2 * options.worker_mbit)
        self._folder = folder
        self._versions = versions
        self._runs = 0

    @property
    def ideal_s(self) -> float:
        """Seconds for one copy of the anchor to leave the trainer."""
        return self._versions[1].size * 8 / 1e6 / self._trainer.up

    def ours(self, workers: int) -> list[Row]:
        """Measure the anchor and the delta."""
        with star(self._links(workers)) as net:
            return asyncio.run(
                measure_ours(net, self._home(), workers, self._versions, self._patience())
            )

    def corruption(self, workers: int) -> list[Row]:
        """Measure the anchor with a liar; then the delta, and requests still made to the liar."""
        with star(self._links(workers + 1)) as net:
            row = asyncio.run(
                measure_corruption(net, self._home(), workers, self._versions, self._patience())
            )
            return [row]

    def _links(self, workers: int) -> list[Link]:
        return [self._trainer] + [self._worker] * workers

    def _home(self) -> Path:
        self._runs += 1
        return self._folder / str(self._runs)

    def _patience(self) -> float:
        return 60 + 10 * self.ideal_s


def make_versions(folder: Path, model_bytes: int, chunk: int) -> list[Version]:
    """Make a warm-up, an anchor of a random bf16 model, and a delta of 1 % of its elements."""
    rng = np.random.default_rng(0)
    values = rng.normal(0, 0.02, model_bytes // 2).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype("<u2")
    moved = bits.copy()
    where = rng.choice(bits.size, int(CHANGED * bits.size), replace=False)
    moved[where] += rng.choice([1, 0xFFFF], where.size).astype("<u2")
    base, new = _state(bits), _state(moved)
    payloads = {
        "warm-up": rng.bytes(WARM_UP_BYTES),
        "anchor": b"".join(encode_full(base)),
        "delta": b"".join(encode_delta(base, new)),
    }
    versions: list[Version] = []
    for name, payload in payloads.items():
        file = folder / name
        file.write_bytes(payload)
        versions.append(Version(name, file, chunk or chunk_size(len(payload))))
    return versions


def _state(bits: Any) -> State:
    return {"weight": Tensor("BF16", (bits.size,), bits)}


def chunk_size(size: int) -> int:
    """Return the chunk size of a file of `size` bytes, by the publisher's rule."""
    return min(max(-(-size // CHUNKS), LEAST_CHUNK), MOST_CHUNK)


def run(bench: Bench, counts: Sequence[int], victims: int) -> list[Row]:
    """Return all rows; each run is announced, as the slow ones take minutes."""
    rows: list[Row] = []
    for workers in counts:
        rows += attempt(f"primerl, {workers} workers", partial(bench.ours, workers))
    name = f"primerl, {victims} workers and one that serves wrong bytes"
    return rows + attempt(name, partial(bench.corruption, victims))


def attempt(name: str, measure: Callable[[], list[Row]]) -> list[Row]:
    """Return the rows of one run, or a failure row."""
    say(name)
    try:
        rows = measure()
    except ChildFailed as failure:
        say(f"  failed: {failure}")
        return [{"system": name, "file": "", "workers": 0, "failed": str(failure)}]
    return told(rows)


def told(rows: list[Row]) -> list[Row]:
    """Print the rows as progress and return them."""
    for row in rows:
        say(f"  {row['file']}: last after {row['last_s']:.2f} s, egress {row['egress']:.2f} copies")
    return rows


def say(line: str) -> None:
    """Print progress."""
    print(f".. {line}", file=sys.stderr, flush=True)


# -- table and goals ------------------------------------------------------------------------------


def judge(rows: Sequence[Row]) -> list[Goal]:
    """Return every goal that the rows allow to judge."""
    goals: list[Goal] = []
    failed = sum("failed" in row for row in rows)
    if failed:
        goals.append(at_most("runs that failed", failed, 0, "runs"))
    alone, many = find(rows, "primerl", "anchor", 1), find(rows, "primerl", "anchor", JUDGED)
    if alone and many:
        ratio = many["last_s"] / alone["last_s"]
        goals.append(at_most(f"last of {JUDGED} workers to a single one", ratio, SLOWDOWN, "x"))
    if many:
        goals.append(at_most(f"trainer egress at {JUDGED}", many["egress"], COPIES, "copies"))
    for row in rows:
        if "extra" in row:
            goals.append(at_most("wrong chunks that a fetcher took", row["extra"], EXTRA, "chunks"))
            goals.append(at_most("... in the version after", row["late"], LATE, "chunks"))
    return goals


def find(rows: Sequence[Row], system: str, file: str, workers: int) -> Row | None:
    """Return the row of one run."""
    wanted = (system, file, workers)
    return next((r for r in rows if (r["system"], r["file"], r["workers"]) == wanted), None)


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    titles = ("file", "n", "first s", "last s", "egress", "given", "got", "wasted", "cpu", "busy")
    print(f"{'':44}" + "".join(f"{title:>9}" for title in titles))
    for row in rows:
        if "failed" in row:
            print(f"{row['system']:44} failed")
            continue
        print(f"{row['system']:44}" + "".join(f"{cell:>9}" for cell in cells(row)))
    print("egress, got: copies of the file on the wire that the trainer sent and a worker received")
    print(
        "given: copies of the file in the chunks that the trainer sent, without what is said about them"
    )
    print("wasted: copies that came twice or wrong, of all workers together")
    print("cpu: share of all cores that the nodes used; busy: that the whole machine did")


def cells(row: Row) -> list[str]:
    """Return the cells of a table row."""
    late = f">{row['last_s']:.0f}" if row.get("late") and "extra" not in row else ""
    return [
        row["file"],
        str(row["workers"]),
        f"{row['first_s']:.2f}",
        late or f"{row['last_s']:.2f}",
        f"{row['egress']:.2f}",
        f"{row['given']:.2f}" if "given" in row else "-",
        f"{row['received']:.2f}",
        f"{row['wasted'] / row['bytes']:.3f}" if "wasted" in row else "-",
        f"{cpu_share(row):.0%}" if "cpu_s" in row else "-",
        f"{row['busy']:.0%}",
    ]


def cpu_share(row: Row) -> float:
    """Return the share of all cores that the nodes used while the version spread."""
    return row["cpu_s"] / row["last_s"] / (os.cpu_count() or 1)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = make_parser(__doc__, "fewer workers, about a minute")
    parser.add_argument("--workers", type=numbers, metavar="1,4,16", help="of our swarms")
    parser.add_argument("--trainer-mbit", type=float, default=4.0, help="its uplink")
    parser.add_argument(
        "--worker-mbit", type=float, default=40.0, help="uplink; down is twice that"
    )
    parser.add_argument("--model-mb", type=float, help="bf16 bytes of the model")
    parser.add_argument("--chunk-kib", type=int, default=0, help="default: the publisher's rule")
    options = parser.parse_args(arguments)
    options.workers = options.workers or (QUICK_WORKERS if options.quick else WORKERS)
    options.model_mb = options.model_mb or (QUICK_MB if options.quick else FULL_MB)
    return options


def numbers(text: str) -> tuple[int, ...]:
    """Parse numbers such as `1,4,16`."""
    return tuple(int(part) for part in text.split(","))


def scratch() -> Path:
    """Make the folder for a run's files, in memory if possible."""
    shared = Path("/dev/shm")
    return Path(
        tempfile.mkdtemp(prefix=f"{SCRATCH}swarm-", dir=shared if shared.is_dir() else None)
    )


def stop(number: int, frame: FrameType | None) -> None:
    """Exit as by an error, so that everything is removed."""
    sys.exit(128 + number)


def main() -> int:
    """Measure, print, and return the exit code.

    Code 0: every goal met; 1: some missed, or a run failed; 2: nothing could be measured.
    """
    signal.signal(signal.SIGTERM, stop)
    options = parse()
    folder = scratch()
    try:
        versions = make_versions(folder, int(options.model_mb * 1e6), options.chunk_kib * KIB)
        bench = Bench(options, folder, versions)
        say(", ".join(f"{v.name} {v.size / 1e6:.2f} MB" for v in versions))
        with star([Link(1, 1)]):
            pass  # a failure here comes before anything is installed
        rows = run(bench, options.workers, QUICK_VICTIMS if options.quick else VICTIMS)
    except Unavailable as problem:
        print(f"nothing was measured: {problem}", file=sys.stderr)
        return 2
    finally:
        remove_scratch(folder)
    show(rows)
    return conclude(rows, judge(rows), options.json)


if __name__ == "__main__":
    sys.exit(main())
