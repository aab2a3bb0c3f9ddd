"""Pipelines of vLLM for tests: stages in processes of their own, on a ring without nodes."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl.node.config.run import EngineConfig
from primerl.node.errors import EngineError
from primerl.node.inference.hosted import HostedEngine
from primerl.node.inference.place import StagePlace, share_of
from primerl.node.pipeline import frames
from primerl.node.pipeline.hosted_stage import HostedHead, HostedStage
from primerl.node.weights.state import Changed, State
from primerl.protocol.pipelines import PipelinePlan, PipelineShape, Stage


class ByteRing:
    """A ring of Unix sockets `paths` that counts frames and can fail like a ring of nodes."""

    def __init__(self, directory: Path, stages: int, shape: PipelineShape, delay_s: float) -> None:
        self.paths = [directory / f"{rank}.sock" for rank in range(stages)]
        self.bytes = [0] * stages
        self.frames = [0] * stages
        self.connections = [0] * stages
        self.most_at_once = 0
        self._under_way = 0
        self._limits = frames.FrameLimits.of(shape)
        self._delay_s = delay_s
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._epoch = 0
        self._arrived = asyncio.Condition()
        self.cut = False
        """Whether frames of this epoch are lost."""

    async def connected(self) -> None:
        """Wait until every stage is connected."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self._writers) == len(self.paths))

    async def back(self, rank: int, connections: int) -> None:
        """Wait until a stage has connected more often than `before`."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.connections[rank] > connections)

    def begin(self) -> int:
        """Return a new epoch."""
        self._epoch += 1
        self.cut = False
        return self._epoch

    def break_now(self, words: str = "a line was cut") -> None:
        """Fail the current epoch and send stage 0 a FAULT."""
        self.cut = True
        frame = frames.Frame(frames.Kind.FAULT, self._epoch, 1, words.encode())
        for part in frames.encode(frame, self._limits):
            self._writers[0].write(part)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["ByteRing"]:
        """Listen on the sockets inside the context."""
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
        prefix = await reader.readexactly(frames.PREFIX_BYTES)
        raw = await reader.readexactly(frames.head_size(prefix))
        head = frames.read_head(raw, self._limits) if raw else None
        contents = await reader.readexactly(head.size) if head else b""
        if head is not None and head.kind is frames.Kind.STEP and not self.cut:
            self._under_way = head.number
        if head is not None and head.kind is frames.Kind.DRAWN:
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


MAX_LENGTH = 256


def shape_of(hidden: int, **fields: Any) -> PipelineShape:
    given: dict[str, Any] = {
        "engine": "vllm",
        "software": "test",
        "dtype": "float32",
        "hidden_size": hidden,
        "max_model_len": MAX_LENGTH,
        "max_sequences": 8,
        "max_step_tokens": 64,
        "block_size": 32,
        "kv_tokens": 8 * MAX_LENGTH,
        "micro_batches": 4,
    }
    return PipelineShape(**given | fields)


def plan_of(shape: PipelineShape, cuts: Sequence[int]) -> PipelinePlan:
    """Stages that end at `cuts`."""
    starts = [0, *cuts]
    stages = tuple(
        Stage(bytes([rank + 1]) * 32, first, end)
        for rank, (first, end) in enumerate(zip(starts, cuts, strict=False))
    )
    return PipelinePlan(b"g" * 32, 1, stages, (), shape)


@dataclass
class Pipeline:
    """All stages of a plan, and their ring."""

    plan: PipelinePlan
    ring: ByteRing
    head: HostedHead
    stages: list[HostedStage]

    @property
    def all(self) -> list[HostedEngine]:
        return [self.head, *self.stages]

    def share(self, rank: int, state: State) -> State:
        names = share_of(self.plan, rank)(state)
        return {name: state[name] for name in state if name in names}

    async def load(self, version: int, state: State) -> None:
        """Load the later stages first, as a node does."""
        await asyncio.gather(
            *(one.load(version, self.share(rank, state)) for rank, one in enumerate(self.stages, 1))
        )
        await self.head.load(version, self.share(0, state))

    async def update(self, version: int, state: State, changed: Changed) -> None:
        for rank, one in sorted(enumerate(self.all), reverse=True):
            own = self.share(rank, state)
            await one.update(version, own, {name: changed[name] for name in own if name in changed})

    async def join(self) -> None:
        await self.ring.connected()
        await self.head.rejoin(self.ring.begin())


@asynccontextmanager
async def pipeline(
    model_dir: Path,
    plan: PipelinePlan,
    *,
    fingerprint: str = "",
    delay_s: float = 0.0,
    ranks: Sequence[int] = (),
    **fields: Any,
) -> AsyncGenerator[Pipeline]:
    """Start a pipeline without weights, with `ranks` tensor-parallel ranks per stage."""
    configs = [
        EngineConfig(
            type="vllm",
            max_model_len=plan.shape.max_model_len,
            max_batch=plan.shape.max_sequences,
            tp=tp,
            **fields,
        )
        for tp in ranks or [1] * len(plan.stages)
    ]
    with tempfile.TemporaryDirectory() as directory:
        ring = ByteRing(Path(directory), len(plan.stages), plan.shape, delay_s)
        places = [StagePlace(plan, rank, str(path)) for rank, path in enumerate(ring.paths)]
        head = HostedHead(configs[0], places[0])
        stages = [
            HostedStage(config, place)
            for config, place in zip(configs[1:], places[1:], strict=True)
        ]
        made = Pipeline(plan, ring, head, stages)
        async with ring.running():
            try:
                await asyncio.gather(
                    *(one.start(model_dir, fingerprint=fingerprint) for one in made.all)
                )
                yield made
            finally:
                await asyncio.gather(*(one.close() for one in made.all))


async def joined(made: Pipeline) -> None:
    """Rejoin, with retries: a stage that has just started has no weights yet."""
    for _ in range(400):
        try:
            return await made.join()
        except EngineError:
            await asyncio.sleep(0.3)
    raise AssertionError("the pipeline does not begin again")
