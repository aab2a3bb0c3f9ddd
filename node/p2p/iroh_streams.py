"""Connections and streams of the iroh transport, over the few foreign calls listed below.

iroh ends a forgotten send stream as if it were complete. Here a stream that was neither finished
nor aborted is reset when it is dropped, so half a message never looks like a whole one.
"""

import asyncio
import re
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from ...crypto.hashing import short
from ...protocol.version import KIB, MIB
from .transport import ConnectionLost, PathInfo, StreamClosed, TransportError

WRITE_PIECE = 256 * KIB
"""Bytes a foreign write: larger ones are slower (the binding copies, QUIC waits)."""
READ_PIECE = MIB
"""Bytes a foreign read. Memory is taken as data arrives, not as a peer announces it."""
READ_AHEAD = 64 * KIB
"""Of less than that, whatever has come is taken: a foreign read costs as much as 100 KiB of data."""
MAX_REASON = 256
CLOSED_CODE = 0
ABORTED_CODE = 1
SOURCE_PLACE = re.compile(r" \(/\S+:\d+:\d+\)$")
"""Where in iroh's own source an error arose: of no use to an operator."""

T = TypeVar("T")
Spawn = Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]
"""Starts a task that the transport owns: it ends at the latest with transport.close()."""


class _ForeignSend(Protocol):
    """iroh.SendStream."""

    async def write_all(self, buf: bytes) -> None: ...
    async def finish(self) -> None: ...
    async def reset(self, error_code: int) -> None: ...


class _ForeignReceive(Protocol):
    """iroh.RecvStream."""

    async def read(self, size_limit: int) -> bytes: ...
    async def read_exact(self, size: int) -> bytes: ...
    async def stop(self, error_code: int) -> None: ...


class _ForeignStream(Protocol):
    """iroh.BiStream."""

    def send(self) -> _ForeignSend: ...
    def recv(self) -> _ForeignReceive: ...


class _ForeignConnection(Protocol):
    """iroh.Connection."""

    def remote_id(self) -> Any: ...
    def alpn(self) -> bytes: ...
    def close(self, error_code: int, reason: bytes) -> None: ...
    def close_reason(self) -> str | None: ...
    def paths(self) -> list[Any]: ...
    def stats(self) -> Any: ...
    def set_max_concurrent_uni_streams(self, count: int) -> None: ...
    async def open_bi(self) -> Any: ...
    async def accept_bi(self) -> Any: ...


