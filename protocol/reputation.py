"""Trust in a peer: a Beta posterior over verified work. Only evidence moves it; time heals it slowly.

Reliability (bytes/s, latency, success) is another score and lives with the peers (node/network).
"""

from collections import Counter
from dataclasses import dataclass, field

from .errors import Reason

PROVABLE_FRAUD = frozenset(
    {Reason.BAD_REWARD, Reason.BAD_LOGPROBS, Reason.FUTURE_POLICY, Reason.BAD_PROMPT}
)
"""Reasons that honest software cannot produce by accident in number; each weighs FRAUD_WEIGHT failures."""
HARMLESS = frozenset(
    {Reason.STALE, Reason.ENVIRONMENT_ERROR, Reason.LEASE_EXPIRED, Reason.LEASE_DONE}
)
"""Reasons that cost the rollout, never the peer."""
FRAUD_WEIGHT = 4.0
QUARANTINE_BELOW = 0.5
MIN_EVIDENCE = 16.0
HALF_LIFE_S = 6 * 3600.0


@dataclass
class Reputation:
    """Evidence about one peer. `good` and `bad` decay with a half-life of six hours."""

    good: float = 0.0
    bad: float = 0.0
    updated: float = 0.0
    accepted: int = 0
    rejected: Counter[Reason] = field(default_factory=Counter[Reason])

    def age(self, now: float) -> None:
        """Let the evidence decay until `now` (Unix seconds); else a peer that is leased nothing never heals."""
        decay = 0.5 ** (max(0.0, now - self.updated) / HALF_LIFE_S) if self.updated else 1.0
        self.updated = max(now, self.updated)
        self.good *= decay
        self.bad *= decay

    def record(self, accepted: int, rejected: Counter[Reason], now: float) -> None:
        """Count the outcome of one submission. `now` in Unix seconds."""
        self.age(now)
        self.good += accepted
        weight = sum(
            count * (FRAUD_WEIGHT if reason in PROVABLE_FRAUD else 1.0)
            for reason, count in rejected.items()
            if reason not in HARMLESS
        )
        self.bad += weight
        self.accepted += accepted
        self.rejected.update(rejected)

    @property
    def trust(self) -> float:
        """Mean of Beta(1 + good, 1 + bad): 0.5 for a stranger."""
        return (1.0 + self.good) / (2.0 + self.good + self.bad)

    @property
    def quarantined(self) -> bool:
        """Whether the evidence says to lease this peer nothing."""
        return self.good + self.bad >= MIN_EVIDENCE and self.trust < QUARANTINE_BELOW

    def top_reason(self) -> str:
        """The commonest rejection, or an empty string."""
        return self.rejected.most_common(1)[0][0].value if self.rejected else ""
