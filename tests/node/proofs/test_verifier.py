import pytest
from protocol_cases import LEASE, MANIFEST, RUN, WORKER, refuses

from primerl.crypto.hashing import digest
from primerl.node.environments.counting import CountingEnvironment
from primerl.node.proofs.calls import Answer, AuditCall
from primerl.node.proofs.copies import Copies
from primerl.node.proofs.verifier import Arrival, Verifier
from primerl.protocol.errors import Reason
from primerl.protocol.rollouts import Submission

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
