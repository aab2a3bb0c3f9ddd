"""The port of a stage 0 whose schedule and whose computing are two processes.

Both hold the same socket to the node's process: this one reads it, the other one writes to it. So what is sent
from here goes through the process that computes, in order with the micro-batches that it is told of.
"""

import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Protocol

from ...pipeline.frame import Frame
from ...pipeline.frame_codec import FrameLimits
from ...pipeline.port import PortClosed
from ...pipeline.socket_inlet import SocketInlet, connect, shut

CONNECT_S, FLUSH_S = 30.0, 1.0


class Outlet(Protocol):
    """The process that computes, or what sends there (socket_outlet.py). Raises OSError when it is gone."""

    def connect(self, target: socket.socket) -> None:
        """Have it write to `target` from now on."""
        ...

    def put(self, frame: Frame) -> None:
        """Have it send a frame that is whole."""
        ...

    def finish(self) -> None:
        """Have it end the connection behind what was put."""
        ...


class SplitPort:
    """Implements Port. Connects when it is made; raises PortClosed."""

    def __init__(self, path: str, limits: FrameLimits, outlet: Outlet) -> None:
        self._outlet = outlet
        self._why = ""
        self._socket = connect(path, CONNECT_S)
        self._inlet = SocketInlet(self._socket, limits, self._end)
        self._inlet.start()
        with _reached():
            outlet.connect(self._socket)

    def send(self, frame: Frame) -> None:
        """Hand `frame` on. Raises PortClosed."""
        if self._why:
            raise PortClosed(self._why)
        with _reached():
            self._outlet.put(frame)

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next frame. Raises PortTimeout, PortClosed."""
        return self._inlet.receive(timeout_s)

    def close(self) -> None:
        """Wake everybody up, in both processes; what send() took still leaves if it can in time."""
        self._inlet.clear()
        if not self._why:
            self._end("this port was closed")
            with suppress(PortClosed), _reached():
                self._outlet.finish()
            self._inlet.thread.join(FLUSH_S)  # it ends with the connection
        shut(self._socket)
        self._inlet.thread.join(FLUSH_S)
        self._socket.close()

    def _end(self, why: str) -> None:
        self._why = self._why or why
        self._inlet.end(why)


@contextmanager
def _reached() -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise PortClosed(f"the process that computes is gone: {error}") from error
