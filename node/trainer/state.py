"""The trainer's state in a checkpoint: the next tasks, counts and reputations.

Invariant: a task whose submission has a receipt is leased again only if its verdict finds the group lost; a
task that was only leased always is.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ...crypto.hashing import short
from ...protocol.leases import Lease
from ...protocol.reputation import Reputation, ReputationSnapshot
from ...protocol.rollouts import Submission
from ..errors import BAD_FILE, StorageError
from ..ops.metrics import PhaseClock
from ..sft.data import DataCursor
from ..storage.ledger import Ledger, readable
from ..training.buffer import BufferSnapshot
from ..training.checkpoint import Checkpoints
from ..training.resume_points import ResumePoints
from .lease_book import LeaseBook, TaskQueue

KEY = "term"
LEASES_PER_BOOT = 32
"""Bits of a lease id that count within one start of the trainer; those above count the starts."""
MAX_AUDITED = 1000
EPOCHS = 16
"""Number of epochs that are remembered; leases of earlier ones have expired."""


class ChainEpoch(msgspec.Struct, frozen=True):
    """The version and lease at which the current epoch of the chain began."""

    number: int = 0
    version: int = 0
    first_lease: int = 0
    before: tuple[tuple[int, int], ...] = ()
    """(version, first lease) of the earlier epochs."""

    def voids(self, submission: Submission, lease: Lease) -> bool:
        """Return whether a submission was leased before an epoch but made by a replaced version."""
        claimed = max(_claims(submission), default=0)
        starts = (*self.before, (self.version, self.first_lease))
        return any(lease.lease_id < first and claimed > version for version, first in starts)


def current_epoch(ledger: Ledger, order: tuple[int, int], boot: int) -> ChainEpoch:
    """Load or begin the epoch of `order`, the (epoch, version) that start `boot` continues."""
    known = ledger.get(KEY)
    with readable(ledger.path, "epoch"):
        epoch = msgspec.json.decode(known, type=ChainEpoch) if known else ChainEpoch()
    if order[0] != epoch.number:
        before = (*epoch.before, (epoch.version, epoch.first_lease))[-EPOCHS:]
        epoch = ChainEpoch(*order, boot << LEASES_PER_BOOT, before)
        ledger.set(KEY, msgspec.json.encode(epoch))
    return epoch


def _claims(submission: Submission) -> Iterator[int]:
    for group in submission.groups:
        for rollout in group.rollouts:
            for branch in rollout.branches:
                yield branch.policy_last


@dataclass
class Progress:
    """Counts of the run so far, for `status` and the summary."""

    step: int = 0
    training: bool = False
    """Whether a batch is being trained now."""
    verified_up_to: int = 0
    """Arrival number of the last submission that was judged."""
    used: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Workers of later submissions whose work is used already, by arrival number."""
    clock: PhaseClock = field(default_factory=PhaseClock)
    """Seconds by phase."""
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    """Mean reward of each environment, in the last batch with groups of it."""
    accepted_of: Counter[str] = field(default_factory=Counter[str])
    """Accepted rollouts by environment."""
    rejected_of: Counter[str] = field(default_factory=Counter[str])
    """Rejected rollouts by environment."""
    staleness: float | None = None
    history: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    staleness_history: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    mismatch_kl: list[float] = field(default_factory=list[float])
    staleness_max: int = 0
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter[str])
    received: int = 0
    """Rollouts received."""
    verdict_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=1024))
    """Seconds from the arrival of each submission to its verdict, since the step before."""
    audited: deque[tuple[str, int]] = field(
        default_factory=lambda: deque[tuple[str, int]](maxlen=MAX_AUDITED)
    )
    """Submissions that were audited lately, and the newest policy version that sampled any of each."""
    late: int = 0
    """Batches that timed out since the last trained one."""
    zero_advantage: int = 0
    """Batches since then in which every group had equal rewards."""
    equal_rewards: tuple[float, float] = (0.0, 0.0)
    """Lowest and highest reward in the last of these."""
    skipped: int = 0
    """Steps so far whose gradient was not finite."""
    skipping: str = ""
    """Reason why steps are skipped, with a remedy; else empty."""
    _begun: tuple[int, int, Counter[str]] = (0, 0, Counter())
    """Received, accepted and rejected when collection of the current batch began."""

    @property
    def empty(self) -> int:
        """Batches in a row without a learning signal."""
        return self.late + self.zero_advantage

    def begin_batch(self) -> None:
        """Begin the counts of another batch."""
        self._begun = (self.received, self.accepted, Counter(self.rejected))

    def all_rejected(self) -> Counter[str]:
        """Return rejections by reason, if everything received for this batch was rejected."""
        received, accepted, rejected = self._begun
        if self.received == received or self.accepted > accepted:
            return Counter()
        return self.rejected - rejected


