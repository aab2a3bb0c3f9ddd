"""The place of one engine of several: whoever holds it is watched, and replaced when it is lost.

A replacement waits longer after each failure in a row, and gets the newest policy before it gets work.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from ..ops.errors import NodeError
from .host_frames import Busy
from .hosted_child import EngineChild

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pauses:
    """When an engine that was lost is started again, in seconds."""

    first: float = 1.0
    factor: float = 3.0
    most: float = 243.0
    steady: float = 300.0
    """Having worked for so long it is thought to be well again: the count of failures starts anew."""

    def before(self, failures: int) -> float:
        """The pause after so many failures in a row before this one."""
        return min(self.most, self.first * self.factor ** min(failures, 30))


class ReplicaSupervisor:
    """start() first, close() last."""

    def __init__(
        self,
        name: str,
        start: Callable[[EngineChild], Awaitable[None]],
        make: Callable[[], EngineChild],
        renew: Callable[[EngineChild], Awaitable[None]],
        changed: Callable[[], None],
        *,
        gate: asyncio.Lock,
        most: int,
        pauses: Pauses,
    ) -> None:
        """`make` an engine, `start` it, `renew` it with the newest policy; `changed` is called when this
        seat becomes free or taken, the latter while `gate` is held, so that no policy passes between.
        `most` restarts in a row.
        """
        self._name = name
        self._make, self._start, self._renew, self._changed = make, start, renew, changed
        self._gate = gate
        self._most = most
        self._pauses = pauses
        self._child: EngineChild | None = None
        self._up = False
        self._failures = 0
        self._watching: asyncio.Task[None] | None = None
        self._words = ""
        self._past = Busy()
        self.restarts = 0
        self.given_up = False
        """Whether it will have none any more."""
        self.load = 0
        """Requests that are with its engine."""

    @property
    def child(self) -> EngineChild | None:
        """The engine that takes requests and weights; None while there is none."""
        return self._child if self._up and self._child and not self._child.lost.is_set() else None

    @property
    def fault(self) -> str:
        """Why it has no engine just now; empty while it has one."""
        return self._words or (self._child.fault if self._child else "")

    @property
    def busy(self) -> Busy:
        """How busy its engine is; what is counted, with the engines before."""
        if self.child is None or self._child is None:
            return self._past
        now, past = self._child.busy, self._past
        return msgspec.structs.replace(
            now,
            preemptions=past.preemptions + now.preemptions,
            prompt_tokens=past.prompt_tokens + now.prompt_tokens,
            generated_tokens=past.generated_tokens + now.generated_tokens,
        )

    async def start(self) -> None:
        """Start the first engine; watched from then on. Raises what its start raises, and tries no second."""
        self._child = self._make()
        await self._start(self._child)
        self._up = True
        self._watching = asyncio.create_task(self._watch(), name=f"{self._name} watch")
        self._watching.add_done_callback(self._ended)

    async def close(self) -> None:
        """End the engine, in peace if it works."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._child is not None:
            await self._child.close()

    async def _watch(self) -> None:
        """Returns when there will be no engine any more."""
        while not self.given_up:
            assert self._child is not None
            began = time.monotonic()
            await self._child.lost.wait()
            if time.monotonic() - began >= self._pauses.steady:
                self._failures = 0
            self._count(self._child)
            self._down(self._child.fault)
            await self._child.kill()
            await self._replace()

    async def _replace(self) -> None:
        while not self._up:
            if self._failures >= self._most:
                self._give_up(f"{self.fault} (given up after {self._failures} restarts in a row)")
                return
            pause = self._pauses.before(self._failures)
            self._failures += 1
            logger.warning(
                "%s is lost: %s; it is started again in %g s (%d of %d)",
                *(self._name, self.fault, pause, self._failures, self._most),
            )
            await asyncio.sleep(pause)
            await self._try()

    async def _try(self) -> None:
        child = self._child = self._make()
        try:
            await self._start(child)
            async with self._gate:
                await self._renew(child)
                self._up, self._words = True, ""
                self.restarts += 1
                self._changed()
        except (NodeError, OSError) as error:
            self._down(child.fault or str(error))
            await child.kill()
            return
        logger.info("%s works again", self._name)

    def _count(self, child: EngineChild) -> None:
        now, past = child.busy, self._past
        self._past = Busy(
            preemptions=past.preemptions + now.preemptions,
            prompt_tokens=past.prompt_tokens + now.prompt_tokens,
            generated_tokens=past.generated_tokens + now.generated_tokens,
        )

    def _down(self, fault: str) -> None:
        self._up, self._words = False, fault
        self._changed()

    def _give_up(self, fault: str) -> None:
        self.given_up = True
        self._down(fault)
        logger.error("%s: %s", self._name, fault)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A watch that ends by a mistake of ours must not leave the others waiting."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._give_up(f"its watch ended with {error!r}: report this")
