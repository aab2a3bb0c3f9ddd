"""The port of a process that computes: a Unix socket to the node's process, which relays to other nodes.

One thread sends and one receives, so that what travels does not hold up what computes. Bytes that are no
frames, or too many of them, close the port.
"""

import logging
import queue
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from ...protocol.errors import LocalProtocolError, RemoteProtocolError
from ..unix_sockets import connected
from .frame import Frame
from .frame_codec import (
    PREFIX_BYTES,
    Buffer,
    FrameLimits,
    decode,
    encode,
    head_size,
    read_head,
)
from .memory_port import DEPTH, Pipe
from .port import PortClosed

logger = logging.getLogger(__name__)

AHEAD = 8
"""Frames that may wait to be sent."""
FLUSH_S = 1.0
"""How long close() waits for last words to leave."""
RETRY_S = 0.05
MAX_BUFFERS = 64
"""In one call: far below what every system takes."""


class SocketPort:
    """Connects when it is made, within `connect_s` seconds. Raises PortClosed."""

    def __init__(
        self,
        path: str,
        limits: FrameLimits,
        *,
        ahead: int = AHEAD,
        behind: int = DEPTH,
        connect_s: float = 30.0,
    ) -> None:
        self._limits = limits
        self._incoming = Pipe(behind)
        self._outgoing: queue.Queue[list[Buffer] | None] = queue.Queue(ahead)
        self._closed = threading.Event()
        self._why = "this port was closed"
        self._socket = _connect(path, connect_s)
        self._threads = [
            threading.Thread(target=work, name=f"primerl-port-{name}", daemon=True)
            for name, work in (("send", self._send_all), ("receive", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, frame: Frame) -> None:
        """Hand `frame` on; waits while too much waits. Raises PortClosed, LocalProtocolError."""
        buffers = encode(frame, self._limits)
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._outgoing.put(buffers, timeout=RETRY_S)
                return
        raise PortClosed(self._why)

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next frame. Raises PortTimeout, PortClosed."""
        return self._incoming.take(timeout_s)

    def close(self) -> None:
        """Wake everybody up; what send() took still leaves if the other end takes it in time."""
        self._incoming.clear()
        self._end("this port was closed")
        sender = self._threads[0]
        if sender is not threading.current_thread():
            sender.join(FLUSH_S)
        self._shut()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(FLUSH_S)
        self._socket.close()

    def _end(self, why: str) -> None:
        """The first reason stays."""
        if not self._closed.is_set():
            self._why = why
            self._closed.set()
        self._incoming.close(why)
        with suppress(queue.Full):
            self._outgoing.put_nowait(None)

    def _shut(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send_all(self) -> None:
        try:
            while (buffers := self._next()) is not None:
                _send(self._socket, buffers)
        except OSError as error:
            self._end(f"the node's process is gone: {error}")

    def _next(self) -> list[Buffer] | None:
        """What to send next; None when nothing more will come."""
        while True:
            try:
                return self._outgoing.get(timeout=RETRY_S if self._closed.is_set() else FLUSH_S)
            except queue.Empty:
                if self._closed.is_set():
                    return None

    def _receive_all(self) -> None:
        why = "the node's process ended the connection"
        try:
            while True:
                self._incoming.put(self._read())
        except EOFError:
            pass
        except OSError as error:
            why = f"the node's process is gone: {error}"
        except (RemoteProtocolError, LocalProtocolError) as error:
            why = f"what came was no frame: {error}"
            logger.error("%s", why)
        except PortClosed:
            return
        self._end(why)
        self._shut()

    def _read(self) -> Frame:
        while not (size := head_size(bytes(_read(self._socket, PREFIX_BYTES)))):
            continue
        head = read_head(bytes(_read(self._socket, size)), self._limits)
        return decode(head, _read(self._socket, head.size))


def _connect(path: str, within_s: float) -> socket.socket:
    """The node may still be about to listen."""
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


def _send(target: socket.socket, buffers: list[Buffer]) -> None:
    """All of `buffers`, without joining them."""
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
