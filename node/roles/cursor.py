"""The part of a checkpoint that is about data: which tasks come next, and what was counted.

A task whose work has a receipt is never leased again; a task that was only leased always is.
"""

from collections.abc import Iterable, Mapping

import msgspec

from ...protocol.leases import Lease, LeaseBook
from ...protocol.reputation import Reputation, ReputationSnapshot
from ..ledger import Ledger


class Cursor(msgspec.Struct, frozen=True):
    """As written into a checkpoint."""

    next_task: int
    requeued: list[int]
    verified_up_to: int
    """Arrival number of the last submission that the buffer or the model already contains."""
    history: list[tuple[int, float]]
    accepted: int
    rejected: dict[str, int]
    received: int
    delta_bytes: int
    full_bytes: int
    staleness_history: list[tuple[int, float]]
    staleness_max: int
    line: dict[str, float | None] = {}
    """Of the step's metrics: whoever goes on from it may find that it was not written."""
    reputations: dict[str, ReputationSnapshot] = {}
    """By node id (hex), as of `verified_up_to`; the ledger knows of what was judged later, too."""

    def restore_reputations(self, ledger: Ledger) -> dict[bytes, Reputation]:
        """Evidence about every worker, bans included: the ledger's where it is newer."""
        known = {
            bytes.fromhex(node): Reputation.restore(one) for node, one in self.reputations.items()
        }
        for node, (arrival, snapshot) in ledger.reputations().items():
            if arrival > self.verified_up_to:
                newer = msgspec.json.decode(snapshot, type=ReputationSnapshot)
                known[node] = Reputation.restore(newer)
        return known

    def restore_tasks(self, book: LeaseBook, inbox: Iterable[Lease]) -> None:
        """Lease again what was out then or leased since, but for what `inbox` has answered since."""
        answered = {task.index for lease in inbox for task in lease.tasks}
        book.next_task = max([self.next_task, *(index + 1 for index in answered)])
        leased = [*self.requeued, *range(self.next_task, book.next_task)]
        book.requeued.extend(index for index in leased if index not in answered)


def snapshots(reputations: Mapping[bytes, Reputation]) -> dict[str, ReputationSnapshot]:
    """As they are written into a cursor."""
    return {node.hex(): one.snapshot() for node, one in reputations.items()}
