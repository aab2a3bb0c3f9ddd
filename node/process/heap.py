"""Return freed memory to the system, and keep collections of garbage short.

A full collection walks all objects that can hold others, nearly all of them a node's libraries' (600,000). It
stops the event loop for 0.3 to 0.9 s, every few seconds at 500 rollouts/s. It does not look at frozen ones.

Python waits with the next full collection until new objects are a quarter of those that the last one left:
up to 140,000. A collection of what is not frozen, next to nothing, ends that wait.
"""

import asyncio
import ctypes
import gc
from contextlib import suppress

FREEZE_PAUSES_S = (20.0, 40.0, 180.0)
"""Pauses before libraries are frozen: a node imports modules until its first work, and for new kinds of it."""


def trim_heap() -> None:
    """Return memory that was freed, as by the transport for keys that left, or in a start.

    The C library keeps it otherwise; one without malloc_trim (macOS, musl) always does. It takes milliseconds.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def freeze_libraries() -> None:
    """Collect garbage, keep what is left out of later collections, and let these begin at once."""
    gc.collect()
    gc.freeze()
    gc.collect()


async def freeze_after_start() -> None:
    """Call freeze_libraries() some times after the start of a program."""
    for pause_s in FREEZE_PAUSES_S:
        await asyncio.sleep(pause_s)
        freeze_libraries()
