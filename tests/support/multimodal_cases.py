"""Small random checkpoints that also read images."""

import shutil
from pathlib import Path
from typing import Any

import torch

from primerl.node.models import huggingface

from .engine_cases import SHAPE

SIZES: dict[str, Any] = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "eos_token_id": 1},
}
HYBRID: dict[str, Any] = {
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "full_attention_interval": 4, "attn_output_gate": True},
    **{"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
    **{"mamba_ssm_dtype": "float32", "output_gate_type": "swish"},
    "rope_parameters": {
        **{"mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default"},
        **{"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}
"""The keys of Qwen's published configs."""
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "shared_expert_intermediate_size": 32,
}
VISION = {
    **{"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64},
    **{"out_hidden_size": 64, "num_position_embeddings": 16},
}
PIXTRAL = {
    **{"model_type": "pixtral", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64},
    **{"num_attention_heads": 2, "image_size": 32, "patch_size": 16},
}
MISTRAL = {"vision_config": PIXTRAL, "image_token_index": 300}
SCALED = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "llama_4_scaling_beta": 0.1},
    "original_max_position_embeddings": 16,
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", {"text_config": {**SIZES, **HYBRID}, "vision_config": VISION}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {"text_config": {**SIZES, **HYBRID, **EXPERTS}, "vision_config": VISION},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "text_config": {
                **SIZES,
                "rope_parameters": {
                    **{"mrope_interleaved": True, "mrope_section": [8, 4, 4]},
                    **{"rope_type": "default", "rope_theta": 5e6},
                },
            },
            "vision_config": {**VISION, "deepstack_visual_indexes": [0]},
        },
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": {"model_type": "ministral3", **SIZES, "rope_parameters": SCALED},
            **MISTRAL,
        },
    ),
    "mistral3/mistral": (
        "Mistral3",
        {"text_config": {"model_type": "mistral", **SIZES, "sliding_window": None}, **MISTRAL},
    ),
    "gemma3": (
        "Gemma3",
        {
            "text_config": SIZES,
            "vision_config": {
                **{"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2},
                **{"intermediate_size": 64, "image_size": 28, "patch_size": 14},
            },
            **{"image_token_index": 300, "boi_token_index": 301, "eoi_token_index": 302},
        },
    ),
}


def saved(kind: str, directory: Path, most: str = "1GB") -> Any:
    """Write a random checkpoint of a kind in files of at most `most`; return its model."""
    import transformers

    name, config = CHECKPOINTS[kind]
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{name}ForConditionalGeneration")(
        getattr(transformers, f"{name}Config")(**config)
    )
    model.save_pretrained(directory, max_shard_size=most)
    with torch.random.fork_rng():
        huggingface.create(directory / "made", SHAPE, 0)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / "made" / name).rename(directory / name)
    shutil.rmtree(directory / "made")
    return model.eval()
