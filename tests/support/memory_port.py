"""Ports in memory: a pair, or a whole ring of stages in one process. Frames are handed on as they are."""

import threading
import time
from collections import deque

from primerl.node.pipeline.frames import Frame
from primerl.node.pipeline.ports import DEPTH, PortClosed, PortTimeout, waited


class Pipe:
    """Frames in order, one way, at most `depth` of them; each arrives `delay_s` after it was sent."""

    def __init__(self, depth: int = DEPTH, delay_s: float = 0.0) -> None:
        self._depth = depth
        self._delay = delay_s
        self._frames: deque[tuple[float, Frame]] = deque()
        self._changed = threading.Condition()
        self._closed = ""

    def put(self, frame: Frame) -> None:
        """Append `frame`, waiting for room. Raises PortClosed."""
        with self._changed:
            while not self._closed and len(self._frames) >= self._depth:
                self._changed.wait()
            if self._closed:
                raise PortClosed(self._closed)
            self._frames.append((time.monotonic() + self._delay, frame))
            self._changed.notify_all()

    def take(self, timeout_s: float | None) -> Frame:
        """The next frame, with the time that it lay here added. Raises PortTimeout, PortClosed."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                now = time.monotonic()
                due = self._frames[0][0] if self._frames else None
                if due is not None and due <= now:
                    break
                if due is None and self._closed:
                    raise PortClosed(self._closed)
                if until is not None and now >= until:
                    raise PortTimeout(f"no frame came in {timeout_s:g} s")
                ends = [one - now for one in (due, until) if one is not None]
                self._changed.wait(min(ends) if ends else None)
            came, frame = self._frames.popleft()
            self._changed.notify_all()
        return waited(frame, now - came)

    def close(self, why: str) -> None:
        """Take nothing more; what was put before can still be taken. The first reason stays."""
        with self._changed:
            self._closed = self._closed or why
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget what nobody took."""
        with self._changed:
            self._frames.clear()


class MemoryPort:
    """One end: sends into one pipe, receives from another."""

    def __init__(self, incoming: Pipe, outgoing: Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    def send(self, frame: Frame) -> None:
        """Hand `frame` on. Raises PortClosed."""
        self._outgoing.put(frame)

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next frame. Raises PortTimeout, PortClosed."""
        return self._incoming.take(timeout_s)

    def close(self) -> None:
        """End both directions; the other end still gets what was sent."""
        self._incoming.close("this port was closed")
        self._incoming.clear()
        self._outgoing.close("the other end was closed")


def pair(depth: int = DEPTH) -> tuple[MemoryPort, MemoryPort]:
    """Two ends that talk to each other."""
    there, back = Pipe(depth), Pipe(depth)
    return MemoryPort(back, there), MemoryPort(there, back)


def ring(stages: int, depth: int = DEPTH, delay_s: float = 0.0) -> list[MemoryPort]:
    """The ports of a pipeline without a network: each sends to the next one, the last to the first."""
    pipes = [Pipe(depth, delay_s) for _ in range(stages)]
    return [MemoryPort(pipes[rank - 1], pipe) for rank, pipe in enumerate(pipes)]
