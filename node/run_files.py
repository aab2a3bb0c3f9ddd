"""What a run leaves in its directory, and how `--clean` removes it.

Nothing is deleted that does not look like a run of ours, and nothing while a node runs in it.
"""

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from .control import ask, socket_path
from .errors import (
    BusyError,
    NetworkError,
    StorageError,
    UsageError,
)

TICKET, SUMMARY, PICTURE, METRICS, LOGS = (
    "ticket.txt",
    "summary.json",
    "reward.png",
    "metrics.jsonl",
    "logs",
)
CHECKPOINTS = "checkpoints"
MARKS = (TICKET, SUMMARY, METRICS, LOGS, CHECKPOINTS, "trainer")
"""At least one of these is in the directory of every run."""


def write_private(path: Path, text: str) -> None:
    """Replace the file at `path` by one that its owner alone can read, whole or not at all.

    Raises StorageError.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        partial.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def weights_dir(run_dir: Path, step: int) -> Path:
    """Where a run exports the weights of a step."""
    return run_dir / "weights" / f"step_{step}"


@contextmanager
def held(run_dir: Path) -> Generator[None]:
    """Be the only launcher of a run, from before its directory is made or emptied until the end.

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
                f"another `primerl-node rl` works in {run_dir}: wait for it, or choose another --name"
            ) from error
        yield


def clean(run_dir: Path) -> None:
    """Remove what an earlier run left.

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
    """Raises BusyError if a node answers in the directory of a run or right below it."""
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
