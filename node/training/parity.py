"""Compare training with transformers on a small model of a config.json, before anything starts.

What config.json makes transformers compute counts, not the names of its keys: the small model keeps every key
but sizes, and both compute the same tokens. Loads torch only if a key must be compared.
"""

import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import EngineError, one_line
from ..models.architectures import ARCHITECTURES, keys_to_compare, strange_tensors, untrainable
from ..models.json_files import read_json

NATS = 1e-4
"""Most that a logprob may differ by; rounding in fp32 is below 2e-5."""
LENGTHS = (60, 40, 23)
"""Tokens of the compared sequences, longest first: they are packed in this order."""
LONGEST = 128
SMALL = 8
"""Large whole numbers are also tried as this one: some act only beyond that many tokens."""
WINDOW = 16
HEADS = 4
LAYERS = 6
"""The longest pattern of layers that a family has: Gemma 3's."""
ROPES = ("rope_parameters", "rope_scaling")

SIZES: Mapping[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "kv_lora_rank": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "q_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "shared_expert_intermediate_size": 32,
    "sliding_window": WINDOW,
    "v_head_dim": 8,
    "vocab_size": 96,
}
"""Key -> its value in the small model, where config.json gives one."""
COUNTS = tuple(
    """head_dim linear_num_key_heads linear_num_value_heads n_group num_attention_heads num_hidden_layers
    num_key_value_heads topk_group""".split()
)
"""Further sizes, which small() chooses by their ratios."""
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def check_directory(directory: Path, longest: int) -> None:
    """Raise EngineError unless the model of a directory can be trained exactly on up to `longest` tokens."""
    config = read_json(directory / "config.json")
    if reason := fault(config, longest) or checkpoint_fault(directory):
        raise EngineError(f"the model cannot be trained: {reason}")


def checkpoint_fault(directory: Path) -> str:
    """Return why the tensors of a model directory are not those of its config.json.

    Returns "" if they are, or there are none. Raises EngineError.
    """
    from ..models import huggingface
    from ..models.model_files import tensor_names, unexpected

    strange = strange_tensors(read_json(directory / "config.json"), tensor_names(directory))
    return unexpected(directory, huggingface.without_place(directory, strange)) if strange else ""


def fault(config: Mapping[str, Any], longest: int) -> str:
    """Return why a model cannot be trained exactly on sequences of up to `longest` tokens; "" if it can.

    `config` is its config.json.
    """
    if reason := untrainable(config, longest):
        return reason
    keys = keys_to_compare(config)
    if not keys:
        return ""
    try:
        largest = max(differences(config, keys))
        if largest <= NATS:
            return ""
        without = {key: {k: v for k, v in config.items() if k != key} for key in keys}
        guilty = [key for key, other in without.items() if difference(other) <= NATS] or keys
    except EngineError as error:
        return f"a small model of its config.json cannot be computed: {error}"
    return (
        f"its config.json sets {', '.join(map(repr, guilty))}, and then logprobs of training differ from "
        f"those of transformers by {largest:.2g} nats: choose another model"
    )


def differences(config: Mapping[str, Any], keys: list[str]) -> Iterator[float]:
    """Yield difference() of config.json, and of each large number among `keys` made small.

    Raises EngineError if the first cannot be computed.
    """
    yield difference(config)
    for key in keys:
        if type(config[key]) is int and config[key] > WINDOW:
            try:
                yield difference({**config, key: SMALL})
            except EngineError:
                continue  # no value for this model


def difference(config: Mapping[str, Any]) -> float:
    """Return by how much a logprob of training differs at most from transformers' own, in nats.

    Both compute a small random model of config.json in fp32; training computes all sequences packed in one
    row. Raises EngineError if one of them cannot.
    """
    with tempfile.TemporaryDirectory(prefix="primerl-") as name:
        try:
            return _difference(small(config, _defaults(config)), Path(name))
        except EngineError:
            raise
        except Exception as error:  # transformers and torch raise whatever they come upon
            raise EngineError(one_line(error)) from error


