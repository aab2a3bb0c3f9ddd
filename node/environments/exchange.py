"""One episode's side of the policy: samples turns, keeps what was sampled, and stops a stuck environment.

A failure of the policy is never the episode's: sample() remembers it, because environment libraries
swallow exceptions, and the caller raises it again with check().
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from ..engines.engine import Completion
from .environment import Policy
from .replay import PlayFailed, check_completion


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
        self._timer: asyncio.Timeout | None = None
        self._sampling = 0
        self._turn = 0
        self._failure: Exception | None = None

    async def sample(self, prompt: Sequence[int]) -> Completion:
        """One completion of the policy. Raises BadCompletion if it breaks the sampling contract."""
        turn, self._turn = self._turn, self._turn + 1
        self._set_timer(+1)
        try:
            completion = await self._policy(prompt, turn)
        except Exception as error:
            self._failure = error  # see check(): whoever called us may not let it through
            raise
        finally:
            self._set_timer(-1)
        check_completion(completion, max_tokens=self._max_tokens, stop_token_ids=self._stops)
        return completion

    def _set_timer(self, change: int) -> None:
        """The deadline counts the environment's time only, never the policy's."""
        self._sampling += change
        if self._timer is not None:
            free = asyncio.get_running_loop().time() + self._deadline
            self._timer.reschedule(None if self._sampling else free)

    @asynccontextmanager
    async def bounded(self) -> AsyncGenerator[None]:
        """Raise Stuck when the environment's code runs for `deadline` seconds between two turns.

        A loop that never awaits cannot be interrupted from inside its own process.
        """
        try:
            async with asyncio.timeout(self._deadline) as self._timer:
                yield
        except TimeoutError as error:
            if self._timer is None or not self._timer.expired():
                raise
            raise Stuck(
                f"no result within {self._deadline:g} s: the taskset's code hangs"
            ) from error
        finally:
            self._timer = None

    def check(self) -> None:
        """Raise what the policy raised, if it did."""
        if self._failure is not None:
            raise self._failure
