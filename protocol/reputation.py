"""Evidence about a peer: trust that heals, and a sequential test with a budget of false bans. Sans I/O.

Two instruments, never mixed: trust (a Beta posterior for each environment) decides how much of that environment
a peer is leased, and how much of it is audited; the test, one for the peer, decides bans. A long good record
buys no room for fraud: the test starts anew at 0 every moment. Reliability (bytes/s, latency, success) is
another score and lives with the peers (node/p2p).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from .envelope import utc
from .errors import Reason
from .manifests import ProofContract
from .numerics import MeanBounds, NumericsClass

BAN_AT_ONCE = frozenset({Reason.BAD_PROOF})
"""Bytes that no honest software makes, with any numerics: one case is enough. Signatures, recipients and
replays are refused on arrival and never get here; a wrong reward or prompt may be a library's fault in
another version, so it weighs FRAUD_WEIGHT and leads to quarantine."""
AUDIT_FAULTS = frozenset(
    {
        Reason.BAD_PROOF,
        Reason.WRONG_MODEL,
        Reason.WRONG_POLICY,
        Reason.BAD_SAMPLING,
        Reason.BAD_LOGPROBS,
    }
)
"""Reasons that an audit rejects for: `rejected` in the sequential test."""
FRAUD = AUDIT_FAULTS | {
    Reason.BAD_REWARD,
    Reason.FUTURE_POLICY,
    Reason.WRONG_ORDER,
    Reason.BAD_PROMPT,
    Reason.DUPLICATE,
    Reason.MISSING_INDEX,
}
"""Reasons that honest software cannot produce by accident in number; each weighs FRAUD_WEIGHT failures.
DUPLICATE is the copier's: the first sender is never rejected for it. Our worker sends every index, a
failed one with its error, so a missing one was left out; and it drops submissions that are out of order."""
HARMLESS = frozenset(
    {
        Reason.STALE,
        Reason.ENVIRONMENT_ERROR,
        Reason.WITHDRAWN,
        Reason.LEASE_EXPIRED,
        Reason.LEASE_DONE,
        Reason.AUDIT_FAILED,
        Reason.UNCALIBRATED,
    }
)
"""Reasons that cost the rollout, never the peer."""
FRAUD_WEIGHT = 4.0
QUARANTINE_BELOW = 0.5
MIN_EVIDENCE = 16.0
HALF_LIFE_S = 6 * 3600.0
FAULT_MEMORY = 64
"""A fault is recent for this many audited rollouts."""

VOUCHED = 0.25
"""Share of a rollout's increment of the test of outcomes for the stages beside the blamed one: stage 0, which
signs for all, and the stage that sent to the blamed one."""
VOUCHED_MOST = 0.125
"""Share of the bar: most that all rollouts of one plan add to such a stage. Eight bad plans in a row ban
it."""
DOUBTED_MOST = 0.4
"""Share of the bar: most that they add to a stage that is one of several possible ones. Three in a row ban
it."""
ALONE_MOST = 0.9
"""Share of the bar: most that the statements of a single stage 0 add to another stage."""
NAMED_AT = 0.7
"""Share of the bar: at this possible total of one stage its plan is given up, and it is in no other."""

Outcome = Literal["clean", "suspect", "rejected"]
HONEST: dict[Outcome, float] = {"clean": 0.9899, "suspect": 0.01, "rejected": 1e-4}
"""Rates of outcomes of an honest worker's audited rollouts, to which the manifest's thresholds are
calibrated."""
CHEATER: dict[Outcome, float] = {"clean": 0.4, "suspect": 0.3, "rejected": 0.3}
"""The weakest cheater that the test is made for: most of them are rejected far oftener."""
INCREMENT: dict[Outcome, float] = {
    outcome: math.log(CHEATER[outcome] / HONEST[outcome]) for outcome in HONEST
}
"""Nats: -0.91, +3.40, +8.01. Three rejections of audited rollouts outweigh any bar below 24 nats."""

CLIP_NATS = 5.0
"""One rollout moves the test for another policy by no more than this."""
CLIP_COST = math.log1p(math.exp(-CLIP_NATS))
"""Taken off every clipped increment, 0.0067 nats. Clipping from above only lowers E[e^x]; clipping from below
at -c raises it by at most e^-c. So if E[e^x] <= 1 for an honest peer, E[e^(clip(x) - CLIP_COST)] <= 1 too,
and the bar keeps its meaning: no upward drift comes from the clip."""
TESTS = 3
"""The budget of false bans is shared by the tests of outcomes, for another policy, and of means."""
WINDOW = 16
"""Audited rollouts of which the test of means takes the mean: see MeanBounds. A window counts as one rollout
does in the test of outcomes, so three that are off ban."""
Z_05 = 1.6448536
"""Upper 5 % point of the normal distribution."""


@dataclass(frozen=True)
class Audited:
    """Contribution of one rollout's audit to the sequential tests."""

    outcome: Outcome
    other_policy: float
    """Evidence.other_policy, nats; NaN tells nothing here (the judgement rejects it)."""
    share: float = 1.0
    """This peer's share of a pipeline's rollout."""
    vouches: bool = False
    """In a pipeline: the fault is that of another stage, which this peer only dealt with."""
    means: tuple[float, ...] = ()
    """Evidence.means and Evidence.fingerprint; empty for a text that was audited before."""


