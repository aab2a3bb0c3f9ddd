"""Real nodes in network namespaces, faults on them, and what each fault cost.

A trainer and two workers of the demo, each a process behind an emulated link, kept alive by the rules of a
service. A fault states its Limit: what it may take from the run. When it is over the nodes that it hit must
have work accepted again, and all of them are stopped for a moment, while promises.broken() reads their disks.
"""

import json
import os
import re
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil  # pyright: ignore[reportMissingModuleSource]
import pytest

from primerl.cli.service import RESUME
from primerl.scripts.bench import promises
from primerl.scripts.bench.emulated_links import EmulatedStar
from primerl.scripts.bench.promises import Witness
from primerl.scripts.bench.service_node import Node
from primerl.scripts.bench.swarm_links import SUBNET, Link

ROOT = Path(__file__).resolve().parents[2]
HOME = Link(up=20.0, down=100.0, delay_ms=5.0)
TRAINER, AMY, BEA, GUEST = "trainer", "amy", "bea", "guest"
WORKERS = (AMY, BEA)
NAMES = (TRAINER, AMY, BEA, GUEST)
SETTINGS = (
    *("--network.host", "0.0.0.0", "--max-steps", "100000", "--checkpoint.interval", "20"),
    *("--training.lr", "2e-5", "--training.scheduler", "constant", "--environment.args"),
    *('{"min_len": 5, "max_len": 10}', "--warmup.target", "0.15", "--evaluation.prompts", "0"),
)
"""The demo, which does not end, and does not learn so fast that groups have equal rewards."""
START_S = 240.0
RECOVERY_S = 400.0
"""Longest wait for a node: no measure, what it took is compared with a Limit."""
DISK_MB = {TRAINER: 768, AMY: 256, BEA: 256, GUEST: 256}
SETTLED = 10
"""Version from which on the workers are no newcomers."""
LOOK_S = 0.2
CORES = os.cpu_count() or 1
FILLING = 100
"""Tries to find a moment at which nothing is written."""
RESTART_S = 2.0
RECONNECT_S = 30.0
"""Longest time until nodes know that a connection is dead and have another: 12 s of silence, looked for every
3 s; 10 s for a try that begins before the line is whole; 4 s until the next."""
MOST_STALE = 2 * 3 * 128
"""Twice the rollouts that may be out, of max_off_policy_steps + 1 steps (LeadTime): they may become stale as a
fault begins, and as it ends."""
REFUSED = re.compile(r"lease (\d+) was refused")


@dataclass(frozen=True)
class Cost:
    """What a fault cost."""

    steps: int
    """Steps that are trained again."""
    ends: int
    """Ends of the trainer's process."""
    pause_s: float
    """Longest time without a new version, from the beginning of the fault until its end is overcome."""
    back_s: float
    """Seconds from the end of the fault until all nodes that it hit have new work accepted."""
    rollouts: int
    """Rollouts of honest workers that are rejected or become stale."""


@dataclass(frozen=True)
class Limit:
    """What a fault may cost.

    Starts, steps and audits are computing: their times are multiplied by the mean number of threads that share
    a core while the fault is played (Watch.crowd).
    """

    steps: int
    """Steps that are trained again for each end of the trainer."""
    stop_s: float
    """Part of the longest time without a new version that the fault itself takes, on any machine."""
    pause_s: float
    """The other part of it, for a thread that has a core to itself."""
    back_s: float
    """As in Cost, for threads that have a core each."""
    reconnects: bool = True
    """Whether connections may be lost, so that RECONNECT_S passes on any machine."""

    def exceeded(self, cost: Cost, crowd: float) -> list[str]:
        """Name what is above a limit."""
        wait_s = RECONNECT_S * self.reconnects
        most = Cost(
            self.steps * cost.ends,
            cost.ends,
            self.stop_s + wait_s + self.pause_s * crowd,
            wait_s + self.back_s * crowd,
            MOST_STALE,
        )
        allowed = asdict(most)
        return [
            f"{name} {value:.0f}, at most {allowed[name]:.0f}"
            for name, value in asdict(cost).items()
            if value > allowed[name]
        ]


