"""One thread for everything that computes: the event loop stays free, and order is submission order."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_TIMEOUT_S = 60.0
"""Longest wait for the call that runs while the thread is closed."""


class ComputeThread:
    """A thread that runs one call at a time, first come first served."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `function` in the thread. A cancelled wait does not stop the call."""
        future = self._pool.submit(function, *args, **kwargs)
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """End the thread once what was submitted has run. Safe to call twice."""
        end = asyncio.to_thread(self._pool.shutdown, wait=True)
        try:
            await asyncio.wait_for(end, CLOSE_TIMEOUT_S)
        except TimeoutError:
            logger.warning("thread %s still runs after %.0fs", self._name, CLOSE_TIMEOUT_S)
