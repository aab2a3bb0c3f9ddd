"""From a submission to a verdict and the groups that may be learned from, cheap checks first.

Rewards are recomputed, never taken; what is audited follows from randomness drawn after the upload. A
verdict always comes out: bad input costs the rollout, never the trainer.

Nothing is accepted that the lot could not have picked for an audit: a rollout whose policy is not held any more
is stale, whether it is picked or not.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from ...protocol.audits import is_audited
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease, check_assignment
from ...protocol.manifests import RunManifest
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
from ..environments.environment import (
    Environment,
    EnvironmentFailed,
    EnvironmentStuck,
    Score,
    ScoreMismatch,
    Task,
)
from ..ops.errors import EngineError
from ..training.buffer import BranchTokens, RolloutGroup, ScoredRollout
from ..weights.state import State
from .auditor import (
    AuditCall,
    AuditService,
    AuditTarget,
    Measured,
    Unreadable,
    audit_items,
    boundary_distances,
    evidence,
    plain_turns,
    plan_of,
)
from .checks import CheckedRollout, Rejected, check_submission
from .duplicates import CopyDetector
from .judge import Judgement, StageAttribution, blame, judge, name_stages

logger = logging.getLogger(__name__)

REWARD_TOLERANCE = 1e-6
SCORED_AT_ONCE = 32
"""Rollouts of one submission that are scored at a time: a reward may wait for a judge."""
SCORED_AGAIN = 3
"""Times that a rollout whose reward differs from the claim is scored again, before its worker is blamed."""
STUCK_MOST = 2
"""Rollouts of one submission on which the environment may fail to return; no more of it are scored then."""


@dataclass(frozen=True)
class ReceivedSubmission:
    """A submission as it came: who sent it, in which order, and what was drawn after its receipt."""

    number: int
    digest: bytes
    node: bytes
    sealed: bytes
    challenge: bytes


@dataclass(frozen=True)
class Provenance:
    """By what a submission came to be."""

    lease: Lease
    arrival: ReceivedSubmission
    plan: PipelinePlan | None


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
    """What audits of a submission led to."""

    evidence: list[Evidence] = field(default_factory=list[Evidence])
    judgements: list[Judgement] = field(default_factory=list[Judgement])
    """One per evidence."""
    blames: list[StageAttribution] = field(default_factory=list[StageAttribution])
    """Of those evidences that tell of the boundaries of a pipeline."""
    faults: list[Rejection] = field(default_factory=list[Rejection])
    validator: bytes = b""


@dataclass(frozen=True)
class Verified:
    """A verdict, and the groups made of what was accepted."""

    verdict: Verdict
    rejections: list[Rejection]
    """All of them; the verdict lists the first."""
    groups: list[RolloutGroup]
    audited: AuditResults = field(default_factory=AuditResults)
    plan: PipelinePlan | None = None
    """Of the pipeline that made it, if it says so."""

    def reasons(self) -> Counter[Reason]:
        """Rejected rollouts by reason."""
        return Counter(rejection.reason for rejection in self.rejections)


class Verifier:
    """Checks submissions against lease, environment and policy."""

    def __init__(
        self,
        run_id: bytes,
        run: RunManifest,
        environment: Environment,
        audits: AuditService,
        states: Mapping[int, State],
        copies: CopyDetector,
    ) -> None:
        """`states` holds the policies that may still be claimed, by version; it is read, not copied."""
        self._run_id = run_id
        self._run = run
        self._environment = environment
        self._audits = audits
        self._states = states
        self._copies = copies
        self._varies = ""
        """How a reward that was said to be recomputable turned out not to be."""
        self._earlier: asyncio.Future[None] | None = None
        """Done when the submission before has been looked for copies: of two the first that came is the
        original."""

    @property
    def fault(self) -> str:
        """What is wrong with the environment's rewards, with what to do; empty while nothing is."""
        return self._varies

    async def verify(
        self,
        submission: Submission,
        lease: Lease,
        arrival: ReceivedSubmission,
        *,
        version: int,
        rate: float,
        before: Verdict | None = None,
    ) -> Verified:
        """Verify one submission against policy `version`, the newest one published.

        A share `rate` of what passes the cheap checks is audited, and all of it once one is guilty. Several
        may be verified at a time; their cheap checks are made in the order of the calls.
        `before` is a verdict that a trainer that was killed told of it: it stands, and nothing is audited.

        Raises:
            RemoteProtocolError: the bundle as a whole is not the work of its lease, or the environment has
                changed since the lease was signed, which is nobody's fault but ours.
        """
        earlier, done = self._earlier, asyncio.get_running_loop().create_future()
        self._earlier = done
        try:
            await self._check_lease(lease)
            trainer = self._run.trainer
            plan = plan_of(submission, run=self._run_id, trainer=trainer, node=arrival.node)
            checked = check_submission(submission, lease, self._run, version, plan)
            rejections = list(checked.rejections)
            fit = checked.rollouts
            if before is None:
                fit = [one for one in fit if self._check_held(one, rejections)]
            scored = await self._score_all(fit, lease, rejections)
            if earlier is not None:
                await asyncio.wait([earlier])
            # While they were scored the publisher may have let go of an old version; what is stale leaves no
            # trace among the copies.
            if before is None:
                scored = [one for one in scored if self._check_held(one.rollout, rejections)]
            passed = self._without_copies(scored, arrival, rejections)
        finally:
            done.set_result(None)
        if before is not None:
            audited = AuditResults(faults=_rejected_before(passed, before))
        else:
            audited = await self._audit(passed, Provenance(lease, arrival, plan), rate)
        rejections += audited.faults
        guilty = {(one.group, one.rollout) for one in audited.faults}
        honest = [one for one in passed if one.place not in guilty]
        verdict = make_verdict(arrival, lease, len(honest), rejections, audited, rate, plan)
        groups = self._groups(lease, arrival.node, honest)
        return Verified(verdict, rejections, groups, audited, plan)

    async def _check_lease(self, lease: Lease) -> None:
        """The tasks that we signed must be those that the environment makes of their numbers."""
        try:
            tasks = [await self._environment.task(one.index) for one in lease.tasks]
            digests = {task.index: task.digest for task in tasks}
            check_assignment(lease, digests.__getitem__)
        except (RemoteProtocolError, EnvironmentFailed) as error:
            logger.error("lease %d cannot be verified: %s", lease.lease_id, error)
            detail = "the trainer's environment is another one than when it signed the lease"
            raise RemoteProtocolError(Reason.ENVIRONMENT_ERROR, detail) from error

    async def _score_all(
        self,
        rollouts: Sequence[CheckedRollout],
        lease: Lease,
        rejections: list[Rejection],
    ) -> list[RescoredRollout]:
        """What the trainer's own score agrees with, several at a time; the others go to `rejections`."""
        stuck = 0
        room = asyncio.Semaphore(SCORED_AT_ONCE)

        async def score(rollout: CheckedRollout) -> RescoredRollout | Rejection:
            nonlocal stuck
            async with room:
                try:
                    if stuck >= STUCK_MOST:
                        detail = "the environment did not return on others of this submission"
                        raise Rejected(Reason.ENVIRONMENT_ERROR, detail)
                    return RescoredRollout(rollout, await self._score(lease, rollout))
                except EnvironmentStuck as error:
                    stuck += 1
                    return _rejection(rollout, Reason.ENVIRONMENT_ERROR, str(error))
                except Rejected as fault:
                    return _rejection(rollout, fault.reason, fault.detail)

        found = await asyncio.gather(*map(score, rollouts))
        rejections += [one for one in found if isinstance(one, Rejection)]
        return [one for one in found if isinstance(one, RescoredRollout)]

    def _without_copies(
        self,
        scored: Sequence[RescoredRollout],
        arrival: ReceivedSubmission,
        rejections: list[Rejection],
    ) -> list[RescoredRollout]:
        """Those that nobody sent before; the others go to `rejections`."""
        passed: list[RescoredRollout] = []
        for one in scored:
            try:
                self._copies.check(arrival.number, arrival.node, one.rollout)
                passed.append(one)
            except Rejected as fault:
                rejections.append(_rejection(one.rollout, fault.reason, fault.detail))
        return passed

    async def _score(self, lease: Lease, rollout: CheckedRollout) -> Score:
        """The trainer's own score. Raises Rejected, EnvironmentStuck."""
        score = await self._recompute(lease, rollout)
        if self._run.environment.rewards == "sampled":
            return score
        if not _differ(score.reward, rollout.claimed_reward):
            return score
        for _ in range(0 if self._varies else SCORED_AGAIN):
            again = await self._recompute(lease, rollout)
            if _differ(again.reward, score.reward):
                self._note_variation(lease.tasks[rollout.group].index, score, again)
                break
        if self._varies:
            raise Rejected(Reason.ENVIRONMENT_ERROR, self._varies)
        detail = f"claimed {rollout.claimed_reward:.6g}, recomputed {score.reward:.6g}"
        raise Rejected(Reason.BAD_REWARD, detail)

    async def _recompute(self, lease: Lease, rollout: CheckedRollout) -> Score:
        task = Task(lease.tasks[rollout.group].index, lease.tasks[rollout.group].digest)
        try:
            return await self._environment.score(task, rollout.branches)
        except ScoreMismatch as error:
            raise Rejected(Reason.BAD_PROMPT, str(error)) from error
        except EnvironmentStuck:
            raise
        except EnvironmentFailed as error:
            raise Rejected(Reason.ENVIRONMENT_ERROR, str(error)) from error

    def _note_variation(self, task: int, first: Score, second: Score) -> None:
        """From now on nobody is blamed for a reward that differs."""
        self._varies = (
            f"the reward of {self._environment.name!r} is not deterministic (the trainer scored one rollout of "
            f"task {task} twice: {first.reward:.6g} and {second.reward:.6g}): set "
            "environment.deterministic_rewards = false in a new run"
        )
        logger.error("%s", self._varies)

    # -- audits ------------------------------------------------------------------------------------

    async def _audit(
        self, passed: Sequence[RescoredRollout], made: Provenance, rate: float
    ) -> AuditResults:
        """Audit what the challenge picks, and all of it where something of that cannot be accepted.

        Does not wait before it has taken the states that `passed` claims.
        """
        states = self._claimed_states(passed)
        drawn = [one for one in passed if is_audited(made.arrival.challenge, *one.place, rate)]
        audited = AuditResults()
        await self._audit_these(drawn, states, made, audited)
        # Also where an audit failed: who can make audits fail must not be paid for what was not picked.
        if audited.faults:
            places = {one.place for one in drawn}
            rest = [one for one in passed if one.place not in places]
            await self._audit_these(rest, states, made, audited)
        return audited

    async def _audit_these(
        self,
        passed: Sequence[RescoredRollout],
        states: Mapping[int, State],
        made: Provenance,
        audited: AuditResults,
    ) -> None:
        if not passed:
            return
        call = _call([self._chosen(one, made) for one in passed], states, made)
        try:
            answer = await self._audits.audit(call)
        except EngineError as error:
            # Nothing is learned unaudited that was to be audited, and nobody is blamed for it.
            logger.error("no audit is possible: %s", error)
            audited.faults += [
                _rejection(one.rollout, Reason.AUDIT_FAILED, "the trainer could not audit it")
                for one in passed
            ]
            return
        audited.validator = answer.validator
        for one, measured in zip(passed, answer.measured, strict=True):
            self._judge(one.rollout, measured, audited, made.plan)

    def _judge(
        self,
        rollout: CheckedRollout,
        measured: Sequence[Measured | Unreadable],
        audited: AuditResults,
        plan: PipelinePlan | None,
    ) -> None:
        numbers = [one for one in measured if isinstance(one, Measured)]
        unreadable = [one for one in measured if isinstance(one, Unreadable)]
        if unreadable:
            worst = max(unreadable, key=lambda one: one.proof)
            reason = Reason.BAD_PROOF if worst.proof else Reason.AUDIT_FAILED
            audited.faults.append(_rejection(rollout, reason, worst.detail))
            return
        found = evidence(rollout, numbers)
        judgement = judge(found, self._run.proofs)
        audited.evidence.append(found)
        audited.judgements.append(judgement)
        detail = judgement.detail
        if plan is not None:
            distances = boundary_distances(numbers)
            found_of = blame(found, judgement, distances, self._run.proofs)
            audited.blames.append(found_of)
            who = name_stages(found_of, [stage.node for stage in plan.stages])
            detail = f"{who}: {detail}" if who else detail
        if judgement.reason is not None:
            audited.faults.append(_rejection(rollout, judgement.reason, detail))

    def _chosen(self, passed: RescoredRollout, made: Provenance) -> AuditTarget:
        rollout = passed.rollout
        turns = plain_turns(rollout.branches) or passed.score.turns
        items = audit_items(
            rollout,
            turns,
            lease=made.lease,
            run=self._run_id,
            node=made.arrival.node,
            plan=made.plan,
        )
        return AuditTarget(rollout, items)

    def _check_held(self, rollout: CheckedRollout, rejections: list[Rejection]) -> bool:
        """Whether every policy that a rollout claims is in memory; else it goes to `rejections` as stale."""
        lost = sorted(_claims(rollout) - self._states.keys())
        if lost:
            detail = f"policy {lost[0]} is not held any more, so that nobody could audit this"
            rejections.append(_rejection(rollout, Reason.STALE, detail))
        return not lost

    def _claimed_states(self, passed: Sequence[RescoredRollout]) -> dict[int, State]:
        """The states of all claimed versions and, where they are held, of those before."""
        claimed = {version for one in passed for version in _claims(one.rollout)}
        before = {version - 1 for version in claimed} & self._states.keys()
        return {version: self._states[version] for version in sorted(claimed | before)}

    # -- what may be learned from --------------------------------------------------------------------

    def _groups(
        self, lease: Lease, node: bytes, passed: Sequence[RescoredRollout]
    ) -> list[RolloutGroup]:
        groups: list[RolloutGroup] = []
        for number, task in enumerate(lease.tasks):
            members = [one for one in passed if one.rollout.group == number]
            if len(members) < 2:
                continue
            branches = [b for one in members for b in one.rollout.branches]
            groups.append(
                RolloutGroup(
                    task=task.digest,
                    environment=self._environment.name,
                    rollouts=[_scored(one) for one in members],
                    policy_oldest=min(branch.policy_first for branch in branches),
                    node=node,
                    lease=lease.lease_id.to_bytes(8, "big"),
                )
            )
        return groups