class Watch:
    """Notes what nodes promise while they run: submissions that left a spool, the steps of the trainer."""

    def __init__(self, swarm: "RealSwarm") -> None:
        self._swarm = swarm
        self.spooled: dict[bytes, tuple[str, int]] = {}
        """(worker, lease) by the digest of a submission."""
        self.newest: int = -1
        self.step: int = 0
        self.again = 0
        """Steps that the trainer went back by."""
        self.longest_s = 0.0
        """Longest time without a new version since reset()."""
        self._since = time.monotonic()
        self._crowds: list[float] = []
        """Processes that share a core, from look to look."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(10.0)

    def reset(self) -> None:
        """Begin to measure a fault."""
        self.longest_s, self.again, self._since = 0.0, 0, time.monotonic()
        self._crowds.clear()

    @property
    def crowd(self) -> float:
        """Mean number of processes that shared a core since reset(), of all on the machine; 1 at least."""
        return fmean(self._crowds or [1.0])

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._crowds.append(max(1.0, runnable() / CORES))
            with suppress(sqlite3.Error):  # it is locked, or begins
                self._look()

    def _look(self) -> None:
        for name in WORKERS:
            for path in self._swarm.directory.glob(f"{name}/data/runs/*/ledger.db"):
                for digest, lease in rows(path, "SELECT digest, lease_id FROM spool"):
                    self.spooled[digest] = (name, lease)
        for (version,) in rows(self._swarm.ledger, "SELECT MAX(version) FROM heads"):
            if version is not None and version != self.newest:
                self.newest, self._since = version, time.monotonic()
        self.longest_s = max(self.longest_s, time.monotonic() - self._since)
        status = self._swarm.status(TRAINER) if TRAINER in self._swarm.nodes else {}
        if step := status.get("step", 0):
            self.again += max(0, self.step - step)
            self.step = step


def runnable() -> int:
    """Count the threads of the machine that compute or could."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])


def rows(path: Path, query: str) -> list[Any]:
    """Read from a ledger that is in use; nothing where it is not there yet."""
    if not path.exists():
        return []
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=2.0)) as db:
        return db.execute(query).fetchall()


