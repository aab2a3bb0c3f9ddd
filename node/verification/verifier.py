"""Verify submissions: from a bundle to a verdict and groups to train on, cheap checks first.

Invariants:
- rewards are recomputed, never taken from the worker, unless the manifest says that they cannot be recomputed;
- the rollouts to audit follow from randomness drawn after the upload;
- a rollout is accepted only if it could have been audited: one whose policy is no longer held is stale;
- there is always a verdict: bad input costs the rollout, never the trainer.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec
from msgspec import structs

from ...protocol.audits import is_audited
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease, check_assignment, environment_of
from ...protocol.manifests import RunManifest
from ...protocol.numerics import ENVELOPE, ClassBounds
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
from ..environments.leased_prompts import of_lease
from ..errors import EngineError
from ..training.buffer import AgentShare, BranchTokens, RolloutGroup, ScoredRollout
from ..weights.state import State
from .auditor import (
    AuditCall,
    AuditService,
    AuditTarget,
    Measured,
    Unreadable,
    VersionComparisons,
    audit_items,
    boundary_distances,
    evidence,
    plain_turns,
    plan_of,
)
from .checks import CheckedRollout, Rejected, check_submission, sampled_runs
from .class_bounds import ENOUGH, Reference
from .duplicates import CopyDetector
from .envelope import NoiseEnvelope
from .judge import Judgement, StageAttribution, blame, first_above, judge, name_stages
from .self_calibration import AuditConditions, SelfCalibration

logger = logging.getLogger(__name__)

REWARD_TOLERANCE = 1e-6
SCORED_AT_ONCE = 32
"""Rollouts of one submission that are scored at a time: a reward may wait for a judge model."""
PORTION_TOKENS = 1 << 17
"""Tokens after which a search for copies ends its portion: some 20 ms of a thread."""
SCORED_AGAIN = 3
"""Repeated scorings of a rollout with a reward other than claimed, before blaming its worker."""
STUCK_MOST = 2
"""Rollouts of one submission on which the environment may hang; the others are then not scored."""


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

    def reasons(self) -> Counter[Reason]:
        """Count rejected rollouts by reason."""
        return Counter(rejection.reason for rejection in self.rejections)


@dataclass
class _Work:
    """A submission that is being verified."""

    lease: Lease
    arrival: ReceivedSubmission
    plan: PipelinePlan | None
    conditions: AuditConditions
    rejections: list[Rejection]
    audited: AuditResults = field(default_factory=AuditResults)
    texts: set[int] = field(default_factory=set[int])
    """Hashes of the audited texts: one that comes again says nothing new of the means of a worker."""

    def reject(self, rollout: CheckedRollout, reason: Reason, detail: str) -> None:
        self.rejections.append(Rejection(rollout.group, rollout.index, reason, clipped(detail)))

    def without_rejected(self, passed: Sequence[RescoredRollout]) -> list[RescoredRollout]:
        rejected = {(one.group, one.rollout) for one in self.rejections}
        return [one for one in passed if one.place not in rejected]


@dataclass(frozen=True)
class Readings:
    """What measures the envelope, and what keeps it."""

    envelope: NoiseEnvelope
    calibration: SelfCalibration
    done: asyncio.Condition = field(default_factory=asyncio.Condition)
    """Notified when texts were read."""


class Verifier:
    """Verification of submissions against lease, environment and policy."""

    def __init__(
        self,
        run_id: bytes,
        run: RunManifest,
        environments: Sequence[Environment],
        audits: AuditService,
        states: Mapping[int, State],
        copies: CopyDetector,
        readings: Readings | None = None,
    ) -> None:
        """Take the parts; `environments` are those of the run, in its order.

        `states` holds the policies that may still be claimed, by version; it is read, not copied. `readings`
        measure the envelope, in a run that has one.
        """
        self._readings = readings
        self._run_id = run_id
        self._run = run
        self._environments = environments
        self._audits = audits
        self._states = states
        self._copies = copies
        self._comparisons = VersionComparisons()
        self._varies: dict[int, str] = {}
        """Environment number -> evidence that it is not deterministic, although it was declared so."""
        for one in run.environments:
            if one.rewards == "claimed":
                logger.warning(
                    "environment %s: tool results and rewards are believed as workers claim them, as its tools "
                    "are not deterministic",
                    one.name,
                )
        self._earlier: asyncio.Future[None] | None = None
        """Done when all submissions before were checked for copies: of two, the first received is the
        original."""

    @property
    def fault(self) -> str:
        """Faults of the environments, each with a remedy; empty if there are none."""
        return "; ".join(self._varies.values())

    @property
    def judge_fault(self) -> str:
        """Judges that do not answer, so that rewards wait; empty if all answer."""
        return "; ".join(
            dict.fromkeys(one.judge_fault for one in self._environments if one.judge_fault)
        )

    async def verify(
        self,
        submission: Submission,
        lease: Lease,
        arrival: ReceivedSubmission,
        *,
        version: int,
        rate: float,
        conditions: AuditConditions | None = None,
        before: Verdict | None = None,
    ) -> Verified:
        """Verify one submission against policy `version`, the newest one published.

        A share `rate` of the rollouts that pass the cheap checks is audited, and all of them once one is
        guilty. `conditions` hold the bounds to apply; by default the manifest's. Several submissions may be
        verified at a time; copies are looked for in the order of the calls. `before` is the verdict that a
        trainer gave before it was killed: it stands, and nothing is audited.

        Raises RemoteProtocolError if the bundle as a whole is not the work of its lease, or if the environment
        has changed since the lease was signed, which is not the worker's fault.
        """
        earlier, done = self._earlier, asyncio.get_running_loop().create_future()
        self._earlier = done
        try:
            await self._check_lease(lease)
            plan = plan_of(
                submission, run=self._run_id, trainer=self._run.trainer, node=arrival.node
            )
            checked = await asyncio.to_thread(
                check_submission, submission, lease, self._run, version, plan
            )
            conditions = conditions or AuditConditions(self._run.proofs)
            work = _Work(lease, arrival, plan, conditions, checked.rejections)
            rollouts = checked.rollouts
            if before is None:
                rollouts = [one for one in rollouts if self._check_held(one, work)]
            passed = await self._score_all(rollouts, work)
            if earlier is not None:
                await asyncio.wait([earlier])
            # While they were scored the publisher may have dropped an old version; a stale rollout leaves no
            # trace among the copies. What is held now is kept for the audit: copies are looked for meanwhile.
            states: Mapping[int, State] = {}
            if before is None:
                passed = [one for one in passed if self._check_held(one.rollout, work)]
                states = self._claimed_states(passed)
            passed = await self._without_copies(passed, work)
        finally:
            # also if this one is refused at once: the next one waits for all that came before
            if earlier is None or earlier.done():
                done.set_result(None)
            else:
                earlier.add_done_callback(lambda _: done.set_result(None))
        if before is not None:
            _reject_as_before(passed, before, work)
        else:
            await self._audit(passed, states, work, rate)
            if unlearned := work.conditions.unlearned:
                for one in work.without_rejected(passed):
                    work.reject(one.rollout, Reason.UNCALIBRATED, unlearned)
        passed = work.without_rejected(passed)
        verdict = make_verdict(
            arrival,
            lease,
            len(passed),
            work.rejections,
            work.audited,
            rate,
            plan,
            work.conditions.bounds,
        )
        groups = self._groups(lease, arrival.node, passed)
        return Verified(
            verdict,
            work.rejections,
            groups,
            work.audited,
            plan,
            conditions.placing,
            environment_of(self._run, lease).name,
        )

    # -- cheap checks ------------------------------------------------------------------------------

    async def _check_lease(self, lease: Lease) -> None:
        """Check that the environment makes the tasks of a lease from their numbers.

        Raises RemoteProtocolError if it makes others.
        """
        try:
            environment_of(self._run, lease)
            made = self._environment(lease).task
            tasks = [await made(one.index) for one in lease.tasks]
            digests = {task.index: task.digest for task in tasks}
            check_assignment(lease, digests.__getitem__)
        except (RemoteProtocolError, EnvironmentFailed) as error:
            logger.error("lease %d cannot be verified: %s", lease.lease_id, error)
            detail = "the trainer's environment is another one than when it signed the lease"
            raise RemoteProtocolError(Reason.ENVIRONMENT_ERROR, detail) from error

    def _environment(self, lease: Lease) -> Environment:
        return of_lease(self._environments[lease.environment], lease)

    def _check_held(self, rollout: CheckedRollout, work: _Work) -> bool:
        """Return whether every policy that a rollout claims is held; else reject it as stale."""
        lost = sorted(_claims(rollout) - self._states.keys())
        if lost:
            detail = f"policy {lost[0]} is not held any more, so this could not be audited"
            work.reject(rollout, Reason.STALE, detail)
        return not lost

    async def _without_copies(
        self, passed: Sequence[RescoredRollout], work: _Work
    ) -> list[RescoredRollout]:
        """Reject copies, and return the others. A thread looks for them: the event loop goes on."""
        sampling = environment_of(self._run, work.lease).sampling
        if sampling.temperature == 0 or sampling.top_k:
            # Replies to equal prompts are equal, or may be: logprobs do not tell what the few tokens share.
            return list(passed)
        arrival, originals = work.arrival, list[RescoredRollout]()

        def look(portion: Sequence[RescoredRollout]) -> list[Rejected | None]:
            return [self._fault_of_copy(arrival, one.rollout, sampling.top_p) for one in portion]

        for portion in _portions(passed):
            # a verification that is cancelled leaves its thread at most this portion
            faults = await asyncio.to_thread(look, portion)
            for one, fault in zip(portion, faults, strict=True):
                if fault is None:
                    originals.append(one)
                else:
                    work.reject(one.rollout, fault.reason, fault.detail)
        return originals

    def _fault_of_copy(
        self, arrival: ReceivedSubmission, rollout: CheckedRollout, top_p: float
    ) -> Rejected | None:
        try:
            self._copies.check(arrival.number, arrival.node, rollout, top_p=top_p)
        except Rejected as fault:
            return fault
        return None

    async def _score_all(
        self, rollouts: Sequence[CheckedRollout], work: _Work
    ) -> list[RescoredRollout]:
        """Score rollouts, several at a time, and reject those with another reward than claimed."""
        stuck = 0
        room = asyncio.Semaphore(SCORED_AT_ONCE)

        async def score(rollout: CheckedRollout) -> RescoredRollout | None:
            nonlocal stuck
            async with room:
                try:
                    if stuck >= STUCK_MOST:
                        detail = "the environment did not return on others of this submission"
                        raise Rejected(Reason.ENVIRONMENT_ERROR, detail)
                    return RescoredRollout(rollout, await self._score(work.lease, rollout))
                except EnvironmentStuck as error:
                    stuck += 1
                    work.reject(rollout, Reason.ENVIRONMENT_ERROR, str(error))
                except Rejected as fault:
                    work.reject(rollout, fault.reason, fault.detail)
                return None

        found = await asyncio.gather(*map(score, rollouts))
        return [one for one in found if one is not None]

    async def _score(self, lease: Lease, rollout: CheckedRollout) -> Score:
        """Compute the trainer's own score. Raises Rejected, EnvironmentStuck."""
        rewards = environment_of(self._run, lease).rewards
        if rewards == "claimed":
            return await self._believe(lease, rollout)
        try:
            score = await self._recompute(lease, rollout)
        except Rejected as fault:
            await self._check_replay(lease, rollout, fault)
            raise
        if rewards == "sampled":
            return score
        if not _differ(score.reward, rollout.claimed_reward):
            return score
        number = lease.environment
        for _ in range(0 if number in self._varies else SCORED_AGAIN):
            again = await self._recompute(lease, rollout)
            if _differ(again.reward, score.reward):
                told = f"scored twice: {score.reward:.6g} and {again.reward:.6g}"
                self._note_variation(lease, rollout.group, "the reward", told, "rewards")
                break
        if number in self._varies:
            raise Rejected(Reason.ENVIRONMENT_ERROR, self._varies[number])
        detail = f"claimed {rollout.claimed_reward:.6g}, recomputed {score.reward:.6g}"
        raise Rejected(Reason.BAD_REWARD, detail)

    async def _believe(self, lease: Lease, rollout: CheckedRollout) -> Score:
        """Accept the claimed reward of a rollout of the right task. Raises Rejected."""
        try:
            prompt = await self._environment(lease).prompt(_task(lease, rollout))
        except (ScoreMismatch, EnvironmentFailed) as error:
            raise Rejected(Reason.ENVIRONMENT_ERROR, str(error)) from error
        if len(rollout.branches) != 1:
            detail = "several branches of a rollout that cannot be played again"
            raise Rejected(Reason.BAD_PROMPT, detail)
        (branch,) = rollout.branches
        head = len(prompt)
        if branch.token_ids[:head] != prompt or branch.sampled[: head + 1] != [False] * head + [
            True
        ]:
            raise Rejected(Reason.BAD_PROMPT, "the task has another prompt than the rollout")
        return Score(rollout.claimed_reward)

    async def _check_replay(self, lease: Lease, rollout: CheckedRollout, fault: Rejected) -> None:
        """Raise Rejected, blaming no worker, if replays of a rollout of several turns differ.

        `fault` found that it is not a rollout of its task. If another replay has another result, the
        environment is not deterministic.
        """
        number = lease.environment
        several = any(len(sampled_runs(one.sampled)) > 1 for one in rollout.branches)
        if fault.reason is not Reason.BAD_PROMPT or not several:
            return
        for _ in range(0 if number in self._varies else SCORED_AGAIN):
            try:
                await self._recompute(lease, rollout)
                again = "it is as the rollout says"
            except Rejected as other:
                again = other.detail
            if again != fault.detail:
                told = f"played twice: {fault.detail}; {again}"
                self._note_variation(lease, rollout.group, "the conversation", told, "tools")
                break
        if number in self._varies:
            raise Rejected(Reason.ENVIRONMENT_ERROR, self._varies[number])

    async def _recompute(self, lease: Lease, rollout: CheckedRollout) -> Score:
        task = _task(lease, rollout)
        try:
            return await self._environment(lease).score(task, rollout.branches)
        except ScoreMismatch as error:
            raise Rejected(Reason.BAD_PROMPT, str(error)) from error
        except EnvironmentStuck:
            raise
        except EnvironmentFailed as error:
            raise Rejected(Reason.ENVIRONMENT_ERROR, str(error)) from error

    def _note_variation(self, lease: Lease, group: int, what: str, told: str, key: str) -> None:
        """Record that an environment is not deterministic: no worker is blamed for that any more."""
        name, task = environment_of(self._run, lease).name, lease.tasks[group].index
        self._varies[lease.environment] = (
            f"{what} of {name!r} is not deterministic (a rollout of task {task} was {told}): set its "
            f"deterministic_{key} = false in a new run"
        )
        logger.error("%s", self._varies[lease.environment])

    # -- audits ------------------------------------------------------------------------------------

    async def _audit(
        self,
        passed: Sequence[RescoredRollout],
        states: Mapping[int, State],
        work: _Work,
        rate: float,
    ) -> None:
        """Audit the rollouts that the challenge picks, and all others once one of these is rejected.

        `states` has at least those that `passed` claims.
        """
        drawn = [one for one in passed if is_audited(work.arrival.challenge, *one.place, rate)]
        await self._audit_these(drawn, states, work)
        # Also if an audit failed: a worker that can make audits fail must not be paid for the others.
        if len(work.without_rejected(drawn)) < len(drawn):
            places = {one.place for one in drawn}
            rest = [one for one in passed if one.place not in places]
            await self._audit_these(rest, states, work)

    async def _audit_these(
        self, passed: Sequence[RescoredRollout], states: Mapping[int, State], work: _Work
    ) -> None:
        if not passed:
            return
        call = self._call(passed, states, work)
        try:
            answer = await self._audits.audit_rollouts(call)
        except EngineError as error:
            # A rollout that was chosen for an audit is not trained on without one; its worker is not blamed.
            logger.error("no audit is possible: %s", error)
            for one in passed:
                work.reject(one.rollout, Reason.AUDIT_FAILED, "the trainer could not audit it")
            return
        work.audited.validator = answer.validator
        if self._readings is not None and work.conditions.reads:
            await self._read(self._readings, call, answer.measured, work)
        for one, measured in zip(passed, answer.measured, strict=True):
            self._judge(one.rollout, measured, work)

    async def _read(
        self,
        readings: Readings,
        call: AuditCall,
        measured: Sequence[Sequence[Measured | Unreadable]],
        work: _Work,
    ) -> None:
        """Read a share of the audited rollouts in float32, before any is judged.

        Texts that would be rejected are not read: no seed decided them. The first bounds are waited for, as
        long as texts are read that may make them.
        """
        calibration, reject = readings.calibration, work.conditions.contract.reject
        sound: list[AuditTarget] = []
        for target, found in zip(call.chosen, measured, strict=True):
            numbers = [one for one in found if isinstance(one, Measured)]
            whole = len(numbers) == len(found)
            if whole and not first_above(evidence(target.rollout, numbers), reject):
                sound.append(target)
        newest = max((max(_claims(one.rollout)) for one in sound), default=0)
        chosen = sound[: calibration.readings_due(len(sound), newest)]
        if chosen:
            await self._read_these(chosen, readings, call, work)
        async with readings.done:
            readings.done.notify_all()
            await readings.done.wait_for(
                lambda: calibration.bounds_of(ENVELOPE) is not None or not calibration.is_reading
            )
        work.conditions = calibration.newest(work.conditions)

    async def _read_these(
        self, chosen: Sequence[AuditTarget], readings: Readings, call: AuditCall, work: _Work
    ) -> None:
        calibration, asked = readings.calibration, len(chosen)
        items = [item for target in chosen for item in target.items]
        try:
            answers = iter(await readings.envelope.measure(items, call.states))
        except EngineError as error:
            work.conditions = calibration.not_read(str(error), work.conditions, asked=asked)
            return
        found: list[Reference] = []
        for target in chosen:
            measured = [next(answers) for _ in target.items]
            numbers = [one for one in measured if isinstance(one, Measured)]
            if len(numbers) == len(measured):
                seen, version = evidence(target.rollout, numbers), max(_claims(target.rollout))
                found.append(Reference(self._run.trainer, version, seen))
        work.conditions, made = calibration.read(found, work.conditions, asked=asked)
        work.audited.readings += found
        work.audited.envelope = made or work.audited.envelope
        if calibration.gathered(ENVELOPE) >= ENOUGH:
            await readings.envelope.rest()

    def _call(
        self, passed: Sequence[RescoredRollout], held: Mapping[int, State], work: _Work
    ) -> AuditCall:
        """Make the audit call; `held` has at least the states of the claimed versions."""
        arrival, lease = work.arrival, work.lease
        sampling = environment_of(self._run, lease).sampling
        claimed = {version for one in passed for version in _claims(one.rollout)}
        before = [v for v in sorted(claimed) if v - 1 in held]
        # with exact numerics other weights show in the distance alone
        compares = before and self._run.proofs.numerics != "exact" and self._comparisons.due()
        others = {v: [v - 1] for v in before} if compares else {}
        wanted = claimed.union(*others.values())
        chosen: list[AuditTarget] = []
        for one in passed:
            turns = plain_turns(one.rollout.branches) or one.score.turns
            items = audit_items(
                one.rollout,
                turns,
                lease=lease,
                run=self._run_id,
                sampling=sampling,
                node=arrival.node,
                plan=work.plan,
                others=others,
            )
            chosen.append(AuditTarget(one.rollout, items))
        return AuditCall(
            sealed=arrival.sealed,
            digest=arrival.digest,
            lease=lease,
            node=arrival.node,
            challenge=arrival.challenge,
            chosen=chosen,
            states={version: held[version] for version in sorted(wanted)},
            others=others,
            contract=work.conditions.contract,
            by_trainer=work.conditions.by_trainer,
        )

    def _judge(
        self, rollout: CheckedRollout, measured: Sequence[Measured | Unreadable], work: _Work
    ) -> None:
        numbers = [one for one in measured if isinstance(one, Measured)]
        unreadable = [one for one in measured if isinstance(one, Unreadable)]
        if unreadable:
            worst = max(unreadable, key=lambda one: one.proof)
            work.reject(
                rollout, Reason.BAD_PROOF if worst.proof else Reason.AUDIT_FAILED, worst.detail
            )
            return
        found = evidence(rollout, numbers)
        text = hash(tuple(tuple(branch.token_ids) for branch in rollout.branches))
        if text in work.texts:
            found = structs.replace(found, means=())
        work.texts.add(text)
        self._comparisons.note(found.other_policy)
        contract = work.conditions.contract
        judgement = judge(found, contract)
        work.audited.evidence.append(found)
        work.audited.judgements.append(judgement)
        work.audited.versions.append(max(_claims(rollout)))
        detail = judgement.detail
        if work.plan is not None:
            attribution = blame(found, judgement, boundary_distances(numbers), contract)
            work.audited.blames.append(attribution)
            stages = name_stages(attribution, [stage.node for stage in work.plan.stages])
            detail = f"{stages}: {detail}" if stages else detail
        if judgement.reason is not None:
            work.reject(rollout, judgement.reason, detail)

    def _claimed_states(self, passed: Sequence[RescoredRollout]) -> dict[int, State]:
        """Return the states of all claimed versions and, if held, of the versions before them."""
        claimed = {version for one in passed for version in _claims(one.rollout)}
        before = {version - 1 for version in claimed} & self._states.keys()
        return {version: self._states[version] for version in sorted(claimed | before)}

    # -- accepted rollouts -------------------------------------------------------------------------

    def _groups(
        self, lease: Lease, node: bytes, passed: Sequence[RescoredRollout]
    ) -> list[RolloutGroup]:
        groups: list[RolloutGroup] = []
        name = environment_of(self._run, lease).name
        for number, task in enumerate(lease.tasks):
            members = [one for one in passed if one.rollout.group == number]
            if len(members) < 2:
                continue
            branches = [b for one in members for b in one.rollout.branches]
            groups.append(
                RolloutGroup(
                    task=task.digest,
                    task_index=task.index,
                    environment=name,
                    rollouts=[
                        ScoredRollout(
                            [
                                BranchTokens(
                                    b.token_ids,
                                    b.sampled,
                                    b.logprobs,
                                    (b.policy_first, b.policy_last),
                                    b.routes,
                                    b.support,
                                )
                                for b in one.rollout.branches
                            ],
                            one.score.reward,
                            [
                                AgentShare(part.agent, part.reward, part.branches)
                                for part in one.score.agents
                            ],
                        )
                        for one in members
                    ],
                    policy_oldest=min(branch.policy_first for branch in branches),
                    node=node,
                    lease=lease.lease_id.to_bytes(8, "big"),
                )
            )
        return groups


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
        evidence=tuple(structs.replace(one, means=()) for one in audited.evidence[:MAX_EVIDENCE]),
        validator=audited.validator,
        pipeline=msgspec.UNSET if plan is None else _stages_verdict(plan, audited.blames),
        bounds=msgspec.UNSET if bounds is None else bounds,
    )


