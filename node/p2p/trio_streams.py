"""Streams that live in a trio thread, there and seen from asyncio, and the queue of those that peers open.

A write is never cut in the middle: half a frame of one stream would break every other on its connection.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple, Unpack, cast

from ...protocol.version import KIB
from .transport import StreamClosed
from .trio_thread import EventQueue, TrioStopped, TrioThread

if TYPE_CHECKING:
    import trio

PIECE = 256 * KIB
"""Most bytes of one read or write."""
WRITE_SECONDS = 6.0
"""To open a stream or to write one piece; a peer that takes longer loses its connection."""
STREAMS, STREAMS_PER_PEER = 64, 8
"""Streams of callers that are open at a time, of all and of one."""
CALL_SECONDS = 600.0
"""After this a caller's stream is ended whatever we are doing with it."""

T = TypeVar("T")
Args = TypeVarTuple("Args")
Cut = Callable[[], Awaitable[None]]


class RawStream(Protocol):
    """A stream as libp2p makes it."""

    async def read(self, n: int | None = None) -> bytes:
        """At least one byte and at most `n`."""
        ...

    async def write(self, data: bytes) -> None:
        """All of `data`."""
        ...

    async def reset(self) -> None:
        """End both directions."""
        ...


class HalfClosing(Protocol):
    """What the stream of libp2p can do beside, though its abstract type does not say so."""

    async def close_write(self) -> None:
        """End our direction. close() would also strike the stream off, and its connection might be pruned."""
        ...


class TrioStream:
    """One stream, for the trio thread only: the shape of transport.Stream."""

    def __init__(self, raw: RawStream, cut: Cut) -> None:
        """`cut()` ends the connection below, for when a write was left half done."""
        self._raw = raw
        self._cut = cut

    async def read_exact(self, size: int) -> bytes:
        """Exactly `size` bytes; no more than that are ever held."""
        held = bytearray()
        while len(held) < size:
            piece = await _ours(self._raw.read, min(PIECE, size - len(held)))
            if not piece:
                raise StreamClosed(f"the stream ended after {len(held)} of {size} bytes")
            held += piece
        return bytes(held)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`, a piece at a time; it may be cancelled between two."""
        import trio

        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE):
            await _whole(self._cut, self._raw.write, bytes(view[start : start + PIECE]))
            await trio.lowlevel.checkpoint_if_cancelled()

    async def finish(self) -> None:
        """Say that nothing more will be written."""
        await _whole(self._cut, cast(HalfClosing, self._raw).close_write)

    async def abort(self) -> None:
        """Reset what is still open. Never raises."""
        try:
            await _whole(self._cut, self._raw.reset)
        except StreamClosed:
            return


async def open_whole(begin: Callable[[], Awaitable[RawStream]], cut: Cut) -> TrioStream:
    """The stream that `begin` opens over a connection that `cut` ends. Raises StreamClosed."""
    import trio

    stream = TrioStream(await _whole(cut, begin), cut)
    try:
        await trio.lowlevel.checkpoint_if_cancelled()
    except trio.Cancelled:
        await stream.abort()
        raise
    return stream


class CrossingStream:
    """A TrioStream for asyncio: every call is one visit to the other thread."""

    def __init__(self, thread: TrioThread, stream: TrioStream, done: "trio.Event") -> None:
        """`done` is set once the stream is aborted here."""
        self._thread = thread
        self._stream = stream
        self._done = done

    async def read_exact(self, size: int) -> bytes:
        """Exactly `size` bytes, or StreamClosed."""
        return await self._visit(self._stream.read_exact, size)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; waits for flow control."""
        await self._visit(self._stream.write, data)

    async def finish(self) -> None:
        """Say that nothing more will be written."""
        await self._visit(self._stream.finish)

    async def abort(self) -> None:
        """End the stream. Never raises."""
        try:
            await self._thread.call(self._end)
        except TrioStopped:
            return

    async def _end(self) -> None:
        await self._stream.abort()
        self._done.set()

    async def _visit(self, function: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args) -> T:
        try:
            return await self._thread.call(function, *args)
        except TrioStopped as error:
            raise StreamClosed("libp2p has stopped, and its streams with it") from error


class Callers:
    """The streams that peers open, on their way from trio to one asyncio reader."""

    def __init__(self, thread: TrioThread) -> None:
        self._thread = thread
        # As long as all that may be open at a time, so that it never drops one.
        self._queue: EventQueue[tuple[bytes, CrossingStream]] = EventQueue(STREAMS)
        self._open: Counter[bytes] = Counter()
        self._heard = False

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the reader's loop."""
        self._queue.bind(loop)

    def close(self) -> None:
        """End the reader. From its loop only."""
        self._queue.close()

    def listen(self) -> AsyncIterator[tuple[bytes, CrossingStream]]:
        """Callers from now on; those before were turned away."""
        self._heard = True
        return self._queue

    async def take(self, peer: bytes, stream: TrioStream) -> None:
        """Hand over what `peer` opened and wait until the reader is done with it. In trio; never raises."""
        import trio

        crowded = self._open.total() >= STREAMS or self._open[peer] >= STREAMS_PER_PEER
        if not self._heard or crowded:
            await stream.abort()
            return
        self._open[peer] += 1
        done = trio.Event()
        try:
            self._queue.put((peer, CrossingStream(self._thread, stream, done)))
            with trio.move_on_after(CALL_SECONDS):
                await done.wait()
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]
            await stream.abort()


async def _ours(function: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args) -> T:
    """Ask a foreign stream; all that it raises becomes StreamClosed."""
    try:
        return await function(*args)
    except Exception as error:
        # Resets, sockets and the library's own slips come out untyped; for us the stream is over.
        raise StreamClosed(f"the stream broke: {error!r}"[:200]) from error


async def _whole(cut: Cut, function: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args) -> T:
    """What writes is done to its end, cancelled or not, or ends its connection by `cut`."""
    import trio

    with trio.move_on_after(WRITE_SECONDS) as scope:
        scope.shield = True
        return await _ours(function, *args)
    with trio.move_on_after(WRITE_SECONDS) as scope:
        scope.shield = True
        await _ours(cut)
    raise StreamClosed("the peer takes no more bytes: its connection was given up")
