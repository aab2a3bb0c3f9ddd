"""Lines: one stream of frames to the next stage, dialled again whenever it is lost, and one that comes in.

Frames go one way. Against them go only single bytes that say "still reading", so that both ends notice within a
known time when the other one is gone, however quiet the pipeline is.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ...crypto.hashing import short
from ...protocol.errors import RemoteProtocolError
from ...protocol.messages import Accepted, OpenLine
from ...protocol.version import ALPN_PIPELINE
from ..p2p.connections import ConnectionPool
from ..p2p.rpc import Refused, receive_reply, send
from ..p2p.transport import Connection, Stream, TransportError
from .frame_codec import BEAT, FrameLimits
from .outbox import Outbox
from .packets import Packet, read_packet
from .shaper import Shaper
from .together import together

logger = logging.getLogger(__name__)

BEAT_S = 2.0
"""Silence after which something is said, or a quarter of what counts as being lost."""
OPEN_S = 10.0
PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 2.0
READING = b"."

Deliver = Callable[[Packet], Awaitable[None]]
Changed = Callable[[str], None]
"""Called with "" when a line is up, with the reason when it is lost."""


class LineOut:
    """The line to `peer`: what is put into `box` leaves through it, once it is up."""

    def __init__(
        self,
        links: ConnectionPool,
        peer: bytes,
        sealed: bytes,
        *,
        stall_s: float,
        changed: Changed,
        shaper: Shaper | None = None,
    ) -> None:
        self.box = Outbox()
        self.up = False
        self.why = "not dialled yet"
        """Why it is not up."""
        self.bytes = 0
        self.frames = 0
        self._links = links
        self._peer = peer
        self._sealed = sealed
        self._stall_s = stall_s
        self._changed = changed
        self._shaper = shaper
        self._connection: Connection | None = None
        self._epoch = 0

    @property
    def rtt_ms(self) -> float | None:
        """To the other end and back, as the transport measures it."""
        live = self._connection is not None and not self._connection.closed
        return self._connection.path().rtt_ms if self._connection and live else None

    async def run(self) -> None:
        """Dial, write until the line is lost, dial again. Ends only when cancelled."""
        pause = PAUSE_FIRST_S
        while True:
            stream: Stream | None = None
            try:
                stream = await self._open()
                pause = PAUSE_FIRST_S
                self._set(True, "")
                await self._serve(stream)
            except (TransportError, TimeoutError, Refused, RemoteProtocolError) as error:
                if isinstance(error, TimeoutError):  # the connection may look alive for a while
                    await self._links.drop(self._peer, ALPN_PIPELINE)
                self._set(False, str(error) or type(error).__name__)
            finally:
                if stream is not None:
                    await stream.abort()
            await asyncio.sleep(pause)
            pause = min(PAUSE_MAX_S, 2 * pause)

    async def _open(self) -> Stream:
        connection = await self._links.get(self._peer, ALPN_PIPELINE)
        self._epoch = max(self._epoch + 1, int(time.time() * 1000))
        stream: Stream | None = None
        try:
            async with asyncio.timeout(OPEN_S):
                stream = await connection.open_stream()
                await send(stream, OpenLine(self._sealed, self._epoch))
                await receive_reply(stream, Accepted)
        except BaseException as error:  # also when cancelled: a stream half opened is nobody's
            if stream is not None:
                await stream.abort()
            if isinstance(error, TransportError):
                await self._links.drop(self._peer, ALPN_PIPELINE)
            raise
        self._connection = connection
        return stream

    async def _serve(self, stream: Stream) -> None:
        box = self.box if self._shaper is None else Outbox()
        works = [self._listen(stream), self._write(stream, box)]
        if self._shaper is not None:
            works.append(self._shaper.carry(self.box, box))
        await together(*works)

    async def _write(self, stream: Stream, box: Outbox) -> None:
        while True:
            try:
                async with asyncio.timeout(beat_s(self._stall_s)):
                    packet = await box.take()
            except TimeoutError:
                await stream.write(BEAT)
                continue
            await packet.write(stream.write)
            self.bytes += packet.size
            self.frames += 1

    async def _listen(self, stream: Stream) -> None:
        while True:
            try:
                async with asyncio.timeout(self._stall_s):
                    await stream.read_exact(len(READING))
            except TimeoutError as error:
                raise TimeoutError(f"it took nothing for {self._stall_s:g} s") from error

    def _set(self, up: bool, why: str) -> None:
        was, self.up, self.why = self.up, up, why
        if up or was:
            logger.info("line to %s: %s", short(self._peer), why or "up")
            self._changed(why)
        else:
            logger.debug("no line to %s: %s", short(self._peer), why)


class LineIn:
    """The line from the stage before, as it was opened by that."""

    def __init__(self, stream: Stream, limits: FrameLimits, *, stall_s: float) -> None:
        self._stream = stream
        self._limits = limits
        self._stall_s = stall_s
        self._heard = False
        self._delivering = False
        self.bytes = 0
        self.frames = 0

    async def serve(self, deliver: Deliver) -> None:
        """Deliver every frame until the line is lost.

        Raises TransportError, TimeoutError (it fell silent), RemoteProtocolError (what came was no frame).
        """
        telling = asyncio.create_task(self._tell())
        try:
            await self._read(deliver)
        finally:
            telling.cancel()
            await asyncio.wait([telling])

    async def close(self) -> None:
        """End it; serve() raises."""
        await self._stream.abort()

    async def _read(self, deliver: Deliver) -> None:
        while True:
            try:
                packet = await read_packet(self._receive, self._limits, patience_s=self._stall_s)
            except TimeoutError as error:
                raise TimeoutError(f"it said nothing for {self._stall_s:g} s") from error
            if packet is not None:
                self.bytes += packet.size
                self.frames += 1
                self._delivering = True
                await deliver(packet)
                self._delivering = False

    async def _receive(self, size: int) -> bytes:
        data = await self._stream.read_exact(size)
        self._heard = True
        return data

    async def _tell(self) -> None:
        """One byte every beat in which something came, or in which our own engine has no room for it."""
        with suppress(TransportError):  # whoever reads sees it too
            while True:
                await asyncio.sleep(beat_s(self._stall_s))
                if self._heard or self._delivering:
                    self._heard = False
                    await self._stream.write(READING)


def beat_s(stall_s: float) -> float:
    """Seconds between two beats where a line that is silent for `stall_s` is lost."""
    return min(BEAT_S, stall_s / 4)
