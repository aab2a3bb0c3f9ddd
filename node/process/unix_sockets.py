"""Open Unix sockets at paths of any length, and accept one child process by its token.

Kernels limit a socket path to about a hundred bytes; a node's directory may be deeper.
"""

import asyncio
import errno
import hmac
import logging
import os
import socket
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ..errors import NodeError, StorageError
from .frames import read_frame

logger = logging.getLogger(__name__)

LONGEST = 100
"""Longest portable socket path in bytes: the limit is 108 on Linux and 104 elsewhere, with a final zero."""
SOCKET_VARIABLE = "PRIMERL_PARENT_SOCKET"
TOKEN_VARIABLE = "PRIMERL_PARENT_TOKEN"
HELLO_S = 10.0
MAX_HELLO = 1024
BACKLOG = 128
"""Connections that may wait to be accepted."""
ACCEPTS_AT_ONCE = 1
"""How often asyncio accepts for one event (its `backlog`). Where no file is left each try is logged and plans a
further event (Python 3.11): with more than one the events multiply, and a node does nothing else."""
NO_MEMORY_S = 0.1

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ProcessHello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame on a connection: proves that this node started the process."""

    token: str


@contextmanager
def short(path: Path) -> Generator[str]:
    """Yield a name for `path`, whose folder exists, that is short enough to bind or connect to.

    A long path is reached through a symbolic link, which is removed when the block ends; sockets bound or
    connected inside stay so. Raises NodeError if the file name or the temporary folder is itself too long.
    """
    if len(os.fsencode(path)) <= LONGEST:
        yield str(path)
        return
    with tempfile.TemporaryDirectory(prefix="primerl-") as directory:  # only its owner can enter it
        folder = Path(directory, "d")
        name = str(folder / path.name)
        if len(os.fsencode(name)) > LONGEST:
            raise NodeError(f"{name} is too long for a socket: use a shorter name, or TMPDIR")
        folder.symlink_to(path.parent.absolute())
        yield name


def remove_socket(path: Path) -> None:
    """Remove a socket that a process left at `path`; nothing else is removed. Raises StorageError, OSError."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StorageError(f"{path} is no socket, and one has to be made there: move it away")
    path.unlink(missing_ok=True)


def connected(path: Path, timeout_s: float | None = None) -> socket.socket:
    """Connect to the listener at `path`; `timeout_s` stays set. Raises OSError, and NodeError like short()."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with short(path) as name:
            connection.connect(name)
    except BaseException:  # close the unused socket, even when interrupted
        connection.close()
        raise
    return connection


def answers(path: Path) -> bool:
    """Return whether a process listens at `path`; a socket that a killed one left does not answer."""
    try:
        connected(path, 1.0).close()
    except OSError:
        return False
    return True


async def start_server(
    accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None],
    path: Path,
    *,
    limit: int = 1 << 16,
) -> asyncio.Server:
    """Listen at `path`, where nothing is; `limit` as of asyncio.start_unix_server(). Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short(path) as name:
            listener.bind(name)
        server = await asyncio.start_unix_server(
            accept, sock=listener, limit=limit, backlog=ACCEPTS_AT_ONCE
        )
    except BaseException:  # close the unused socket, even when interrupted
        listener.close()
        raise
    listener.listen(BACKLOG)  # asyncio has made the queue as short as that
    return server


def explain_lack(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle the errors of an event loop: say in a line that no file or memory is left; others as usual.

    A callback that got no memory is called again at once, so the loop stands still for NO_MEMORY_S before.
    """
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        logger.error(
            "no file can be opened (%s): raise `ulimit -n`, or LimitNOFILE of a service", error
        )
    elif isinstance(error, MemoryError):
        logger.error("no memory is left: stop other programs, or raise MemoryMax of a service")
        time.sleep(NO_MEMORY_S)
    else:
        loop.default_exception_handler(context)


async def listen(path: Path, token: str) -> tuple[asyncio.Server, "asyncio.Future[Streams]"]:
    """Listen at `path` for one process; the future gets the first connection that sends `token`."""
    accepted: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                body = await read_frame(reader, MAX_HELLO)
            sent_token = msgspec.msgpack.decode(body, type=ProcessHello).token
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            sent_token = ""
        if hmac.compare_digest(sent_token.encode(), token.encode()) and not accepted.done():
            accepted.set_result((reader, writer))
        else:
            logger.warning("a connection to %s without the right token was refused", path.name)
            writer.close()

    return await start_server(accept, path), accepted
