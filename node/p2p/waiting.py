"""Signal and Inbox: how a coroutine waits for something that may also end; LogBackoff: how it says so.

The first two belong to one event loop, and a cancelled wait takes nothing away.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Notifier:
    """Wakes everybody who waits; each looks for itself whether its wait is over."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        """Wake all current waiters."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next fire()."""
        await self._event.wait()


class AsyncQueue(Generic[T]):
    """A bounded queue that can end: once closed, whatever it still held is dropped."""

    def __init__(self, limit: int, ended: Callable[[], Exception]) -> None:
        self._items: deque[T] = deque()
        self._limit = limit
        self._ended = ended
        self._closed = False
        self._changed = Notifier()

    def offer(self, item: T) -> bool:
        """Add `item`; False when the inbox is full or closed."""
        if self._closed or len(self._items) >= self._limit:
            return False
        self._items.append(item)
        self._changed.fire()
        return True

    async def take(self) -> T:
        """The next item in order. Raises what `ended` makes once the inbox is closed."""
        while not self._closed:
            if self._items:
                return self._items.popleft()
            await self._changed.wait()
        raise self._ended()

    def close(self) -> list[T]:
        """End the inbox and hand back what nobody took."""
        self._closed = True
        left = list(self._items)
        self._items.clear()
        self._changed.fire()
        return left


class LogBackoff:
    """When to log a line again about what goes on unchanged: at once, then after twice the time each."""

    def __init__(
        self,
        first_s: float = 1.0,
        longest_s: float = 600.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """It is over: the next time is the first one."""
        self._next, self._pause = float("-inf"), self._first_s

    def due(self) -> bool:
        """Whether to say it now."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._pause
        self._pause = min(2 * self._pause, self._longest_s)
        return True
