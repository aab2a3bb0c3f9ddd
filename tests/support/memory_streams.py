"""Connections and streams of the memory transport: two ends that share bounded pipes.

Both ends live in one event loop; a change on one end is seen by the other at its next step.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from primerl.node.p2p.transport import (
    ConnectionLost,
    PathInfo,
    StreamClosed,
    TransportError,
)
from primerl.node.p2p.waiting import Notifier

STREAM_BACKLOG = 256
"""Streams of one connection that may wait for accept_stream()."""

Travel = Callable[[bytes, bytes, Callable[[], bool]], Coroutine[Any, Any, None]]
"""(from, to, over): returns when something sent now would have arrived, or when over() is true."""
Uplink = Callable[[bytes, int], Awaitable[None]]
"""(from, bytes): returns when the line of a node has sent so much."""
Broken = Callable[[], TransportError]


T = TypeVar("T")


class AsyncQueue(Generic[T]):
    """A bounded queue that can end: once closed, whatever it still held is dropped."""

    def __init__(self, limit: int, ended: Callable[[], Exception]) -> None:
        self._items: deque[T] = deque()
        self._limit = limit
        self._ended = ended
        self._closed = False
        self._changed = Notifier()

    def offer(self, item: T) -> bool:
        """Add `item`; False when the queue is full or closed."""
        if self._closed or len(self._items) >= self._limit:
            return False
        self._items.append(item)
        self._changed.fire()
        return True

    async def take(self) -> T:
        """The next item in order. Raises what `ended` makes once the queue is closed."""
        while not self._closed:
            if self._items:
                return self._items.popleft()
            await self._changed.wait()
        raise self._ended()

    def close(self) -> list[T]:
        """End the queue and hand back what nobody took."""
        self._closed = True
        left = list(self._items)
        self._items.clear()
        self._changed.fire()
        return left


class Pipe:
    """One direction of a stream: bytes in order, at most `window` of them unread."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._unread = bytearray()
        self._finished = False
        self._broken: Broken | None = None
        self._changed = Notifier()

    async def put(self, data: memoryview) -> None:
        """Append all of `data`, waiting for room."""
        while data:
            self._check()
            if self._finished:
                raise StreamClosed("this stream was finished: open another one to say more")
            room = self._window - len(self._unread)
            if room <= 0:
                await self._changed.wait()
                continue
            self._unread += data[:room]
            data = data[room:]
            self._changed.fire()

    async def take(self, size: int) -> bytes:
        """Exactly `size` bytes."""
        taken = bytearray()
        while len(taken) < size:
            self._check()
            piece = self._unread[: size - len(taken)]
            if piece:
                taken += piece
                del self._unread[: len(piece)]
                self._changed.fire()
            elif self._finished:
                raise StreamClosed(f"the stream ended after {len(taken)} of {size} bytes")
            else:
                await self._changed.wait()
        return bytes(taken)

    def finish(self) -> None:
        """Say that nothing more comes."""
        self._check()
        self._finished = True
        self._changed.fire()

    def fail(self, broken: Broken) -> None:
        """Every later call raises what `broken` makes. The first failure stays."""
        self._broken = self._broken or broken
        self._unread.clear()
        self._changed.fire()

    def drop(self, broken: Broken) -> None:
        """Fail for good, unless the writer finished in order."""
        if not self._finished:
            self.fail(broken)

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken()


class MemoryStream:
    """One end of a bidirectional stream."""

    def __init__(self, connection: "MemoryConnection", incoming: Pipe, outgoing: Pipe) -> None:
        self.incoming = incoming
        self.outgoing = outgoing
        self.unseen = False
        """Opened by us, and the peer does not know yet."""
        self._connection = connection
        self._unusable = False
        # A stream that its owner forgot is a reset for the peer, never a clean end.
        for pipe in (incoming, outgoing):
            weakref.finalize(self, pipe.drop, _dropped).atexit = False

    async def read_exact(self, size: int) -> bytes:
        """Exactly `size` bytes, or StreamClosed."""
        with self._using():
            return await self.incoming.take(size)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; waits while the peer's window is full."""
        view = memoryview(data).cast("B")
        with self._using():
            while view:
                piece, view = view[: self._connection.window], view[self._connection.window :]
                await self._connection.send(self, piece)

    async def finish(self) -> None:
        """End our direction."""
        with self._using():
            await self._connection.carry(self)
            self.outgoing.finish()

    async def abort(self) -> None:
        """Reset what was not finished, and refuse what the peer still sends."""
        self._unusable = True
        self._connection.announce(self)
        self.incoming.drop(_aborted)
        self.outgoing.drop(_aborted)

    def fail(self, broken: Broken) -> None:
        """Break both directions."""
        self.incoming.fail(broken)
        self.outgoing.fail(broken)

    @contextmanager
    def _using(self) -> Generator[None, None, None]:
        if self._unusable:
            raise StreamClosed("an earlier call was cancelled or the stream aborted: open another")
        try:
            yield
        except asyncio.CancelledError:
            self._unusable = True
            raise


