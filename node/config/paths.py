"""Paths that a user gives: on the command line, in a config, as the name of a model."""

import os
from pathlib import Path


def expand_home(path: str | Path) -> Path:
    """Replace `~` and `~user`; like a shell, leave the name of a user that does not exist.

    Path.expanduser() raises RuntimeError for such a name.
    """
    return Path(os.path.expanduser(path))
