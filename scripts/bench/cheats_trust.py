"""From what audits found to when a worker is caught and banned: production's trust, fed with measured outcomes.

Outcomes are drawn with replacement from those that were measured, so no chance is better known than by them.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from primerl.protocol.audits import audit_rate
from primerl.protocol.manifests import ProofContract
from primerl.protocol.reputation import Audited, BanTest, Reputation, ban_test, outcome_of
from primerl.tests.attacks.cheat_world import Outcome

EXPECTED_AUDITS = 200_000
"""Of the run that the bars are made for: 800 steps of 16 x 8 rollouts, twice."""
SUBMISSION = 8
"""Rollouts that arrive together."""
PATIENCE = 8192
"""Rollouts after which a simulated worker counts as never banned."""
RECORD = 1000.0
"""Good rollouts of a proven worker before it begins to cheat."""
DRAWS = 2000
AUDITS = 100_000
LIVES = 200


@dataclass(frozen=True)
class Stopped:
    """Rollouts that were sent until the ban, over many simulated workers."""

    banned: float
    """Share of the workers that were banned at all."""
    median: float
    slowest: float
    """95 % of all workers were banned within so many; infinite if fewer ever were."""
    quarantined: float
    """Median until nothing was leased any more, by ban or quarantine."""


def caught_within(
    outcomes: Sequence[Outcome], audited: int, contract: ProofContract, chance: random.Random
) -> float:
    """P(some rollout rejected, or the worker banned) among `audited` audited rollouts."""
    test = ban_test(contract, EXPECTED_AUDITS)
    caught = 0
    for _ in range(DRAWS):
        drawn = chance.choices(outcomes, k=audited)
        caught += any(one.caught for one in drawn) or _banned(drawn, test)
    return caught / DRAWS


def _banned(drawn: Sequence[Outcome], test: BanTest) -> bool:
    reputation = Reputation()
    reputation.observe(observed(drawn), test)
    return bool(reputation.banned)


def false_bans(honest: Sequence[Outcome], contract: ProofContract, chance: random.Random) -> int:
    """Bans of honest workers among AUDITS audited rollouts; a banned worker starts anew.

    The contract promises false_bans of them in EXPECTED_AUDITS.
    """
    test = ban_test(contract, EXPECTED_AUDITS)
    reputation, bans = Reputation(), 0
    for one in observed(chance.choices(honest, k=AUDITS)):
        reputation.observe([one], test)
        if reputation.banned:
            bans += 1
            reputation = Reputation()
    return bans


def until_ban(
    outcomes: Sequence[Outcome],
    contract: ProofContract,
    chance: random.Random,
    *,
    proven: bool,
) -> Stopped:
    """A newcomer, all of whose rollouts are audited, or a proven worker that begins to cheat."""
    lives = [_live(outcomes, contract, chance, proven=proven) for _ in range(LIVES)]
    bans = sorted(ban for ban, _ in lives)
    return Stopped(
        banned=sum(ban < float("inf") for ban in bans) / LIVES,
        median=median(bans),
        slowest=bans[int(0.95 * LIVES)],
        quarantined=median(quarantine for _, quarantine in lives),
    )


def _live(
    outcomes: Sequence[Outcome], contract: ProofContract, chance: random.Random, *, proven: bool
) -> tuple[float, float]:
    """Rollouts sent until the ban, and until quarantine or ban."""
    test = ban_test(contract, EXPECTED_AUDITS)
    reputation = Reputation(good=RECORD if proven else 0.0, clean_streak=10**6 if proven else 0)
    quarantined = float("inf")
    for sent in range(SUBMISSION, PATIENCE + 1, SUBMISSION):
        rate = 1.0
        if proven:
            rate = audit_rate(reputation, contract.audit_rate, 0.0, reputation.recent_fault)
        batch = chance.choices(outcomes, k=SUBMISSION)
        audited = _audited(batch, rate, chance)
        seen = [one for one in batch if one.caught and one.evidence is None]
        rejected = Counter(one.reason for one in [*seen, *audited] if one.reason is not None)
        reputation.record(SUBMISSION - rejected.total(), rejected, now=1.0)
        reputation.observe(observed(audited), test)
        if reputation.refused:
            quarantined = min(quarantined, sent)
        if reputation.banned:
            return sent, quarantined
    return float("inf"), quarantined


def _audited(batch: Sequence[Outcome], rate: float, chance: random.Random) -> list[Outcome]:
    """A share `rate` of what the cheap checks let pass; all of it once one is guilty."""
    passed = [one for one in batch if one.evidence is not None]
    drawn = [one for one in passed if chance.random() < rate]
    return passed if any(one.caught for one in drawn) else drawn


def observed(outcomes: Sequence[Outcome]) -> list[Audited]:
    """What the sequential tests are told."""
    found: list[Audited] = []
    for one in outcomes:
        kind = outcome_of(one.reason, one.suspect)
        if kind is not None and one.evidence is not None:
            found.append(Audited(kind, one.evidence.other_policy))
    return found
