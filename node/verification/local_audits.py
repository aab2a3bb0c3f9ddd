"""Audits on this node: LocalAudits gathers them, RoutedAuditor divides them, Portions survives their faults.

    AuditService.audit_rollouts(call)
      LocalAudits              audits that wait are made together: each version that several need is loaded once
        RoutedAuditor          rollouts of pipelines go to the embedded auditor, all others to vLLM
          HfAuditor | VllmAuditor    each with Portions: a fault that ends its process costs one item only

Invariants: an answer is in the order of its items; whether an audit was made with others does not change it; a
fault of one worker's text is never that of another's.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import TypeVar

from ...protocol.manifests import RunManifest
from ..errors import EngineError, NodeError
from ..ops.metrics import PhaseClock
from ..weights.state import State
from .auditor import AuditAnswer, AuditCall, AuditItem, Auditor, Measured, SameState, Unreadable

logger = logging.getLogger(__name__)

# An auditor that holds one version at a time loads several for almost every audit, as replies cross versions:
# 0.3 seconds of a GPU for each of 4B, where the reply itself is read in milliseconds. So after such loads the
# next audit may wait some time for others, unless many wait already.
ENOUGH_AUDITS = 8
"""Audits that are made without waiting for more."""
BATCH_TOKENS = 2**18
"""Tokens of audits that are made together, if there is more than one."""
PAUSE_PER_LOAD = 2.0
"""Seconds of waiting for each second in which the last batch loaded versions."""
MAX_PAUSE_S = 10.0
LOOK_S = 0.02
"""Interval of the looks whether audits may still wait."""

MOST_DEADLY = 4
"""Items of a portion that each end the process alone, after which the rest is skipped."""
LARGEST_PORTION = 2**18
"""Most tokens to prefill in one portion, counted once per version, where it is one message; one longer item is
still a portion."""
FIRST_PORTION = 2**13
"""Limit of the first portion, before the device's speed is known, tokens."""
SMALLEST_PORTION = 2**10
PORTION_PARTS = 4
"""Parts of a failed portion: it may have needed too much memory, or have one bad item."""
PORTION_TIME_SHARE = 4
"""Divisor of the time limit: a portion should take a quarter of it."""


