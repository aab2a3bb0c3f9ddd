"""The node's end of the socket at which a process computes a stage: frames in, frames out.

The socket belongs to its owner alone. One process at a time: a newer connection ends the one before it, for the
process behind that was replaced.
"""

import asyncio
import logging
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ...protocol.errors import RemoteProtocolError
from ...protocol.version import MIB
from ..process.unix_sockets import short
from .frame_codec import FrameLimits
from .outbox import Outbox
from .packets import Packet, read_packet
from .together import together

logger = logging.getLogger(__name__)

BUFFER = 4 * MIB
SETTLE_S = 2.0


class LocalListener(Protocol):
    """Who relays: a ring."""

    async def from_local(self, packet: Packet) -> None:
        """A frame of the process that computes; waiting here makes it wait."""
        ...

    def local_changed(self, words: str) -> None:
        """It connected ("") or is gone (why)."""
        ...


class LocalEnd:
    """Listens at `path` between `async with` and its end."""

    def __init__(self, path: Path, limits: FrameLimits) -> None:
        self.path = path
        self.limits = limits
        self.box = Outbox()
        """What waits for the process that computes."""
        self.listener: LocalListener | None = None
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        """Whether a process computes."""
        return self._writer is not None

    async def __aenter__(self) -> "LocalEnd":
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.unlink(missing_ok=True)
        with short(self.path) as name:
            self._server = await asyncio.start_unix_server(self._accept, name, limit=BUFFER)
        self.path.chmod(0o600)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving, timeout=SETTLE_S)
        self.path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._gone("another process took its place")
        self._writer = writer
        self.box.clear()
        words = "the engine's process ended the connection"
        try:
            self._tell("")
            await together(self._read(reader), self._write(writer))
        except (OSError, EOFError) as error:
            logger.debug("the engine's connection ended: %s", error)
        except RemoteProtocolError as error:
            words = f"the engine's process says what is no frame: {error}"
            logger.error("%s", words)
        finally:
            writer.transport.abort()
            if self._writer is writer:
                self._gone(words)

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

    def _gone(self, words: str) -> None:
        self._writer = None
        self.box.clear()
        self._tell(words)

    def _tell(self, words: str) -> None:
        if self.listener is not None:
            self.listener.local_changed(words)
