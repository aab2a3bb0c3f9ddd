"""The network of swarm.py: a star of rate-limited links between network namespaces.

The star is made as root and removed at the end. Nothing of it is in the machine's own network: the bridge has a
namespace too, and no namespace has a route out. Processes (children.py) are killed when their block ends.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil  # pyright: ignore[reportMissingModuleSource]

from primerl.scripts.bench.children import Child

PREFIX = "primerl-swarm-"
HUB = PREFIX + "hub"
SUBNET = "10.77.0"
BURST = "32kb"
QUEUE_MS = 50
"""Maximum time of a packet in a full link's queue before it is dropped, as in a home router."""
MAX_NODES = 200
START_S = 60.0


# -- links ----------------------------------------------------------------------------------------


class Unavailable(Exception):
    """This machine cannot provide limited links; the message names the missing part."""


@dataclass(frozen=True)
class Link:
    """Rates of one node's link, in Mbit/s; loss and latency of an emulated one (emulated_links.py)."""

    up: float
    down: float
    delay_ms: float = 0.0
    """Each way."""
    loss: float = 0.0
    """Share of the packets that are lost on a path; where both ends lose, the larger of the two."""


@dataclass(frozen=True)
class Traffic:
    """Bytes on the wire of one node, headers and retransmissions included."""

    sent: int
    received: int

    def since(self, before: "Traffic") -> "Traffic":
        """Return the bytes added since `before`."""
        return Traffic(self.sent - before.sent, self.received - before.received)


class Star:
    """A star network; node i has the address `address(i)`, in a separate namespace."""

    def __init__(self, size: int) -> None:
        self.size = size

    def address(self, index: int) -> str:
        """Return the IPv4 address of a node."""
        return f"{SUBNET}.{index + 1}"

    def inside(self, index: int) -> list[str]:
        """Return the command prefix that runs a command on this node, with its own mount namespace."""
        return ["ip", "netns", "exec", namespace(index)]

    def traffic(self) -> list[Traffic]:
        """Return the byte counters of every node."""
        shown = json.loads(_ip("-n", HUB, "-j", "-s", "link", "show", "type", "veth"))
        by_port = {port["ifname"]: port["stats64"] for port in shown}
        ports = [by_port[_port(index)] for index in range(self.size)]
        # bytes received by the bridge's port are those that the node has sent
        return [Traffic(port["rx"]["bytes"], port["tx"]["bytes"]) for port in ports]


@contextmanager
def star(links: Sequence[Link]) -> Generator[Star]:
    """Make a network of these nodes; leftovers of a killed run are removed first.

    Raises Unavailable: not root, no `ip` or `tc`, no such queue in this kernel, or another run is active.
    """
    with namespaces(len(links)):
        _make(links)
        yield Star(len(links))


@contextmanager
def namespaces(count: int) -> Generator[Callable[..., str]]:
    """Make the namespaces of so many nodes, without links; yield `ip`. Raises Unavailable."""
    _check_tools()
    if count > MAX_NODES:
        raise Unavailable(f"{count} nodes are more than the {MAX_NODES} of one network")
    with _alone():
        remove()
        try:
            for index in range(count):
                _ip("netns", "add", namespace(index))
            yield _ip
        finally:
            remove()


def remove() -> None:
    """Remove all namespaces of this benchmark, and the processes still running in them."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0] if line.strip() else ""
        if not name.startswith(PREFIX):
            continue
        for process in _ip("netns", "pids", name).split():
            _kill(int(process))
        _ip("netns", "delete", name)


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has just ended


def _make(links: Sequence[Link]) -> None:
    _ip("netns", "add", HUB)
    _ip("-n", HUB, "link", "add", "bridge", "type", "bridge")
    _ip("-n", HUB, "link", "set", "bridge", "up")
    for index, link in enumerate(links):
        name, port = namespace(index), _port(index)
        _ip("-n", HUB, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", HUB, "link", "set", port, "master", "bridge", "up")
        _ip("-n", name, "address", "add", f"{SUBNET}.{index + 1}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "eth0", "up")
        _limit(name, "eth0", link.up)
        _limit(HUB, port, link.down)


def _limit(namespace: str, device: str, mbit: float) -> None:
    """Limit traffic leaving through `device` with a token bucket."""
    _run(
        *("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"),
        *("rate", f"{int(mbit * 1e6)}bit", "burst", BURST, "latency", f"{QUEUE_MS}ms"),
    )


def namespace(index: int) -> str:
    """Return the name of a node's network namespace."""
    return f"{PREFIX}{index}"


def _port(index: int) -> str:
    return f"port{index}"


def _check_tools() -> None:
    if os.geteuid() != 0:
        raise Unavailable("limited links need root: run it with sudo")
    for tool in ("ip", "tc", "mount"):
        if shutil.which(tool) is None:
            raise Unavailable(f"limited links need `{tool}`: install iproute2 and mount")


@contextmanager
def _alone() -> Generator[None]:
    """Allow one run at a time: another would remove this run's namespaces."""
    with (Path(tempfile.gettempdir()) / "primerl-swarm.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unavailable("another run of this benchmark is on: wait for its end") from error
        yield


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


# -- processes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Version:
    """A file to distribute."""

    name: str
    file: Path
    chunk: int
    """Bytes of a chunk."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.file.stat().st_size


class Launcher:
    """Starts processes, the i-th one on node i."""

    def __init__(self, star: Star, folder: Path) -> None:
        self._star = star
        self._folder = folder
        self.started: list[Child] = []

    async def start(self, *command: str) -> Child:
        """Start `command` on the next node, in a separate folder."""
        index = len(self.started)
        home = self._folder / str(index)
        home.mkdir(parents=True)
        child = Child(f"node-{index}", self._folder / f"node-{index}.log")
        self.started.append(child)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        await child.start(*self._star.inside(index), *command, cwd=home, env=environment)
        return child


@asynccontextmanager
async def launcher(star: Star, folder: Path) -> AsyncGenerator[Launcher]:
    """Yield a launcher whose processes are killed when the block ends."""
    launched = Launcher(star, folder)
    try:
        yield launched
    finally:
        for child in launched.started:
            await child.end(0)


def busy_seconds() -> float:
    """Return the CPU seconds that all cores of this machine have worked since boot."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


class Meter:
    """Traffic on the links and load of the cores since construction."""

    def __init__(self, star: Star) -> None:
        self._star = star
        self._before = star.traffic()
        self._busy = busy_seconds()
        self._start = time.monotonic()

    def read(self, size: int, workers: Sequence[int]) -> dict[str, float]:
        """Return traffic in copies of a file of `size` bytes, and the load of the cores.

        Node 0's sent traffic, the workers' received traffic, and the share of time that cores were busy.
        """
        traffic = [
            now.since(before)
            for now, before in zip(self._star.traffic(), self._before, strict=True)
        ]
        received = [traffic[worker].received / size for worker in workers]
        cores = (os.cpu_count() or 1) * (time.monotonic() - self._start)
        return {
            "egress": traffic[0].sent / size,
            "received": sum(received) / len(received),
            "received_most": max(received),
            "busy": (busy_seconds() - self._busy) / cores,
        }
