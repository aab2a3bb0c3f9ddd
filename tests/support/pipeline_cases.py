"""Pipelines in one process, without daemons: a plan for a small model, its stages, an Engine made of them."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
from support.ring_cases import ring
from support.scripted_stages import WIDTH, ScriptedHead, ScriptedStage

from primerl.node.config.run import EngineConfig
from primerl.node.inference.engine import Completion, EngineStats, GenerateRequest
from primerl.node.inference.place import StagePlace
from primerl.node.pipeline.frames import Frame
from primerl.node.pipeline.ports import Port, PortClosed
from primerl.node.weights.state import Changed, State
from primerl.protocol.pipelines import PipelinePlan, PipelineShape, Stage, check_plan

LAYERS = 5
"""As many as there are stages to cut a model into."""


def shape_of(**changes: object) -> PipelineShape:
    """Make the shape of scripted stages."""
    plain = PipelineShape(
        engine="vllm",
        software="test",
        dtype="float32",
        hidden_size=WIDTH,
        max_model_len=256,
        max_sequences=256,
        max_step_tokens=256,
        block_size=16,
        kv_tokens=256 * 256,
        micro_batches=4,
    )
    return msgspec.structs.replace(plain, **changes)


def plan_of(stages: int, shape: PipelineShape, layers: int = LAYERS) -> PipelinePlan:
    """Make a plan with an even split of the layers."""
    ends = [layers * (rank + 1) // stages for rank in range(stages)]
    cuts = itertools.pairwise([0, *ends])
    made = tuple(
        Stage(bytes([rank + 1]) * 32, first, end) for rank, (first, end) in enumerate(cuts)
    )
    plan = PipelinePlan(bytes(32), 0, made, (), shape)
    check_plan(plan)
    return plan


Tamper = Callable[[int, Frame], Frame]


class Ports:
    """A ring of in-memory ports that can be cut and healed; each stage gets its port here."""

    def __init__(self, stages: int, delay_s: float = 0.0) -> None:
        self.tamper: Tamper | None = None
        """What becomes of the frames that the stages after the first send."""
        self._stages = stages
        self._delay = delay_s
        self._free: dict[int, Port] = {}
        self.heal()

    def heal(self) -> None:
        """Make a new ring and give each stage its port."""
        self._free = dict(enumerate(ring(self._stages, delay_s=self._delay)))
        self.all = list(self._free.values())

    def cut(self) -> None:
        """Cut the ring."""
        for port in self.all:
            port.close()

    def of(self, rank: int) -> Callable[[], Port]:
        """Return the function that opens a stage's port."""

        def opened() -> Port:
            port = self._free.pop(rank, None)
            if port is None:
                raise PortClosed("there is no ring")
            return Tampered(port, self, rank) if rank else port

        return opened


class Tampered:
    """A port that may alter a stage's frames."""

    def __init__(self, port: Port, ports: Ports, rank: int) -> None:
        self._port = port
        self._ports = ports
        self._rank = rank
        self.receive = port.receive
        self.close = port.close

    def send(self, frame: Frame) -> None:
        tamper = self._ports.tamper
        self._port.send(frame if tamper is None else tamper(self._rank, frame))


class LocalPipeline:
    """An Engine: all stages of a plan, in this process."""

    def __init__(
        self,
        plan: PipelinePlan,
        ports: Ports | None = None,
    ) -> None:
        config = EngineConfig(type="vllm")
        places = [StagePlace(plan, rank, "") for rank in range(len(plan.stages))]
        self.ports = ports or Ports(len(places))
        self.head = ScriptedHead(config, places[0], open_port=self.ports.of(0))
        self.stages = [
            ScriptedStage(config, one, open_port=self.ports.of(one.rank)) for one in places[1:]
        ]
        self.epoch = 0
        self._loading = asyncio.Lock()

    @property
    def policy_version(self) -> int:
        return self.head.policy_version

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        for engine in (*self.stages, self.head):
            await engine.start(model_dir, fingerprint=fingerprint)

    async def load(self, version: int, state: State) -> None:
        async with self._loading:
            for engine in (*self.stages, self.head):
                await engine.load(version, state)
            await self._begun()

    async def update(self, version: int, state: State, changed: Changed) -> None:
        async with self._loading:
            for engine in (*self.stages, self.head):
                await engine.update(version, state, changed)
            await self._begun()

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self.head.generate(request)

    def stats(self) -> EngineStats:
        return self.head.stats()

    async def close(self) -> None:
        for engine in (self.head, *self.stages):
            await engine.close()

    async def rejoin(self) -> None:
        """Begin a new ring epoch."""
        self.epoch += 1
        await self.head.rejoin(self.epoch)

    async def _begun(self) -> None:
        if self.epoch == 0:
            await self.rejoin()
