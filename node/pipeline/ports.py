"""The port seam: the process that computes a stage sends to the next stage and gets from the one before.

Blocking, for threads that compute; the node's process serves the other end. Implementations: a socket to
the node's process (ports.py), and for tests a pair in memory. Suite: tests/conformance/test_port.py.
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
from ..ops.errors import EngineError
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


logger = logging.getLogger(__name__)

RETRY_S = 0.05
FULL_S = 0.005
"""Between two looks whether there is room again."""
MAX_BUFFERS = 64
"""In one call: far below what every system takes."""
Ended = Callable[[str], None]


class FrameQueue:
    """Frames that came and were not taken yet, from one thread to another.

    Without a lock of Python's: each frame changes threads once, and not twice.
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
            self._frames.put(None)  # for the next receive()
            raise PortClosed(self._why)
        came, frame = found
        return waited(frame, time.monotonic() - came)

    def close(self, why: str) -> None:
        """Accept no more frames; those put before can still be taken. The first reason stays."""
        if not self._over.is_set():
            self._why = why
            self._over.set()
            self._frames.put(None)

    def clear(self) -> None:
        """Drop the frames that were not taken."""
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
        self._frames = FrameQueue(behind)
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
        """Drop the frames that were not taken."""
        self._frames.clear()

    def end(self, why: str) -> None:
        """Accept no more frames; those that came before can still be received. The first reason stays."""
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
            why = f"the node's process sent bytes that are no frame: {error}"
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
        """Wake up waiting threads; frames that send() took still leave if the other end takes them in time."""
        self._inlet.clear()
        self._end("this port was closed")
        left = self._writing.acquire(timeout=FLUSH_S)
        shut(self._socket)
        if not left:
            self._writing.acquire()  # the writing thread has been woken up
        self._writing.release()
        if self._inlet.thread is not threading.current_thread():
            self._inlet.thread.join(FLUSH_S)
        self._socket.close()

    def _end(self, why: str) -> None:
        """The first reason stays."""
        self._why = self._why or why
        self._inlet.end(why)


Load = Callable[[], tuple[tuple[Array, ...], bytes]]
"""Waits for the states of a micro-batch: tensors and trail of its frame. Raises EngineError."""


@dataclass(frozen=True)
class _Leaving:
    """A frame to send, its target and the parts it still lacks; without a frame `target` is closed."""

    target: socket.socket
    frame: Frame | None = None
    load: Load | None = None
    began: float = 0.0


class SocketOutlet:
    """Sends frames in order, from one thread, which waits for the device so that the computing thread need not.

    Frames put before connect(), or once the other end is gone, are dropped.
    """

    def __init__(self, limits: FrameLimits, *, rank: int = 0) -> None:
        self._limits, self._rank = limits, rank
        self._target: socket.socket | None = None
        self._queue: queue.SimpleQueue[_Leaving] = queue.SimpleQueue()
        self._room = threading.Semaphore(DEPTH)  # of frames; an end always fits
        self._done = 0.0
        threading.Thread(target=self._send_all, name="primerl-outlet", daemon=True).start()

    def connect(self, target: socket.socket) -> None:
        """Send frames from now on through a duplicate of `target`."""
        self.finish()
        self._target = target.dup()

    def put(self, frame: Frame, load: Load | None = None, began: float = 0.0) -> None:
        """Send `frame` behind the frames put before, with the states that `load` gives; begun at `began`.

        Waits while too much waits.
        """
        target = self._target  # finish() may come while this waits for room: it is shut then
        if target is not None:
            self._room.acquire()
            self._queue.put(_Leaving(target, frame, load, began))

    def finish(self) -> None:
        """End the connection behind the frames that were put; does not wait for that.

        If these cannot leave, it ends when the other process that has the connection shuts it.
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
                logger.debug("a computed frame has nowhere to go: %s", error)
                shut(one.target)  # the reading process sees that it is gone

    def _buffers(self, one: _Leaving, frame: Frame) -> list[Buffer]:
        """The whole frame; a FAULT in place of one that breaks the plan's limits."""
        try:
            return encode(self._loaded(one, frame), self._limits)
        except (EngineError, LocalProtocolError) as error:
            return encode(fault_frame(frame.epoch, self._rank, str(error)), self._limits)

    def _loaded(self, one: _Leaving, frame: Frame) -> Frame:
        """With its states, and how long they took."""
        if one.load is None:
            return frame
        tensors, trail = one.load()
        begin, self._done = max(one.began, self._done), time.monotonic()
        busy = max(frame.busy_us, int((self._done - begin) * 1e6))
        return replace(frame, tensors=tensors, trail=trail, busy_us=busy)


CONNECT_S = 30.0


class Outlet(Protocol):
    """The process that computes, or what sends there (SocketOutlet). Raises OSError when it is gone."""

    def connect(self, target: socket.socket) -> None:
        """Have it write to `target` from now on."""
        ...

    def put(self, frame: Frame) -> None:
        """Have it send a frame that is whole."""
        ...

    def finish(self) -> None:
        """Have it end the connection behind the frames that were put."""
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
        """Wake up waiting threads in both processes; frames that send() took may still leave in time."""
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
