"""Waiting for what other tasks and processes do, with a deadline."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psutil  # pyright: ignore[reportMissingModuleSource]

T = TypeVar("T")


async def until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether there is a process of that id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ended(value: T) -> asyncio.Future[T]:
    """Return a future that has ended with `value`."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


def started_processes() -> list[psutil.Process]:
    """Processes of engines below this one: the ones that we talk to first."""
    found = list[psutil.Process]()
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # gone since
            if "resource_tracker" not in " ".join(one.cmdline()):
                found.append(one)
    return found
