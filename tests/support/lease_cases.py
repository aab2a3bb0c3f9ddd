"""A lease policy with small leases, five nodes and grants, for tests of the lease book."""

from collections.abc import Callable
from typing import Any

from support.protocol_cases import NOW

from primerl.crypto.hashing import digest
from primerl.node.trainer.lease_book import (
    LeaseBook,
    LeaseOutcome,
    LeasePolicy,
    LeaseShare,
    MixtureShare,
)
from primerl.protocol.leases import Lease
from primerl.protocol.reputation import Trust

A, B, C, D, E = (bytes([n]) * 32 for n in (10, 11, 12, 13, 14))
SEED = digest(b"seed")
ALONE = LeaseShare()
"""Fully trusted, nobody waits."""
STRANGER = LeaseShare(Trust().low)


def task_digest(index: int) -> bytes:
    return digest(b"task %d" % index)


def policy(**changes: Any) -> LeasePolicy:
    """One environment, batches of 8 groups, leases of 3, one version of staleness, two leases a node."""
    values: dict[str, Any] = {
        "environments": (MixtureShare(4),),
        "groups_per_batch": 8,
        "groups_per_lease": 3,
        "max_off_policy_steps": 1,
        "leases_per_worker": 2,
        "timeout_s": 60.0,
        "max_bytes": 1000,
    }
    return LeasePolicy(**{**values, **changes})


def grant(
    book: LeaseBook,
    node: bytes = A,
    capacity: int = 100,
    now: float = NOW,
    digest_of: Callable[[int], bytes] = task_digest,
    share: LeaseShare = ALONE,
) -> Lease | None:
    return book.grant(
        node,
        version=7,
        capacity=capacity,
        digest_of=lambda _, index: digest_of(index),
        seed=SEED,
        now=now,
        share=share,
    )


def granted(
    book: LeaseBook,
    node: bytes = A,
    now: float = NOW,
    share: LeaseShare = ALONE,
    capacity: int = 100,
) -> Lease:
    lease = grant(book, node, now=now, share=share, capacity=capacity)
    assert lease is not None
    return lease


def indices(lease: Lease) -> list[int]:
    return [task.index for task in lease.tasks]


def keep(
    book: LeaseBook, lease: Lease, node: bytes, now: float, lost: float = 0.0, accepted: int = 1
) -> None:
    """A lease comes back and is judged at once; `lost` groups of it count against the node."""
    settled = book.settle(lease.lease_id, node, now)
    book.judge(settled, node, LeaseOutcome(len(settled.tasks), accepted, lost), now)


def fail(book: LeaseBook, lease: Lease, node: bytes, now: float) -> None:
    """A lease comes back with nothing."""
    keep(book, lease, node, now, lost=float(len(lease.tasks)), accepted=0)
