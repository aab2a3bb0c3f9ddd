"""Audits that wait are made together, so that each policy version that several need is loaded once.

An auditor that holds one version at a time loads several for almost every audit, as replies cross versions: 0.3
seconds of a GPU for each of 4B, where the reply itself is read in milliseconds. So after such loads the next
audit may wait some time for others, unless many wait already.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ...protocol.manifests import RunManifest
from ..errors import EngineError
from ..ops.metrics import PhaseClock
from ..weights.state import State
from .auditor import AuditItem, Auditor, Measured, SameState, Unreadable

logger = logging.getLogger(__name__)

ENOUGH_AUDITS = 8
"""Audits that are made without waiting for more."""
BATCH_TOKENS = 2**18
"""Tokens of audits that are made together, if there is more than one."""
PAUSE_PER_LOAD = 2.0
"""Seconds of waiting for each second in which the last batch loaded versions."""
MAX_PAUSE_S = 10.0
LOOK_S = 0.1
"""Interval of the looks whether audits may still wait."""


class BatchedAuditor:
    """An Auditor that makes the waiting audits of another one together.

    After a fault each is made alone: texts of one worker must not harm those of another.
    """

    def __init__(
        self,
        auditor: Auditor,
        clock: PhaseClock | None = None,
        *,
        may_wait: Callable[[], bool] = lambda: False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the auditor; `clock` counts the seconds of audits as phase "audit".

        Audits wait for others only while `may_wait` returns True: by default never.
        """
        self._auditor = auditor
        self._clock = clock or PhaseClock()
        self._may_wait = may_wait
        self._now = now
        self._calls: list[_Call] = []
        """Audits without an answer, in order of arrival."""
        self._arrived = asyncio.Event()
        self._turn = asyncio.Lock()
        self._pause_until = -float("inf")
        self._closed = False

    @property
    def loading_s(self) -> float:
        """See Auditor."""
        return self._auditor.loading_s

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        """See Auditor."""
        await self._auditor.start(model_dir, run)

    async def audit(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Measured | Unreadable]:
        """See Auditor."""
        own = _Call(items, states)
        self._calls.append(own)
        self._arrived.set()
        try:
            async with self._turn:
                if own.answer is None:
                    if not own.is_alone:
                        await self._gather()
                    await self._make(own)
        finally:  # also when cancelled
            if own in self._calls:
                self._calls.remove(own)
        assert own.answer is not None
        if isinstance(own.answer, EngineError):
            raise own.answer
        return own.answer

    async def close(self) -> None:
        """See Auditor."""
        self._closed = True
        self._arrived.set()
        await self._auditor.close()

    async def _gather(self) -> None:
        """Wait for more audits, as long as that pays."""
        while (left := self._pause_until - self._now()) > 0 and self._may_wait():
            tokens = sum(one.tokens for one in self._calls)
            if len(self._calls) >= ENOUGH_AUDITS or tokens >= BATCH_TOKENS or self._closed:
                return
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, LOOK_S)):
                    await self._arrived.wait()

    async def _make(self, first: "_Call") -> None:
        """Answer `first`, and the waiting audits that can be made with it."""
        loaded = self._auditor.loading_s
        try:
            batch = self._batch(first)
            if not await self._answer(batch) and len(batch) > 1:
                logger.warning("%d audits together had a fault: each is made alone", len(batch))
                for one in batch:
                    one.is_alone = True
                await self._answer([first])
        finally:
            pause = min(PAUSE_PER_LOAD * (self._auditor.loading_s - loaded), MAX_PAUSE_S)
            self._pause_until = self._now() + pause

    def _batch(self, first: "_Call") -> list["_Call"]:
        batch, states, tokens = [first], dict(first.states), first.tokens
        for one in () if first.is_alone else self._calls:
            if one is first or one.is_alone or not _agree(states, one.states):
                continue
            tokens += one.tokens
            if tokens > BATCH_TOKENS:
                break
            batch.append(one)
            states |= one.states
        return batch

    async def _answer(self, batch: Sequence["_Call"]) -> bool:
        """Audit a batch; return whether it had no fault. One of a single call is answered in any case."""
        items = [item for one in batch for item in one.items]
        states = {version: state for one in batch for version, state in one.states.items()}
        found: list[Measured | Unreadable] | EngineError
        try:
            with self._clock.phase("audit"):
                found = await self._auditor.audit(items, states)
        except EngineError as error:
            found = error
        fault = isinstance(found, EngineError) or any(
            isinstance(one, Unreadable) and not one.proof for one in found
        )
        if fault and len(batch) > 1:
            return False
        measured = iter(() if isinstance(found, EngineError) else found)
        for one in batch:
            one.answer = (
                found if isinstance(found, EngineError) else [next(measured) for _ in one.items]
            )
        self._calls = [one for one in self._calls if one.answer is None]
        return not fault


class _Call:
    """The arguments of an audit, and its answer."""

    def __init__(self, items: Sequence[AuditItem], states: Mapping[int, State]) -> None:
        self.items = items
        self.states = states
        self.tokens = sum(len(item.token_ids) for item in items)
        self.is_alone = False
        """Whether it is made alone: some text had a fault when it was made with others."""
        self.answer: list[Measured | Unreadable] | EngineError | None = None


def _agree(states: Mapping[int, State], more: Mapping[int, State]) -> bool:
    """Return whether versions in both have the same state."""
    return all(
        state is states.get(version, state) or SameState(states[version]).matches(state)
        for version, state in more.items()
    )
