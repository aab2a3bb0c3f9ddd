"""A run's directory: what it may begin in, and what --clean takes and leaves there."""

import logging
import os
import socket
from datetime import date, timedelta
from pathlib import Path

import pytest

from primerl.node.errors import BusyError, StorageError, UsageError
from primerl.node.models.model_files import CONTRACT_PATTERNS
from primerl.node.process.unix_sockets import short
from primerl.node.removal import remove_made, remove_scratch, remove_tree
from primerl.node.storage import run_files
from primerl.node.storage.partial import whole_directory

CHUNK = f"ab/cd/{'ab' * 32}"
OURS = [
    run_files.CONFIG,
    "ticket.txt",
    "metrics.jsonl",
    ".metrics.jsonl.partial",
    "summary.json",
    "reward.png",
    "evaluations.jsonl",
    "judge.db-wal",
    "logs/trainer.log",
    "logs/worker_1.log.2",
    "logs/trainer.jsonl",
    "checkpoints/step_3/COMPLETE",
    "checkpoints/step_3/parts/cursor",
    "checkpoints/step_3/backend/learner.json",
    "checkpoints/step_3/backend/shard-00000-00000.safetensors",
    "checkpoints/step_4.partial/backend.partial/shard-00000-00000.safetensors",
    "checkpoints/void_1/step_9/COMPLETE",
    "rollouts/step_000001.parquet",
    "weights/step_3/model.safetensors",
    "weights/step_3/tokenizer.json",
    "weights/step_3/merged/model.safetensors",
    "model/chat_template.jinja",
    "wandb/run-1/files/output.log",
    "trainer/key.pem",
    "trainer/ledger.db",
    "trainer/ledger.db-wal",
    "trainer/ledger.lock",
    f"trainer/chunks/{CHUNK}",
    "trainer/model/config.json",
    f"worker_1/{run_files.SETTINGS}",
    "worker_1/key.pem",
    "worker_1/last_status.json",
    "worker_1/logs/worker.jsonl",
    f"worker_1/runs/0123456789abcdef/chunks/{CHUNK}",
    "worker_1/runs/0123456789abcdef/model/config.json",
]
THEIRS = [
    "notes.md",
    "key.pem",
    "logs/mine.txt",
    "checkpoints/step_3/notes.txt",
    "weights/step_3/model.gguf",
    "weights/step_3/notes.txt",
    "trainer/backup.sql",
    f"trainer/chunks/{CHUNK}.copy",
    "rollouts/best.parquet",
    "other/metrics.jsonl",
    "other/trainer/key.pem",
    "other/.primerl-run",
    "worker_9/key.pem",
    "worker_9/logs/worker.jsonl",
]
"""Among them another run below this one, and the data of a node that `rl` did not start."""


