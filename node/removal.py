"""Remove directories. No other file of this program removes a tree (tests/test_removals.py).

Invariants: a link is never followed, another file system is never entered, and a file that `known` does not
name stays, with every directory above it.
"""

import logging
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

Known = Callable[[str], bool]
"""Says whether this program wrote a file, given its path below the tree with "/" between names. A directory
that was empty before is asked for with "/" at the end."""

SCRATCH = "primerl-"
"""How the names of temporary directories begin that processes of this program make."""
DEPTH = 64
"""Directories within each other; what lies deeper stays. Nothing of ours is nested half as deep."""
SHOWN = 5
"""Most paths that a message names."""


def remove_tree(directory: Path, known: Known, *, keep_root: bool = False) -> list[str]:
    """Remove what `known` names below `directory`, and the directories that are empty then.

    Returns the paths below it that stay, sorted; `directory` goes if there is none, unless `keep_root` is set.
    A link to a directory is not removed. Raises OSError, also where `directory` is a link or no directory.
    """
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        stays = _empty(root, "", known, os.fstat(root).st_dev, links=False)
    finally:
        os.close(root)
    if not stays and not keep_root:
        os.rmdir(directory)
    return sorted(stays)


def remove_scratch(directory: Path) -> None:
    """Remove a directory that this process made for itself, with all that is in it. What fails is left.

    Raises ValueError for a name that no scratch directory has: its path may come from the environment.
    """
    if not directory.name.startswith(SCRATCH):
        raise ValueError(f"{directory} is no temporary directory of this program")
    remove_own(directory)


def remove_own(directory: Path) -> None:
    """Remove a half-made directory of this program's own making, links in it included. What fails is left."""
    with suppress(OSError):
        root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            stays = _empty(root, "", lambda _: True, os.fstat(root).st_dev, links=True)
        finally:
            os.close(root)
        if not stays:
            os.rmdir(directory)


def remove_made(directory: Path, known: Known) -> None:
    """Remove a directory that this program made at a place of its own; put aside what others laid into it.

    What stays is moved, with its directories, to NAME.kept_N beside it, and a warning names it. Nothing happens
    where there is no directory. Raises OSError.
    """
    try:
        stays = remove_tree(directory, known)
    except FileNotFoundError:
        return
    if stays:
        kept = free_name(directory.with_name(re.sub(r"\.(partial|replaced)$", "", directory.name)))
        directory.rename(kept)
        logger.warning("%s holds what this program did not write: %s", kept, some(stays))


def free_name(path: Path) -> Path:
    """Return the first of PATH.kept_1, PATH.kept_2 ... that is not there."""
    number = 1
    while os.path.lexists(kept := path.with_name(f"{path.name}.kept_{number}")):
        number += 1
    return kept


def some(names: list[str]) -> str:
    """List the first few of these names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _empty(descriptor: int, prefix: str, known: Known, device: int, *, links: bool) -> list[str]:
    """Remove what is known in an open directory; return the paths that stay."""
    stays: list[str] = []
    for name in os.listdir(descriptor):
        path = prefix + name
        mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            stays += _remove_directory(descriptor, name, path, known, device, links=links)
        elif (stat.S_ISLNK(mode) and not links) or not known(path):
            stays.append(path)
        else:
            os.unlink(name, dir_fd=descriptor)
    return stays


def _remove_directory(
    parent: int, name: str, path: str, known: Known, device: int, *, links: bool
) -> list[str]:
    if path.count("/") >= DEPTH:
        return [path]
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        if os.fstat(descriptor).st_dev != device:
            return [path]
        if not os.listdir(descriptor) and not known(path + "/"):
            return [path + "/"]
        stays = _empty(descriptor, path + "/", known, device, links=links)
    finally:
        os.close(descriptor)
    if not stays:
        os.rmdir(name, dir_fd=parent)
    return stays