@dataclass
class Room:
    """Nats that the rollouts of one plan may yet add to a stage that they are not laid to alone."""

    doubted: float
    vouched: float

    @staticmethod
    def of(test: "BanTest") -> "Room":
        """Return the room of all that a plan has."""
        return Room(DOUBTED_MOST * test.bar, VOUCHED_MOST * test.bar)

    def take(self, audit: Audited, nats: float) -> float:
        """Take `nats`, at most the room that is left."""
        if audit.vouches:
            nats_taken = min(nats, self.vouched)
            self.vouched -= nats_taken
        else:
            nats_taken = min(nats, self.doubted)
            self.doubted -= nats_taken
        return nats_taken


CANARIES = 16
"""Audited rollouts by which a worker is put into the class that it claims, once that class has bounds."""
ODD_CANARIES = 5
"""At this number above the class's bounds to suspect, a worker is not of that class: 4e-7 of honest ones
reach it, with one in a hundred rollouts suspect. It is refused, if there is no envelope to judge it by."""
OUTSIDE_CANARIES = 2
"""At this number a worker is judged by the envelope, if there is one: 1 in 90 honest ones reach it, which costs
them nothing."""
MAX_MISPLACED = 4
"""Classes that a worker may claim wrongly; then it is refused under any class."""


WRONG_CLASS = "wrong numerics class"
"""Begins the refusal of a worker whose first rollouts are not of the class that it claims."""


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compares a worker's first rollouts with the numerics class that it claims."""

    numerics: NumericsClass | None = None
    canaries: int = 0
    """Audited rollouts that were judged by the measured bounds of that class, up to CANARIES."""
    odd: int = 0
    """Those of them above the bounds to suspect."""
    misplaced: tuple[NumericsClass, ...] = ()
    """Classes that it turned out not to be of."""
    refused: str = ""
    """Why it is given no work under its present claim."""
    outside: bool = False
    """Whether the envelope judges it, as its first rollouts do not fit the class."""

    @property
    def placed(self) -> bool:
        """Whether it fits the class that it claims."""
        return self.canaries >= CANARIES and not self.refused and not self.outside

    def claim(self, numerics: NumericsClass | None) -> "Placement":
        """Begin anew where the claim is another one than before."""
        if numerics == self.numerics:
            return self
        refused = ""
        if len(self.misplaced) >= MAX_MISPLACED:
            refused = f"it claimed {len(self.misplaced)} numerics classes that it is not of"
        elif numerics in self.misplaced:
            refused = f"its rollouts are not those of {numerics}, as it was found before"
        return Placement(numerics, misplaced=self.misplaced, refused=refused)

    def add(self, suspects: Iterable[bool]) -> "Placement":
        """Count audited rollouts: whether each is above the class's bounds to suspect."""
        canaries, odd = self.canaries, self.odd
        for suspect in suspects:
            if canaries < CANARIES:
                canaries, odd = canaries + 1, odd + suspect
        return msgspec.structs.replace(self, canaries=canaries, odd=odd)

    @property
    def is_odd(self) -> bool:
        """Whether too many of the first rollouts are above the class's bounds."""
        return self.odd >= ODD_CANARIES

    def leave_class(self) -> "Placement":
        """Leave it to the envelope, if too many of the first rollouts are above the class's bounds."""
        outside = self.outside or self.odd >= OUTSIDE_CANARIES
        return msgspec.structs.replace(self, outside=outside)

    def refuse(self, why: str) -> "Placement":
        """Refuse the class that is claimed now."""
        wrong = () if self.numerics is None else (self.numerics,)
        return msgspec.structs.replace(self, misplaced=(*self.misplaced, *wrong), refused=why)


