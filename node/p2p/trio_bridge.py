"""Trio in one daemon thread beside asyncio: a call bridge, and a bounded way back for events.

Objects of trio are touched inside that thread only; asyncio sees `call` and `EventQueue`.
"""

import asyncio
import logging
import math
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, TypeVarTuple, Unpack, cast

from ...protocol.version import KIB
from .transport import StreamClosed

if TYPE_CHECKING:
    import trio
    import trio.lowlevel

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""How long stop() waits for trio to unwind before it leaves the daemon thread to the process."""

T = TypeVar("T")
Args = TypeVarTuple("Args")


class TrioStopped(Exception):
    """The trio thread is not running, or stopped before a call into it returned."""


class EventQueue(Generic[T]):
    """A bounded queue filled by any thread and read by one asyncio loop; the oldest drop first."""

    def __init__(self, limit: int) -> None:
        self._items: deque[T] = deque(maxlen=limit)
        self._lock = threading.Lock()
        self._readable = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waking = False
        self._closed = False

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the loop whose readers put() wakes; items put before that are dropped."""
        self._loop = loop

    def put(self, item: T) -> None:
        """Add an item, from any thread. Never blocks; at most one wake-up is under way."""
        with self._lock:
            if self._closed or self._loop is None:
                return
            self._items.append(item)
            wake, self._waking = not self._waking, True
        if wake:
            _to_loop(self._loop, self._wake)

    def close(self) -> None:
        """End every reader once it has taken the remaining items. From the loop's thread only."""
        with self._lock:
            self._closed = True
        self._readable.set()

    def __aiter__(self) -> "EventQueue[T]":
        return self

    async def __anext__(self) -> T:
        while True:
            with self._lock:
                if self._items:
                    return self._items.popleft()
                if self._closed:
                    raise StopAsyncIteration
                self._readable.clear()
            await self._readable.wait()

    def _wake(self) -> None:
        with self._lock:
            self._waking = False
        self._readable.set()


class TrioThread:
    """One daemon thread that runs trio from start() to stop(), serving one asyncio loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._ended = asyncio.Event()
        self._calls: set[asyncio.Future[Any]] = set()

    @property
    def nursery(self) -> "trio.Nursery":
        """Nursery of long-lived trio tasks; for use inside the trio thread only."""
        if self._nursery is None:
            raise TrioStopped(f"{self._name} is not running: start() it first")
        return self._nursery

    async def start(self) -> None:
        """Start the thread and wait until trio runs in it. Once only."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(
            target=self._main, args=(loop, ready), name=self._name, daemon=True
        )
        self._thread.start()
        await ready

    async def call(self, function: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args) -> T:
        """Await `function(*args)` inside trio; its result or its error comes back.

        Cancelling this call cancels the function; stopping the thread ends the call.

        Raises:
            TrioStopped: the thread is not running, or stopped before the function returned.
        """
        if self._token is None or self._ended.is_set():
            raise TrioStopped(f"{self._name} is not running: start() it first")
        import trio

        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        scope = trio.move_on_after(math.inf)

        async def run() -> None:
            try:
                with scope:
                    _to_loop(loop, _resolve, result, await function(*args))
            except Exception as error:
                # Not swallowed: it is raised again in the caller, on the other side.
                _to_loop(loop, _fail, result, error)

        self._calls.add(result)
        self._schedule(self._spawn, run)
        try:
            return await result
        except asyncio.CancelledError:
            self._schedule(scope.cancel)
            raise
        finally:
            self._calls.discard(result)

    async def stop(self) -> None:
        """Cancel everything in trio and join the thread. Never raises; twice is fine."""
        if self._thread is None:
            return
        self._schedule(self._cancel)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._ended.wait()
            self._thread.join(1.0)  # its last statement has run: this takes microseconds
        except TimeoutError:
            logger.warning("%s did not stop in %.0f s; it ends with us", self._name, STOP_SECONDS)
        self._thread = None

    def _schedule(self, function: Callable[..., object], *args: object) -> None:
        import trio

        if self._token is None:
            return
        try:
            self._token.run_sync_soon(function, *args)
        except trio.RunFinishedError:
            logger.debug("%s has already ended", self._name)

    def _spawn(self, run: Callable[[], Awaitable[None]]) -> None:
        # Too late is no error here: _finish fails every call that is still waiting.
        if self._nursery is not None:
            self._nursery.start_soon(run)

    def _cancel(self) -> None:
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    def _main(self, loop: asyncio.AbstractEventLoop, ready: "asyncio.Future[None]") -> None:
        import trio

        try:
            trio.run(self._live, loop, ready)
        except Exception:
            # A background task failed. The thread has ended, and every later call raises.
            logger.exception("%s died", self._name)
        finally:
            _to_loop(loop, self._finish)

    async def _live(self, loop: asyncio.AbstractEventLoop, ready: "asyncio.Future[None]") -> None:
        import trio

        self._token = trio.lowlevel.current_trio_token()
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                _to_loop(loop, _resolve, ready, None)
                await trio.sleep_forever()
        finally:
            self._nursery = None

    def _finish(self) -> None:
        self._ended.set()
        for call in self._calls:
            _fail(call, TrioStopped(f"{self._name} stopped during the call"))


