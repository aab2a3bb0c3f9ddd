"""Files of rollouts: what is written is read again, whole or not at all, and bounded on the disk."""

import math
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from support.kept_cases import row

from primerl.node.errors import StorageError
from primerl.node.storage.rollouts import (
    BRIEF,
    ROWS_AT_ONCE,
    KeptRollout,
    RolloutFiles,
    StepRecord,
    as_json,
)


@pytest.fixture
def files(tmp_path: Path) -> RolloutFiles:
    return RolloutFiles(tmp_path / "rollouts", fsync=False)


def written(files: RolloutFiles, *steps: int) -> None:
    for step in steps:
        files.write(StepRecord(step, groups=1, kept=1), [row(step)])


def test_what_is_written_is_read_again_in_order(files: RolloutFiles) -> None:
    rows = [
        row(12, number // 4, number % 4, reward=number / 7)
        for number in range(3 * ROWS_AT_ONCE + 1)
    ]
    rows.append(
        row(12, 13, verdict="rejected", reason="bad_reward", advantage=None, reward=math.inf)
    )
    rows.append(row(12, 14, prompt_ids=[], completion_ids=[2**32 - 1], completion_mask=[True]))
    record = StepRecord(12, groups=13, kept=13, rejected=1, head=b"\x00\xff sealed")
    size = files.write(record, rows)
    assert files.path(12).name == "step_000012.parquet"
    assert files.path(12).stat().st_size == size
    assert files.record(12) == record
    assert files.read(12) == rows


def test_small_columns_are_read_without_the_tokens(files: RolloutFiles) -> None:
    written(files, 3)
    (found,) = files.read(3, BRIEF)
    assert (found.place, found.reward, found.worker) == ("3/0/0", 0.5, row().worker)
    assert (found.prompt, found.completion_ids) == ("", [])


def test_a_file_of_before_a_column_was_added_is_read_without_it(files: RolloutFiles) -> None:
    written(files, 3)
    table = parquet.read_table(files.path(3))
    parquet.write_table(table.drop_columns(["support"]), files.path(3))
    assert files.read(3) == [row(3)]


def test_a_file_that_cannot_be_finished_leaves_the_old_one(files: RolloutFiles) -> None:
    written(files, 1)
    before = files.path(1).read_bytes()

    def torn() -> Iterator[KeptRollout]:
        yield from [row(1)] * ROWS_AT_ONCE
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="make room"):
        files.write(StepRecord(1, groups=1, kept=1), torn())
    assert files.path(1).read_bytes() == before
    assert [path.name for path in files.directory.iterdir()] == ["step_000001.parquet"]


def test_the_oldest_make_room(files: RolloutFiles) -> None:
    written(files, *range(1, 7))
    files.prune(4, 2**30)
    assert files.steps() == [3, 4, 5, 6]
    files.prune(0, 2.5 * files.path(6).stat().st_size)
    assert files.steps() == [5, 6]
    files.prune(0, 1.0)
    assert files.steps() == [6], "the newest stays, however large it is"


def test_a_run_that_goes_back_forgets_later_steps(files: RolloutFiles) -> None:
    written(files, 1, 2, 3)
    files.go_back(1)
    assert files.steps() == [1]


def test_what_is_not_there_or_not_ours_is_said(files: RolloutFiles, tmp_path: Path) -> None:
    assert files.steps() == []
    with pytest.raises(StorageError, match="not kept"):
        files.read(1)
    written(files, 1)
    whole = files.path(1).read_bytes()
    files.path(2).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StorageError, match="damaged"):
        files.read(2)
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.table({"step": [1]}), files.path(3))
    with pytest.raises(StorageError, match="no file of rollouts"):
        files.record(3)
    files.write(StepRecord(4, groups=1, kept=1, format=9), [])
    with pytest.raises(StorageError, match="newer release"):
        files.read(4)


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    assert b'"reward":null' in as_json(row(reward=math.nan))
