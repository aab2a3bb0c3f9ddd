"""Choose the audited rollouts: their share for a peer, and which ones. Sans I/O; randomness is an argument.

Commit, then challenge: which rollouts are audited follows from 32 random bytes that are drawn after the
receipt: it cannot be known beforehand, and anyone can recompute it from the signed verdict.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated

import msgspec

from ..crypto.hashing import Digest, derive
from .errors import Reason, RemoteProtocolError
from .manifests import Name, Version
from .pipelines import MAX_STAGES
from .recent import RecentDict
from .reputation import Trust
from .rollouts import MEANS, MEASURES, Evidence

MAX_CHOSEN = 2048
"""Rollouts of one job; a report on that many stays below MAX_REPORT."""
MAX_UNREADABLE_DETAIL = 100
MAX_REPORT = 512 * 1024
MAX_MEASURED_TOKENS = 2**24
MAX_MEASURE = 1e30
"""Largest measure of a report, above every bound; it stands for numbers that are not finite."""

Index = Annotated[int, msgspec.Meta(ge=0, le=4096)]
Measure = Annotated[float, msgspec.Meta(ge=-MAX_MEASURE, le=MAX_MEASURE)]


def audited_versions(max_off_policy_steps: int) -> int:
    """Count the versions under which rollouts are read that may still be trained.

    While version v is the newest, v - max_off_policy_steps to v may be claimed; each is compared with the one
    before it, too.
    """
    return max_off_policy_steps + 2


def held_versions(max_off_policy_steps: int) -> int:
    """Count the newest versions that a node holds for audits: audited_versions(), and one more.

    A version is published now and then between the check that a rollout is fresh and its audit, while it is
    scored or while its job is on the way to a validator. A job is refused as a whole for one version that is
    missing: without the one more, fresh rollouts would be lost with those that became stale on the way.
    """
    return audited_versions(max_off_policy_steps) + 1


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rollout of a submission."""

    group: Index
    rollout: Index


class UnreadableRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rollout with an invalid proof, or without a finished audit."""

    group: Index
    rollout: Index
    proof: bool
    """Whether the proof is at fault; if not, the worker is not to blame."""
    detail: Annotated[str, msgspec.Meta(max_length=MAX_UNREADABLE_DETAIL)]


class CrossedRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Distances at the boundaries of one measured rollout of a pipeline."""

    group: Index
    rollout: Index
    distances: Annotated[tuple[Measure, ...], msgspec.Meta(max_length=MAX_STAGES - 1)]


class AuditReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row for each chosen rollout, measured or unreadable; none if the validator could not audit.

    The measured rows are the Evidence that a verdict shows; check_rows() sets the limits that a stranger's word
    has and the trainer's own does not.
    """

    job: Version
    submission: Digest
    challenge: Digest
    measured: Annotated[tuple[Evidence, ...], msgspec.Meta(max_length=MAX_CHOSEN)]
    unreadable: Annotated[tuple[UnreadableRow, ...], msgspec.Meta(max_length=MAX_CHOSEN)] = ()
    failed: Name = ""
    """Why there are no rows."""
    crossed: (
        Annotated[tuple[CrossedRow, ...], msgspec.Meta(max_length=MAX_CHOSEN)] | msgspec.UnsetType
    ) = msgspec.UNSET
    """Rows of measured rollouts, at most one each; left out where there is none."""


def check_rows(report: AuditReport, places: Sequence[tuple[int, int]]) -> None:
    """Raise RemoteProtocolError(MALFORMED) unless there is a row for each place, or none and a reason."""
    rows = (*report.measured, *report.unreadable)
    if report.failed and not rows:
        return
    if sorted((row.group, row.rollout) for row in rows) != sorted(places):
        raise RemoteProtocolError(Reason.MALFORMED, "not one row for each rollout of the job")
    crossed = report.crossed or ()
    of = {(row.group, row.rollout) for row in report.measured}
    if len({(row.group, row.rollout) for row in crossed} & of) != len(crossed):
        raise RemoteProtocolError(Reason.MALFORMED, "boundaries of an unmeasured rollout, or twice")
    if any(row.tokens > MAX_MEASURED_TOKENS for row in report.measured):
        raise RemoteProtocolError(Reason.MALFORMED, "more tokens than a rollout has")
    numbers = [getattr(row, name) for row in report.measured for name in MEASURES]
    if any(len(row.means) not in (0, MEANS) for row in report.measured):
        raise RemoteProtocolError(Reason.MALFORMED, f"some means of a rollout, not all {MEANS}")
    numbers += [value for row in crossed for value in row.distances]
    if not all(-MAX_MEASURE <= value <= MAX_MEASURE for value in numbers):  # nor is it NaN
        raise RemoteProtocolError(
            Reason.MALFORMED, "a measurement is not a number, or beyond all bounds"
        )


def rows_by_place(report: AuditReport) -> dict[tuple[int, int], Evidence | UnreadableRow]:
    """Return the row of each rollout of a checked report, by place."""
    rows = (*report.measured, *report.unreadable)
    return {(row.group, row.rollout): row for row in rows}


CHALLENGE_BYTES = 32
NEWCOMER = 64.0
"""Verified rollouts of an environment, as they are remembered, below which all of it is audited."""
DOUBT = 0.045
"""1 - trust.low of a clean record of NEWCOMER rollouts: from here on the rate falls."""

WINDOW = 32
"""Groups that a running mean remembers, about."""
MIN_GROUPS = 16
"""Least number of groups of a peer that is compared with others."""
FRESH = 64
"""A peer that sent none of an environment's last FRESH groups says nothing of its present rewards."""
ODD_Z, SURE_Z = 3.0, 6.0
"""Robust z-scores at which outlierness leaves 0 and reaches 1."""
MAX_PEERS = 1024
MAX_ENVIRONMENTS = 16