async def attempt(
    seconds: float, function: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args
) -> T | None:
    """Call foreign code inside trio with a deadline; returns None for an error.

    Only for calls whose failure is normal, such as dialling a stranger.
    """
    import trio

    try:
        with trio.fail_after(seconds):
            return await function(*args)
    except Exception as error:
        # Sockets, peers' answers and the library's own slips all come out here, untyped.
        logger.debug("could not %s: %r", getattr(function, "__qualname__", function), error)
        return None


def _resolve(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: "asyncio.Future[Any]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _to_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object
) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        # The asyncio loop is closed already.
        logger.debug("an event came after its loop was closed")


PIECE = 256 * KIB
"""Most bytes of one read or write."""
WRITE_SECONDS = 6.0
"""Time to open a stream or to write one piece; a slower peer loses its connection."""
STREAMS, STREAMS_PER_PEER = 64, 8
"""Streams of callers that are open at a time, of all and of one."""
CALL_SECONDS = 600.0
"""Time after which a caller's stream is ended, even in use."""

Cut = Callable[[], Awaitable[None]]


class RawStream(Protocol):
    """A stream of libp2p."""

    async def read(self, n: int | None = None) -> bytes:
        """Read at least one byte and at most `n`."""
        ...

    async def write(self, data: bytes) -> None:
        """Write all of `data`."""
        ...

    async def reset(self) -> None:
        """End both directions."""
        ...


class HalfClosing(Protocol):
    """A method that streams of libp2p have, though their abstract type does not declare it."""

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
        """Read exactly `size` bytes"""
        data = bytearray()
        while len(data) < size:
            piece = await _ours(self._raw.read, min(PIECE, size - len(data)))
            if not piece:
                raise StreamClosed(f"the stream ended after {len(data)} of {size} bytes")
            data += piece
        return bytes(data)

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
        """Reset the directions that are still open. Never raises."""
        try:
            await _whole(self._cut, self._raw.reset)
        except StreamClosed:
            return


async def open_whole(begin: Callable[[], Awaitable[RawStream]], cut: Cut) -> TrioStream:
    """Return the stream that `begin` opens over a connection that `cut` ends. Raises StreamClosed."""
    import trio

    stream = TrioStream(await _whole(cut, begin), cut)
    try:
        await trio.lowlevel.checkpoint_if_cancelled()
    except trio.Cancelled:
        await stream.abort()
        raise
    return stream


class BridgedStream:
    """A TrioStream for asyncio: every call is one visit to the other thread."""

    def __init__(self, thread: TrioThread, stream: TrioStream, done: "trio.Event") -> None:
        """`done` is set once the stream is aborted here."""
        self._thread = thread
        self._stream = stream
        self._done = done

    async def read_exact(self, size: int) -> bytes:
        """Read exactly `size` bytes"""
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


class AcceptQueue:
    """The streams that peers open, on their way from trio to one asyncio reader."""

    def __init__(self, thread: TrioThread) -> None:
        self._thread = thread
        # As long as all that may be open at a time, so that it never drops one.
        self._queue: EventQueue[tuple[bytes, BridgedStream]] = EventQueue(STREAMS)
        self._open: Counter[bytes] = Counter()
        self._heard = False

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the reader's loop."""
        self._queue.bind(loop)

    def close(self) -> None:
        """End the reader. From its loop only."""
        self._queue.close()

    def listen(self) -> AsyncIterator[tuple[bytes, BridgedStream]]:
        """Yield callers from now on; those before were turned away."""
        self._heard = True
        return self._queue

    async def take(self, peer: bytes, stream: TrioStream) -> None:
        """Hand over a stream that `peer` opened and wait until its reader is done. In trio; never raises."""
        import trio

        crowded = self._open.total() >= STREAMS or self._open[peer] >= STREAMS_PER_PEER
        if not self._heard or crowded:
            await stream.abort()
            return
        self._open[peer] += 1
        done = trio.Event()
        try:
            self._queue.put((peer, BridgedStream(self._thread, stream, done)))
            with trio.move_on_after(CALL_SECONDS):
                await done.wait()
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]
            await stream.abort()


async def _ours(function: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args) -> T:
    """Call a foreign stream; every exception becomes StreamClosed."""
    try:
        return await function(*args)
    except Exception as error:
        # Resets, sockets and the library's own slips come out untyped; the stream is over in any case.
        raise StreamClosed(f"the stream broke: {error!r}"[:200]) from error


async def _whole(cut: Cut, function: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args) -> T:
    """Finish a call that writes, cancelled or not, or end its connection by `cut`."""
    import trio

    with trio.move_on_after(WRITE_SECONDS) as scope:
        scope.shield = True
        return await _ours(function, *args)
    with trio.move_on_after(WRITE_SECONDS) as scope:
        scope.shield = True
        await _ours(cut)
    raise StreamClosed("the peer takes no more bytes: its connection was given up")
