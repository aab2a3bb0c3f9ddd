"""Play a week of a run in half an hour: real nodes at home links, kept alive by a service's rules alone.

    sudo .venv/bin/python scripts/bench/soak.py [--quick] [--before COMMIT] [--minutes 30] [--logs DIR]
        [--json FILE]

A trainer, three workers, a guest and a cheat learn to reverse text, each in a network namespace behind a link
of 100 Mbit/s down and 20 up. Nobody touches a node but the events of the week: killed, stopped and started
again, upgraded from COMMIT (without it, that is left out), a ticket that expires, a machine that sleeps, a disk
that is full and freed, an address that changes, a partition, a key that is copied. A node that ends is started
again, or not, as the unit of `primerl-node service` says. An event is over when the nodes that it hit have work
accepted again; it costs the seconds until then. At the end nothing may be lost: versions without a gap, a
verdict for every receipt, no honest node banned, the cheat banned, memory and file descriptors flat.

--quick plays the same events without the quiet hours between them. Needs root, iproute2, 3 GB of memory.
"""

import argparse
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from primerl.cli.service import RESUME
from primerl.node.storage.run_files import METRICS
from primerl.protocol.version import CLOCK_SKEW_S
from primerl.scripts.bench import promises
from primerl.scripts.bench.report import Goal, at_least, at_most, conclude, make_parser
from primerl.scripts.bench.service_node import Node
from primerl.scripts.bench.swarm_links import Link, Star, Unavailable, star

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
HOME = Link(up=20.0, down=100.0)
TRAINER, WORKERS, GUEST, CHEAT, COPY = "trainer", ("amy", "bea", "carl"), "guest", "cheat", "copy"
NAMES = (TRAINER, *WORKERS, GUEST, CHEAT, COPY)
HONEST = (*WORKERS, GUEST)
RECOVERY_S = 120.0
"""Longest time from the end of an event to work that is accepted again."""
READY_S = 300.0
SLEEP_S = 45.0
PARTITION_S = 45.0
TICKET_S = 30
WARM_S = 120.0
"""Age from which a node's memory is flat: before, it fills its caches."""
QUEUED = 32
"""Submissions that may wait for their verdict when the trainer is stopped: the next start judges them."""
UNJUDGED = (
    "SELECT COUNT(*) FROM inbox WHERE arrival >= (SELECT MIN(arrival) FROM verdicts WHERE clean)"
    " AND arrival NOT IN (SELECT arrival FROM verdicts WHERE arrival IS NOT NULL)"
)
"""Verdicts without fault are deleted in the order of arrivals, once every checkpoint contains their work."""
DISK_MB = 256
"""Size of the disk that becomes full."""
STEPS = 100_000
SETTINGS = (
    *("--network.host", "0.0.0.0", "--max-steps", str(STEPS), "--checkpoint.interval", "20"),
    *("--training.lr", "2e-5", "--training.scheduler", "constant", "--environment.args"),
    *('{"min_len": 5, "max_len": 10}', "--warmup.target", "0.15"),
)


# -- the week --------------------------------------------------------------------------------------


@dataclass
class Row:
    """An event and what it cost."""

    day: str
    name: str
    recovery_s: float
    """Seconds from its end until all nodes that it hit have work accepted; negative: they had not in time."""
    steps: int
    """Steps that the run made from its beginning until then."""


