"""Audits in portions, so that what ends the process behind an auditor costs one item and not its neighbours.

HfAuditor and VllmAuditor differ in the process that they ask; this is what they share: how much is asked at
once, what follows a failure, and when none of it is worth another try.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from ..ops.errors import EngineError, NodeError
from .auditor import AuditItem, Unreadable, wanted_versions

logger = logging.getLogger(__name__)

MOST_DEADLY = 4
"""After this many items of a portion that each end the process alone, the rest is not tried."""
LARGEST_PORTION = 2**18
"""Tokens to prefill in one go, once for each version; one longer item is still a portion."""
FIRST_PORTION = 2**13
"""The same for the first portion, before the device's speed is known."""
SMALLEST_PORTION = 2**10
PORTION_PARTS = 4
"""A portion that fails is split in four: it may have wanted too much memory, or have one bad item."""
PORTION_TIME_SHARE = 4
"""A portion should take this fraction (1/4) of the time that it has."""

W = TypeVar("W")
"""What is measured: an item, or one under a single version."""
T = TypeVar("T")
"""The result of it."""
Attempt = Callable[[Sequence[W]], Awaitable[Sequence[T]]]
"""Measures some at once. Raises AuditFailed, and EngineError where none can ever be measured."""


class AuditFailed(NodeError):
    """The process that audits ended, hung, or says that it cannot measure these items."""


class Pace:
    """Sizes portions so that the device prefills each in a quarter of the time that it has."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.limit = FIRST_PORTION

    def done(self, cost: int, took_s: float) -> None:
        """Learn from a finished portion; a small one says little of larger ones."""
        share_s = self._timeout_s / PORTION_TIME_SHARE
        if cost >= FIRST_PORTION // 2 or took_s > share_s:
            fair = int(cost / max(took_s, 1e-3) * share_s)
            self.limit = min(LARGEST_PORTION, max(SMALLEST_PORTION, fair))

    def failed(self) -> None:
        """Learn from a portion that may have been too large."""
        self.limit = max(SMALLEST_PORTION, self.limit // PORTION_TIME_SHARE)


def prefill_costs(items: Sequence[AuditItem], others: Mapping[int, Sequence[int]]) -> list[int]:
    """Tokens to prefill of each item, under all versions that it needs."""
    return [len(item.token_ids) * len(wanted_versions(item, others)) for item in items]


def portion_size(costs: Sequence[int], limit: int = LARGEST_PORTION) -> int:
    """Count those to take next, by what each costs: `limit` together, but one at least."""
    room = limit
    for number, cost in enumerate(costs):
        room -= cost
        if room < 0:
            return max(1, number)
    return len(costs)


class Portions:
    """Measures portion by portion, and in smaller ones where a portion fails.

    One audit at a time. After AuditFailed the next attempt must be able to work: it replaces a process that is
    lost.
    """

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` is the time that one attempt has."""
        self._pace = Pace(timeout_s)

    async def measure(
        self,
        work: Sequence[W],
        costs: Sequence[int],
        attempt: Attempt[W, T],
        *,
        works: bool = False,
    ) -> list[T | Unreadable]:
        """The results of `work`, in order; `costs` are its tokens to prefill. `works`: this audit has measured
        something before.

        Raises EngineError when nothing can be measured.
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
        """Measure a portion at once; what fails goes on in quarters, down to single ones. Also whether any was
        answered."""
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
                if not retried:  # smaller ones say nothing of what the next portion may want
                    self._pace.done(sum(costs[part]), time.monotonic() - began)
            except AuditFailed as error:
                if size == 1 and retried:
                    faults.append(str(error))
                    found.append(Unreadable(faults[-1], proof=False))
                    continue
                if not retried:  # of a single item, too: the process may have been lost before
                    retried = True
                    self._pace.failed()
                fewer = -(-size // PORTION_PARTS)
                logger.warning("%s; its %d branches are tried %d at a time", error, size, fewer)
                sizes[:0] = [min(fewer, size - first) for first in range(0, size, fewer)]
        return found, answered
