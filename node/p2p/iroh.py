"""The iroh transport: QUIC between nodes named by their Ed25519 keys.

Only this file imports iroh. No IrohError leaves it: each is translated once.
"""

import asyncio
import ctypes
import errno
import logging
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from ipaddress import ip_address
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from ...crypto.hashing import short
from ...crypto.keys import SecretKey
from ...protocol.recent import RecentDict
from ...protocol.version import KIB, MAX_ADDRESSES, MIB
from ..tasks import end_tasks
from .limits import TokenBuckets, network_of
from .transport import (
    AddressInUse,
    Connection,
    ConnectionLost,
    PathInfo,
    StreamClosed,
    TransportError,
    Unreachable,
)

if TYPE_CHECKING:
    import iroh


def write_whole(builder: Any, value: bytes) -> None:
    """Append `value` to the builder's native buffer in one copy.

    Replaces a loop of the binding with the same contract: on entry _reserve() makes room for that many bytes
    behind rbuf.len, on exit rbuf.len is moved past them.
    """
    size = len(value)
    with builder._reserve(size):
        start = ctypes.cast(builder.rbuf.data, ctypes.c_void_p).value
        if size and start is not None:
            ctypes.memmove(start + builder.rbuf.len, bytes(value), size)


def install_fast_bytes(binding: Any) -> None:
    """Replace the slow copy in `binding` (the module iroh.iroh_ffi). Calling it twice is harmless.

    Raises AttributeError if this release of iroh has no such class: look at it anew.
    """
    builder = binding._UniffiRustBufferBuilder
    if not hasattr(builder, "_reserve") or not hasattr(builder, "write"):
        raise AttributeError("iroh's buffer builder changed: check iroh.py against it")
    builder.write = write_whole


NAME = "iroh frees"

_dropped: "SimpleQueue[tuple[Callable[[Any], None], Any]]" = SimpleQueue()
"""(function that frees it, the object). put() takes no lock of Python: it is made for destructors."""


def install_free_thread(binding: Any) -> None:
    """Let one thread free the objects of `binding` (the module iroh.iroh_ffi). Calling it twice is harmless.

    Raises AttributeError if this release of iroh frees in another way: look at it anew.
    """
    if hasattr(binding, "_primerl_frees"):
        return
    owned = [kind for kind in vars(binding).values() if _is_owned(kind)]
    if not owned:
        raise AttributeError("iroh's objects changed: check iroh.py against them")
    for kind in owned:
        kind.__del__ = _deferred(kind.__del__)
    binding._primerl_frees = threading.Thread(target=_free_all, name=NAME, daemon=True)
    binding._primerl_frees.start()


def _is_owned(kind: Any) -> bool:
    """Return whether instances own an object in Rust. Errors do too, but freeing them waits for nothing."""
    return isinstance(kind, type) and "__del__" in vars(kind) and not issubclass(kind, Exception)


def _deferred(free: Callable[[Any], None]) -> Callable[[Any], None]:
    def __del__(self: Any) -> None:
        _dropped.put(
            (free, self)
        )  # Python calls this once: the object goes as soon as it is out of the queue

    return __del__


def _free_all() -> None:
    while True:
        free, dropped = _dropped.get()
        free(dropped)
        del free, dropped  # not kept until the next one comes


WRITE_PIECE = 256 * KIB
"""Bytes per foreign write: larger ones are slower (the binding copies, QUIC waits)."""
READ_PIECE = MIB
"""Bytes per foreign read. Memory is allocated as data arrives, not as a peer announces it."""
READ_AHEAD = 64 * KIB
"""Reads of less than this return any data that is there: a foreign call costs as much as 100 KiB of data."""
MAX_REASON = 256
ANSWER_LOOK_S = 0.02
"""Seconds between two checks of a connection that should show a sign of life."""
CLOSED_CODE = 0
ABORTED_CODE = 1
LOST = re.compile(
    r'ConnectionLost\((?:(LocallyClosed|TimedOut|Reset)|ApplicationClosed\(.* reason: b"(.*)" \}\))\)'
)
"""The library's own text for the end of a connection."""
ENDS = {
    "LocallyClosed": "this node closed it",
    "TimedOut": "it fell silent",
    "Reset": "the other side knows it no more",
}
SOURCE_PLACE = re.compile(r" \(/\S+:\d+:\d+\)$")
"""Matches the place in iroh's source that its errors name, which does not help an operator."""

