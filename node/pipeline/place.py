"""Derive from a plan how vLLM is started as one stage: all that the stages of a plan must have alike.

Nothing here imports vLLM. A place goes to vLLM's own processes by an environment variable: in its config it
would make vLLM compile the model anew for every plan.
"""

import base64
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Any

import msgspec

from ...protocol.pipelines import PipelinePlan, PipelineShape, Stage
from ..config.engine import EngineConfig
from ..inference.vllm_arguments import head_size, kv_heads
from ..ops.errors import EngineError, UsageError


class StagePlace(msgspec.Struct, frozen=True):
    """One stage of a plan, for the process that computes it."""

    plan: PipelinePlan
    rank: int
    socket: str
    """Path of the Unix socket at which this node's process relays frames; empty for a port in memory."""

    @property
    def stage(self) -> Stage:
        """Its layers."""
        return self.plan.stages[self.rank]

    @property
    def shape(self) -> PipelineShape:
        """What all stages agree on."""
        return self.plan.shape

    @property
    def first(self) -> bool:
        """Whether it reads tokens, and schedules."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether it draws tokens."""
        return self.rank == len(self.plan.stages) - 1


STACKS = frozenset({"layers", "h", "blocks"})
"""What the part of a name before a layer's number is called."""
EMBEDDING = frozenset(
    {"embed_tokens", "wte", "wpe", "embed_in", "embed_positions", "word_embeddings"}
)
"""Tables that tokens are looked up in; the first stage's."""
HEAD = frozenset({"lm_head", "embed_out"})
NORM = frozenset({"norm", "ln_f", "final_layernorm", "final_layer_norm"})
"""Outside layers: the last stage's."""
SENSES = ("vision", "visual", "audio", "image", "multi_modal")
"""In a part of the name of what makes embeddings of something other than text; the first stage's."""


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to; None if it belongs to none that a plan cuts."""
    parts = name.split(".")
    if _sees(parts):
        return None
    for before, number in pairwise(parts):
        if before in STACKS and number.isdecimal():
            return int(number)
    return None


def names_of(
    stage: Stage, layers: int, names: Collection[str], *, tied: bool | None = None
) -> frozenset[str]:
    """Those of `names`, all tensors of a model of `layers` layers, that `stage` needs.

    A model without a head of its own draws by its embedding, so that first and last stage need that; `tied`
    says so where `names` cannot, as those of adapters.
    """
    if tied is None:
        tied = not any(HEAD.intersection(name.split(".")) for name in names)
    return frozenset(name for name in names if _needs(stage, layers, name, tied))


def share_of(plan: PipelinePlan, rank: int) -> Callable[[Collection[str]], frozenset[str]]:
    """What stage `rank` of `plan` needs of any state: a Share, see node/weights/payload.py."""
    stage = plan.stages[rank]
    return lambda names: names_of(stage, plan.layers, names)


def _needs(stage: Stage, layers: int, name: str, tied: bool) -> bool:
    first, last = stage.first == 0, stage.end == layers
    layer = layer_of(name)
    if layer is not None:
        # layers after those that the plan counts (some models predict further tokens) go with the last one
        return stage.first <= layer < stage.end or (last and layer >= layers)
    parts = name.split(".")
    if _sees(parts):
        return first
    if EMBEDDING.intersection(parts):
        return first or (last and tied)
    if HEAD.intersection(parts) or NORM.intersection(parts):
        return last
    return True


def _sees(parts: Collection[str]) -> bool:
    return any(sense in part for part in parts for sense in SENSES)


VARIABLE = "PRIMERL_PLACE"
_ROOM = f"{__package__}"
PROGRAM_MODULE = f"{_ROOM}.vllm_processes"
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
    if config.draft_tokens:
        raise UsageError(
            "a stage of a pipeline between nodes computes one token of a sequence in a step: remove "
            "engine.vllm.speculative_config"
        )
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