@dataclass(frozen=True)
class BanTest:
    """Bars of the sequential tests, the same for every peer of a run."""

    bar: float
    """Nats."""
    other_scale: float = 1.0
    """Factor on other_policy before it is clipped (the manifest's; calibration measures it)."""
    means: MeanBounds | None = None
    """None: means are not tested."""


def ban_test(contract: ProofContract, expected_audits: float) -> BanTest:
    """Compute the bars that keep the chance of any false ban in the whole run below contract.false_bans.

    A CUSUM passes h at its n-th step only if some sum of increments that starts at a step k <= n does. For
    increments with E[e^x | past] <= 1 each start does so with probability <= e^-h, for ever (Ville), so all
    the starts of N audits, of however many peers, alarm with probability <= N e^-h (and the mean number of
    audits to a false alarm is >= e^h: Lorden 1971). Hence h = ln(TESTS * N / false_bans). N enters by its
    logarithm: `expected_audits` may generously be all the rollouts of the run.
    """
    bar = math.log(TESTS * max(expected_audits, 1.0) / contract.false_bans)
    return BanTest(bar, contract.other_scale)


def outcome_of(reason: Reason | None, suspect: bool) -> Outcome | None:
    """Return how the audit of a rollout counts; None where it proves nothing (it failed, or another check
    refused)."""
    if reason is None:
        return "suspect" if suspect else "clean"
    return "rejected" if reason in AUDIT_FAULTS else None


UNKNOWN = ""
"""Name for the evidence of a state that did not tell environments apart: it is trust in none of them."""


class TrustSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Trust as it is stored."""

    good: float
    bad: float
    updated: float
    accepted: int
    rejected: dict[str, int]


class ReputationSnapshot(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """A Reputation as it is stored."""

    environments: dict[str, TrustSnapshot] = {}
    audited: int
    clean_streak: int
    faults: int
    cheat_nats: float
    other_nats: float
    mean_nats: float = 0.0
    window: tuple[tuple[float, ...], ...] = ()
    suspicion: float
    banned: str
    banned_at: float = 0.0
    banned_until: float = 0.0
    accusers: tuple[str, ...] = ()
    placement: Placement = Placement()
    good: float = 0.0
    bad: float = 0.0
    updated: float = 0.0
    accepted: int = 0
    rejected: dict[str, int] = {}
    """These five are of states that did not tell environments apart."""

    def trusts(self, names: Sequence[str]) -> dict[str, TrustSnapshot]:
        """Return the evidence by environment; `names` are the environments of the run that stored this."""
        if not self.updated:
            return self.environments
        name = names[0] if len(names) == 1 else UNKNOWN
        old = TrustSnapshot(self.good, self.bad, self.updated, self.accepted, self.rejected)
        return {**self.environments, name: old}


@dataclass
class Trust:
    """Evidence about a peer's work in one environment. `good` and `bad` decay with a half-life of six hours."""

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

    def record(
        self, accepted: int, rejected: Counter[Reason], now: float, *, spared: int = 0
    ) -> None:
        """Count the outcome of one submission; see Reputation.record()."""
        self.age(now)
        self.good += accepted
        weight = sum(
            count * (FRAUD_WEIGHT if reason in FRAUD else 1.0)
            for reason, count in rejected.items()
            if reason not in HARMLESS
        )
        self.bad += max(0.0, weight - spared * FRAUD_WEIGHT)
        self.accepted += accepted
        self.rejected.update(rejected)

    @property
    def mean(self) -> float:
        """Mean of Beta(1 + good, 1 + bad): 0.5 for a stranger."""
        return (1.0 + self.good) / (2.0 + self.good + self.bad)

    @property
    def low(self) -> float:
        """Lower 5 % quantile of Beta(1 + good, 1 + bad): what can be counted on; 0.05 for a stranger."""
        return beta_low(1.0 + self.good, 1.0 + self.bad)

    @property
    def quarantined(self) -> bool:
        """Whether the evidence says to lease the peer nothing of this environment until it heals."""
        return self.good + self.bad >= MIN_EVIDENCE and self.mean < QUARANTINE_BELOW

    def snapshot(self) -> TrustSnapshot:
        """Copy the state into plain types for msgspec; see restore()."""
        rejected = {reason.value: count for reason, count in self.rejected.items()}
        return TrustSnapshot(self.good, self.bad, self.updated, self.accepted, rejected)

    @staticmethod
    def restore(snapshot: TrustSnapshot) -> "Trust":
        """Restore a snapshot; a reason of other software that is unknown here is left out."""
        known = {reason.value: reason for reason in Reason}
        counts = {known[name]: count for name, count in snapshot.rejected.items() if name in known}
        fields: dict[str, Any] = {**msgspec.structs.asdict(snapshot), "rejected": Counter(counts)}
        return Trust(**fields)


