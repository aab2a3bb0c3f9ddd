"""How much of a GPU's memory vLLM may take where the trainer is on it too, by what the trainer will need.

An estimate: a part of what it leaves is kept free for what the plan does not know.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from ..config.run import ModelConfig, RunConfig
from ..memory_plan.memory import worker_share
from ..memory_plan.shape import ModelShape, read_shape
from ..models.json_files import read_json
from ..ops.errors import EngineError, UsageError
from ..ops.gpu_memory import GpuMemory, visible

logger = logging.getLogger(__name__)

KEPT_FREE = 0.1
"""Of what the trainer leaves."""
MOST = 0.7
"""More cache than that makes no worker faster, and all that is planned here is an estimate."""
LEAST = 0.03


def planned_share(
    config: RunConfig, gpus: Callable[[], Sequence[GpuMemory]] = visible
) -> float | None:
    """vLLM's gpu_memory_utilization beside the trainer of `config`; None if model or GPU are not known.

    Raises UsageError where the trainer leaves nothing.
    """
    shape = shape_of(config.model)
    there = gpus() if shape is not None else ()
    if shape is None or not there:
        return None
    share = min(
        MOST, (1 - KEPT_FREE) * worker_share(config, shape, min(one.total for one in there))
    )
    if share < LEAST:
        raise UsageError(
            "trainer and vLLM worker do not fit on one GPU (`primerl-node doctor` has the plan): use two, "
            "a smaller model, or training.optimizer_offload; to try it all the same, set "
            "engine.vllm.gpu_memory_utilization"
        )
    return round(share, 2)


def shape_of(model: ModelConfig) -> ModelShape | None:
    """The shape of a model that is made here or lies in a directory."""
    try:
        if model.create is not None:
            family = "qwen3_moe" if model.create.num_experts else "qwen3"
            return read_shape({"model_type": family, **model.create.model_dump()})
        directory = Path(model.name).expanduser()
        return read_shape(read_json(directory / "config.json")) if directory.is_dir() else None
    except EngineError as error:
        logger.info("memory is not planned: %s", error)
        return None