class Week:
    """The nodes of the run, and the events."""

    def __init__(self, directory: Path, network: Star, before: Path | None) -> None:
        self.directory, self.network = directory, network
        now = unpack("", directory)
        self.code = {"now": now, "before": before or now}
        self.upgrades = before is not None
        self.rows: list[Row] = []
        self.sizes: list[dict[str, tuple[int, float, int]]] = []
        """Of each day's end, by node."""
        self.refusals: list[str] = []
        self.nodes: dict[str, Node] = {}
        self.day = DAYS[0]
        self._ids: dict[str, str] = {}

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"{time.strftime('%H:%M:%S')} {self.day:9} {text}", flush=True)

    # nodes

    def make(self, name: str, code: str, *arguments: str) -> Node:
        """Make a node of this release of the code."""
        home = self.directory / name
        home.mkdir(exist_ok=True)
        folder = self.code[code]
        environment = {
            **os.environ,
            "PYTHONPATH": str(_importable(folder, self.directory)),
            "XDG_RUNTIME_DIR": str(self.directory),
            "HOME": str(home),
            "OMP_NUM_THREADS": "1",
        }
        program = (sys.executable, "-m", "primerl.cli.main")
        if name == CHEAT:
            program = (sys.executable, str(HERE / "cheat_node.py"))
        elif name == TRAINER:
            program = ("sh", "-c", RESUME, str(home / "demo"), *program)
        inside = self.network.inside(NAMES.index(name))
        directory = home / "demo" / "trainer" if name == TRAINER else home / "data"
        log = self.directory / f"{name}.log"
        node = Node(name, inside, directory, log, [*program, *arguments], environment)
        if name in self.nodes:
            node.exits = self.nodes[name].exits
        self.nodes[name] = node
        return node

    def start_trainer(self, code: str) -> None:
        """Start the trainer, or start it again with other code."""
        output = ("--output-dir", str(self.directory / TRAINER))
        demo = str(self.code[code] / "configs" / "demo.toml")
        self.make(TRAINER, code, "train", "@", demo, *SETTINGS, *output).start()

    def start_worker(
        self, name: str, code: str, ticket: Path | None = None, data: str = "data"
    ) -> None:
        """Start a worker, or start it again with other code, in the folder `data` of its own."""
        folder = self.directory / name / data
        ticket = ticket or self.directory / TRAINER / "demo" / "ticket.txt"
        if name == CHEAT:
            settings = {
                "data_dir": str(folder),
                "engine": {"type": "hf", "device": "cpu"},
                "fsync": False,
                "wait": True,
            }
            arguments = ["--settings", json.dumps(settings)]
        else:
            arguments = ["join", "--data-dir", str(folder), "--wait"]
        self.make(name, code, *arguments, "--ticket", str(ticket)).start()

    # what is known

    @property
    def step(self) -> int:
        """The trainer's step; -1 if it does not answer."""
        status = self.nodes[TRAINER].ask("status")
        return -1 if status is None else int(status["step"])

    def verdicts(self) -> dict[str, int]:
        """Return the number of the newest verdict on each honest worker in the trainer's ledger."""
        ids = {name: identity for name in HONEST if (identity := self.identity(name))}
        with suppress(sqlite3.Error), self._ledger() as ledger:
            counts = dict(ledger.execute("SELECT hex(node), MAX(id) FROM verdicts GROUP BY node"))
            return {name: counts.get(identity.upper(), 0) for name, identity in ids.items()}
        return {}

    def identity(self, name: str) -> str:
        """Return a node's id, hex; empty while it has none."""
        status = self.nodes[name].ask("status") if name in self.nodes else None
        if status is not None:
            self._ids[name] = status["id"]
        return self._ids.get(name, "")

    @contextmanager
    def _ledger(self) -> Generator[sqlite3.Connection]:
        path = self.directory / TRAINER / "demo" / "trainer" / "ledger.db"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10.0)) as ledger:
            yield ledger

    def wait(self, condition: Callable[[], bool], seconds: float) -> float:
        """Wait for a condition; return the seconds that it took, negative if it did not come."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                return -1.0
            time.sleep(0.5)
        return time.monotonic() - began

    def recover(self, name: str, hit: Sequence[str], began: int) -> None:
        """Wait until these workers have verdicts that they did not have, and add the event's row."""
        before, step = self.verdicts(), self.step
        self.say(f"{name}: over")

        def recovered() -> bool:
            now = self.verdicts()
            working = all(now.get(worker, 0) > before.get(worker, 0) for worker in hit)
            return working and self.step > max(step, 0)

        seconds = self.wait(recovered, RECOVERY_S)
        self.rows.append(Row(self.day, name, seconds, self.step - began))
        self.say(
            f"{name}: " + (f"work again after {seconds:.0f} s" if seconds >= 0 else "NOT RECOVERED")
        )

    @contextmanager
    def event(self, name: str, *hit: str) -> Generator[None]:
        """Play an event that hits these workers, and wait until they have recovered."""
        began = self.step
        self.say(f"{name}: begins at step {began}")
        yield
        self.recover(name, hit, began)

    # events, in the order of the week

    def monday(self) -> None:
        """All join; a worker is killed, another goes for the night and comes back."""
        code = "before" if self.upgrades else "now"
        began = time.monotonic()
        self.start_trainer(code)
        ticket = self.directory / TRAINER / "demo" / "ticket.txt"
        if self.wait(ticket.exists, READY_S) < 0:
            raise SystemExit(f"the trainer does not start: see {self.directory}/trainer.log")
        for name in WORKERS:
            self.start_worker(name, code)
        self.start_worker(CHEAT, "now")
        if (
            self.wait(
                lambda: len(self.verdicts()) >= 3 and min(self.verdicts().values()) > 0, READY_S
            )
            < 0
        ):
            raise SystemExit(f"no work is accepted: see {self.directory}/*.log")
        self.rows.append(
            Row(self.day, "three workers and a cheat join", time.monotonic() - began, self.step)
        )
        with self.event("a worker is killed", "amy"):
            self.nodes["amy"].send(signal.SIGKILL)
            self.wait(lambda: self.nodes["amy"].exits[-1:] != [] and self.nodes["amy"].runs, 60.0)
        with self.event("a worker leaves, and comes back", "bea"):
            self.nodes["bea"].stop()
            time.sleep(15.0)
            self.start_worker("bea", code)

    def tuesday(self) -> None:
        """The trainer is killed, and is stopped in order."""
        code = "before" if self.upgrades else "now"
        with self.event("the trainer is killed", *WORKERS):
            count = len(self.nodes[TRAINER].exits)
            self.nodes[TRAINER].send(signal.SIGKILL)
            self.wait(lambda: len(self.nodes[TRAINER].exits) > count and self.step >= 0, READY_S)
        with self.event("the trainer is stopped and started", *WORKERS):
            self.nodes[TRAINER].stop(120.0)
            self.start_trainer(code)
            self.wait(lambda: self.step >= 0, READY_S)

    def wednesday(self) -> None:
        """Everything is upgraded, the trainer first."""
        if not self.upgrades:
            self.say("no upgrade: say --before COMMIT")
            return
        with self.event("the trainer is upgraded", *WORKERS):
            self.nodes[TRAINER].stop(120.0)
            self.start_trainer("now")
            self.wait(lambda: self.step >= 0, READY_S)
        for name in WORKERS:
            with self.event(f"{name} is upgraded", name):
                self.nodes[name].stop()
                self.start_worker(name, "now")

    def thursday(self) -> None:
        """A guest joins by a ticket that expires; whom it admitted stays, a newcomer is refused."""
        ticket = self.directory / "guest.ticket"
        ticket.write_text(self._command("ticket", "--expires", f"{TICKET_S}s", "--label", "guest"))
        expired = time.monotonic() + TICKET_S
        with self.event("a guest joins by a ticket of half a minute", GUEST):
            self.start_worker(GUEST, "now", ticket)
        time.sleep(max(0.0, expired + CLOCK_SKEW_S + 2.0 - time.monotonic()))
        with self.event("the ticket has expired, and the guest is killed", GUEST):
            self.nodes[GUEST].send(signal.SIGKILL)
            self.wait(lambda: self.nodes[GUEST].runs and self.nodes[GUEST].exits != [], 60.0)
        self.start_worker(COPY, "now", ticket)
        self.wait(lambda: not self.nodes[COPY].runs, 60.0)
        self.refusals.append(f"newcomer with an expired ticket: exit {self._last_exit(COPY)}")

    def friday(self) -> None:
        """A worker's machine sleeps, then the trainer's; a worker's disk is full, and freed."""
        with self.event(f"a worker's machine sleeps for {SLEEP_S:.0f} s", "amy"):
            self.nodes["amy"].send(signal.SIGSTOP)
            time.sleep(SLEEP_S)
            self.nodes["amy"].send(signal.SIGCONT)
        with self.event(f"the trainer's machine sleeps for {SLEEP_S:.0f} s", *WORKERS):
            self.nodes[TRAINER].send(signal.SIGSTOP)
            time.sleep(SLEEP_S)
            self.nodes[TRAINER].send(signal.SIGCONT)
        self._fill("carl", "carl")
        self._fill(TRAINER, *WORKERS)

    def _fill(self, name: str, *hit: str) -> None:
        filler = self.directory / name / "filler"
        with self.event(f"the disk of {name} is full, and freed", *hit):
            with filler.open("wb") as file, suppress(OSError):
                while True:
                    file.write(bytes(1 << 20))
                    file.flush()
            time.sleep(SLEEP_S)
            filler.unlink()

    def saturday(self) -> None:
        """A worker's address changes; two workers are cut off."""
        with self.event("a worker's address changes", "bea"):
            old = self.network.address(NAMES.index("bea"))
            self._ip("bea", "address", "del", f"{old}/24", "dev", "eth0")
            time.sleep(5.0)
            self._ip("bea", "address", "add", "10.77.0.150/24", "dev", "eth0")
        with self.event(f"two workers are cut off for {PARTITION_S:.0f} s", "amy", "carl"):
            for name in ("amy", "carl"):
                self._ip(name, "link", "set", "eth0", "down")
            time.sleep(PARTITION_S)
            for name in ("amy", "carl"):
                self._ip(name, "link", "set", "eth0", "up")
        with self.event(f"the trainer is cut off for {PARTITION_S:.0f} s", *WORKERS):
            self._ip(TRAINER, "link", "set", "eth0", "down")
            time.sleep(PARTITION_S)
            self._ip(TRAINER, "link", "set", "eth0", "up")

    def sunday(self) -> None:
        """A second machine runs with a copy of a worker's directory; then it goes."""
        self.nodes[COPY].stop()
        shutil.copytree(
            self.directory / "amy" / "data",
            self.directory / COPY / "copied",
            ignore=shutil.ignore_patterns("*.sock", "chunks"),
        )
        with self.event("a copy of a worker's directory runs elsewhere", "amy"):
            self.start_worker(COPY, "now", data="copied")
            self.wait(lambda: not self.nodes[COPY].runs, 30.0)
        shown = f"exit {self._last_exit(COPY)}" if not self.nodes[COPY].runs else "it runs, refused"
        self.refusals.append(f"copied key: {shown}")
        with self.event("the copy is gone", "amy"):
            self.nodes[COPY].stop()

    def _last_exit(self, name: str) -> str:
        exits = self.nodes[name].exits
        return str(exits[-1].code) if exits else "none"

    def _ip(self, name: str, *arguments: str) -> None:
        inside = self.network.inside(NAMES.index(name))
        subprocess.run([*inside, "ip", *arguments], check=True)

    def _command(self, *arguments: str) -> str:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "primerl.cli.main",
                *arguments,
                "-d",
                str(self.nodes[TRAINER].directory),
            ],
            capture_output=True,
            text=True,
            check=True,
            env=self.nodes[TRAINER].environment,
        )
        return done.stdout

    def play(self, minutes: float, *, quick: bool) -> None:
        """Play all days, each as long as the others."""
        began = time.monotonic()
        for number, day in enumerate(DAYS):
            self.day = day
            getattr(self, day.lower())()
            if not quick:
                end = began + minutes * 60.0 * (number + 1) / len(DAYS)
                self.wait(lambda end=end: time.monotonic() > end, 3600.0)
            now = time.time()
            old = [
                name
                for name in (TRAINER, *HONEST)
                if name in self.nodes
                and self.nodes[name].runs
                and now - self.nodes[name].started >= WARM_S
            ]
            self.sizes.append({name: self.nodes[name].size() for name in old})

    # the end

    def judge(self) -> tuple[dict[str, float], list[Goal]]:
        """Stop all nodes in order, and look at what they left."""
        peers = {row["id"]: row for row in self.nodes[TRAINER].ask("peers") or ()}
        cheat = peers.get(self._cheat_id(peers), {})
        banned = [
            name for name in HONEST if (peers.get(self._ids.get(name, "")) or {}).get("refused")
        ]
        rejected: dict[str, int] = {}
        for name in HONEST:
            for reason, count in (
                (peers.get(self._ids.get(name, "")) or {}).get("reasons", {}).items()
            ):
                rejected[reason] = rejected.get(reason, 0) + count
        status = self.nodes[TRAINER].ask("status") or {}
        steps = self.step
        for node in (
            *(self.nodes[name] for name in self.nodes if name != TRAINER),
            self.nodes[TRAINER],
        ):
            node.stop(120.0)
        run_dir = self.directory / TRAINER / "demo"
        data = [self.directory / name / "data" for name in HONEST]
        faults = promises.broken(run_dir, data)
        with self._ledger() as ledger:
            (waiting,) = ledger.execute(UNJUDGED).fetchone()
        trained = promises.steps_logged(run_dir)
        lines = [json.loads(line) for line in (run_dir / METRICS).read_text().splitlines()]
        odd = [
            f"{name}: {done.code}"
            for name, node in self.nodes.items()
            for done in node.exits
            if not done.meant and name != COPY
        ]
        recoveries = [row.recovery_s for row in self.rows[1:]]
        late = [row.name for row in self.rows if row.recovery_s < 0]
        grown = self.growth()
        figures: dict[str, float] = {
            "steps": steps,
            "accepted rollouts": status.get("accepted", 0),
            "reward, first 20 steps": _mean(lines[:20]),
            "reward, last 20 steps": _mean(lines[-20:]),
            "events": len(self.rows),
            "slowest recovery, s": max(recoveries, default=0.0),
            **{f"{name}, memory at the end, MB": size[1] for name, size in self.sizes[-1].items()},
            **{f"{name}, growth of its memory, %": memory for name, (memory, _) in grown.items()},
            **{
                f"rejected of honest, {reason}": count for reason, count in sorted(rejected.items())
            },
        }
        for text in (*self.refusals, *(f"ended by itself: {line}" for line in odd), *faults):
            print(text)
        goals = [
            at_most("events after which not all work again", len(late), 0),
            at_most("slowest recovery", max(recoveries, default=0.0), RECOVERY_S, "s"),
            at_most("honest nodes banned or refused at the end", len(banned), 0),
            at_least("cheat is refused", float(bool(cheat.get("refused"))), 1),
            at_most("submissions with a receipt that wait for a verdict", waiting, QUEUED),
            at_most("promises that were broken", len(faults), 0),
            at_most("steps missing or double in metrics.jsonl", _gaps(trained), 0),
            at_most(
                "growth of memory",
                max((memory for memory, _ in grown.values()), default=0.0),
                3.0,
                "%",
            ),
            at_most("more open files", max((files for _, files in grown.values()), default=0), 8),
        ]
        return figures, goals

    def _cheat_id(self, peers: Mapping[str, Any]) -> str:
        known = set(self._ids.values())
        others = [
            row for row in peers.values() if row["id"] not in known and row["role"] == "inference"
        ]
        return max(others, key=lambda row: row["rejected"], default={"id": ""})["id"]

    def growth(self) -> dict[str, tuple[float, int]]:
        """Return for each node that still runs (growth of its memory in %, more open files), since the end of
        the first day on which its present process was WARM_S old, if that was not the last."""
        grown: dict[str, tuple[float, int]] = {}
        for name, (pid, memory, files) in self.sizes[-1].items():
            same = [day[name] for day in self.sizes[:-1] if name in day and day[name][0] == pid]
            if same:
                grown[name] = 100.0 * (memory / same[0][1] - 1), files - same[0][2]
        return grown


