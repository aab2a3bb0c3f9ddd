"""Notifier: wake the waiters of one event loop. LogBackoff: repeat a log line ever more rarely."""

import asyncio
import time
from collections.abc import Callable


class Notifier:
    """Wakes all waiters; each checks itself whether its wait is over."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        """Wake all current waiters."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next fire()."""
        await self._event.wait()


class LogBackoff:
    """Spaces repeated log lines about an unchanged state: at once, then after twice the time each."""

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
        """Begin anew: the state has ended."""
        self._next, self._pause = float("-inf"), self._first_s

    def due(self) -> bool:
        """Whether to say it now."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._pause
        self._pause = min(2 * self._pause, self._longest_s)
        return True
