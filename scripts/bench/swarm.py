"""Measure the spread of a new version over a swarm with a slow trainer, beside shardcast.

    sudo .venv/bin/python scripts/bench/swarm.py [--quick] [--json FILE] [--workers 1,4,16,32]
        [--trainer-mbit F] [--worker-mbit F] [--model-mb F] [--chunk-kib N] [--shardcast-python FILE]

The trainer's uplink is the bottleneck. Every node is a process in a separate network namespace
(swarm_links.py), behind a token bucket in each direction; all are removed at the end. Both systems move the
same file over the same links; encoding and decoding are not counted. Node 0 is the trainer. Times count from
one moment of the machine's monotonic clock, which all processes share.

shardcast is PyPI's: an origin, clients, and optionally middle nodes between them. Its defaults apply except for
the poll intervals. It is a dependency of this benchmark only, in a separate venv.
"""

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from primerl.node.removal import SCRATCH, remove_scratch
from primerl.node.weights.codec import encode_delta, encode_full
from primerl.node.weights.state import State, Tensor
from primerl.scripts.bench.children import Child, ChildFailed
from primerl.scripts.bench.report import Goal, at_least, at_most, conclude, make_parser
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
LIARS_VICTIMS = 8
MIDDLES = 4
SHARDS = 16
LEAD_S = 0.5
"""Delay of the start, so that the command reaches every process first."""
SETTLE_S = 3.0
"""Time for the links' queues to drain before the next version."""
ASK_S = 30.0
REQUIREMENT = "shardcast==0.3.2"
SHARD_BYTES = 50_000_000
"""shardcast's default."""
VENV = Path(__file__).resolve().parents[2] / "build" / "shardcast-venv"

JUDGED = 16
"""Number of workers of the judged runs."""
SLOWDOWN = 1.6
COPIES = 2.0
FASTER_ANCHOR = 4.0
FASTER_DELTA = 50.0
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


# -- shardcast ------------------------------------------------------------------------------------


class Missing(Exception):
    """shardcast is not available here; the message gives the reason."""


@dataclass(frozen=True)
class Tree:
    """A setup of shardcast."""

    clients: int
    middles: int
    shard: int = SHARD_BYTES

    @property
    def name(self) -> str:
        """Name in the table."""
        above = f"{self.middles} middle nodes" if self.middles else "origin only"
        cut = "" if self.shard == SHARD_BYTES else ", small shards"
        return f"shardcast, {above}{cut}"


def find_python(venv: Path) -> Path:
    """Return a Python with shardcast: that of `venv`, created if necessary. Raises Missing."""
    if shutil.which("wget") is None:
        raise Missing("shardcast downloads with wget, which is not installed")
    python = venv / "bin" / "python"
    if python.exists() and _imports(python):
        return python
    print(f"making {venv} with {REQUIREMENT}", flush=True)
    try:
        _run(sys.executable, "-m", "venv", str(venv))
        _run(str(python), "-m", "pip", "install", "--quiet", REQUIREMENT)
    except subprocess.CalledProcessError as error:
        raise Missing(f"{REQUIREMENT} could not be installed: {error.stderr.strip()}") from error
    return python


def _imports(python: Path) -> bool:
    check = [str(python), "-c", "import shardcast.client_node"]
    return subprocess.run(check, capture_output=True, check=False).returncode == 0


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


