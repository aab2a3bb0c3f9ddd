"""The port of a process that computes: a Unix socket to the node's process, which relays to other nodes.

One thread receives, and notes when; whoever sends writes to the socket.
"""

import threading

from .frame import Frame
from .frame_codec import FrameLimits, encode
from .memory_port import DEPTH
from .port import PortClosed
from .socket_inlet import SocketInlet, connect, shut, write

FLUSH_S = 1.0
"""How long close() waits for last words to leave."""


class SocketPort:
    """Connects when it is made, within `connect_s` seconds. Raises PortClosed."""

    def __init__(
        self, path: str, limits: FrameLimits, *, behind: int = DEPTH, connect_s: float = 30.0
    ) -> None:
        self._limits = limits
        self._why = ""
        self._writing = threading.Lock()
        self._socket = connect(path, connect_s)
        self._inlet = SocketInlet(self._socket, limits, self._end, behind=behind)
        self._inlet.start()

    def send(self, frame: Frame) -> None:
        """Hand `frame` on; waits while too much waits. Raises PortClosed, LocalProtocolError."""
        buffers = encode(frame, self._limits)
        with self._writing:
            if self._why:
                raise PortClosed(self._why)
            try:
                write(self._socket, buffers)
            except OSError as error:
                self._end(f"the node's process is gone: {error}")
                raise PortClosed(self._why) from error

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next frame. Raises PortTimeout, PortClosed."""
        return self._inlet.receive(timeout_s)

    def close(self) -> None:
        """Wake everybody up; what send() took still leaves if the other end takes it in time."""
        self._inlet.clear()
        self._end("this port was closed")
        left = self._writing.acquire(timeout=FLUSH_S)
        shut(self._socket)
        if not left:
            self._writing.acquire()  # whoever writes has been woken up
        self._writing.release()
        if self._inlet.thread is not threading.current_thread():
            self._inlet.thread.join(FLUSH_S)
        self._socket.close()

    def _end(self, why: str) -> None:
        """The first reason stays."""
        self._why = self._why or why
        self._inlet.end(why)
