"""Paths that a user gives: on the command line, in a config, as the name of a model."""

import os
from pathlib import Path

from ..errors import UsageError

MAX_NAME_BYTES = 128
"""Longest name of a run; a file name of Linux has 255 bytes, and names of other files are made from it."""


def expand_home(path: str | Path) -> Path:
    """Replace `~` and `~user`; like a shell, leave the name of a user that does not exist.

    Path.expanduser() raises RuntimeError for such a name.
    """
    return Path(os.path.expanduser(path))


def home_directory() -> Path:
    """Return the user's home directory. Raises UsageError where there is none.

    Path.home() raises RuntimeError for a user id that the system does not know, as of a container.
    """
    try:
        return Path.home()
    except RuntimeError as error:
        raise UsageError(
            "this user has no home directory: set HOME to a directory that it may write to"
        ) from error


def check_component(name: str) -> str:
    """Return a name that becomes a directory below another one: one component of a path. Raises ValueError."""
    why = ""
    if not name or name in (".", ".."):
        why = "it is empty, . or .."
    elif "/" in name:
        why = "it has a /, and output_dir names the directory above"
    elif name.startswith(("~", "-")) or name != name.strip():
        why = "it begins with ~, - or a space, or ends with one"
    elif not name.isprintable():
        why = "it has control characters"
    elif len(os.fsencode(name)) > MAX_NAME_BYTES:
        why = f"it is longer than {MAX_NAME_BYTES} bytes"
    if why:
        raise ValueError(f"it becomes the name of a directory, and {why}: choose another one")
    return name
