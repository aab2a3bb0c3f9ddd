"""Outgoing connections: one per peer and ALPN, dialled when needed, with back-off after a failure."""

import asyncio
import logging
import time
from typing import TypeVar

from ...protocol.messages import Message
from .peers import PeerTable
from .rpc import TooSlow, ask
from .transport import Connection, Transport, TransportError, Unreachable

logger = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 4.0

T = TypeVar("T")


class Links:
    """A pool of connections that we dialled."""

    def __init__(self, transport: Transport, peers: PeerTable, *, connect_timeout_s: float) -> None:
        self._transport = transport
        self._peers = peers
        self._timeout = connect_timeout_s
        self._open: dict[tuple[bytes, bytes], Connection] = {}
        self._locks: dict[tuple[bytes, bytes], asyncio.Lock] = {}
        self._failures: dict[bytes, tuple[int, float]] = {}

    async def get(self, peer: bytes, alpn: bytes, *, patience: float | None = None) -> Connection:
        """A live connection to `peer`, dialled for at most `patience` seconds (default: the configured time).

        Raises Unreachable, at once while it backs off.
        """
        key = (peer, alpn)
        async with self._locks.setdefault(key, asyncio.Lock()):
            connection = self._open.get(key)
            if connection is not None and not connection.closed:
                return connection
            await self.drop(peer, alpn)
            return await self._dial(peer, alpn, min(patience or self._timeout, self._timeout))

    async def request(
        self, peer: bytes, alpn: bytes, message: Message, kind: type[T], *, deadline: float
    ) -> T:
        """ask() over the pool; a connection that failed is dropped so that the next call dials anew."""
        connection = await self.get(peer, alpn)
        try:
            reply = await ask(connection, message, kind, deadline=deadline)
        except TooSlow:
            self._peers.failed(peer)
            raise
        except TransportError:
            await self.drop(peer, alpn)
            self._peers.failed(peer)
            raise
        self._peers.seen(peer)
        return reply

    async def drop(self, peer: bytes, alpn: bytes) -> None:
        """Close and forget a connection."""
        connection = self._open.pop((peer, alpn), None)
        if connection is not None:
            self._peers.disconnected(peer, connection)
            await connection.close()

    async def close(self) -> None:
        """Close all."""
        for peer, alpn in list(self._open):
            await self.drop(peer, alpn)

    async def _dial(self, peer: bytes, alpn: bytes, deadline: float) -> Connection:
        count, until = self._failures.get(peer, (0, 0.0))
        if time.monotonic() < until:
            raise Unreachable("backing off after a failed connection")
        addresses = self._peers.get(peer).addresses
        try:
            connection = await self._transport.connect(peer, addresses, alpn, deadline=deadline)
        except TransportError:
            pause = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**count)
            self._failures[peer] = (count + 1, time.monotonic() + pause)
            raise
        self._failures.pop(peer, None)
        self._open[(peer, alpn)] = connection
        self._peers.connected(peer, connection)
        return connection