T = TypeVar("T")
Spawn = Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]
"""Start a task that the transport owns: it ends at the latest with transport.close()."""


class IrohStream:
    """One bidirectional QUIC stream. Made by IrohConnection."""

    def __init__(self, connection: "IrohConnection", stream: "iroh.BiStream") -> None:
        self._connection = connection
        self._send = stream.send()
        self._receive = stream.recv()
        self._ahead = b""
        """Bytes received beyond those requested."""
        self._calls: set[asyncio.Task[Any]] = set()
        self._unusable = False
        self._unfinished = weakref.finalize(self, connection.reset_later, self._send)
        self._unfinished.atexit = False

    async def read_exact(self, size: int) -> bytes:
        """Read exactly `size` bytes. Raises StreamClosed."""
        pieces, self._ahead = [self._ahead[:size]], self._ahead[size:]
        remaining = size - len(pieces[0])
        while remaining:
            pieces.append(await self._read(remaining))
            remaining -= len(pieces[-1])
        return b"".join(pieces)

    async def _read(self, size: int) -> bytes:
        """Read up to `size` bytes, and keep further bytes that arrived with them."""
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
        """Reset our direction if it is unfinished, and refuse further bytes of the peer."""
        self._unusable = True
        await end_tasks(*self._calls)  # reset() would queue behind a write that waits for the peer
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
        self, connection: "iroh.Connection", *, foreign_error: type[Exception], spawn: Spawn
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
        self.accepted_from = ""
        """`host:port` that the handshake came from; empty over a relay, or if this side dialed."""
        connection.set_max_concurrent_uni_streams(0)  # we read none of those

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

    async def open_stream(self) -> IrohStream:
        """Open a stream; waits while the peer's stream limit (100) is reached."""
        try:
            return IrohStream(self, await self._connection.open_bi())
        except self.foreign_error as error:
            raise self.failure(error) from error

    async def accept_stream(self) -> IrohStream:
        """Accept the next stream that the peer opened. Cancelling it loses nothing."""
        async with self._accept_turn:
            # A cancelled accept_bi() may have taken a stream with it: the call outlives its caller.
            if self._accepting is None:
                self._accepting = self._spawn(self._connection.accept_bi())
            try:
                stream = await asyncio.shield(self._accepting)
            except self.foreign_error as error:
                # Its error knows this frame: in a circle the connection would stay for hours.
                self._accepting = None
                raise self._lost(cause(error)) from error
            except asyncio.CancelledError:
                if self._accepting.cancelled() and not _was_cancelled():
                    raise self._lost("our transport was closed") from None
                raise
            self._accepting = None
            return IrohStream(self, stream)

    def path(self) -> PathInfo:
        """Describe the selected path; the counters are UDP bytes, so they include headers and handshake."""
        stats = self._connection.stats()
        selected = next((path for path in self._connection.paths() if path.is_selected), None)
        hint = ""
        if selected is not None and selected.is_ip:
            hint = str(selected.remote_addr)
        elif selected is None:  # iroh selects paths by peer: a second connection of a key has none
            hint = self.accepted_from
        remote, _, port = hint.rpartition(":")
        return PathInfo(
            kind="relayed" if selected is not None and selected.is_relay else "direct",
            remote=remote.strip("[]"),
            port=int(port) if port.isdecimal() else 0,
            mtu=0 if selected is None else selected.stats.current_mtu,
            rtt_ms=None if selected is None or self.closed else float(selected.rtt_ms),
            bytes_sent=stats.udp_tx_bytes,
            bytes_received=stats.udp_rx_bytes,
        )

    async def answers(self, within: float) -> bool:
        """Return whether the peer acknowledges a packet.

        A datagram takes no stream of the peer's limit, and nobody has to read it there.
        """
        received = self._connection.stats().udp_rx_datagrams
        with suppress(self.foreign_error, TimeoutError):
            async with asyncio.timeout(within):
                self._connection.send_datagram(b"\0")
                while not self.closed:
                    if self._connection.stats().udp_rx_datagrams != received:
                        return not self.closed
                    await asyncio.sleep(ANSWER_LOOK_S)
        return False

    async def close(self, reason: str = "") -> None:
        """Close the connection; the peer reads `reason`. Data not yet acknowledged is lost."""
        with suppress(self.foreign_error):
            self._connection.close(CLOSED_CODE, reason.encode()[:MAX_REASON])

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last call of this method that found something new received."""
        received: int = self._connection.stats().udp_rx_datagrams
        if received != self._heard[0]:
            self._heard = (received, now)
        return now - self._heard[1]

    def failure(self, error: Exception) -> TransportError:
        """Translate an error of a call on this connection or its streams."""
        if self.closed:
            return self._lost(cause(error))
        return StreamClosed(f"{short(self._peer)} ended the stream: {cause(error)}")

    def reset_later(self, send: "iroh.SendStream") -> None:
        """Reset a stream that its owner forgot. Called by the garbage collector, in any thread."""
        with suppress(RuntimeError):  # the loop is closed, and with it every stream
            self._loop.call_soon_threadsafe(self._reset, send)

    def _reset(self, send: "iroh.SendStream") -> None:
        if not self.closed:
            self._spawn(send.reset(ABORTED_CODE))

    def _lost(self, why: str) -> ConnectionLost:
        return ConnectionLost(f"the connection to {short(self._peer)} is gone: {why}")


def cause(error: Exception) -> str:
    """Return the innermost cause of a foreign error, without the foreign file names around it."""
    message = getattr(error, "message", str)
    lines = str(message() or error).strip().splitlines()
    debug = getattr(error, "debug_message", None)
    if len(lines) == 1 and debug is not None:
        _, _, causes = str(debug()).partition("Caused by:\n")
        lines += causes.partition("\n\n")[0].splitlines()
    text = SOURCE_PLACE.sub("", lines[-1]).strip() if lines else type(error).__name__
    if lost := LOST.fullmatch(text):
        return ENDS.get(lost[1] or "") or lost[2] or "the other side closed it"
    return text


def _was_cancelled() -> bool:
    """Return whether the current task was cancelled, rather than the call that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