def _mean(lines: Sequence[Mapping[str, Any]]) -> float:
    rewards = [line["reward/mean"] for line in lines if line.get("reward/mean") is not None]
    return sum(rewards) / max(1, len(rewards))


def _gaps(numbers: Sequence[int]) -> int:
    """Count the neighbours that do not follow each other."""
    return sum(second != first + 1 for first, second in pairwise(numbers))


def _importable(folder: Path, directory: Path) -> Path:
    """Return a folder from which `primerl` is imported as `folder`."""
    place = directory / f"import-{folder.name}"
    place.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (place / "primerl").symlink_to(folder)
    return place


@contextmanager
def small_disks(directory: Path) -> Generator[None]:
    """Give the trainer and one worker a disk of their own, which fits into memory."""
    places = [directory / TRAINER, directory / "carl"]
    mounted: list[Path] = []
    try:
        for place in places:
            place.mkdir(parents=True)
            size = f"size={DISK_MB * (4 if place.name == TRAINER else 1)}m"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(place)], check=True)
            mounted.append(place)
        yield
    finally:
        for place in mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=False)


def unpack(commit: str, directory: Path) -> Path:
    """Copy the code of a commit, or that of the working tree, which may change during the week."""
    folder = directory / f"release-{commit or 'now'}"
    folder.mkdir()
    git = ["git", "-C", str(ROOT)]
    if commit:
        made = [*git, "archive", commit]
    else:
        names = subprocess.run([*git, "ls-files", "-z"], capture_output=True, check=True).stdout
        files = [name for name in names.decode().split("\0") if name and (ROOT / name).exists()]
        made = ["tar", "-c", "-C", str(ROOT), *files]
    archive = subprocess.run(made, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def main() -> int:
    """Play the week, print what it cost, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "no quiet hours between the events")
    parser.add_argument("--before", default="", metavar="COMMIT", help="release to upgrade from")
    parser.add_argument("--minutes", type=float, default=30.0, help="length of the week")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the nodes' logs there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        directory = Path(name)
        try:
            with star([HOME] * len(NAMES)) as network, small_disks(directory):
                before = unpack(options.before, directory) if options.before else None
                week = Week(directory, network, before)
                try:
                    week.play(options.minutes, quick=options.quick)
                    figures, goals = week.judge()
                finally:
                    for node in week.nodes.values():
                        node.stop(5.0)
                    _keep_logs(directory, options)
        except Unavailable as error:
            print(error, file=sys.stderr)
            return 2
    for row in week.rows:
        print(f"{row.day:9} {row.name:50} {row.recovery_s:6.0f} s {row.steps:5} steps")
    rows = [msgspec.to_builtins(row) for row in week.rows]
    for key, value in figures.items():
        print(f"{key:52} {value:14.6g}")
    return conclude(rows, goals, options.json, figures=figures)


def _end(number: int, frame: object) -> None:
    """Leave as ctrl-C does: nodes, namespaces and disks are removed."""
    raise KeyboardInterrupt


def _keep_logs(directory: Path, options: argparse.Namespace) -> None:
    if options.logs is None:
        return
    options.logs.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("*.log"):
        shutil.copy(path, options.logs)
    for path in directory.glob("*/*/logs/*.jsonl"):
        shutil.copy(path, options.logs / f"{path.parents[2].name}-{path.name}")
    for path in directory.glob("trainer/demo/*.jsonl"):
        shutil.copy(path, options.logs)


if __name__ == "__main__":
    sys.exit(main())
