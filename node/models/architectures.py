"""Which models are trained exactly, decided from config.json alone, before anything starts.

The trainer runs a model's own layers as transformers has them, and computes two things by itself: attention
within each sequence of a packed row (causal, over all tokens before or a window of them, with soft caps and
sinks where a model has them), and logits as the last hidden states times the head's weights, with a soft cap
where a model has one. Everything is off by default: an architecture is listed in ARCHITECTURES once a test has
compared its packed logprobs with transformers' own, and a key of config.json that is not known for it is
refused, unless it is switched off. `--dry-run`, `doctor`, `train`, `rl`, `sft` and each rank of a trainer ask
the same function.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.run import ModelConfig
from ..ops.errors import EngineError, UsageError
from .json_files import read_json

IGNORED = frozenset(
    """_attn_implementation_autoset _name_or_path add_cross_attention architectures auto_map aux_loss_alpha
    bos_token_id chunk_size_feed_forward decoder_start_token_id dtype eod_token_id eos_token_id ep_size
    finetuning_task id2label initializer_range label2id max_length max_window_layers min_length model_max_length
    model_type num_nextn_predict_layers output_attentions output_hidden_states output_router_logits pad_token_id
    prefix pretraining_tp problem_type return_dict router_aux_loss_coef sep_token_id seq_aux
    task_specific_params tokenizer_class torch_dtype transformers_version transformers.js_config
    unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache""".split()
)
"""Keys that change nothing of a forward pass of the listed architectures: labels, tokens, losses, formats."""

COMMON = frozenset(
    """attention_bias attention_dropout head_dim hidden_act hidden_size intermediate_size
    max_position_embeddings mlp_bias num_attention_heads num_hidden_layers num_key_value_heads
    partial_rotary_factor rms_norm_eps rope_theta tie_word_embeddings vocab_size""".split()
)
"""Keys that transformers' layers read, the same in training. Attention drops nothing here, as in a sampler."""

CHECKED = frozenset(
    """layer_types original_max_position_embeddings quantization_config rope_parameters rope_scaling
    sliding_window use_sliding_window""".split()
)
"""Keys that untrainable() looks at."""

NEUTRAL: Mapping[str, object] = {"is_causal": True}
"""Keys that may only have this value: masks of transformers follow them, whatever the architecture."""

WINDOWS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that are trained."""

EXPERTS = frozenset(
    """decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
    num_experts_per_tok num_local_experts""".split()
)
LINEAR = frozenset(
    """full_attention_interval linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
    linear_num_value_heads linear_value_head_dim""".split()
)
LATENT = frozenset(
    """first_k_dense_replace kv_lora_rank moe_intermediate_size n_group n_routed_experts n_shared_experts
    norm_topk_prob num_experts_per_tok num_local_experts q_lora_rank qk_head_dim qk_nope_head_dim
    qk_rope_head_dim rope_interleave routed_scaling_factor topk_group v_head_dim""".split()
)

FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of scaled positions whose angles are the same whatever the length."""
GROWING_ROPE = ("dynamic", "longrope", "su")
"""Kinds whose angles change with the longest sequence of a batch, from the original number of positions on."""


@dataclass(frozen=True)
class Architecture:
    """What is known of one `model_type` beyond the keys that all have in common."""

    keys: frozenset[str] = frozenset()
    """Further keys that transformers' layers read, the same in training."""
    linear: bool = False
    """Whether layers of linear attention are trained."""
    neutral: tuple[tuple[str, object], ...] = ()
    """Keys that may only have the value that transformers' layers compute."""


