import json
import math
from pathlib import Path
from typing import Any

import pytest

from primerl.node.errors import EngineError
from primerl.node.memory_plan.shape import FAMILIES, read_shape
from primerl.node.models.architectures import text_config

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 130,
}
LINEAR = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {}),
    ("mixtral", {"num_local_experts": 4}),
    ("qwen2", {}),
    (
        "qwen2_moe",
        {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    ("qwen3", {"head_dim": 32}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 32, "decoder_sparse_step": 2}),
    ("gemma", {"head_dim": 32}),
    ("gemma2", {"head_dim": 32}),
    ("gemma3_text", {"head_dim": 32}),
    ("glm", {"head_dim": 32, "attention_bias": True, "pad_token_id": 0}),
    ("glm4", {"head_dim": 32, "pad_token_id": 0}),
    (
        "glm4_moe",
        {
            "head_dim": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    ("gpt_oss", {"head_dim": 32, "num_local_experts": 4}),
    ("granite", {}),
    ("granitemoe", {"num_local_experts": 4}),
    ("ministral3", {"head_dim": 32}),
    ("olmo2", {"pad_token_id": 0}),
    ("olmo3", {"head_dim": 32, "pad_token_id": 0}),
    ("olmoe", {"num_experts": 4}),
    ("phi3", {"pad_token_id": 0}),
    ("seed_oss", {"head_dim": 32, "attention_bias": True}),
    ("seed_oss", {"head_dim": 32, "attention_bias": False, "attention_out_bias": True}),
    ("smollm3", {"pad_token_id": 0}),
    ("qwen3_5_text", LINEAR),
    ("qwen3_5_moe_text", {**LINEAR, "num_experts": 4, "moe_intermediate_size": 32}),
    ("qwen3_next", {**LINEAR, "num_experts": 4, "moe_intermediate_size": 32}),
]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("family", "more"), CASES)
def test_parameters_are_those_of_transformers_own_model(
    family: str, more: dict[str, Any], tied: bool
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.for_model(family, **SMALL, **more, tie_word_embeddings=tied)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    shape = read_shape(config.to_dict())
    assert shape.parameters == sum(one.numel() for one in model.parameters())
    assert shape.exact


def test_every_known_family_is_compared_with_transformers() -> None:
    assert {family for family, _ in CASES} == set(FAMILIES)


def test_a_saved_model_has_as_many_elements_in_its_files(tmp_path: Path) -> None:
    from safetensors import safe_open

    from primerl.node.models import huggingface

    huggingface.create(tmp_path, {}, seed=0)
    shape = read_shape(json.loads((tmp_path / "config.json").read_text()))
    found = 0
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            found += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    assert found == shape.parameters


def qwen(**more: Any) -> dict[str, Any]:
    return {"model_type": "qwen3", **SMALL, "head_dim": 16, **more}


def test_ranks_share_matrices_and_each_has_the_norms() -> None:
    shape = read_shape(qwen(vocab_size=128, tie_word_embeddings=False))
    norms = 3 * (2 * 64 + 2 * 16) + 64
    assert shape.rank_parameters() == shape.parameters
    assert shape.rank_parameters(tp=2) == (shape.parameters - norms) // 2 + norms


def test_key_heads_that_cannot_be_shared_are_on_several_ranks() -> None:
    shape = read_shape(qwen(vocab_size=128))
    keys = 2 * 64 * 16  # one head of keys and one of values, of one layer
    four, two = shape.rank_parameters(tp=4), shape.rank_parameters(tp=2)
    assert four - two // 2 > 3 * keys // 2


def test_stages_share_layers_and_the_tables_stand_apart() -> None:
    shape = read_shape(qwen(vocab_size=128, tie_word_embeddings=False, num_hidden_layers=4))
    layer = shape.layer_parameters()
    assert shape.rank_parameters(pp=2) == 2 * layer + 128 * 64 + 64


def test_layers_with_a_window_are_counted_apart() -> None:
    gemma = read_shape(
        {
            "model_type": "gemma3_text",
            **SMALL,
            "head_dim": 16,
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        }
    )
    assert (gemma.windowed_layers, gemma.window) == (2, 512)
    mistral = read_shape({"model_type": "mistral", **SMALL, "sliding_window": 4096})
    assert (mistral.windowed_layers, mistral.window) == (3, 4096)
    qwen2 = {"model_type": "qwen2", **SMALL, "sliding_window": 4096, "use_sliding_window": False}
    assert read_shape(qwen2).windowed_layers == 0


def test_a_model_that_also_reads_images_is_planned_by_the_config_of_its_text_model() -> None:
    outer = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **SMALL}}
    assert read_shape(text_config(outer)).family == "gemma3_text"
    other = {"model_type": "llava", "text_config": {"model_type": "mistral", **SMALL}}
    with pytest.raises(EngineError, match="no num_hidden_layers: use a causal language model"):
        read_shape(text_config(other))


def test_an_unknown_family_is_counted_as_a_llama_and_said_to_be() -> None:
    shape = read_shape({"model_type": "newcomer", **SMALL})
    assert not shape.exact
    llama = read_shape({"model_type": "llama", **SMALL})
    assert shape.parameters == llama.parameters


@pytest.mark.parametrize("missing", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_what_is_no_language_model_is_refused(missing: str) -> None:
    config = {key: value for key, value in qwen().items() if key != missing}
    with pytest.raises(EngineError, match=missing):
        read_shape(config)


def test_a_cache_of_another_kind_is_not_guessed_at() -> None:
    with pytest.raises(EngineError, match="not plain keys and values"):
        read_shape(qwen(model_type="deepseek_v3", kv_lora_rank=512))
