"""A line made longer and narrower than it is: latency and a rate, for tests and benchmarks.

As on a real line, sending takes a packet's size over the rate, one after the other; then it is under way for
the delay, together with others that were sent meanwhile.
"""

import asyncio
import random
from collections import deque

from ..p2p.waiting import Notifier
from .outbox import Outbox
from .packets import Packet
from .together import together

MAX_UNDER_WAY = 4096


class Shaper:
    """One direction of one line: `delay_s` one way, up to `jitter_s` more, `bytes_per_s` (0: no limit)."""

    def __init__(
        self,
        delay_s: float = 0.0,
        bytes_per_s: float = 0.0,
        *,
        jitter_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._delay = delay_s
        self._rate = bytes_per_s
        self._jitter = jitter_s
        self._random = random.Random(seed)
        self._under_way: deque[tuple[float, Packet]] = deque()
        self._changed = Notifier()
        self._last_due = 0.0

    async def carry(self, source: Outbox, target: Outbox) -> None:
        """Move packets from one box to the other, in order, each when it is due. Runs until cancelled."""
        self._under_way.clear()
        await together(self._enter(source), self._leave(target))

    async def _enter(self, source: Outbox) -> None:
        clock = asyncio.get_running_loop().time
        free = clock()
        while True:
            while len(self._under_way) >= MAX_UNDER_WAY:
                await self._changed.wait()
            packet = await source.take()
            free = max(free, clock())
            if self._rate:
                free += packet.size / self._rate
                await asyncio.sleep(free - clock())
            due = free + self._delay + self._random.uniform(0.0, self._jitter)
            self._last_due = max(self._last_due, due)  # a stream delivers in order
            self._under_way.append((self._last_due, packet))
            self._changed.fire()

    async def _leave(self, target: Outbox) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            while not self._under_way:
                await self._changed.wait()
            due, packet = self._under_way[0]
            await asyncio.sleep(due - clock())
            self._under_way.popleft()
            self._changed.fire()
            await target.put(packet)
