"""Attribute audits of a pipeline's rollouts to its stages, and decide when to dissolve it.

Stage 0 signs for all, so it always shares the blame: it could have forged the statements of the others. A node
accused by only one stage 0 is excluded from pipelines, but not banned.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...crypto.hashing import short
from ...protocol.numerics import ClassBounds
from ...protocol.pipelines import PipelinePlan
from ...protocol.recent import RecentDict
from ...protocol.reputation import (
    INCREMENT,
    NAMED_AT,
    VOUCHED,
    Audited,
    BanTest,
    Reputation,
    Room,
    outcome_of,
)
from ..verification.judgement import StageAttribution
from ..verification.verdict import AuditResults, Verified

logger = logging.getLogger(__name__)

PLANS = 256
"""Number of plans that are remembered."""
Dissolve = Callable[[bytes, bytes, str], None]
"""Callback (group, node, reason): the group continues without that node, which joins no further plan."""


@dataclass
class Tally:
    """The evidence against the stages of one plan so far."""

    doubt: list[float]
    """Nats, by stage: a CUSUM over the outcomes of all rollouts that the stage may be responsible for."""
    rooms: list[Room]
    """Rooms by stage."""
    unstated: int
    """Rollouts that may still come without boundaries: at most those in progress when the plan began."""
    parted: bool = False


class StageFaults:
    """Attributes faults to the nodes that made a submission."""

    def __init__(
        self, reputation: Callable[[bytes], Reputation], dissolve: Dissolve, test: BanTest
    ) -> None:
        self._reputation = reputation
        self._dissolve = dissolve
        self._test = test
        self._tallies = RecentDict[tuple[bytes, int], Tally](PLANS)

    def note(self, node: bytes, verified: Verified) -> None:
        """Record the audit results for `node`, which signed a submission, and its other stages."""
        plan, audited, test = verified.plan, verified.audited, self._test_of(verified)
        if plan is None:
            self._reputation(node).observe(observed(audited, verified.placing), test)
            return
        tally, count = self._tally(plan), len(plan.stages)
        blames = [_stated(attribution, tally) for attribution in audited.blames]
        first = [_laid(attribution, 0, count) for attribution in blames]
        self._reputation(node).observe(first, test, tally.rooms[0])
        blames = [attribution for attribution in blames if attribution.distances]
        for rank in range(1, count):
            self._reputation(plan.stages[rank].node).observe_stage(
                (_laid(attribution, rank, count) for attribution in blames),
                test,
                tally.rooms[rank],
                accuser=node,
                named=any(
                    attribution.outcome == "rejected" and attribution.named == rank
                    for attribution in blames
                ),
            )
        for rank in range(len(plan.stages)):
            tally.doubt[rank] = _doubt(tally.doubt[rank], blames, rank)
        self._part(plan, tally)

    def _test_of(self, verified: Verified) -> BanTest:
        """Return the test, with what it takes from the bounds that judged."""
        bounds = verified.verdict.bounds
        if not isinstance(bounds, ClassBounds):
            return self._test
        return replace(self._test, other_scale=bounds.other_scale, means=bounds.means)

    def _tally(self, plan: PipelinePlan) -> Tally:
        """Return a plan's tally; late submissions of a dissolved plan still count for that plan."""
        key, count = (plan.group, plan.generation), len(plan.stages)
        rooms = [Room.of(self._test) for _ in range(count)]
        fresh = Tally([0.0] * count, rooms, plan.shape.max_sequences)
        tally = self._tallies[key] = self._tallies.get(key, fresh)
        return tally

    def _part(self, plan: PipelinePlan, tally: Tally) -> None:
        """Exclude a later stage from the group once too many faults may be that stage's."""
        later = range(1, len(plan.stages))
        peers = [self._reputation(stage.node) for stage in plan.stages]
        worst = max(later, key=lambda rank: (tally.doubt[rank], peers[rank].suspicion))
        node, doubt = plan.stages[worst].node, tally.doubt[worst] / self._test.bar
        if tally.parted or max(doubt, peers[worst].other_nats / self._test.bar) < NAMED_AT:
            return
        tally.parted = True
        why = (
            f"audits say that it can be stage {worst} of {len(plan.stages)} which computes something else: "
            f"{doubt:.2f} of what bans a worker"
        )
        logger.warning("pipeline %s goes on without %s: %s", short(plan.group), short(node), why)
        self._dissolve(plan.group, node, why)


def observed(audits: AuditResults, placing: bool = False) -> list[Audited]:
    """Return the observations for the sequential tests of a node that worked alone, in order.

    With `placing`, suspect rollouts are left out, as they may only be of another numerics class than claimed.
    Means that a validator states do not count: unlike a rejection, nobody measures them again.
    """
    observations: list[Audited] = []
    for evidence, judgement in zip(audits.evidence, audits.judgements, strict=True):
        outcome = outcome_of(judgement.reason, judgement.suspect)
        if outcome is not None and not (placing and outcome == "suspect"):
            counts = evidence.means and not audits.validator
            means = (*evidence.means, evidence.fingerprint) if counts else ()
            observations.append(Audited(outcome, evidence.other_policy, means=means))
    return observations


def _stated(attribution: StageAttribution, tally: Tally) -> StageAttribution:
    """Attribute a rollout without boundaries to stage 0.

    Excepted are the rollouts that may have been begun with other stages.
    """
    if attribution.distances or attribution.outcome == "clean":
        return attribution
    tally.unstated -= 1
    return attribution if tally.unstated >= 0 else replace(attribution, stages=(0,))


def spared(audits: AuditResults) -> int:
    """Count the rejected rollouts that other nodes than the signer may be responsible for."""
    return sum(map(of_others, audits.blames))


def of_others(attribution: StageAttribution) -> bool:
    """Whether a rollout was rejected for what other nodes than the signer may have done."""
    return attribution.outcome == "rejected" and attribution.stages != (0,)


def _doubt(nats: float, blames: Sequence[StageAttribution], rank: int) -> float:
    for attribution in blames:
        nats = max(
            0.0, nats + INCREMENT[attribution.outcome if rank in attribution.stages else "clean"]
        )
    return nats


def _laid(attribution: StageAttribution, rank: int, count: int) -> Audited:
    """Return a rollout's evidence on stage `rank` of `count`.

    All stages share its evidence of another policy.
    """
    other = attribution.other_policy / count
    if rank in attribution.stages:
        return Audited(attribution.outcome, other, 1 / len(attribution.stages))
    if attribution.outcome != "clean" and (rank == 0 or rank + 1 in attribution.stages[:1]):
        return Audited(attribution.outcome, other, VOUCHED, vouches=True)
    return Audited("clean", other)