logger = logging.getLogger(__name__)

BACKLOG = 256
"""Connections that may wait for accept(); further ones are closed."""
HANDSHAKE_S = 10.0
HANDSHAKES_PER_SECOND, HANDSHAKE_BURST = 40.0, 256.0
NETWORK_HANDSHAKES_PER_SECOND, NETWORK_HANDSHAKE_BURST = 10.0, 128.0
"""Handshakes of all networks, and of one network: a refusal costs far less than a handshake."""
MAX_PREFERRED = 1024
"""Addresses exempt from these limits."""
CLOSE_S = 1.0
"""Closing tells the peers at once; iroh would wait 3 s more for a peer that never answers."""
RELAY_S = 5.0
"""Seconds for which start() waits for a relay before it goes on without one."""
RESOLVE_S = 3.0
"""Seconds for which connect() waits for the names among its hints to be resolved."""
SILENCE_S = 12.0
"""A living peer sends a keep-alive every 5 s; iroh itself would wait 30 s and more."""


class IrohTransport:
    """One node's QUIC endpoint. start() binds, close() closes all its connections.

    `host` is an IP address: 0.0.0.0 listens everywhere, any other IPv4 address on that one alone. Relays are
    used only if they are in `relay_urls`. At most `max_handshakes` handshakes run at a time, and twice as many
    including those from preferred addresses. A connection without data for `silence_s` seconds is closed.
    """

    def __init__(
        self,
        key: SecretKey,
        *,
        host: str,
        port: int,
        alpns: Sequence[bytes],
        relay_urls: Sequence[str] = (),
        max_handshakes: int = 256,
        silence_s: float = SILENCE_S,
        relay_wait_s: float = RELAY_S,
    ) -> None:
        self._key = key
        self._host = host
        self._port = port
        self._alpns = list(alpns)
        self._relay_urls = {url.rstrip("/") for url in relay_urls}
        self._max_handshakes = max_handshakes
        self._silence_s = silence_s
        self._relay_wait_s = relay_wait_s
        self._endpoint: iroh.Endpoint | None = None
        self._iroh_error: type[Exception] = TransportError
        self._closed = False
        self._handshakes = 0
        self._handshaker: asyncio.AbstractEventLoop | None = None
        """Event loop for handshakes, in a thread of its own."""
        self._rate = TokenBuckets(HANDSHAKES_PER_SECOND, HANDSHAKE_BURST, limit=1)
        self._network_rate = TokenBuckets(
            NETWORK_HANDSHAKES_PER_SECOND, NETWORK_HANDSHAKE_BURST, limit=4096
        )
        self._preferred = RecentDict[str, None](MAX_PREFERRED)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._connections: weakref.WeakSet[IrohConnection] = weakref.WeakSet()
        self._incoming: asyncio.Queue[IrohConnection | None] = asyncio.Queue(BACKLOG + 1)
        """None ends it."""

    @property
    def node_id(self) -> bytes:
        """Our own NodeId."""
        return self._key.node_id

    async def start(self) -> None:
        """Bind the UDP port and begin to accept connections.

        Raises AddressInUse if another program has the port; TransportError if `host` is not an address of this
        machine, or the endpoint was started before.
        """
        if self._endpoint is not None or self._closed:
            raise TransportError("an IrohTransport starts once: make a new one")
        binding = _binding()
        self._iroh_error = binding.IrohError
        try:
            endpoint = await self._builder(binding).bind()
        except binding.IrohError as error:
            raise self._bind_failure(cause(error)) from error
        self._endpoint = endpoint
        self._handshaker = asyncio.new_event_loop()
        threading.Thread(
            target=_run, args=(self._handshaker,), name="handshakes", daemon=True
        ).start()
        self._spawn(self._accept_all(endpoint))
        self._spawn(self._watch_silence())
        if self._relay_urls:
            await self._wait_for_relay(endpoint)

    def addresses(self) -> tuple[str, ...]:
        """List `host:port` of every usable interface, IPv4 first, then our relay if it answers."""
        endpoint = self._started()
        known = endpoint.addr()
        usable = [hint for hint in known.direct_addresses() if _usable(hint, self._host)]
        if not usable:  # offline: programs on this machine still reach us
            usable = [f"127.0.0.1:{_port(hint)}" for hint in endpoint.bound_sockets()[:1]]
        relay = known.relay_url()
        return (*sorted(usable, key=lambda hint: hint.startswith("[")), *([relay] if relay else []))

    async def connect(
        self, peer: bytes, addresses: Sequence[str], alpn: bytes, *, deadline: float
    ) -> IrohConnection:
        """Connect to `peer` within `deadline` seconds. Raises Unreachable.

        Hints that cannot be read are skipped. Addresses that led to `peer` before are tried too.
        """
        if self._closed:
            raise Unreachable("our own transport is closed: start a new one")
        endpoint = self._started()
        try:
            async with asyncio.timeout(deadline):
                target = await self._target(peer, addresses)
                return self._adopt(await endpoint.connect(target, alpn))
        except TimeoutError as error:
            raise Unreachable(
                f"{short(peer)} did not answer within {deadline:g} s: is the node up, and UDP open?"
            ) from error
        except self._iroh_error as error:
            raise Unreachable(f"cannot connect to {short(peer)}: {cause(error)}") from error

    async def accept(self) -> IrohConnection:
        """Accept the next incoming connection, handshake done."""
        connection = await self._incoming.get()
        if connection is None:
            self._incoming.put_nowait(None)  # for others that accept, and for the next call
            raise ConnectionLost("the transport is closed: no more connections will come")
        return connection

    def prefer(self, connection: Connection) -> None:
        """Exempt the address that this connection came from from the limit of handshakes by time."""
        address = connection.accepted_from if isinstance(connection, IrohConnection) else ""
        if address:
            self._preferred[address] = None

    async def close(self) -> None:
        """Close every connection, then the endpoint. Takes at most CLOSE_S seconds."""
        if self._closed:
            return
        self._closed = True
        self._end_incoming()
        try:
            await self._close_endpoint()
        finally:
            self._endpoint = None  # iroh frees the port with the last reference to the endpoint
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._handshaker is not None:
            ended = asyncio.run_coroutine_threadsafe(_cancel_others(), self._handshaker)
            await asyncio.wrap_future(ended)
            self._handshaker.call_soon_threadsafe(self._handshaker.stop)

    async def _close_endpoint(self) -> None:
        if self._endpoint is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._endpoint.close()
        except (TimeoutError, self._iroh_error) as error:
            logger.debug("the endpoint was dropped before it had closed: %s", cause(error))

    def _builder(self, binding: Any) -> "iroh.EndpointBuilder":
        builder: iroh.EndpointBuilder = binding.EndpointBuilder()
        builder.apply_minimal()
        builder.secret_key(self._key.seed())
        builder.alpns(self._alpns)
        for address in _bind_addresses(self._host, self._port):
            builder.bind_addr(address)
        relays = binding.RelayMode
        builder.relay_mode(
            relays.custom_from_urls(sorted(self._relay_urls))
            if self._relay_urls
            else relays.disabled()
        )
        return builder

    def _bind_failure(self, why: str) -> TransportError:
        where = f"UDP {self._host}:{self._port}"
        if f"os error {errno.EADDRINUSE}" in why:
            return AddressInUse(
                f"{where} is taken by another program: stop it, or choose another --network.port"
            )
        return TransportError(f"cannot listen on {where}: {why}; check network.host and port")

    async def _wait_for_relay(self, endpoint: "iroh.Endpoint") -> None:
        try:
            async with asyncio.timeout(self._relay_wait_s):
                await endpoint.online()
        except TimeoutError:
            logger.warning("no relay answered yet: check network.relay_urls; going on without")

    async def _accept_all(self, endpoint: "iroh.Endpoint") -> None:
        try:
            while (incoming := await endpoint.accept_next()) is not None:
                address = await self._address_of(incoming)
                if not self._admits(address, time.monotonic()):
                    await self._refuse(incoming)
                    continue
                self._handshakes += 1
                self._spawn(self._handshake(incoming, address))
        finally:
            self._end_incoming()

    def _end_incoming(self) -> None:
        """Drop the connections that were not accepted; their endpoint ends them."""
        while not self._incoming.empty():
            self._incoming.get_nowait()
        self._incoming.put_nowait(None)

    async def _address_of(self, incoming: "iroh.Incoming") -> str:
        """Return the `host:port` that a handshake comes from; empty if it comes over a relay."""
        try:
            address = await incoming.remote_addr()
        except self._iroh_error:
            return ""
        return str(getattr(address, "addr", ""))

    def _admits(self, address: str, now: float) -> bool:
        """Return whether to continue a handshake from `address`."""
        if address in self._preferred:
            return self._handshakes < 2 * self._max_handshakes
        if self._handshakes >= self._max_handshakes:
            return False
        network = network_of(address.rpartition(":")[0].strip("[]"))
        own = not network or self._network_rate.take(network.encode(), now)
        return own and self._rate.take(b"", now)

    async def _refuse(self, incoming: "iroh.Incoming") -> None:
        try:
            await incoming.refuse()
        except self._iroh_error as error:
            logger.debug("refusing a handshake failed: %s", cause(error))

    async def _handshake(self, incoming: "iroh.Incoming", address: str) -> None:
        """Complete one handshake. Its failure concerns that peer only."""
        assert self._handshaker is not None
        work = asyncio.run_coroutine_threadsafe(_shake_hands(incoming), self._handshaker)
        try:
            connection = self._adopt(await asyncio.wrap_future(work))
            connection.accepted_from = address
        except (TimeoutError, self._iroh_error) as error:
            logger.debug("an incoming handshake failed: %s", cause(error))
            return
        finally:
            self._handshakes -= 1
        if not self._closed and self._incoming.qsize() < BACKLOG:
            self._incoming.put_nowait(connection)
        else:
            await connection.close("busy: try again later")

    async def _watch_silence(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._silence_s / 4)
            for connection in list(self._connections):
                if connection.closed:
                    self._connections.discard(connection)
                elif connection.silent_s(loop.time()) > self._silence_s:
                    logger.info("%s fell silent: closing", short(connection.peer))
                    await connection.close("silent for too long")

    async def _target(self, peer: bytes, addresses: Sequence[str]) -> "iroh.EndpointAddr":
        binding = _binding()
        hints = addresses[:MAX_ADDRESSES]
        relays = (hint for hint in hints if hint.rstrip("/") in self._relay_urls)
        resolved = await asyncio.gather(*(_resolve(hint) for hint in hints if "://" not in hint))
        direct = [address for of_hint in resolved for address in of_hint]
        return binding.EndpointAddr(
            binding.EndpointId.from_bytes(peer), next(relays, None), direct[:MAX_ADDRESSES]
        )

    def _adopt(self, connection: "iroh.Connection") -> IrohConnection:
        adopted = IrohConnection(connection, foreign_error=self._iroh_error, spawn=self._spawn)
        adopted.silent_s(asyncio.get_running_loop().time())
        self._connections.add(adopted)
        return adopted

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, self._iroh_error):
            logger.error("a task of the transport failed", exc_info=error)

    def _started(self) -> "iroh.Endpoint":
        if self._endpoint is None:
            raise TransportError("the transport is closed or was never started: await start()")
        return self._endpoint