class RealSwarm:
    """The nodes of a run, of which each index is a place in the network."""

    def __init__(self, directory: Path, network: EmulatedStar) -> None:
        self.directory, self.network = directory, network
        self.nodes: dict[str, Node] = {}
        self.begun: dict[str, int] = {}
        """Length of a node's log when it was started."""
        self._turn = self._moves = 0
        self.sound = False
        """Whether the next fault may be played on these nodes."""
        self._disks = ExitStack()
        (directory / "import").mkdir()
        (directory / "import" / "primerl").symlink_to(ROOT)
        for name in NAMES:
            self._disks.enter_context(small_disk(directory / name, DISK_MB[name]))
        self.watch = Watch(self)

    # -- nodes ---------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        """The trainer's run directory."""
        return self.directory / TRAINER / "demo"

    @property
    def ledger(self) -> Path:
        """The trainer's ledger."""
        return self.run_dir / "trainer" / "ledger.db"

    @property
    def ticket(self) -> Path:
        """The file of the run's ticket."""
        return self.run_dir / "ticket.txt"

    def data(self, name: str) -> Path:
        """The data directory of a worker."""
        return self.directory / name / "data"

    def choose(self, role: str) -> str:
        """Choose the node for the next fault: the workers in turn, as one that lost leases rests."""
        self._turn += role != TRAINER
        return TRAINER if role == TRAINER else WORKERS[self._turn % len(WORKERS)]

    def start(self) -> None:
        """Start all nodes and wait until both workers have proved themselves."""
        self.start_trainer()
        self.wait(self.ticket.exists, START_S, "a ticket")
        for name in WORKERS:
            self.start_worker(name)
        self.wait(lambda: min(self.judged().values()) > 0, START_S, "accepted work")
        self.wait(lambda: self.watch.newest >= SETTLED, START_S, f"version {SETTLED}")
        self.sound = True

    def start_trainer(self, **environment: str) -> None:
        """Start the trainer, or start it again."""
        output = ("--output-dir", str(self.directory / TRAINER))
        demo = str(ROOT / "configs" / "demo.toml")
        command = ("sh", "-c", RESUME, str(self.run_dir), *program())
        self._start(
            TRAINER, self.run_dir / "trainer", *command, "train", "@", demo, *SETTINGS, *output,
            **environment,
        )  # fmt: skip

    def start_worker(self, name: str, **environment: str) -> None:
        """Start a worker, or start it again; it waits for a trainer that has stopped."""
        where = ("--data-dir", str(self.data(name)), "--ticket", str(self.ticket), "--wait")
        self._start(name, self.data(name), *program(), "join", *where, **environment)

    def _start(self, name: str, data: Path, *command: str, **environment: str) -> None:
        known = {
            **os.environ,
            "PYTHONPATH": str(self.directory / "import"),
            "XDG_RUNTIME_DIR": str(self.directory),
            "HOME": str(self.directory / name),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        inside = self.network.inside(NAMES.index(name))
        node = Node(name, inside, data, self.directory / f"{name}.log", [*command], known)
        node.restart_s = RESTART_S
        if name in self.nodes:
            node.exits = self.nodes[name].exits
        self.nodes[name] = node
        self.begun[name] = len(node.log.read_text()) if node.log.exists() else 0
        node.start()

    def kill_alone(self, name: str) -> None:
        """Kill a node but not its children: they end by themselves, and its service starts it again."""
        node = self.nodes[name]
        children, count = node.children(), len(node.exits)
        node.kill_alone()
        self.wait(lambda: len(node.exits) > count and node.runs, 60.0, f"restart of {name}")
        self.wait(lambda: not any(map(lives, children)), 60.0, f"end of the children of {name}")

    def restart(self, name: str, **environment: str) -> None:
        """Stop a node in order and start it in another environment."""
        self.nodes[name].stop()
        if name == TRAINER:
            self.start_trainer(**environment)
        else:
            self.start_worker(name, **environment)

    def attack(self, name: str, keys: int) -> "subprocess.Popen[bytes]":
        """Start an attack of floods.py at the place of the guest; the caller kills it."""
        program = str(ROOT / "scripts" / "bench" / "floods.py")
        ticket = self.ticket.read_text().strip()
        options = ("--attack", name, "--keys", str(keys), "--ticket", ticket, "--host", "0.0.0.0")
        with (self.directory / f"{GUEST}.log").open("ab") as log:
            return subprocess.Popen(
                [*self.network.inside(NAMES.index(GUEST)), sys.executable, program, *options],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(self.directory / "import")},
            )

    def close(self) -> None:
        """End all nodes, and show nothing of them to the next test."""
        self.watch.close()
        for node in self.nodes.values():
            with suppress(Exception):
                node.send(signal.SIGCONT)
            node.again = False
        for node in self.nodes.values():
            if node.runs:
                node.send(signal.SIGKILL)
                node.stop(5.0)
        for index in range(len(NAMES)):
            self.network.place(index, self.network.address(index))
        self._disks.close()

    # -- what is known -------------------------------------------------------------------------

    def judged(self) -> dict[str, int]:
        """Return when the newest submission of each worker that was judged arrived, Unix seconds."""
        query = (
            "SELECT hex(inbox.node), MAX(received) FROM inbox JOIN verdicts USING (arrival)"
            " GROUP BY inbox.node"
        )
        newest: dict[str, int] = {}
        with suppress(sqlite3.Error):
            newest = dict(rows(self.ledger, query))
        return {name: newest.get(self.identity(name).upper(), 0) for name in WORKERS}

    def identity(self, name: str) -> str:
        """Return the id of a worker, hex; empty while it has none."""
        for path in self.data(name).glob("runs/*/ledger.db"):
            with suppress(sqlite3.Error):
                for (node,) in rows(path, "SELECT hex(value) FROM meta WHERE key = 'node'"):
                    return str(node).lower()
        return ""

    def status(self, name: str) -> dict[str, Any]:
        """Return `primerl-node status --json`; empty if the node does not answer."""
        return self.nodes[name].ask("status") or {}

    def rejected(self) -> Counter[str]:
        """Count the rollouts that the trainer rejected, by reason."""
        return Counter(self.status(TRAINER).get("rejected", {}))

    def words(self, name: str, since: float) -> list[str]:
        """Return the lines of a node's log since a time, Unix seconds."""
        logs = self.run_dir if name == TRAINER else self.data(name)
        return promises.words_since(logs / "logs", since)

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> float:
        """Wait for a condition; return the seconds that it took. Raises AssertionError."""
        began = time.monotonic()
        while not condition():
            waited = time.monotonic() - began
            assert waited < seconds, f"no {what} in {waited:.0f} s: {self.tails()}"
            time.sleep(LOOK_S)
        return time.monotonic() - began

    def tails(self) -> str:
        """Return the last lines of all nodes."""
        ends = (
            f"{name}: {' | '.join((self.directory / f'{name}.log').read_text().splitlines()[-4:])}"
            for name in self.nodes
        )
        return "\n".join(ends)

    # -- faults --------------------------------------------------------------------------------

    @contextmanager
    def fault(self, name: str, limit: Limit, *hit: str) -> Generator[None]:
        """Play a fault that hits these workers; then wait until it is overcome, and judge."""
        self.sound = False
        rejected, began, ends = self.rejected(), time.time(), len(self.nodes[TRAINER].exits)
        before = promises.marks(self.run_dir, [self.data(worker) for worker in WORKERS], began)
        self.watch.reset()
        yield
        back_s = self._recover(hit or WORKERS)
        lost = self.rejected() - rejected
        ends = len(self.nodes[TRAINER].exits) - ends
        cost = Cost(self.watch.again, ends, self.watch.longest_s, back_s, lost.total())
        crowd = self.watch.crowd
        faults = self.broken(before)
        print(f"\ncost: {json.dumps([name, asdict(limit), asdict(cost), crowd, lost])}")
        assert not faults, faults
        assert not (exceeded := limit.exceeded(cost, crowd)), exceeded
        self.sound = True

    def _recover(self, hit: Sequence[str]) -> float:
        over, version = time.time(), self.watch.newest

        def recovered() -> bool:
            judged = self.judged()
            return all(judged[worker] > over for worker in hit) and self.watch.newest > version

        return self.wait(recovered, RECOVERY_S, f"new work of {' and '.join(hit)}")

    def broken(self, before: promises.Marks) -> list[str]:
        """Stop all nodes, name the promises that they broke, and let them go on."""
        running = [node for node in self.nodes.values() if node.runs]
        for node in running:
            node.send(signal.SIGSTOP)
        try:
            data = [self.data(worker) for worker in WORKERS]
            return promises.broken(self.run_dir, data, self._witness(), before)
        finally:
            for node in running:
                node.send(signal.SIGCONT)

    def _witness(self) -> Witness:
        """Submissions that left a spool had a receipt, unless they were refused for good."""
        spooled: set[bytes] = set()
        refused: set[tuple[str, int]] = set()
        for name in WORKERS:
            for path in self.data(name).glob("runs/*/ledger.db"):
                spooled |= promises.read_ledger(path.parent).spool.keys()
            for line in self.words(name, 0.0):
                if match := REFUSED.search(line):
                    refused.add((name, int(match[1])))
        seen = self.watch.spooled.items()
        return Witness({digest for digest, by in seen if by not in refused} - spooled)

    def wait_work(self, *workers: str) -> None:
        """Wait until work that these workers submit from now on is accepted."""
        began = time.time()
        self.wait(
            lambda: all(self.judged()[worker] > began for worker in workers),
            RECOVERY_S,
            f"work of {' and '.join(workers)}",
        )

    def wait_running(self, name: str) -> None:
        """Wait until a node answers, whether its process is the same or was started again."""
        self.wait(lambda: bool(self.status(name)), RECOVERY_S, f"answer of {name}")

    def wait_log(self, name: str, words: str) -> None:
        """Wait until the present process of a node says something on stderr."""
        log = self.directory / f"{name}.log"
        began = self.begun[name]
        self.wait(
            lambda: words in log.read_text()[began:], RECOVERY_S, f"{words!r} in the log of {name}"
        )

    def process(self, name: str) -> psutil.Process:
        """The daemon of a node."""
        process = self.nodes[name].process
        assert process is not None
        return psutil.Process(process.pid)

    def move(self, name: str) -> None:
        """Give a node another address."""
        self._moves += 1
        self.network.place(NAMES.index(name), f"{SUBNET}.{len(NAMES) + self._moves}")

    def says(self, name: str) -> str:
        """Return what a node says that it waits for, or warns of."""
        status = self.status(name)
        return "; ".join(filter(None, [status.get("waiting_for", ""), *status.get("warnings", ())]))


