"""Derive the vLLM arguments of one stage from a plan, so that all stages of the plan agree.

Nothing here imports vLLM. vLLM's processes get their StagePlace through an environment variable: in vLLM's
config it would change the compilation cache key, and the model would be recompiled for every plan.
"""

import base64
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Any

import msgspec

from ...protocol.pipelines import PipelinePlan, PipelineShape, Stage
from ..config.engine import EngineConfig
from ..errors import BAD_FILE, EngineError, UsageError


class StagePlace(msgspec.Struct, frozen=True):
    """The position of one stage in a plan, for the process that computes it."""

    plan: PipelinePlan
    rank: int
    socket: str
    """Path of the Unix socket of this node's process, which relays frames; empty for a port in memory."""

    @property
    def stage(self) -> Stage:
        """The node and layers of this stage."""
        return self.plan.stages[self.rank]

    @property
    def shape(self) -> PipelineShape:
        """The settings that all stages share."""
        return self.plan.shape

    @property
    def first(self) -> bool:
        """Whether this stage embeds tokens and schedules."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether this stage samples tokens."""
        return self.rank == len(self.plan.stages) - 1


STACKS = frozenset({"layers", "h", "blocks"})
"""Name parts that precede a layer's number."""
EMBEDDING = frozenset(
    {"embed_tokens", "wte", "wpe", "embed_in", "embed_positions", "word_embeddings"}
)
"""Embedding tables; on the first stage."""
HEAD = frozenset({"lm_head", "embed_out"})
NORM = frozenset({"norm", "ln_f", "final_layernorm", "final_layer_norm"})
"""Final norms, outside the layers; on the last stage."""
MODALITIES = ("vision", "visual", "audio", "image", "multi_modal")
"""Substrings of names of encoders for other inputs than text; on the first stage."""


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a tensor belongs to.

    Returns None for tensors outside the layers of a plan.
    """
    parts = name.split(".")
    if _is_encoder(parts):
        return None
    for before, number in pairwise(parts):
        if before in STACKS and number.isdecimal():
            return int(number)
    return None


def share_of(plan: PipelinePlan, rank: int) -> Callable[[Collection[str]], frozenset[str]]:
    """Return a Share (node/weights/payload.py): it selects the tensors of stage `rank` from a whole model's.

    With tied embeddings (no head among the names) the first and the last stage both need the embedding.
    """
    stage = plan.stages[rank]

    def select(names: Collection[str]) -> frozenset[str]:
        tied = not any(HEAD.intersection(name.split(".")) for name in names)
        return frozenset(name for name in names if _needs(stage, plan.layers, name, tied))

    return select


def _needs(stage: Stage, layers: int, name: str, tied: bool) -> bool:
    first, last = stage.first == 0, stage.end == layers
    layer = layer_of(name)
    if layer is not None:
        # layers beyond those of the plan (multi-token prediction) belong to the last stage
        return stage.first <= layer < stage.end or (last and layer >= layers)
    parts = name.split(".")
    if _is_encoder(parts):
        return first
    if EMBEDDING.intersection(parts):
        return first or (last and tied)
    if HEAD.intersection(parts) or NORM.intersection(parts):
        return last
    return True


def _is_encoder(parts: Collection[str]) -> bool:
    return any(word in part for part in parts for word in MODALITIES)


NOT_STAGE_0 = "only stage 0 of a pipeline generates: send the request there"
VARIABLE = "PRIMERL_PLACE"
_PACKAGE = f"{__package__}".rpartition(".")[0] + ".pipeline"
"""Where the processes of a pipeline's stages are; named, as it is not imported from here."""
PROGRAM_MODULE = f"{_PACKAGE}.vllm_processes"
HEAD_EXTENSION = f"{_PACKAGE}.vllm_stage_worker.HeadExtension"
STAGE_EXTENSION = f"{_PACKAGE}.vllm_stage_worker.StageExtension"
WORKER = f"{_PACKAGE}.vllm_rank.StageWorker"
PLANNED_ARGUMENTS = (
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
"""Engine arguments that the plan sets; operators cannot."""
START_SHARE = 0.05
"""Default gpu_memory_utilization of a stage. As the plan gives the cache size, it is only the share of GPU
memory that has to be free at the start."""
SPLITTING_PASSES = ("enable_sp", "fuse_gemm_comms")
"""Passes of vLLM's compiler that split hidden states between GPUs, in releases that have them."""


def encode_place(place: StagePlace) -> bytes:
    """Encode a place for decode_place()."""
    return msgspec.msgpack.encode(place)


def decode_place(body: bytes) -> StagePlace:
    """Decode a place. Raises EngineError."""
    try:
        return msgspec.msgpack.decode(body, type=StagePlace)
    except BAD_FILE as error:
        raise EngineError(f"the stage's place in the pipeline cannot be read ({error})") from error


def read_place(environ: Mapping[str, str]) -> StagePlace:
    """Read the place that environment_of() wrote. Raises EngineError."""
    return decode_place(base64.b64decode(environ.get(VARIABLE, "")))


def environment_of(place: StagePlace) -> dict[str, str]:
    """Make the environment variables of vLLM's processes."""
    stages = place.plan.stages
    return {
        VARIABLE: base64.b64encode(encode_place(place)).decode(),
        "VLLM_PP_LAYER_PARTITION": ",".join(str(stage.end - stage.first) for stage in stages),
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # its steps have another format
    }


def check_placed(config: EngineConfig, place: StagePlace, shape: Mapping[str, Any]) -> None:
    """Check that `config` can run the stage.

    Raises UsageError for settings that a stage cannot have, EngineError for a plan of another model.
    """
    for name, count in (("pp", config.pp), ("dp", config.replicas)):
        if count != 1:
            raise UsageError(
                f"engine.{name} is {count}, but a stage of a pipeline between nodes is one "
                "engine: set it to 1; use engine.tp for several GPUs of this host"
            )
    if config.sleep_after_s:
        raise UsageError("a stage of a pipeline does not sleep: set engine.sleep_after_s to 0")
    if config.draft_tokens:
        raise UsageError(
            "speculative decoding does not work in a pipeline between nodes: remove "
            "engine.vllm.speculative_config"
        )
    for name in PLANNED_ARGUMENTS:
        if name in config.vllm:
            raise UsageError(f"engine.vllm.{name} is set by the plan of a pipeline: remove it")
    check_passes(config.vllm.get("compilation_config"))
    if place.plan.layers != int(shape["num_hidden_layers"]):
        raise EngineError("the plan is for another model: the number of layers differs")
    wanted = place.shape
    if (wanted.hidden_size, wanted.dtype) != (int(shape["hidden_size"]), config.dtype):
        raise UsageError(
            f"the plan needs hidden states of {wanted.hidden_size} x {wanted.dtype}: set engine.dtype to "
            f"{wanted.dtype}"
        )
    if wanted.kv_tokens < wanted.max_model_len:
        raise EngineError("the plan's KV cache does not hold one sequence of full length")


def check_passes(compilation: Any) -> None:
    """Check that no compiler pass splits hidden states, which a stage sends whole.

    `compilation` is vLLM's compilation_config, as an object or a mapping. Raises UsageError.
    """
    passes = _field(compilation, "pass_config")
    for name in SPLITTING_PASSES:
        if _field(passes, name):
            raise UsageError(
                f"engine.vllm.compilation_config.pass_config.{name} splits hidden states between GPUs, which a "
                "pipeline stage cannot send: remove it"
            )


def placed_arguments(place: StagePlace, shape: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """Make the engine arguments that the plan sets.

    `shape` is the model's config.json, `tp` the stage's ranks. Bytes of a block on each rank = layers x 2 (key
    and value) x heads x head size x element size x block size. With fewer KV heads than ranks, heads are
    replicated.
    """
    from ..memory_plan.memory import ELEMENT
    from .vllm_arguments import head_size, kv_heads  # with the config of a whole run

    plan, stage = place.shape, place.stage
    blocks = plan.kv_tokens // plan.block_size + 1  # vLLM reserves block 0
    heads = max(1, kv_heads(shape) // tp)
    layer = 2 * heads * head_size(shape) * ELEMENT[plan.dtype] * plan.block_size
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


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
