"""How a model is spread over GPUs: engine.tp, pp and dp, by its config.json.

Read by commands at once, also for a dry run: nothing heavy may be imported here.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.run import EngineConfig
from ..ops.errors import EngineError, UsageError
from ..ops.gpus import is_slice, visible


def resolve_parallel(
    config: EngineConfig, shape: Mapping[str, Any], gpus: int | None = None
) -> EngineConfig:
    """`config` with engine.tp a number that this model and machine allow. `shape` is config.json.

    `gpus`: how many are visible, 0 for a CPU; None asks. Raises UsageError.
    """
    count = visible_gpus(config) if gpus is None else gpus
    others = config.pp * config.dp
    if config.tp == "auto":
        config = config.model_copy(update={"tp": max(1, count // others)})
    check_parallel(config, shape)
    if 0 < count < int(config.tp) * others:
        raise UsageError(
            f"engine.tp {config.tp} x pp {config.pp} x dp {config.dp} wants {int(config.tp) * others} "
            f"GPUs, and {count} can be used here: lower one of them, or show more in CUDA_VISIBLE_DEVICES"
        )
    return config


def check_parallel(config: EngineConfig, shape: Mapping[str, Any]) -> None:
    """Raise UsageError if the model cannot be cut like that; engine.tp "auto" is not looked at.

    As vLLM cuts: heads, the width of the inner layer, and key-value heads or else copies of them.
    """
    layers = int(shape["num_hidden_layers"])
    if config.pp > layers:
        raise UsageError(f"engine.pp is {config.pp} but the model has {layers} layers: lower it")
    whole = bool(config.vllm.get("enable_expert_parallel"))
    if config.tp != "auto" and not _cuts(config.tp, shape, whole):
        heads, most = int(shape["num_attention_heads"]), max(8, config.tp)
        good = [str(tp) for tp in range(1, min(heads, most) + 1) if _cuts(tp, shape, whole)]
        raise UsageError(
            f"engine.tp is {config.tp}, which does not divide the model ({heads} attention heads, "
            f"{kv_heads(shape)} of keys and values): set it to one of {', '.join(good)}"
        )


def visible_gpus(config: EngineConfig) -> int:
    """How many GPUs an engine of this config can join; CUDA is not started. 0: it computes on the CPU."""
    if config.device == "cpu":
        return 0
    names = visible(os.environ)
    # CUDA gives a process one slice of a GPU, and not another GPU beside it
    return 1 if any(map(is_slice, names)) else len(names)


def read_shape(model_dir: Path) -> dict[str, Any]:
    """The model's config.json. Raises EngineError if it does not describe a causal language model."""
    path = model_dir / "config.json"
    try:
        shape = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read ({error}): fetch the model again") from error
    wanted = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    for name in wanted:
        if not isinstance(shape, dict) or not isinstance(shape.get(name), int):
            raise EngineError(f"{path} has no {name}: use a causal language model")
    return shape


def head_size(shape: Mapping[str, Any]) -> int:
    """Elements of one attention head, by config.json."""
    return int(shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"])


def has_experts(shape: Mapping[str, Any]) -> bool:
    """Whether it is a mixture of experts, by config.json."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(int(shape.get(name) or 0) for name in names)


def check_cpu(shape: Mapping[str, Any]) -> None:
    """Raise EngineError for a model that vLLM without a GPU would compute wrongly.

    It packs experts when it starts and goes on reading that, whatever is written to the parameters.
    """
    if has_experts(shape):
        raise EngineError(
            "the model has experts, which vLLM without a GPU keeps in a form that no version can be written "
            "to: set engine.type to hf"
        )


def kv_heads(shape: Mapping[str, Any]) -> int:
    """Attention heads of keys and values, by config.json."""
    return int(shape.get("num_key_value_heads") or shape["num_attention_heads"])


def _cuts(tp: int, shape: Mapping[str, Any], whole_experts: bool) -> bool:
    heads, pairs = int(shape["num_attention_heads"]), kv_heads(shape)
    inner = int(shape.get("intermediate_size") or tp)
    if has_experts(shape):
        inner = tp if whole_experts else int(shape.get("moe_intermediate_size") or inner)
    return heads % tp == 0 and inner % tp == 0 and (pairs % tp == 0 or tp % pairs == 0)