class MemoryConnection:
    """One end of a connection."""

    def __init__(
        self,
        travel: Travel,
        uplink: Uplink,
        *,
        window: int,
        ids: tuple[bytes, bytes],
        alpn: bytes,
        released: Callable[["MemoryConnection"], None],
    ) -> None:
        self.window = window
        self._travel = travel
        self._uplink = uplink
        self._id, self._peer = ids
        self._alpn = alpn
        self._released = released
        self._other = self
        self._reason: str | None = None
        self._streams: weakref.WeakSet[MemoryStream] = weakref.WeakSet()
        self._incoming: AsyncQueue[MemoryStream] = AsyncQueue(STREAM_BACKLOG, self._lost)
        self._sent = 0

    def pair(self, other: "MemoryConnection") -> None:
        """Name the other end; done once, before either is handed out."""
        self._other = other

    @property
    def peer(self) -> bytes:
        """The other node."""
        return self._peer

    @property
    def alpn(self) -> bytes:
        """The protocol both sides agreed on."""
        return self._alpn

    @property
    def closed(self) -> bool:
        """Whether either side closed it or the link broke."""
        return self._reason is not None

    async def open_stream(self) -> MemoryStream:
        """A new stream; the peer sees it at our first write, finish or abort."""
        self._check()
        stream = MemoryStream(self, Pipe(self.window), Pipe(self.window))
        stream.unseen = True
        self._streams.add(stream)
        return stream

    async def accept_stream(self) -> MemoryStream:
        """The next stream that the peer opened."""
        return await self._incoming.take()

    def path(self) -> PathInfo:
        """Counters of what was written at either end; there is no round-trip time."""
        return PathInfo("memory", None, self._sent, self._other._sent)

    async def close(self, reason: str = "") -> None:
        """Close both ends at once; what was not read yet is lost."""
        self.lose(reason or "closed")

    async def send(self, stream: MemoryStream, piece: memoryview) -> None:
        """Carry one piece to the other end."""
        await self._uplink(self._id, len(piece))
        await self.carry(stream)
        await stream.outgoing.put(piece)
        self._sent += len(piece)

    async def carry(self, stream: MemoryStream) -> None:
        """Wait as long as something takes to arrive; show the peer a stream that is new to it."""
        self._check()
        await self._travel(self._id, self._peer, lambda: self.closed)
        self._check()
        self.announce(stream)

    def announce(self, stream: MemoryStream) -> None:
        """Show the peer a stream that we opened, once."""
        if self.closed or not stream.unseen:
            return
        stream.unseen = False
        far = MemoryStream(self._other, stream.outgoing, stream.incoming)
        if not self._other.admit(far):
            stream.fail(lambda: StreamClosed("the peer takes no more streams now: try later"))

    def admit(self, stream: MemoryStream) -> bool:
        """Queue a stream that the peer opened."""
        self._streams.add(stream)
        return self._incoming.offer(stream)

    def lose(self, reason: str) -> None:
        """Break both ends."""
        for end in (self, self._other):
            end.end(reason)

    def end(self, reason: str) -> None:
        """Break this end; the first reason stays."""
        if self.closed:
            return
        self._reason = reason
        self._incoming.close()
        for stream in list(self._streams):
            stream.fail(self._lost)
        self._released(self)

    def _check(self) -> None:
        if self.closed:
            raise self._lost()

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"the connection to {self._peer[:5].hex()} is gone: {self._reason}")


def _aborted() -> StreamClosed:
    return StreamClosed("the stream was aborted")


def _dropped() -> StreamClosed:
    return StreamClosed("the other side dropped the stream without finishing it")


def connect_ends(
    travel: Travel,
    uplink: Uplink,
    *,
    window: int,
    ids: tuple[bytes, bytes],
    alpn: bytes,
    released: tuple[Callable[[MemoryConnection], None], Callable[[MemoryConnection], None]],
) -> tuple[MemoryConnection, MemoryConnection]:
    """The two ends of a new connection: that of ids[0], who connects, and that of ids[1]."""
    near = MemoryConnection(travel, uplink, window=window, ids=ids, alpn=alpn, released=released[0])
    far = MemoryConnection(
        travel, uplink, window=window, ids=(ids[1], ids[0]), alpn=alpn, released=released[1]
    )
    near.pair(far)
    far.pair(near)
    return near, far
