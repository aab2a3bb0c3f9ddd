import asyncio
from typing import Any

import msgspec
import pytest
from protocol_cases import LEASE, MANIFEST, RUN, WORKER, refuses

from primerl.crypto.hashing import digest
from primerl.node.environments.counting import CountingEnvironment
from primerl.node.proofs.calls import Answer, AuditCall
from primerl.node.proofs.copies import Copies
from primerl.node.proofs.verifier import Arrival, Passed, Verifier
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease, TaskRef
from primerl.protocol.rollouts import GroupRecord, RolloutRecord, Submission

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
