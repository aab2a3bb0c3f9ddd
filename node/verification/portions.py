"""Cuts a long list of items into portions that an auditor takes in one go: its memory and its deadline.

Every item is in exactly one portion, and order is kept.
"""

from collections.abc import Mapping, Sequence

from ..ops.errors import EngineError
from .auditor import AuditItem

PORTION = 2**17
"""Tokens times versions to prefill in one go; one longer item is still a portion."""
FIRST = 2**13
"""Of the first portion, when nobody knows yet how fast the device is."""
LEAST = 2**10
SHARE = 4


class Pace:
    """How large a portion may be that a device prefills in a quarter of the time that it has."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.limit = FIRST

    def done(self, cost: int, took_s: float) -> None:
        """A portion of that cost took so long; a small one says little of larger ones."""
        if cost >= FIRST // 2 or took_s > self._timeout_s / SHARE:
            fair = int(cost / max(took_s, 1e-3) * self._timeout_s / SHARE)
            self.limit = min(PORTION, max(LEAST, fair))

    def failed(self) -> None:
        """A portion was too much, perhaps."""
        self.limit = max(LEAST, self.limit // SHARE)


def wanted_versions(item: AuditItem, others: Mapping[int, Sequence[int]]) -> list[int]:
    """Ascending: the versions that an item claims, and those that it is compared with beside."""
    claimed = set(item.versions)
    return sorted(claimed.union(*(others.get(version, ()) for version in claimed)))


def other_versions(item: AuditItem, others: Mapping[int, Sequence[int]]) -> list[int]:
    """Ascending: the versions that a worker might have used in place of those that it claims.

    Each stands for the whole branch; the only version that a branch claims is none of them.
    """
    claimed = set(item.versions)
    found = set[int]().union(*(others.get(version, ()) for version in claimed))
    return sorted(found if len(claimed) > 1 else found - claimed)


def cost(item: AuditItem, others: Mapping[int, Sequence[int]]) -> int:
    """Tokens times versions to prefill."""
    return len(item.token_ids) * max(1, len(wanted_versions(item, others)))


def first_portion(
    items: Sequence[AuditItem], others: Mapping[int, Sequence[int]], limit: int = PORTION
) -> int:
    """How many of `items` to take next: about `limit` tokens times versions, but one at least."""
    room = limit
    for number, item in enumerate(items):
        room -= cost(item, others)
        if room < 0:
            return max(1, number)
    return len(items)


def check_versions(
    items: Sequence[AuditItem], held: Mapping[int, object], others: Mapping[int, Sequence[int]]
) -> None:
    """Raise EngineError unless every version that `items` need is held."""
    needed = {version for item in items for version in wanted_versions(item, others)}
    if missing := needed - held.keys():
        raise EngineError(f"the state of policy {min(missing)} is missing: hand it to audit(), too")
