"""The part of a checkpoint that is about data: which tasks come next, and what was counted.

A task whose work has a receipt is never leased again; a task that was only leased always is.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from ...protocol.leases import Lease, LeaseBook
from ...protocol.reputation import Reputation, ReputationSnapshot
from ...protocol.rollouts import Submission
from ..ops.errors import StorageError
from ..storage.ledger import Ledger
from ..training.checkpoint import Checkpoints

KEY = "term"
LEASES_PER_BOOT = 32
"""Bits of a lease id that count within one start of the trainer; those above count the starts."""
TERMS = 16
"""That are remembered: leases of earlier ones ran out long ago."""


class ChainEpoch(msgspec.Struct, frozen=True):
    """Where the current term began."""

    number: int = 0
    version: int = 0
    first_lease: int = 0
    before: tuple[tuple[int, int], ...] = ()
    """(version, first lease) of the terms before it, as far as they are remembered."""

    def voids(self, submission: Submission, lease: Lease) -> bool:
        """Whether this was leased before a term began and made by a version that is another one since."""
        claimed = max(_claims(submission), default=0)
        starts = (*self.before, (self.version, self.first_lease))
        return any(lease.lease_id < first and claimed > version for version, first in starts)


def current_term(ledger: Ledger, order: tuple[int, int], boot: int) -> ChainEpoch:
    """The term of `order`, the (term, version) that start number `boot` goes on from; remembered."""
    known = ledger.get(KEY)
    term = msgspec.json.decode(known, type=ChainEpoch) if known else ChainEpoch()
    if order[0] != term.number:
        before = (*term.before, (term.version, term.first_lease))[-TERMS:]
        term = ChainEpoch(*order, boot << LEASES_PER_BOOT, before)
        ledger.set(KEY, msgspec.json.encode(term))
    return term


def _claims(submission: Submission) -> Iterator[int]:
    for group in submission.groups:
        for rollout in group.rollouts:
            for branch in rollout.branches:
                yield branch.policy_last


@dataclass
class Progress:
    """What has happened so far; `status` and the summary read it."""

    step: int = 0
    reward: float | None = None
    staleness: float | None = None
    history: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    staleness_history: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    mismatch_kl: list[float] = field(default_factory=list[float])
    staleness_max: int = 0
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter[str])
    received: int = 0
    """Rollouts that arrived."""
    late: int = 0
    """Batches that did not come in time, since something was learned last."""
    zero_advantage: int = 0
    """Batches since then whose groups had equal rewards each."""
    equal_rewards: tuple[float, float] = (0.0, 0.0)
    """Lowest and highest reward in the last of these."""
    _begun: tuple[int, int, Counter[str]] = (0, 0, Counter())
    """Received, accepted and rejected when the batch was begun that is collected now."""

    @property
    def empty(self) -> int:
        """Batches in a row that there was nothing to learn from."""
        return self.late + self.zero_advantage

    def begin_batch(self) -> None:
        """From now on another batch is collected."""
        self._begun = (self.received, self.accepted, Counter(self.rejected))

    def all_rejected(self) -> Counter[str]:
        """Reasons, where everything that came for this batch was rejected."""
        received, accepted, rejected = self._begun
        if self.received == received or self.accepted > accepted:
            return Counter()
        return self.rejected - rejected


class TrainerState(msgspec.Struct, frozen=True):
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
    ledger: str = ""
    """Id of the ledger that was written at the same time, hex; and what it knew of then."""
    arrivals: int = 0
    boots: int = 0
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


def check_ledger(checkpoints: Checkpoints, ledger: Ledger) -> None:
    """Refuse to go on from checkpoints with a ledger that is not theirs, or does not know all that they knew.

    What it receipted then would be taken for what the checkpoint contains, and lost; numbers of leases, heads
    and verdicts that are out would be given again. Call it before this start is counted. Raises StorageError.
    """
    for step in reversed(checkpoints.steps()):
        try:
            cursor = msgspec.json.decode(checkpoints.glance(step, "cursor"), type=TrainerState)
        except (OSError, msgspec.DecodeError):
            continue  # whoever reads all of it will say what is wrong with it
        why = _differs(cursor, ledger)
        if why:
            home = checkpoints.directory.parent
            raise StorageError(
                f"{ledger.path} is not the ledger of checkpoint {step}: {why}. Put back this run's newest "
                "ledger.db (and its ledger.db-wal), or begin a new run from the checkpoint: --name NEW "
                f"--resume.dir {home}"
            )
        return


def _differs(cursor: TrainerState, ledger: Ledger) -> str:
    """Why a ledger does not belong to a checkpoint, in a few words, or ""."""
    arrivals, boots = ledger.last_arrival(), ledger.boots()
    if not arrivals and not boots:
        return "it is empty"
    if cursor.ledger and cursor.ledger != ledger.ledger_id():
        return "it is of another run, or was made anew"
    # a checkpoint from before there were ids knows of the last submission that it contains
    known = max(cursor.arrivals, cursor.verified_up_to)
    if arrivals < known or boots < cursor.boots:
        return (
            f"it is older, and knows of {arrivals} submissions and {boots} starts, the checkpoint of "
            f"{known} and {cursor.boots}"
        )
    return ""


def snapshots(reputations: Mapping[bytes, Reputation]) -> dict[str, ReputationSnapshot]:
    """As they are written into a cursor."""
    return {node.hex(): one.snapshot() for node, one in reputations.items()}
