"""Stage 0 asks the other stages to have a policy version ready, and asks again until they have.

No ring has to be whole for that. A stage that never gets ready is reported: another one takes its place.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.pipelines import PipelinePlan
from ..p2p.rpc import Refused
from ..p2p.transport import TransportError

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 30.0
PAUSE_S = 0.1
PAUSE_MAX_S = 2.0
PATIENCE_S = 600.0
"""For a stage to fetch its part of a version, all of it at worst."""
AHEAD = 2**53
"""Stands for the version of a stage that is further than that."""


class Asked(Protocol):
    """What is asked through: the ring of one plan, also while it is not whole."""

    plan: PipelinePlan
    """Whose stages."""

    async def prepare(self, rank: int, term: int, version: int, *, deadline: float) -> None:
        """Ask one stage. Raises Refused, TransportError, RemoteProtocolError."""
        ...


async def all_ready(
    ring: Asked,
    order: tuple[int, int],
    complain: Callable[[Iterable[bytes]], None],
    *,
    patience_s: float = PATIENCE_S,
) -> int:
    """Wait until all other stages have (term, version) ready: that version, or AHEAD if one is further.

    `complain` is told of stages that had `patience_s` and are not ready. Cancelled once another plan holds.
    """
    ranks = range(1, len(ring.plan.stages))
    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(_ready(ring, rank, order, complain, patience_s)) for rank in ranks
        ]
    return max(task.result() for task in asked)


async def _ready(
    ring: Asked,
    rank: int,
    order: tuple[int, int],
    complain: Callable[[Iterable[bytes]], None],
    patience_s: float,
) -> int:
    node = ring.plan.stages[rank].node
    pause, began = PAUSE_S, time.monotonic()
    while True:
        try:
            await ring.prepare(rank, *order, deadline=ASK_TIMEOUT_S)
            return order[1]
        except (TransportError, Refused, RemoteProtocolError) as error:
            if isinstance(error, Refused) and error.reason is Reason.ROLLBACK:
                return AHEAD
            logger.info("stage %s has not got version %d: %s", short(node), order[1], error)
        if time.monotonic() - began > patience_s:
            complain([node])
            began = time.monotonic()
        await asyncio.sleep(pause)
        pause = min(pause * 1.6, PAUSE_MAX_S)
