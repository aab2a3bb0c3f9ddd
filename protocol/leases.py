"""Leases: which tasks a node may roll out, with which seeds, until when. Sans I/O; time is an argument.

The book is the back-pressure: work in the system never exceeds what can be trained within the staleness
bound, so a lease that is honoured in time is not stale when it comes back.
"""

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated

import msgspec

from ..crypto.hashing import Digest, derive
from .errors import Reason, RemoteProtocolError
from .manifests import Version


class TaskRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A task by index, and by digest so that a differing environment is noticed before work is done."""

    index: Version
    digest: Digest


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one node is asked to generate; sealed by the trainer to that node."""

    lease_id: Version
    tasks: Annotated[tuple[TaskRef, ...], msgspec.Meta(min_length=1, max_length=4096)]
    group_size: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    seed: Digest
    """Fresh randomness of the trainer, so that nobody computes a sample before the lease exists."""
    min_version: Version
    """Generate with this policy version or a newer one."""
    deadline: Annotated[float, msgspec.Meta(ge=0)]
    """Unix seconds."""
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**40)]
    term: Version = 0
    """Term of min_version: a version of a term that was left is another policy of the same number."""


def sample_seed(
    run: bytes, lease: Lease, node: bytes, task: bytes, index: int, turn: int = 0
) -> int:
    """The sampling seed (63 bits) of sample `index` of `task`: a hash of everything that it is bound to."""
    name = derive(
        "sample seed",
        run,
        lease.lease_id.to_bytes(8, "big"),
        lease.seed,
        node,
        task,
        index.to_bytes(4, "big"),
        turn.to_bytes(4, "big"),
    )
    return int.from_bytes(name[:8], "big") >> 1


@dataclass
class Held:
    """A lease that is out."""

    lease: Lease
    node: bytes
    granted: float


@dataclass(frozen=True)
class LeasePolicy:
    """How much is handed out. Sizes are in groups."""

    group_size: int
    groups_per_batch: int
    groups_per_lease: int
    max_off_policy_steps: int
    leases_per_worker: int
    timeout_s: float
    max_bytes: int


@dataclass
class LeaseBook:
    """Which leases are out, which tasks come next, and what may be granted now."""

    policy: LeasePolicy
    next_lease: int = 0
    next_task: int = 0
    requeued: deque[int] = field(default_factory=deque[int])
    """Tasks of expired leases; they go out before new ones."""
    held: dict[int, Held] = field(default_factory=dict[int, Held])
    expired: int = 0

    def outstanding_groups(self) -> int:
        """Groups that are leased and not yet returned."""
        return sum(len(held.lease.tasks) for held in self.held.values())

    def capacity(self, *, waiting_groups: int, training: bool) -> int:
        """Groups that may still be granted.

        `waiting_groups` have come back and wait to be trained; `training` says that a batch is being trained,
        so that whatever is granted now is at least one version old when its turn comes. One batch is made
        while one is trained, never two: more would only make rollouts older, whatever the bound allows. With a
        bound of 0 nothing is made while a batch is trained.
        """
        overlap = min(self.policy.max_off_policy_steps, 1)
        batches = overlap + (0 if training else 1)
        return batches * self.policy.groups_per_batch - waiting_groups - self.outstanding_groups()

    def grant(
        self,
        node: bytes,
        *,
        version: int,
        capacity: int,
        digest_of: Callable[[int], bytes],
        seed: bytes,
        now: float,
        term: int = 0,
    ) -> Lease | None:
        """The next lease for `node`, or None when it holds enough or the system does."""
        mine = sum(1 for held in self.held.values() if held.node == node)
        size = min(capacity, self.policy.groups_per_lease)
        if mine >= self.policy.leases_per_worker or size < 1:
            return None
        # Nothing is taken before every digest is known: a task that cannot be made is not lost.
        tasks = tuple(TaskRef(index, digest_of(index)) for index in self._next_tasks(size))
        lease = Lease(
            lease_id=self.next_lease,
            tasks=tasks,
            group_size=self.policy.group_size,
            seed=seed,
            min_version=version,
            deadline=now + self.policy.timeout_s,
            max_bytes=self.policy.max_bytes,
            term=term,
        )
        self._take(size)
        self.next_lease += 1
        self.held[lease.lease_id] = Held(lease, node, now)
        return lease

    def settle(self, lease_id: int, node: bytes) -> Lease:
        """Take back a lease whose work has arrived.

        Raises:
            RemoteProtocolError: UNKNOWN_LEASE, WRONG_RECIPIENT; LEASE_DONE is the ledger's to say.
        """
        held = self.held.get(lease_id)
        if held is None:
            raise RemoteProtocolError(Reason.UNKNOWN_LEASE, f"lease {lease_id} is not out")
        if held.node != node:
            raise RemoteProtocolError(Reason.WRONG_RECIPIENT, f"lease {lease_id} is another node's")
        del self.held[lease_id]
        return held.lease

    def expire(self, now: float) -> list[Held]:
        """Leases past their deadline; their tasks will be leased again."""
        late = [held for held in self.held.values() if held.lease.deadline < now]
        self._take_back(late)
        return late

    def release(self, node: bytes) -> list[Held]:
        """Leases of a node that said goodbye; their tasks will be leased again."""
        left = [held for held in self.held.values() if held.node == node]
        self._take_back(left)
        return left

    def release_lost(self, node: bytes, holding: Container[int]) -> list[Held]:
        """Leases of a node that it does not hold: what granted them never reached it, or it gave up."""
        lost = [
            held
            for number, held in self.held.items()
            if held.node == node and number not in holding
        ]
        self._take_back(lost)
        return lost

    def _take_back(self, leases: list[Held]) -> None:
        for held in leases:
            del self.held[held.lease.lease_id]
            self.requeued.extend(task.index for task in held.lease.tasks)
        self.expired += len(leases)

    def _next_tasks(self, count: int) -> list[int]:
        again = list(islice(self.requeued, count))
        fresh = count - len(again)
        return [*again, *range(self.next_task, self.next_task + fresh)]

    def _take(self, count: int) -> None:
        again = min(count, len(self.requeued))
        for _ in range(again):
            self.requeued.popleft()
        self.next_task += count - again
