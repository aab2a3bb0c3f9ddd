"""Decide from config.json whether a model can be trained exactly, before anything starts.

The trainer runs transformers' layers, and replaces two parts by its own: attention within each sequence of a
packed row (causal, full or sliding window, with soft caps and sinks where the model has them), and logits as
the last hidden states times the head's weights, divided and capped where the model does so. Dropout and the
noise of routers are off: what is sampled is what is trained. Nothing is allowed by
default: an architecture is in ARCHITECTURES only if a test compares its packed logprobs with transformers' own,
and an unknown key of config.json is refused unless its value is neutral. `--dry-run`, `doctor`, `train`, `rl`,
`sft` and each rank of a trainer call the same function.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..config.paths import expand_home
from ..config.run import ModelConfig
from ..ops.errors import EngineError, UsageError
from .json_files import read_json
from .text_models import reads_images

IGNORED = frozenset(
    """_attn_implementation_autoset _name_or_path add_cross_attention architectures auto_map aux_loss_alpha
    bos_token_id chunk_size_feed_forward decoder_start_token_id dtype eod_token_id eos_token_id ep_size
    finetuning_task id2label initializer_range label2id max_length max_window_layers min_length model_max_length
    model_type num_nextn_predict_layers output_attentions output_hidden_states output_router_logits pad_token_id
    prefix pretraining_tp problem_type return_dict router_aux_loss_coef sep_token_id seq_aux
    task_specific_params tokenizer_class torch_dtype transformers_version transformers.js_config
    unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache""".split()
)
"""Keys without effect on the forward pass of the listed architectures: labels, tokens, losses, formats."""

COMMON = frozenset(
    """attention_bias attention_dropout head_dim hidden_act hidden_size intermediate_size
    max_position_embeddings mlp_bias num_attention_heads num_hidden_layers num_key_value_heads
    partial_rotary_factor rms_norm_eps rope_theta tie_word_embeddings vocab_size""".split()
)
"""Keys that transformers' layers read, in training as in inference. Nothing is dropped out here."""

CHECKED = frozenset(
    """layer_types original_max_position_embeddings quantization_config rope_parameters rope_scaling
    sliding_window use_sliding_window""".split()
)
"""Keys that untrainable() checks."""

NEUTRAL: Mapping[str, object] = {"is_causal": True}
"""Keys that may only have this value, as transformers' masks depend on them in every architecture."""

WINDOWS = frozenset({"full_attention", "sliding_attention"})
"""Supported attention layer types."""

EXPERTS = frozenset(
    """decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
    num_experts_per_tok num_local_experts""".split()
)
LINEAR = frozenset(
    """full_attention_interval linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
    linear_num_value_heads linear_value_head_dim""".split()
)
QWEN3_5 = frozenset({"attn_output_gate", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
"""The output gate is always there in transformers, and its head for multi-token prediction never."""
QWEN3_5_NEUTRAL = (("mamba_ssm_dtype", "float32"), ("output_gate_type", "swish"))
LATENT = frozenset(
    """first_k_dense_replace kv_lora_rank moe_intermediate_size n_group n_routed_experts n_shared_experts
    norm_topk_prob num_experts_per_tok num_local_experts q_lora_rank qk_head_dim qk_nope_head_dim
    qk_rope_head_dim rope_interleave routed_scaling_factor topk_group v_head_dim""".split()
)

FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE scaling types whose angles do not depend on the sequence length."""
GROWING_ROPE = ("dynamic", "longrope", "su")
"""RoPE scaling types whose angles depend on the longest sequence of a batch, beyond the original length."""


@dataclass(frozen=True)
class Architecture:
    """What a `model_type` supports beyond the common keys."""

    keys: frozenset[str] = frozenset()
    """Further keys that transformers' layers read, in training as in inference."""
    linear: bool = False
    """Whether linear-attention layers are supported."""
    neutral: tuple[tuple[str, object], ...] = ()
    """Keys that may only have this value, the one that is computed here."""


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
        # transformers' attention has no soft cap in this architecture
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
        frozenset(
            """attention_multiplier embedding_multiplier logits_scaling
            residual_multiplier""".split()
        ),
    ),
    "llama": Architecture(),
    "mistral": Architecture(),
    "mixtral": Architecture(EXPERTS | {"router_jitter_noise"}),
    "olmo2": Architecture(),
    "olmo3": Architecture(),
    "phi3": Architecture(frozenset({"embd_pdrop", "resid_pdrop"})),
    "qwen2": Architecture(),
    "qwen2_moe": Architecture(
        EXPERTS | {"qkv_bias", "shared_expert_intermediate_size"},
    ),
    "qwen3": Architecture(),
    "qwen3_moe": Architecture(EXPERTS),
    "qwen3_5_moe_text": Architecture(
        EXPERTS | LINEAR | {"shared_expert_intermediate_size", *QWEN3_5},
        linear=True,
        neutral=QWEN3_5_NEUTRAL,
    ),
    "qwen3_5_text": Architecture(LINEAR | QWEN3_5, linear=True, neutral=QWEN3_5_NEUTRAL),
    "qwen3_next": Architecture(EXPERTS | LINEAR | {"shared_expert_intermediate_size"}, linear=True),
    "smollm3": Architecture(
        frozenset({"no_rope_layer_interval", "no_rope_layers"}),
    ),
}
"""`model_type` -> architecture; test_architectures.py compares the logprobs of each with transformers' own."""


