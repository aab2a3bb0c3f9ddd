"""vLLM's worker as one stage: for it the pipeline is as the plan says, for torch.distributed it is alone.

vLLM loads this module by name (`worker_cls`) before it builds the model. Layers, weights and keys follow from
the pipeline group alone, whose peers are behind the node's lines; nothing of vLLM ever sends to them. Ranks are
numbered stage by stage, as if every stage had as many as this one.
"""

import contextlib
import sys
from collections.abc import Generator
from typing import Any

from vllm.distributed import parallel_state  # pyright: ignore
from vllm.platforms import current_platform  # pyright: ignore

_state: Any = parallel_state
_platform: Any = current_platform
_Coordinator: Any = _state.GroupCoordinator
_INIT = "init_worker_distributed_environment"


def _worker() -> Any:
    if _platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker  # pyright: ignore

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker  # pyright: ignore

    return Worker


_Base: Any = _worker()


class FarGroup(_Coordinator):
    """A pipeline group of which only this member is here."""

    def __init__(self, alone: Any, rank: int, size: int) -> None:
        self.__dict__.update(alone.__dict__)
        self.rank = self.rank_in_group = rank
        self.ranks = list(range(size))
        self.world_size = size

    def destroy(self) -> None:
        """It holds nothing of its own."""


class StageWorker(_Base):
    """One rank of a stage."""

    def init_device(self) -> None:
        """As vLLM's own, in a world of this stage's ranks."""
        with _alone(sys.modules[_Base.__module__], self.parallel_config, self.rank):
            super().init_device()


@contextlib.contextmanager
def _alone(module: Any, parallel: Any, rank: int) -> Generator[None]:
    """While vLLM's worker of `module` sets up its groups there is but one stage, and then the stage's group."""
    whole, stages = parallel.world_size, parallel.pipeline_parallel_size
    stage, member = divmod(rank, parallel.tensor_parallel_size)
    begin = getattr(module, _INIT)

    def begin_alone(config: Any, _rank: int, *arguments: Any, **named: Any) -> None:
        parallel.world_size, parallel.pipeline_parallel_size = whole // stages, 1
        try:
            begin(config, member, *arguments, **named)
        finally:
            parallel.world_size, parallel.pipeline_parallel_size = whole, stages
        _state._PP = FarGroup(_state._PP, stage, stages)

    setattr(module, _INIT, begin_alone)
    try:
        yield
    finally:
        setattr(module, _INIT, begin)
