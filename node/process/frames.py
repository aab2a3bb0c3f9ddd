"""Encode and read the frames between a node and its child processes: length (4 bytes, little-endian), msgpack.

Invariant: a length is checked before any body is read or allocated; neither end trusts the other's sizes.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

HEAD_BYTES = 4
MAX_FRAME = 64 << 20
"""Default limit of a frame in bytes."""
READ_BYTES = 1 << 16


class ProcessMessage(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    """A numbered request, or the answer to the request with that number."""

    number: int
    body: T


def frame(message: msgspec.Struct, limit: int) -> bytes:
    """Encode a message. Raises ValueError if it is longer than `limit` bytes."""
    body = msgspec.msgpack.encode(message)
    return _checked(len(body), limit).to_bytes(HEAD_BYTES, "little") + body


def body_length(head: bytes, limit: int) -> int:
    """Read the length of a body from a frame's head. Raises ValueError if it is above `limit`."""
    return _checked(int.from_bytes(head, "little"), limit)


async def read_frame(stream: asyncio.StreamReader, limit: int) -> bytes:
    """Read the body of the next frame. Raises ValueError, asyncio.IncompleteReadError at the end, OSError."""
    return await stream.readexactly(body_length(await stream.readexactly(HEAD_BYTES), limit))


async def read_frames(stream: asyncio.StreamReader, limit: int) -> AsyncGenerator[bytes]:
    """Yield the bodies of all frames; those that arrived together cost one wake-up of the event loop.

    Raises ValueError for a frame above `limit`, asyncio.IncompleteReadError at the end, OSError.
    """
    buffer = bytearray()
    while chunk := await stream.read(READ_BYTES):
        buffer += chunk
        begin = 0
        while len(buffer) - begin >= HEAD_BYTES:
            body = begin + HEAD_BYTES
            end = body + body_length(bytes(buffer[begin:body]), limit)
            if end > len(buffer):
                break
            yield bytes(memoryview(buffer)[body:end])
            begin = end
        del buffer[:begin]
    raise asyncio.IncompleteReadError(bytes(buffer), None)


def _checked(length: int, limit: int) -> int:
    if length > limit:
        raise ValueError(f"a frame of {length} bytes, at most {limit} are allowed")
    return length
