"""What has happened so far in a run: counted by the trainer's loops, read by `status` and the summary."""

from collections import Counter
from dataclasses import dataclass, field


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