@dataclass
class Reputation:
    """Evidence about one peer. An environment's trust decays; a ban does not, though it may have an end."""

    environments: dict[str, Trust] = field(default_factory=dict[str, Trust])
    """By name of an environment, for each that the peer has worked in; see of()."""
    audited: int = 0
    """Rollouts that an audit came to an end on."""
    clean_streak: int = 0
    """Audited rollouts since the last fault."""
    faults: int = 0
    """Rollouts rejected for FRAUD."""
    cheat_nats: float = 0.0
    """CUSUM of the outcomes."""
    other_nats: float = 0.0
    """CUSUM of other_policy."""
    mean_nats: float = 0.0
    """CUSUM of the means of windows."""
    window: tuple[tuple[float, ...], ...] = ()
    """Audited.means since the last whole window."""
    suspicion: float = 0.0
    """The largest of the three as a share of the bar, as of the last audit."""
    banned: str = ""
    """Why, in a sentence; empty if it is not banned."""
    banned_at: float = 0.0
    """When, in Unix seconds, as the trainer noted it; 0 where it did not."""
    banned_until: float = 0.0
    """When the ban ends, in Unix seconds; 0: never."""
    accusers: tuple[str, ...] = ()
    """First stages (hex) of pipelines whose rollouts were blamed on this peer alone; two are as good as
    many."""
    placement: Placement = field(default_factory=Placement)
    """Placement in a run that measures its bounds."""

    def of(self, environment: str) -> Trust:
        """Return the evidence about its work in an environment; that of a stranger where there is none."""
        return self.environments.get(environment) or Trust()

    def age(self, now: float) -> None:
        """Let the evidence of all environments decay until `now` (Unix seconds)."""
        for trust in self.environments.values():
            trust.age(now)

    def record(
        self,
        environment: str,
        accepted: int,
        rejected: Counter[Reason],
        now: float,
        *,
        spared: int = 0,
    ) -> None:
        """Count the outcome of one submission. `now` in Unix seconds.

        `spared` of the rollouts rejected for FRAUD need not be of this peer: they weigh nothing.
        """
        trust = self.environments.setdefault(environment, Trust())
        trust.record(accepted, rejected, now, spared=spared)
        faults = sum(count for reason, count in rejected.items() if reason in FRAUD)
        if faults:
            self.faults += faults
            self.clean_streak = 0
        for reason in sorted(BAN_AT_ONCE & rejected.keys()):
            if rejected[reason]:
                self.ban(f"{reason.value}: no honest software makes this")

    def observe(self, audits: Iterable[Audited], test: BanTest, room: Room | None = None) -> None:
        """Add audited rollouts, in order, to the sequential tests; may set `banned`. `room`: of their plan."""
        for audit in audits:
            self.audited += 1
            self.clean_streak = 0 if audit.outcome == "rejected" else self.clean_streak + 1
            self._add(audit, room)
            step = other_step(audit.other_policy, test.other_scale)
            self.other_nats = max(0.0, self.other_nats + step)
            if self.cheat_nats >= test.bar:
                self.ban(self._sentence("rejected and suspect audits", self.cheat_nats, test))
            elif self.other_nats >= test.bar:
                self.ban(self._sentence("another policy version", self.other_nats, test))
            self._add_means(audit.means, test)
        self.suspicion = max(self.cheat_nats, self.other_nats, self.mean_nats) / test.bar

    def _add_means(self, means: tuple[float, ...], test: BanTest) -> None:
        """Add a rollout's means to the window, and a whole window to the test of means."""
        if test.means is None or not means or not all(map(math.isfinite, means)):
            return
        self.window = (*self.window, means)
        if len(self.window) < WINDOW:
            return
        above = test.means.first_above(
            [sum(column) / WINDOW for column in zip(*self.window, strict=True)]
        )
        self.window = ()
        self.mean_nats = max(0.0, self.mean_nats + INCREMENT["rejected" if above else "clean"])
        if self.mean_nats >= test.bar:
            what = f"means of {WINDOW} rollouts ({above})"
            self.ban(self._sentence(what, self.mean_nats, test))

    def observe_stage(
        self, audits: Iterable[Audited], test: BanTest, room: Room, *, accuser: bytes, named: bool
    ) -> None:
        """Observe, as observe(), a submission in which this peer was a later stage of a pipeline.

        `accuser` signed it as stage 0; `named`: some of it is laid to this peer alone. A word of one stage 0
        is no reason for a ban: it could be invented.
        """
        if named and len(self.accusers) < 2:
            self.accusers = tuple(dict.fromkeys([*self.accusers, accuser.hex()]))
        before = self.cheat_nats, self.other_nats
        for audit in audits:
            self._add(audit, room)
            step = other_step(audit.other_policy, test.other_scale)
            self.other_nats = max(0.0, self.other_nats + step)
        if len(self.accusers) < 2:
            most = ALONE_MOST * test.bar
            self.cheat_nats = min(self.cheat_nats, max(before[0], most))
            self.other_nats = min(self.other_nats, max(before[1], most))
        worst = max(self.cheat_nats, self.other_nats)
        if worst >= test.bar:
            self.ban(self._sentence("faults as a stage of pipelines", worst, test))
        self.suspicion = max(self.cheat_nats, self.other_nats) / test.bar

    def _add(self, audit: Audited, room: Room | None) -> None:
        """Add to the test of outcomes; evidence shared by several peers needs room."""
        step = INCREMENT[audit.outcome]
        if step > 0 and audit.share < 1 and room is not None:
            step = room.take(audit, step * audit.share)
        self.cheat_nats = max(0.0, self.cheat_nats + step)

    @property
    def accepted(self) -> int:
        """Accepted rollouts of all environments."""
        return sum(trust.accepted for trust in self.environments.values())

    @property
    def rejected(self) -> Counter[Reason]:
        """Rejected rollouts of all environments, by reason."""
        counts: Counter[Reason] = Counter()
        for trust in self.environments.values():
            counts.update(trust.rejected)
        return counts

    @property
    def refused(self) -> str:
        """Reason why this peer is leased nothing of any environment, in a sentence; empty if it may be."""
        if self.banned:
            until = f" until {utc(int(self.banned_until))}" if self.banned_until else ""
            return f"banned{until}: {self.banned}"
        refused = self.placement.refused
        return f"{WRONG_CLASS}: {refused}" if refused else ""

    @property
    def proven(self) -> bool:
        """Whether work of this peer was accepted and stood an audit; all work of newcomers is audited."""
        if not self.audited:  # as of hundreds that wait for their first lease
            return False
        trusts = self.environments.values()
        caught = sum(trust.rejected[reason] for trust in trusts for reason in AUDIT_FAULTS)
        return self.accepted > 0 and self.audited > caught

    @property
    def recent_fault(self) -> bool:
        """Whether it was caught within its last FAULT_MEMORY audits, or is half-way to a ban."""
        return (self.faults > 0 and self.clean_streak < FAULT_MEMORY) or self.suspicion >= 0.5

    def top_reason(self, environments: Iterable[str] | None = None) -> str:
        """Return the commonest rejection, in all or in these environments, or an empty string."""
        counts: Counter[Reason] = Counter()
        for name in self.environments if environments is None else environments:
            counts.update(self.of(name).rejected)
        return counts.most_common(1)[0][0].value if counts else ""

    def snapshot(self) -> ReputationSnapshot:
        """Copy the state into plain types for msgspec; see restore()."""
        trusts = {name: trust.snapshot() for name, trust in self.environments.items()}
        fields: dict[str, Any] = {**vars(self), "environments": trusts}
        return ReputationSnapshot(**fields)

    @staticmethod
    def restore(snapshot: ReputationSnapshot, environments: Sequence[str]) -> "Reputation":
        """Make the peer of a snapshot. `environments` are the names of those of the run that stored it."""
        fields: dict[str, Any] = {
            attribute.name: getattr(snapshot, attribute.name)
            for attribute in dataclasses.fields(Reputation)
        }
        trusts = snapshot.trusts(environments).items()
        fields["environments"] = {name: Trust.restore(trust) for name, trust in trusts}
        return Reputation(**fields)

    def _sentence(self, what: str, nats: float, test: BanTest) -> str:
        return (
            f"{what} in a sequential test: {nats:.1f} nats, the bar is {test.bar:.1f} "
            f"(after {self.audited} audited rollouts)"
        )

    def ban(self, why: str, until: float = 0.0) -> None:
        """Ban the peer; `why` is a sentence, `until` in Unix seconds, 0 for ever.

        A ban for ever stands, with its first reason; one that ends is replaced.
        """
        if not self.banned or self.banned_until:
            self.banned, self.banned_until = why, until

    def end_ban(self, now: float) -> bool:
        """Lift a ban whose time is over, and return whether there was one; the evidence stays as it is."""
        if not self.banned_until or now < self.banned_until:
            return False
        self.banned, self.banned_at, self.banned_until = "", 0.0, 0.0
        return True


