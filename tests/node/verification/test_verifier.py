import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from support.counting_environment import (
    CountingEnvironment,
    counting_task,
    question,
    right_reply,
)
from support.protocol_cases import LEASE, MANIFEST, RUN, WORKER, head, refuses
from support.rogue import say
from support.witness import felt

from primerl.crypto.hashing import digest
from primerl.node.environments.environment import Branch, EnvironmentStuck, Score, Task
from primerl.node.inference.fingerprint import Projection
from primerl.node.ops.errors import EngineError
from primerl.node.verification.auditor import AuditAnswer, AuditCall
from primerl.node.verification.duplicates import CopyDetector
from primerl.node.verification.verifier import (
    SCORED_AT_ONCE,
    AuditResults,
    ReceivedSubmission,
    RescoredRollout,
    Verifier,
    make_verdict,
)
from primerl.node.weights.state import State
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease, TaskRef
from primerl.protocol.reputation import Reputation
from primerl.protocol.rollouts import (
    BranchRecord,
    GroupRecord,
    Rejection,
    RolloutRecord,
    Submission,
    pack_f32,
    pack_u32,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


class NoAudits:
    """Nothing gets that far."""

    async def audit(self, call: AuditCall) -> AuditAnswer:
        raise AssertionError("an audit was asked for")


async def test_an_environment_that_changed_since_the_lease_is_not_the_workers_fault() -> None:
    verifier = Verifier(RUN, MANIFEST, CountingEnvironment(), NoAudits(), {}, CopyDetector())
    submission = Submission(lease=b"", groups=(), engine="hf")
    with refuses(Reason.ENVIRONMENT_ERROR):
        await verifier.verify(submission, LEASE, arrival(), version=4, rate=1.0)


class Ordered(Verifier):
    """Scores the first submission last; notes in which order copies are looked for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.scored: list[int] = []
        self.looked: list[int] = []
        self.go = asyncio.Event()

    async def _score_all(
        self, rollouts: object, lease: object, rejections: object
    ) -> list[RescoredRollout]:
        number = len(self.scored) + 1
        self.scored.append(number)
        if number == 1:
            await self.go.wait()
        return []

    def _without_copies(
        self, scored: object, arrival: ReceivedSubmission, rejections: object
    ) -> list[RescoredRollout]:
        self.looked.append(arrival.number)
        return []


async def test_copies_are_looked_for_in_order_of_arrival_though_scores_are_made_at_once() -> None:
    task = counting_task(0)
    lease = msgspec.structs.replace(LEASE, tasks=(TaskRef(task.index, task.digest),))
    verifier = Ordered(RUN, MANIFEST, CountingEnvironment(), NoAudits(), {}, CopyDetector())
    failed = RolloutRecord((), 0.0, "no answer")
    group = GroupRecord(task.index, task.digest, (failed,) * lease.group_size)
    submission = Submission(lease=b"", groups=(group,), engine="hf")
    both = [
        asyncio.create_task(
            verifier.verify(submission, lease, arrival(number), version=4, rate=1.0)
        )
        for number in (1, 2)
    ]
    async with asyncio.timeout(60.0):
        while len(verifier.scored) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert verifier.looked == []
        verifier.go.set()
        await asyncio.gather(*both)
    assert verifier.looked == [1, 2]


class NobodyAudits:
    """Every audit fails."""

    async def audit(self, call: AuditCall) -> AuditAnswer:
        raise EngineError("the auditor is ill")


class Forgetful(CountingEnvironment):
    """The publisher lets go of every policy while it scores."""

    def __init__(self, states: dict[int, State]) -> None:
        super().__init__()
        self._states = states
        self.scored = 0

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        self.scored += 1
        self._states.clear()
        return await super().score(task, branches)


def played(version: int) -> tuple[Lease, Submission]:
    """A lease of one task, and right answers of a policy of that version."""
    task = counting_task(0)
    lease = msgspec.structs.replace(
        LEASE, tasks=(TaskRef(task.index, task.digest),), min_version=0, group_size=8
    )
    right = say(question(task), right_reply(task), head(version))
    rollouts = (RolloutRecord((right,), 1.0, ""),) * lease.group_size
    group = GroupRecord(task.index, task.digest, rollouts)
    return lease, Submission(lease=b"", groups=(group,), engine="hf")


async def rejected_for(
    verifier: Verifier, lease: Lease, submission: Submission, rate: float
) -> list[Reason]:
    """Why each rollout is rejected; fewer than the lease has are accepted."""
    verified = await verifier.verify(submission, lease, arrival(), version=4, rate=rate)
    assert verified.verdict.accepted == lease.group_size - len(verified.rejections)
    return [one.reason for one in verified.rejections]


async def test_what_claims_a_policy_that_is_not_held_is_stale_though_the_lot_spares_it() -> None:
    states: dict[int, State] = {4: {}}
    environment = Forgetful(states)
    lease, submission = played(3)
    verifier = Verifier(RUN, MANIFEST, environment, NoAudits(), states, CopyDetector())
    found = await rejected_for(verifier, lease, submission, 0.0)
    assert found == [Reason.STALE] * lease.group_size
    assert environment.scored == 0  # nor is it remembered for what may be a copy of it


async def test_a_policy_that_leaves_memory_before_its_audit_leaves_nothing_unaudited() -> None:
    for rate in (0.0, 1.0):
        states: dict[int, State] = {3: {}}
        environment = Forgetful(states)
        lease, submission = played(3)
        verifier = Verifier(RUN, MANIFEST, environment, NoAudits(), states, CopyDetector())
        found = await rejected_for(verifier, lease, submission, rate)
        assert found == [Reason.STALE] * lease.group_size
        assert environment.scored == lease.group_size


async def test_what_a_verdict_from_before_a_restart_rejected_stays_rejected_and_no_more() -> None:
    environment = CountingEnvironment()
    lease, submission = played(3)
    verifier = Verifier(RUN, MANIFEST, environment, NoAudits(), {}, CopyDetector())
    one = Rejection(0, 5, Reason.WRONG_POLICY, "another policy")
    for told, found in (([one], [one]), ([one] * 2, None)):
        before = make_verdict(arrival(), lease, 0, told, AuditResults(), 0.5)
        before = msgspec.structs.replace(
            before, rejections=(one,)
        )  # as if there was no room for two
        verified = await verifier.verify(
            submission, lease, arrival(), version=4, rate=0.5, before=before
        )
        assert verified.rejections == (found or verified.rejections)
        assert verified.verdict.accepted == (lease.group_size - 1 if found else 0)


async def test_where_an_audit_fails_what_was_not_picked_is_not_accepted_either() -> None:
    environment = CountingEnvironment()
    lease, submission = played(3)
    verifier = Verifier(RUN, MANIFEST, environment, NobodyAudits(), {3: {}}, CopyDetector())
    found = await rejected_for(verifier, lease, submission, 0.5)
    assert found == [Reason.AUDIT_FAILED] * lease.group_size


class Judged(CountingEnvironment):
    """Scores as it is told, one score after the other; `stuck`: the tokens that it never returns on."""

    def __init__(self, *rewards: float, stuck: bool = False) -> None:
        super().__init__()
        self._rewards = itertools.cycle(rewards or [0.0])
        self._stuck = stuck
        self.asked = 0

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        self.asked += 1
        await asyncio.sleep(0)
        if self._stuck:
            raise EnvironmentStuck("task 0: no result within 60 s")
        return Score(next(self._rewards))


def arrival(number: int = 1) -> ReceivedSubmission:
    return ReceivedSubmission(number, digest(b"bundle"), WORKER.node_id, b"", bytes(32))


async def verdict_on(
    environment: Judged, rewards: Sequence[float], *, sampled: bool = False
) -> tuple[Counter[Reason], Verifier]:
    """Why rollouts with these claimed rewards are rejected."""
    run = MANIFEST
    if sampled:
        contract = msgspec.structs.replace(run.environment, rewards="sampled")
        run = msgspec.structs.replace(run, environment=contract)
    task = counting_task(0)
    lease = msgspec.structs.replace(
        LEASE, tasks=(TaskRef(task.index, task.digest),), group_size=len(rewards), min_version=0
    )
    stop = run.model.stop_token_ids[0]
    tokens = question(task)
    record = BranchRecord(
        tokens=pack_u32([*tokens, stop]),
        sampled=bytes([0] * len(tokens) + [1]),
        logprobs=pack_f32([-1.0]),
        policy_first=4,
        policy_last=4,
        finish="stop",
        spans=(),
        proof=Projection().make(np.stack([felt(bytes(32), tokens)])),
    )
    rollouts = tuple(RolloutRecord((record,), reward, "") for reward in rewards)
    submission = Submission(
        lease=b"", groups=(GroupRecord(task.index, task.digest, rollouts),), engine="hf"
    )
    verifier = Unproved(RUN, run, environment, NoAudits(), {4: {}}, CopyDetector())
    verified = await verifier.verify(submission, lease, arrival(), version=4, rate=0.0)
    return verified.reasons(), verifier


class Unproved(Verifier):
    """Looks at rewards only."""

    def _without_copies(
        self, scored: Sequence[RescoredRollout], arrival: ReceivedSubmission, rejections: object
    ) -> list[RescoredRollout]:
        return list(scored)


async def test_a_claim_that_differs_from_a_steady_score_is_the_workers_fault() -> None:
    reasons, verifier = await verdict_on(Judged(0.25), [0.25, 1.0])
    assert reasons == {Reason.BAD_REWARD: 1}
    assert verifier.fault == ""


async def test_a_reward_that_is_not_deterministic_is_nobodys_fault() -> None:
    """A judge's verdicts were once called bad_reward, and honest workers got no more work."""
    environment = Judged(0.0, 1.0, 0.0, 0.0)
    reasons, verifier = await verdict_on(environment, [0.7] * 6)
    assert reasons == {Reason.ENVIRONMENT_ERROR: 6}
    assert "'counting' is not deterministic" in verifier.fault
    assert "environment.deterministic_rewards = false" in verifier.fault
    reputation = Reputation()
    reputation.record(0, reasons, 0.0)
    assert (reputation.bad, reputation.refused) == (0.0, "")


async def test_of_rewards_that_are_said_to_vary_the_trainers_own_counts() -> None:
    environment = Judged(0.0, 1.0)
    reasons, verifier = await verdict_on(environment, [0.7] * 4, sampled=True)
    assert (reasons, verifier.fault, environment.asked) == ({}, "", 4)


async def test_an_environment_that_does_not_return_is_not_asked_for_all_of_a_submission() -> None:
    environment = Judged(stuck=True)
    reasons, _ = await verdict_on(environment, [1.0] * 200)
    assert reasons == {Reason.ENVIRONMENT_ERROR: 200}
    assert environment.asked <= 2 * SCORED_AT_ONCE
