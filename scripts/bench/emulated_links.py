"""Links with loss, latency and a rate between network namespaces, carried by a process.

netem does the same in the kernel, where it is built; this needs /dev/net/tun alone. Each node has an interface
whose packets the process reads, drops, delays and hands on: 20,000 a second at most, for tests, not for speed.
It runs before all that computes: a packet that waits for a core is late for no reason of the test.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from primerl.scripts.bench.swarm_links import SUBNET, Link, Star, Unavailable, namespace, namespaces

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 1500
QUEUE_S = 0.25
"""Longest time of a packet in a full queue before it is dropped, as in a home router."""


@dataclass
class Wire:
    """The link of one node. Rates and latencies are each way."""

    link: Link
    file: int
    """Descriptor of its interface."""
    busy_until: dict[str, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})
    """Monotonic seconds."""

    def queue(self, way: str, mbit: float, size: int, now: float) -> float | None:
        """Return when a packet of `size` bytes has passed, in order; None: the queue is full."""
        begins = max(now, self.busy_until[way])
        if begins - now > QUEUE_S:
            return None
        self.busy_until[way] = begins + size * 8 / (mbit * 1e6)
        return self.busy_until[way]


class Emulator:
    """Carries the packets of a star network; node i begins with the address `Star.address(i)`."""

    def __init__(self, files: Sequence[int], seed: int) -> None:
        self._wires = [Wire(Link(1.0, 1.0), file) for file in files]
        self._addresses = [Star(len(files)).address(index) for index in range(len(files))]
        self._cut: set[tuple[int, int]] = set()
        self._late: list[tuple[float, int, int, bytes]] = []
        """(due, number, target, packet)."""
        self._count = 0
        self._chance = random.Random(seed)
        self._order = b""
        """The beginning of a line."""

    def run(self, orders: int) -> None:
        """Carry packets until `orders` end: a descriptor with a JSON document on each line."""
        with selectors.DefaultSelector() as ready:
            ready.register(orders, selectors.EVENT_READ, -1)
            for index, wire in enumerate(self._wires):
                ready.register(wire.file, selectors.EVENT_READ, index)
            while True:
                wait = self._late[0][0] - time.monotonic() if self._late else None
                for key, _ in ready.select(wait and max(0.0, wait)):
                    if key.data >= 0:
                        self._read(key.data)
                    elif not self._obey(os.read(orders, 1 << 16)):
                        return
                self._deliver(time.monotonic())

    def _obey(self, received: bytes) -> bool:
        """Obey what has been received; False at the end of all."""
        *lines, self._order = (self._order + received).split(b"\n")
        for line in lines:
            match json.loads(line):
                case ["link", int(index), dict(link)]:
                    self._wires[index].link = Link(**link)
                case ["cut", int(source), int(target)]:
                    self._cut.add((source, target))
                case ["place", int(index), str(address)]:
                    self._addresses[index] = address
                case _:
                    self._cut.clear()
        return bool(received)

    def _read(self, source: int) -> None:
        for _ in range(64):  # then others
            try:
                packet = os.read(self._wires[source].file, MTU + 100)
            except BlockingIOError:
                return
            self._carry(source, packet, time.monotonic())

    def _carry(self, source: int, packet: bytes, now: float) -> None:
        if packet[0] >> 4 != 4:
            return  # IPv6 has no address here but those of the link
        sender, receiver = (".".join(map(str, packet[at : at + 4])) for at in (12, 16))
        if sender != self._addresses[source]:
            return  # a kernel that forwards sends back what comes for the address that its node had before
        if receiver in self._addresses:
            return self._send(source, self._addresses.index(receiver), packet, now)
        if packet[16] >= 224:  # multicast, and to all
            for target in range(len(self._wires)):
                if target != source:
                    self._send(source, target, packet, now)

    def _send(self, source: int, target: int, packet: bytes, now: float) -> None:
        up, down = self._wires[source], self._wires[target]
        lost = self._chance.random() < max(up.link.loss, down.link.loss)
        sent = up.queue("up", up.link.up, len(packet), now)
        if lost or sent is None or (source, target) in self._cut:
            return
        arrives = sent + (up.link.delay_ms + down.link.delay_ms) / 1e3
        due = down.queue("down", down.link.down, len(packet), arrives)
        if due is not None:
            self._count += 1
            heapq.heappush(self._late, (due, self._count, target, packet))

    def _deliver(self, now: float) -> None:
        while self._late and self._late[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._late)
            try:
                os.write(self._wires[target].file, packet)
            except OSError:
                pass  # its interface is down, or full: the packet is lost


class EmulatedStar(Star):
    """A star network whose links change while it works, carried by an Emulator in a process of its own."""

    def __init__(self, links: Sequence[Link], files: Sequence[int], seed: int) -> None:
        super().__init__(len(links))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(seed), *map(str, files)],
            stdin=subprocess.PIPE,
            pass_fds=files,
            text=True,
        )
        for index, link in enumerate(links):
            self.set_link(index, link)

    def set_link(self, index: int, link: Link) -> None:
        """Change the link of a node."""
        self._order("link", index, asdict(link))

    def cut(self, source: int, target: int) -> None:
        """Drop what `source` sends to `target` from now on, silently."""
        self._order("cut", source, target)

    def isolate(self, index: int) -> None:
        """Drop all that a node sends and is sent."""
        for other in range(self.size):
            self.cut(index, other)
            self.cut(other, index)

    def place(self, index: int, address: str) -> None:
        """Give a node another address."""
        self._order("place", index, address)
        for change in (("flush", "dev", "eth0"), ("add", f"{address}/24", "dev", "eth0")):
            subprocess.run([*self.inside(index), "ip", "address", *change], check=True)

    def heal(self) -> None:
        """Drop nothing any more but what links lose."""
        self._order("heal")

    def close(self) -> None:
        """End the process."""
        with self._process as process:
            process.communicate(timeout=10.0)

    def _order(self, *words: Any) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        print(json.dumps(words), file=pipe, flush=True)


@contextmanager
def emulated_star(links: Sequence[Link], *, seed: int = 0) -> Generator[EmulatedStar]:
    """Make a network of these nodes; a packet is lost as `seed` says. Raises Unavailable."""
    with namespaces(len(links)) as run, ExitStack() as files:
        opened: list[int] = []
        for index in range(len(links)):
            opened.append(_open(namespace(index)))
            files.callback(os.close, opened[-1])
            name = namespace(index)
            run("-n", name, "address", "add", f"{SUBNET}.{index + 1}/24", "dev", "eth0")
            run("-n", name, "link", "set", "lo", "up")
            run("-n", name, "link", "set", "eth0", "up", "mtu", str(MTU))
        network = EmulatedStar(links, opened, seed)
        files.callback(network.close)
        yield network


def _open(name: str) -> int:
    """Make the interface eth0 of a namespace; return a descriptor that reads what it sends."""
    with ThreadPoolExecutor(1) as thread:  # a namespace is a thread's own
        try:
            return thread.submit(_open_inside, name).result()
        except OSError as error:
            raise Unavailable(f"emulated links need /dev/net/tun: {error}") from error


def _open_inside(name: str) -> int:
    with open(f"/var/run/netns/{name}", "rb") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(file)
        raise
    return file


def main() -> None:
    """Carry packets: arguments are a seed and descriptors of interfaces, orders come from standard input."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    seed, *files = map(int, sys.argv[1:])
    Emulator(files, seed).run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
