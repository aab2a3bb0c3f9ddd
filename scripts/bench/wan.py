"""Emulate the delay and rate of a WAN on streams that this process opens."""

import asyncio
from contextlib import suppress
from typing import Any, cast

from primerl.node.p2p.connections import ConnectionPool
from primerl.node.p2p.transport import Connection, Stream, TransportError
from primerl.node.tasks import end_tasks

MAX_UNDER_WAY = 4096


class DelayedStream:
    """Stream whose written data leaves at `bytes_per_s` (0: no limit) and arrives `delay_s` later."""

    def __init__(self, stream: Stream, delay_s: float, bytes_per_s: float) -> None:
        self._stream = stream
        self._delay = delay_s
        self._rate = bytes_per_s
        self._free_at = 0.0
        self._under_way: asyncio.Queue[tuple[float, Any]] = asyncio.Queue(MAX_UNDER_WAY)
        self._carrying = asyncio.create_task(self._carry())
        self.read_exact = stream.read_exact

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """See Stream."""
        clock = asyncio.get_running_loop().time
        self._free_at = max(self._free_at, clock())
        if self._rate:
            self._free_at += len(data) / self._rate
            await asyncio.sleep(self._free_at - clock())
        await self._under_way.put((self._free_at + self._delay, data))

    async def finish(self) -> None:
        """See Stream."""
        await self._under_way.join()
        await self._stream.finish()

    async def abort(self) -> None:
        """See Stream."""
        await end_tasks(self._carrying)
        await self._stream.abort()

    async def _carry(self) -> None:
        clock = asyncio.get_running_loop().time
        with suppress(TransportError):  # the reader gets the same error
            while True:
                due, data = await self._under_way.get()
                await asyncio.sleep(due - clock())
                await self._stream.write(data)
                self._under_way.task_done()


class DelayedConnection:
    """Connection that opens delayed streams."""

    def __init__(self, connection: Connection, delay_s: float, bytes_per_s: float) -> None:
        self._connection = connection
        self._line = (delay_s, bytes_per_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def open_stream(self) -> Stream:
        """See Connection."""
        return DelayedStream(await self._connection.open_stream(), *self._line)


class DelayedPool(ConnectionPool):
    """ConnectionPool whose connections open streams of this delay and rate, which may be set at any time."""

    delay_s = 0.0
    bytes_per_s = 0.0

    async def get(
        self, peer: bytes, alpn: bytes, *, patience: float | None = None, lane: int = 0
    ) -> Connection:
        """See ConnectionPool."""
        connection = await super().get(peer, alpn, patience=patience, lane=lane)
        if not self.delay_s and not self.bytes_per_s:
            return connection
        return cast("Connection", DelayedConnection(connection, self.delay_s, self.bytes_per_s))