async def measure_shardcast(
    star: Star, folder: Path, python: Path, version: Version, tree: Tree, deadline: float
) -> Row:
    """Return one row; if `deadline` passes it has `late` clients, and counts as that long.

    Node 0 is the origin, followed by the middle nodes and the clients.
    """
    roles = ["origin"] + ["middle"] * tree.middles + ["client"] * tree.clients
    first_client = 1 + tree.middles
    async with launcher(star, folder) as programs:
        for index, role in enumerate(roles):
            command = [role, _upstream(star, role, tree.middles)]
            node = await programs.start(*_private(python, folder, index), *command)
            await node.event("up", START_S)  # it probes its servers, which must be up and idle
        nodes = programs.started
        meter = Meter(star)
        at = time.monotonic() + LEAD_S
        order = nodes[0].ask("publish", deadline, file=str(version.file), shard=tree.shard, at=at)
        waiting = [_fetch_shardcast(node, at, deadline) for node in nodes[first_client:]]
        published, ends = await asyncio.gather(order, asyncio.gather(*waiting))
        figures = meter.read(version.size, range(first_client, len(nodes)))
    times = [end - published["done"] for end in ends if end is not None]
    late = len(ends) - len(times)
    return {
        "system": tree.name,
        "file": version.name,
        "workers": tree.clients,
        "bytes": version.size,
        "first_s": min(times, default=deadline),
        "last_s": deadline if late else max(times),
        "late": late,
        **figures,
    }


async def _fetch_shardcast(node: Child, at: float, deadline: float) -> float | None:
    """Return when the client had the file; None after the deadline, or if it gave up."""
    try:
        answer = await node.ask("fetch", deadline, version="v1", at=at)
    except ChildFailed as failure:
        lines = str(failure).splitlines()
        print(f"  shardcast client: {lines[0]}; its log ends: {lines[-1]}", file=sys.stderr)
        return None
    return answer["done"]


def _upstream(star: Star, role: str, middles: int) -> str:
    if role == "client" and middles:
        return ",".join(star.address(1 + index) for index in range(middles))
    return star.address(0)


def _private(python: Path, folder: Path, index: int) -> list[str]:
    """Return the command of a Python with private copies of the shardcast package and of /tmp.

    shardcast's clients keep a temporary file beside the package: two on one machine would overwrite each
    other's.
    """
    own = folder / "packages" / str(index)
    installed = _run(str(python), "-c", "import shardcast; print(shardcast.__path__[0])").strip()
    shutil.copytree(installed, own / "shardcast", ignore=shutil.ignore_patterns("__pycache__"))
    return [
        *("sh", "-c", 'mount --bind "$PWD" /tmp && exec "$@"', "sh"),
        *("env", f"PYTHONPATH={own}", "PYTHONDONTWRITEBYTECODE=1"),
        *(str(python), str(HERE / "swarm_shardcast_node.py")),
    ]


# -- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The runs of a benchmark."""

    ours: tuple[int, ...]
    victims: int
    trees: tuple[tuple[int, int, bool], ...]
    """Clients, middle nodes, whether in small shards."""