def _stages_verdict(plan: PipelinePlan, blames: Sequence[StageAttribution]) -> PipelineVerdict:
    told = (
        Blamed(one.group, one.rollout, one.distances, one.stages)
        for one in blames
        if one.outcome != "clean"
    )
    nodes = tuple(stage.node for stage in plan.stages)
    return PipelineVerdict(plan.group, plan.generation, nodes, tuple(islice(told, MAX_BLAMED)))


def _reject_as_before(passed: Sequence[RescoredRollout], before: Verdict, work: _Work) -> None:
    """Reject the rollouts that a verdict rejected; all of them if its list is incomplete."""
    listed = {(one.group, one.rollout): one for one in before.rejections}
    complete = before.rejected <= len(before.rejections)
    for one in passed:
        if one.place in listed:
            work.rejections.append(listed[one.place])
        elif not complete:
            reason = before.rejections[-1].reason
            work.reject(one.rollout, reason, "a restart lost the list of the other rejections")


def _task(lease: Lease, rollout: CheckedRollout) -> Task:
    reference = lease.tasks[rollout.group]
    return Task(reference.index, reference.digest)


def _claims(rollout: CheckedRollout) -> set[int]:
    """Return the policy versions that a rollout claims."""
    return {
        version
        for branch in rollout.branches
        for version in (branch.policy_first, branch.policy_last, *(v for _, v in branch.spans))
    }


def _portions(passed: Sequence[RescoredRollout]) -> Iterator[list[RescoredRollout]]:
    """Divide rollouts, in order, into portions of about PORTION_TOKENS, of one rollout at least."""
    portion, tokens = list[RescoredRollout](), 0
    for one in passed:
        portion.append(one)
        tokens += sum(len(branch.token_ids) for branch in one.rollout.branches)
        if tokens >= PORTION_TOKENS:
            yield portion
            portion, tokens = [], 0
    if portion:
        yield portion


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > REWARD_TOLERANCE
