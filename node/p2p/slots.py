"""Upload slots with a fair queue: a free slot goes to the peer that lately got least from us.

No more slots than fill the line: a chunk is passed on only when it is whole, so sending few at a time spreads
it sooner. A slot that was granted is given back exactly once, whatever happens to who asked for it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ...protocol.errors import Reason, RemoteProtocolError
from .upload_limit import FEWEST, UploadLimit

OVERDUE_S = 4.0
OVERDUE = 4.0
"""An upload that takes OVERDUE_S, and so many times as long as others, counts no more: who reads slowly, on
purpose or not, holds up nobody."""
MAX_UPLOADS = 64
"""With those that count no more."""
MAX_QUEUE = 512
"""Requests that may wait; further ones are told BUSY."""
HALF_LIFE_S = 10.0
"""After this long, bytes count half."""
MAX_ACCOUNTS = 1024


@dataclass
class Waiting:
    """One who waits for a slot."""

    peer: bytes
    granted: "asyncio.Future[Upload]"


@dataclass
class Upload:
    """One who holds a slot."""

    peer: bytes
    begun: float
    beside: int
    """How many were under way when it began, itself included."""
    size: int = 0
    """Bytes that went out; the caller says so at the end."""


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

    def __init__(
        self,
        slots: int = FEWEST,
        *,
        queue: int = MAX_QUEUE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slots` to begin with; how many are best is learned."""
        self._limit = UploadLimit(slots)
        self._most_waiting = queue
        self._clock = clock
        self._uploads: list[Upload] = []
        self._queue: list[Waiting] = []
        self._accounts = Accounts()

    def charge(self, peer: bytes, size: int) -> None:
        """`peer` is about to get `size` bytes."""
        self._accounts.add(peer, size, self._clock())

    @asynccontextmanager
    async def turn(
        self, peer: bytes, *, beat_s: float, beat: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[Upload]:
        """Hold a slot; while waiting for it, `beat` is called every `beat_s` seconds.

        The caller holds the deadline. Raises RemoteProtocolError(BUSY) when too many wait.
        """
        if len(self._queue) >= self._most_waiting:
            raise RemoteProtocolError(Reason.BUSY, "too many wait for a chunk: come again")
        waiting = Waiting(peer, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._grant()
        try:
            while not waiting.granted.done():
                done, _ = await asyncio.wait([waiting.granted], timeout=beat_s)
                if not done:
                    await beat()
                    self._grant()  # one of those before us may be overdue by now
            upload = waiting.granted.result()
            yield upload
            if upload.size:
                seconds = self._clock() - upload.begun
                self._limit.learn(upload.size, seconds, upload.beside)
        finally:
            if waiting.granted.done():
                self._uploads.remove(waiting.granted.result())
                self._grant()
            else:
                self._queue.remove(waiting)

    def _grant(self) -> None:
        now = self._clock()
        patience = max(OVERDUE_S, OVERDUE * self._limit.typical_s)
        while self._queue and len(self._uploads) < MAX_UPLOADS:
            beside = sum(1 for one in self._uploads if now - one.begun < patience)
            used = Counter(one.peer for one in self._uploads)
            # Of one peer: who reads slowly on purpose cannot hold them all.
            most = max(1, self._limit.value - 1)
            ready = [one for one in self._queue if used[one.peer] < most]
            if beside >= self._limit.value or not ready:
                return
            # min() keeps the first of equals: the order of arrival.
            neediest = min(ready, key=lambda one: self._accounts.recent(one.peer, now))
            self._queue.remove(neediest)
            upload = Upload(neediest.peer, now, beside + 1)
            self._uploads.append(upload)
            neediest.granted.set_result(upload)
