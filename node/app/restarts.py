"""What a trainer does when ranks die: go on from the last checkpoint, as a start with `--resume` would.

Only dead ranks are answered so; whatever else went wrong at the same time ends the run.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..ops.errors import RankFailed

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 60.0


class Restarts:
    """Counts restarts since the last new checkpoint: one that brings nothing is not repeated for ever."""

    def __init__(
        self, most: int, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """At most `most` restarts from one checkpoint."""
        self._most = most
        self._sleep = sleep
        self._from: int | None = None
        self._count = 0

    async def after(self, error: BaseException, checkpoint: int | None) -> None:
        """Return when it is time to go on from the newest `checkpoint`; raises `error` if that is no answer.

        The first restart from a checkpoint comes at once, each further one after twice the time.
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
    """Do `work(False)`; whenever ranks die, replace() them and do `work(True)`. Raises what `restarts` does.

    newest() is the step of the last complete checkpoint; it reads the disk, in a thread.
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
    """The failure of ranks that `error` is, or consists of; None if it is anything else, too."""
    if isinstance(error, RankFailed):
        return error
    if not isinstance(error, BaseExceptionGroup):
        return None
    found = [ranks_alone(one) for one in error.exceptions]
    return found[0] if None not in found else None
