"""When an engine gives its GPU memory away: after so long without work, until there is work again."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import Protocol

from ..ops.errors import EngineError

logger = logging.getLogger(__name__)


class Sleepy(Protocol):
    """What can give its memory away while nothing is under way."""

    async def sleep(self) -> None:
        """Give it away."""
        ...

    async def wake(self) -> None:
        """Take it again."""
        ...


class Sleeper:
    """Work goes on inside awake() only; start() first, close() last."""

    def __init__(self, engine: Sleepy, after_s: float) -> None:
        """`after_s` = 0: it never sleeps."""
        self._engine = engine
        self._after_s = after_s
        self._working = 0
        self._idle_since = 0.0
        self._asleep = False
        self._turning = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    @property
    def asleep(self) -> bool:
        """Whether the engine has given its memory away."""
        return self._asleep

    def start(self) -> None:
        """Begin to count the time without work."""
        self._idle_since = time.monotonic()
        if self._after_s:
            self._watching = asyncio.create_task(self._watch(), name="sleep")

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncGenerator[None]:
        """The engine has its memory inside. Raises what waking raises."""
        self._working += 1
        try:
            if self._after_s:
                await self._wake()
            yield
        finally:
            self._working -= 1
            self._idle_since = time.monotonic()

    async def close(self) -> None:
        """End the waiting; an engine that sleeps stays so."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def _wake(self) -> None:
        async with self._turning:
            if self._asleep:
                await self._engine.wake()
                self._asleep = False

    async def _watch(self) -> None:
        while True:
            left = self._idle_since + self._after_s - time.monotonic()
            if self._working or self._asleep:
                left = self._after_s
            if left > 0:
                await asyncio.sleep(left)
                continue
            async with self._turning:
                if not self._working:
                    await self._sleep()

    async def _sleep(self) -> None:
        try:
            await self._engine.sleep()
            self._asleep = True
        except EngineError as error:
            logger.warning("the engine did not go to sleep: %s", error)
            self._idle_since = time.monotonic()