def _binding() -> Any:
    """Load the iroh module and repair it; loading takes a fifth of a second."""
    import iroh
    from iroh import iroh_ffi

    install_fast_bytes(iroh_ffi)
    install_free_thread(iroh_ffi)
    return iroh


async def _shake_hands(incoming: "iroh.Incoming") -> "iroh.Connection":
    """Do a handshake in a thread of its own: iroh computes in the calling thread, milliseconds each time."""
    async with asyncio.timeout(HANDSHAKE_S):
        accepting = await incoming.accept()
        return await accepting.connect()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _cancel_others() -> None:
    """End everything else that this event loop runs."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _bind_addresses(host: str, port: int) -> list[str]:
    """Choose the addresses for iroh to bind: by default it listens on all of IPv6 beside one IPv4 address."""
    try:
        address = ip_address(host)
    except ValueError as error:
        raise TransportError(
            f"network.host must be an IP address such as 0.0.0.0 or 127.0.0.1, not {host!r}"
        ) from error
    own = f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
    if address.is_unspecified:
        return [own]
    if address.version == 6:
        return [own, "127.0.0.1:0"]
    return [own, "[::1]:0"] if _has_ipv6_loopback() else [own]


def _has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _usable(hint: str, host: str) -> bool:
    """Return whether others can use a bound address: `host` if that is an address, else any routable one."""
    address, bound = ip_address(hint.rpartition(":")[0].strip("[]")), ip_address(host)
    return not address.is_link_local if bound.is_unspecified else address == bound


def _port(hint: str) -> str:
    return hint.rpartition(":")[2]


async def _resolve(hint: str) -> list[str]:
    """Resolve one `host:port` hint to socket addresses; none if it cannot be read or resolved."""
    host, _, port = hint.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return []
    try:
        address = ip_address(host.strip("[]"))
        return [f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"]
    except ValueError:
        return await _look_up(host, int(port))


async def _look_up(host: str, port: int) -> list[str]:
    try:
        async with asyncio.timeout(RESOLVE_S):
            results = await asyncio.get_running_loop().getaddrinfo(
                host, port, family=socket.AF_INET, type=socket.SOCK_DGRAM
            )
    except (OSError, UnicodeError, TimeoutError) as error:
        logger.debug("cannot resolve the hint %s:%d: %s", host, port, error)
        return []
    return [f"{address[4][0]}:{port}" for address in results]
