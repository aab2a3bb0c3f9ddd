"""Links of a stage: to the next stage, from the previous one, and to the local engine.

The outbound link is redialled when it is lost; the local link is a Unix socket to the engine's process. Frames
travel one way. The receiver sends single keepalive bytes back, so that both ends notice a lost peer within a
known time, even while the pipeline is idle.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ...crypto.hashing import short
from ...protocol.errors import RemoteProtocolError
from ...protocol.messages import Accepted, OpenLine
from ...protocol.version import ALPN_PIPELINE, MIB
from ..p2p.connections import ConnectionPool
from ..p2p.rpc import Refused, receive_reply, send
from ..p2p.transport import Connection, Stream, TransportError
from ..p2p.waiting import Notifier
from ..process.unix_sockets import remove_socket, start_server
from ..tasks import end_tasks
from .frames import BEAT, FrameLimits, Packet, read_packet

MAX_FRAMES = 80
"""Above MAX_MICRO_BATCHES, so that frames returning to stage 0 always fit and the ring cannot deadlock."""
MAX_BYTES = 64 * MIB


class PacketQueue:
    """A FIFO of packets. Full at `frames` packets or `size` bytes.

    An empty queue accepts any packet.
    """

    def __init__(self, frames: int = MAX_FRAMES, size: int = MAX_BYTES) -> None:
        self._frames = frames
        self._limit = size
        self._packets: deque[Packet] = deque()
        self._bytes = 0
        self._changed = Notifier()

    def __len__(self) -> int:
        return len(self._packets)

    async def put(self, packet: Packet) -> None:
        """Append a packet, waiting for room."""
        while len(self._packets) >= self._frames or (self._packets and self._bytes >= self._limit):
            await self._changed.wait()
        self._packets.append(packet)
        self._bytes += packet.size
        self._changed.fire()

    def put_first(self, packet: Packet) -> None:
        """Insert a packet at the front, even if the queue is full: for pings and faults."""
        self._packets.appendleft(packet)
        self._bytes += packet.size
        self._changed.fire()

    def put_only(self, packet: Packet) -> None:
        """Insert a packet at the front and drop others of its kind, to bound their number."""
        self.drop(lambda queued: queued.kind is packet.kind)
        self.put_first(packet)

    async def take(self) -> Packet:
        """Remove and return the next packet, waiting for one."""
        while not self._packets:
            await self._changed.wait()
        packet = self._packets.popleft()
        self._bytes -= packet.size
        self._changed.fire()
        return packet

    def drop(self, which: Callable[[Packet], bool]) -> None:
        """Remove the packets for which `which` is true."""
        self._packets = deque(packet for packet in self._packets if not which(packet))
        self._bytes = sum(packet.size for packet in self._packets)
        self._changed.fire()

    def clear(self) -> None:
        """Remove all packets."""
        self.drop(lambda packet: True)


async def together(*works: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until one ends, cancel the others, and raise its error."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


logger = logging.getLogger(__name__)

BEAT_S = 2.0
"""Longest interval between beats; see beat_s()."""
OPEN_S = 10.0
PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 2.0
READING = b"."

Deliver = Callable[[Packet], Awaitable[None]]
Changed = Callable[[str], None]
"""Called with "" when a link is up, with the reason when it is lost."""


class OutboundLink:
    """The link to the next stage, `peer`: sends the packets in `box` while it is up."""

    def __init__(
        self,
        links: ConnectionPool,
        peer: bytes,
        sealed: bytes,
        *,
        stall_s: float,
        changed: Changed,
    ) -> None:
        self.box = PacketQueue()
        self.up = False
        self.why = "not dialled yet"
        """Why the link is down; "" while it is up."""
        self.bytes = 0
        self._links = links
        self._peer = peer
        self._sealed = sealed
        self._stall_s = stall_s
        self._changed = changed
        self._connection: Connection | None = None
        self._epoch = 0

    @property
    def rtt_ms(self) -> float | None:
        """Round-trip time measured by the transport; None without a connection."""
        live = self._connection is not None and not self._connection.closed
        return self._connection.path().rtt_ms if self._connection and live else None

    async def run(self) -> None:
        """Dial, send until the link is lost, dial again. Runs until cancelled."""
        pause = PAUSE_FIRST_S
        while True:
            stream: Stream | None = None
            try:
                stream = await self._open()
                pause = PAUSE_FIRST_S
                self._set(True, "")
                await together(self._listen(stream), self._write(stream))
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
        except BaseException as error:  # on cancellation too: else the half-open stream would leak
            if stream is not None:
                await stream.abort()
            if isinstance(error, TransportError):
                await self._links.drop(self._peer, ALPN_PIPELINE)
            raise
        self._connection = connection
        return stream

    async def _write(self, stream: Stream) -> None:
        while True:
            try:
                async with asyncio.timeout(beat_s(self._stall_s)):
                    packet = await self.box.take()
            except TimeoutError:
                await stream.write(BEAT)
                continue
            await packet.write(stream.write)
            self.bytes += packet.size

    async def _listen(self, stream: Stream) -> None:
        while True:
            try:
                async with asyncio.timeout(self._stall_s):
                    await stream.read_exact(len(READING))
            except TimeoutError as error:
                raise TimeoutError(f"the peer read nothing for {self._stall_s:g} s") from error

    def _set(self, up: bool, why: str) -> None:
        was, self.up, self.why = self.up, up, why
        if up or was:
            logger.info("link to %s: %s", short(self._peer), why or "up")
            self._changed(why)
        else:
            logger.debug("no link to %s: %s", short(self._peer), why)


class InboundLink:
    """The link from the previous stage, which opened it."""

    def __init__(self, stream: Stream, limits: FrameLimits, *, stall_s: float) -> None:
        self._stream = stream
        self._limits = limits
        self._stall_s = stall_s
        self._heard = False
        self._delivering = False
        self.bytes = 0

    async def serve(self, deliver: Deliver) -> None:
        """Deliver every frame until the link is lost.

        Raises TransportError, TimeoutError (the peer was silent), RemoteProtocolError (an invalid frame).
        """
        keepalives = asyncio.create_task(self._send_keepalives())
        try:
            await self._read(deliver)
        finally:
            await end_tasks(keepalives)

    async def close(self) -> None:
        """Abort the stream, which makes serve() raise."""
        await self._stream.abort()

    async def _read(self, deliver: Deliver) -> None:
        while True:
            try:
                packet = await read_packet(self._receive, self._limits, patience_s=self._stall_s)
            except TimeoutError as error:
                raise TimeoutError(f"the peer sent nothing for {self._stall_s:g} s") from error
            if packet is not None:
                self.bytes += packet.size
                self._delivering = True
                await deliver(packet)
                self._delivering = False

    async def _receive(self, size: int) -> bytes:
        data = await self._stream.read_exact(size)
        self._heard = True
        return data

    async def _send_keepalives(self) -> None:
        """Send one byte for each beat in which data arrived, or delivery waited for our own engine."""
        with suppress(TransportError):  # the reader gets the same error
            while True:
                await asyncio.sleep(beat_s(self._stall_s))
                if self._heard or self._delivering:
                    self._heard = False
                    await self._stream.write(READING)


def beat_s(stall_s: float) -> float:
    """Return the interval between beats on a link that is lost after `stall_s` of silence."""
    return min(BEAT_S, stall_s / 4)


BUFFER = 4 * MIB
SETTLE_S = 2.0


class LocalListener(Protocol):
    """The consumer of a LocalLink: a ring."""

    async def from_local(self, packet: Packet) -> None:
        """Handle a frame from the engine's process; blocks that process while it runs."""
        ...

    def local_changed(self, words: str) -> None:
        """Handle a change: "" when the engine's process connected, else why it disconnected."""
        ...