def other_step(nats: float, other_scale: float) -> float:
    """Compute one increment of the test for another policy, by a rollout's other_policy; see BanTest."""
    if math.isnan(nats):
        return 0.0
    return max(-CLIP_NATS, min(CLIP_NATS, nats * other_scale)) - CLIP_COST


def beta_low(a: float, b: float) -> float:
    """Lower 5 % quantile of Beta(a, b), a and b >= 1, within 0.012.

    For b >= 2 by the approximation 26.5.22 of Abramowitz and Stegun; at b = 1 it is exactly 0.05^(1/a), where
    that approximation is poor; between the two by linear interpolation.
    """
    if b >= 2.0:
        return _beta_low_26_5_22(a, b)
    clean = 0.05 ** (1.0 / a)
    return clean + (b - 1.0) * (_beta_low_26_5_22(a, 2.0) - clean)


def _beta_low_26_5_22(a: float, b: float) -> float:
    u, v = 1.0 / (2.0 * a - 1.0), 1.0 / (2.0 * b - 1.0)
    h = 2.0 / (u + v)
    c = (Z_05**2 - 3.0) / 6.0
    w = Z_05 * math.sqrt(h + c) / h - (v - u) * (c + 5.0 / 6.0 - 2.0 / (3.0 * h))
    return a / (a + b * math.exp(2.0 * w))
