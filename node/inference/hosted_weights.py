"""One policy, given to several engines from one file: checked by all, staged by all, then written by all.

An engine that is lost meanwhile is left out: it gets the newest policy when it comes back.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from ..ops.errors import EngineError, EngineLost
from ..weights.state import Changed, State
from .engine import Replica, WeightsFault, Written
from .handover import make_delta, shared_file

logger = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R", bound=Replica)


class Weights:
    """The policy that the engines hold; its methods are called one after the other."""

    def __init__(self) -> None:
        self.version = -1
        """The newest version that an engine has; -1 before the first load()."""
        self._state: State = {}
        self._placeless: frozenset[str] = frozenset()

    async def load(self, engines: Sequence[Replica], version: int, state: State) -> None:
        """Give all of them a whole state.

        Raises EngineError if it does not fit, and changes nothing then; EngineLost if none has it now.
        """
        async with shared_file(state) as path:
            await self._check(engines, path)
            written = await _of_all(engines, lambda one: one.load(version, path))
        self._hold(version, state, [one for _, one in written])

    async def update(
        self, engines: Sequence[Replica], version: int, state: State, changed: Changed
    ) -> None:
        """Give all of them what changed; an engine that cannot get it ready gets it whole.

        Raises as load().
        """
        if self.version < 0 or _shapes(state) != _shapes(self._state):
            await self.load(engines, version, state)  # which says what does not fit
            return
        delta = await asyncio.to_thread(make_delta, state, changed, self._placeless)
        async with shared_file(delta.tensors, delta.spans) as path:
            staged = await _of_all(engines, lambda one: one.stage(path))
            ready = [one for one, found in staged if not found.fault]
            refused = [one for one, found in staged if found.fault]
            written = await _of_all(ready, lambda one: one.write(version)) if ready else []
        if written:
            self._hold(version, state, [one for _, one in written])
        if refused:
            fault = next(found.fault for _, found in staged if found.fault)
            logger.warning("policy %d is loaded whole: %s", version, fault)
            await self.load(refused, version, state)

    async def renew(self, engine: Replica) -> None:
        """Give an engine that was started again the newest policy, if there is one. Raises EngineError."""
        if self.version >= 0:
            async with shared_file(self._state) as path:
                if fault := (await engine.check(path)).fault:
                    raise EngineError(f"the engine refuses the policy that it held: {fault}")
                await engine.load(self.version, path)

    async def _check(self, engines: Sequence[Replica], path: str) -> None:
        found: list[WeightsFault] = [
            one for _, one in await _of_all(engines, lambda one: one.check(path))
        ]
        if fault := next((one.fault for one in found if one.fault), ""):
            raise EngineError(f"the state does not fit the model: {fault}")
        placeless = frozenset().union(*(one.placeless for one in found))
        if placeless - self._placeless:
            logger.info("the engines keep these in forms of their own: %s", sorted(placeless))
        self._placeless = placeless

    def _hold(self, version: int, state: State, written: Sequence[Written]) -> None:
        self.version, self._state = version, state
        pause, writing = max(one.paused_s for one in written), max(one.writing_s for one in written)
        logger.info("policy %d loaded, paused for %.4f s, %.4f s to write", version, pause, writing)


async def _of_all(
    engines: Sequence[R], ask: Callable[[R], Coroutine[Any, Any, A]]
) -> list[tuple[R, A]]:
    """What those that were not lost answered. Raises their first error; EngineLost if all were lost."""
    answers = await asyncio.gather(*map(ask, engines), return_exceptions=True)
    found: list[tuple[R, A]] = []
    lost: EngineLost | None = None
    for engine, answer in zip(engines, answers, strict=True):
        if isinstance(answer, EngineLost):
            lost = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found.append((engine, answer))
    if not found:
        raise lost or EngineLost("no engine is there: wait until it is started again")
    return found


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in state.items()}
