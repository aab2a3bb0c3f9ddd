"""The observer role: follow the policy and do no work for the run; asks for no lease and sends nothing in."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from ..p2p.heads import HeadBook
from ..p2p.links import Links
from .upstreams import Upstreams
from .weight_sync import CatchUp

logger = logging.getLogger(__name__)

LAST_VERSION_S = 30.0
"""After the end of a run somebody may still have its last version, for a while."""


class ObserverRole:
    """Keeps an engine at the newest version, and at the last one once the run is over."""

    def __init__(
        self,
        *,
        book: HeadBook,
        links: Links,
        trainer: bytes,
        catchup: CatchUp,
        upstreams: Upstreams,
        record: Callable[[], bytes],
    ) -> None:
        """`record` makes our own sealed peer record."""
        self._book = book
        self._links = links
        self._trainer = trainer
        self._catchup = catchup
        self._upstreams = upstreams
        self._record = record

    async def run(self) -> None:
        """Follow until the run ends, and get its last version if anybody still has it."""
        asking = asyncio.create_task(
            self._upstreams.keep_asking(self._links, self._trainer, self._record)
        )
        try:
            await self._catchup.run()
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_VERSION_S):
                    await self._catchup.reach_last()
        finally:
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
        logger.info("the run has ended: %s", self._book.ended)