class TaskPosition(msgspec.Struct, frozen=True):
    """Position of the leases in an environment's tasks."""

    next_task: int = 0
    requeued: list[int] = []
    """Earlier tasks that have to be leased again."""


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's part of a checkpoint."""

    tasks: dict[str, TaskPosition] = {}
    """Positions by the environment's name."""
    verified_up_to: int
    """Arrival number of the last submission that was judged: buffer or model contain it and those before."""
    used: list[int] = []
    """Arrival numbers of the later ones that they contain, too."""
    history: list[tuple[int, float]]
    accepted: int
    rejected: dict[str, int]
    accepted_of: dict[str, int] = {}
    rejected_of: dict[str, int] = {}
    received: int
    delta_bytes: int
    full_bytes: int
    staleness_history: list[tuple[int, float]]
    staleness_max: int
    line: dict[str, float | None] = {}
    """The step's metrics, in case the log lacks them when the run resumes."""
    ledger: str = ""
    """Id of the ledger that belongs to the checkpoint, hex; what it held then follows."""
    arrivals: int = 0
    boots: int = 0
    head: tuple[int, int] = (0, 0)
    """(epoch, version) of its newest head."""
    reputations: dict[str, ReputationSnapshot] = {}
    """Reputations by node id (hex), as of `verified_up_to`; the ledger has newer ones."""
    curriculum: dict[str, dict[int, float]] = {}
    """Curriculum.rewards by environment."""
    baselines: dict[str, dict[str, float]] = {}
    """CreditedBatch.baselines after the step."""
    skipped: int = 0
    """Steps so far whose gradient was not finite, and those since the last one that learned."""
    skipped_in_a_row: int = 0
    sft: DataCursor = DataCursor()
    """Position in the demonstrations of training.sft."""
    sft_identity: str = ""
    """Identity of the data of the `sft` position; empty without training.sft."""

    def restore_reputations(self, ledger: Ledger) -> dict[bytes, Reputation]:
        """Restore the evidence about every worker, bans included; the ledger's if it is newer."""
        names = tuple(self.tasks)
        known = {
            bytes.fromhex(node): Reputation.restore(saved, names)
            for node, saved in self.reputations.items()
        }
        for node, (arrival, snapshot) in ledger.reputations().items():
            if arrival > self.verified_up_to:
                with readable(ledger.path, f"reputation of {short(node)}"):
                    newer = msgspec.json.decode(snapshot, type=ReputationSnapshot)
                    known[node] = Reputation.restore(newer, names)
        return known

    def positions(self, environments: Sequence[str]) -> dict[str, TaskPosition]:
        """Return the task position of each of these environments; a new one begins at task 0."""
        return {name: self.tasks.get(name, TaskPosition()) for name in environments}

    def restore_tasks(
        self, book: LeaseBook, environments: Sequence[str], answered: Iterable[Lease]
    ) -> None:
        """Queue again all tasks leased then or since, except those of `answered` leases.

        `environments` are the names of the run's environments, in its order.
        """
        done: dict[int, Counter[int]] = defaultdict(Counter)
        for lease in answered:
            done[lease.environment].update(task.index for task in lease.tasks)
        for number, position in enumerate(self.positions(environments).values()):
            queue, own = book.tasks[number], done[number]
            if queue.draw is not None:
                _restore_draws(queue, position, own)
                continue
            queue.next_task = max([position.next_task, *(index + 1 for index in own)])
            leased = [*position.requeued, *range(position.next_task, queue.next_task)]
            queue.requeued.extend(index for index in leased if index not in own)


def _restore_draws(queue: TaskQueue, position: TaskPosition, done: Counter[int]) -> None:
    """Restore a queue of drawn tasks without repeating answered draws.

    Draws that were leased since the checkpoint are unknown.
    """
    left = Counter(done)
    for index in position.requeued:
        if left[index]:
            left[index] -= 1
        else:
            queue.requeued.append(index)
    queue.next_task = position.next_task + left.total()


