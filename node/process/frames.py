"""Frames between a node and its own processes: a msgpack message after its length (4 bytes, little-endian).

Invariant: a length is checked before anything is read. Neither end trusts the sizes that the other one sends.
"""

import asyncio
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

HEAD_BYTES = 4
MAX_FRAME = 64 << 20
"""Default limit of a frame in bytes."""


class Message(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    """A request with its number, or the answer with the number of its request."""

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


def _checked(length: int, limit: int) -> int:
    if length > limit:
        raise ValueError(f"a frame of {length} bytes, at most {limit} are allowed")
    return length
