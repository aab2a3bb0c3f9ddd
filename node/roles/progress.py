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
