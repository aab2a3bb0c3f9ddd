from pathlib import Path

import pytest

from primerl.node.ops.errors import StorageError
from primerl.node.training.checkpoint import whole_directory


def test_nothing_carries_the_final_name_before_the_block_ended(tmp_path: Path) -> None:
    with whole_directory(tmp_path / "a") as partial:
        (partial / "file").write_text("x")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a" / "file").read_text() == "x"


def fill_and_fail(target: Path) -> None:
    with whole_directory(target) as partial:
        (partial / "new").touch()
        raise RuntimeError


def test_an_error_leaves_what_was_there_and_no_leftovers(tmp_path: Path) -> None:
    with whole_directory(tmp_path / "a") as partial:
        (partial / "old").touch()
    with pytest.raises(RuntimeError):
        fill_and_fail(tmp_path / "a")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "old"]


def test_what_a_crash_left_is_not_mixed_into_the_next_attempt(tmp_path: Path) -> None:
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "torn").touch()
    with whole_directory(tmp_path / "a") as partial:
        assert list(partial.iterdir()) == []


def test_an_error_of_the_disk_names_the_target(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(StorageError, match=r"cannot write .*below"),
        whole_directory(tmp_path / "file" / "below"),
    ):
        pass
