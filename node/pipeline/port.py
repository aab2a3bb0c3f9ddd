"""The port seam: the process that computes a stage sends to the next stage and gets from the one before.

Blocking, for threads that compute; the node's process serves the other end. Implementations: a socket to
the node's process (socket_port.py), and for tests a pair in memory. Suite: tests/conformance/test_port.py.
"""

from dataclasses import replace
from typing import Protocol

from .frame import Frame, Kind

DEPTH = 80
"""Frames on their way: more than MAX_MICRO_BATCHES, so that stage 0 can always take answers."""


class PortClosed(Exception):
    """The other end is gone, or close() was called."""


class PortTimeout(Exception):
    """Nothing came in time."""


class Port(Protocol):
    """Frames in order, each way; send() and receive() may be called by different threads."""

    def send(self, frame: Frame) -> None:
        """Hand `frame` on; returns before it has left. Waits while too much waits. Raises PortClosed.

        Its tensors must not be written to afterwards.
        """
        ...

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next frame. Raises PortTimeout, PortClosed."""
        ...

    def close(self) -> None:
        """Wake up all waiting threads with PortClosed. Never raises."""
        ...


def waited(frame: Frame, seconds: float) -> Frame:
    """`frame` with the time added that it lay in a queue; only micro-batches are timed."""
    if frame.kind not in (Kind.STEP, Kind.DRAWN):
        return frame
    return replace(frame, waited_us=frame.waited_us + max(0, int(seconds * 1e6)))
