"""End asyncio tasks, and wait for work that goes on beside its caller."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from .errors import NodeError

logger = logging.getLogger(__name__)


async def end_tasks(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel tasks and wait until they have ended; None is passed over.

    Their errors stay in the tasks: asyncio logs one that is never retrieved.
    """
    ending = [task for task in tasks if task is not None]
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending)


class BackgroundWrite:
    """One write that goes on beside its caller."""

    def __init__(self, what: str) -> None:
        """`what` names the thing that is written, for the log."""
        self._what = what
        self._writing: asyncio.Task[None] | None = None

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Begin `work`, after finish()."""
        assert self._writing is None
        self._writing = asyncio.create_task(work, name=name)

    async def finish(self) -> None:
        """Return when what was begun is written. Raises its errors."""
        if (writing := self._writing) is None:
            return
        try:
            # cancelling a waiter does not stop the writing: close() waits for it at the end
            await asyncio.shield(writing)
        finally:
            if writing.done():
                self._writing = None

    async def close(self) -> None:
        """Wait for what was begun; its error is only logged."""
        try:
            await self.finish()
        except NodeError as error:
            logger.warning("the last %s was not written: %s", self._what, error)
