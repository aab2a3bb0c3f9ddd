"""A bounded queue of packets that can be cleared and jumped: what waits to leave in one direction.

Belongs to one event loop; a cancelled take() or put() loses nothing and leaves nothing behind.
"""

from collections import deque
from collections.abc import Callable

from ...protocol.version import MIB
from ..p2p.waiting import Notifier
from .packets import Packet

MAX_FRAMES = 80
"""More than MAX_MICRO_BATCHES: what comes back to stage 0 always finds room, so no ring locks itself up."""
MAX_BYTES = 64 * MIB


class Outbox:
    """Packets in order. Full at `frames` of them, or at `size` bytes; one always fits."""

    def __init__(self, frames: int = MAX_FRAMES, size: int = MAX_BYTES) -> None:
        self._frames = frames
        self._limit = size
        self._packets: deque[Packet] = deque()
        self._bytes = 0
        self._changed = Notifier()

    def __len__(self) -> int:
        return len(self._packets)

    async def put(self, packet: Packet) -> None:
        """Append it, waiting for room."""
        while len(self._packets) >= self._frames or (self._packets and self._bytes >= self._limit):
            await self._changed.wait()
        self._packets.append(packet)
        self._bytes += packet.size
        self._changed.fire()

    def put_first(self, packet: Packet) -> None:
        """Ahead of all others, whether there is room or not: for the few that say that all is over."""
        self._packets.appendleft(packet)
        self._bytes += packet.size
        self._changed.fire()

    def put_only(self, packet: Packet) -> None:
        """As put_first(), in the place of all of its kind: a neighbour may send these without end."""
        self.drop(lambda one: one.kind is packet.kind)
        self.put_first(packet)

    async def take(self) -> Packet:
        """The next one."""
        while not self._packets:
            await self._changed.wait()
        packet = self._packets.popleft()
        self._bytes -= packet.size
        self._changed.fire()
        return packet

    def drop(self, which: Callable[[Packet], bool]) -> None:
        """Forget some."""
        self._packets = deque(packet for packet in self._packets if not which(packet))
        self._bytes = sum(packet.size for packet in self._packets)
        self._changed.fire()

    def clear(self) -> None:
        """Forget all."""
        self.drop(lambda packet: True)
