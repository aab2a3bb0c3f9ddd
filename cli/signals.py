"""Runs a coroutine as the whole program: the first signal asks it to stop, the second one does not ask."""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """The program was told to stop by a signal, and did."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end. Raises Interrupted when SIGINT or SIGTERM ended it."""
    received: list[int] = []

    async def supervised() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            if received:  # somebody insists
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            received.append(number)
            print("stopping; once more to stop at once", file=sys.stderr, flush=True)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        return await main

    try:
        result = asyncio.run(supervised())
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0]) from None
    if received:
        raise Interrupted(received[0])
    return result
