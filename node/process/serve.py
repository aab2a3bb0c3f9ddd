"""Answer the numbered requests of a parent (child_process.py) in the child process.

serve() answers many requests at once over two pipes and ends with its input. ParentSocket reads requests one by
one, for a process whose main thread computes. Neither outlives the parent.
"""

import asyncio
import contextlib
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from ..errors import EngineError
from ..removal import remove_scratch
from .frames import HEAD_BYTES, MAX_FRAME, ProcessMessage, body_length, frame, read_frames
from .spawn import EXIT_ORPHANED, leave_with_parent
from .unix_sockets import SOCKET_VARIABLE, TOKEN_VARIABLE, ProcessHello, connected

Request = TypeVar("Request", contravariant=True)

POLL_MS = 500


class Outbox:
    """Writes frames; the frames of one event loop turn are written together."""

    def __init__(self, write: Callable[[bytes], None], max_frame: int = MAX_FRAME) -> None:
        self._write = write
        self._max_frame = max_frame
        self._frames: list[bytes] = []

    def put(self, number: int, answer: object) -> None:
        """Send the answer to request `number` at the end of this turn. Raises ValueError if it is too long."""
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._flush)
        self._frames.append(frame(ProcessMessage(number, answer), self._max_frame))

    def _flush(self) -> None:
        self._write(b"".join(self._frames))
        self._frames.clear()


class RequestHandler(Protocol[Request]):
    """Answers the requests of a parent."""

    def take(self, request: Request) -> None:
        """Start to answer a request."""
        ...

    async def close(self) -> None:
        """Cancel all work."""
        ...


async def serve(
    source: Any,
    sink: Any,
    read: Callable[[bytes], Request],
    make: Callable[[Outbox], RequestHandler[Request]],
    *,
    max_frame: int = MAX_FRAME,
) -> None:
    """Answer over two pipes until the input ends; `read` decodes a request or raises ValueError."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sink)
    handler = make(Outbox(transport.write, max_frame))
    try:
        with contextlib.suppress(asyncio.IncompleteReadError):
            async for body in read_frames(reader, max_frame):
                handler.take(read(body))
    finally:
        await handler.close()
        transport.close()


def serve_parent(
    read: Callable[[bytes], Request],
    make: Callable[[Outbox], RequestHandler[Request]],
    *,
    max_frame: int = MAX_FRAME,
) -> NoReturn:
    """Answer over standard input and output; exit with the end of the input, or of the parent.

    Output that libraries print goes to standard error.
    """
    leave_with_parent(os.environ)
    answers = take_standard_output()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(sys.stdin.buffer, answers, read, make, max_frame=max_frame))
    sys.stderr.flush()
    os._exit(0)  # does not wait for threads that libraries left behind


def take_standard_output() -> Any:
    """Return a file for answers, and send what libraries print to standard error from now on."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(answers, "wb")


class ParentGone(Exception):
    """The parent has closed the connection."""


class ParentSocket:
    """Connection to a parent that listens at a socket; several threads may reply."""

    def __init__(self, connection: socket.socket, directory: Path, max_frame: int) -> None:
        self._connection = connection
        self._directory = directory
        self._max_frame = max_frame
        self._sending = threading.Lock()
        self._leaving = threading.Lock()
        self._ended = False

    @classmethod
    def open(
        cls, environ: MutableMapping[str, str], timeout_s: float, max_frame: int = MAX_FRAME
    ) -> "ParentSocket":
        """Connect to the socket named in `environ`; from then on this process ends with its parent.

        Raises EngineError.
        """
        path, token = environ.get(SOCKET_VARIABLE), environ.pop(TOKEN_VARIABLE, "")
        if not path:
            raise EngineError("this program runs beside the daemon only: start `primerl-node`")
        try:
            connection = connected(Path(path), timeout_s)
            connection.sendall(frame(ProcessHello(token), max_frame))
        except OSError as error:
            raise EngineError(f"the daemon cannot be reached ({error}): it has ended") from error
        connection.settimeout(None)
        parent = cls(connection, Path(path).parent, max_frame)
        threading.Thread(target=parent._watch, name="parent watch", daemon=True).start()
        return parent

    def next(self, timeout_s: float) -> bytes | None:
        """Read the next encoded request; None after `timeout_s`. Raises ParentGone."""
        ready, _, _ = select.select([self._connection], [], [], timeout_s)
        if not ready:
            return None
        return self._read(body_length(self._read(HEAD_BYTES), self._max_frame))

    def reply(self, number: int, answer: object) -> None:
        """Send the answer to request `number`. Raises ParentGone."""
        try:
            with self._sending:
                self._connection.sendall(frame(ProcessMessage(number, answer), self._max_frame))
        except OSError as error:
            raise ParentGone from error

    def end(self) -> None:
        """Keep running when the parent closes the connection from now on."""
        self._ended = True

    def abandon(self) -> NoReturn:
        """Remove the socket's folder, which its parent left behind, and exit."""
        with self._leaving:
            # Of two threads that notice, the second must not exit while the first removes. A ValueError says
            # that the variable named no folder of a parent of ours.
            with contextlib.suppress(ValueError):
                remove_scratch(self._directory)
            os._exit(EXIT_ORPHANED)

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            got = self._connection.recv_into(view[at:])
            if not got:
                raise ParentGone
            at += got
        return bytes(data)

    def _watch(self) -> None:
        """Exit when the parent has gone, even if the main thread is busy."""
        poll = select.poll()
        poll.register(self._connection, 0)  # a hang-up is always reported
        while not self._ended:
            if poll.poll(POLL_MS) and not self._ended:
                self.abandon()
