import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from protocol_cases import LEASE, MANIFEST, RUN, WORKER, head, refuses
from rogue import say

from primerl.crypto.hashing import digest
from primerl.node.environments.counting import CountingEnvironment
from primerl.node.environments.environment import Branch, Score, Task
from primerl.node.errors import EngineError
from primerl.node.proofs.calls import Answer, AuditCall
from primerl.node.proofs.copies import Copies
from primerl.node.proofs.verifier import (
    Arrival,
    AuditResults,
    Passed,
    Verifier,
    make_verdict,
)
from primerl.node.weights.state import State
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease, TaskRef
from primerl.protocol.rollouts import GroupRecord, Rejection, RolloutRecord, Submission

pytestmark = pytest.mark.asyncio(loop_scope="session")


class NoAudits:
    """Nothing gets that far."""

    async def audit(self, call: AuditCall) -> Answer:
        raise AssertionError("an audit was asked for")


async def test_an_environment_that_changed_since_the_lease_is_not_the_workers_fault() -> None:
    verifier = Verifier(RUN, MANIFEST, CountingEnvironment(), NoAudits(), {}, Copies())
    arrival = Arrival(1, digest(b"bundle"), WORKER.node_id, b"", bytes(32))
    submission = Submission(lease=b"", groups=(), engine="hf")
    with refuses(Reason.ENVIRONMENT_ERROR):
        await verifier.verify(submission, LEASE, arrival, version=4, rate=1.0)


class Slow(Verifier):
    """Looks through a submission until it is let go."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.looked: list[int] = []
        self.go = asyncio.Event()

    async def _score_all(
        self, rollouts: object, lease: Lease, arrival: Arrival, rejections: object
    ) -> list[Passed]:
        self.looked.append(arrival.number)
        await self.go.wait()
        return []


async def test_of_two_submissions_at_a_time_the_first_is_looked_through_first() -> None:
    environment = CountingEnvironment()
    task = environment.task(0)
    lease = msgspec.structs.replace(LEASE, tasks=(TaskRef(task.index, task.digest),))
    verifier = Slow(RUN, MANIFEST, environment, NoAudits(), {}, Copies())
    failed = RolloutRecord((), 0.0, "no answer")
    group = GroupRecord(task.index, task.digest, (failed,) * lease.group_size)
    submission = Submission(lease=b"", groups=(group,), engine="hf")
    both = [
        asyncio.create_task(
            verifier.verify(
                submission,
                lease,
                Arrival(number, digest(b"bundle"), WORKER.node_id, b"", bytes(32)),
                version=4,
                rate=1.0,
            )
        )
        for number in (1, 2)
    ]
    await asyncio.sleep(0.01)
    assert verifier.looked == [1]
    verifier.go.set()
    await asyncio.gather(*both)
    assert verifier.looked == [1, 2]


class NobodyAudits:
    """Every audit fails."""

    async def audit(self, call: AuditCall) -> Answer:
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


def played(environment: CountingEnvironment, version: int) -> tuple[Lease, Submission]:
    """A lease of one task, and right answers of a policy of that version."""
    task = environment.task(0)
    lease = msgspec.structs.replace(
        LEASE, tasks=(TaskRef(task.index, task.digest),), min_version=0, group_size=8
    )
    right = say(environment.prompt(task), environment.demonstration(task) or (), head(version))
    rollouts = (RolloutRecord((right,), 1.0, ""),) * lease.group_size
    group = GroupRecord(task.index, task.digest, rollouts)
    return lease, Submission(lease=b"", groups=(group,), engine="hf")


async def rejected_for(
    verifier: Verifier, lease: Lease, submission: Submission, rate: float
) -> list[Reason]:
    """Why each rollout is rejected; fewer than the lease has are accepted."""
    arrival = Arrival(1, digest(b"bundle"), WORKER.node_id, b"", bytes(32))
    verified = await verifier.verify(submission, lease, arrival, version=4, rate=rate)
    assert verified.verdict.accepted == lease.group_size - len(verified.rejections)
    return [one.reason for one in verified.rejections]


async def test_what_claims_a_policy_that_is_not_held_is_stale_though_the_lot_spares_it() -> None:
    states: dict[int, State] = {4: {}}
    environment = Forgetful(states)
    lease, submission = played(environment, 3)
    verifier = Verifier(RUN, MANIFEST, environment, NoAudits(), states, Copies())
    found = await rejected_for(verifier, lease, submission, 0.0)
    assert found == [Reason.STALE] * lease.group_size
    assert environment.scored == 0  # nor is it remembered for what may be a copy of it


async def test_a_policy_that_leaves_memory_before_its_audit_leaves_nothing_unaudited() -> None:
    for rate in (0.0, 1.0):
        states: dict[int, State] = {3: {}}
        environment = Forgetful(states)
        lease, submission = played(environment, 3)
        verifier = Verifier(RUN, MANIFEST, environment, NoAudits(), states, Copies())
        found = await rejected_for(verifier, lease, submission, rate)
        assert found == [Reason.STALE] * lease.group_size
        assert environment.scored == lease.group_size


async def test_what_a_verdict_from_before_a_restart_rejected_stays_rejected_and_no_more() -> None:
    environment = CountingEnvironment()
    lease, submission = played(environment, 3)
    verifier = Verifier(RUN, MANIFEST, environment, NoAudits(), {}, Copies())
    arrival = Arrival(1, digest(b"bundle"), WORKER.node_id, b"", bytes(32))
    one = Rejection(0, 5, Reason.WRONG_POLICY, "another policy")
    for told, found in (([one], [one]), ([one] * 2, None)):
        before = make_verdict(arrival, lease, 0, told, AuditResults(), 0.5)
        before = msgspec.structs.replace(
            before, rejections=(one,)
        )  # as if there was no room for two
        verified = await verifier.verify(
            submission, lease, arrival, version=4, rate=0.5, before=before
        )
        assert verified.rejections == (found or verified.rejections)
        assert verified.verdict.accepted == (lease.group_size - 1 if found else 0)


async def test_where_an_audit_fails_what_was_not_picked_is_not_accepted_either() -> None:
    environment = CountingEnvironment()
    lease, submission = played(environment, 3)
    verifier = Verifier(RUN, MANIFEST, environment, NobodyAudits(), {3: {}}, Copies())
    found = await rejected_for(verifier, lease, submission, 0.5)
    assert found == [Reason.AUDIT_FAILED] * lease.group_size
