"""Pipelines of vLLM for tests: stages in processes of their own, on a ring without nodes."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.byte_ring import ByteRing

from primerl.node.config.run import EngineConfig
from primerl.node.inference.hosted import HostedEngine
from primerl.node.ops.errors import EngineError
from primerl.node.pipeline.hosted_stage import HostedHead, HostedStage
from primerl.node.pipeline.place import StagePlace, names_of
from primerl.node.weights.state import Changed, State
from primerl.protocol.pipelines import PipelinePlan, PipelineShape, Stage

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
    """All stages of a plan, and what they are joined by."""

    plan: PipelinePlan
    ring: ByteRing
    head: HostedHead
    stages: list[HostedStage]

    @property
    def all(self) -> list[HostedEngine]:
        return [self.head, *self.stages]

    def share(self, rank: int, state: State) -> State:
        names = names_of(self.plan.stages[rank], self.plan.layers, state)
        return {name: state[name] for name in state if name in names}

    async def load(self, version: int, state: State) -> None:
        """The others first, as a node does it."""
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
    """Started, without weights; `ranks` are how many share each stage's layers."""
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
    """However often it takes: a stage that has just started has no weights yet."""
    for _ in range(400):
        try:
            return await made.join()
        except EngineError:
            await asyncio.sleep(0.3)
    raise AssertionError("the pipeline does not begin again")