def untrainable(config: Mapping[str, Any], longest: int) -> str:
    """Return why a model cannot be trained exactly on sequences of up to `longest` tokens.

    Returns "" if it can. `config` is its config.json.
    """
    return next(_faults(config, longest), "")


def check_trainable(model: ModelConfig, longest: int) -> None:
    """Check that a model can be trained exactly on sequences of up to `longest` tokens.

    Raises UsageError if it cannot, EngineError for an unreadable directory. If the hub does not answer, the
    check is skipped: the trainer repeats it once it has the model.
    """
    if model.create is None and "name" not in model.model_fields_set:
        return  # the config names no model
    try:
        config = read_config(model)
    except EngineError:
        if expand_home(model.name).is_dir():
            raise
        return
    if reason := untrainable(config, longest):
        raise UsageError(f"model {model.name!r} cannot be trained: {reason}")


def read_config(model: ModelConfig) -> Mapping[str, Any]:
    """Read a model's config.json from its directory or the hub.

    Of a model that is still to be created, return the config that it will have; of one that also reads images,
    that of its text model. Raises EngineError.
    """
    if model.create is not None:
        family = "qwen3_moe" if model.create.num_experts else "qwen3"
        return {"model_type": family, **model.create.shape()}
    directory = expand_home(model.name)
    if directory.is_dir():
        return text_config(read_json(directory / "config.json"))
    from .huggingface import fetch_config

    return text_config(fetch_config(model.name))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the text model of a model that also reads images; that of any other as it is.

    Raises EngineError for a config that transformers cannot read.
    """
    if not reads_images(config):
        return config
    from . import huggingface

    return huggingface.multimodal_text_config(config)


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
        yield "its weights are quantized: use the model in bf16"
    yield from _layers(config, known)
    yield from _positions(config, longest)
    neutral = {**NEUTRAL, **dict(known.neutral)}
    for key, value in config.items():
        if key in neutral and value not in (None, neutral[key]):
            yield f"{key} is {value} in its config.json, but only {neutral[key]} is supported"
        elif value and key not in IGNORED | COMMON | CHECKED | known.keys | neutral.keys():
            yield (
                f"its config.json sets {key!r}, whose effect on {name!r} has not been tested: "
                "remove the key from a local copy if it has no effect"
            )


def _layers(config: Mapping[str, Any], known: Architecture) -> Iterator[str]:
    """Yield the faults of layer types and of the sliding window."""
    listed: Any = config.get("layer_types") or ()
    kinds: set[str] = set(map(str, listed if isinstance(listed, list | tuple) else [listed]))
    trained = WINDOWS | ({"linear_attention"} if known.linear else set[str]())
    if others := kinds - trained:
        supported = ", ".join(sorted(trained))
        yield f"it has layers of type {', '.join(sorted(others))}: only {supported} are supported"
    window = config.get("sliding_window")
    if not (window is None or (isinstance(window, int) and window >= 0)):
        yield f"its sliding_window is {window!r}, which is not a number of tokens"


def _positions(config: Mapping[str, Any], longest: int) -> Iterator[str]:
    # transformers prefers the second if both are set; check both
    for rope in (config.get("rope_parameters"), config.get("rope_scaling")):
        yield from _scaling(rope or {}, config, longest)


def _scaling(rope: Any, config: Mapping[str, Any], longest: int) -> Iterator[str]:
    """Yield the faults of RoPE scaling, which must depend on the position only."""
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if isinstance(rope, dict) and rope and rope.keys() <= WINDOWS:
        for one in rope.values():  # one entry per layer type
            yield from _scaling(one or {}, config, longest)
    elif isinstance(rope, dict) and any(isinstance(one, dict) for one in rope.values()):
        yield "its rope_parameters have a structure that is not supported"
    elif kind in GROWING_ROPE:
        within = rope.get("original_max_position_embeddings") or config.get(
            "original_max_position_embeddings", config.get("max_position_embeddings")
        )
        if not (isinstance(within, int) and within >= longest):
            yield (
                f"its RoPE scaling ({kind}) depends on the longest sequence of a batch beyond {within} tokens, "
                f"and sequences may have {longest}: lower training.seq_len to {within} or choose another model"
            )
    elif kind not in FIXED_ROPE:
        yield f"its RoPE scaling {kind!r} has not been compared with transformers"
