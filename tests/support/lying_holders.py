"""Peers that claim to hold every chunk and hold up whoever asks them for one.

A Ploy is what such a peer does with a request for a chunk; claiming() makes the handler of a node that serves
chunks by it, for the bare nodes of exchange_world and for hostile.Rogue. LineHolder is an admitted key of a
swarm that does nothing else.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType

from support.hostile import Rogue
from support.swarm import Swarm

from primerl.node.p2p.connections import Handler
from primerl.node.p2p.rpc import Refused, receive, send
from primerl.node.p2p.transport import Stream, TransportError
from primerl.node.storage.chunk_store import Store
from primerl.protocol import messages
from primerl.protocol.errors import Reason, RemoteProtocolError

Ploy = Callable[[Stream, messages.GetChunk], Awaitable[None]]
BEAT_S = 0.2
POLL_S = 1.0
"""A worker that asks for leases is listed as a source for the others."""


async def keep_in_line(stream: Stream, request: messages.GetChunk) -> None:
    """Say for ever that the chunk comes soon."""
    while True:
        await send(stream, messages.InLine())
        await asyncio.sleep(BEAT_S)


async def stay_silent(stream: Stream, request: messages.GetChunk) -> None:
    """Answer nothing."""
    await asyncio.sleep(3600)


async def deny(stream: Stream, request: messages.GetChunk) -> None:
    """Have nothing of what was claimed."""
    raise RemoteProtocolError(Reason.NOT_FOUND, "I only said so")


async def be_busy(stream: Stream, request: messages.GetChunk) -> None:
    """Refuse at once, again and again."""
    raise RemoteProtocolError(Reason.BUSY, "come again")


def busy_after(seconds: float) -> Ploy:
    """Keep in line for so long, then refuse: each line ends below its limit."""

    async def answer(stream: Stream, request: messages.GetChunk) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await keep_in_line(stream, request)
        raise RemoteProtocolError(Reason.BUSY, "come again")

    return answer


def trickle(size: int, rate: float) -> Ploy:
    """Send chunks of `size` bytes at `rate` bytes per second; none is right."""

    async def answer(stream: Stream, request: messages.GetChunk) -> None:
        await send(stream, messages.ChunkFollows(size))
        for _ in range(size):
            await stream.write(b"x")
            await asyncio.sleep(1.0 / rate)

    return answer


def late(store: Store, seconds: float) -> Ploy:
    """Keep in line for so long, then send the chunk: a source that is of some use, seldom."""

    async def answer(stream: Stream, request: messages.GetChunk) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await keep_in_line(stream, request)
        data = store.get(request.digest)
        if data is None:
            raise RemoteProtocolError(Reason.BUSY, "come again")
        await send(stream, messages.ChunkFollows(len(data)))
        await stream.write(data)
        await stream.finish()
        with suppress(TransportError):
            await stream.read_exact(1)  # its reader ends its direction once it has all

    return answer


def in_turn(*ploys: Ploy) -> Ploy:
    """Do something else with each request."""
    turns = itertools.cycle(ploys)

    async def answer(stream: Stream, request: messages.GetChunk) -> None:
        await next(turns)(stream, request)

    return answer


def claiming(ploy: Ploy, *, asked: Callable[[bytes], None] | None = None) -> Handler:
    """Claim to hold whatever is watched; `asked` is told who requests a chunk."""

    async def handler(peer: bytes, stream: Stream) -> None:
        request: messages.BlobRequest = await receive(stream, messages.BlobRequest)  # type: ignore[arg-type]
        if isinstance(request, messages.WatchChunks):
            count = len(request.chunks)
            await send(
                stream, messages.HaveChunks(((1 << count) - 1).to_bytes((count + 7) // 8, "little"))
            )
            return await asyncio.sleep(3600)
        assert isinstance(request, messages.GetChunk), "only an origin is asked otherwise"
        if asked is not None:
            asked(peer)
        await ploy(stream, request)

    return handler


class LineHolder:
    """A key with a ticket that never works: it is listed as a source, and serves chunks by a ploy."""

    def __init__(self, swarm: Swarm, name: str, ploy: Ploy = keep_in_line) -> None:
        self.rogue = Rogue(swarm, name)
        self.requests = 0
        """For chunks, by other workers."""
        self._ploy = ploy
        self._polling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LineHolder":
        self.rogue.serve(control=_refuse, blobs=claiming(self._ploy, asked=self._count))
        await self.rogue.hello()
        self._polling = asyncio.create_task(self._poll())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._polling is not None
        self._polling.cancel()
        await asyncio.wait([self._polling])
        await self.rogue.__aexit__(kind, error, trace)

    def _count(self, peer: bytes) -> None:
        self.requests += 1

    async def _poll(self) -> None:
        while True:
            with suppress(Refused, TransportError):
                await self.rogue.poll(0, version=0)
            await asyncio.sleep(POLL_S)


async def _refuse(peer: bytes, stream: Stream) -> None:
    raise RemoteProtocolError(Reason.NOT_FOUND, "ask somebody else")
