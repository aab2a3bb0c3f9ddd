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


def state_at(head: tuple[int, int], ledger: str = "") -> bytes:
    """A trainer's state, encoded, of when `head` was the newest (epoch, version)."""
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
        ledger=ledger,
    )
    return msgspec.json.encode(state)


async def checkpoint(tmp_path: Path, head: tuple[int, int], ledger: str = "") -> Checkpoints:
    """Write a checkpoint that was made when `head` was the newest (epoch, version)."""
    backend = CountingBackend()
    await backend.start(tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1)
    await checkpoints.write(1, {"cursor": state_at(head, ledger)}, backend)
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


@pytest.mark.parametrize("of_another_run", [False, True])
async def test_a_ledger_that_lacks_what_a_resume_point_of_its_run_knows_is_older(
    tmp_path: Path, ledger: Ledger, of_another_run: bool
) -> None:
    checkpoints = await checkpoint(tmp_path, (1, 2))
    points = ResumePoints(tmp_path / "checkpoints", fsync=False)
    name = "another" if of_another_run else ledger.ledger_id()
    points.begin(5, {"cursor": state_at((1, 3), name)})
    await points.finish()
    if of_another_run:
        check_ledger(checkpoints, points, ledger)
        return
    with pytest.raises(StorageError, match="not the ledger of resume point 5: it is older"):
        check_ledger(checkpoints, points, ledger)


async def test_a_checkpoint_with_the_place_of_another_run_says_nothing_of_the_ledger(
    tmp_path: Path, ledger: Ledger
) -> None:
    checkpoints = await checkpoint(tmp_path, (1, 2))
    points = ResumePoints(tmp_path / "checkpoints")
    (checkpoints.path(1) / "parts" / "cursor").write_bytes(state_at((1, 2), "another"))
    check_ledger(checkpoints, points, ledger)
    await checkpoint(tmp_path, (1, 2), "another")
    with pytest.raises(StorageError, match="it is of another run"):
        check_ledger(checkpoints, points, ledger)
