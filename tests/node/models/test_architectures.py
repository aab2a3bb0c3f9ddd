"""Supported architectures, and their parity with transformers."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from primerl.node.config.run import TrainingConfig
from primerl.node.errors import EngineError
from primerl.node.models import huggingface
from primerl.node.models.architectures import ARCHITECTURES, untrainable
from primerl.node.training.backend import Sample
from primerl.node.training.learner import Learner
from primerl.node.training.packing import pack

LENGTHS = [60, 23, 40]
LONGEST = 128
VOCABULARY = 96
NOTHING = 1e-4
"""Gradients below it are rounding."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
MINISTRAL = {**YARN, "llama_4_scaling_beta": 0.5}
"""Scales queries by their position, from the original length on."""
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
GROWING = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
HYBRID = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MIXED = ["sliding_attention", "full_attention"]
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
KINDS = {"sliding_attention": PLAIN, "full_attention": LINEAR}
"""Of positions, for each kind of layer."""
CASES: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v3", LATENT),
    ("deepseek_v3", {**LATENT, "rope_parameters": YARN}),
    ("gemma", {"head_dim": 8}),
    ("glm", {"head_dim": 8, "attention_bias": True}),
    ("glm4", {"head_dim": 8}),
    ("gemma2", {"head_dim": 8, "sliding_window": 16, "final_logit_softcapping": 2.0}),
    ("gemma2", {"head_dim": 8, "attn_logit_softcapping": 1.5, "final_logit_softcapping": None}),
    ("gemma3_text", {"head_dim": 8, "sliding_window": 16, "layer_types": MIXED}),
    (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 16, "layer_types": MIXED, "rope_parameters": KINDS},
    ),
    (
        "glm4_moe",
        {
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    ("glm4_moe_lite", {**LATENT, "mlp_layer_types": ["dense", "sparse"]}),
    (
        "gpt_oss",
        {"head_dim": 8, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1},
    ),
    ("granite", {"logits_scaling": 8.0}),
    ("granite", {"logits_scaling": 6.0, "tie_word_embeddings": True}),
    ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 6.0}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": LLAMA3, "attention_dropout": 0.5, "hidden_act": "gelu"}),
    ("llama", {"rope_parameters": LINEAR, "head_dim": 16}),
    ("llama", {"rope_parameters": GROWING, "max_position_embeddings": LONGEST}),
    ("ministral3", {"head_dim": 8, "sliding_window": 16}),
    ("ministral3", {"head_dim": 8, "rope_parameters": MINISTRAL}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": LONGEST}),
    ("mistral", {"sliding_window": 16}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.3}),
    ("olmo2", {}),
    ("olmo3", {"sliding_window": 16, "layer_types": MIXED}),
    ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    (
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.0, "norm_topk_prob": True},
    ),
    ("phi3", {}),
    ("phi3", {"sliding_window": 16, "resid_pdrop": 0.3, "embd_pdrop": 0.3}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "layer_types": MIXED}),
    ("phi3", {"rope_parameters": {**LONG, "original_max_position_embeddings": LONGEST}}),
    ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24, "norm_topk_prob": True}),
    ("qwen3", {"head_dim": 8, "attention_bias": True}),
    (
        "qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": LONGEST,
            "max_window_layers": 1,
        },
    ),
    ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [0], "norm_topk_prob": True}),
    ("qwen3_next", {**EXPERTS, **HYBRID, "shared_expert_intermediate_size": 24}),
    ("qwen3_5_text", HYBRID),
    ("qwen3_5_moe_text", {**EXPERTS, **HYBRID, "shared_expert_intermediate_size": 24}),
    ("seed_oss", {"head_dim": 8, "residual_dropout": 0.1, "attention_dropout": 0.1}),
    ("seed_oss", {"head_dim": 8, "attention_out_bias": True, "mlp_bias": True}),
    ("smollm3", {"no_rope_layer_interval": 2}),
]


