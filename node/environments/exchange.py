"""One episode's side of the policy: samples turns, keeps what was sampled, and stops a stuck environment.

A failure of the policy is never the episode's: sample() remembers it, because environment libraries
swallow exceptions, and the caller raises it again with check().
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar

from ..inference.engine import Completion
from .environment import Policy
from .replay import PlayFailed, check_completion

clock: ContextVar[Callable[[], float]] = ContextVar("clock", default=time.monotonic)
"""Seconds that count for the deadline of an episode: where many are played, others' code is left out."""


class Stuck(PlayFailed):
    """The environment's own code did not finish in time."""


class Exchange:
    """The turns of one episode."""

    def __init__(
        self, policy: Policy, *, max_tokens: int, stop_token_ids: Sequence[int], deadline: float
    ) -> None:
        self._policy = policy
        self._max_tokens = max_tokens
        self._stops = stop_token_ids
        self._deadline = deadline
        self._clock = clock.get()
        self._timer: asyncio.Timeout | None = None
        self._look: asyncio.TimerHandle | None = None
        self._began: float | None = None
        """When the environment's own code began to run; None while the policy speaks."""
        self._sampling = 0
        self._turn = 0
        self._failure: Exception | None = None

    async def sample(self, prompt: Sequence[int]) -> Completion:
        """One completion of the policy. Raises BadCompletion if it breaks the sampling contract."""
        turn, self._turn = self._turn, self._turn + 1
        self._count(+1)
        try:
            completion = await self._policy(prompt, turn)
        except Exception as error:
            self._failure = error  # see check(): whoever called us may not let it through
            raise
        finally:
            self._count(-1)
        check_completion(completion, max_tokens=self._max_tokens, stop_token_ids=self._stops)
        return completion

    def _count(self, change: int) -> None:
        """The deadline counts the environment's time only, never the policy's."""
        self._sampling += change
        self._began = None if self._sampling else self._clock()

    def _check_time(self) -> None:
        """End the episode if its code has run for too long; else look again when it may have."""
        assert self._timer is not None  # made before the first look
        loop = asyncio.get_running_loop()
        left = self._deadline
        if self._began is not None:
            left += self._began - self._clock()
        if left > 0.0:
            self._look = loop.call_later(left, self._check_time)
        else:
            self._timer.reschedule(loop.time())

    @asynccontextmanager
    async def bounded(self) -> AsyncGenerator[None]:
        """Raise Stuck when the environment's code runs for `deadline` seconds between two turns.

        A loop that never awaits cannot be interrupted from inside its own process (host.py).
        """
        try:
            async with asyncio.timeout(None) as self._timer:
                self._count(0)
                self._check_time()
                yield
        except TimeoutError as error:
            if self._timer is None or not self._timer.expired():
                raise
            raise Stuck(
                f"the environment's code gave no result within {self._deadline:g} s: mend it, or raise "
                "environment.timeout_s"
            ) from error
        finally:
            if self._look is not None:
                self._look.cancel()

    def check(self) -> None:
        """Raise what the policy raised, if it did."""
        if self._failure is not None:
            raise self._failure
