"""Model families: a small random model of each, and the support table of docs/models.md.

python -m support.family_cases      (prints the table)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.engine_cases import SHAPE, STOP

from primerl.node.models import huggingface
from primerl.node.weights.state import Changed, State, Tensor

SIZES: dict[str, Any] = {
    "vocab_size": SHAPE["vocab_size"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 256,
    "bos_token_id": None,
    "eos_token_id": STOP,
    "initializer_range": 0.1,
}
"""Heads of 32: vLLM without a GPU computes few sizes."""
PROMPT = tuple(b"tell me more about all of it")
WINDOW = 12
"""Shorter than the prompt."""
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LATENT = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    # DeepSeek's own sizes: vLLM's kernels know no others
    "kv_lora_rank": 512,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 2,
    "topk_method": "noaux_tc",  # without it vLLM has no bias of the router
}
DEEPSEEK = ("first_k_dense_replace", "topk_method")
LITE = {"mlp_layer_types": ["dense", "sparse"]}
SCALED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "llama_4_scaling_beta": 0.5,
}
"""Of Ministral 3. vLLM computes it up to the original length."""
GATES = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ON_CPUS, ON_GPUS, SINCE_32, NOT_RUN = "yes", "on a GPU", "from 0.32", "not tried"


@dataclass(frozen=True)
class Family:
    """One `model_type`."""

    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of its config, from SIZES."""
    what: str = "full attention"
    vllm: str = ON_CPUS
    adapters: tuple[str, ...] = (*ATTENTION, *GATES)
    """Linear layers that get adapters."""


FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(
        LATENT,
        "latent attention, experts",
        ON_GPUS,
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    ),
    "gemma": Family({"head_dim": 32}),
    "gemma2": Family(
        {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 32},
        "windows in every second layer, soft caps",
    ),
    "gemma3_text": Family(
        {"head_dim": 32, "query_pre_attn_scalar": 32, **MIXED}, "windows in most layers"
    ),
    "glm": Family({"head_dim": 32}, adapters=(*ATTENTION, "gate_up_proj", "down_proj")),
    "glm4": Family({"head_dim": 32}, adapters=(*ATTENTION, "gate_up_proj", "down_proj")),
    "glm4_moe": Family(
        {
            "head_dim": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        "experts",
        ON_CPUS,
        ATTENTION,
    ),
    "glm4_moe_lite": Family(
        {**{key: size for key, size in LATENT.items() if key not in DEEPSEEK}, **LITE},
        "latent attention, experts",
        NOT_RUN,
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    ),
    "gpt_oss": Family(
        {"head_dim": 32, "sliding_window": WINDOW, **LOCAL},
        "windows in every second layer, sinks, experts",
        ON_GPUS,
        ATTENTION,
    ),
    "granite": Family({"logits_scaling": 2.0}),  # 8 hides what adapters do
    "granitemoe": Family({**LOCAL, "logits_scaling": 6.0}, "experts", ON_CPUS, ATTENTION),
    "llama": Family(),
    "ministral3": Family({"head_dim": 32, "rope_parameters": SCALED}, "queries scaled by position"),
    "mistral": Family({"sliding_window": WINDOW}, "windows"),
    "mixtral": Family({"sliding_window": None, **LOCAL}, "experts", ON_CPUS, ATTENTION),
    "olmo2": Family(),
    "olmo3": Family(MIXED, "windows in most layers"),
    "olmoe": Family({"num_experts": 4, "num_experts_per_tok": 2}, "experts", ON_CPUS, ATTENTION),
    "phi3": Family(adapters=("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "qwen2": Family(),
    "qwen2_moe": Family(
        {**EXPERTS, "shared_expert_intermediate_size": 32}, "experts", ON_CPUS, ATTENTION
    ),
    "qwen3": Family({"head_dim": 32}),
    "qwen3_5_moe_text": Family(
        {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32},
        "linear attention in most layers, experts",
        SINCE_32,
        ATTENTION,
    ),
    "qwen3_5_text": Family(LINEAR, "linear attention in most layers", SINCE_32),
    "qwen3_moe": Family({**EXPERTS, "head_dim": 32}, "experts", ON_CPUS, ATTENTION),
    "qwen3_next": Family(
        {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32},
        "linear attention in most layers, experts",
        ON_CPUS,
        ATTENTION,
    ),
    "seed_oss": Family({"head_dim": 32}),
    "smollm3": Family(),
}


def make_family(name: str, directory: Path, seed: int = 0, **changes: Any) -> State:
    """A random model of a family in `directory`, with tokenizer; its bf16 state.

    `changes` of its config.
    """
    model = random_family(name, directory, seed, **changes)
    model.float().save_pretrained(directory)
    return huggingface.policy_state(model)


def random_family(name: str, directory: Path, seed: int = 0, **changes: Any) -> Any:
    """A random model of a family in bf16, on torch's default device.

    Its config and tokenizer are in `directory`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    small = SHAPE | {"num_hidden_layers": 1}
    with torch.device("cpu"):
        huggingface.create(directory, small, seed)  # for the tokenizer
    make: Any = AutoConfig.for_model
    config = make(name, **{**SIZES, **FAMILIES[name].changes, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # all alike in a new model
                parameter.data += 0.1 * torch.randn_like(parameter)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    return model.to(torch.bfloat16)


def stepped(old: State, new: State) -> tuple[State, Changed]:
    """One element in twenty of every tensor from `new`, and where."""
    rng = np.random.default_rng(0)
    state: State = {}
    changed: dict[str, np.ndarray | None] = {}
    for name, tensor in old.items():
        positions = np.flatnonzero(rng.random(tensor.data.size) < 0.05)
        data = tensor.data.copy()
        data[positions] = new[name].data[positions]
        state[name], changed[name] = Tensor(tensor.dtype, tensor.shape, data), positions
    return state, changed


def table() -> str:
    """The table of docs/models.md."""
    rows = [
        "| `model_type` | layers | trained | embedded engine and audits | vLLM | adapters on |",
        "|---|---|---|---|---|---|",
    ]
    for name, family in sorted(FAMILIES.items()):
        targets = ", ".join(f"`{one}`" for one in family.adapters)
        rows.append(f"| `{name}` | {family.what} | yes | yes | {family.vllm} | {targets} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
