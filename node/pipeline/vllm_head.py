"""Stage 0, in a process that a node has started for it (host.py): all of vLLM's engine, some of the layers."""

import asyncio
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.engine import EngineConfig
from ..inference.engine import EngineStats
from ..inference.vllm import VllmCore
from ..memory_plan.memory import tensor_parallel
from ..ops.errors import EngineError
from .place import StagePlace
from .vllm_place import START_SHARE, check_placed, environment_of, placed_arguments

LOOK_S = 1.0


@dataclass(frozen=True)
class HeadStats(EngineStats):
    """With how its work is cut, see Busy."""

    lanes: int = 0
    in_flight: int = 0
    stall_share: float = 0.0


class HeadCore(VllmCore):
    """Implements EngineCore and RejoiningCore."""

    def __init__(self, config: EngineConfig, place: StagePlace) -> None:
        super().__init__(config)
        self._place = place
        self._cut: list[float] = [0, 0, 0.0]
        self._looking: asyncio.Task[None] | None = None

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See VllmCore."""
        await super().start(model_dir, fingerprint=fingerprint)
        self._looking = asyncio.create_task(self._look(), name="lanes")

    def stats(self) -> EngineStats:
        """How busy it is, and how its work is cut."""
        lanes, in_flight, stall_share = self._cut
        cut: dict[str, Any] = {
            "lanes": int(lanes),
            "in_flight": int(in_flight),
            "stall_share": round(stall_share, 2),
        }
        return HeadStats(**vars(super().stats()) | cut)

    async def close(self) -> None:
        """End it."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await super().close()

    def stuck_s(self) -> float:
        """Never: while the ring is broken nothing comes, and that is no fault of this process.

        A chain on which nothing comes back is given up (chain.py), and the ring has deadlines of its own.
        """
        return 0.0

    async def rejoin(self, epoch: int) -> None:
        """Begin a chain; sequences in flight are computed again from their tokens. Raises EngineError."""
        self._require_alive()
        async with self._paused():
            (fault,) = await self._rpc("primerl_rejoin", epoch)
        if fault:
            raise EngineError(fault)

    async def _look(self) -> None:
        """The engine's process counts them; it is asked now and then."""
        while not self._fault:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(EngineError):
                (self._cut,) = await self._rpc("primerl_lanes")

    def _arguments(self, model_dir: Path, shape: dict[str, Any], *, proven: bool) -> dict[str, Any]:
        check_placed(self._config, self._place, shape)
        os.environ.update(environment_of(self._place))
        from .vllm_head_executor import HeadExecutor

        arguments = super()._arguments(model_dir, shape, proven=proven)
        arguments.setdefault("gpu_memory_utilization", START_SHARE)
        arguments |= placed_arguments(self._place, shape, tensor_parallel(self._config))
        return arguments | {"distributed_executor_backend": HeadExecutor}


if __name__ == "__main__":
    from ..inference.host import main

    main(HeadCore)