def lives(process: psutil.Process) -> bool:
    """Whether a process is there, and has not only to be waited for."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def program() -> tuple[str, ...]:
    """The command of the product."""
    return (sys.executable, "-m", "primerl.cli.main")


@contextmanager
def small_disk(place: Path, megabytes: int) -> Generator[None]:
    """Mount a disk of that size in memory."""
    place.mkdir()
    size = f"size={megabytes}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)


def fill_disk(place: Path) -> None:
    """Make a small disk as large as what is on it: it is full, and nothing has to be written."""
    for _ in range(FILLING):
        status = os.statvfs(place)
        used = (status.f_blocks - status.f_bfree) * status.f_frsize // 1024
        if resize_disk(place, used):
            return
    raise AssertionError(f"{place} is written to without a pause")


def resize_disk(place: Path, kilobytes: int) -> bool:
    """Change the size of a small disk; False where more is on it."""
    size = f"remount,size={kilobytes}k"
    done = subprocess.run(["mount", "-o", size, str(place)], check=False, capture_output=True)
    return done.returncode == 0


def clock_environment(file: Path) -> Mapping[str, str]:
    """Return the variables by which a process has a clock of its own, as far ahead as `file` says ("+600s").

    Skips the test without libfaketime. Deadlines within a process are by its monotonic clock, which is right.
    """
    libraries = [*Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")]
    if not libraries:
        pytest.skip("libfaketime is not installed: apt-get install libfaketime")
    return {
        "LD_PRELOAD": str(libraries[0]),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
    }


SMALL_MEMORY = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
static struct { long process, least, refused; } *limit;
static __attribute__((constructor)) void begin(void) {
    const char *path = getenv("SMALL_MEMORY");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *place = file < 0 ? MAP_FAILED : mmap(0, sizeof *limit, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (place != MAP_FAILED) limit = place;
}
static int refused(size_t size) {
    if (!limit || size < (size_t)limit->least || limit->process != getpid()) return 0;
    __atomic_add_fetch(&limit->refused, 1, __ATOMIC_RELAXED);
    errno = ENOMEM;
    return 1;
}
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
void *malloc(size_t size) { return refused(size) ? 0 : __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return refused(count * size) ? 0 : __libc_calloc(count, size); }
void *realloc(void *old, size_t size) {
    return size > malloc_usable_size(old) && refused(size) ? 0 : __libc_realloc(old, size);
}
void *memalign(size_t by, size_t size) { return refused(size) ? 0 : __libc_memalign(by, size); }
void *aligned_alloc(size_t by, size_t size) { return memalign(by, size); }
int posix_memalign(void **place, size_t by, size_t size) {
    void *made = memalign(by, size);
    if (made) *place = made;
    return made ? 0 : ENOMEM;
}
void *mmap(void *at, size_t size, int may, int how, int file, off_t offset) {
    if (how & MAP_ANONYMOUS && refused(size)) return MAP_FAILED;
    return (void *)syscall(SYS_mmap, at, size, may, how, file, offset);
}
void *mmap64(void *at, size_t size, int may, int how, int file, off_t offset) {
    return mmap(at, size, may, how, file, offset);
}
"""


