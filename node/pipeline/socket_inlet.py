"""Frames that come through a socket, and how they are written into one.

Bytes that are no frames, or too many of them, end it.
"""

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...protocol.errors import LocalProtocolError, RemoteProtocolError
from ..process.unix_sockets import connected
from .frame import Frame
from .frame_codec import (
    PREFIX_BYTES,
    Buffer,
    FrameLimits,
    decode,
    head_size,
    read_head,
)
from .memory_port import DEPTH, waited
from .port import PortClosed, PortTimeout

logger = logging.getLogger(__name__)

RETRY_S = 0.05
FULL_S = 0.005
"""Between two looks whether there is room again."""
MAX_BUFFERS = 64
"""In one call: far below what every system takes."""
Ended = Callable[[str], None]


class Inbox:
    """Frames that came and were not taken yet, from one thread to another.

    Not a Pipe of memory_port.py, whose locks are Python's: each frame changes threads once here, and not twice.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._frames: queue.SimpleQueue[tuple[float, Frame] | None] = queue.SimpleQueue()
        """When it came, and what; None behind the last one."""
        self._over = threading.Event()
        self._why = ""

    def put(self, frame: Frame) -> None:
        """Append `frame`, waiting for room. Raises PortClosed."""
        while self._frames.qsize() >= self._depth and not self._over.wait(FULL_S):
            pass
        if self._over.is_set():
            raise PortClosed(self._why)
        self._frames.put((time.monotonic(), frame))

    def take(self, timeout_s: float | None) -> Frame:
        """The next frame, with the time that it lay here added. Raises PortTimeout, PortClosed."""
        try:
            found = self._frames.get(timeout=timeout_s)
        except queue.Empty:
            raise PortTimeout(f"no frame came in {timeout_s:g} s") from None
        if found is None:
            self._frames.put(None)  # for whoever asks next
            raise PortClosed(self._why)
        came, frame = found
        return waited(frame, time.monotonic() - came)

    def close(self, why: str) -> None:
        """Take nothing more; what was put before can still be taken. The first reason stays."""
        if not self._over.is_set():
            self._why = why
            self._over.set()
            self._frames.put(None)

    def clear(self) -> None:
        """Forget what nobody took."""
        with suppress(queue.Empty):
            while True:
                self._frames.get_nowait()
        if self._over.is_set():
            self._frames.put(None)


class SocketInlet:
    """A thread, once it is started, that reads `source` until that ends; `ended` is told why."""

    def __init__(
        self, source: socket.socket, limits: FrameLimits, ended: Ended, *, behind: int = DEPTH
    ) -> None:
        self._socket, self._limits, self._ended = source, limits, ended
        self._frames = Inbox(behind)
        self.thread = threading.Thread(
            target=self._receive_all, name="primerl-port-receive", daemon=True
        )

    def start(self) -> None:
        """Begin to read."""
        self.thread.start()

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next frame. Raises PortTimeout, PortClosed."""
        return self._frames.take(timeout_s)

    def clear(self) -> None:
        """Forget what nobody took."""
        self._frames.clear()

    def end(self, why: str) -> None:
        """Take nothing more; what came before can still be received. The first reason stays."""
        self._frames.close(why)

    def _receive_all(self) -> None:
        why = "the node's process ended the connection"
        try:
            while True:
                self._frames.put(self._read())
        except EOFError:
            pass
        except OSError as error:
            why = f"the node's process is gone: {error}"
        except (RemoteProtocolError, LocalProtocolError) as error:
            why = f"what came was no frame: {error}"
            logger.error("%s", why)
        except PortClosed:
            return
        self._ended(why)
        shut(self._socket)

    def _read(self) -> Frame:
        while not (size := head_size(bytes(_read(self._socket, PREFIX_BYTES)))):
            continue
        head = read_head(bytes(_read(self._socket, size)), self._limits)
        return decode(head, _read(self._socket, head.size))


def connect(path: str, within_s: float) -> socket.socket:
    """The node may still be about to listen. Raises PortClosed."""
    until = time.monotonic() + within_s
    while True:
        try:
            return connected(Path(path))
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            if time.monotonic() >= until:
                raise PortClosed(f"no node listens at {path}: is it running? ({error})") from error
            time.sleep(RETRY_S)
        except OSError as error:
            raise PortClosed(f"cannot connect to the node at {path}: {error}") from error


def shut(connection: socket.socket) -> None:
    """End both directions, for every process that has it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def write(target: socket.socket, buffers: list[Buffer]) -> None:
    """All of `buffers`, without joining them. Raises OSError."""
    left = [memoryview(one) for one in buffers]
    while left:
        sent = target.sendmsg(left[:MAX_BUFFERS])
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


def _read(source: socket.socket, size: int) -> bytearray:
    """Exactly `size` bytes. Raises EOFError, OSError."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = source.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data
