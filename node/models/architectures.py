"""Decide from config.json whether a model can be trained exactly, before anything starts.

A key counts by its effect on what transformers computes. One that a test compared is known here. Any other is
looked up in transformers' source of the family: what is not read there has no effect, and what is read is for
training/parity.py to compare.

The trainer runs transformers' layers, and replaces two parts by its own: attention within each sequence of a
packed row (causal, full or sliding window, with soft caps and sinks where the model has them), and logits as
the last hidden states times the head's weights, divided and capped where the model does so. Dropout and the
noise of routers are off: what is sampled is what is trained. An architecture is in ARCHITECTURES only if a
test compares its packed logprobs with transformers' own. No torch, and transformers is read, not imported.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..config.paths import expand_home
from ..config.run import ModelConfig
from .created_model import SHAPE_FIELDS, created_config
from .json_files import read_json
from .text_models import QUANTIZED, reads_images

IGNORED = frozenset(
    """_name_or_path add_cross_attention architectures auto_map bos_token_id chunk_size_feed_forward dtype
    eos_token_id id2label initializer_range label2id max_length max_window_layers model_type
    num_nextn_predict_layers output_attentions output_hidden_states output_router_logits pad_token_id prefix
    pretraining_tp problem_type return_dict router_aux_loss_coef sep_token_id tokenizer_class torch_dtype
    transformers_version use_cache""".split()
)
"""Keys that most models have, or transformers reads, without effect on the forward pass: labels, tokens,
losses, formats."""

COMMON = frozenset(
    """attention_bias attention_dropout head_dim hidden_act hidden_size intermediate_size
    max_position_embeddings mlp_bias num_attention_heads num_hidden_layers num_key_value_heads
    partial_rotary_factor rms_norm_eps rope_theta tie_word_embeddings vocab_size""".split()
)
"""Keys that transformers' layers read, in training as in inference. Nothing is dropped out here."""

CHECKED = frozenset(
    """layer_types original_max_position_embeddings rope_parameters rope_scaling sliding_window
    use_sliding_window""".split()
)
"""Keys that untrainable() checks."""

WINDOWS = frozenset({"full_attention", "sliding_attention"})
"""Supported attention layer types."""

