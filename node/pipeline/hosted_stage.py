"""A pipeline's engines: vLLM in child processes; that of stage 0 extends Engine.

Engines do not touch the network: they exchange frames with the node's process over a Port, and the node tells
stage 0 when to begin a new ring epoch.
"""

import sys
from typing import Protocol

from ..config.engine import EngineConfig
from ..errors import EngineError, EngineLost
from ..inference.engine import Completion, Engine, EngineStats, GenerateRequest
from ..inference.hosted import HostedEngine
from ..inference.place import NOT_STAGE_0, PROGRAM_MODULE, StagePlace
from .micro_batches import LaneStats


class HeadEngine(Engine, Protocol):
    """The engine of stage 0, which schedules and answers requests.

    While the ring is down, generate() waits, and load() and update() wait at most until the next rejoin().
    Before the first rejoin() they take effect at once. `stats().fault` stays empty meanwhile, as no request is
    lost.
    """

    async def rejoin(self, epoch: int) -> None:
        """Begin a ring epoch: reset all stages, switch their weights, replay requests.

        Call it when the ring is healthy again. Raises EngineLost or EngineError; retry with a newer epoch.
        """
        ...

    def lanes(self) -> LaneStats:
        """Return the micro-batch figures; they may be a second old."""
        ...


HEAD_PROGRAM = (sys.executable, "-P", "-m", PROGRAM_MODULE, "head")
STAGE_PROGRAM = (sys.executable, "-P", "-m", PROGRAM_MODULE, "stage")


class HostedHead(HostedEngine):
    """Implements HeadEngine."""

    def __init__(self, config: EngineConfig, place: StagePlace) -> None:
        super().__init__(_planned(config, place), HEAD_PROGRAM, place=place)

    async def rejoin(self, epoch: int) -> None:
        """See HeadEngine. Raises EngineError, EngineLost."""
        self._require("")
        async with self._in_turn:
            child = self._replicas[0].child
            if child is None:
                raise EngineLost(f"the vLLM engine is restarting: {self._down()}")
            await child.rejoin(epoch)

    def lanes(self) -> LaneStats:
        """Return the micro-batch figures of the last report."""
        stats = self._replicas[0].stats if self._replicas else EngineStats()
        return LaneStats(stats.lanes, stats.in_flight, stats.stall_share)


class HostedStage(HostedEngine):
    """The engine of a later stage: load() and update() prepare weights, which a SWITCH frame applies.

    Before its first ring epoch they take effect at once.
    """

    def __init__(self, config: EngineConfig, place: StagePlace) -> None:
        super().__init__(_planned(config, place), STAGE_PROGRAM, place=place)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raise EngineError: only stage 0 generates."""
        raise EngineError(NOT_STAGE_0)


def _planned(config: EngineConfig, place: StagePlace) -> EngineConfig:
    """Set the sequence length and count that the plan fixes for all stages."""
    shape = place.shape
    return config.model_copy(
        update={"max_model_len": shape.max_model_len, "max_batch": shape.max_sequences}
    )
