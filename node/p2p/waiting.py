"""Notifier: wake the waiters of one event loop. LogBackoff: repeat a log line less and less often."""

import asyncio
import time
from collections.abc import Callable


class Notifier:
    """Wake all waiters; each checks itself whether its wait is over."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        """Wake all current waiters."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next fire()."""
        await self._event.wait()


class LogBackoff:
    """Space repeated log lines about an unchanged state: at once, then after twice the time each."""

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
        """Start over: the state has ended."""
        self._next, self._pause = float("-inf"), self._first_s

    def due(self) -> bool:
        """Return whether it is time to log the line."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._pause
        self._pause = min(2 * self._pause, self._longest_s)
        return True