EXPERTS = frozenset(
    """decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
    num_experts_per_tok num_local_experts""".split()
)
GRANITE = frozenset(
    """attention_multiplier embedding_multiplier logits_scaling residual_multiplier""".split()
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
ROUTING = (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"))
"""What transformers' routers always do, and vLLM's do if config.json says so."""

FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE scaling types whose angles do not depend on the sequence length."""
GROWING_ROPE = ("dynamic", "longrope", "su")
"""RoPE scaling types whose angles depend on the longest sequence of a batch, beyond the original length."""


@dataclass(frozen=True)
class Architecture:
    """Keys that a `model_type` supports beyond the common ones."""

    keys: frozenset[str] = frozenset()
    """Further keys that transformers' layers read, in training as in inference."""
    linear: bool = False
    """Whether linear-attention layers are supported."""
    neutral: tuple[tuple[str, object], ...] = ()
    """Keys that may only have this value, the one that is computed here."""
    positions: tuple[str, ...] = ()
    """Keys that rope_parameters need, where they are given."""


ARCHITECTURES: dict[str, Architecture] = {
    "deepseek_v3": Architecture(
        LATENT,
        neutral=(("moe_layer_freq", 1), *ROUTING),
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
    "glm4_moe_lite": Architecture(LATENT | {"mlp_layer_types"}, neutral=ROUTING),
    "gpt_oss": Architecture(EXPERTS | {"swiglu_alpha", "swiglu_limit"}),
    "granite": Architecture(GRANITE),
    "granitemoe": Architecture(GRANITE | EXPERTS),
    "llama": Architecture(),
    "ministral3": Architecture(
        positions=("llama_4_scaling_beta", "original_max_position_embeddings")
    ),
    "mistral": Architecture(),
    "mixtral": Architecture(EXPERTS | {"router_jitter_noise"}),
    "olmo2": Architecture(),
    "olmo3": Architecture(),
    "olmoe": Architecture(EXPERTS | {"clip_qkv"}),
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
    "seed_oss": Architecture(frozenset({"attention_out_bias", "residual_dropout"})),
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


def keys_without_effect(config: Mapping[str, Any]) -> list[str]:
    """List the keys of config.json that nothing computes with: transformers does not read them."""
    read = _reads(_family(config))
    return [key for key in _unknown(config) if config[key] and key not in read]


def keys_to_compare(config: Mapping[str, Any]) -> list[str]:
    """List the keys of config.json that transformers reads, and whose effect no test compared.

    Of those that are false or 0 only what the family itself reads: old files list all that others may have.
    """
    name = _family(config)
    own = frozenset(_words(_sources(name)))
    return [key for key in _unknown(config) if key in (_reads(name) if config[key] else own)]


def strange_tensors(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """List the names of a checkpoint's tensors with a part that transformers' source of the family never uses.

    Some may be old names that it knows all the same.
    """
    known = frozenset(_words(_sources(_family(config))))
    return sorted(
        name
        for name in names
        if any(not part.isdigit() and part not in known for part in name.split("."))
    )


def read_config(model: ModelConfig) -> Mapping[str, Any]:
    """Read a model's config.json from its directory or the hub.

    Of a model that is still to be created, return the config that it will have; of one that also reads images,
    that of its text model. Raises EngineError.
    """
    if model.create is not None:
        config = created_config(model.create)
        if config.keys() - SHAPE_FIELDS:  # transformers is imported for these alone
            from .huggingface import check_fields

            check_fields(config)
        return config
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
    name = _family(config)
    known = ARCHITECTURES.get(name)
    if known is None:
        why = "" if _is_known(name) else " (there is none, and code of a checkpoint is never run)"
        yield (
            f"its architecture {name!r} has not been compared with transformers' own forward pass{why}: "
            f"choose one of {', '.join(sorted(ARCHITECTURES))}"
        )
        return
    if any(config.get(key) for key in QUANTIZED):
        yield "its weights are quantized: use the model in bf16"
    yield from _classes(config, name)
    yield from _layers(config, known)
    yield from _positions(config, longest)
    rope: Any = config.get("rope_parameters") or config.get("rope_scaling")
    for key in known.positions if isinstance(rope, dict) else ():
        if rope.get(key) is None:
            yield f"its rope_parameters lack {key!r}, which transformers computes with"
    for key, neutral in known.neutral:
        if config.get(key) not in (None, neutral):
            yield f"{key} is {config[key]} in its config.json, but only {neutral} is supported"


def _family(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type", "none"))


def _unknown(config: Mapping[str, Any]) -> list[str]:
    """List the keys that are given and not known here, in order."""
    known = ARCHITECTURES.get(_family(config), Architecture())
    neutral = dict(known.neutral).keys()
    listed = IGNORED | COMMON | CHECKED | known.keys | neutral | frozenset(QUANTIZED)
    return [key for key, value in config.items() if value is not None and key not in listed]


def _classes(config: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield a fault if config.json names a class that transformers has not in this family.

    Such are drafts for speculative decoding, and models of own code.
    """
    if find_spec("transformers") is None:
        yield "transformers is not installed: pip install 'primerl-node[run]'"
        return
    files = _sources(name)
    if not files:
        yield f"the installed transformers has no {name!r}: install a later one"
        return
    listed: Any = config.get("architectures") or ()
    source = "".join(path.read_text("utf-8") for path in files)
    for architecture in listed if isinstance(listed, list | tuple) else [listed]:
        if not re.search(rf"^class {re.escape(str(architecture))}\(", source, re.MULTILINE):
            yield (
                f"its config.json says that it is a {architecture}, which is no model of {name!r} in "
                "transformers: choose a causal language model, or correct architectures in a local copy"
            )


def _is_known(name: str) -> bool:
    """Return whether transformers has a `model_type`."""
    tables = _library().glob("models/auto/*_auto.py"), _library().glob("models/auto/*mappings.py")
    return any(f'"{name}"' in path.read_text("utf-8") for table in tables for path in table)


def _library() -> Path:
    """Return the folder of transformers, which is not imported. Without transformers it does not exist."""
    spec = find_spec("transformers")
    return Path(spec.origin).parent if spec and spec.origin else Path("nowhere")


_READ = re.compile(
    r"""\.([A-Za-z_]\w*) | ["']([A-Za-z_]\w*)["'] | ^\s+([A-Za-z_]\w*)\s*: | \b([A-Za-z_]\w*)\s*=""",
    re.MULTILINE | re.VERBOSE,
)
"""Where Python's source may read or declare a key: an attribute, a string, a field, an argument."""
_IMPORTED = re.compile(r"^from (\.{2,3})([\w.]+) import", re.MULTILINE)


@cache
def _sources(name: str) -> tuple[Path, ...]:
    """List transformers' files of the config and the model of a `model_type`; none if it has none."""
    folder = _library() / "models" / name.removesuffix("_text")
    return tuple(
        path for kind in ("configuration", "modeling") for path in folder.glob(f"{kind}_*.py")
    )


@cache
def _reads(name: str) -> frozenset[str]:
    """Return all names that transformers' source of a family may read from a config, and some others.

    That is what the family's files and those that they import from transformers read.
    """
    files = set(_sources(name))
    for path in _sources(name):
        for dots, module in _IMPORTED.findall(path.read_text("utf-8")):
            base = path.parents[len(dots) - 1]
            files.add(base.joinpath(*module.split(".")).with_suffix(".py"))
    return frozenset(_words(path for path in files if path.is_file()))


def _words(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        for groups in _READ.findall(path.read_text("utf-8")):
            yield from groups


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
        for entry in rope.values():  # one entry per layer type
            yield from _scaling(entry or {}, config, longest)
    elif isinstance(rope, dict) and any(isinstance(entry, dict) for entry in rope.values()):
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
