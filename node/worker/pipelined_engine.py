"""The engine of a worker that holds a model together with others: one Engine to its role, however many stages.

A version is given to stage 0 only when all others have it ready, and after a break nothing is computed before
the whole ring computes by one version. Callers see delay, never loss.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ..inference.engine import Completion, EngineStats, GenerateRequest
from ..ops.errors import EngineError, EngineLost
from ..pipeline.hosted_stage import HeadEngine
from ..weights.state import Changed, State

logger = logging.getLogger(__name__)

Order = tuple[int, int]
"""(policy epoch, version)."""

AGAIN_S = 0.2
"""Pause before a chain that broke at its beginning is begun again."""
MAX_FAILURES = 20
"""Times in a row that stage 0 may fail to begin a chain for another reason than that it broke."""
MAX_LOSSES = 3
"""Times that one request is made again after the engine of stage 0 died."""


class OtherStages(Protocol):
    """The other stages, over all rings that there will be."""

    async def whole(self) -> int:
        """Wait for a ring in which all stages are, and begin an epoch of it."""
        ...

    async def broken(self, epoch: int) -> None:
        """Wait until the ring of that epoch is of no use any more."""
        ...

    async def prepare(self, order: Order) -> int:
        """Wait until all other stages have that version ready; a later one if one of them is further."""
        ...


class PipelinedEngine:
    """Implements Engine. run() has to run beside it."""

    def __init__(
        self,
        head: HeadEngine,
        chain: OtherStages,
        order_of: Callable[[int], Order | None],
        plan: Callable[[], bytes],
    ) -> None:
        """`order_of` a version being loaded returns its (policy epoch, version); None if unknown.

        `plan` gives the sealed plan that holds just now.
        """
        self._head = head
        self._chain = chain
        self._order_of = order_of
        self._plan = plan
        self._wanted: Order | None = None
        """The order for the whole ring: the head's last one."""
        self._news = asyncio.Condition()
        self._changing = asyncio.Lock()
        self.joined = False
        """Whether all stages compute together just now."""

    @property
    def policy_version(self) -> int:
        """See Engine."""
        return self._head.policy_version

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine."""
        await self._head.start(model_dir, fingerprint=fingerprint)

    async def load(self, version: int, state: State) -> None:
        """See Engine. Waits until all stages have the version ready, and then until they write it."""
        await self._give(version, lambda: self._head.load(version, state))

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Engine and load()."""
        await self._give(version, lambda: self._head.update(version, state, changed))

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine. A stage that is lost costs time only."""
        losses = 0
        while True:
            plan = self._plan()
            try:
                return self._under(plan, await self._head.generate(request))
            except EngineLost:
                losses += 1
                if losses > MAX_LOSSES or self._head.stats().fault:
                    raise
                await asyncio.sleep(AGAIN_S)

    def stats(self) -> EngineStats:
        """See Engine."""
        return self._head.stats()

    async def close(self) -> None:
        """See Engine."""
        await self._head.close()

    async def run(self) -> None:
        """Join every ring anew, until cancelled. Raises EngineError if the engine of stage 0 is beyond help."""
        failures = 0
        while True:
            epoch = await self._chain.whole()
            await self._in_step()
            try:
                await self._head.rejoin(epoch)
            except EngineError as error:
                self._head.stats()  # raises where there is no engine any more
                failures += not isinstance(error, EngineLost)
                if failures > MAX_FAILURES:
                    raise
                logger.warning("the chain of epoch %d did not begin: %s", epoch, error)
                await asyncio.sleep(AGAIN_S)
                continue
            logger.info("all stages compute together, epoch %d", epoch)
            failures, self.joined = 0, True
            try:
                await self._chain.broken(epoch)
            finally:
                self.joined = False

    def _under(self, plan: bytes, completion: Completion) -> Completion:
        """`completion` with the plan that it was made by; if it changed, without boundaries."""
        if self._plan() == plan:
            return replace(completion, plan=plan)
        return replace(completion, plan=self._plan(), boundaries=())

    async def _give(self, version: int, write: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async with self._changing:
            order = self._order_of(version)
            if order is None:
                raise EngineError(f"no signed head names version {version}: start this node again")
            await self._chain.prepare(order)
            async with self._news:
                self._wanted = order
                self._news.notify_all()
            await write()

    async def _in_step(self) -> None:
        """Wait until every other stage can compute by the version that the head will compute by."""
        while True:
            async with self._news:
                await self._news.wait_for(lambda: self._wanted is not None)
                wanted = self._wanted
            assert wanted is not None
            theirs = await self._chain.prepare(wanted)
            if self._wanted == wanted and theirs <= wanted[1]:
                return
            if self._wanted == wanted:
                logger.info("a stage computes by version %d already: waiting for it", theirs)
                async with self._news:
                    await self._news.wait_for(lambda seen=wanted: self._wanted != seen)
