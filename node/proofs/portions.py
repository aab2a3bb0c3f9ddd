"""Cuts a long list of items into portions that an auditor takes in one go: its memory and its deadline.

Every item is in exactly one portion, and order is kept.
"""

from collections.abc import Mapping, Sequence

from ..errors import EngineError
from .auditor import AuditItem

PORTION = 2**17
"""Tokens times versions to prefill in one go; one longer item is still a portion."""


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


def portions(
    items: Sequence[AuditItem], others: Mapping[int, Sequence[int]], limit: int = PORTION
) -> list[list[AuditItem]]:
    """`items` in portions of about `limit` tokens times versions."""
    found: list[list[AuditItem]] = []
    room = 0
    for item in items:
        cost = len(item.token_ids) * max(1, len(wanted_versions(item, others)))
        if not found or cost > room:
            found.append([])
            room = limit
        found[-1].append(item)
        room -= cost
    return found


def check_versions(
    items: Sequence[AuditItem], held: Mapping[int, object], others: Mapping[int, Sequence[int]]
) -> None:
    """Raise EngineError unless every version that `items` need is held."""
    needed = {version for item in items for version in wanted_versions(item, others)}
    if missing := needed - held.keys():
        raise EngineError(f"the state of policy {min(missing)} is missing: hand it to audit(), too")