class SmallMemory:
    """Makes the C library refuse a process each piece of memory of LEAST bytes or more, and counts these."""

    FIELDS = struct.Struct("=qqq")
    LEAST = 1 << 16

    def __init__(self, directory: Path) -> None:
        """Skips the test without a C compiler."""
        self._file = directory / "memory"
        self._file.write_bytes(self.FIELDS.pack(0, self.LEAST, 0))
        library = built(directory / "memory.so", SMALL_MEMORY)
        self.environment = {"LD_PRELOAD": str(library), "SMALL_MEMORY": str(self._file)}
        """With which a process has to be started."""

    @contextmanager
    def limited(self, process: psutil.Process) -> Generator[None]:
        """Refuse while the block lasts."""
        self._write(process.pid)
        try:
            yield
        finally:
            self._write(0)

    @property
    def refused(self) -> int:
        """How often memory was refused."""
        return self.FIELDS.unpack(self._file.read_bytes())[2]

    def _write(self, process: int) -> None:
        with self._file.open("r+b") as file:  # in place: it is mapped
            file.write(struct.pack("=q", process))


SLOW_DISK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>
static int on_disk(int file) {
    struct stat status;
    return fstat(file, &status) == 0 && S_ISREG(status.st_mode);
}
#define SLOW(type, name, parameters, arguments, ms)                     \
    type name parameters {                                              \
        static type(*real) parameters;                                  \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name);  \
        if (on_disk(file)) usleep(1000 * ms);                           \
        return real arguments;                                          \
    }
SLOW(ssize_t, write, (int file, const void *data, size_t size), (file, data, size), 2)
SLOW(ssize_t, pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at), 2)
SLOW(int, fsync, (int file), (file), 100)
SLOW(int, fdatasync, (int file), (file), 100)
"""


def slow_disk(directory: Path) -> Mapping[str, str]:
    """Return the variables by which a process waits 2 ms for each write to a file, 100 ms for each flush.

    Skips the test without a C compiler.
    """
    return {"LD_PRELOAD": str(built(directory / "slow.so", SLOW_DISK))}


def built(library: Path, source: str) -> Path:
    """Compile a library from C. Skips the test without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler makes the library of this fault: apt-get install gcc")
    code = library.with_suffix(".c")
    code.write_text(source)
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(code), "-ldl"]
    subprocess.run(command, check=True)
    return library
