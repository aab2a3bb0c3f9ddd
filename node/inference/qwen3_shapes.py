"""Names and shapes of the tensors of a dense Qwen3 model, or of a part of its layers."""

from typing import Any

from ..ops.errors import EngineError
from ..weights.state import State

_FLOATS = ("BF16", "F16", "F32", "F64")


def shapes(config: Any, layers: range | None = None) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes of a dense Qwen3 model, or of the part that holds `layers`."""
    held = range(config.num_hidden_layers) if layers is None else layers
    tied, end = config.tie_word_embeddings, held.stop == config.num_hidden_layers
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * width, config.num_key_value_heads * width
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_norm": (width,),
        "self_attn.k_norm": (width,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    matrix = (config.vocab_size, hidden)
    found: dict[str, tuple[int, ...]] = {}
    if held.start == 0 or (tied and end):
        found["model.embed_tokens.weight"] = matrix
    if end:
        found["model.norm.weight"] = (hidden,)
    if end and not tied:
        found["lm_head.weight"] = matrix
    for index in held:
        found |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
    return found


def check_state(state: State, wanted: dict[str, tuple[int, ...]]) -> None:
    """Raise EngineError unless `state` has exactly the tensors `wanted`, in floating point."""
    if missing := wanted.keys() - state.keys():
        raise EngineError(f"the state lacks {min(missing)}: load a state of this model")
    if extra := state.keys() - wanted.keys():
        raise EngineError(f"the state has {min(extra)} too many: load a state of this model")
    for name, shape in wanted.items():
        if state[name].shape != shape or state[name].dtype not in _FLOATS:
            raise EngineError(
                f"the state's {name} is {state[name].dtype} {state[name].shape} where the model has "
                f"{shape}: load a state of this model"
            )
