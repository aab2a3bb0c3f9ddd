"""Make the verdict on a submission: what arrived, which rollouts pass, what was measured.

The verifier fills a PendingVerdict, check by check (verifier.py); make_verdict() makes the part that is signed.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec
from msgspec import structs

from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease
from ...protocol.numerics import ClassBounds
from ...protocol.pipelines import PipelinePlan
from ...protocol.rollouts import (
    MAX_BLAMED,
    MAX_EVIDENCE,
    MAX_REJECTIONS,
    Blamed,
    Evidence,
    PipelineVerdict,
    Rejection,
    Submission,
    Verdict,
    clipped,
)
from ..environments.environment import Score
from ..training.buffer import RolloutGroup
from ..weights.state import State
from .checks import CheckedRollout
from .class_bounds import Reference
from .judgement import Judgement, StageAttribution
from .self_calibration import AuditConditions


@dataclass(frozen=True)
class ReceivedSubmission:
    """A submission as it arrived: its sender, its number in the order of receipt, and the challenge."""

    number: int
    digest: bytes
    node: bytes
    sealed: bytes
    challenge: bytes
    """Random bytes that were drawn after the receipt."""


@dataclass(frozen=True)
class RescoredRollout:
    """A rollout that passed the cheap checks, and the trainer's own score of it."""

    rollout: CheckedRollout
    score: Score

    @property
    def place(self) -> tuple[int, int]:
        """(group, index)."""
        return self.rollout.group, self.rollout.index


@dataclass
class AuditResults:
    """Results of the audits of a submission."""

    evidence: list[Evidence] = field(default_factory=list[Evidence])
    judgements: list[Judgement] = field(default_factory=list[Judgement])
    """One per evidence."""
    blames: list[StageAttribution] = field(default_factory=list[StageAttribution])
    """One per evidence, if a pipeline made the submission."""
    validator: bytes = b""
    versions: list[int] = field(default_factory=list[int])
    """One per evidence: the newest policy version that sampled any of it."""
    readings: list[Reference] = field(default_factory=list[Reference])
    """The auditor's noise in those rollouts that were read in float32."""
    envelope: ClassBounds | None = None
    """The envelope, if these readings made it anew."""


class Turn:
    """A submission's turn in the search for copies: of two, the first that was received is the original."""

    def __init__(self, earlier: "asyncio.Future[None] | None") -> None:
        """`earlier` is done when all submissions before were looked at; None: there are none."""
        self._earlier = earlier
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when this one and all before were looked at, or refused."""
        self._passed_on = False

    async def wait(self) -> None:
        """Wait for all earlier submissions."""
        if self._earlier is not None:
            await asyncio.wait([self._earlier])

    def pass_on(self) -> None:
        """Let the next submission have its turn.

        It waits for all earlier ones, even if this one is refused at once.
        """
        if self._passed_on:
            return
        self._passed_on = True
        if self._earlier is None or self._earlier.done():
            self.over.set_result(None)
        else:
            self._earlier.add_done_callback(lambda _: self.over.set_result(None))


@dataclass
class PendingVerdict:
    """A submission that is being verified: what passes so far, and why the rest does not."""

    submission: Submission
    lease: Lease
    arrival: ReceivedSubmission
    turn: Turn
    conditions: AuditConditions
    version: int
    """The newest policy version that is published."""
    rate: float
    """Share of the rollouts to audit."""
    before: Verdict | None = None
    """The verdict that a trainer gave before it was killed: it stands."""
    plan: PipelinePlan | None = None
    rollouts: list[CheckedRollout] = field(default_factory=list[CheckedRollout])
    """Rollouts that passed, before they are scored."""
    passed: list[RescoredRollout] = field(default_factory=list[RescoredRollout])
    """Rollouts that passed, with their scores; audits do not remove those that they reject."""
    states: Mapping[int, State] = field(default_factory=dict[int, State])
    """States of the policies that `passed` claims and, if held, of those before them."""
    rejections: list[Rejection] = field(default_factory=list[Rejection])
    audited: AuditResults = field(default_factory=AuditResults)
    texts: set[int] = field(default_factory=set[int])
    """Hashes of the audited texts: a repeated one says nothing new about a worker's means."""

    def reject(self, rollout: CheckedRollout, reason: Reason, detail: str) -> None:
        """Reject a rollout; `detail` is clipped."""
        self.rejections.append(Rejection(rollout.group, rollout.index, reason, clipped(detail)))

    def without_rejected(self, passed: Sequence[RescoredRollout]) -> list[RescoredRollout]:
        """Return the rollouts that nothing has rejected so far."""
        rejected = {(rejection.group, rejection.rollout) for rejection in self.rejections}
        return [rollout for rollout in passed if rollout.place not in rejected]


