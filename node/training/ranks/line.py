"""Rank 0's end of the line to the daemon, and how a rank notices that it is left alone. No torch.

A rank outlives neither the process that started it nor the daemon: both may be killed at any moment.
"""

import ctypes
import os
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import NoReturn

from ...errors import EngineError
from ...frames import HEAD_BYTES, body_length, frame
from ...processes import PARENT_VARIABLE, leave_with_parent
from ...unix_sockets import connected
from .calls import (
    EXIT_LOST,
    MAX_FRAME,
    SOCKET_VARIABLE,
    TOKEN_VARIABLE,
    Answer,
    Hello,
    Reply,
)

PR_SET_PDEATHSIG = 1
"""<linux/prctl.h>"""
POLL_MS = 500


class LineEnded(Exception):
    """The daemon has hung up."""


class Line:
    """The connection of rank 0 to the daemon; replies may come from several threads."""

    def __init__(self, connection: socket.socket, directory: Path) -> None:
        self._connection = connection
        self._directory = directory
        self._sending = threading.Lock()
        self._ended = False

    @classmethod
    def open(cls, environ: MutableMapping[str, str], timeout_s: float) -> "Line":
        """Connect to the socket that the environment names. Raises EngineError."""
        path, token = environ.get(SOCKET_VARIABLE), environ.pop(TOKEN_VARIABLE, "")
        if not path:
            raise EngineError("rank 0 runs beside the daemon only: start `primerl-node train`")
        try:
            connection = connected(Path(path), timeout_s)
            connection.sendall(frame(Hello(token), MAX_FRAME))
        except OSError as error:
            raise EngineError(f"the daemon cannot be reached ({error}): it has ended") from error
        connection.settimeout(None)
        line = cls(connection, Path(path).parent)
        threading.Thread(target=line._watch, name="daemon watch", daemon=True).start()
        return line

    def next(self, timeout_s: float) -> bytes | None:
        """The next call, encoded; None if there is none in time. Raises LineEnded."""
        ready, _, _ = select.select([self._connection], [], [], timeout_s)
        if not ready:
            return None
        return self._read(body_length(self._read(HEAD_BYTES), MAX_FRAME))

    def reply(self, number: int, answer: Answer) -> None:
        """Answer a call. Raises LineEnded."""
        try:
            with self._sending:
                self._connection.sendall(frame(Reply(number, answer), MAX_FRAME))
        except OSError as error:
            raise LineEnded from error

    def end(self) -> None:
        """From now on the daemon may hang up."""
        self._ended = True

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            got = self._connection.recv_into(view[at:])
            if not got:
                raise LineEnded
            at += got
        return bytes(data)

    def _watch(self) -> None:
        """End this rank when the daemon has gone, whatever this rank is busy with."""
        poll = select.poll()
        poll.register(self._connection, 0)  # a hang-up is always told
        while not self._ended:
            if poll.poll(POLL_MS) and not self._ended:
                self.abandon()

    def abandon(self) -> NoReturn:
        """The daemon has gone: clear away what it left, and end this process."""
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(EXIT_LOST)


def die_with_parent() -> None:
    """Ask to be killed when the process that started this one ends, however it does."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(EXIT_LOST)
    leave_with_parent({PARENT_VARIABLE: str(parent)})
