"""Engine of a worker that shares a model with others: one Engine, of all stages.

A version is given to stage 0 only when all other stages have it ready. After a break, nothing is computed until
the whole ring has the same version. A lost stage delays callers and loses no request.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import EngineError, EngineLost
from ..inference.engine import Completion, EngineStats, GenerateRequest
from ..pipeline.hosted_stage import HeadEngine
from ..weights.state import Changed, State
from .stage import RingSupervisor

logger = logging.getLogger(__name__)

Order = tuple[int, int]
"""(policy epoch, version)."""

AGAIN_S = 0.2
"""Pause before a chain or a request that failed is tried again."""
MAX_FAILURES = 20
"""Most times in a row that stage 0 may fail to begin a chain that did not break."""
MAX_LOSSES = 3
"""Most retries of one request after the engine of stage 0 died."""


class PipelinedEngine:
    """Implementation of Engine over a pipeline; run() has to run beside it."""

    def __init__(
        self,
        head: HeadEngine,
        chain: RingSupervisor,
        order_of: Callable[[int], Order | None],
        plan: Callable[[], bytes],
    ) -> None:
        """`order_of` maps a version being loaded to its (policy epoch, version), None if unknown.

        `plan` returns the sealed plan that holds now.
        """
        self._head = head
        self._chain = chain
        self._order_of = order_of
        self._plan = plan
        self._wanted: Order | None = None
        """Order for the whole ring: the head's last one."""
        self._news = asyncio.Condition()
        self._changing = asyncio.Lock()
        self.joined = False
        """Whether all stages compute together now."""

    @property
    def policy_version(self) -> int:
        """See Engine."""
        return self._head.policy_version

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine."""
        await self._head.start(model_dir, fingerprint=fingerprint)

    async def load(self, version: int, state: State) -> None:
        """See Engine. Waits until all stages have the version ready, and then until it is written."""
        await self._give(version, lambda: self._head.load(version, state))

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Engine and load()."""
        await self._give(version, lambda: self._head.update(version, state, changed))

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine. A lost stage only costs time."""
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
        """Join each new ring, until cancelled.

        Raises EngineError if the engine of stage 0 cannot be restarted.
        """
        failures = 0
        while True:
            epoch = await self._chain.wait_whole()
            await self._in_step()
            try:
                await self._head.rejoin(epoch)
            except EngineError as error:
                self._head.stats()  # raises if no engine is left
                failures += not isinstance(error, EngineLost)
                if failures > MAX_FAILURES:
                    raise
                logger.warning("the chain of epoch %d did not begin: %s", epoch, error)
                await asyncio.sleep(AGAIN_S)
                continue
            logger.info("all stages compute together, epoch %d", epoch)
            failures, self.joined = 0, True
            try:
                await self._chain.wait_broken(epoch)
            finally:
                self.joined = False

    def _under(self, plan: bytes, completion: Completion) -> Completion:
        """Add the plan to a `completion`; if the plan has changed since, remove the boundaries."""
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
        """Wait until every other stage has the version that the head will compute by."""
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
                    await self._news.wait_for(lambda previous=wanted: self._wanted != previous)
