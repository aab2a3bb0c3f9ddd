"""Name the files that a run leaves in its directory, and remove them for `--clean`.

Nothing is deleted that does not look like a run of ours, and nothing while a node runs in it.
"""

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ..ops.control import ask, socket_path
from ..ops.errors import BusyError, NetworkError, StorageError, UsageError, file_error
from .partial import whole_file

TICKET, SUMMARY, PICTURE, METRICS, LOGS = (
    "ticket.txt",
    "summary.json",
    "reward.png",
    "metrics.jsonl",
    "logs",
)
CHECKPOINTS = "checkpoints"
ROLLOUTS = "rollouts"
CONFIG = "config.json"
MARKS = (TICKET, SUMMARY, METRICS, LOGS, CHECKPOINTS, "trainer")
"""Every run's directory holds at least one of these."""


def holds_run(directory: Path) -> bool:
    """Return whether a run was begun in `directory`, so that --resume may go on with it."""
    return any((directory / name).exists() for name in ("trainer/ledger.db", METRICS, CHECKPOINTS))


def write(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace the file at `path` by one that holds `text`, whole or not at all. Raises StorageError."""
    with whole_file(path) as partial:
        made = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(made, "w", encoding="utf-8") as file:
            file.write(text)


def write_private(path: Path, text: str) -> None:
    """Write a file, as write(), that only its owner can read."""
    write(path, text, mode=0o600)


def weights_dir(run_dir: Path, step: int) -> Path:
    """Return the directory of a step's exported weights."""
    return run_dir / "weights" / f"step_{step}"


def make_directory(path: Path) -> None:
    """Make a directory, where it is not there yet. Raises StorageError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_error(error, path) from error


def check_kinds(run_dir: Path) -> None:
    """Raise StorageError where a directory lies in the place of a run's file, or a file in that of a directory.

    Some of them are written only when a run has worked for hours.
    """
    for name in (CONFIG, TICKET, METRICS, SUMMARY):
        if (run_dir / name).is_dir():
            raise StorageError(
                f"{run_dir / name} is a directory, and a file has to be written there: move it away"
            )
    for path in (
        run_dir,
        *(run_dir / name for name in (LOGS, CHECKPOINTS, ROLLOUTS, "trainer", "weights")),
    ):
        if (path.exists() or path.is_symlink()) and not path.is_dir():
            raise StorageError(
                f"{path} is no directory, and one has to be made there: move it away"
            )


@contextmanager
def held(run_dir: Path) -> Generator[None]:
    """Hold the lock of a run's directory, from before it is made or emptied until the end.

    Raises BusyError, StorageError. The lock is a file beside the directory, which --clean removes; the system
    lets go of it when its holder dies.
    """
    path = run_dir.parent / f".{run_dir.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    except OSError as error:
        raise StorageError(f"cannot write {error.filename}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BusyError(
                f"another `primerl-node` works in {run_dir}: wait for it, or choose another --name"
            ) from error
        yield


def clean(run_dir: Path) -> None:
    """Remove the files of an earlier run.

    Raises:
        UsageError: the directory holds things, but no run.
        BusyError: a node runs in it.
        StorageError: it cannot be removed.
    """
    if not run_dir.exists():
        return
    if run_dir.is_symlink() or not run_dir.is_dir():
        raise UsageError(f"{run_dir} is no directory: choose another --name or --output-dir")
    held = {path.name for path in run_dir.iterdir()}
    if held and not held.intersection(MARKS):
        raise UsageError(
            f"{run_dir} holds no run, so --clean does not empty it: choose another --name"
        )
    check_free(run_dir)
    try:
        shutil.rmtree(run_dir)
    except OSError as error:
        raise StorageError(f"cannot remove {error.filename}: {error.strerror}") from error


def check_free(run_dir: Path) -> None:
    """Check that no node answers in a run's directory or right below it. Raises BusyError."""
    for data_dir in (run_dir, *run_dir.iterdir()):
        if not socket_path(data_dir).exists():
            continue
        try:
            ask(data_dir, "status")
        except NetworkError:
            continue  # a socket that a killed node left
        raise BusyError(
            f"a node still runs in {data_dir}: `primerl-node stop --data-dir {data_dir}` ends it"
        )
