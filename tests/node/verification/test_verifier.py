"""From a submission to a verdict: whose fault a difference is, and what is never accepted unaudited."""

import asyncio
import inspect
import itertools
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import pytest
from support.counting_environment import CountingEnvironment, counting_task, question, right_reply
from support.hostile import say
from support.listed_verifier import ListedVerifier
from support.noise_cases import RTX
from support.protocol_cases import (
    LEADERS,
    LEASE,
    MANIFEST,
    MIXED,
    PROMPTED_LEASE,
    PROOFS,
    WORKER,
    head,
    played_otherwise,
    refuses,
)
from support.waiting import until

from primerl.crypto.hashing import digest
from primerl.node.environments.environment import (
    Branch,
    EnvironmentStuck,
    Score,
    ScoreMismatch,
    Task,
)
from primerl.node.environments.leased_prompts import LeasedPrompts
from primerl.node.errors import EngineError
from primerl.node.verification import checks, duplicates, judgement
from primerl.node.verification import verifier as verifier_module
from primerl.node.verification.auditor import (
    AuditAnswer,
    AuditCall,
    AuditItem,
    Measured,
    Unreadable,
)
from primerl.node.verification.bounds import PROVISIONAL
from primerl.node.verification.checks import CheckedRollout, Rejected
from primerl.node.verification.class_bounds import ENOUGH
from primerl.node.verification.duplicates import CopyDetector
from primerl.node.verification.envelope import NoiseEnvelope
from primerl.node.verification.self_calibration import AuditConditions, SelfCalibration
from primerl.node.verification.verdict import (
    AuditResults,
    ReceivedSubmission,
    Verified,
    make_verdict,
)
from primerl.node.verification.verifier import SCORED_AT_ONCE, Readings, Verifier
from primerl.node.weights.state import State
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease, TaskRef
from primerl.protocol.manifests import RunManifest
from primerl.protocol.numerics import ENVELOPE, ClassBounds
from primerl.protocol.reputation import Placement, Trust
from primerl.protocol.rollouts import (
    MEANS,
    BranchRecord,
    GroupRecord,
    Rejection,
    RolloutRecord,
    Submission,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


class FailingAudits:
    """No audit is possible; `calls` counts them."""

    calls = 0

    async def audit_rollouts(self, call: AuditCall) -> AuditAnswer:
        self.calls += 1
        raise EngineError("the auditor is ill")


class ArrivalsOnly(CopyDetector):
    """Finds no copies; records the arrivals that it was asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def check_all(
        self, arrival: int, node: bytes, rollouts: Sequence[CheckedRollout], *, top_p: float = 1.0
    ) -> list[Rejected | None]:
        self.asked += [arrival] * len(rollouts)
        return [None] * len(rollouts)


class Lingering(ArrivalsOnly):
    """Takes until it may go on; `drops`: states that are lost meanwhile."""

    def __init__(self, drops: dict[int, State] | None = None) -> None:
        super().__init__()
        self._drops = drops
        self.may_go = threading.Event()
        self.waited_in_vain = False

    def check_all(
        self, arrival: int, node: bytes, rollouts: Sequence[CheckedRollout], *, top_p: float = 1.0
    ) -> list[Rejected | None]:
        faults = super().check_all(arrival, node, rollouts, top_p=top_p)
        self.waited_in_vain |= not self.may_go.wait(20.0)
        self.may_go.set()
        if self._drops is not None:
            self._drops.clear()
        return faults


class Groups(tuple[GroupRecord, ...]):
    """Groups of a submission that know which thread reads them."""

    read_by: int | None = None

    def __iter__(self) -> Iterator[GroupRecord]:
        self.read_by = threading.get_ident()
        return super().__iter__()


class Scripted(CountingEnvironment):
    """Gives these rewards in turn; `stuck`: never returns; `drops`: states that are lost meanwhile."""

    def __init__(
        self, *rewards: float, stuck: bool = False, drops: dict[int, State] | None = None
    ) -> None:
        super().__init__()
        self._rewards = itertools.cycle(rewards or [1.0])
        self._stuck = stuck
        self._drops = drops
        self.asked = 0
        self.first_may_go = asyncio.Event()
        self.first_may_go.set()

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        self.asked += 1
        if self.asked == 1:
            await self.first_may_go.wait()
        await asyncio.sleep(0)
        if self._stuck:
            raise EnvironmentStuck("task 0: no result within 60 s")
        if self._drops is not None:
            self._drops.clear()
        return Score(next(self._rewards))


def arrival(number: int = 1) -> ReceivedSubmission:
    return ReceivedSubmission(number, digest(b"bundle"), WORKER.node_id, b"", bytes(32))


def played(
    version: int = 3, rewards: Sequence[float] = (1.0,) * 8, *, supported: bool = False
) -> tuple[Submission, Lease]:
    """Right answers of a policy of that version to one task, with these claimed rewards, and their lease.

    `supported`: they state supports of a single token.
    """
    task = counting_task(0)
    lease = msgspec.structs.replace(
        LEASE, tasks=(TaskRef(task.index, task.digest),), min_version=0, group_size=len(rewards)
    )
    right = say(question(task), right_reply(task), head(version))
    if supported:
        right = msgspec.structs.replace(right, support=bytes(sum(right.sampled)))
    rollouts = tuple(RolloutRecord((right,), reward, "") for reward in rewards)
    group = GroupRecord(task.index, task.digest, rollouts)
    return Submission(lease=b"", groups=(group,), engine="hf"), lease


def verifier(
    environment: CountingEnvironment, states: dict[int, State], run: RunManifest = MANIFEST
) -> Verifier:
    return ListedVerifier(LEADERS, run, [environment], FailingAudits(), states, ArrivalsOnly())


async def reasons(
    verifier: Verifier, submission: Submission, lease: Lease, rate: float
) -> Counter[Reason]:
    """Rejections by reason; all others are accepted."""
    verified = await verifier.verify(submission, lease, arrival(), version=4, rate=rate)
    assert verified.verdict.accepted == lease.group_size - len(verified.rejections)
    return verified.reasons()


async def test_what_was_leased_before_its_bounds_were_withdrawn_is_not_learned_from() -> None:
    submission, lease = played()
    for unlearned, found in (
        ("", Counter[Reason]()),
        ("the noise of its class is not measured", Counter({Reason.UNCALIBRATED: 8})),
    ):
        verified = await verifier(Scripted(), {3: {}}).verify(
            submission,
            lease,
            arrival(),
            version=4,
            rate=0.0,
            conditions=AuditConditions(PROOFS, unlearned=unlearned),
        )
        assert verified.reasons() == found
        kept = 0 if unlearned else lease.group_size
        assert (
            verified.verdict.accepted == sum(len(one.rollouts) for one in verified.groups) == kept
        )


async def test_an_environment_that_changed_since_the_lease_is_not_the_workers_fault() -> None:
    submission = Submission(lease=b"", groups=(), engine="hf")
    with refuses(Reason.ENVIRONMENT_ERROR):
        await verifier(CountingEnvironment(), {}).verify(
            submission, LEASE, arrival(), version=4, rate=1.0
        )


async def test_copies_are_looked_for_in_order_of_arrival_though_scores_are_made_at_once() -> None:
    environment, copies = Scripted(), ArrivalsOnly()
    environment.first_may_go.clear()
    submission, lease = played(rewards=[1.0])
    checked = ListedVerifier(LEADERS, MANIFEST, [environment], FailingAudits(), {3: {}}, copies)
    both: list[asyncio.Task[Verified]] = []
    for number in (
        1,
        2,
    ):  # bundles are unpacked in threads: the first begins to be scored, then the second
        work = checked.verify(submission, lease, arrival(number), version=4, rate=0.0)
        both.append(asyncio.create_task(work))
        await until(lambda: environment.asked == len(both))
    # the second is scored, the first is not
    for _ in range(50):
        await asyncio.sleep(0)
    assert copies.asked == []
    environment.first_may_go.set()
    async with asyncio.timeout(60.0):
        await asyncio.gather(*both)
    assert copies.asked == [1, 2]


async def test_a_bundle_that_is_refused_at_once_opens_no_way_past_the_one_before() -> None:
    """A copy that was sent right after such a bundle waits for its source, too."""
    environment, copies = Scripted(), ArrivalsOnly()
    environment.first_may_go.clear()
    submission, lease = played(rewards=[1.0])
    checked = ListedVerifier(LEADERS, MANIFEST, [environment], FailingAudits(), {3: {}}, copies)
    empty = msgspec.structs.replace(submission, groups=())
    source, refused, copy = (
        asyncio.create_task(checked.verify(sent, lease, arrival(number), version=4, rate=0.0))
        for number, sent in enumerate((submission, empty, submission))
    )
    with refuses(Reason.WRONG_TASK):
        await refused
    await until(lambda: environment.asked == 2)
    for _ in range(50):
        await asyncio.sleep(0)
    environment.first_may_go.set()
    async with asyncio.timeout(60.0):
        await asyncio.gather(source, copy)
    assert copies.asked == [0, 2]


async def test_the_loop_goes_on_while_copies_are_looked_for() -> None:
    """However long the texts are: peers, leases and heads are answered meanwhile."""
    copies = Lingering()
    submission, lease = played()
    checked = ListedVerifier(LEADERS, MANIFEST, [Scripted()], FailingAudits(), {3: {}}, copies)
    verifying = asyncio.create_task(
        checked.verify(submission, lease, arrival(), version=4, rate=0.0)
    )
    await until(lambda: copies.asked)
    copies.may_go.set()
    await verifying
    assert len(copies.asked) == 8
    assert not copies.waited_in_vain


async def test_the_loop_goes_on_while_a_bundle_is_unpacked() -> None:
    submission, lease = played()
    groups = Groups(submission.groups)
    sent = msgspec.structs.replace(submission, groups=groups)
    found = await reasons(verifier(Scripted(), {3: {}}), sent, lease, 0.0)
    assert found == {}
    assert groups.read_by not in {None, threading.get_ident()}


async def test_what_is_held_when_copies_are_looked_for_is_audited_with_that() -> None:
    """The publisher drops the policy meanwhile."""
    states: dict[int, State] = {3: {}}
    audits = FailingAudits()
    copies = Lingering(states)
    copies.may_go.set()
    submission, lease = played()
    checked = ListedVerifier(LEADERS, MANIFEST, [Scripted()], audits, states, copies)
    found = await reasons(checked, submission, lease, 1.0)
    assert (found, audits.calls, states) == ({Reason.AUDIT_FAILED: 8}, 1, {})


async def test_what_claims_a_policy_that_is_not_held_is_stale_though_the_lot_spares_it() -> None:
    environment = Scripted()
    found = await reasons(verifier(environment, {4: {}}), *played(3), 0.0)
    assert found == {Reason.STALE: 8}
    assert environment.asked == 0  # nor is it remembered for what may be a copy of it


@pytest.mark.parametrize("rate", [0.0, 1.0])
async def test_a_policy_that_leaves_memory_before_its_audit_leaves_nothing_unaudited(
    rate: float,
) -> None:
    states: dict[int, State] = {3: {}}
    environment = Scripted(drops=states)
    assert await reasons(verifier(environment, states), *played(3), rate) == {Reason.STALE: 8}
    assert environment.asked == 8


@pytest.mark.parametrize(("rejected", "accepted"), [(1, 7), (2, 0)])
async def test_what_a_verdict_from_before_a_restart_rejected_stays_rejected_and_no_more(
    rejected: int, accepted: int
) -> None:
    """A verdict that had no room for all of its rejections leaves nothing accepted."""
    submission, lease = played(3)
    one = Rejection(0, 5, Reason.WRONG_POLICY, "another policy")
    before = make_verdict(arrival(), lease, 0, [one] * rejected, AuditResults(), 0.5)
    before = msgspec.structs.replace(before, rejections=(one,))
    verified = await verifier(CountingEnvironment(), {}).verify(
        submission, lease, arrival(), version=4, rate=0.5, before=before
    )
    assert one in verified.rejections
    assert (verified.verdict.accepted, len(verified.rejections)) == (accepted, 8 - accepted)


async def test_where_an_audit_fails_what_was_not_picked_is_not_accepted_either() -> None:
    found = await reasons(verifier(CountingEnvironment(), {3: {}}), *played(3), 0.5)
    assert found == {Reason.AUDIT_FAILED: 8}


async def test_a_claim_that_differs_from_a_steady_score_is_the_workers_fault() -> None:
    checked = verifier(Scripted(0.25), {3: {}})
    assert await reasons(checked, *played(rewards=[0.25, 1.0]), 0.0) == {Reason.BAD_REWARD: 1}
    assert checked.fault == ""


async def test_no_worker_is_blamed_for_a_reward_that_is_not_deterministic() -> None:
    """A judge's verdicts were once called bad_reward, and honest workers got no more work."""
    checked = verifier(Scripted(0.0, 1.0, 0.0, 0.0), {3: {}})
    found = await reasons(checked, *played(rewards=[0.7] * 6), 0.0)
    assert found == {Reason.ENVIRONMENT_ERROR: 6}
    assert "'sums' is not deterministic" in checked.fault
    assert "deterministic_rewards = false" in checked.fault
    trust = Trust()
    trust.record(0, found, 0.0)
    assert trust.bad == 0.0


async def test_of_rewards_that_are_said_to_vary_the_trainers_own_counts() -> None:
    run = played_otherwise(MANIFEST, rewards="sampled")
    environment = Scripted(0.0, 1.0)
    checked = verifier(environment, {3: {}}, run)
    assert await reasons(checked, *played(rewards=[0.7] * 4), 0.0) == {}
    assert (checked.fault, environment.asked) == ("", 4)


class Talking(CountingEnvironment):
    """Gives these results, in turn, when a rollout is played again."""

    def __init__(self, *said: str) -> None:
        super().__init__()
        self._said = itertools.cycle(said)

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        raise ScoreMismatch(f"turn 1 of the task has another prompt ({next(self._said)})")


def of_two_turns() -> tuple[Submission, Lease]:
    """A rollout with something that the environment said between two replies; and its lease."""
    submission, lease = played(rewards=[1.0])
    prompt, right = question(counting_task(0)), right_reply(counting_task(0))
    one, more = say(prompt, right, head(3)), say([*prompt, *right, 7], right, head(3))
    branch = msgspec.structs.replace(
        more,
        sampled=one.sampled + b"\0" + more.sampled[-len(right) :],
        logprobs=one.logprobs + more.logprobs,
        proof=one.proof + more.proof,
    )
    group = msgspec.structs.replace(
        submission.groups[0], rollouts=(RolloutRecord((branch,), 1.0, ""),)
    )
    return msgspec.structs.replace(submission, groups=(group,)), lease


TWO_TURNS = played_otherwise(MANIFEST, max_turns=2)


async def test_what_a_worker_says_that_a_tool_said_is_its_fault_where_the_tool_says_it_never() -> (
    None
):
    checked = verifier(Talking("here 1f"), {3: {}}, TWO_TURNS)
    assert await reasons(checked, *of_two_turns(), 0.0) == {Reason.BAD_PROMPT: 1}
    assert checked.fault == ""


async def test_no_worker_is_blamed_for_tools_whose_results_vary() -> None:
    checked = verifier(Talking("here 1f", "here 2e"), {3: {}}, TWO_TURNS)
    assert await reasons(checked, *of_two_turns(), 0.0) == {Reason.ENVIRONMENT_ERROR: 1}
    assert "'sums' is not deterministic" in checked.fault
    assert "deterministic_tools = false" in checked.fault


async def test_claims_are_believed_only_where_the_manifest_says_so_and_of_the_right_task() -> None:
    run = played_otherwise(TWO_TURNS, rewards="claimed")
    checked = verifier(Talking("never asked"), {3: {}}, run)
    assert await reasons(checked, *of_two_turns(), 0.0) == {}
    submission, lease = of_two_turns()
    other = counting_task(2)
    lease = msgspec.structs.replace(lease, tasks=(TaskRef(other.index, other.digest),))
    group = msgspec.structs.replace(
        submission.groups[0], task_index=other.index, task_digest=other.digest
    )
    submission = msgspec.structs.replace(submission, groups=(group,))
    assert await reasons(checked, submission, lease, 0.0) == {Reason.BAD_PROMPT: 1}


async def test_an_environment_that_does_not_return_is_not_asked_for_all_of_a_submission() -> None:
    environment = Scripted(stuck=True)
    found = await reasons(verifier(environment, {3: {}}), *played(rewards=[1.0] * 200), 0.0)
    assert found == {Reason.ENVIRONMENT_ERROR: 200}
    assert environment.asked <= 2 * SCORED_AT_ONCE


# -- several environments ----------------------------------------------------------------------------


def mixed_verifier() -> Verifier:
    environments = [CountingEnvironment(name=name) for name in ("sums", "words")]
    return ListedVerifier(LEADERS, MIXED, environments, FailingAudits(), {3: {}}, ArrivalsOnly())


def played_in(environment: str, lease_of: int) -> tuple[Submission, Lease]:
    """Right answers to a task of the environment of that name, under a lease of number `lease_of`."""
    task = counting_task(0, name=environment)
    lease = msgspec.structs.replace(
        LEASE,
        tasks=(TaskRef(0, counting_task(0, name=("sums", "words")[lease_of]).digest),),
        min_version=0,
        group_size=2,
        environment=lease_of,
    )
    right = say(question(task), right_reply(task), head(3))
    group = GroupRecord(0, task.digest, (RolloutRecord((right,), 1.0, ""),) * 2)
    return Submission(lease=b"", groups=(group,), engine="hf"), lease


@pytest.mark.parametrize(("number", "name"), [(0, "sums"), (1, "words")])
async def test_a_submission_is_scored_by_the_environment_of_its_lease(
    number: int, name: str
) -> None:
    submission, lease = played_in(name, number)
    verified = await mixed_verifier().verify(submission, lease, arrival(), version=4, rate=0.0)
    assert (verified.verdict.accepted, verified.environment) == (2, name)
    assert [group.environment for group in verified.groups] == [name]


async def test_a_submission_that_was_played_in_another_environment_is_refused() -> None:
    submission, lease = played_in("sums", 1)
    with refuses(Reason.WRONG_TASK):
        await mixed_verifier().verify(submission, lease, arrival(), version=4, rate=0.0)


async def test_rollouts_of_another_environment_under_the_right_name_are_rejected() -> None:
    submission, lease = played_in("sums", 1)
    named = msgspec.structs.replace(submission.groups[0], task_digest=lease.tasks[0].digest)
    forged = msgspec.structs.replace(submission, groups=(named,))
    assert await reasons(mixed_verifier(), forged, lease, 0.0) == {Reason.BAD_PROMPT: 2}


async def test_a_lease_of_an_environment_that_the_run_does_not_have_is_not_verified() -> None:
    submission, lease = played_in("words", 1)
    lease = msgspec.structs.replace(lease, environment=2)
    with refuses(Reason.WRONG_TASK, Reason.ENVIRONMENT_ERROR):
        await mixed_verifier().verify(submission, lease, arrival(), version=4, rate=0.0)


@pytest.mark.parametrize(
    ("sampling", "asked"),
    [({"temperature": 0.0}, []), ({"top_k": 1}, []), ({"top_p": 0.5}, [1]), ({}, [1])],
)
async def test_equal_replies_of_the_likeliest_tokens_are_no_copies(
    sampling: dict[str, float], asked: list[int]
) -> None:
    copies, run = ArrivalsOnly(), played_otherwise(MANIFEST, **sampling)
    checked = ListedVerifier(
        LEADERS, run, [CountingEnvironment()], FailingAudits(), {3: {}}, copies
    )
    supported = "temperature" not in sampling and bool(sampling)
    assert await reasons(checked, *played(rewards=[1.0], supported=supported), 0.0) == {}
    assert copies.asked == asked


async def test_supports_of_accepted_rollouts_are_trained_on() -> None:
    run = played_otherwise(MANIFEST, top_p=0.9)
    checked = verifier(CountingEnvironment(), {3: {}}, run)
    submission, lease = played(supported=True)
    verified = await checked.verify(submission, lease, arrival(), version=4, rate=0.0)
    branches = [b for one in verified.groups[0].rollouts for b in one.branches]
    assert {one.support for one in branches} == {bytes(sum(branches[0].mask))}
    assert await reasons(checked, *played(), 0.0) == {Reason.MALFORMED: 8}


async def test_of_leased_prompts_the_lease_alone_says_what_was_asked() -> None:
    rollout = say([11, 12, 13], [5, 1], head(3))
    forged = say([11, 12, 14], [5, 1], head(3))
    lease = msgspec.structs.replace(
        PROMPTED_LEASE,
        tasks=PROMPTED_LEASE.tasks[:1],
        prompts=PROMPTED_LEASE.prompts[:1],
        min_version=0,
        group_size=1,
    )
    (task,) = lease.tasks
    checked = ListedVerifier(
        LEADERS, MANIFEST, [LeasedPrompts()], FailingAudits(), {3: {}}, CopyDetector()
    )

    def sent(branch: BranchRecord, reward: float = 0.0) -> Submission:
        group = GroupRecord(task.index, task.digest, (RolloutRecord((branch,), reward, ""),))
        return Submission(lease=b"", groups=(group,), engine="hf")

    assert await reasons(checked, sent(rollout), lease, 0.0) == {}
    assert await reasons(checked, sent(forged), lease, 0.0) == {Reason.BAD_PROMPT: 1}
    assert await reasons(checked, sent(rollout, 1.0), lease, 0.0) == {Reason.BAD_REWARD: 1}
    swapped = msgspec.structs.replace(lease, prompts=PROMPTED_LEASE.prompts[1:])
    with refuses(Reason.ENVIRONMENT_ERROR):
        await checked.verify(sent(rollout), swapped, arrival(), version=4, rate=0.0)


# -- readings of texts in float32 --------------------------------------------------------------------


NOISE = Measured(0, 0, 64, 0.01, 0.0, 0.0, 0.02, 0.1, 0.0)


class SameNoise:
    """Audits that find this in every branch."""

    def __init__(self, found: Measured) -> None:
        self._found = found

    async def audit_rollouts(self, call: AuditCall) -> AuditAnswer:
        return AuditAnswer([[self._found for _ in target.items] for target in call.chosen])


class SlowReadings(NoiseEnvelope):
    """Readings with this noise; the first waits until it may go on."""

    def __init__(self, *, fails: bool = False) -> None:
        self.first_may_go = asyncio.Event()
        self.asked = self.rests = 0
        self._fails = fails

    async def measure(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Measured | Unreadable]:
        self.asked += 1
        if self.asked == 1:
            await self.first_may_go.wait()
        if self._fails:
            raise EngineError("out of memory")
        return [NOISE for _ in items]

    async def rest(self) -> None:
        self.rests += 1


def reading_verifier(found: Measured, readings: SlowReadings) -> tuple[Verifier, SelfCalibration]:
    contract = msgspec.structs.replace(PROOFS, bounds="measured", reject=PROVISIONAL)
    calibration = SelfCalibration(contract, [b"o" * 32], reads=True)
    made = ListedVerifier(
        LEADERS, MANIFEST, [Scripted()], SameNoise(found), {3: {}}, ArrivalsOnly(),
        Readings(readings, calibration),
    )  # fmt: skip
    return made, calibration


def verifying(
    checked: Verifier, calibration: SelfCalibration, number: int
) -> "asyncio.Task[Verified]":
    submission, lease = played()
    conditions = calibration.conditions([WORKER.node_id], RTX, Placement(RTX))
    work = checked.verify(
        submission, lease, arrival(number), version=4, rate=1.0, conditions=conditions
    )
    return asyncio.create_task(work)


async def test_the_first_submissions_are_judged_once_enough_of_them_was_read() -> None:
    readings = SlowReadings()
    checked, calibration = reading_verifier(NOISE, readings)
    both = [verifying(checked, calibration, number) for number in (1, 2)]
    await until(lambda: readings.asked == 2)
    for _ in range(50):
        await asyncio.sleep(0)
    assert not any(one.done() for one in both), "8 of 16 texts are read"
    readings.first_may_go.set()
    for verified in await asyncio.gather(*both):
        bounds = verified.verdict.bounds
        assert isinstance(bounds, ClassBounds)
        assert (bounds.numerics, bounds.rollouts) == (ENVELOPE, 16)
        assert verified.verdict.accepted == 8


async def test_no_verdict_waits_for_the_readings_that_renew_the_envelope() -> None:
    readings = SlowReadings()
    checked, calibration = reading_verifier(NOISE, readings)
    readings.first_may_go.set()
    for number in range(ENOUGH // 8):
        await verifying(checked, calibration, number)
    assert calibration.gathered(ENVELOPE) == ENOUGH
    asked = readings.asked
    readings.asked, readings.first_may_go = 0, asyncio.Event()
    for number in range(64, 128):  # eight of these 512 texts are due
        verified = await verifying(checked, calibration, number)
        assert verified.verdict.accepted == 8
    assert (asked, readings.asked, calibration.gathered(ENVELOPE)) == (8, 1, ENOUGH)
    readings.first_may_go.set()
    await until(lambda: readings.rests > 0)
    verified = await verifying(checked, calibration, 128)
    assert len(verified.audited.readings) > 0, "they are stored with the next verdict"
    assert calibration.gathered(ENVELOPE) > ENOUGH
    await checked.close()


async def test_a_text_that_comes_again_has_no_means_and_no_verdict_tells_them() -> None:
    means = (0.1,) * MEANS
    audits = SameNoise(msgspec.structs.replace(NOISE, means=means))
    checked = ListedVerifier(LEADERS, MANIFEST, [Scripted()], audits, {3: {}}, ArrivalsOnly())
    submission, lease = played()
    verified = await checked.verify(submission, lease, arrival(), version=4, rate=1.0)
    found = [one.means for one in verified.audited.evidence]
    assert found == [pytest.approx(means), *[()] * 7], "equal replies"
    assert len(verified.verdict.evidence) == 8
    assert not any(one.means for one in verified.verdict.evidence)


async def test_work_beyond_the_envelope_is_rejected_in_the_submission_that_made_it() -> None:
    readings = SlowReadings()
    checked, calibration = reading_verifier(
        msgspec.structs.replace(NOISE, fingerprint=0.3), readings
    )
    both = [verifying(checked, calibration, number) for number in (1, 2)]
    await until(lambda: readings.asked == 2)
    readings.first_may_go.set()
    for verified in await asyncio.gather(*both):
        assert verified.reasons() == {Reason.WRONG_MODEL: 8}
        assert len(verified.audited.readings) == 8


async def test_where_no_text_can_be_read_nothing_is_learned_from_and_nobody_is_blamed() -> None:
    readings = SlowReadings(fails=True)
    readings.first_may_go.set()
    checked, calibration = reading_verifier(NOISE, readings)
    verified = await verifying(checked, calibration, 1)
    assert verified.reasons() == {Reason.UNCALIBRATED: 8}
    assert not calibration.is_reading


async def test_a_text_that_no_seed_decided_is_not_read() -> None:
    readings = SlowReadings()
    readings.first_may_go.set()
    garbage = msgspec.structs.replace(NOISE, sampling=0.5, sampling_max=9.0)
    checked, calibration = reading_verifier(garbage, readings)
    verified = await verifying(checked, calibration, 1)
    assert verified.reasons() == {Reason.BAD_SAMPLING: 8}
    assert readings.asked == 0
    assert calibration.gathered(ENVELOPE) == 0


async def test_the_list_of_checks_names_every_reason_of_their_code() -> None:
    sources = (checks, duplicates, judgement, verifier_module)
    code = "".join(map(inspect.getsource, sources))
    named = {Reason[name] for name in re.findall(r"Reason\.([A-Z_]+)", code)}
    listed = {reason for check in verifier(Scripted(), {}).checks() for reason in check.reasons}
    assert named <= listed
