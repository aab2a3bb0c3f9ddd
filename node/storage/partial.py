"""Write a file or a directory beside its place, and move it there once it is whole."""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import StorageError, file_error
from ..removal import Known, remove_made, remove_own

PARTIAL = ".partial"
"""Suffix of what is being written, or was when the node died."""
REPLACED = ".replaced"
"""Suffix of the old directory between the two renames of a replacement."""


@contextmanager
def whole_file(target: Path, *, fsync: bool = False) -> Generator[Path]:
    """Yield a path to write, where no file is; the file there becomes `target` at the end.

    Without `fsync` it survives a crash of the process, but maybe not a power cut. Raises StorageError, also for
    any OSError of the block.
    """
    partial = target.with_name(f".{target.name}{PARTIAL}")
    try:
        partial.unlink(missing_ok=True)
        yield partial
        if fsync:
            sync(partial)
        partial.replace(target)
        if fsync:
            sync(target.parent)
    except OSError as error:
        raise file_error(error, target) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def whole_directory(target: Path, known: Known, *, fsync: bool = True) -> Generator[Path]:
    """Yield an empty directory that becomes `target` if the block ends without an error.

    An older `target` is replaced: its files that `known` names (paths below it) are removed, others are kept
    beside it as NAME.kept_N. A link is not replaced. Without `fsync` it survives a crash of the process, but
    maybe not a power cut. Raises StorageError, also for any OSError of the block.
    """
    partial = partial_of(target)
    replaced = target.with_name(target.name + REPLACED)
    created = False
    try:
        if target.is_symlink():
            raise StorageError(
                f"{target} is a link, and a directory is to be written there: move it away"
            )
        remove_made(partial, known)
        partial.mkdir(parents=True)
        created = True
        yield partial
        if fsync:
            sync_tree(partial)
        if target.exists():
            remove_made(replaced, known)
            target.rename(replaced)
        partial.rename(target)
        if fsync:
            sync(target.parent)
    except OSError as error:
        raise StorageError(
            f"cannot write {target}: {error}: free disk space or change permissions"
        ) from error
    finally:
        if created:
            remove_own(partial)
    with suppress(OSError):
        remove_made(replaced, known)


def partial_of(target: Path) -> Path:
    """Return the path of the directory `target` while it is being written."""
    return target.with_name(target.name + PARTIAL)


def sync(path: Path) -> None:
    """Bring one file, or the names in one directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Bring every file and directory below `directory` to the disk, itself last."""
    for root, _, files in os.walk(directory, topdown=False):
        for name in files:
            sync(Path(root, name))
        sync(Path(root))