ACCEPTING_TURNS = 4
"""Event-loop iterations after which an accepted connection is being served."""


class LocalLink:
    """The Unix socket for the engine's process; listens at `path` inside `async with`."""

    def __init__(self, path: Path, limits: FrameLimits) -> None:
        self.path = path
        self.limits = limits
        self.box = PacketQueue()
        """Packets for the engine's process."""
        self.listener: LocalListener | None = None
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def connected(self) -> bool:
        """Whether the engine's process is connected."""
        return self._writer is not None

    async def __aenter__(self) -> "LocalLink":
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_socket(self.path)
        self._server = await start_server(self._accept, self.path, limit=BUFFER)
        self.path.chmod(0o600)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._server is not None:
            # asyncio would leave a connection open that it has just accepted: wait until it is served
            for listener in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listener.fileno())
            for _ in range(ACCEPTING_TURNS):
                await asyncio.sleep(0)
            self._server.close()
        for task, writer in self._serving.items():
            task.cancel()
            writer.transport.abort()  # a task cancelled before its first step would not do it
        if self._serving:
            await asyncio.wait(self._serving, timeout=SETTLE_S)
        remove_socket(self.path)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving[task] = writer
        task.add_done_callback(self._serving.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._disconnected("another process replaced it")
        self._writer = writer
        self.box.clear()
        words = "the engine's process closed the connection"
        try:
            self._notify("")
            await together(self._read(reader), self._write(writer))
        except (OSError, EOFError) as error:
            logger.debug("the engine's connection ended: %s", error)
        except RemoteProtocolError as error:
            words = f"the engine's process sent an invalid frame: {error}"
            logger.error("%s", words)
        finally:
            writer.transport.abort()
            if self._writer is writer:
                self._disconnected(words)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            packet = await read_packet(reader.readexactly, self.limits, patience_s=None)
            if packet is not None and self.listener is not None:
                await self.listener.from_local(packet)

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        while True:
            await (await self.box.take()).write(write)

    def _disconnected(self, words: str) -> None:
        self._writer = None
        self.box.clear()
        self._notify(words)

    def _notify(self, words: str) -> None:
        if self.listener is not None:
            self.listener.local_changed(words)
