"""Access lines of nodes: packets of all streams of a node leave in turns at its rate, and arrive later.

A writer does not wait for its bytes to arrive: a long line is filled. Nothing is lost, and packets of one flow
keep their order. A small one does not wait for packets of other flows, as where routers and senders put sparse
flows first (RFC 8290); what it takes of the line, the next large packet takes longer.
"""

import asyncio
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

MBIT_S = 125_000.0
"""Bytes per second."""
PACKET = 16 * 1024


@dataclass(frozen=True)
class Line:
    """A node's line."""

    up: float = math.inf
    """Bytes per second."""
    down: float = math.inf
    latency_s: float = 0.0
    """Of a packet, between the node and the middle of the network."""


@dataclass
class _Packet:
    target: bytes
    kind: bytes
    size: int
    arrive: Callable[[], None]


@dataclass
class _Uplink:
    line: Line
    flows: OrderedDict[Hashable, deque[_Packet]] = field(
        default_factory=OrderedDict[Hashable, deque[_Packet]]
    )
    sending: Hashable = None
    """Flow whose packet is on the line; None: the line is idle."""
    owed_until: float = 0.0
    """Time at which the line would have carried the small packets that left at once."""


class AccessLines:
    """The lines of all nodes."""

    def __init__(
        self, line_of: Callable[[bytes], Line], packet: int = PACKET, small: int = 0
    ) -> None:
        """`line_of` is asked once for each node; `packet`: bytes that a line carries at once.

        `small`: most bytes of a packet that waits for no other flow.
        """
        self.packet = packet
        self._small = small
        self._line_of = line_of
        self._uplinks: dict[bytes, _Uplink] = {}
        self._free_at: dict[bytes, float] = {}
        """When all that is on its way to a node will have come down its line."""
        self.sent: Counter[tuple[bytes, bytes]] = Counter()
        """Bytes that left each node, by node and kind."""

    def latency_s(self, source: bytes, target: bytes) -> float:
        """Return the seconds that a packet without bytes takes on an idle line."""
        return self._uplink(source).line.latency_s + self._uplink(target).line.latency_s

    def send(
        self,
        flow: Hashable,
        ends: tuple[bytes, bytes],
        kind: bytes,
        size: int,
        arrive: Callable[[], None],
    ) -> None:
        """Queue a packet of `size` bytes behind the others of its `flow`; call `arrive` when it is there.

        `ends`: its source and its target.
        """
        source, target = ends
        uplink = self._uplink(source)
        packet = _Packet(target, kind, size, arrive)
        if size <= self._small and flow not in uplink.flows and flow != uplink.sending:
            self._owe(uplink, size)
            self._leave(source, uplink, packet)
            return
        uplink.flows.setdefault(flow, deque()).append(packet)
        if uplink.sending is None:
            self._send_next(source, uplink)

    def count(self, source: bytes, kind: bytes, size: int) -> None:
        """Count small packets that change nothing where they arrive."""
        self._owe(self._uplink(source), size)
        self.sent[source, kind] += size

    def drop(self, flow: Hashable, source: bytes) -> None:
        """Forget the packets of `flow` that have not left yet."""
        self._uplink(source).flows.pop(flow, None)

    def _owe(self, uplink: _Uplink, size: int) -> None:
        now = asyncio.get_running_loop().time()
        uplink.owed_until = max(now, uplink.owed_until) + size / uplink.line.up

    def _uplink(self, node: bytes) -> _Uplink:
        if node not in self._uplinks:
            self._uplinks[node] = _Uplink(self._line_of(node))
        return self._uplinks[node]

    def _send_next(self, source: bytes, uplink: _Uplink) -> None:
        if not uplink.flows:
            uplink.sending = None
            return
        loop = asyncio.get_running_loop()
        flow, packets = uplink.flows.popitem(last=False)
        packet = packets.popleft()
        if packets:
            uplink.flows[flow] = packets
        uplink.sending = flow
        begins = max(loop.time(), uplink.owed_until)
        loop.call_at(begins + packet.size / uplink.line.up, self._left, source, uplink, packet)

    def _left(self, source: bytes, uplink: _Uplink, packet: _Packet) -> None:
        self._leave(source, uplink, packet)
        self._send_next(source, uplink)

    def _leave(self, source: bytes, uplink: _Uplink, packet: _Packet) -> None:
        loop = asyncio.get_running_loop()
        self.sent[source, packet.kind] += packet.size
        line = self._uplink(packet.target).line
        due = loop.time() + uplink.line.latency_s + line.latency_s
        due = max(due, self._free_at.get(packet.target, due)) + packet.size / line.down
        self._free_at[packet.target] = due
        loop.call_at(due, packet.arrive)


def uplinks(rates: Mapping[bytes, float]) -> AccessLines:
    """Make lines with these rates up, bytes/s by node; those of others are unlimited."""
    return AccessLines(lambda node: Line(up=rates.get(node, math.inf)))