ARCHITECTURES: dict[str, Architecture] = {
    "deepseek_v3": Architecture(
        LATENT,
        neutral=(("moe_layer_freq", 1), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")),
    ),
    "gemma": Architecture(frozenset({"hidden_activation"})),
    "gemma2": Architecture(
        frozenset(
            """attn_logit_softcapping final_logit_softcapping hidden_activation
            query_pre_attn_scalar""".split()
        ),
        neutral=(("use_bidirectional_attention", False),),
    ),
    "gemma3_text": Architecture(
        frozenset(
            """_sliding_window_pattern final_logit_softcapping hidden_activation query_pre_attn_scalar
            sliding_window_pattern""".split()
        ),
        # attention of transformers has no cap here
        neutral=(("attn_logit_softcapping", 0), ("use_bidirectional_attention", False)),
    ),
    "glm": Architecture(),
    "glm4": Architecture(),
    "glm4_moe": Architecture(
        EXPERTS
        | frozenset(
            """first_k_dense_replace n_group n_routed_experts n_shared_experts routed_scaling_factor
            topk_group use_qk_norm""".split()
        ),
    ),
    "gpt_oss": Architecture(EXPERTS | {"swiglu_alpha", "swiglu_limit"}),
    "granite": Architecture(
        frozenset({"attention_multiplier", "embedding_multiplier", "residual_multiplier"}),
        neutral=(("logits_scaling", 1),),
    ),
    "llama": Architecture(),
    "mistral": Architecture(),
    "mixtral": Architecture(EXPERTS, neutral=(("router_jitter_noise", 0),)),
    "olmo2": Architecture(),
    "olmo3": Architecture(),
    "phi3": Architecture(neutral=(("embd_pdrop", 0), ("resid_pdrop", 0))),
    "qwen2": Architecture(),
    "qwen2_moe": Architecture(
        EXPERTS | {"qkv_bias", "shared_expert_intermediate_size"},
    ),
    "qwen3": Architecture(),
    "qwen3_moe": Architecture(EXPERTS),
    "qwen3_next": Architecture(EXPERTS | LINEAR | {"shared_expert_intermediate_size"}, linear=True),
    "qwen3_5_text": Architecture(LINEAR | {"attn_output_gate"}, linear=True),
    "smollm3": Architecture(
        frozenset({"no_rope_layer_interval", "no_rope_layers"}),
    ),
}
"""By `model_type`: those whose logprobs test_architectures.py compares with transformers' own."""


def untrainable(config: Mapping[str, Any], longest: int) -> str:
    """Why the model of this config.json cannot be trained exactly on sequences of up to `longest` tokens.

    Empty if it can.
    """
    return next(_faults(config, longest), "")


def check_trainable(model: ModelConfig, longest: int) -> None:
    """Raise UsageError for a model that cannot be trained exactly, EngineError for a broken directory.

    A hub that cannot be asked is no reason to refuse: the trainer asks again once it has the model.
    """
    if model.create is None and "name" not in model.model_fields_set:
        return  # no model was chosen
    try:
        config = read_config(model)
    except EngineError:
        if Path(model.name).expanduser().is_dir():
            raise
        return
    if reason := untrainable(config, longest):
        raise UsageError(f"model {model.name!r} cannot be trained: {reason}")


def read_config(model: ModelConfig) -> Mapping[str, Any]:
    """The config.json of a model, of a directory or from the hub, or what it will be. Raises EngineError."""
    if model.create is not None:
        family = "qwen3_moe" if model.create.num_experts else "qwen3"
        return {"model_type": family, **model.create.shape()}
    directory = Path(model.name).expanduser()
    if directory.is_dir():
        return read_json(directory / "config.json")
    from .huggingface import fetch_config

    return fetch_config(model.name)


def _faults(config: Mapping[str, Any], longest: int) -> Iterator[str]:
    name = str(config.get("model_type", "none"))
    known = ARCHITECTURES.get(name)
    if known is None:
        yield (
            f"its architecture {name!r} has not been compared with transformers' own forward pass: "
            f"choose one of {', '.join(sorted(ARCHITECTURES))}"
        )
        return
    if config.get("quantization_config"):
        yield "its weights are quantized: take the model in bf16"
    yield from _layers(config, known)
    yield from _positions(config, longest)
    neutral = {**NEUTRAL, **dict(known.neutral)}
    for key, value in config.items():
        if key in neutral and value not in (None, neutral[key]):
            yield f"{key} is {value} in its config.json, and only {neutral[key]} is computed here"
        elif value and key not in IGNORED | COMMON | CHECKED | known.keys | neutral.keys():
            yield (
                f"its config.json sets {key!r}, whose effect on {name!r} has not been compared: "
                "take the key out of a local copy if it changes nothing"
            )


def _layers(config: Mapping[str, Any], known: Architecture) -> Iterator[str]:
    """Layers of kinds that are not trained, and windows that are none."""
    listed: Any = config.get("layer_types") or ()
    kinds: set[str] = set(map(str, listed if isinstance(listed, list | tuple) else [listed]))
    trained = WINDOWS | ({"linear_attention"} if known.linear else set[str]())
    if others := kinds - trained:
        yield f"it has layers of {', '.join(sorted(others))}: {', '.join(sorted(trained))} are trained"
    window = config.get("sliding_window")
    if not (window is None or (isinstance(window, int) and window >= 0)):
        yield f"its sliding_window is {window!r}: that is no number of tokens"


def _positions(config: Mapping[str, Any], longest: int) -> Iterator[str]:
    # transformers takes the second where both are set; each is looked at
    for rope in (config.get("rope_parameters"), config.get("rope_scaling")):
        yield from _scaling(rope or {}, config, longest)


def _scaling(rope: Any, config: Mapping[str, Any], longest: int) -> Iterator[str]:
    """Positions that are scaled in a way that depends on more than the position."""
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if isinstance(rope, dict) and rope and rope.keys() <= WINDOWS:
        for one in rope.values():  # of each kind of layer
            yield from _scaling(one or {}, config, longest)
    elif isinstance(rope, dict) and any(isinstance(one, dict) for one in rope.values()):
        yield "its layers turn positions in ways that are not known here (rope_parameters)"
    elif kind in GROWING_ROPE:
        within = rope.get("original_max_position_embeddings") or config.get(
            "original_max_position_embeddings", config.get("max_position_embeddings")
        )
        if not (isinstance(within, int) and within >= longest):
            yield (
                f"its positions are scaled by the longest sequence of a batch ({kind}) beyond {within} tokens, "
                f"and sequences may have {longest}: lower training.seq_len to {within} or choose another model"
            )
    elif kind not in FIXED_ROPE:
        yield f"its positions are scaled as {kind!r}, which has not been compared with transformers"