@dataclass(frozen=True)
class Verified:
    """A verdict, and the groups made of the accepted rollouts."""

    verdict: Verdict
    rejections: list[Rejection]
    """All rejections; the verdict lists the first ones."""
    groups: list[RolloutGroup]
    audited: AuditResults = field(default_factory=AuditResults)
    plan: PipelinePlan | None = None
    """Plan of the pipeline that made the submission, if it names one."""
    placing: bool = False
    """See AuditConditions."""
    environment: str = ""
    """Name of the environment; empty if the bundle as a whole was refused."""

    @property
    def clean(self) -> bool:
        """Whether nothing was rejected, and no audit found anything suspect."""
        audited = self.audited
        return not (
            self.rejections
            or any(judgement.suspect for judgement in audited.judgements)
            or any(stage.outcome != "clean" for stage in audited.blames)
        )

    def reasons(self) -> Counter[Reason]:
        """Count rejected rollouts by reason."""
        return Counter(rejection.reason for rejection in self.rejections)


def refuse_all(arrival: ReceivedSubmission, lease: Lease, error: RemoteProtocolError) -> Verified:
    """Make the verdict on a bundle that is not the work of its lease: reject every rollout."""
    rejections = [
        Rejection(group, index, error.reason, clipped(error.detail))
        for group in range(len(lease.tasks))
        for index in range(lease.group_size)
    ]
    return Verified(
        make_verdict(arrival, lease, 0, rejections, AuditResults(), 0.0), rejections, []
    )


def make_verdict(
    arrival: ReceivedSubmission,
    lease: Lease,
    accepted: int,
    rejections: list[Rejection],
    audited: AuditResults,
    rate: float,
    plan: PipelinePlan | None = None,
    bounds: ClassBounds | None = None,
) -> Verdict:
    """Make a verdict whose lists are cut to fit a message.

    `bounds` are those that were applied, in a run that measures them.
    """
    return Verdict(
        submission=arrival.digest,
        lease_id=lease.lease_id,
        accepted=accepted,
        rejections=tuple(rejections[:MAX_REJECTIONS]),
        audited=len(audited.evidence),
        rejected=len(rejections),
        challenge=arrival.challenge,
        rate=rate,
        evidence=tuple(
            structs.replace(evidence, means=()) for evidence in audited.evidence[:MAX_EVIDENCE]
        ),
        validator=audited.validator,
        pipeline=msgspec.UNSET if plan is None else _stages_verdict(plan, audited.blames),
        bounds=msgspec.UNSET if bounds is None else bounds,
    )


def _stages_verdict(plan: PipelinePlan, blames: Sequence[StageAttribution]) -> PipelineVerdict:
    blamed = (
        Blamed(blame.group, blame.rollout, blame.distances, blame.stages)
        for blame in blames
        if blame.outcome != "clean"
    )
    nodes = tuple(stage.node for stage in plan.stages)
    return PipelineVerdict(plan.group, plan.generation, nodes, tuple(islice(blamed, MAX_BLAMED)))


def reject_as_before(work: PendingVerdict, before: Verdict) -> None:
    """Reject the rollouts that a verdict rejected; all of them if its list is incomplete."""
    listed = {(rejection.group, rejection.rollout): rejection for rejection in before.rejections}
    complete = before.rejected <= len(before.rejections)
    for scored in work.passed:
        if scored.place in listed:
            work.rejections.append(listed[scored.place])
        elif not complete:
            reason = before.rejections[-1].reason
            work.reject(scored.rollout, reason, "a restart lost the list of the other rejections")


def claimed_versions(rollout: CheckedRollout) -> set[int]:
    """Return the policy versions that a rollout claims."""
    return {
        version
        for branch in rollout.branches
        for version in (branch.policy_first, branch.policy_last, *(v for _, v in branch.spans))
    }
