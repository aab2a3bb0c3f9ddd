"""Bounded restarts of a run from its newest checkpoint after the death of its ranks."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..errors import RankFailed

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 60.0


class Restarts:
    """Counter of restarts since the last new checkpoint, so that they end without progress."""

    def __init__(
        self, most: int, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """Allow at most `most` restarts from one checkpoint."""
        self._most = most
        self._sleep = sleep
        self._from: int | None = None
        self._count = 0

    async def after(self, error: BaseException, checkpoint: int | None) -> None:
        """Wait before a restart from the newest `checkpoint`; raise `error` if it is futile.

        The first restart from a checkpoint is immediate; the waits of further ones about double, up to
        LONGEST_WAIT_S.
        """
        failure = ranks_alone(error)
        if failure is None:
            raise error
        if checkpoint != self._from:
            self._from, self._count = checkpoint, 0
        if self._count >= self._most:
            raise failure
        wait_s = min(2.0**self._count - 1.0, LONGEST_WAIT_S)
        self._count += 1
        logger.warning(
            "%s: restart %d of %d from %s",
            failure,
            self._count,
            self._most,
            "the beginning" if checkpoint is None else f"checkpoint {checkpoint}",
        )
        await self._sleep(wait_s)


async def until_done(
    work: Callable[[bool], Awaitable[None]],
    restarts: Restarts,
    *,
    newest: Callable[[], int | None],
    replace: Callable[[], Awaitable[None]],
) -> None:
    """Run `work(False)`; whenever ranks die, replace() them and run `work(True)`.

    newest() reads the step of the last complete checkpoint; it runs in a thread. Raises the errors of
    Restarts.after().
    """
    again = False
    while True:
        try:
            if again:
                await replace()
            return await work(again)
        except (RankFailed, BaseExceptionGroup) as error:
            again = True
            await restarts.after(error, await asyncio.to_thread(newest))


def ranks_alone(error: BaseException) -> RankFailed | None:
    """Return the rank failure that `error` is or consists of; None if it holds anything else."""
    if isinstance(error, RankFailed):
        return error
    if not isinstance(error, BaseExceptionGroup):
        return None
    failures = [ranks_alone(nested) for nested in error.exceptions]
    return failures[0] if None not in failures else None
