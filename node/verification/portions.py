"""Audit in portions, so that a fault that ends the auditor's process costs one item only.

HfAuditor and VllmAuditor differ in their processes. This file is their common part: sizes of requests, retries
after a failure, and when to give up.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from ..errors import EngineError, NodeError
from .auditor import AuditItem, Unreadable

logger = logging.getLogger(__name__)

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
        found: list[T | Unreadable] = []
        while len(found) < len(work):
            rest = costs[len(found) :]
            part = slice(len(found), len(found) + portion_size(rest, self._pace.limit))
            answers, answered = await self._portion(work[part], costs[part], attempt)
            works = works or answered
            if len(answers) > 1 and not works:
                fault = next(one.detail for one in answers if isinstance(one, Unreadable))
                raise EngineError(
                    f"no audit succeeds ({fault}): check engine.device and free memory"
                )
            found += answers
        return found

    async def _portion(
        self, work: Sequence[W], costs: Sequence[int], attempt: Attempt[W, T]
    ) -> tuple[list[T | Unreadable], bool]:
        """Measure a portion at once; retry failures in quarters, down to single units.

        Returns the results, and whether any attempt was answered.
        """
        found: list[T | Unreadable] = []
        faults: list[str] = []
        answered = retried = False
        sizes = [len(work)]
        while sizes:
            size = sizes.pop(0)
            part = slice(len(found), len(found) + size)
            if len(faults) == MOST_DEADLY:
                found += [Unreadable("too many beside it ended the audit", proof=False)] * size
                continue
            began = time.monotonic()
            try:
                found += await attempt(work[part])
                answered = True
                if not retried:  # smaller ones tell nothing about the next portion
                    self._pace.done(sum(costs[part]), time.monotonic() - began)
            except AuditFailed as error:
                if size == 1 and retried:
                    faults.append(str(error))
                    found.append(Unreadable(faults[-1], proof=False))
                    continue
                if not retried:  # retries a single item, too: the process may have been lost before
                    retried = True
                    self._pace.failed()
                fewer = -(-size // PORTION_PARTS)
                logger.warning("%s; its %d branches are tried %d at a time", error, size, fewer)
                sizes[:0] = [min(fewer, size - first) for first in range(0, size, fewer)]
        return found, answered
