"""Directories that are either whole or absent, whatever crash comes between two writes.

Data, fsync, rename: nothing that carries the final name is ever incomplete.
"""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ...ops.errors import StorageError

PARTIAL = ".partial"
"""Suffix of a directory that is still being written, or was when the node died."""
REPLACED = ".replaced"
"""Suffix of the old directory for the moment between two renames."""


@contextmanager
def whole_directory(target: Path, *, fsync: bool = True) -> Generator[Path, None, None]:
    """Yield an empty directory to fill; it becomes `target` when the block ends without an error.

    An older `target` is replaced. Without `fsync` it is whole after a crash of the process, but maybe not
    after a power cut. Raises StorageError, also for any OSError of the block.
    """
    partial = partial_of(target)
    replaced = target.with_name(target.name + REPLACED)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if fsync:
            sync_tree(partial)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        partial.rename(target)
        if fsync:
            sync(target.parent)
    except OSError as error:
        raise StorageError(
            f"cannot write {target}: {error}; free some disk or permit it"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


def partial_of(target: Path) -> Path:
    """Where `target` is while it is being written."""
    return target.with_name(target.name + PARTIAL)


def sync_tree(directory: Path) -> None:
    """fsync every file and directory below `directory`, itself last."""
    for root, _, files in os.walk(directory, topdown=False):
        for name in files:
            sync(Path(root, name))
        sync(Path(root))


def sync(path: Path) -> None:
    """fsync one file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