def refuse_all(arrival: ReceivedSubmission, lease: Lease, error: RemoteProtocolError) -> Verified:
    """The verdict on a bundle that is not the work of its lease: every rollout of it is lost."""
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
) -> Verdict:
    """A verdict that fits a message, whatever was rejected and measured."""
    return Verdict(
        submission=arrival.digest,
        lease_id=lease.lease_id,
        accepted=accepted,
        rejections=tuple(rejections[:MAX_REJECTIONS]),
        audited=len(audited.evidence),
        rejected=len(rejections),
        challenge=arrival.challenge,
        rate=rate,
        evidence=tuple(audited.evidence[:MAX_EVIDENCE]),
        validator=audited.validator,
        pipeline=msgspec.UNSET if plan is None else _about_stages(plan, audited.blames),
    )


def _about_stages(plan: PipelinePlan, blames: Sequence[StageAttribution]) -> PipelineVerdict:
    told = (
        Blamed(one.group, one.rollout, one.distances, one.stages)
        for one in blames
        if one.outcome != "clean"
    )
    nodes = tuple(stage.node for stage in plan.stages)
    return PipelineVerdict(plan.group, plan.generation, nodes, tuple(islice(told, MAX_BLAMED)))


def _rejected_before(passed: Sequence[RescoredRollout], before: Verdict) -> list[Rejection]:
    """What of `passed` a verdict rejected; all of it where the verdict had no room for all rejections."""
    listed = {(one.group, one.rollout): one for one in before.rejections}
    found = [listed[one.place] for one in passed if one.place in listed]
    if before.rejected > len(before.rejections):
        detail = "a restart took the list of what was rejected beside it"
        reason = before.rejections[-1].reason
        found += [
            _rejection(one.rollout, reason, detail) for one in passed if one.place not in listed
        ]
    return found


