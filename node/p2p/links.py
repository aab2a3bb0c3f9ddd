"""Outgoing connections: dialled when needed, with back-off after a failure.

One per peer, ALPN and lane: lane 0 carries everything, further lanes only bulk, because the streams of one
connection share one congestion window and a lossy path keeps that small.
"""

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

Key = tuple[bytes, bytes, int]
"""Peer, ALPN, lane."""


class Links:
    """A pool of connections that we dialled."""

    def __init__(self, transport: Transport, peers: PeerTable, *, connect_timeout_s: float) -> None:
        self._transport = transport
        self._peers = peers
        self._timeout = connect_timeout_s
        self._open: dict[Key, Connection] = {}
        self._locks: dict[Key, asyncio.Lock] = {}
        self._failures: dict[tuple[bytes, int], tuple[int, float]] = {}

    async def get(
        self, peer: bytes, alpn: bytes, *, patience: float | None = None, lane: int = 0
    ) -> Connection:
        """A live connection to `peer`, dialled for at most `patience` seconds (default: the configured time).

        Raises Unreachable, at once while it backs off.
        """
        key = (peer, alpn, lane)
        async with self._locks.setdefault(key, asyncio.Lock()):
            connection = self._open.get(key)
            if connection is not None and not connection.closed:
                return connection
            await self.drop(peer, alpn, lane=lane)
            return await self._dial(key, min(patience or self._timeout, self._timeout))

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

    async def drop(self, peer: bytes, alpn: bytes, *, lane: int = 0) -> None:
        """Close and forget a connection."""
        connection = self._open.pop((peer, alpn, lane), None)
        if connection is not None:
            self._peers.disconnected(peer, connection)
            await connection.close()

    async def close(self) -> None:
        """Close all."""
        for peer, alpn, lane in list(self._open):
            await self.drop(peer, alpn, lane=lane)

    async def _dial(self, key: Key, deadline: float) -> Connection:
        peer, alpn, lane = key
        # A peer that takes no second connection still has its first: lanes back off by themselves.
        count, until = self._failures.get((peer, lane), (0, 0.0))
        if time.monotonic() < until:
            raise Unreachable("backing off after a failed connection")
        addresses = self._peers.get(peer).addresses
        try:
            connection = await self._transport.connect(peer, addresses, alpn, deadline=deadline)
        except TransportError:
            pause = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**count)
            self._failures[peer, lane] = (count + 1, time.monotonic() + pause)
            raise
        self._failures.pop((peer, lane), None)
        self._open[key] = connection
        self._peers.connected(peer, connection)
        return connection
