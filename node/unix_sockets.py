"""Unix sockets at paths of any length: kernels take a hundred bytes of one, and directories may be deep."""

import os
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from .errors import NodeError

LONGEST = 100
"""Bytes that every system takes: 108 on Linux and 104 elsewhere, with the zero at the end."""


@contextmanager
def short(path: Path) -> Generator[str]:
    """What to call `path`, whose folder exists, to bind or to connect: itself, or a way there through a link.

    Good until the block ends; a socket that was bound or connected by then stays so. Raises NodeError
    where the name of the file, or the path of the folder for temporary files, is itself too long.
    """
    if len(os.fsencode(path)) <= LONGEST:
        yield str(path)
        return
    with tempfile.TemporaryDirectory(prefix="primerl-") as made:  # its owner's alone
        folder = Path(made, "d")
        name = str(folder / path.name)
        if len(os.fsencode(name)) > LONGEST:
            raise NodeError(f"{name} is too long for a socket: use a shorter name, or TMPDIR")
        folder.symlink_to(path.parent.absolute())
        yield name


def connected(path: Path, timeout_s: float | None = None) -> socket.socket:
    """A connection to whoever listens at `path`; `timeout_s` stays. Raises OSError; NodeError as short()."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with short(path) as name:
            connection.connect(name)
    except BaseException:  # also when interrupted: a socket that is not used is closed
        connection.close()
        raise
    return connection