FULL = Plan(
    ours=(1, 4, 16, 32),
    victims=LIARS_VICTIMS,
    trees=(
        *((1, 0, False), (4, 0, False), (16, 2, False), (16, MIDDLES, False)),
        *((16, MIDDLES, True), (16, 0, False)),
    ),
)
QUICK = Plan(ours=(1, 4, 16), victims=4, trees=((4, 0, False),))


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

    def shardcast(self, python: Path, tree: Tree) -> list[Row]:
        """Measure the anchor with shardcast."""
        deadline = 60 + 2 * tree.clients * self.ideal_s
        with star(self._links(tree.clients + tree.middles)) as net:
            row = asyncio.run(
                measure_shardcast(net, self._home(), python, self._versions[1], tree, deadline)
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


def run(bench: Bench, plan: Plan, python: Path | None, anchor: int) -> list[Row]:
    """Return all rows; each run is announced, as the slow ones take minutes."""
    rows: list[Row] = []
    for workers in plan.ours:
        rows += attempt(f"primerl, {workers} workers", partial(bench.ours, workers))
    if plan.victims:
        name = f"primerl, {plan.victims} workers and one that serves wrong bytes"
        rows += attempt(name, partial(bench.corruption, plan.victims))
    for clients, middles, small in plan.trees if python else ():
        shard = -(-anchor // SHARDS) if small else SHARD_BYTES
        tree = Tree(clients, middles, shard)
        name = f"{tree.name}, {clients} clients"
        rows += attempt(name, partial(bench.shardcast, python or Path(), tree))
    return rows


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


def find_shardcast(options: argparse.Namespace) -> Path | None:
    """Return shardcast's Python; None if it is disabled or unavailable."""
    if options.no_shardcast:
        return None
    try:
        return options.shardcast_python or find_python(VENV)
    except Missing as missing:
        say(f"shardcast is left out: {missing}")
        return None


def make_plan(options: argparse.Namespace) -> Plan:
    """Return the full or the quick plan, with the requested numbers of workers."""
    plan = QUICK if options.quick else FULL
    workers = options.workers or plan.ours
    most = max(workers)
    trees = tuple(tree for tree in plan.trees if tree[0] <= most)
    return Plan(tuple(workers), plan.victims, trees)


# -- table and goals ------------------------------------------------------------------------------


def judge(rows: Sequence[Row]) -> list[Goal]:
    """Return every goal that the rows allow to judge."""
    goals: list[Goal] = []
    failed = sum("failed" in row for row in rows)
    if failed:
        goals.append(at_most("runs that failed", failed, 0, "runs"))
    alone, many = find(rows, "primerl", "anchor", 1), find(rows, "primerl", "anchor", JUDGED)
    delta = find(rows, "primerl", "delta", JUDGED)
    if alone and many:
        ratio = many["last_s"] / alone["last_s"]
        goals.append(at_most(f"last of {JUDGED} workers to a single one", ratio, SLOWDOWN, "x"))
    if many:
        goals.append(at_most(f"trainer egress at {JUDGED}", many["egress"], COPIES, "copies"))
    for theirs in shardcasts(rows):
        name = theirs["system"]
        if many:
            ratio = theirs["last_s"] / many["last_s"]
            goals.append(at_least(f"{name} to us, anchor", ratio, FASTER_ANCHOR, "x"))
        if delta:
            ratio = theirs["last_s"] / delta["last_s"]
            goals.append(at_least(f"{name} to our 1 % delta", ratio, FASTER_DELTA, "x"))
    for row in rows:
        if "extra" in row:
            goals.append(at_most("wrong chunks that a fetcher took", row["extra"], EXTRA, "chunks"))
            goals.append(at_most("... in the version after", row["late"], LATE, "chunks"))
    return goals


def find(rows: Sequence[Row], system: str, file: str, workers: int) -> Row | None:
    """Return the row of one run."""
    wanted = (system, file, workers)
    return next((r for r in rows if (r["system"], r["file"], r["workers"]) == wanted), None)


def shardcasts(rows: Sequence[Row]) -> list[Row]:
    """Return shardcast's rows at the judged number of workers."""
    return [
        row
        for row in rows
        if row["system"].startswith("shardcast")
        and row["workers"] == JUDGED
        and "failed" not in row
    ]


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
    parser.add_argument("--shardcast-python", type=Path, help="a Python that has shardcast")
    parser.add_argument("--no-shardcast", action="store_true")
    options = parser.parse_args(arguments)
    options.model_mb = options.model_mb or (QUICK_MB if options.quick else FULL_MB)
    return options


def numbers(text: str) -> tuple[int, ...]:
    """Parse numbers such as `1,4,16`."""
    return tuple(int(part) for part in text.split(","))


def scratch() -> Path:
    """Make the folder for a run's files, in memory if possible.

    Never below /tmp, which shardcast's nodes replace.
    """
    shared = Path("/dev/shm")
    VENV.parent.mkdir(exist_ok=True)
    return Path(
        tempfile.mkdtemp(prefix=f"{SCRATCH}swarm-", dir=shared if shared.is_dir() else VENV.parent)
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
        python = find_shardcast(options)
        rows = run(bench, make_plan(options), python, versions[1].size)
    except Unavailable as problem:
        print(f"nothing was measured: {problem}", file=sys.stderr)
        return 2
    finally:
        remove_scratch(folder)
    show(rows)
    return conclude(rows, judge(rows), options.json)


if __name__ == "__main__":
    sys.exit(main())
