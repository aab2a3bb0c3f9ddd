"""Frames as a relay sees them: a head that is read, and contents that are only passed on."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ...protocol.version import KIB
from .frame import Frame, Kind
from .frame_codec import PREFIX_BYTES, FrameLimits, Head, encode, head_size, read_head

PIECE = 256 * KIB
"""Of a frame's contents: each has to come in time, so a large frame may take longer than a small one."""
JOINED = 512 * KIB
"""Contents up to this size leave together with their head."""

Read = Callable[[int], Awaitable[bytes]]
Write = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True)
class Packet:
    """One frame, as it is on the wire."""

    head: Head
    start: bytes
    """Length of the head, and the head."""
    contents: bytes

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        return len(self.start) + len(self.contents)

    @property
    def kind(self) -> Kind:
        """What it is for."""
        return self.head.kind

    async def write(self, write: Write) -> None:
        """All of it."""
        if len(self.contents) <= JOINED:
            await write(self.start + self.contents)
            return
        await write(self.start)
        await write(self.contents)


def packet(frame: Frame, limits: FrameLimits) -> Packet:
    """`frame`, said by a relay itself."""
    start, *contents = encode(frame, limits)
    start = bytes(start)
    return Packet(read_head(start[PREFIX_BYTES:], limits), start, b"".join(contents))


async def read_packet(
    read: Read, limits: FrameLimits, *, patience_s: float | None
) -> Packet | None:
    """The next frame; None for a beat. Every piece has to come within `patience_s` seconds.

    Raises RemoteProtocolError for what is no frame or too large, TimeoutError, and whatever `read` raises.
    """

    async def timely(size: int) -> bytes:
        async with asyncio.timeout(patience_s):
            return await read(size)

    prefix = await timely(PREFIX_BYTES)
    size = head_size(prefix)
    if not size:
        return None
    raw = await timely(size)
    head = read_head(raw, limits)
    pieces = [await timely(min(PIECE, head.size - start)) for start in range(0, head.size, PIECE)]
    contents = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return Packet(head, prefix + raw, contents)