def saved(family: str, changes: dict[str, Any], directory: Path) -> Path:
    """A random model of a family, as transformers writes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make: Any = AutoConfig.for_model
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(make(family, **SIZES | changes)).save_pretrained(directory)
    return directory


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **changes}


def apart(directory: Path) -> tuple[float, float]:
    """How far training on a packed row is from transformers' forward and backward of each sequence: at most,
    of the logprobs (nats) and of the gradients of their sum, as a part of the largest of each tensor."""
    rng = random.Random(0)
    rows = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    config = TrainingConfig(threads=1, device="cpu", seq_len=LONGEST)
    learner: Any = Learner.build(directory, config, max_steps=1, seed=0, temperature=1.0)
    samples = [Sample(row, [True] * len(row), [-1.0] * len(row), 1.0) for row in rows]
    (packed,) = pack(samples, LONGEST).rank(0)
    found = learner._model.read(packed, 1.0).logprobs
    found.sum().backward()
    plain: Any = huggingface.load_model(directory)
    wanted: list[torch.Tensor] = []
    for row in sorted(rows, key=len, reverse=True):  # packed in this order
        ids = torch.tensor([row])
        logits = plain(input_ids=ids, use_cache=False).logits[0, :-1]
        wanted.append(-F.cross_entropy(logits, ids[0, 1:], reduction="none"))
        wanted[-1].sum().backward()
    own = dict(learner._model.causal.named_parameters())
    gradients = [0.0]
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None and (most := float(parameter.grad.abs().max())) > NOTHING:
            gradients.append(float((own[name].grad - parameter.grad).abs().max()) / most)
    return float((found - torch.cat(wanted)).detach().abs().max()), max(gradients)


@pytest.mark.parametrize(("family", "changes"), CASES, ids=lambda one: str(one)[:40])
def test_what_is_accepted_is_computed_as_transformers_does(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    directory = saved(family, changes, tmp_path)
    assert untrainable(json.loads((directory / "config.json").read_text()), LONGEST) == ""
    logprobs, gradients = apart(directory)
    assert logprobs < 1e-4
    assert gradients < 1e-3


def test_every_architecture_on_the_list_was_compared() -> None:
    assert {family for family, _ in CASES} == set(ARCHITECTURES)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (config_of("mistral", sliding_window=64), ""),
    (config_of("mistral"), ""),
    (config_of("mistral", sliding_window="all"), "sliding_window is 'all'"),
    (config_of("mistral", sliding_window=-1), "sliding_window is -1"),
    (config_of("qwen2", use_sliding_window=False, sliding_window=8), ""),
    (
        config_of("qwen3", layer_types=["full_attention", "linear_attention"]),
        "layers of type linear_attention",
    ),
    (config_of("gpt2", n_embd=32), "architecture 'gpt2' .* own forward pass: choose one of"),
    (config_of("mimo"), "architecture 'mimo' .* code of a checkpoint is never run"),
    (config_of("../../evil"), "architecture '../../evil' has not been compared"),
    (config_of("gemma3_text", attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0"),
    (config_of("gemma2", use_bidirectional_attention=True), "use_bidirectional_attention is True"),
    ({"text_config": config_of("qwen3"), "model_type": "mistral3"}, "architecture 'mistral3'"),
    ({}, "architecture 'none'"),
    (config_of("llama", rope_scaling=GROWING), r"\(dynamic\) depends .* beyond 64 tokens"),
    (config_of("phi3", rope_scaling=LONG), r"\(longrope\) depends .* beyond 32 tokens"),
    (config_of("llama", rope_scaling={"type": "mrope"}), "RoPE scaling 'mrope'"),
    (
        config_of("olmo3", rope_parameters={"full_attention": GROWING}),
        r"\(dynamic\) depends .* beyond 64 tokens",
    ),
    (config_of("ministral3"), ""),
    (config_of("ministral3", rope_parameters=MINISTRAL), ""),
    (config_of("ministral3", rope_parameters=YARN), "lack 'llama_4_scaling_beta'"),
    (config_of("llama", rope_parameters={"other": LINEAR}), "structure that is not supported"),
    (
        config_of("llama", rope_parameters={"rope_type": "default"}, rope_scaling=GROWING),
        r"\(dynamic\) depends .* beyond 64 tokens",
    ),
    (
        config_of("qwen3", layer_types=5),
        "layers of type 5: only full_attention, sliding_attention are supported",
    ),
    (config_of("qwen3", layer_types="full_attention"), ""),
    (config_of("llama", alibi=True, attn_logit_softcapping=50.0), ""),
    (config_of("llama", quantization_config={"bits": 4}), "weights are quantized"),
    (config_of("llama", quantization={"bits": 4, "group_size": 64}), "weights are quantized"),
    (config_of("llama", architectures=["LlamaForCausalLM"]), ""),
    (config_of("llama", architectures="LlamaForCausalLM"), ""),
    (config_of("llama", architectures=["LlamaForCausalLMEagle3"]), "is a LlamaForCausalLMEagle3"),
    (config_of("qwen2", architectures=["Qwen3ForCausalLM"]), "is a Qwen3ForCausalLM"),
    (config_of("llama", architectures=["Llama.*"]), r"is a Llama\.\*, which is no model"),
    (config_of("granite", logits_scaling=8.0), ""),
    (config_of("deepseek_v3", scoring_func="softmax"), "scoring_func is softmax"),
    (config_of("glm4_moe_lite", topk_method="greedy"), "topk_method is greedy"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=lambda one: str(one)[:60])
def test_what_cannot_be_computed_exactly_is_refused_with_the_reason(
    config: dict[str, Any], reason: str
) -> None:
    found = untrainable(config, LONGEST)
    assert re.search(reason, found) if reason else found == ""
    assert "\n" not in found


def test_a_model_without_key_value_heads_is_refused_and_not_a_traceback(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    make: Any = GPT2Config
    shape = make(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(shape).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="architecture 'gpt2' has not been compared"):
        apart(tmp_path)
