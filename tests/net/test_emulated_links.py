"""The network of the tests of this folder carries what it should, without a network of its own."""

import json
import os
import socket
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from primerl.scripts.bench.emulated_links import Emulator
from primerl.scripts.bench.swarm_links import Star

LINK = {"up": 100.0, "down": 100.0}
NODES = 3
DEADLINE_S = 20.0
LATER = "10.77.0.9"


def packet(sender: str, receiver: str) -> bytes:
    """The head of a packet of IPv4."""
    return bytes([0x45, *bytes(11)]) + socket.inet_aton(sender) + socket.inet_aton(receiver)


class Wires:
    """Nodes' ends of an emulated network."""

    def __init__(self, ends: list[socket.socket], orders: int) -> None:
        self.ends, self._orders = ends, orders
        self.received: set[bytes] = set()

    def order(self, *words: Any) -> None:
        os.write(self._orders, json.dumps(words).encode() + b"\n")

    def arrives(self, source: int, target: int, sent: bytes) -> None:
        """Send until it has arrived: an order may be read a little later."""
        self.ends[target].settimeout(0.05)
        for _ in range(round(DEADLINE_S / 0.05)):
            self.ends[source].send(sent)
            with suppress(TimeoutError):
                while (packet := self.ends[target].recv(100)) != sent:
                    self.received.add(packet)
                return
        raise AssertionError("it does not arrive")


@contextmanager
def emulated() -> Generator[Wires]:
    """An emulator in a thread, whose interfaces are sockets."""
    with ExitStack() as opened:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(NODES)]
        for pair in pairs:
            pair[1].setblocking(False)
            for end in pair:
                opened.enter_context(end)
        read, write = os.pipe()
        emulator = Emulator([inner.fileno() for _, inner in pairs], 0)
        thread = threading.Thread(target=emulator.run, args=(read,))
        thread.start()
        wires = Wires([outer for outer, _ in pairs], write)
        for index in range(NODES):
            wires.order("link", index, LINK)
        try:
            yield wires
        finally:
            os.close(write)
            thread.join(DEADLINE_S)
            os.close(read)
        assert not thread.is_alive()


def test_a_node_is_reached_where_it_is_now_and_speaks_for_no_other() -> None:
    """Found by nodes that moved: their kernel sent back what came for the old address, in its sender's name.

    What was for that sender went to them from then on.
    """
    first, second, third = map(Star(NODES).address, range(NODES))
    forged = [packet(first, third), packet(second, first)]
    with emulated() as wires:
        wires.arrives(0, 1, packet(first, second))
        wires.ends[1].send(forged[0])
        wires.arrives(1, 2, packet(second, third))
        wires.arrives(2, 0, packet(third, first))
        wires.order("place", 2, LATER)
        wires.arrives(0, 2, packet(first, LATER))
        wires.ends[2].send(forged[1])
        wires.arrives(2, 0, packet(LATER, first))
    assert wires.received.isdisjoint(forged)
