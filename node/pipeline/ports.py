"""Ports: an engine's connection to the node, which relays frames to other stages.

The interface blocks, as it is used by computing threads. Implementations: SocketPort and SplitPort here, and a
pair in memory for tests. Conformance suite: tests/conformance/test_port.py.
"""

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ...protocol.errors import LocalProtocolError, RemoteProtocolError
from ..errors import EngineError
from ..process.unix_sockets import connected
from .frames import (
    PREFIX_BYTES,
    Array,
    Buffer,
    Frame,
    FrameLimits,
    Kind,
    decode,
    encode,
    fault_frame,
    head_size,
    read_head,
)

DEPTH = 80
"""Queue length in frames: above MAX_MICRO_BATCHES, so that stage 0 can always accept answers."""


class PortClosed(Exception):
    """The connection was lost, or close() was called."""


class PortTimeout(Exception):
    """No frame arrived in time."""


class Port(Protocol):
    """An ordered, bidirectional stream of frames.

    send() and receive() may run in different threads.
    """

    def send(self, frame: Frame) -> None:
        """Queue `frame`, waiting while the queue is full. Raises PortClosed.

        Its tensors must not be modified afterwards.
        """
        ...

    def receive(self, timeout_s: float | None = None) -> Frame:
        """Return the next frame. Raises PortTimeout, PortClosed."""
        ...

    def close(self) -> None:
        """Close the port; waiting threads get PortClosed. Never raises."""
        ...


def add_waited(frame: Frame, seconds: float) -> Frame:
    """Add time spent in a queue to `frame`, if it belongs to a micro-batch."""
    if frame.kind not in (Kind.STEP, Kind.DRAWN):
        return frame
    return replace(frame, waited_us=frame.waited_us + max(0, int(seconds * 1e6)))


logger = logging.getLogger(__name__)

RETRY_S = 0.05
FULL_S = 0.005
"""Interval between checks for room in a full queue."""
MAX_BUFFERS = 64
"""Buffers in one sendmsg() call, far below every system's limit."""
Ended = Callable[[str], None]


class FrameQueue:
    """A bounded queue of received frames, from the reading thread to the consumer.

    Built on SimpleQueue, which wakes the consumer without a second thread switch for a Python lock.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._frames: queue.SimpleQueue[tuple[float, Frame] | None] = queue.SimpleQueue()
        """(arrival time, frame); None marks the end."""
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
        """Return the next frame, its queueing time added. Raises PortTimeout, PortClosed."""
        try:
            entry = self._frames.get(timeout=timeout_s)
        except queue.Empty:
            raise PortTimeout(f"no frame arrived in {timeout_s:g} s") from None
        if entry is None:
            self._frames.put(None)  # for the next receive()
            raise PortClosed(self._why)
        arrived, frame = entry
        return add_waited(frame, time.monotonic() - arrived)

    def close(self, why: str) -> None:
        """Accept no more frames; queued ones can still be taken. The first reason is kept."""
        if not self._over.is_set():
            self._why = why
            self._over.set()
            self._frames.put(None)

    def clear(self) -> None:
        """Drop the queued frames."""
        with suppress(queue.Empty):
            while True:
                self._frames.get_nowait()
        if self._over.is_set():
            self._frames.put(None)


class SocketInlet:
    """Reads frames from a socket in a thread of its own.

    Calls `ended` with the reason when the socket ends.
    """

    def __init__(
        self, source: socket.socket, limits: FrameLimits, ended: Ended, *, behind: int = DEPTH
    ) -> None:
        self._socket, self._limits, self._ended = source, limits, ended
        self._frames = FrameQueue(behind)
        self.thread = threading.Thread(
            target=self._receive_all, name="primerl-port-receive", daemon=True
        )

    def start(self) -> None:
        """Start the reading thread."""
        self.thread.start()

    def receive(self, timeout_s: float | None = None) -> Frame:
        """Return the next frame. Raises PortTimeout, PortClosed."""
        return self._frames.take(timeout_s)

    def clear(self) -> None:
        """Drop the queued frames."""
        self._frames.clear()

    def end(self, why: str) -> None:
        """Accept no more frames; queued ones can still be received. The first reason is kept."""
        self._frames.close(why)

    def _receive_all(self) -> None:
        why = "the node's process closed the connection"
        try:
            while True:
                self._frames.put(self._read())
        except EOFError:
            pass
        except OSError as error:
            why = f"the connection to the node's process was lost: {error}"
        except (RemoteProtocolError, LocalProtocolError) as error:
            why = f"the node's process sent an invalid frame: {error}"
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
    """Connect to the node's Unix socket, retrying until it listens.

    Raises PortClosed after `within_s`.
    """
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
    """Shut down both directions, for every process that holds the socket."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def write(target: socket.socket, buffers: list[Buffer]) -> None:
    """Write all buffers without joining them. Raises OSError."""
    remaining = [memoryview(buffer) for buffer in buffers]
    while remaining:
        sent = target.sendmsg(remaining[:MAX_BUFFERS])
        while remaining and sent >= len(remaining[0]):
            sent -= len(remaining.pop(0))
        if sent:
            remaining[0] = remaining[0][sent:]


