"""Which work a trainer that went back to an older checkpoint, once or more often, cannot judge any more."""

from pathlib import Path

from msgspec import structs
from support.hostile import say
from support.protocol_cases import LEASE, head

from primerl.node.storage.ledger import Ledger
from primerl.node.trainer.state import LEASES_PER_BOOT, current_epoch
from primerl.protocol.rollouts import GroupRecord, RolloutRecord, Submission


def made_by(version: int) -> Submission:
    """One rollout of a version."""
    rollout = RolloutRecord((say([2, 5], [6, 1], head(version)),), 1.0, "")
    return Submission(b"", (GroupRecord(0, bytes(32), (rollout,)),), "hf")


def test_work_of_a_version_that_any_epoch_since_made_anew_is_void(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db", fsync=False)
    current_epoch(ledger, (0, 0), 1)
    current_epoch(ledger, (1, 5), 2)
    current_epoch(ledger, (2, 8), 3)
    # a restart without going back finds the same epoch
    epoch = current_epoch(ledger, (2, 9), 4)
    ledger.close()
    void = {
        (boot, version): epoch.voids(
            made_by(version), structs.replace(LEASE, lease_id=(boot << LEASES_PER_BOOT) + 1)
        )
        for boot in (1, 2, 3, 4)
        for version in (5, 7, 8, 9)
    }
    assert {place for place, is_void in void.items() if is_void} == {
        *((1, version) for version in (7, 8, 9)),  # version 5 of epoch 0 was continued
        (2, 9),  # version 8 of epoch 1 was
    }
