"""Whether a ledger belongs to the checkpoints beside it."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.counting_backend import CountingBackend

from primerl.node.errors import StorageError
from primerl.node.storage.ledger import Ledger
from primerl.node.trainer.state import TrainerState, check_ledger
from primerl.node.training.checkpoint import Checkpoints
from primerl.node.training.resume_points import ResumePoints


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.db", fsync=False)
    ledger.count_boot()
    ledger.add_head(1, 2, b"sealed", b"document")
    yield ledger
    ledger.close()


async def checkpoint(tmp_path: Path, head: tuple[int, int]) -> Checkpoints:
    """Write a checkpoint that was made when `head` was the newest (epoch, version)."""
    backend = CountingBackend()
    await backend.start(tmp_path)
    state = TrainerState(
        verified_up_to=0,
        history=[],
        accepted=0,
        rejected={},
        received=0,
        delta_bytes=0,
        full_bytes=0,
        staleness_history=[],
        staleness_max=0,
        boots=1,
        head=head,
    )
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1)
    await checkpoints.write(1, {"cursor": msgspec.json.encode(state)}, backend)
    return checkpoints


@pytest.mark.parametrize("head", [(0, 9), (1, 1), (1, 2)])
async def test_a_ledger_may_know_later_versions_than_its_checkpoint(
    tmp_path: Path, ledger: Ledger, head: tuple[int, int]
) -> None:
    check_ledger(await checkpoint(tmp_path, head), ResumePoints(tmp_path / "checkpoints"), ledger)


@pytest.mark.parametrize("head", [(1, 3), (2, 0)])
async def test_a_ledger_that_lacks_only_a_version_is_older_than_its_checkpoint(
    tmp_path: Path, ledger: Ledger, head: tuple[int, int]
) -> None:
    checkpoints = await checkpoint(tmp_path, head)
    with pytest.raises(
        StorageError, match=f"it is older, and knows of .* version 2, .* and {head[1]}"
    ):
        check_ledger(checkpoints, ResumePoints(tmp_path / "checkpoints"), ledger)