def audit_rate(trust: Trust, base: float, outlierness: float, recent_fault: bool) -> float:
    """Return the share of a peer's next rollouts of an environment that is audited.

    `trust` is the one in that environment, `base` is contract.audit_rate, outlierness in [0, 1].

        rate = 1                                   newcomers to it, and after a recent fault in any
        r    = max(base, min(1, (1 - trust.low) / DOUBT))
        rate = r + (1 - r) * outlierness           everybody else

    After n clean rollouts 1 - trust.low is about 3 / n, so r is about 64 / n until it meets the base: each
    doubling of a record is bought with some 44 more audits. For the base see docs/proofs.md.
    """
    if recent_fault or trust.good < NEWCOMER:
        return 1.0
    rate = max(base, min(1.0, (1.0 - trust.low) / DOUBT))
    return rate + (1.0 - rate) * min(1.0, max(0.0, outlierness))


def draw(challenge: bytes, group: int, rollout: int) -> float:
    """Return the random number of a rollout in [0, 1); it is audited if the number is below the rate."""
    name = derive("audit draw", challenge, group.to_bytes(4, "big"), rollout.to_bytes(4, "big"))
    return (int.from_bytes(name[:8], "big") >> 11) / 2.0**53


def is_audited(challenge: bytes, group: int, rollout: int, rate: float) -> bool:
    """Return whether the challenge picks this rollout; at a rate of 1 it picks all, at 0 none."""
    return draw(challenge, group, rollout) < rate


@dataclass
class _Running:
    """Mean and variance of a quantity, over an exponential window of groups."""

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        step = max(1.0 / WINDOW, 1.0 / self.count)
        off = value - self.mean
        self.mean += step * off
        self.variance = (1.0 - step) * (self.variance + step * off * off)

    def error2(self) -> float:
        """Squared standard error of the mean; an exponential window of length W averages 2 W - 1 values."""
        return self.variance / min(self.count, 2 * WINDOW - 1)


@dataclass
class _Peer:
    """One peer in one environment: its level, and how far it was from the others when it sent a group."""

    level: _Running = field(default_factory=_Running)
    excess: _Running = field(default_factory=_Running)
    last: int = 0
    """Number of its last group among all groups of the environment."""


@dataclass
class _Series:
    """One quantity in one environment."""

    peers: RecentDict[bytes, _Peer] = field(default_factory=lambda: RecentDict(MAX_PEERS))
    groups: int = 0

    def add(self, node: bytes, value: float) -> None:
        self.groups += 1
        centre = self._centre(node)
        peer = self.peers[node] = self.peers.get(node) or _Peer()
        peer.level.add(value)
        peer.last = self.groups
        if centre is not None:
            peer.excess.add(value - centre)

    def _centre(self, node: bytes) -> float | None:
        """Return the median level of the other peers: a minority cannot move it far."""
        levels = [
            peer.level.mean
            for other, peer in self.peers.items()
            if other != node and peer.level.count >= MIN_GROUPS and self.groups - peer.last <= FRESH
        ]
        return median(levels) if levels else None

    def score(self, node: bytes) -> float:
        """Compute the robust z-score: a peer's excess over its error and the spread of the others' excesses."""
        peer = self.peers.get(node)
        if peer is None or peer.excess.count < MIN_GROUPS:
            return 0.0
        others = [
            abs(other.excess.mean)
            for name, other in self.peers.items()
            if name != node and other.excess.count >= MIN_GROUPS
        ]
        # 1.4826 MAD estimates a standard deviation; two peers differ by the same amount, which is no spread.
        spread = 1.4826 * median(others) if len(others) >= 3 else 0.0
        error = math.sqrt(2.0 * peer.excess.error2() + spread**2)
        off = abs(peer.excess.mean)
        if error == 0.0:
            return 0.0 if off == 0.0 else math.inf
        return off / error


class Outliers:
    """Measures how much a peer's rewards and reply lengths differ from the others'; it never punishes, only
    audits more.

    Each group is compared with the others' level at that moment, so that a policy which improves
    makes no peer an outlier. Memory is bounded: the peer that was quiet longest is forgotten first.
    """

    def __init__(self) -> None:
        self._series = RecentDict[tuple[str, str], _Series](2 * MAX_ENVIRONMENTS)

    def __len__(self) -> int:
        """Peers that are remembered, counted once for each quantity and environment."""
        return sum(len(series.peers) for series in self._series.values())

    def note(
        self, node: bytes, environment: str, rewards: Iterable[float], lengths: Iterable[int]
    ) -> None:
        """Add one group: its rollouts' rewards (the trainer's own) and sampled tokens.

        A group is one observation: its rollouts share a task and are not independent. Reply lengths are
        compared by their logarithm.
        """
        finite = [reward for reward in rewards if math.isfinite(reward)]
        sizes = [math.log1p(length) for length in lengths]
        if finite:
            self._of("reward", environment).add(node, sum(finite) / len(finite))
        if sizes:
            self._of("length", environment).add(node, sum(sizes) / len(sizes))

    def outlierness(self, node: bytes) -> float:
        """Return 0 for a peer like the others (or too little known), 1 for a peer that surely differs."""
        worst = max((series.score(node) for series in self._series.values()), default=0.0)
        return min(1.0, max(0.0, (worst - ODD_Z) / (SURE_Z - ODD_Z)))

    def _of(self, quantity: str, environment: str) -> _Series:
        key = (quantity, environment)
        series = self._series[key] = self._series.get(key) or _Series()
        return series
