"""Judge leases by the verdicts on their work: what a worker lost, and whether its choice skews the run.

Invariants:
- a worker is compared with the others of the run: what all of them lose is the environment's fault, or ours;
- the others weigh by their accepted work, so that keys which send nothing cannot make losses usual;
- what an auditor of ours could not measure counts neither way, nor what another stage of a pipeline may have
  spoilt: the evidence against each stage is judged elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...crypto.hashing import short
from ...protocol.errors import Reason
from ...protocol.leases import Lease
from ...protocol.recent import RecentDict
from ...protocol.rollouts import Submission
from ..verification.verdict import Verified
from .lease_book import LeaseOutcome
from .pipeline_faults import of_others

SLACK = 0.05
"""Share of rollouts that a worker may lose beyond what is usual: workers differ."""
LEASES_REMEMBERED = 64
"""Leases over which shares and rewards are means."""
SKEW_BAR = 16.0
"""Rollouts taken back beyond SLACK at which a worker's incomplete groups are not trained any more."""
MAX_RECORDS = 8192
"""Pairs of a worker and an environment that are remembered."""

EXCUSED = frozenset({Reason.AUDIT_FAILED, Reason.UNCALIBRATED})


@dataclass
class WorkRecord:
    """Sums over a worker's last leases of one environment; older ones fade."""

    rollouts: float = 0.0
    """Rollouts that count."""
    lost: float = 0.0
    accepted: float = 0.0
    taken_back: float = 0.0
    """Rollouts that it reported as failed beside others of their group that it sent."""
    reward: float = 0.0
    """Sum of the accepted rollouts' rewards."""
    skew: float = 0.0
    """CUSUM of rollouts taken back beyond what is usual."""

    @property
    def lost_share(self) -> float:
        """Share of its rollouts that were lost."""
        return self.lost / self.rollouts if self.rollouts else 0.0

    @property
    def taken_back_share(self) -> float:
        """Share of its rollouts that it took back one by one."""
        return self.taken_back / self.rollouts if self.rollouts else 0.0

    @property
    def mean_reward(self) -> float:
        """Mean reward of its accepted rollouts."""
        return self.reward / self.accepted if self.accepted else 0.0

    @property
    def selective(self) -> bool:
        """Whether it takes back single rollouts often enough to be choosing among them."""
        return self.skew >= SKEW_BAR

    def add(self, counts: "LeaseCounts", usual_taken_back: float) -> None:
        """Add a lease."""
        fade = 1.0 - 1.0 / LEASES_REMEMBERED
        self.rollouts = self.rollouts * fade + counts.rollouts
        self.lost = self.lost * fade + counts.lost
        self.accepted = self.accepted * fade + counts.accepted
        self.taken_back = self.taken_back * fade + counts.taken_back
        self.reward = self.reward * fade + counts.reward
        usual = (usual_taken_back + SLACK) * counts.rollouts
        self.skew = min(2 * SKEW_BAR, max(0.0, self.skew + counts.taken_back - usual))


@dataclass(frozen=True)
class LeaseCounts:
    """Rollouts of one lease by what became of them."""

    rollouts: int
    """All but the excused ones."""
    accepted: int
    lost: int
    taken_back: int
    reward: float


def count_lease(
    submission: Submission,
    lease: Lease,
    verified: Verified,
    *,
    uncalibrated_excused: bool = True,
) -> LeaseCounts:
    """Count the rollouts of a lease; `uncalibrated_excused`: its class had bounds when it was leased.

    Accepted ones that come too late to be trained are work: it may be the trainer that leased too much.
    """
    excused_for = EXCUSED if uncalibrated_excused else EXCUSED - {Reason.UNCALIBRATED}
    failed = {
        (number, index)
        for number, group in enumerate(submission.groups)
        for index, rollout in enumerate(group.rollouts)
        if rollout.error
    }
    others = {(blame.group, blame.rollout) for blame in verified.audited.blames if of_others(blame)}
    excused = lost = 0
    for rejection in verified.rejections:
        place = rejection.group, rejection.rollout
        ours = rejection.reason is Reason.ENVIRONMENT_ERROR and place not in failed
        if ours or rejection.reason in excused_for or place in others:
            excused += 1
        else:
            lost += 1
    sent = {
        number
        for number, group in enumerate(submission.groups)
        if not all(rollout.error for rollout in group.rollouts)
    }
    return LeaseCounts(
        rollouts=len(lease.tasks) * lease.group_size - excused,
        accepted=verified.verdict.accepted,
        lost=lost,
        taken_back=sum(number in sent for number, _ in failed),
        reward=sum(rollout.reward for group in verified.groups for rollout in group.rollouts),
    )