def _difference(config: Mapping[str, Any], directory: Path) -> float:
    import torch

    from ..config.training import TrainingConfig
    from ..models import huggingface
    from .backend import Sample
    from .model import TrainedModel
    from .packing import pack
    from .world import World, pick_device

    rng = random.Random(0)
    rows = [[rng.randrange(3, SIZES["vocab_size"]) for _ in range(n)] for n in LENGTHS]
    samples = [Sample(row, [True] * len(row), [-1.0] * len(row), 1.0) for row in rows]
    (packed,) = pack(samples, LONGEST).rank(0)
    training = TrainingConfig(device="cpu", seq_len=LONGEST, dtype="float32", compile=False)
    # kernels of linear attention, where there are any, are a GPU's
    linear = ARCHITECTURES[config["model_type"]].linear
    device = torch.device(pick_device("auto") if linear else "cpu")
    huggingface.create_random(directory, config, seed=0)
    with torch.no_grad():
        trained = TrainedModel.build(directory, training, World.alone(device))
        logprobs = trained.read(packed, 1.0).logprobs
        trained.release()
        model: Any = huggingface.load_model(directory, device=device)
        wanted: list[torch.Tensor] = []
        for row in rows:
            ids = torch.tensor([row], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            wanted.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
        return float((logprobs - torch.cat(wanted)).abs().max())


def _defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    from ..models import huggingface

    return huggingface.default_config(config["model_type"])


def small(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with sizes that are computed in no time, and every other key as it is.

    Each kind of layer, and each ratio that code depends on (grouped heads, groups of experts), stays.
    `defaults` are transformers' for sizes that config.json leaves out.
    """
    config = {**{key: defaults[key] for key in (*SIZES, *COUNTS) if defaults.get(key)}, **given}
    sizes = {**config, **TOKENS, "initializer_range": 0.2}
    sizes |= {key: size for key, size in SIZES.items() if config.get(key)}
    heads = int(config.get("num_attention_heads") or HEADS)
    pairs = int(config.get("num_key_value_heads") or heads)
    sizes["num_attention_heads"] = HEADS
    sizes["num_key_value_heads"] = HEADS if pairs == heads else min(pairs, HEADS // 2)
    if keys := config.get("linear_num_key_heads"):
        grouped = config.get("linear_num_value_heads") != keys
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4 if grouped else 2}
    if config.get("n_group", 1) > 1:
        sizes |= {"n_group": 2, "topk_group": 1}
    head = SIZES["hidden_size"] // HEADS
    if config.get("qk_rope_head_dim"):
        head = SIZES["qk_rope_head_dim"]
    elif int(config.get("head_dim") or 0) * heads > config.get("hidden_size", 0):
        head *= 2
    if config.get("head_dim"):
        sizes["head_dim"] = head
    _cut_layers(sizes, config.get("num_hidden_layers") or LAYERS)
    for key in ROPES:
        if isinstance(config.get(key), dict):
            sizes[key] = _small_rope(config[key], head, config)
    return sizes


def _cut_layers(sizes: dict[str, Any], given: int) -> None:
    """Keep the first of `given` layers, and what config.json says of them."""
    layers = sizes["num_hidden_layers"] = min(given, LAYERS)
    for key, value in sizes.items():
        if isinstance(value, list) and len(value) == given > layers:
            sizes[key] = value[:layers]
    for key in ("first_k_dense_replace", "max_window_layers"):
        if sizes.get(key):
            sizes[key] = 1 if sizes[key] < given else layers
    if sizes.get("mlp_only_layers"):
        sizes["mlp_only_layers"] = [layer for layer in sizes["mlp_only_layers"] if layer < layers]


def _small_rope(rope: Mapping[str, Any], head: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fit factors and sections of rotary positions to heads of `head` elements."""
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    half = int(head * part) // 2
    scaled = dict(rope)
    for key, value in rope.items():
        if isinstance(value, dict):  # of a kind of layer
            scaled[key] = _small_rope(value, head, config)
        elif key == "mrope_section":
            scaled[key] = [half - 2 * (half // 3), half // 3, half // 3]
        elif isinstance(value, list):
            scaled[key] = value[:half]
    return scaled
