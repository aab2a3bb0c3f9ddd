"""Derive from a plan how vLLM is started as one stage: all that the stages of a plan must have alike.

Nothing here imports vLLM. A place goes to vLLM's own processes by an environment variable: in its config it
would make vLLM compile the model anew for every plan.
"""

import base64
from collections.abc import Mapping
from typing import Any

import msgspec

from ..config.engine import EngineConfig
from ..inference.vllm_arguments import head_size, kv_heads
from ..ops.errors import EngineError, UsageError
from .place import StagePlace

VARIABLE = "PRIMERL_PLACE"
_ROOM = f"{__package__}"
HEAD_PROGRAM_MODULE = f"{_ROOM}.vllm_head"
STAGE_PROGRAM_MODULE = f"{_ROOM}.vllm_stage"
HEAD_EXTENSION = f"{_ROOM}.vllm_stage_worker.HeadExtension"
STAGE_EXTENSION = f"{_ROOM}.vllm_stage_worker.StageExtension"
WORKER = f"{_ROOM}.vllm_rank.StageWorker"
DECIDED = (
    "block_size",
    "max_num_batched_tokens",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "async_scheduling",
    "scheduler_cls",
    "distributed_executor_backend",
    "enable_expert_parallel",
    "kv_offloading_size",
)
"""Engine arguments that the plan decides."""
START_SHARE = 0.05
"""Of a GPU's memory that has to be free when vLLM starts, which is all that it means where the size of the
cache is given; `engine.vllm.gpu_memory_utilization` says otherwise."""
SPLITTING = ("enable_sp", "fuse_gemm_comms")
"""Passes of vLLM's compiler that cut states between GPUs, where a release has them."""
_BYTES = {"float32": 4, "bfloat16": 2}


def encode_place(place: StagePlace) -> bytes:
    """For decode_place()."""
    return msgspec.msgpack.encode(place)


def decode_place(body: bytes) -> StagePlace:
    """Raises EngineError."""
    try:
        return msgspec.msgpack.decode(body, type=StagePlace)
    except msgspec.DecodeError as error:
        raise EngineError(f"the place in the pipeline cannot be read ({error})") from error


def read_place(environ: Mapping[str, str]) -> StagePlace:
    """The place that set_place() put there. Raises EngineError."""
    return decode_place(base64.b64decode(environ.get(VARIABLE, "")))


def environment_of(place: StagePlace) -> dict[str, str]:
    """What vLLM's processes must have in their environment."""
    stages = place.plan.stages
    return {
        VARIABLE: base64.b64encode(encode_place(place)).decode(),
        "VLLM_PP_LAYER_PARTITION": ",".join(str(one.end - one.first) for one in stages),
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # whose steps have other contents
    }


def check_placed(config: EngineConfig, place: StagePlace, shape: Mapping[str, Any]) -> None:
    """Raise UsageError for a config that cannot be one stage, EngineError for a plan of another model."""
    for name in ("pp", "dp"):
        if getattr(config, name) != 1:
            raise UsageError(
                f"engine.{name} is {getattr(config, name)}, and a stage of a pipeline between nodes is one "
                "engine: set it to 1; engine.tp joins GPUs of this host"
            )
    if config.sleep_after_s:
        raise UsageError("a stage of a pipeline does not sleep: set engine.sleep_after_s to 0")
    for name in DECIDED:
        if name in config.vllm:
            raise UsageError(f"engine.vllm.{name} is the plan's to decide in a pipeline: remove it")
    check_passes(config.vllm.get("compilation_config"))
    if place.plan.layers != int(shape["num_hidden_layers"]):
        raise EngineError("the plan is of another model: its layers are not as many as this one's")
    wanted = place.shape
    if (wanted.hidden_size, wanted.dtype) != (int(shape["hidden_size"]), config.dtype):
        raise UsageError(
            f"the plan wants states of {wanted.hidden_size} x {wanted.dtype}: set engine.dtype to that"
        )
    if wanted.kv_tokens < wanted.max_model_len:
        raise EngineError("the plan has no room for one sequence of full length")


def check_passes(compilation: Any) -> None:
    """Raise UsageError for what would split the states that a stage hands on; `compilation` is vLLM's
    compilation_config, or what engine.vllm says of it."""
    passes = _part(compilation, "pass_config")
    for name in SPLITTING:
        if _part(passes, name):
            raise UsageError(
                f"engine.vllm.compilation_config.pass_config.{name} leaves each GPU a part of the states, and "
                "whole ones go to the next stage: remove it"
            )


def placed_arguments(place: StagePlace, shape: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """Engine arguments that the plan decides; `shape` is the model's config.json, `tp` the stage's ranks.

    Bytes of a block on each rank = layers x 2 (key and value) x heads x head size x element size x block size.
    Fewer heads than ranks are copied.
    """
    plan, stage = place.shape, place.stage
    blocks = plan.kv_tokens // plan.block_size + 1  # the first one is vLLM's own
    heads = max(1, kv_heads(shape) // tp)
    layer = 2 * heads * head_size(shape) * _BYTES[plan.dtype] * plan.block_size
    return {
        "pipeline_parallel_size": len(place.plan.stages),
        "tensor_parallel_size": tp,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_sequences,
        "max_num_batched_tokens": plan.max_step_tokens,
        "block_size": plan.block_size,
        "num_gpu_blocks_override": blocks,
        "kv_cache_memory_bytes": blocks * layer * (stage.end - stage.first),
        "enable_chunked_prefill": True,
        "async_scheduling": False,
        "disable_hybrid_kv_cache_manager": True,
        "worker_cls": WORKER,
        "worker_extension_cls": HEAD_EXTENSION if place.first else STAGE_EXTENSION,
    }


def _part(whole: Any, name: str) -> Any:
    return whole.get(name) if isinstance(whole, Mapping) else getattr(whole, name, None)
