"""What HTTP servers of a node have in common: local callers, headers of replies, bounds of connections."""

import asyncio
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..config.serving import is_loopback

if TYPE_CHECKING:
    from aiohttp import web


def is_local(host: str) -> bool:
    """Return whether a Host header names this machine; a foreign page's name may lead here (DNS rebinding)."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


async def hide_libraries(request: "web.Request", response: "web.StreamResponse") -> None:
    """Replace the Server header, which names libraries and their versions."""
    response.headers["Server"] = "primerl-node"


class Connections:
    """Connections of an HTTP server, bounded in number and in the time that one may go without a whole request.

    Where there are too many, the oldest one without a request ends, of the address that has most: nobody takes
    the places of all. What was sent and not read when a connection's time is up is dropped.
    """

    def __init__(self, most: int, idle_s: float) -> None:
        self._most, self._idle_s = most, idle_s
        self._addresses: dict[asyncio.BaseTransport, str] = {}
        """Of all connections."""
        self._idle: dict[asyncio.BaseTransport, float] = {}
        """Those that ask nothing, by the time of the event loop at which they end; the oldest first."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._addresses)

    def bounded(self, protocol: asyncio.Protocol) -> asyncio.Protocol:
        """Return what to connect in the place of `protocol`, a server's for one new connection."""
        return _Bounded(self, protocol)

    def opened(self, transport: asyncio.Transport) -> None:
        """Count a new connection; where there are too many, one ends."""
        self._addresses[transport] = caller_address(transport)
        self._wait(transport)
        if len(self) > self._most:
            counts = Counter(self._addresses.values())
            self._end(max(self._idle, key=lambda each: counts[self._addresses[each]]))

    def lost(self, transport: asyncio.BaseTransport) -> None:
        """Forget a connection."""
        self._addresses.pop(transport, None)
        self._idle.pop(transport, None)

    @contextmanager
    def request(self, transport: asyncio.BaseTransport | None) -> Generator[None]:
        """Let a connection be while its request is answered."""
        if transport is not None:
            self._idle.pop(transport, None)
        try:
            yield
        finally:
            if transport is not None and transport in self._addresses:
                self._wait(transport)

    def _wait(self, transport: asyncio.BaseTransport) -> None:
        loop = asyncio.get_running_loop()
        self._idle[transport] = loop.time() + self._idle_s
        self._timer = self._timer or loop.call_later(self._idle_s, self._expire)

    def _expire(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        while self._idle:
            transport, until = next(iter(self._idle.items()))
            if until > loop.time():
                self._timer = loop.call_at(until, self._expire)
                return
            self._end(transport)

    def _end(self, transport: asyncio.BaseTransport) -> None:
        self.lost(transport)
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class _Bounded(asyncio.Protocol):
    """A protocol whose connection is counted."""

    def __init__(self, connections: Connections, protocol: asyncio.Protocol) -> None:
        self._connections, self._protocol = connections, protocol
        self._transport: asyncio.Transport | None = None
        self.data_received = protocol.data_received
        self.eof_received = protocol.eof_received
        self.pause_writing = protocol.pause_writing
        self.resume_writing = protocol.resume_writing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.opened(transport)
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._transport is not None  # it was made
        self._connections.lost(self._transport)
        self._protocol.connection_lost(exc)


def caller_address(transport: asyncio.BaseTransport) -> str:
    """Return a caller's address; of IPv6 the network of 64 bits, which one machine may have to itself."""
    name: Any = transport.get_extra_info("peername")
    address = (
        ip_address(name[0].partition("%")[0]) if name else ip_address(0)
    )  # it has gone already
    if address.version == 6 and address.ipv4_mapped is None:
        return str(ip_network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)
