"""Verify submissions: from a bundle to a verdict and groups to train on, cheap checks first.

Invariants:
- rewards are recomputed, never taken from the worker, unless the manifest says that they cannot be recomputed;
- the rollouts to audit follow from randomness drawn after the upload;
- a rollout is accepted only if it could have been audited: one whose policy is no longer held is stale;
- there is always a verdict: bad input costs the rollout, never the trainer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from ...protocol.audits import is_audited
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leaders import Leaders
from ...protocol.leases import Lease, check_assignment, environment_of
from ...protocol.manifests import RunManifest
from ...protocol.numerics import ENVELOPE
from ...protocol.rollouts import Submission, Verdict
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
from ..ops.metrics import PhaseClock
from ..ops.tracing import part
from ..tasks import end_tasks
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
from .judgement import REASONS, blame, first_above, judge, name_stages
from .self_calibration import AuditConditions, SelfCalibration
from .verdict import (
    PendingVerdict,
    ReceivedSubmission,
    RescoredRollout,
    Turn,
    Verified,
    claimed_versions,
    make_verdict,
    reject_as_before,
)

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


def _reasons(codes: str) -> tuple[Reason, ...]:
    return tuple(map(Reason, codes.split()))


PLAN = _reasons(
    "wrong_version malformed too_large wrong_purpose wrong_run wrong_signer bad_signature"
)
"""Reasons of unseal() and check_plan()."""
FORM_OF_BUNDLE = _reasons("wrong_task too_large malformed")
FORM_OF_ROLLOUT = _reasons(
    "missing_index withdrawn environment_error bad_reward malformed too_large token_out_of_range bad_logprobs "
    "future_policy stale bad_termination bad_proof bad_routes wrong_order"
)
"""Reasons of check_submission(), in the order of checks.py."""
AUDIT = (*_reasons("audit_failed bad_proof"), *dict.fromkeys(REASONS.values()))
"""Reasons of an audit, in the order of blame."""


@dataclass(frozen=True)
class SubmissionCheck:
    """One check of a submission."""

    name: str
    run: Callable[[PendingVerdict], Awaitable[None]]
    """Rejects rollouts, or raises RemoteProtocolError: then the bundle as a whole is refused."""
    reasons: tuple[Reason, ...]
    """Why it refuses."""
    cost: str
    again: bool = True
    """Whether it runs again if a verdict from before a restart stands."""


@dataclass(frozen=True)
class Readings:
    """Measurement of the envelope, and the calibration that stores it."""

    envelope: NoiseEnvelope
    calibration: SelfCalibration
    done: asyncio.Condition = field(default_factory=asyncio.Condition)
    """Notified when texts were read."""


@dataclass(frozen=True)
class _ReadingAnswer:
    """Readings of texts, except the unreadable ones; or the reason why none was read."""

    readings: Sequence[Reference] = ()
    fault: str = ""


class Verifier:
    """Verification of submissions against lease, environment and policy."""

    def checks(self) -> tuple[SubmissionCheck, ...]:
        """Return the checks of a submission, in the order in which they run.

        Before them its receiver has checked envelope, lease and deadline (node/trainer/submissions.py).
        """
        return (
            # of the whole bundle: they raise
            SubmissionCheck(
                "tasks",
                self._check_tasks,
                (Reason.ENVIRONMENT_ERROR,),
                "the lease's tasks, made again",
            ),
            SubmissionCheck("plan", self._open_plan, PLAN, "a signature, if it is a pipeline's"),
            # of each rollout: they reject it
            SubmissionCheck(
                "form",
                self._check_form,
                FORM_OF_BUNDLE + FORM_OF_ROLLOUT,
                "arithmetic over all tokens, in a thread",
            ),
            SubmissionCheck("held", self._check_held, (Reason.STALE,), "none", again=False),
            SubmissionCheck(
                "score",
                self._score_all,
                (Reason.BAD_PROMPT, Reason.BAD_REWARD, Reason.ENVIRONMENT_ERROR),
                "the environment plays each again, and may ask a judge model: up to minutes",
            ),
            SubmissionCheck(
                "order",
                self._check_still_held,
                (Reason.STALE,),
                "waits for submissions before it",
                again=False,
            ),
            SubmissionCheck(
                "copies",
                self._check_copies,
                (Reason.DUPLICATE,),
                "20 ms of a thread for 131,072 tokens",
            ),
            SubmissionCheck(
                "audit",
                self._audit,
                AUDIT,
                "a prefill of the share `rate`; of all if one is guilty",
                again=False,
            ),
            SubmissionCheck(
                "calibrated", self._check_calibrated, (Reason.UNCALIBRATED,), "none", again=False
            ),
        )

    def __init__(
        self,
        leaders: Leaders,
        run: RunManifest,
        environments: Sequence[Environment],
        audits: AuditService,
        states: Mapping[int, State],
        copies: CopyDetector,
        readings: Readings | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        """Take the parts; `environments` are those of the run, in its order; `leaders` may have planned a
        submission's pipeline.

        `states` holds the policies that may still be claimed, by version; it is read, not copied. `readings`
        measure the envelope, in a run that has one. `clock` counts the seconds of each check, as phase
        "verdict/NAME": those of submissions verified at a time add up.
        """
        self._clock = clock or PhaseClock()
        self._readings = readings
        self._reading: asyncio.Task[_ReadingAnswer] | None = None
        """The reading that renews the envelope; no verdict waits for it."""
        self._run_id = leaders.run
        self._run = run
        self._leaders = leaders
        self._environments = environments
        self._audits = audits
        self._states = states
        self._copies = copies
        self._comparisons = VersionComparisons()
        self._varies: dict[int, str] = {}
        """Environment number -> evidence that it is not deterministic, although it was declared so."""
        for environment in run.environments:
            if environment.rewards == "claimed":
                logger.warning(
                    "environment %s: tool results and rewards are believed as workers claim them, as its tools "
                    "are not deterministic",
                    environment.name,
                )
        self._earlier: asyncio.Future[None] | None = None
        """Done when all submissions before were checked for copies."""

    async def close(self) -> None:
        """End the reading that is still running."""
        await end_tasks(self._reading)

    @property
    def fault(self) -> str:
        """Faults of the environments, each with a remedy; empty if there are none."""
        return "; ".join(self._varies.values())

    @property
    def judge_fault(self) -> str:
        """Judges that do not answer, so that rewards wait; empty if all answer."""
        return "; ".join(
            dict.fromkeys(
                environment.judge_fault
                for environment in self._environments
                if environment.judge_fault
            )
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
        turn = Turn(self._earlier)
        self._earlier = turn.over
        conditions = conditions or AuditConditions(self._run.proofs)
        work = PendingVerdict(submission, lease, arrival, turn, conditions, version, rate, before)
        try:
            for check in self.checks():
                if before is None or check.again:
                    with self._clock.phase(f"verdict/{check.name}"):
                        await check.run(work)
        finally:
            turn.pass_on()
        if before is not None:
            reject_as_before(work, before)
        passed = work.without_rejected(work.passed)
        verdict = make_verdict(
            arrival,
            lease,
            len(passed),
            work.rejections,
            work.audited,
            rate,
            work.plan,
            work.conditions.bounds,
        )
        return Verified(
            verdict,
            work.rejections,
            self._groups(lease, arrival.node, passed),
            work.audited,
            work.plan,
            conditions.placing,
            environment_of(self._run, lease).name,
        )

    # -- cheap checks ------------------------------------------------------------------------------

    async def _check_tasks(self, work: PendingVerdict) -> None:
        """Check that the environment makes the tasks of a lease from their numbers.

        Raises RemoteProtocolError if it makes others.
        """
        lease = work.lease
        try:
            environment_of(self._run, lease)
            make_task = self._environment(lease).task
            tasks = [await make_task(reference.index) for reference in lease.tasks]
            digests = {task.index: task.digest for task in tasks}
            check_assignment(lease, digests.__getitem__)
        except (RemoteProtocolError, EnvironmentFailed) as error:
            logger.error("lease %d cannot be verified: %s", lease.lease_id, error)
            detail = "the trainer's environment is another one than when it signed the lease"
            raise RemoteProtocolError(Reason.ENVIRONMENT_ERROR, detail) from error

    def _environment(self, lease: Lease) -> Environment:
        return of_lease(self._environments[lease.environment], lease)

    async def _open_plan(self, work: PendingVerdict) -> None:
        """Open the plan of the pipeline that a submission names. Raises RemoteProtocolError."""
        work.plan = plan_of(work.submission, self._leaders, work.arrival.node)

    async def _check_form(self, work: PendingVerdict) -> None:
        """Compare a submission with its lease and the run's contract. Raises RemoteProtocolError."""
        checked = await asyncio.to_thread(
            check_submission, work.submission, work.lease, self._run, work.version, work.plan
        )
        work.rollouts, work.rejections = checked.rollouts, checked.rejections

    async def _check_held(self, work: PendingVerdict) -> None:
        """Reject rollouts that claim a policy that is not held."""
        work.rollouts = [rollout for rollout in work.rollouts if self._is_held(rollout, work)]

    async def _check_still_held(self, work: PendingVerdict) -> None:
        """Check staleness again, and hold the states for the audit while copies are looked for.

        While rollouts were scored the publisher may have dropped an old version; a stale rollout leaves no
        trace among the copies.
        """
        await work.turn.wait()
        work.passed = [scored for scored in work.passed if self._is_held(scored.rollout, work)]
        work.states = self._claimed_states(work.passed)

    def _is_held(self, rollout: CheckedRollout, work: PendingVerdict) -> bool:
        """Return whether every policy that a rollout claims is held; else reject it as stale."""
        lost = sorted(claimed_versions(rollout) - self._states.keys())
        if lost:
            detail = f"policy {lost[0]} is not held any more, so this could not be audited"
            work.reject(rollout, Reason.STALE, detail)
        return not lost

    async def _check_copies(self, work: PendingVerdict) -> None:
        """Reject copies, also of earlier submissions. A thread looks for them: the event loop goes on."""
        await work.turn.wait()
        sampling = environment_of(self._run, work.lease).sampling
        # Without temperature replies to equal prompts are equal, with top_k they may be: logprobs do not tell
        # what the few tokens share.
        if sampling.temperature and not sampling.top_k:
            work.passed = await self._without_copies(work, sampling.top_p)
        work.turn.pass_on()

    async def _without_copies(self, work: PendingVerdict, top_p: float) -> list[RescoredRollout]:
        arrival, originals = work.arrival, list[RescoredRollout]()

        def look(portion: Sequence[RescoredRollout]) -> list[Rejected | None]:
            rollouts = [scored.rollout for scored in portion]
            return self._copies.check_all(arrival.number, arrival.node, rollouts, top_p=top_p)

        for portion in _portions(work.passed):
            # a verification that is cancelled leaves its thread at most this portion
            faults = await asyncio.to_thread(look, portion)
            for scored, fault in zip(portion, faults, strict=True):
                if fault is None:
                    originals.append(scored)
                else:
                    work.reject(scored.rollout, fault.reason, fault.detail)
        return originals

    async def _score_all(self, work: PendingVerdict) -> None:
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

        scores = await asyncio.gather(*map(score, work.rollouts))
        work.passed = [scored for scored in scores if scored is not None]

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
                difference = f"scored twice: {score.reward:.6g} and {again.reward:.6g}"
                self._note_variation(lease, rollout.group, "the reward", difference, "rewards")
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
        several = any(len(sampled_runs(branch.sampled)) > 1 for branch in rollout.branches)
        if fault.reason is not Reason.BAD_PROMPT or not several:
            return
        for _ in range(0 if number in self._varies else SCORED_AGAIN):
            try:
                await self._recompute(lease, rollout)
                again = "it is as the rollout says"
            except Rejected as other:
                again = other.detail
            if again != fault.detail:
                difference = f"played twice: {fault.detail}; {again}"
                self._note_variation(lease, rollout.group, "the conversation", difference, "tools")
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

    def _note_variation(
        self, lease: Lease, group: int, what: str, difference: str, key: str
    ) -> None:
        """Record that an environment is not deterministic: no worker is blamed for that any more."""
        name, task = environment_of(self._run, lease).name, lease.tasks[group].index
        self._varies[lease.environment] = (
            f"{what} of {name!r} is not deterministic (a rollout of task {task} was {difference}): set its "
            f"deterministic_{key} = false in a new run"
        )
        logger.error("%s", self._varies[lease.environment])

    # -- audits ------------------------------------------------------------------------------------

    async def _audit(self, work: PendingVerdict) -> None:
        """Audit the rollouts that the challenge picks, and all others once one of these is rejected."""
        passed, challenge = work.passed, work.arrival.challenge
        sample = [scored for scored in passed if is_audited(challenge, *scored.place, work.rate)]
        await self._audit_these(sample, work)
        # Also if an audit failed: a worker that can make audits fail must not be paid for the others.
        if len(work.without_rejected(sample)) < len(sample):
            places = {scored.place for scored in sample}
            rest = [scored for scored in passed if scored.place not in places]
            await self._audit_these(rest, work)

    async def _check_calibrated(self, work: PendingVerdict) -> None:
        """Reject work from which nothing may be learned yet, as no bounds of its noise are known."""
        if unlearned := work.conditions.unlearned:
            for scored in work.without_rejected(work.passed):
                work.reject(scored.rollout, Reason.UNCALIBRATED, unlearned)

    async def _audit_these(self, passed: Sequence[RescoredRollout], work: PendingVerdict) -> None:
        if not passed:
            return
        call = self._call(passed, work)
        try:
            with part("audit", rollouts=len(passed)):
                answer = await self._audits.audit_rollouts(call)
        except EngineError as error:
            # A rollout that was chosen for an audit is not trained on without one; its worker is not blamed.
            logger.error("no audit is possible: %s", error)
            for scored in passed:
                work.reject(scored.rollout, Reason.AUDIT_FAILED, "the trainer could not audit it")
            return
        work.audited.validator = answer.validator
        if self._readings is not None and work.conditions.reads:
            await self._read(self._readings, call, answer.measured, work)
        for scored, measured in zip(passed, answer.measured, strict=True):
            self._judge(scored.rollout, measured, work)

    async def _read(
        self,
        readings: Readings,
        call: AuditCall,
        measured: Sequence[Sequence[Measured | Unreadable]],
        work: PendingVerdict,
    ) -> None:
        """Read a share of the audited rollouts in float32; before any is judged, until ENOUGH were read.

        Texts that would be rejected are not read: no seed decided them. The first bounds are waited for, as
        long as texts are read that may make them. Later readings renew the bounds, which no verdict waits for:
        their results come with the next submission that is audited.
        """
        calibration, reject = readings.calibration, work.conditions.contract.reject
        if self._reading is not None and self._reading.done():
            answer, self._reading = self._reading.result(), None
            self._keep_readings(answer, calibration, work)
        sound: list[AuditTarget] = []
        for target, branches in zip(call.chosen, measured, strict=True):
            numbers = [branch for branch in branches if isinstance(branch, Measured)]
            whole = len(numbers) == len(branches)
            if whole and not first_above(evidence(target.rollout, numbers), reject):
                sound.append(target)
        newest = max((max(claimed_versions(target.rollout)) for target in sound), default=0)
        if self._reading is None and (due := calibration.readings_due(len(sound), newest)):
            reading = self._measure_readings(sound[:due], readings, call)
            if calibration.gathered(ENVELOPE) >= ENOUGH:
                self._reading = asyncio.create_task(reading)
            else:
                with calibration.reading(due):
                    answer = await reading
                self._keep_readings(answer, calibration, work)
        async with readings.done:
            readings.done.notify_all()
            await readings.done.wait_for(
                lambda: calibration.bounds_of(ENVELOPE) is not None or not calibration.is_reading
            )
        work.conditions = calibration.newest(work.conditions)

    async def _measure_readings(
        self, chosen: Sequence[AuditTarget], readings: Readings, call: AuditCall
    ) -> _ReadingAnswer:
        items = [item for target in chosen for item in target.items]
        try:
            answers = iter(await readings.envelope.measure(items, call.states))
            references: list[Reference] = []
            for target in chosen:
                measured = [next(answers) for _ in target.items]
                numbers = [branch for branch in measured if isinstance(branch, Measured)]
                if len(numbers) == len(measured):
                    measures = evidence(target.rollout, numbers)
                    version = max(claimed_versions(target.rollout))
                    references.append(Reference(self._run.trainer, version, measures))
            if readings.calibration.gathered(ENVELOPE) + len(references) >= ENOUGH:
                await readings.envelope.rest()
        except EngineError as error:
            return _ReadingAnswer(fault=str(error))
        return _ReadingAnswer(references)

    def _keep_readings(
        self, answer: _ReadingAnswer, calibration: SelfCalibration, work: PendingVerdict
    ) -> None:
        """Add readings to the envelope, and to what is stored with this submission's verdict."""
        if answer.fault:
            work.conditions = calibration.not_read(answer.fault, work.conditions)
            return
        work.conditions, bounds = calibration.read(answer.readings, work.conditions)
        work.audited.readings += answer.readings
        work.audited.envelope = bounds or work.audited.envelope

    def _call(self, passed: Sequence[RescoredRollout], work: PendingVerdict) -> AuditCall:
        """Make the audit call for some of the rollouts that passed."""
        arrival, lease, states = work.arrival, work.lease, work.states
        sampling = environment_of(self._run, lease).sampling
        claimed = {version for scored in passed for version in claimed_versions(scored.rollout)}
        before = [v for v in sorted(claimed) if v - 1 in states]
        # with exact numerics other weights show in the distance alone
        compares = before and self._run.proofs.numerics != "exact" and self._comparisons.due()
        others = {v: [v - 1] for v in before} if compares else {}
        wanted = claimed.union(*others.values())
        chosen: list[AuditTarget] = []
        for scored in passed:
            turns = plain_turns(scored.rollout.branches) or scored.score.turns
            items = audit_items(
                scored.rollout,
                turns,
                lease=lease,
                run=self._run_id,
                sampling=sampling,
                node=arrival.node,
                plan=work.plan,
                others=others,
            )
            chosen.append(AuditTarget(scored.rollout, items))
        return AuditCall(
            sealed=arrival.sealed,
            digest=arrival.digest,
            lease=lease,
            node=arrival.node,
            challenge=arrival.challenge,
            chosen=chosen,
            states={version: states[version] for version in sorted(wanted)},
            others=others,
            contract=work.conditions.contract,
            by_trainer=work.conditions.by_trainer,
        )

    def _judge(
        self,
        rollout: CheckedRollout,
        measured: Sequence[Measured | Unreadable],
        work: PendingVerdict,
    ) -> None:
        numbers = [branch for branch in measured if isinstance(branch, Measured)]
        unreadable = [branch for branch in measured if isinstance(branch, Unreadable)]
        if unreadable:
            worst = max(unreadable, key=lambda branch: branch.proof)
            work.reject(
                rollout, Reason.BAD_PROOF if worst.proof else Reason.AUDIT_FAILED, worst.detail
            )
            return
        measures = evidence(rollout, numbers)
        text = hash(tuple(tuple(branch.token_ids) for branch in rollout.branches))
        if text in work.texts:
            measures = structs.replace(measures, means=())
        work.texts.add(text)
        self._comparisons.note(measures.other_policy)
        contract = work.conditions.contract
        judgement = judge(measures, contract)
        work.audited.evidence.append(measures)
        work.audited.judgements.append(judgement)
        work.audited.versions.append(max(claimed_versions(rollout)))
        detail = judgement.detail
        if work.plan is not None:
            attribution = blame(measures, judgement, boundary_distances(numbers), contract)
            work.audited.blames.append(attribution)
            stages = name_stages(attribution, [stage.node for stage in work.plan.stages])
            detail = f"{stages}: {detail}" if stages else detail
        if judgement.reason is not None:
            work.reject(rollout, judgement.reason, detail)

    def _claimed_states(self, passed: Sequence[RescoredRollout]) -> dict[int, State]:
        """Return the states of all claimed versions and, if held, of the versions before them."""
        claimed = {version for scored in passed for version in claimed_versions(scored.rollout)}
        before = {version - 1 for version in claimed} & self._states.keys()
        return {version: self._states[version] for version in sorted(claimed | before)}

    # -- accepted rollouts -------------------------------------------------------------------------

    def _groups(
        self, lease: Lease, node: bytes, passed: Sequence[RescoredRollout]
    ) -> list[RolloutGroup]:
        groups: list[RolloutGroup] = []
        name = environment_of(self._run, lease).name
        for number, task in enumerate(lease.tasks):
            members = [scored for scored in passed if scored.rollout.group == number]
            if len(members) < 2:
                continue
            branches = [b for scored in members for b in scored.rollout.branches]
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
                                for b in scored.rollout.branches
                            ],
                            scored.score.reward,
                            [
                                AgentShare(part.agent, part.reward, part.branches)
                                for part in scored.score.agents
                            ],
                        )
                        for scored in members
                    ],
                    policy_oldest=min(branch.policy_first for branch in branches),
                    node=node,
                    lease=lease.lease_id.to_bytes(8, "big"),
                )
            )
        return groups


def _task(lease: Lease, rollout: CheckedRollout) -> Task:
    reference = lease.tasks[rollout.group]
    return Task(reference.index, reference.digest)


def _portions(passed: Sequence[RescoredRollout]) -> Iterator[list[RescoredRollout]]:
    """Divide rollouts, in order, into portions of about PORTION_TOKENS, of one rollout at least."""
    portion, tokens = list[RescoredRollout](), 0
    for scored in passed:
        portion.append(scored)
        tokens += sum(len(branch.token_ids) for branch in scored.rollout.branches)
        if tokens >= PORTION_TOKENS:
            yield portion
            portion, tokens = [], 0
    if portion:
        yield portion


def _differ(reward: float, other: float) -> bool:
    return abs(reward - other) > REWARD_TOLERANCE
