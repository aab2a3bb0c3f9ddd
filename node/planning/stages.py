"""What the stages of a model take, what a machine can give to one, and whether it could hold all of it."""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...protocol.manifests import RunManifest
from .. import gpus
from ..engine_config import PIPELINES_NEED_VLLM, EngineConfig, PipelineConfig
from ..errors import EngineError
from ..gpu_memory import GpuMemory, visible
from ..machine_memory import machine_memory
from ..pipeline.planner import Costs, Terms
from ..store import Store
from .bill import GIB, Bill, gib
from .shape import VOCABULARY_MULTIPLE, ModelShape, read_shape
from .worker import (
    ELEMENT,
    RESERVE,
    UTILIZATION,
    Device,
    plan_worker,
    tensor_parallel,
    uncounted,
)

logger = logging.getLogger(__name__)

WEIGHTS = "weights", "the next weights"
"""Lines of a worker's bill that a stage holds only its part of."""
CPU_PART = 0.8
"""Of the machine's free memory that is offered: others live there too."""


@dataclass(frozen=True)
class CutModel:
    """A run's model, as its trainer plans pipelines of it."""

    shape: ModelShape
    terms: Terms

    def costs(self, engine: str) -> Costs:
        """Of a stage. Raises EngineError where this engine has no stages of the model."""
        why = cannot_cut(self.shape, engine)
        if why:
            raise EngineError(why)
        return stage_costs(self.shape, self.terms.dtype)


def cut_model(run: RunManifest, store: Store, max_sequences: int) -> CutModel | None:
    """The model of a run, whose files are in `store`; None where pipelines cannot have it.

    At most `max_sequences` are in flight in a pipeline.
    """
    if run.adapters is not None:
        return None  # a stage would need its part of the base as well as of the adapters
    file = next((file for file in run.model.files if file.name == "config.json"), None)
    try:
        shape = read_shape(json.loads((file and store.get(file.chunk.digest)) or b"{}"))
    except (EngineError, ValueError) as error:
        logger.info("no pipelines of this model: %s", error)
        return None
    return CutModel(
        shape,
        Terms(
            dtype=run.proofs.dtype,
            hidden_size=shape.hidden,
            max_model_len=min(run.limits.max_model_len, shape.longest or run.limits.max_model_len),
            max_sequences=max_sequences,
            fingerprint=run.proofs.fingerprint,
        ),
    )


def stage_costs(shape: ModelShape, dtype: Literal["float32", "bfloat16"]) -> Costs:
    """Of a stage of vLLM, with an unquantized cache.

    Tables are on the first and on the last stage, also where they are tied.
    """
    element = ELEMENT[dtype]
    rows = -(-shape.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    table, layer = rows * shape.hidden * element, shape.layer_parameters() * element
    return Costs(
        layers=shape.layers,
        layer=layer,
        first=table,
        last=table + shape.hidden * element,
        layer_token=2 * shape.kv_width * element,
    )


def cannot_cut(shape: ModelShape, engine: str) -> str:
    """Why this engine has no stages of the model; empty if it has."""
    if engine != "vllm":
        return PIPELINES_NEED_VLLM
    return "" if shape.layers > 1 else "a model of one layer is not cut"


def memory_to_offer(
    config: EngineConfig,
    pp: PipelineConfig,
    shape: ModelShape,
    *,
    fingerprint: str = "projection",
    there: Sequence[GpuMemory] | None = None,
    free: int | None = None,
) -> int:
    """Bytes for weights, keys and values; what else the engine takes is off already. May be 0.

    Of all engine.tp GPUs together, as each holds its part. Where there are more GPUs than heads of keys and
    values, some hold copies, and so much less is offered. `pp.memory_gib` is taken as it is said. `there` and
    `free`: this machine's GPUs and memory, asked for if they are not given.
    """
    if pp.memory_gib:
        return int(pp.memory_gib * GIB)
    device, ranks = _device(config, there, free)
    if device.kind == "cuda":
        share = float(config.vllm.get("gpu_memory_utilization") or UTILIZATION)
        beyond = Bill.of(uncounted(config, shape)).total
        budget = min(int(share * device.nbytes), device.nbytes - device.taken - beyond - RESERVE)
    else:
        budget = int(CPU_PART * (device.nbytes - device.taken))
    config = config.model_copy(update={"tp": ranks})
    plan = plan_worker(config, shape, device, fingerprint=fingerprint)
    besides = sum(line.nbytes for line in plan.engine if line.name not in WEIGHTS)
    devices = ranks if device.kind == "cuda" else 1  # without GPUs all ranks take of one memory
    copies = max(1, -(-ranks // shape.kv_heads))
    return max(0, devices * (budget - besides - _beside(plan.beside)) // copies)


def cannot_hold(
    config: EngineConfig,
    shape: ModelShape,
    *,
    fingerprint: str = "projection",
    there: Sequence[GpuMemory] | None = None,
    free: int | None = None,
) -> str:
    """Why the whole model does not fit into this machine; empty where it does, by our estimates."""
    device, ranks = _device(config, there, free)
    config = config.model_copy(update={"tp": ranks})
    plan = plan_worker(config, shape, device, fingerprint=fingerprint)
    if plan.fits:
        return ""
    where = "a GPU" if device.kind == "cuda" else "a machine"
    return (
        f"{gib(plan.missing)} short of the model and one sequence of {plan.length} tokens on {where} with "
        f"{gib(device.nbytes - device.taken)} free"
    )


def _device(
    config: EngineConfig, there: Sequence[GpuMemory] | None, free: int | None
) -> tuple[Device, int]:
    """What the engine would compute on, and how many ranks of it share each layer: of hf always one."""
    if there is None:
        there = visible() if gpus.usable(os.environ) and config.device != "cpu" else ()
    ranks = max(1, len(there)) if config.tp == "auto" else tensor_parallel(config)
    ranks = ranks if config.type == "vllm" else 1
    if not there:
        known = machine_memory().available if free is None else free
        return Device("cpu", known), ranks
    smallest = min(there[:ranks], key=lambda gpu: gpu.free)
    return Device("cuda", smallest.total, smallest.total - smallest.free), ranks


def _beside(bill: Bill) -> int:
    """What is kept beside the engine, of which updates shrink with the stage: those are not counted."""
    return sum(line.nbytes for line in bill if line.name == "proofs")
