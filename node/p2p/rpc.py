"""Requests over streams: one framed request, one framed reply, each with a limit and a deadline.

A peer's refusal arrives as Refused with its reason; a breach of the protocol as RemoteProtocolError.
"""

import asyncio
from contextlib import suppress
from typing import TypeVar

import msgspec

from ... import __version__
from ...protocol.envelope import no_common_version
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.messages import Beginning, Hello, Message, Refusal, Welcome
from ...protocol.session import HEADER_BYTES, decode, frame, payload_size
from ...protocol.version import MAX_MESSAGE, MAX_NAME, SPOKEN
from .transport import Connection, Stream, StreamClosed, TransportError

T = TypeVar("T")


class Refused(Exception):
    """The peer understood the request and refused it."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail


class TooSlow(TransportError):
    """The peer did not answer before the deadline."""


async def send(stream: Stream, message: msgspec.Struct, limit: int = MAX_MESSAGE) -> None:
    """Write one framed message."""
    await stream.write(frame(message, limit))


async def receive(stream: Stream, kind: type[T], limit: int = MAX_MESSAGE) -> T:
    """Read one framed message of `kind` (a Struct or a union). The caller holds the deadline.

    Raises:
        RemoteProtocolError: TOO_LARGE, MALFORMED; WRONG_VERSION for the hello of another wire version, which
            may have fields that we do not know.
    """
    header = await stream.read_exact(HEADER_BYTES)
    payload = await stream.read_exact(payload_size(header, limit))
    try:
        return decode(payload, kind)
    except RemoteProtocolError:
        beginning = decode(payload, Beginning)
        if beginning.type == Hello.__name__ and SPOKEN.common(beginning.spoken) is None:
            raise no_common_version(
                SPOKEN, beginning.spoken, called="your node", software=__version__
            ) from None
        raise


async def receive_reply(stream: Stream, kind: type[T]) -> T:
    """Read a reply of `kind`; a Refusal, also one of another wire version, is raised as Refused."""
    header = await stream.read_exact(HEADER_BYTES)
    payload = await stream.read_exact(payload_size(header, MAX_MESSAGE))
    try:
        reply = decode(payload, kind | Refusal)  # type: ignore[operator]
    except RemoteProtocolError:
        beginning = decode(payload, Beginning)
        if beginning.type == Refusal.__name__:
            raise _foreign_refusal(beginning) from None
        if beginning.type == Welcome.__name__ and SPOKEN.common(beginning.spoken) is None:
            raise no_common_version(
                beginning.spoken, SPOKEN, called="this node", software=beginning.software[:MAX_NAME]
            ) from None
        raise
    if isinstance(reply, Refusal):
        raise Refused(reply.reason, reply.detail)
    return reply  # type: ignore[return-value]


def _foreign_refusal(beginning: Beginning) -> Refused:
    """Convert a refusal with a reason or fields that we do not know; only its text is understood."""
    if beginning.reason in list(Reason):
        return Refused(Reason(beginning.reason), beginning.detail[:MAX_NAME])
    return Refused(Reason.WRONG_VERSION, f"{beginning.reason}: {beginning.detail}"[:MAX_NAME])


async def ask(connection: Connection, request: Message, kind: type[T], *, deadline: float) -> T:
    """Send `request` on a new stream and wait at most `deadline` seconds for its reply.

    Raises Refused, RemoteProtocolError, TransportError (TooSlow when the deadline passed).
    """
    stream: Stream | None = None
    try:
        async with asyncio.timeout(deadline):
            stream = await connection.open_stream()
            with suppress(StreamClosed):  # refused before it was read: the reply says why
                await send(stream, request)
                await stream.finish()
            return await receive_reply(stream, kind)
    except TimeoutError as error:
        raise TooSlow(f"no reply to {type(request).__name__} in {deadline:.1f} s") from error
    finally:
        if stream is not None:
            await stream.abort()


async def refuse(stream: Stream, reason: Reason, detail: str = "") -> None:
    """Send a refusal, if the stream still carries it."""
    try:
        await send(stream, Refusal(reason, detail[:250]))
        await stream.finish()
    except (TransportError, StreamClosed):
        await stream.abort()
