"""Signal and Inbox: how a coroutine waits for something that may also end.

Both belong to one event loop, and a cancelled wait takes nothing away.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Signal:
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


class Inbox(Generic[T]):
    """A bounded queue that can end: once closed, whatever it still held is dropped."""

    def __init__(self, limit: int, ended: Callable[[], Exception]) -> None:
        self._items: deque[T] = deque()
        self._limit = limit
        self._ended = ended
        self._closed = False
        self._changed = Signal()

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
