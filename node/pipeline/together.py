"""Work side by side until the first of it ends.

A TaskGroup forgets a cancellation that comes while it ends for an error, and a line would be dialled for ever.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def together(*works: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends; end the others, and raise what that one raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