class WorkRecords:
    """The records of all workers, by environment."""

    def __init__(self) -> None:
        self._records = RecentDict[tuple[bytes, int], WorkRecord](MAX_RECORDS)

    def judge(
        self,
        node: bytes,
        submission: Submission,
        lease: Lease,
        verified: Verified,
        *,
        uncalibrated_excused: bool = True,
    ) -> LeaseOutcome:
        """Add a lease of `node` and return what it says of the node; see count_lease()."""
        counts = count_lease(submission, lease, verified, uncalibrated_excused=uncalibrated_excused)
        groups = len(lease.tasks)
        if counts.rollouts <= 0:
            return LeaseOutcome(groups, blameless=True)
        allowed = self._usual(node, lease.environment, "lost_share") + SLACK
        lost = max(0.0, counts.lost - allowed * counts.rollouts) / lease.group_size
        taken_back = self._usual(node, lease.environment, "taken_back_share")
        key = node, lease.environment
        record = self._records[key] = self._records.get(key) or WorkRecord()
        record.add(counts, taken_back)
        return LeaseOutcome(groups, counts.accepted, lost)

    def succeed(self, node: bytes, successor: bytes) -> None:
        """Give the records of a node to its successor."""
        for known, environment in list(self._records):
            if known == node:
                self._records[successor, environment] = self._records.pop((node, environment))

    def selective(self, node: bytes, environment: int) -> bool:
        """Return whether incomplete groups of `node` are not to be trained."""
        record = self._records.get((node, environment))
        return record is not None and record.selective

    def warnings(self, names: Sequence[str]) -> list[str]:
        """Describe the workers that choose among their rollouts; `names` are those of the environments."""
        lines: list[str] = []
        for (node, environment), record in list(self._records.items()):
            if not record.selective:
                continue
            others = [other for _, other in self._others(node, environment)]
            accepted = sum(other.accepted for other in others)
            reward = sum(other.reward for other in others) / accepted if accepted else 0.0
            usual = self._usual(node, environment, "taken_back_share")
            lines.append(
                f"worker {short(node)} takes back {record.taken_back_share:.0%} of its rollouts of "
                f"{names[environment]!r} ({usual:.1%} is usual; what it sends has a mean reward of "
                f"{record.mean_reward:.2f}, that of other workers {reward:.2f}): its incomplete groups are "
                f"not trained. Ask its owner why, or ban it: `primerl-node ban {node.hex()[:12]}`"
            )
        return lines

    def _others(self, node: bytes, environment: int) -> Iterator[tuple[bytes, WorkRecord]]:
        for (other, number), record in list(self._records.items()):
            if other != node and number == environment:
                yield other, record

    def _usual(self, node: bytes, environment: int, share: str) -> float:
        """Compute the median share of the other workers, weighted by their accepted work.

        Where there is no other it is the worker's own: there is nothing to compare it with.
        """
        others = [record for _, record in self._others(node, environment)]
        if not others:
            return 1.0
        working = [record for record in others if record.accepted] or others
        working.sort(key=lambda record: getattr(record, share))
        half, below = sum(record.accepted for record in working) / 2.0, 0.0
        for record in working:
            below += record.accepted
            if below >= half:
                return getattr(record, share)
        return getattr(working[-1], share)
