"""The rollout buffer: bounded in size and in staleness. No torch, no asyncio, no I/O.

A group leaves only through cut() or the sweep of advance(). The sweep guarantees that nothing older than
`max_off_policy_steps` is ever trained; early cancels elsewhere only save work.
"""

import math
import sys
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

Refusal = Literal["stale", "future", "too_few", "full"]
"""Reason of a refusal by add(): policy too old, version that does not exist yet, fewer than two rollouts with
tokens, or buffer full."""


@dataclass(frozen=True)
class BranchTokens:
    """One training sequence of T tokens: ids, mask of the sampled ones, the sampler's logprobs."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    versions: tuple[int, int] = (0, 0)
    """Oldest and newest policy version that sampled any token."""
    routes: bytes = b""
    """See Sample.routes."""
    support: bytes = b""
    """See Sample.support."""


@dataclass(frozen=True)
class AgentShare:
    """One agent's part of a rollout of several agents."""

    agent: str
    reward: float
    branches: int
    """Number of the rollout's branches that belong to this agent: the next ones in order."""


@dataclass(frozen=True)
class ScoredRollout:
    """One rollout, which may have several branches, and the trainer's own reward for it."""

    branches: list[BranchTokens]
    reward: float
    agents: list[AgentShare] = field(default_factory=list[AgentShare])
    """Traces of the agents in an environment of several agents; together they have all branches."""

    def traces(self) -> list[tuple[str, "ScoredRollout"]]:
        """Split the rollout into its agents' traces, each with the agent's name.

        Without agents the rollout itself is the only trace, with an empty name.
        """
        if not self.agents:
            return [("", self)]
        ends = accumulate(agent.branches for agent in self.agents)
        return [
            (agent.agent, ScoredRollout(self.branches[end - agent.branches : end], agent.reward))
            for agent, end in zip(self.agents, ends, strict=True)
        ]


@dataclass(frozen=True)
class RolloutGroup:
    """All surviving rollouts of one task under one lease; compared with each other only."""

    task: bytes
    """Digest of the task."""
    environment: str
    rollouts: list[ScoredRollout]
    policy_oldest: int
    """Oldest version that sampled any token of any rollout: the group ages as a unit."""
    node: bytes
    """Id of the worker."""
    lease: bytes
    task_index: int = -1
    """Index of the task in its environment; -1 in checkpoints older than this field."""


@dataclass(frozen=True)
class StalenessStats:
    """Staleness of some groups in policy versions (`off_policy/mean` and `off_policy/max`)."""

    count: int
    mean: float
    max: int


@dataclass(frozen=True)
class BufferSnapshot:
    """Complete content of a buffer, in order, of plain types that msgspec encodes and decodes."""

    version: int
    groups: list[RolloutGroup]
    counts: dict[str, int] = field(default_factory=dict[str, int])