def lay(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def files(root: Path) -> set[str]:
    found = (path for path in root.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(root).as_posix() for path in found}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory that carries the mark, with a run's files and its owner's."""
    run_files.claim(tmp_path / "o" / "run")
    lay(tmp_path / "o" / "run", *OURS, *THEIRS)
    return tmp_path / "o" / "run"


def test_clean_takes_what_a_run_writes_and_names_what_it_leaves(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run_files.clean(run)
    assert files(run) == {run_files.MARK, *THEIRS}
    assert "checkpoints/step_3/notes.txt" in caplog.text
    assert f"and {len(THEIRS) - 5} more" in caplog.text
    assert not (run / "weights" / "step_3" / "merged").exists(), "an empty folder of ours goes, too"
    run_files.clean(run)
    assert files(run) == {run_files.MARK, *THEIRS}


def test_the_day_on_which_a_run_began_is_kept_until_it_begins_anew(
    run: Path, tmp_path: Path
) -> None:
    today = run_files.begun_on(run)
    assert date.fromisoformat(today) <= date.today() + timedelta(days=1)
    mark = run / run_files.MARK
    mark.write_text(mark.read_text().replace(today, "2020-02-20"))
    run_files.claim(run, goes_on=True)
    assert run_files.begun_on(run) == "2020-02-20"
    run_files.clean(run)
    assert run_files.begun_on(run) >= today
    mark.write_text("of a release before")
    assert run_files.begun_on(run) >= today
    assert run_files.begun_on(tmp_path) >= today
    mark.write_bytes(b"\xff")
    assert run_files.begun_on(run) >= today
    mark.unlink()
    mark.mkdir()
    with pytest.raises(StorageError, match="move it away"):
        run_files.begun_on(run)


def test_twice_cleaned_a_directory_of_runs_loses_nothing(tmp_path: Path) -> None:
    """As --name '' did: the first start marked the parent of runs, and the second emptied it."""
    outputs = tmp_path / "o"
    run_files.claim(outputs / "a")
    lay(outputs, "a/metrics.jsonl", "keys/key.pem", "notes.md", "demo/config.json")
    before = files(outputs)
    for _ in range(2):
        with pytest.raises(UsageError, match="holds no run"):
            run_files.clean(outputs)
    run_files.claim(outputs)  # nothing of it would be written over
    run_files.clean(outputs)
    assert files(outputs) == before | {run_files.MARK}


@pytest.mark.parametrize(
    "name", [run_files.CONFIG, "logs/app.log", "model/model.safetensors", "data/rows"]
)
def test_a_run_does_not_begin_where_it_would_write_over_a_users_files(
    tmp_path: Path, name: str
) -> None:
    lay(tmp_path, name)
    with pytest.raises(UsageError, match=r"no directory of a run .* move that away"):
        run_files.claim(tmp_path)
    with pytest.raises(UsageError, match="holds no run"):
        run_files.clean(tmp_path)
    assert files(tmp_path) == {name}


def test_a_directory_from_before_the_mark_is_known_by_its_config(tmp_path: Path) -> None:
    lay(tmp_path, *OURS, "notes.md")
    for text in ("{", "[]", '{"vocab_size": 1}', '{"name": "a", "seed": 0}', "[" * 100_000):
        (tmp_path / run_files.CONFIG).write_text(text)
        with pytest.raises(UsageError, match="holds no run"):
            run_files.clean(tmp_path)
    assert files(tmp_path) == {*OURS, "notes.md"}
    (tmp_path / run_files.CONFIG).write_text(
        '{"name": "a", "output_dir": "outputs", "seed": 0, "x": 1}'
    )
    run_files.claim(tmp_path)
    run_files.clean(tmp_path)
    assert files(tmp_path) == {run_files.MARK, "notes.md"}


def test_no_link_is_followed(run: Path, tmp_path: Path) -> None:
    lay(tmp_path / "precious", "step_1/model.safetensors", "a.log", "key.pem")
    inner = run / "weights" / "step_7"
    inner.symlink_to(tmp_path / "precious" / "step_1")
    (run / "logs" / "old.log").symlink_to(tmp_path / "precious" / "a.log")
    run_files.clean(run)
    assert inner.is_symlink()
    assert (run / "logs" / "old.log").is_symlink()
    assert len(files(tmp_path / "precious")) == 3
    (run / "rollouts" / "best.parquet").unlink()
    (run / "rollouts").rmdir()
    (run / "rollouts").symlink_to(tmp_path / "precious")
    lay(run, "metrics.jsonl")
    with pytest.raises(UsageError, match=r"rollouts in .* is a link"):
        run_files.clean(run)
    assert (run / "metrics.jsonl").exists(), "it is refused before anything goes"


def test_a_run_directory_that_is_a_link_is_not_cleaned(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "o2"
    other.mkdir()
    (other / "run").symlink_to(run)
    with pytest.raises(UsageError, match="link"):
        run_files.clean(other / "run")
    (other / "nothing").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="link"):
        run_files.clean(other / "nothing")
    assert files(run) == {run_files.MARK, *OURS, *THEIRS}


def test_a_mark_that_is_a_link_is_none(tmp_path: Path) -> None:
    lay(tmp_path, "mark", "run/metrics.jsonl")
    (tmp_path / "run" / run_files.MARK).symlink_to(tmp_path / "mark")
    with pytest.raises(UsageError, match="holds no run"):
        run_files.clean(tmp_path / "run")


def test_the_lock_of_a_run_is_one_by_whichever_links_it_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "o2").symlink_to(tmp_path / "o")
    (tmp_path / "link").symlink_to(run)
    for name in (tmp_path / "o2" / "run", tmp_path / "link", run / ".." / "run"):
        with run_files.held(run), pytest.raises(BusyError), run_files.held(name):
            pass


def test_what_is_removed_is_what_a_run_writes() -> None:
    assert [name for name in OURS if not run_files.written_by_run(name)] == []
    assert [name for name in THEIRS[:9] if run_files.written_by_run(name)] == []
    for name in (
        "../config.json",
        "logs/../../x.log",
        "weights/step_3/../../notes",
        "/config.json",
    ):
        assert not run_files.written_by_run(name)
    for pattern in CONTRACT_PATTERNS:
        name = pattern.replace("*", "") if "chat" in pattern else pattern.replace("*", "x")
        assert run_files.written_to_model(name), pattern
        assert run_files.written_by_run(f"weights/step_1/{name}")


# -- trees that are replaced -----------------------------------------------------------------------


def test_what_a_user_laid_into_exported_weights_is_kept_beside_the_new_ones(tmp_path: Path) -> None:
    target = tmp_path / "step_5"
    lay(target, "model.safetensors", "config.json", "notes.txt", "gguf/model.gguf")
    for number in (1, 2):
        with whole_directory(target, run_files.written_to_model, fsync=False) as partial:
            lay(partial, "model.safetensors")
        assert files(target) == {"model.safetensors"}
        assert files(tmp_path / "step_5.kept_1") == {"notes.txt", "gguf/model.gguf"}
        if number == 2:
            lay(target, "mine.md")
    with whole_directory(target, run_files.written_to_model, fsync=False) as partial:
        lay(partial, "config.json")
    assert files(tmp_path / "step_5.kept_2") == {"mine.md"}
    assert sorted(os.listdir(tmp_path)) == ["step_5", "step_5.kept_1", "step_5.kept_2"]


def test_a_directory_is_not_written_over_a_link(tmp_path: Path) -> None:
    lay(tmp_path / "precious", "model.safetensors")
    (tmp_path / "step_5").symlink_to(tmp_path / "precious")
    with (
        pytest.raises(StorageError, match="is a link"),
        whole_directory(tmp_path / "step_5", run_files.written_to_model),
    ):
        pass
    assert files(tmp_path / "precious") == {"model.safetensors"}


def test_a_half_written_directory_loses_only_what_is_ours(tmp_path: Path) -> None:
    lay(tmp_path / "step_5.partial", "COMPLETE", "parts/cursor", "diary")
    remove_made(tmp_path / "step_5.partial", run_files.written_to_checkpoint)
    assert files(tmp_path) == {"step_5.kept_1/diary"}
    remove_made(tmp_path / "step_6.partial", run_files.written_to_checkpoint)


def test_only_scratch_directories_are_removed_whole(tmp_path: Path) -> None:
    lay(tmp_path, "precious/a", "primerl-x/b", "primerl-x/c/d")
    (tmp_path / "primerl-x" / "link").symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match="no temporary directory"):
        remove_scratch(tmp_path / "precious")
    remove_scratch(tmp_path / "primerl-x")
    remove_scratch(tmp_path / "primerl-gone")
    (tmp_path / "primerl-link").symlink_to(tmp_path / "precious")
    remove_scratch(tmp_path / "primerl-link")
    assert files(tmp_path) == {"precious/a", "primerl-link"}


def test_sockets_go_and_deep_and_empty_folders_of_others_stay(run: Path) -> None:
    deep = run / "data" / "/".join("d" * 70)
    deep.mkdir(parents=True)
    (run / "mine").mkdir()
    with (
        socket.socket(socket.AF_UNIX) as end,
        short(run / "trainer" / "control.sock") as name,
    ):
        end.bind(name)
    run_files.clean(run)
    assert deep.is_dir()
    assert (run / "mine").is_dir()
    assert not (run / "trainer" / "control.sock").exists()


def test_a_tree_whose_root_is_a_file_or_a_link_is_not_removed(tmp_path: Path) -> None:
    lay(tmp_path, "file", "tree/a")
    (tmp_path / "link").symlink_to(tmp_path / "tree")
    for name in ("file", "link"):
        with pytest.raises(OSError, match=r"directory|symbolic"):
            remove_tree(tmp_path / name, lambda _: True)
    assert files(tmp_path) == {"file", "link", "tree/a"}