class LocalAudits:
    """An AuditService with this node's auditor; as an Auditor it makes the waiting audits together.

    After a fault each is made alone: texts of one worker must not harm those of another.
    """

    def __init__(
        self,
        auditor: Auditor,
        clock: PhaseClock | None = None,
        *,
        patience_s: Callable[[], float] = lambda: 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the auditor; `clock` counts the seconds of audits as phase "audit", and those in which it
        loaded versions as "audit loading".

        An audit waits for others as long as `patience_s` says at most, which may change meanwhile: by default
        not at all.
        """
        self._auditor = auditor
        self._clock = clock or PhaseClock()
        self._patience_s = patience_s
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

    async def audit_rollouts(self, call: AuditCall) -> AuditAnswer:
        """See AuditService."""
        items = [item for target in call.chosen for item in target.items]
        measured = iter(await self.audit(items, call.states))
        return AuditAnswer([[next(measured) for _ in target.items] for target in call.chosen])

    async def close(self) -> None:
        """See Auditor."""
        self._closed = True
        self._arrived.set()
        await self._auditor.close()

    async def _gather(self) -> None:
        """Wait for more audits, as long as that pays."""
        began = self._now()
        while (left := min(self._pause_until, began + self._patience_s()) - self._now()) > 0:
            tokens = sum(call.tokens for call in self._calls)
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
                for call in batch:
                    call.is_alone = True
                await self._answer([first])
        finally:
            loading_s = self._auditor.loading_s - loaded
            self._clock.add("audit loading", loading_s)
            pause = min(PAUSE_PER_LOAD * loading_s, MAX_PAUSE_S)
            self._pause_until = self._now() + pause

    def _batch(self, first: "_Call") -> list["_Call"]:
        batch, states, tokens = [first], dict(first.states), first.tokens
        for call in () if first.is_alone else self._calls:
            if call is first or call.is_alone or not _agree(states, call.states):
                continue
            tokens += call.tokens
            if tokens > BATCH_TOKENS:
                break
            batch.append(call)
            states |= call.states
        return batch

    async def _answer(self, batch: Sequence["_Call"]) -> bool:
        """Audit a batch; return whether it had no fault. One of a single call is answered in any case."""
        items = [item for call in batch for item in call.items]
        states = {version: state for call in batch for version, state in call.states.items()}
        answers: list[Measured | Unreadable] | EngineError
        try:
            with self._clock.phase("audit"):
                answers = await self._auditor.audit(items, states)
        except EngineError as error:
            answers = error
        fault = isinstance(answers, EngineError) or any(
            isinstance(answer, Unreadable) and not answer.proof for answer in answers
        )
        if fault and len(batch) > 1:
            return False
        measured = iter(() if isinstance(answers, EngineError) else answers)
        for call in batch:
            call.answer = (
                answers
                if isinstance(answers, EngineError)
                else [next(measured) for _ in call.items]
            )
        self._calls = [call for call in self._calls if call.answer is None]
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


class RoutedAuditor:
    """Router of items with stage boundaries to an auditor that can measure them.

    The process of `staged` starts when needed, so a run without such items has one process. Where there are no
    pipelines, with exact numerics or a kept cache, `whole` gets all items.
    """

    def __init__(
        self, whole: Auditor, staged: Auditor, begin: Callable[[], None] = lambda: None
    ) -> None:
        """`begin` begins to start the process of `staged`."""
        self._whole = whole
        self._staged = staged
        self._begin = begin
        self._both = False

    @property
    def loading_s(self) -> float:
        """See Auditor."""
        return self._whole.loading_s + self._staged.loading_s

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        """See Auditor."""
        await self._whole.start(model_dir, run)
        if not run.proofs.vllm_alone:
            await self._staged.start(model_dir, run)
            self._both = True

    def expect_stages(self) -> None:
        """Begin to start what audits pipelines: one was planned, whose first verdicts would wait for it."""
        if self._both:
            self._begin()

    async def audit(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Measured | Unreadable]:
        """See Auditor."""
        staged = [self._both and bool(item.boundaries) for item in items]
        whole = [not is_staged for is_staged in staged]
        parts = [(self._whole, list(compress(items, whole)))]
        parts.append((self._staged, list(compress(items, staged))))
        answers = [
            iter(await auditor.audit(part, states) if part else []) for auditor, part in parts
        ]
        return [next(answers[is_staged]) for is_staged in staged]

    async def close(self) -> None:
        """See Auditor."""
        await asyncio.gather(self._whole.close(), self._staged.close())


# -- portions --------------------------------------------------------------------------------------

W = TypeVar("W")
"""Unit of work: an item, or one under a single version."""
T = TypeVar("T")
"""Result of a unit of work."""
Attempt = Callable[[Sequence[W]], Awaitable[Sequence[T]]]
"""Measures some units at once. Raises AuditFailed, or EngineError if none can ever be measured."""


class AuditFailed(NodeError):
    """The audit process ended, hung, or reports that it cannot measure these items."""


class Pace:
    """Sizes of portions, such that the device prefills each in a quarter of its time limit."""

    def __init__(self, timeout_s: float, largest: int = LARGEST_PORTION) -> None:
        self._timeout_s = timeout_s
        self._largest = largest
        self.limit = FIRST_PORTION

    def done(self, cost: int, took_s: float) -> None:
        """Adapt to a finished portion; a small one that was fast enough is ignored."""
        share_s = self._timeout_s / PORTION_TIME_SHARE
        if cost >= FIRST_PORTION // 2 or took_s > share_s:
            fair = int(cost / max(took_s, 1e-3) * share_s)
            self.limit = min(self._largest, max(SMALLEST_PORTION, fair))

    def failed(self) -> None:
        """Adapt to a portion that may have been too large."""
        self.limit = max(SMALLEST_PORTION, self.limit // PORTION_TIME_SHARE)


def prefill_costs(items: Sequence[AuditItem]) -> list[int]:
    """Return the tokens to prefill of each item, counted once per version that it wants."""
    return [len(item.token_ids) * len(item.wanted) for item in items]


def portion_size(costs: Sequence[int], limit: int = LARGEST_PORTION) -> int:
    """Return the number of units to take next: within `limit` by their costs, but at least one."""
    room = limit
    for number, cost in enumerate(costs):
        room -= cost
        if room < 0:
            return max(1, number)
    return len(costs)


class Portions:
    """Measurement in portions, which are split into smaller ones after a failure.

    For one audit at a time. After AuditFailed the next attempt must be able to work: it replaces a lost
    process.
    """

    def __init__(self, timeout_s: float, largest: int = LARGEST_PORTION) -> None:
        """Take the time limit of one attempt, seconds, and the most tokens of a portion."""
        self._pace = Pace(timeout_s, largest)

    async def measure(
        self,
        work: Sequence[W],
        costs: Sequence[int],
        attempt: Attempt[W, T],
        *,
        works: bool = False,
    ) -> list[T | Unreadable]:
        """Measure `work`; return the results in order.

        `costs` are its tokens to prefill. `works`: this audit has measured something before. Raises EngineError
        if nothing can be measured.
        """
        results: list[T | Unreadable] = []
        while len(results) < len(work):
            rest = costs[len(results) :]
            part = slice(len(results), len(results) + portion_size(rest, self._pace.limit))
            answers, answered = await self._portion(work[part], costs[part], attempt)
            works = works or answered
            if len(answers) > 1 and not works:
                fault = next(answer.detail for answer in answers if isinstance(answer, Unreadable))
                raise EngineError(
                    f"no audit succeeds ({fault}): check engine.device and free memory"
                )
            results += answers
        return results

    async def _portion(
        self, work: Sequence[W], costs: Sequence[int], attempt: Attempt[W, T]
    ) -> tuple[list[T | Unreadable], bool]:
        """Measure a portion at once; retry failures in quarters, down to single units.

        Returns the results, and whether any attempt was answered.
        """
        results: list[T | Unreadable] = []
        faults: list[str] = []
        answered = retried = False
        sizes = [len(work)]
        while sizes:
            size = sizes.pop(0)
            part = slice(len(results), len(results) + size)
            if len(faults) == MOST_DEADLY:
                results += [Unreadable("too many beside it ended the audit", proof=False)] * size
                continue
            began = time.monotonic()
            try:
                results += await attempt(work[part])
                answered = True
                if not retried:  # smaller ones tell nothing about the next portion
                    self._pace.done(sum(costs[part]), time.monotonic() - began)
            except AuditFailed as error:
                if size == 1 and retried:
                    faults.append(str(error))
                    results.append(Unreadable(faults[-1], proof=False))
                    continue
                if not retried:  # retries a single item, too: the process may have been lost before
                    retried = True
                    self._pace.failed()
                fewer = -(-size // PORTION_PARTS)
                logger.warning("%s; its %d branches are tried %d at a time", error, size, fewer)
                sizes[:0] = [min(fewer, size - first) for first in range(0, size, fewer)]
        return results, answered
