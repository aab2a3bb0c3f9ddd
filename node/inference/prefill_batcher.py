"""Lets requests into an engine that is full several at a time, so that few of its steps read prompts.

A step that only draws tokens replays one CUDA graph; one that also reads a prompt runs the model in pieces and
costs twice the CPU time, which is what bounds a small model. vLLM starts a request as soon as a sequence ends:
with 256 sequences of 400 tokens two steps in three read prompts. Here they wait until a thirty-second of the
sequences has ended, which leaves a sixty-fourth of the engine idle.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator

SHARE = 32
"""A full engine takes requests again once this part of its sequences has ended."""
MOST_WAIT_S = 1.0
"""How long a request waits for others to end before those take what room there is."""


class PrefillBatcher:
    """Counts the requests in one engine, of one event loop."""

    def __init__(self, room: int, *, most_wait_s: float = MOST_WAIT_S) -> None:
        """`room`: sequences that the engine generates at once."""
        self._room = room
        self._least = max(1, room // SHARE)
        self._most_wait_s = most_wait_s
        self._inside = 0
        self._open = True
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that are not in the engine yet."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def admitted(self) -> AsyncGenerator[None]:
        """Wait until a request may go to the engine, which it has left at the end."""
        if self._open and not self._waiting:
            self._take()
        else:
            await self._turn()
        try:
            yield
        finally:
            self._leave()

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        turn = (loop.time(), loop.create_future())
        self._waiting.append(turn)
        timer = loop.call_later(self._most_wait_s, self._let_in)
        try:
            await turn[1]
        except asyncio.CancelledError:
            if not turn[1].cancelled():  # it was let in, and interrupted before it knew
                self._leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise
        finally:
            timer.cancel()

    def _leave(self) -> None:
        self._inside -= 1
        if self._room - self._inside >= self._least or self._overdue():
            self._let_in()

    def _overdue(self) -> bool:
        if not self._waiting:
            return False
        return asyncio.get_running_loop().time() >= self._waiting[0][0] + self._most_wait_s

    def _take(self) -> None:
        self._inside += 1
        self._open = self._inside < self._room

    def _let_in(self) -> None:
        """Open, for as many as wait and find room."""
        self._open = self._inside < self._room
        while self._waiting and self._open:
            _, turn = self._waiting.popleft()
            if not turn.cancelled():
                turn.set_result(None)
                self._take()
