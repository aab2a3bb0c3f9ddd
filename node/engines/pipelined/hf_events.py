"""What reaches the thread of stage 0: from callers, and from the port, where another thread listens."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from ...pipeline.frame import Frame
from ...pipeline.port import Port, PortClosed
from .hf_rows import Pending, Step
from .slices import Prepared

logger = logging.getLogger(__name__)

MOST_UNREAD = 160
"""Frames that may wait for that thread."""
AGAIN_S = 0.3
"""Before the port is opened again."""


@dataclass(frozen=True)
class LaneStats:
    """How the chain is doing."""

    lanes: int = 0
    in_flight: int = 0
    ring_s: float = 0.0
    """What a micro-batch takes when nothing is in the way."""
    step_s: float = 0.0
    """What the slowest stage needs for one."""
    stall_share: float = 0.0
    """Of the slowest stage."""
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    generated: int = 0
    replayed: int = 0
    """Requests that were read again after a break, since the start."""


@dataclass(frozen=True)
class Came:
    """A frame, when it came."""

    frame: Frame
    at: float
    port: Port


@dataclass(frozen=True)
class Gone:
    """A port that closed."""

    port: Port
    why: str


@dataclass(frozen=True)
class Write:
    """Weights to write; done when all stages have."""

    prepared: Prepared
    done: "Future[None]"


@dataclass(frozen=True)
class Rejoin:
    """A new chain; done when everything is under way again."""

    epoch: int
    done: "Future[None]"
    until: float


@dataclass(frozen=True)
class Sent:
    """A micro-batch in flight."""

    step: Step
    version: int


Event = Came | Gone | Write | Rejoin | Pending | None
"""None: nothing but a reason to look up."""
Events = queue.SimpleQueue[Event]


class Listener:
    """Opens the port, and again when it closed; `events` gets what comes."""

    def __init__(self, open_port: Callable[[], Port], events: Events) -> None:
        self._open = open_port
        self._events = events
        self._room = threading.Semaphore(MOST_UNREAD)
        self._closing = threading.Event()
        self.port: Port | None = None
        """The one that is open."""

    def taken(self) -> None:
        """A frame was taken from the events: there is room for one more."""
        self._room.release()

    def close(self) -> None:
        """Make run() end."""
        self._closing.set()
        self._room.release()
        port = self.port
        if port is not None:
            port.close()

    def run(self) -> None:
        """Until close(); in a thread of its own."""
        while not self._closing.is_set():
            try:
                self.port = port = self._open()
            except PortClosed as error:
                logger.debug("no port yet: %s", error)
                self._closing.wait(AGAIN_S)
                continue
            if self._closing.is_set():
                port.close()
            why = self._listen(port)
            self.port = None
            self._events.put(Gone(port, why))
            self._closing.wait(AGAIN_S)

    def _listen(self, port: Port) -> str:
        """Pass on what comes until the port closes; why it did."""
        try:
            while True:
                frame = port.receive()
                self._room.acquire()
                self._events.put(Came(frame, time.monotonic(), port))
        except PortClosed as error:
            return str(error)
