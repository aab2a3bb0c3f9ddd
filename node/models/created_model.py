"""The config of a model that is made here, from the fields of [model.create] and defaults of a tiny model.

No torch, and no transformers, so that a memory plan or a dry run need not import them.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import UsageError

CREATED: Mapping[str, int | float | bool] = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "vocab_size": 288,
    "rope_theta": 100.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}
"""Shape of a model that is made here, where [model.create] does not say another."""
CREATED_EXPERTS: Mapping[str, int | float | bool] = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
"""The same of its experts, if it has num_experts."""
OF_EXPERTS = frozenset({"num_experts", *CREATED_EXPERTS})
SHAPE_FIELDS = frozenset({"model_type", *CREATED, *OF_EXPERTS})
"""Fields whose values created_config() checks."""


def created_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the model that [model.create] describes. Raises UsageError.

    Fields that are not in SHAPE_FIELDS are passed on: huggingface.check_fields() checks them.
    """
    if "model_type" in fields:
        raise UsageError("model.create.model_type follows from num_experts: leave it out")
    experts = fields.get("num_experts", 0)
    defaults = CREATED if not experts else {**CREATED, "num_experts": 2, **CREATED_EXPERTS}
    family = "qwen3_moe" if experts else "qwen3"
    config = {**defaults, **fields, "model_type": family}
    if not experts:
        config = {name: value for name, value in config.items() if name not in OF_EXPERTS}
    for name, default in defaults.items():
        value = config[name]
        kinds = (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
            kind = "true or false" if isinstance(default, bool) else "a number"
            raise UsageError(f"model.create.{name} should be {kind}, not {value!r}")
        if not isinstance(default, bool) and value <= 0:
            raise UsageError(f"model.create.{name} should be above 0, not {value!r}")
    if experts and experts < config["num_experts_per_tok"]:
        raise UsageError(
            f"model.create.num_experts_per_tok is {config['num_experts_per_tok']}: set at most num_experts, "
            f"{experts}"
        )
    return config
