"""End asyncio tasks."""

import asyncio
from typing import Any


async def end_tasks(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel tasks and wait until they have ended; None is passed over.

    Their errors stay in the tasks: asyncio logs one that is never retrieved.
    """
    ending = [task for task in tasks if task is not None]
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending)
