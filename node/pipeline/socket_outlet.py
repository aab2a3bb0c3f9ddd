"""How a process that is told what to compute sends what it made of it: into a socket that another one opened.

One thread, in order. It waits for the device, so that whoever computes need not.
"""

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...protocol.errors import LocalProtocolError
from ..errors import EngineError
from .frame import Array, Frame
from .frame_codec import Buffer, FrameLimits, encode
from .memory_port import DEPTH
from .socket_inlet import shut, write
from .stage_loop import fault

logger = logging.getLogger(__name__)

Load = Callable[[], tuple[tuple[Array, ...], bytes]]
"""Waits for the states of a micro-batch: tensors and trail of its frame. Raises EngineError."""


@dataclass(frozen=True)
class _Leaving:
    """A frame to be sent, where to, and what has yet to come into it; without a frame `target` ends."""

    target: socket.socket
    frame: Frame | None = None
    load: Load | None = None
    began: float = 0.0


class SocketOutlet:
    """What is put before connect(), or once the other end is gone, is dropped: nobody waits for it there."""

    def __init__(self, limits: FrameLimits, *, rank: int = 0) -> None:
        self._limits, self._rank = limits, rank
        self._target: socket.socket | None = None
        self._queue: queue.SimpleQueue[_Leaving] = queue.SimpleQueue()
        self._room = threading.Semaphore(DEPTH)  # of frames; an end always fits
        self._done = 0.0
        threading.Thread(target=self._send_all, name="primerl-outlet", daemon=True).start()

    def connect(self, target: socket.socket) -> None:
        """What is put from now on leaves by `target`, of which a copy is kept."""
        self.finish()
        self._target = target.dup()

    def put(self, frame: Frame, load: Load | None = None, began: float = 0.0) -> None:
        """Send `frame` behind what was put before, with what `load` gives; it was begun at `began`.

        Waits while too much waits.
        """
        target = self._target  # finish() may come while this waits for room: it is shut then
        if target is not None:
            self._room.acquire()
            self._queue.put(_Leaving(target, frame, load, began))

    def finish(self) -> None:
        """End the connection behind what was put; does not wait for that.

        If that cannot leave, it ends when whoever else has the connection shuts it.
        """
        target, self._target = self._target, None
        if target is not None:
            self._queue.put(_Leaving(target))

    def _send_all(self) -> None:
        while True:
            one = self._queue.get()
            try:
                if one.frame is None:
                    shut(one.target)
                    one.target.close()
                else:
                    self._room.release()
                    write(one.target, self._buffers(one, one.frame))
            except OSError as error:
                logger.debug("what was computed has nowhere to go: %s", error)
                shut(one.target)  # whoever reads it sees that it is gone

    def _buffers(self, one: _Leaving, frame: Frame) -> list[Buffer]:
        """The whole frame; a FAULT if there is none that anybody would take."""
        try:
            return encode(self._loaded(one, frame), self._limits)
        except (EngineError, LocalProtocolError) as error:
            return encode(fault(frame.epoch, self._rank, str(error)), self._limits)

    def _loaded(self, one: _Leaving, frame: Frame) -> Frame:
        """With its states, and how long they took."""
        if one.load is None:
            return frame
        tensors, trail = one.load()
        begin, self._done = max(one.began, self._done), time.monotonic()
        busy = max(frame.busy_us, int((self._done - begin) * 1e6))
        return replace(frame, tensors=tensors, trail=trail, busy_us=busy)