class IrohStream:
    """One bidirectional QUIC stream. Made by IrohConnection."""

    def __init__(self, connection: "IrohConnection", stream: _ForeignStream) -> None:
        self._connection = connection
        self._send = stream.send()
        self._receive = stream.recv()
        self._ahead = b""
        """What came behind what was asked for."""
        self._calls: set[asyncio.Task[Any]] = set()
        self._unusable = False
        self._unfinished = weakref.finalize(self, connection.reset_later, self._send)
        self._unfinished.atexit = False

    async def read_exact(self, size: int) -> bytes:
        """Exactly `size` bytes, or StreamClosed."""
        pieces, self._ahead = [self._ahead[:size]], self._ahead[size:]
        left = size - len(pieces[0])
        while left:
            pieces.append(await self._read(left))
            left -= len(pieces[-1])
        return b"".join(pieces)

    async def _read(self, size: int) -> bytes:
        """Up to `size` bytes; what came with them is kept."""
        if size >= READ_AHEAD:
            return await self._call(self._receive.read_exact(min(READ_PIECE, size)))
        data = await self._call(self._receive.read(READ_AHEAD))
        if not data:
            raise StreamClosed("the peer ended the stream before the bytes asked for came")
        self._ahead = data[size:]
        return data[:size]

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; waits for flow control."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), WRITE_PIECE):
            await self._call(self._send.write_all(bytes(view[start : start + WRITE_PIECE])))

    async def finish(self) -> None:
        """End our direction."""
        await self._call(self._send.finish())
        self._unfinished.detach()

    async def abort(self) -> None:
        """Reset what was not finished, and refuse what the peer still sends."""
        self._unusable = True
        calls = tuple(self._calls)
        for call in calls:
            call.cancel()  # reset() would queue behind a write that waits for the peer
        if calls:
            await asyncio.wait(calls)
        with suppress(self._connection.foreign_error):
            if self._unfinished.alive:
                await self._send.reset(ABORTED_CODE)
                self._unfinished.detach()
        with suppress(self._connection.foreign_error):
            await self._receive.stop(ABORTED_CODE)

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a foreign call so that abort() can end it, and translate its error."""
        if self._unusable:
            call.close()
            raise StreamClosed("an earlier call was cancelled or the stream aborted: open another")
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        try:
            return await task
        except self._connection.foreign_error as error:
            raise self._connection.failure(error) from error
        except asyncio.CancelledError:
            if self._unusable and not _was_cancelled():
                raise StreamClosed("the stream was aborted on our side") from None
            self._unusable = True
            raise
        finally:
            self._calls.discard(task)


class IrohConnection:
    """One QUIC connection. Made by IrohTransport."""

    def __init__(
        self, connection: _ForeignConnection, *, foreign_error: type[Exception], spawn: Spawn
    ) -> None:
        self.foreign_error = foreign_error
        self._connection = connection
        self._spawn = spawn
        self._peer: bytes = connection.remote_id().to_bytes()
        self._alpn = connection.alpn()
        self._accepting: asyncio.Task[Any] | None = None
        self._accept_turn = asyncio.Lock()
        self._heard = (0, 0.0)
        self._loop = asyncio.get_running_loop()
        connection.set_max_concurrent_uni_streams(0)  # nobody here reads those

    @property
    def peer(self) -> bytes:
        """The NodeId that the TLS handshake proved."""
        return self._peer

    @property
    def alpn(self) -> bytes:
        """The protocol that both sides agreed on."""
        return self._alpn

    @property
    def closed(self) -> bool:
        """Whether either side closed it or it timed out."""
        return self._connection.close_reason() is not None

    @property
    def address(self) -> str:
        """`host:port` of the peer; empty over a relay, or when the connection is gone."""
        return next((path.remote_addr for path in self._connection.paths() if path.is_ip), "")

    async def open_stream(self) -> IrohStream:
        """A new stream; waits while the peer's stream limit (100) is reached."""
        try:
            return IrohStream(self, await self._connection.open_bi())
        except self.foreign_error as error:
            raise self.failure(error) from error

    async def accept_stream(self) -> IrohStream:
        """The next stream that the peer opened. May be cancelled and called again at no loss."""
        async with self._accept_turn:
            # A cancelled accept_bi() may have taken a stream with it: the call outlives its caller.
            if self._accepting is None:
                self._accepting = self._spawn(self._connection.accept_bi())
            try:
                stream = await asyncio.shield(self._accepting)
            except self.foreign_error as error:
                raise self._lost(cause(error)) from error
            except asyncio.CancelledError:
                if self._accepting.cancelled() and not _was_cancelled():
                    raise self._lost("our transport was closed") from None
                raise
            self._accepting = None
            return IrohStream(self, stream)

    def path(self) -> PathInfo:
        """The selected path; the counters are UDP bytes, so headers and handshake count."""
        stats = self._connection.stats()
        selected = next((path for path in self._connection.paths() if path.is_selected), None)
        remote = ""
        if selected is not None and selected.is_ip:
            remote = str(selected.remote_addr).rpartition(":")[0].strip("[]")
        return PathInfo(
            kind="relayed" if selected is not None and selected.is_relay else "direct",
            remote=remote,
            rtt_ms=None if selected is None or self.closed else float(selected.rtt_ms),
            bytes_sent=stats.udp_tx_bytes,
            bytes_received=stats.udp_rx_bytes,
        )

    async def close(self, reason: str = "") -> None:
        """Close the connection; the peer reads `reason`. Data not yet acknowledged is lost."""
        with suppress(self.foreign_error):
            self._connection.close(CLOSED_CODE, reason.encode()[:MAX_REASON])

    def silent_s(self, now: float) -> float:
        """Seconds since the last call of this method that found something new received."""
        received: int = self._connection.stats().udp_rx_datagrams
        if received != self._heard[0]:
            self._heard = (received, now)
        return now - self._heard[1]

    def failure(self, error: Exception) -> TransportError:
        """What a failed call on this connection or its streams means to us."""
        if self.closed:
            return self._lost(cause(error))
        return StreamClosed(f"{short(self._peer)} ended the stream: {cause(error)}")

    def reset_later(self, send: _ForeignSend) -> None:
        """Reset a stream that its owner forgot. Called by the garbage collector, in any thread."""
        with suppress(RuntimeError):  # the loop is closed, and with it every stream
            self._loop.call_soon_threadsafe(self._reset, send)

    def _reset(self, send: _ForeignSend) -> None:
        if not self.closed:
            self._spawn(send.reset(ABORTED_CODE))

    def _lost(self, why: str) -> ConnectionLost:
        return ConnectionLost(f"the connection to {short(self._peer)} is gone: {why}")


def cause(error: Exception) -> str:
    """The innermost cause of a foreign error, without its way through foreign source files."""
    message = getattr(error, "message", str)
    lines = str(message() or error).strip().splitlines()
    debug = getattr(error, "debug_message", None)
    if len(lines) == 1 and debug is not None:
        _, _, causes = str(debug()).partition("Caused by:\n")
        lines += causes.partition("\n\n")[0].splitlines()
    return SOURCE_PLACE.sub("", lines[-1]).strip() if lines else type(error).__name__


def _was_cancelled() -> bool:
    """Whether somebody cancelled the current task, rather than the call that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