def positions(book: LeaseBook, environments: Sequence[str]) -> dict[str, TaskPosition]:
    """Return where the tasks of each environment continue; leased tasks are leased again first."""
    out: dict[int, list[int]] = {}
    for grant in book.held.values():
        out.setdefault(grant.lease.environment, []).extend(task.index for task in grant.lease.tasks)
    return {
        name: TaskPosition(queue.next_task, [*queue.requeued, *out.get(number, ())])
        for number, (name, queue) in enumerate(zip(environments, book.tasks, strict=True))
    }


def check_ledger(checkpoints: Checkpoints, points: ResumePoints, ledger: Ledger) -> None:
    """Raise StorageError for a ledger of another run, or one older than the checkpoints and resume points.

    Submissions would be lost, and numbers of leases, heads and verdicts given twice. Call it before this start
    is counted.
    """
    for step in points.steps():
        state = _point_state(points, step)
        if state is not None and state.ledger == ledger.ledger_id():
            _refuse(f"resume point {step}", state, ledger, checkpoints)
    for step in reversed(checkpoints.steps()):
        try:
            state = msgspec.json.decode(checkpoints.glance(step, "cursor"), type=TrainerState)
        except BAD_FILE:
            continue  # a full read will report the error
        if _differs(state, ledger) and not checkpoints.is_intact(step):
            continue  # its cursor may be that of another
        _refuse(f"checkpoint {step}", state, ledger, checkpoints)
        return


def _point_state(points: ResumePoints, step: int) -> TrainerState | None:
    """Read a resume point; None where it is damaged, which its full read reports, or of something else."""
    try:
        return state_of(points.read(step).parts)
    except StorageError:
        return None


def state_of(parts: Mapping[str, bytes]) -> TrainerState | None:
    """Decode the trainer's part of a checkpoint or resume point; None if it is of something else."""
    try:
        return msgspec.json.decode(parts["cursor"], type=TrainerState)
    except (KeyError, *BAD_FILE):
        return None


def _refuse(saved: str, state: TrainerState, ledger: Ledger, checkpoints: Checkpoints) -> None:
    """Raise StorageError where a ledger does not belong to what was saved."""
    if why := _differs(state, ledger):
        raise StorageError(
            f"{ledger.path} is not the ledger of {saved}: {why}. Put back this run's newest "
            "ledger.db (and its ledger.db-wal), or begin a new run from the checkpoint: --name NEW "
            f"--resume.dir {checkpoints.directory.parent}"
        )


def _differs(state: TrainerState, ledger: Ledger) -> str:
    """Return why a ledger does not belong to a checkpoint; "" if it does."""
    arrivals, boots = ledger.last_arrival(), ledger.boots()
    if not arrivals and not boots:
        return "it is empty"
    if state.ledger and state.ledger != ledger.ledger_id():
        return "it is of another run, or was made anew"
    head = ledger.newest_head()
    if arrivals < state.arrivals or boots < state.boots or head < state.head:
        return (
            f"it is older, and knows of {arrivals} submissions, {boots} starts and version {head[1]}, the "
            f"checkpoint of {state.arrivals}, {state.boots} and {state.head[1]}"
        )
    return ""


def snapshots(reputations: Mapping[bytes, Reputation]) -> dict[str, ReputationSnapshot]:
    """Convert reputations for a TrainerState."""
    return {node.hex(): reputation.snapshot() for node, reputation in reputations.items()}


def fork(step: int, parts: dict[str, bytes]) -> dict[str, bytes]:
    """Make the checkpoint parts of a new run from those of another after `step`.

    Raises StorageError if they are not of an RL run. Tasks that were on lease come first, as after a crash;
    waiting rollouts are dropped, reputations are kept.
    """
    try:
        other = msgspec.json.decode(parts["cursor"], type=TrainerState)
        msgspec.msgpack.decode(parts["buffer"], type=BufferSnapshot)
    except (KeyError, *BAD_FILE) as error:
        raise StorageError(
            "this is no checkpoint of `primerl-node train`: begin from its weights instead, --model.name "
            "DIRECTORY/weights/step_N"
        ) from error
    ours = TrainerState(
        tasks=other.tasks,
        verified_up_to=0,
        history=other.history,
        accepted=0,
        rejected={},
        received=0,
        delta_bytes=0,
        full_bytes=0,
        staleness_history=other.staleness_history,
        staleness_max=other.staleness_max,
        reputations=other.reputations,
        curriculum=other.curriculum,
    )
    return {
        "cursor": msgspec.json.encode(ours),
        "buffer": msgspec.msgpack.encode(BufferSnapshot(step, [])),
    }
