"""The ring of a pipeline without nodes: Unix sockets of which each hands its frames to the next one, unread."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from primerl.node.pipeline.frames import (
    PREFIX_BYTES,
    Frame,
    FrameLimits,
    Kind,
    encode,
    head_size,
    read_head,
)
from primerl.protocol.pipelines import PipelineShape


class ByteRing:
    """Sockets `paths`; counts what passes, and can break like a ring of nodes."""

    def __init__(self, directory: Path, stages: int, shape: PipelineShape, delay_s: float) -> None:
        self.paths = [directory / f"{rank}.sock" for rank in range(stages)]
        self.bytes = [0] * stages
        self.frames = [0] * stages
        self.connections = [0] * stages
        self.most_at_once = 0
        self._under_way = 0
        self._limits = FrameLimits.of(shape)
        self._delay_s = delay_s
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._epoch = 0
        self._arrived = asyncio.Condition()
        self.cut = False
        """Whether frames of this epoch are lost."""

    async def connected(self) -> None:
        """Until every stage is there."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self._writers) == len(self.paths))

    async def back(self, rank: int, connections: int) -> None:
        """Until a stage has connected more than so many times."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.connections[rank] > connections)

    def begin(self) -> int:
        """A new epoch."""
        self._epoch += 1
        self.cut = False
        return self._epoch

    def break_now(self, words: str = "a line was cut") -> None:
        """Nothing of this epoch goes on, and stage 0 is told."""
        self.cut = True
        frame = Frame(Kind.FAULT, self._epoch, 1, words.encode())
        for part in encode(frame, self._limits):
            self._writers[0].write(part)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["ByteRing"]:
        """Sockets listen inside."""
        servers = [
            await asyncio.start_unix_server(self._handler(rank), path, limit=1 << 24)
            for rank, path in enumerate(self.paths)
        ]
        try:
            yield self
        finally:
            for server in servers:
                server.close()
            for writer in self._writers.values():
                writer.close()

    def _handler(self, rank: int):
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers[rank] = writer
            self.connections[rank] += 1
            async with self._arrived:
                self._arrived.notify_all()
            queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
            loop = asyncio.get_running_loop()
            moving = loop.create_task(self._move(rank, queue))
            try:
                while True:
                    frame = await self._read(reader)
                    self.bytes[rank] += len(frame)
                    self.frames[rank] += 1
                    queue.put_nowait((loop.time() + self._delay_s, frame))
            except (asyncio.IncompleteReadError, ConnectionError):
                if self._writers.get(rank) is writer:
                    del self._writers[rank]
                if rank and 0 in self._writers:
                    self.break_now(f"stage {rank} has gone")
            finally:
                moving.cancel()
                writer.close()

        return handle

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        prefix = await reader.readexactly(PREFIX_BYTES)
        raw = await reader.readexactly(head_size(prefix))
        head = read_head(raw, self._limits) if raw else None
        contents = await reader.readexactly(head.size) if head else b""
        if head is not None and head.kind is Kind.STEP and not self.cut:
            self._under_way = head.number
        if head is not None and head.kind is Kind.DRAWN:
            self.most_at_once = max(self.most_at_once, self._under_way - head.number + 1)
        if self.cut and head is not None and head.epoch <= self._epoch:
            return b""
        return prefix + raw + contents

    async def _move(self, rank: int, queue: asyncio.Queue[tuple[float, bytes]]) -> None:
        while True:
            due, frame = await queue.get()
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            writer = self._writers.get((rank + 1) % len(self.paths))
            if writer is not None:
                writer.write(frame)
