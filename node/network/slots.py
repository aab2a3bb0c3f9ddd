"""Upload slots with a fair queue: a free slot goes to the peer that lately got least from us.

Few slots on purpose: a chunk is passed on only when it is whole, so sending few at a time spreads it sooner.
A slot that was granted is given back exactly once, whatever happens to who asked for it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ...protocol.errors import Reason, RemoteProtocolError

UPLOAD_SLOTS = 2
MAX_QUEUE = 512
"""Requests that may wait; further ones are told BUSY."""
HALF_LIFE_S = 10.0
"""After this long, bytes count half."""
MAX_ACCOUNTS = 1024


@dataclass
class Waiting:
    """One who waits for a slot."""

    peer: bytes
    granted: "asyncio.Future[None]"


class Accounts:
    """Bytes sent to each peer lately: every byte weighs half after HALF_LIFE_S. Time is an argument."""

    def __init__(self) -> None:
        self._sums: dict[bytes, tuple[float, float]] = {}

    def add(self, peer: bytes, size: int, now: float) -> None:
        """`size` bytes go to `peer`."""
        self._sums[peer] = (self.recent(peer, now) + size, now)
        if len(self._sums) > MAX_ACCOUNTS:
            del self._sums[min(self._sums, key=lambda one: self.recent(one, now))]

    def recent(self, peer: bytes, now: float) -> float:
        """What weighs on `peer` now, in bytes."""
        total, since = self._sums.get(peer, (0.0, now))
        return total * 0.5 ** ((now - since) / HALF_LIFE_S)


class Slots:
    """So many uploads at a time, the neediest first."""

    def __init__(self, slots: int = UPLOAD_SLOTS, *, queue: int = MAX_QUEUE) -> None:
        self._free = slots
        self._most = max(1, slots - 1)
        """Of one peer: who reads slowly on purpose cannot hold them all."""
        self._limit = queue
        self._used: Counter[bytes] = Counter()
        self._queue: list[Waiting] = []
        self._accounts = Accounts()

    def charge(self, peer: bytes, size: int) -> None:
        """`peer` is about to get `size` bytes."""
        self._accounts.add(peer, size, time.monotonic())

    @asynccontextmanager
    async def turn(
        self, peer: bytes, *, beat_s: float, beat: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[None]:
        """Hold a slot; while waiting for it, `beat` is called every `beat_s` seconds.

        The caller holds the deadline. Raises RemoteProtocolError(BUSY) when too many wait.
        """
        if len(self._queue) >= self._limit:
            raise RemoteProtocolError(Reason.BUSY, "too many wait for a chunk: come again")
        waiting = Waiting(peer, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._grant()
        try:
            while not waiting.granted.done():
                done, _ = await asyncio.wait([waiting.granted], timeout=beat_s)
                if not done:
                    await beat()
            yield
        finally:
            if waiting.granted.done():
                self._free += 1
                self._used[peer] -= 1
                if not self._used[peer]:
                    del self._used[peer]
                self._grant()
            else:
                self._queue.remove(waiting)

    def _grant(self) -> None:
        now = time.monotonic()
        while self._free:
            ready = [one for one in self._queue if self._used[one.peer] < self._most]
            if not ready:
                return
            # min() keeps the first of equals: the order of arrival.
            neediest = min(ready, key=lambda one: self._accounts.recent(one.peer, now))
            self._queue.remove(neediest)
            self._free -= 1
            self._used[neediest.peer] += 1
            neediest.granted.set_result(None)
