"""Predict the memory of pipeline stages, and the memory that this machine can offer to one."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...protocol.manifests import RunManifest
from ..config.engine import PIPELINES_NEED_VLLM, EngineConfig, PipelineConfig
from ..errors import EngineError
from ..gpus import GpuMemory, machine_memory, usable, visible_memory
from ..storage.chunk_store import Store
from .memory import (
    ELEMENT,
    GIB,
    RESERVE,
    UTILIZATION,
    Device,
    gib,
    plan_engine,
    tensor_parallel,
    uncounted,
)
from .planner import Costs, PlanLimits
from .shape import VOCABULARY_MULTIPLE, ModelShape, read_shape

logger = logging.getLogger(__name__)

WEIGHTS = "weights", "the next weights"
"""Items of an engine's memory that are split over stages."""
CPU_PART = 0.8
"""Share of the machine's free memory that is offered; the rest is for other programs."""


@dataclass(frozen=True)
class CutModel:
    """A run's model with the settings of its pipeline plans."""

    shape: ModelShape
    terms: PlanLimits

    def costs(self, engine: str) -> Costs:
        """Return the memory costs of stages.

        Raises EngineError if `engine` cannot run stages of the model.
        """
        why = cannot_cut(self.shape, engine)
        if why:
            raise EngineError(why)
        return stage_costs(self.shape, self.terms.dtype)


def cut_model(run: RunManifest, store: Store, max_sequences: int) -> CutModel | None:
    """Read a run's model from its files in `store`; None if it cannot be split into stages.

    A pipeline has at most `max_sequences` in flight.
    """
    if run.adapters is not None:
        return None  # a stage would need its part of both base and adapters
    file = next((file for file in run.model.files if file.name == "config.json"), None)
    try:
        shape = read_shape(json.loads((file and store.get(file.chunk.digest)) or b"{}"))
    except (EngineError, ValueError, RecursionError) as error:
        logger.info("this model cannot run in pipelines: %s", error)
        return None
    return CutModel(
        shape,
        PlanLimits(
            dtype=run.proofs.dtype,
            hidden_size=shape.hidden,
            max_model_len=min(run.limits.max_model_len, shape.longest or run.limits.max_model_len),
            max_sequences=max_sequences,
            fingerprint=run.proofs.fingerprint,
        ),
    )


def stage_costs(shape: ModelShape, dtype: Literal["float32", "bfloat16"]) -> Costs:
    """Compute the memory costs of vLLM stages, with an unquantized cache.

    The first and the last stage each hold an embedding table, even if embeddings are tied.
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
    """Return why `engine` cannot run stages of the model; "" if it can."""
    if engine != "vllm":
        return PIPELINES_NEED_VLLM
    return "" if shape.layers > 1 else "a model with one layer cannot be split into stages"


def memory_to_offer(
    config: EngineConfig,
    pp: PipelineConfig,
    shape: ModelShape,
    *,
    fingerprint: str = "projection",
    there: Sequence[GpuMemory] | None = None,
    free: int | None = None,
) -> int:
    """Compute the bytes that this machine offers for weights, keys and values; may be 0.

    The engine's other memory is subtracted. Summed over engine.tp GPUs; if there are more GPUs than KV heads,
    some hold copies and less is offered. A configured `pp.memory_gib` is returned as it is. `there` and `free`:
    this machine's GPUs and free memory, queried if not given.
    """
    if pp.memory_gib:
        return int(pp.memory_gib * GIB)
    device, ranks = _device(config, there, free)
    if device.kind == "cuda":
        share = float(config.vllm.get("gpu_memory_utilization") or UTILIZATION)
        beyond = uncounted(config, shape).total
        budget = min(int(share * device.nbytes), device.nbytes - device.taken - beyond - RESERVE)
    else:
        budget = int(CPU_PART * (device.nbytes - device.taken))
    config = config.model_copy(update={"tp": ranks})
    plan = plan_engine(config, shape, device, fingerprint=fingerprint)
    others = sum(item.nbytes for item in plan.engine if item.name not in WEIGHTS)
    others += sum(item.nbytes for item in plan.beside if item.name == "proofs")
    devices = ranks if device.kind == "cuda" else 1  # without GPUs all ranks share one memory
    copies = max(1, -(-ranks // shape.kv_heads))
    return max(0, devices * (budget - others) // copies)


def cannot_hold(
    config: EngineConfig,
    shape: ModelShape,
    *,
    fingerprint: str = "projection",
    there: Sequence[GpuMemory] | None = None,
    free: int | None = None,
) -> str:
    """Say how much memory this machine lacks for the whole model, by estimate.

    Returns "" if it fits.
    """
    device, ranks = _device(config, there, free)
    config = config.model_copy(update={"tp": ranks})
    plan = plan_engine(config, shape, device, fingerprint=fingerprint)
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
    """Return the smallest device of the engine, and its tensor-parallel ranks (hf: 1)."""
    if there is None:
        there = visible_memory() if usable() and config.device != "cpu" else ()
    ranks = max(1, len(there)) if config.tp == "auto" else tensor_parallel(config)
    ranks = ranks if config.type == "vllm" else 1
    if not there:
        known = machine_memory().available if free is None else free
        return Device("cpu", known), ranks
    smallest = min(there[:ranks], key=lambda gpu: gpu.free)
    return Device("cuda", smallest.total, smallest.total - smallest.free), ranks
