"""Stages of a pipeline whose vLLM is in a process of its own: the one that is asked, and the others."""

import sys
from dataclasses import dataclass

from ...engine_config import EngineConfig
from ...errors import EngineError, EngineLost
from ...pipeline.place import Place
from ..engine import Completion, GenerateRequest
from ..host_frames import Busy
from ..hosted import HostedEngine
from ..hosted_child import Patience
from ..hosted_seat import Pauses
from .vllm_place import HEAD_PROGRAM_MODULE, STAGE_PROGRAM_MODULE

HEAD_PROGRAM = (sys.executable, "-P", "-m", HEAD_PROGRAM_MODULE)
STAGE_PROGRAM = (sys.executable, "-P", "-m", STAGE_PROGRAM_MODULE)


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
        place: Place,
        patience: Patience | None = None,
        pauses: Pauses | None = None,
    ) -> None:
        super().__init__(_planned(config, place), HEAD_PROGRAM, patience, pauses, place=place)

    async def rejoin(self, epoch: int) -> None:
        """See HeadEngine. Raises EngineError, EngineLost."""
        self._require("")
        async with self._in_turn:
            child = self._seats[0].child
            if child is None:
                raise EngineLost(f"the vLLM engine is being started again: {self._down()}")
            await child.rejoin(epoch)

    def lanes(self) -> HostedLanes:
        """How the work is cut."""
        busy = self._seats[0].busy if self._seats else Busy()
        return HostedLanes(busy.lanes, busy.in_flight, busy.stall_share)


class HostedStage(HostedEngine):
    """Implements StageEngine."""

    def __init__(
        self,
        config: EngineConfig,
        place: Place,
        patience: Patience | None = None,
        pauses: Pauses | None = None,
    ) -> None:
        super().__init__(_planned(config, place), STAGE_PROGRAM, patience, pauses, place=place)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Never. Raises EngineError."""
        raise EngineError("tokens are asked of stage 0 of a pipeline, and this is another one")


def _planned(config: EngineConfig, place: Place) -> EngineConfig:
    """With the lengths and numbers that all stages have."""
    shape = place.shape
    return config.model_copy(
        update={"max_model_len": shape.max_model_len, "max_batch": shape.max_sequences}
    )
