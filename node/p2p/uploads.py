"""Uploads of submissions: offered by digest, resumed where they broke off, acknowledged by a receipt once they
are durable."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ...crypto.hashing import digest
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.messages import SubmitFrom, SubmitOffer, Submitted
from ...protocol.version import ALPN_CONTROL, MAX_SUBMISSION
from .connections import ConnectionPool
from .limits import Pacer
from .rpc import TooSlow, receive_reply, send
from .transport import Stream, StreamClosed, TransportError

PIECE_BYTES = 256 * 1024
MIN_RATE = 32 * 1024
"""Bytes per second below which an upload is cut off; it may resume."""
GRACE_S = 10.0
PARTIALS_PER_PEER = 4
"""Uploads of a peer that are under way or broke off: the oldest that broke off makes room."""
PARTIAL_TTL_S = 300.0


async def upload(
    links: ConnectionPool,
    trainer: bytes,
    sealed: bytes,
    lease_id: int,
    *,
    deadline: float,
    pacer: Pacer,
) -> bytes:
    """Upload a sealed submission to the trainer, before any chunk; return the sealed receipt.

    Raises Refused, RemoteProtocolError, TransportError.
    """
    async with pacer.own():
        return await _upload(links, trainer, sealed, lease_id, deadline, pacer)


async def _upload(
    links: ConnectionPool,
    trainer: bytes,
    sealed: bytes,
    lease_id: int,
    deadline: float,
    pacer: Pacer,
) -> bytes:
    connection = await links.get(trainer, ALPN_CONTROL)
    stream = await connection.open_stream()
    try:
        async with asyncio.timeout(deadline + len(sealed) / MIN_RATE):
            await send(stream, SubmitOffer(digest(sealed), len(sealed), lease_id))
            reply = await receive_reply(stream, SubmitFrom | Submitted)  # type: ignore[arg-type]
            if isinstance(reply, SubmitFrom):
                for start in range(reply.offset, len(sealed), PIECE_BYTES):
                    piece = sealed[start : start + PIECE_BYTES]
                    await pacer.pace(len(piece))
                    await stream.write(piece)
                with suppress(StreamClosed):  # it has read all and may be gone: its reply counts
                    await stream.finish()
                reply = await receive_reply(stream, Submitted)
            return reply.receipt
    except TimeoutError as error:
        raise TooSlow("the trainer did not take the submission in time") from error
    except TransportError:
        await links.drop(trainer, ALPN_CONTROL)
        raise
    finally:
        await stream.abort()


@dataclass
class PartialUpload:
    """Bytes of an upload that broke off."""

    data: bytearray = field(default_factory=bytearray)
    touched: float = 0.0
    stream: Stream | None = None
    """The stream that sends the rest; None once it broke off."""


class UploadReceiver:
    """The trainer's end: collect the bytes, limited per peer, and let broken uploads resume."""

    def __init__(self, *, grace_s: float = GRACE_S) -> None:
        """`grace_s` is how long an upload may take beyond what MIN_RATE allows for its size."""
        self._grace_s = grace_s
        self._partials: dict[tuple[bytes, bytes], PartialUpload] = {}

    async def repeat(self, stream: Stream, receipt: bytes) -> None:
        """Answer the offer of a submission that is already here with its receipt."""
        await send(stream, Submitted(receipt))
        await stream.finish()

    async def receive(
        self,
        peer: bytes,
        stream: Stream,
        offer: SubmitOffer,
        *,
        limit: int,
        accept: Callable[[bytes], Awaitable[bytes]],
    ) -> None:
        """Take the bytes of `offer` (at most `limit`), pass them to `accept`, answer with its receipt.

        Raises:
            RemoteProtocolError: TOO_LARGE, WRONG_DIGEST, RATE_LIMITED, or what `accept` raises.
        """
        if offer.size > min(limit, MAX_SUBMISSION):
            raise RemoteProtocolError(Reason.TOO_LARGE, f"{offer.size} bytes, at most {limit}")
        partial = self._open(peer, offer.digest)
        before, partial.stream = partial.stream, stream
        try:
            if before is not None:
                await before.abort()
            await self._fill(stream, partial, offer.size)
        finally:
            if partial.stream is stream:
                partial.stream = None
                partial.touched = time.monotonic()
        del self._partials[peer, offer.digest]
        data = bytes(partial.data)
        if digest(data) != offer.digest:
            raise RemoteProtocolError(Reason.WRONG_DIGEST, "the bytes are not those offered")
        receipt = await accept(data)
        await send(stream, Submitted(receipt))
        await stream.finish()

    async def _fill(self, stream: Stream, partial: PartialUpload, size: int) -> None:
        async with asyncio.timeout(self._grace_s + size / MIN_RATE):
            await send(stream, SubmitFrom(len(partial.data)))
            while len(partial.data) < size:
                piece = await stream.read_exact(min(PIECE_BYTES, size - len(partial.data)))
                if partial.stream is not stream:
                    raise RemoteProtocolError(
                        Reason.BUSY, "this upload goes on over another stream"
                    )
                partial.data += piece

    def _open(self, peer: bytes, name: bytes) -> PartialUpload:
        """Return the upload `name` of a peer, with the bytes received before.

        If it is under way, the caller replaces the stream that had it: that connection may have died unnoticed.
        Raises RemoteProtocolError(RATE_LIMITED).
        """
        now = time.monotonic()
        for key, old in list(self._partials.items()):
            if old.stream is None and now - old.touched > PARTIAL_TTL_S:
                del self._partials[key]
        partial = self._partials.get((peer, name))
        if partial is None:
            self._make_room(peer)
            partial = self._partials[peer, name] = PartialUpload()
        return partial

    def _make_room(self, peer: bytes) -> None:
        """Drop the peer's oldest broken upload if it has PARTIALS_PER_PEER.

        Whatever broke them, even our own stop, the peer can only send other submissions or begin these again.
        Raises RemoteProtocolError(RATE_LIMITED) if all are under way.
        """
        partials = [
            (name, upload) for (owner, name), upload in self._partials.items() if owner == peer
        ]
        if len(partials) < PARTIALS_PER_PEER:
            return
        broken = [(upload.touched, name) for name, upload in partials if upload.stream is None]
        if not broken:
            raise RemoteProtocolError(Reason.RATE_LIMITED, "too many uploads at a time")
        del self._partials[peer, min(broken)[1]]
