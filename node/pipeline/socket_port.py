"""The port of a process that computes: a Unix socket to the node's process, which relays to other nodes.

One thread sends and one receives, so that what travels does not hold up what computes.
"""

import queue
import threading
from contextlib import suppress

from .frame import Frame
from .frame_codec import Buffer, FrameLimits, encode
from .memory_port import DEPTH
from .port import PortClosed
from .socket_inlet import RETRY_S, SocketInlet, connect, shut, write

AHEAD = 8
"""Frames that may wait to be sent."""
FLUSH_S = 1.0
"""How long close() waits for last words to leave."""


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
        self._outgoing: queue.Queue[list[Buffer] | None] = queue.Queue(ahead)
        self._closed = threading.Event()
        self._why = "this port was closed"
        self._socket = connect(path, connect_s)
        self._inlet = SocketInlet(self._socket, limits, self._end, behind=behind)
        self._sender = threading.Thread(
            target=self._send_all, name="primerl-port-send", daemon=True
        )
        self._inlet.start()
        self._sender.start()

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
        return self._inlet.receive(timeout_s)

    def close(self) -> None:
        """Wake everybody up; what send() took still leaves if the other end takes it in time."""
        self._inlet.clear()
        self._end("this port was closed")
        here = threading.current_thread()
        if self._sender is not here:
            self._sender.join(FLUSH_S)
        shut(self._socket)
        for thread in (self._sender, self._inlet.thread):
            if thread is not here:
                thread.join(FLUSH_S)
        self._socket.close()

    def _end(self, why: str) -> None:
        """The first reason stays."""
        if not self._closed.is_set():
            self._why = why
            self._closed.set()
        self._inlet.end(why)
        with suppress(queue.Full):
            self._outgoing.put_nowait(None)

    def _send_all(self) -> None:
        try:
            while (buffers := self._next()) is not None:
                write(self._socket, buffers)
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