def _claims(rollout: CheckedRollout) -> set[int]:
    """The policy versions that a rollout says it was made by."""
    return {
        version
        for branch in rollout.branches
        for version in (branch.policy_first, branch.policy_last, *(v for _, v in branch.spans))
    }


def _call(chosen: Sequence[AuditTarget], held: Mapping[int, State], made: Provenance) -> AuditCall:
    """`held` has at least the states of the versions that are claimed."""
    arrival = made.arrival
    claimed = {v for one in chosen for item in one.items for v in item.versions}
    others = {v: [v - 1] for v in sorted(claimed) if v - 1 in held}
    wanted = claimed.union(*others.values())
    return AuditCall(
        sealed=arrival.sealed,
        digest=arrival.digest,
        lease=made.lease,
        node=arrival.node,
        challenge=arrival.challenge,
        chosen=chosen,
        states={version: held[version] for version in sorted(wanted)},
        others=others,
    )


def _scored(passed: RescoredRollout) -> ScoredRollout:
    branches = passed.rollout.branches
    return ScoredRollout(
        [BranchTokens(b.token_ids, b.sampled, b.logprobs) for b in branches],
        passed.score.reward,
    )


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > REWARD_TOLERANCE


def _rejection(rollout: CheckedRollout, reason: Reason, detail: str) -> Rejection:
    return Rejection(rollout.group, rollout.index, reason, clipped(detail))
