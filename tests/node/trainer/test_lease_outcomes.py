"""What a lease costs its worker by the verdict on it."""

import pytest
from support.protocol_cases import LEASE

from primerl.node.trainer.lease_outcomes import WorkRecords
from primerl.node.verification.verdict import (
    AuditResults,
    ReceivedSubmission,
    Verified,
    make_verdict,
)
from primerl.protocol.errors import Reason
from primerl.protocol.rollouts import Rejection, Submission

WORKER = b"w" * 32
SENT = Submission(lease=b"", groups=(), engine="hf")


def verified(reason: Reason) -> Verified:
    """A lease of which everything is rejected for one reason."""
    rejections = [
        Rejection(group, rollout, reason, "")
        for group in range(len(LEASE.tasks))
        for rollout in range(LEASE.group_size)
    ]
    arrival = ReceivedSubmission(1, bytes(32), WORKER, b"", bytes(32))
    return Verified(
        make_verdict(arrival, LEASE, 0, rejections, AuditResults(), 1.0), rejections, []
    )


@pytest.mark.parametrize("excused", [True, False])
def test_work_without_bounds_costs_a_lease_unless_its_bounds_were_withdrawn(excused: bool) -> None:
    found = verified(Reason.UNCALIBRATED)
    outcome = WorkRecords().judge(WORKER, SENT, LEASE, found, uncalibrated_excused=excused)
    assert outcome.blameless is excused


def test_what_our_auditor_could_not_measure_never_costs_a_lease() -> None:
    found = verified(Reason.AUDIT_FAILED)
    outcome = WorkRecords().judge(WORKER, SENT, LEASE, found, uncalibrated_excused=False)
    assert outcome.blameless
