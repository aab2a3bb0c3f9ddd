"""The engines of a pipeline as a node sees them: two protocols, implemented by vLLM in processes of its own.

Beside the engine seam the node that supervises the ring asks for little. No engine knows the network:
frames come and go at a Port, and the node says when a chain begins anew.
"""

import sys
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..config.engine import EngineConfig
from ..inference.engine import Completion, Engine, GenerateRequest
from ..inference.host_messages import EngineBusy
from ..inference.hosted import HostedEngine
from ..inference.replica import EngineTimeouts
from ..ops.errors import EngineError, EngineLost
from .place import PROGRAM_MODULE, StagePlace


class HeadEngine(Engine, Protocol):
    """The engine of stage 0: it schedules, and answers requests.

    While the ring is down generate() waits, and load() and update() at most until the next rejoin(); before
    the first they take effect at once. `stats().fault` stays empty meanwhile: nothing is lost.
    """

    async def rejoin(self, epoch: int) -> None:
        """Reset the ring, which is whole again, bring all stages to one version, and replay requests in flight.

        Raises EngineLost or EngineError if that failed: it may be tried again with a newer epoch.
        """
        ...


class StageEngine(Engine, Protocol):
    """The engine of a later stage: load() and update() only prepare, the switch comes down the ring.

    Before its first chain they take effect at once. generate() raises EngineError.
    """


class Lanes(Protocol):
    """How the work of stage 0 is cut."""

    @property
    def lanes(self) -> int:
        """Micro-batches that the sequences are cut into just now."""
        ...

    @property
    def in_flight(self) -> int:
        """Micro-batches that are under way."""
        ...

    @property
    def stall_share(self) -> float | None:
        """Share of its time that the slowest stage waits, 0 to 1; None where it is not measured."""
        ...


@runtime_checkable
class Laned(Protocol):
    """A head that tells of its micro-batches."""

    def lanes(self) -> Lanes | None:
        """Of now; None before start()."""
        ...


HEAD_PROGRAM = (sys.executable, "-P", "-m", PROGRAM_MODULE, "head")
STAGE_PROGRAM = (sys.executable, "-P", "-m", PROGRAM_MODULE, "stage")


@dataclass(frozen=True)
class HostedLanes:
    """Implements Lanes, as of a second ago."""

    lanes: int
    in_flight: int
    stall_share: float


class HostedHead(HostedEngine):
    """Implements HeadEngine, and Laned."""

    def __init__(
        self,
        config: EngineConfig,
        place: StagePlace,
        timeouts: EngineTimeouts | None = None,
    ) -> None:
        super().__init__(_planned(config, place), HEAD_PROGRAM, timeouts, place=place)

    async def rejoin(self, epoch: int) -> None:
        """See HeadEngine. Raises EngineError, EngineLost."""
        self._require("")
        async with self._in_turn:
            child = self._replicas[0].child
            if child is None:
                raise EngineLost(f"the vLLM engine is being started again: {self._down()}")
            await child.rejoin(epoch)

    def lanes(self) -> HostedLanes:
        """How the work is cut."""
        busy = self._replicas[0].busy if self._replicas else EngineBusy()
        return HostedLanes(busy.lanes, busy.in_flight, busy.stall_share)


class HostedStage(HostedEngine):
    """Implements StageEngine."""

    def __init__(
        self,
        config: EngineConfig,
        place: StagePlace,
        timeouts: EngineTimeouts | None = None,
    ) -> None:
        super().__init__(_planned(config, place), STAGE_PROGRAM, timeouts, place=place)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Never. Raises EngineError."""
        raise EngineError("tokens are asked of stage 0 of a pipeline, and this is another one")


def _planned(config: EngineConfig, place: StagePlace) -> EngineConfig:
    """With the lengths and numbers that all stages have."""
    shape = place.shape
    return config.model_copy(
        update={"max_model_len": shape.max_model_len, "max_batch": shape.max_sequences}
    )
