"""How a new version spreads over a swarm when the trainer's uplink is the bottleneck, beside shardcast.

    sudo .venv/bin/python scripts/bench/swarm.py [--quick] [--json FILE] [--workers 1,4,16,32]
        [--trainer-mbit F] [--worker-mbit F] [--model-mb F] [--chunk-kib N] [--shardcast-python FILE]

Every node is a process in a network namespace of its own, behind a token bucket in each direction; all are
removed at the end. Both systems move the same file over the same links; encoding and decoding are not counted.
"""

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import swarm_ours
import swarm_shardcast
from swarm_links import Link, Unavailable, star
from swarm_programs import Failed, Version
from swarm_report import judge, show
from swarm_shardcast import Missing, Tree

from primerl.node.weights.codec import encode_delta, encode_full
from primerl.node.weights.state import State, Tensor

KIB = 1024
LEAST_CHUNK = 128 * KIB
MOST_CHUNK = 4 * KIB * KIB
CHUNKS = 64
CHANGED = 0.01
WARM_UP_BYTES = 64_000
FULL_MB, QUICK_MB = 6.0, 4.0
"""So small because QUIC at these rates costs 0.1 CPU seconds per MB that a worker fetches and passes on."""
LIARS_VICTIMS = 8
MIDDLES = 4
SHARDS = 16
VENV = Path(__file__).resolve().parents[2] / "build" / "shardcast-venv"

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to run."""

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
    """Runs one after another, each on a network of its own."""

    def __init__(self, options: argparse.Namespace, folder: Path, versions: list[Version]) -> None:
        self._trainer = Link(options.trainer_mbit, 2 * options.worker_mbit)
        self._worker = Link(options.worker_mbit, 2 * options.worker_mbit)
        self._folder = folder
        self._versions = versions
        self._runs = 0

    @property
    def ideal_s(self) -> float:
        """For one copy of the anchor to leave the trainer."""
        return self._versions[1].size * 8 / 1e6 / self._trainer.up

    def ours(self, workers: int) -> list[Row]:
        """The anchor and the delta."""
        with star(self._links(workers)) as net:
            return asyncio.run(
                swarm_ours.measure(net, self._home(), workers, self._versions, self._patience())
            )

    def corruption(self, workers: int) -> list[Row]:
        """The anchor, with a liar; then the delta, and what was still asked of the liar."""
        with star(self._links(workers + 1)) as net:
            row = asyncio.run(
                swarm_ours.measure_corruption(
                    net, self._home(), workers, self._versions, self._patience()
                )
            )
            return [row]

    def shardcast(self, python: Path, tree: Tree) -> list[Row]:
        """The anchor."""
        deadline = 60 + 2 * tree.clients * self.ideal_s
        with star(self._links(tree.clients + tree.middles)) as net:
            row = asyncio.run(
                swarm_shardcast.measure(
                    net, self._home(), python, self._versions[1], tree, deadline
                )
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
    """A warm-up, an anchor of a random bf16 model, and a delta of 1 % of it moved by one step."""
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
    """Bytes of a chunk of a file of `size` bytes, by the publisher's rule."""
    return min(max(-(-size // CHUNKS), LEAST_CHUNK), MOST_CHUNK)


def run(bench: Bench, plan: Plan, python: Path | None, anchor: int) -> list[Row]:
    """All rows; each run is announced, because the slow ones take minutes."""
    rows: list[Row] = []
    for workers in plan.ours:
        rows += attempt(f"primerl, {workers} workers", partial(bench.ours, workers))
    if plan.victims:
        name = f"primerl, {plan.victims} workers and one that serves wrong bytes"
        rows += attempt(name, partial(bench.corruption, plan.victims))
    for clients, middles, small in plan.trees if python else ():
        shard = -(-anchor // SHARDS) if small else swarm_shardcast.SHARD_BYTES
        tree = Tree(clients, middles, shard)
        name = f"{tree.name}, {clients} clients"
        rows += attempt(name, partial(bench.shardcast, python or Path(), tree))
    return rows


def attempt(name: str, measure: Callable[[], list[Row]]) -> list[Row]:
    """The rows of one run; of one that failed a row that says so."""
    say(name)
    try:
        rows = measure()
    except Failed as failure:
        say(f"  failed: {failure}")
        return [{"system": name, "file": "", "workers": 0, "failed": str(failure)}]
    return told(rows)


def told(rows: list[Row]) -> list[Row]:
    """The same rows, said as progress."""
    for row in rows:
        say(f"  {row['file']}: last after {row['last_s']:.2f} s, egress {row['egress']:.2f} copies")
    return rows


def say(line: str) -> None:
    """Progress."""
    print(f".. {line}", file=sys.stderr, flush=True)


def find_shardcast(options: argparse.Namespace) -> Path | None:
    """Its Python; None if it shall not or cannot be measured."""
    if options.no_shardcast:
        return None
    try:
        return options.shardcast_python or swarm_shardcast.find_python(VENV)
    except Missing as missing:
        say(f"shardcast is left out: {missing}")
        return None


def make_plan(options: argparse.Namespace) -> Plan:
    """The full or the quick one, with other numbers of workers if so wished."""
    plan = QUICK if options.quick else FULL
    workers = options.workers or plan.ours
    most = max(workers)
    trees = tuple(tree for tree in plan.trees if tree[0] <= most)
    return Plan(tuple(workers), plan.victims, trees)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer workers, about a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
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
    """`1,4,16`."""
    return tuple(int(part) for part in text.split(","))


def scratch() -> Path:
    """Where files of a run go: in memory if possible; never below /tmp, which every node replaces."""
    shared = Path("/dev/shm")
    VENV.parent.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="swarm-", dir=shared if shared.is_dir() else VENV.parent))


def stop(number: int, frame: FrameType | None) -> None:
    """End as by an error, so that everything that was made is removed."""
    sys.exit(128 + number)


def main() -> int:
    """0: every goal met; 1: some missed, or a run failed; 2: nothing could be measured here."""
    signal.signal(signal.SIGTERM, stop)
    options = parse()
    folder = scratch()
    try:
        versions = make_versions(folder, int(options.model_mb * 1e6), options.chunk_kib * KIB)
        bench = Bench(options, folder, versions)
        say(", ".join(f"{v.name} {v.size / 1e6:.2f} MB" for v in versions))
        with star([Link(1, 1)]):
            pass  # where that fails nothing need be installed
        python = find_shardcast(options)
        rows = run(bench, make_plan(options), python, versions[1].size)
    except Unavailable as problem:
        print(f"nothing was measured: {problem}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    goals = judge(rows)
    show(rows, goals)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "goals": goals}, indent=2) + "\n")
    return 0 if all(goal["ok"] for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