def _read(source: socket.socket, size: int) -> bytearray:
    """Read exactly `size` bytes. Raises EOFError, OSError."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = source.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data


CONNECT_S = 30.0
FLUSH_S = 1.0
"""Longest wait of close() for queued frames to be sent."""


class SocketPort:
    """A Port over one Unix socket.

    The constructor connects within `connect_s` seconds or raises PortClosed.
    """

    def __init__(
        self, path: str, limits: FrameLimits, *, behind: int = DEPTH, connect_s: float = CONNECT_S
    ) -> None:
        self._limits = limits
        self._why = ""
        self._writing = threading.Lock()
        self._socket = connect(path, connect_s)
        self._inlet = SocketInlet(self._socket, limits, self._end, behind=behind)
        self._inlet.start()

    def send(self, frame: Frame) -> None:
        """Write `frame`, waiting for room in the socket. Raises PortClosed, LocalProtocolError."""
        buffers = encode(frame, self._limits)
        with self._writing:
            if self._why:
                raise PortClosed(self._why)
            try:
                write(self._socket, buffers)
            except OSError as error:
                self._end(f"the connection to the node's process was lost: {error}")
                raise PortClosed(self._why) from error

    def receive(self, timeout_s: float | None = None) -> Frame:
        """Return the next frame. Raises PortTimeout, PortClosed."""
        return self._inlet.receive(timeout_s)

    def close(self) -> None:
        """Close the port.

        Frames already passed to send() are still sent if the peer reads them in time.
        """
        self._inlet.clear()
        self._end("this port was closed")
        flushed = self._writing.acquire(timeout=FLUSH_S)
        shut(self._socket)
        if not flushed:
            self._writing.acquire()  # shut() has woken the writing thread
        self._writing.release()
        if self._inlet.thread is not threading.current_thread():
            self._inlet.thread.join(FLUSH_S)
        self._socket.close()

    def _end(self, why: str) -> None:
        """End the inlet; the first reason is kept."""
        self._why = self._why or why
        self._inlet.end(why)


Load = Callable[[], tuple[tuple[Array, ...], bytes]]
"""Waits for the states of a micro-batch; returns tensors and trail of its frame. Raises EngineError."""


@dataclass(frozen=True)
class _Outgoing:
    """A frame to send to `target`, and the function that loads its states.

    No frame: close `target`.
    """

    target: socket.socket
    frame: Frame | None = None
    load: Load | None = None
    began: float = 0.0


class SocketOutlet:
    """Sends frames in order from its own thread, which waits for the device.

    Frames put before connect(), or after the connection was lost, are dropped.
    """

    def __init__(self, limits: FrameLimits, *, rank: int = 0) -> None:
        self._limits, self._rank = limits, rank
        self._target: socket.socket | None = None
        self._queue: queue.SimpleQueue[_Outgoing] = queue.SimpleQueue()
        self._room = threading.Semaphore(DEPTH)  # counts frames; an end always fits
        self._done = 0.0
        threading.Thread(target=self._send_all, name="primerl-outlet", daemon=True).start()

    def connect(self, target: socket.socket) -> None:
        """Send later frames through a duplicate of `target`."""
        self.finish()
        self._target = target.dup()

    def put(self, frame: Frame, load: Load | None = None, began: float = 0.0) -> None:
        """Queue `frame`, whose states `load` returns and whose computation began at `began`.

        Waits while the queue is full.
        """
        target = self._target  # finish() may shut it while this waits for room
        if target is not None:
            self._room.acquire()
            self._queue.put(_Outgoing(target, frame, load, began))

    def finish(self) -> None:
        """Close the connection after the queued frames; returns at once.

        If those cannot be sent, the connection ends when the other process that holds it shuts it down.
        """
        target, self._target = self._target, None
        if target is not None:
            self._queue.put(_Outgoing(target))

    def _send_all(self) -> None:
        while True:
            outgoing = self._queue.get()
            try:
                if outgoing.frame is None:
                    shut(outgoing.target)
                    outgoing.target.close()
                else:
                    self._room.release()
                    write(outgoing.target, self._buffers(outgoing, outgoing.frame))
            except OSError as error:
                logger.debug("a computed frame was dropped: %s", error)
                shut(outgoing.target)  # so that the reading process sees the end

    def _buffers(self, outgoing: _Outgoing, frame: Frame) -> list[Buffer]:
        """Encode the frame with its states.

        Encodes a FAULT instead if loading fails or the frame exceeds the limits.
        """
        try:
            return encode(self._loaded(outgoing, frame), self._limits)
        except (EngineError, LocalProtocolError) as error:
            return encode(fault_frame(frame.epoch, self._rank, str(error)), self._limits)

    def _loaded(self, outgoing: _Outgoing, frame: Frame) -> Frame:
        """Add the states and their compute time to the frame."""
        if outgoing.load is None:
            return frame
        tensors, trail = outgoing.load()
        begin, self._done = max(outgoing.began, self._done), time.monotonic()
        busy = max(frame.busy_us, int((self._done - begin) * 1e6))
        return replace(frame, tensors=tensors, trail=trail, busy_us=busy)


class Outlet(Protocol):
    """The sending half of a SplitPort, in the computing process.

    All methods raise OSError if that is gone.
    """

    def connect(self, target: socket.socket) -> None:
        """Send later frames to `target`."""
        ...

    def put(self, frame: Frame) -> None:
        """Queue a complete frame."""
        ...

    def finish(self) -> None:
        """Close the connection after the queued frames."""
        ...


class SplitPort:
    """A Port that receives in this process and sends from another one, through `outlet`.

    The constructor connects or raises PortClosed.
    """

    def __init__(self, path: str, limits: FrameLimits, outlet: Outlet) -> None:
        self._outlet = outlet
        self._why = ""
        self._socket = connect(path, CONNECT_S)
        self._inlet = SocketInlet(self._socket, limits, self._end)
        self._inlet.start()
        with _outlet_errors():
            outlet.connect(self._socket)

    def send(self, frame: Frame) -> None:
        """Pass `frame` to the outlet. Raises PortClosed."""
        if self._why:
            raise PortClosed(self._why)
        with _outlet_errors():
            self._outlet.put(frame)

    def receive(self, timeout_s: float | None = None) -> Frame:
        """Return the next frame. Raises PortTimeout, PortClosed."""
        return self._inlet.receive(timeout_s)

    def close(self) -> None:
        """Close the port in both processes.

        Frames already passed to send() may still be sent in time.
        """
        self._inlet.clear()
        if not self._why:
            self._end("this port was closed")
            with suppress(PortClosed), _outlet_errors():
                self._outlet.finish()
            self._inlet.thread.join(FLUSH_S)  # the thread ends with the connection
        shut(self._socket)
        self._inlet.thread.join(FLUSH_S)
        self._socket.close()

    def _end(self, why: str) -> None:
        self._why = self._why or why
        self._inlet.end(why)


@contextmanager
def _outlet_errors() -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise PortClosed(f"the computing process ended: {error}") from error