class RolloutBuffer:
    """Groups waiting to be trained, oldest policy version first, FIFO among equals."""

    def __init__(self, *, max_off_policy_steps: int, capacity: int) -> None:
        """`capacity` is in groups; `max_off_policy_steps` = 0 admits only the version being trained."""
        self.max_off_policy_steps = max_off_policy_steps
        self.capacity = capacity
        self.counts: Counter[str] = Counter()
        """Groups so far by outcome: added, cut, swept, and each Refusal."""
        self._version = 0
        self._groups: list[RolloutGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def version(self) -> int:
        """Policy version being trained: batch `version + 1` is cut next."""
        return self._version

    def add(self, group: RolloutGroup, trained_version: int) -> Refusal | None:
        """Add a group while `trained_version` is being trained; return the reason if it is refused.

        A `trained_version` newer than the buffer's advances the buffer first; an older one is ignored.
        """
        self.advance(trained_version)
        refusal = self._refusal(group)
        self.counts[refusal or "added"] += 1
        if refusal is None:
            # equals go to the right: first in, first out within a version
            insort(self._groups, group, key=lambda member: member.policy_oldest)
        return refusal

    def advance(self, version: int) -> list[RolloutGroup]:
        """Set the version being trained; remove and return the groups that became too old."""
        self._version = max(self._version, version)
        swept = [group for group in self._groups if self._is_stale(group)]
        if swept:
            self._groups = [group for group in self._groups if not self._is_stale(group)]
            self.counts["swept"] += len(swept)
        return swept

    def cut(self, n_groups: int, *, per_node: int | None = None) -> list[RolloutGroup] | None:
        """Remove and return a batch of `n_groups`, or return None while there are too few.

        With `per_node` (see peer_cap) no worker supplies more than that many; the excess waits for a later
        batch. Raises ValueError if `n_groups` < 1.
        """
        if n_groups < 1:
            raise ValueError("a batch needs at least one group")
        indices: list[int] = []
        shares: Counter[bytes] = Counter()
        for index, group in enumerate(self._groups):
            if len(indices) == n_groups:
                break
            if per_node is None or shares[group.node] < per_node:
                shares[group.node] += 1
                indices.append(index)
        if len(indices) < n_groups:
            return None
        batch = [self._groups[index] for index in indices]
        chosen = set(indices)
        self._groups = [group for i, group in enumerate(self._groups) if i not in chosen]
        self.counts["cut"] += n_groups
        return batch

    def groups(self) -> Sequence[RolloutGroup]:
        """Return the waiting groups, in order."""
        return self._groups

    def by_node(self) -> Counter[bytes]:
        """Count the waiting groups by worker."""
        return Counter(group.node for group in self._groups)

    def staleness(self, groups: Iterable[RolloutGroup] | None = None) -> StalenessStats:
        """Return the current staleness of `groups`, or of all waiting groups."""
        chosen = self._groups if groups is None else groups
        ages = [self._version - group.policy_oldest for group in chosen]
        if not ages:
            return StalenessStats(0, 0.0, 0)
        return StalenessStats(len(ages), sum(ages) / len(ages), max(ages))

    def snapshot(self) -> BufferSnapshot:
        """Return the state that restore() needs to continue exactly here."""
        return BufferSnapshot(self._version, list(self._groups), dict(self.counts))

    def restore(self, snapshot: BufferSnapshot) -> list[RolloutGroup]:
        """Restore a snapshot; return the groups dropped by a bound tightened since then."""
        self._version = snapshot.version
        self._groups = list(snapshot.groups)
        self.counts = Counter(snapshot.counts)
        return self.advance(snapshot.version)

    def _refusal(self, group: RolloutGroup) -> Refusal | None:
        if group.policy_oldest > self._version:
            return "future"
        if self._is_stale(group):
            return "stale"
        if sum(1 for rollout in group.rollouts if rollout.branches) < 2:
            return "too_few"
        if len(self._groups) >= self.capacity:
            return "full"
        return None

    def _is_stale(self, group: RolloutGroup) -> bool:
        return self._version - group.policy_oldest > self.max_off_policy_steps


def buffer_capacity(max_off_policy_steps: int, groups_per_batch: int) -> int:
    """Return the number of groups for which a run's buffer has room: all that may ever be leased, and a batch.

    LeadTime.depth() admits at most max_off_policy_steps + 1 batches. More groups come back than were expected
    where a curriculum suddenly admits all of them. These are batches, not versions (audited_versions() in
    protocol/audits.py is the same number by chance).
    """
    return (max_off_policy_steps + 2) * groups_per_batch


def peer_cap(
    n_groups: int, share: float, waiting: Mapping[bytes, int], leased: Mapping[bytes, int]
) -> int:
    """Return the most groups that one worker may supply to a batch of `n_groups`.

        ceil(n_groups * max(share, 1 / live)),   live = workers with groups in `waiting` or `leased`

    raised to the smallest number with which the existing work, waiting or on lease, can fill the batch: a
    worker that is alone, or whose peers have left, fills it all. So the trainer never waits for a batch that
    cannot fill up: as leases are settled, rejected or expire, the cap is computed anew.
    """
    there = [waiting.get(node, 0) + leased.get(node, 0) for node in waiting.keys() | leased.keys()]
    live = sum(1 for groups in there if groups)
    cap = min(n_groups, math.ceil(n_groups * max(share, 1.0 / max(live, 1)) - 1e-9))
    while cap < n_groups and sum(min(cap, groups) for groups in there) < n_groups <= sum(there):
        cap += 1
    return cap


def peer_room(
    n_groups: int,
    share: float,
    allowed: int,
    workers: int,
    own: int,
    others: int,
) -> int:
    """Return the number of groups that a worker may still be leased.

    `allowed` groups may be waiting or on lease altogether; `own` groups of the worker are, and `others` of all
    other workers; `workers` are present.

    The limit is a batch, the worker's share of two batches, or an equal part of all that is allowed, whichever
    is most: further work of one worker would only fill the buffer and use up the capacity that the others'
    leases need. There is no limit while no other worker has groups.
    """
    if not others:
        return sys.maxsize
    most = max(n_groups, 2 * share * n_groups, allowed / max(1, workers))
    return math.ceil(most) - own
