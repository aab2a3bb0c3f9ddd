"""Models for benchmarks: named shapes, random weights, updates, and training batches."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np

from primerl.node.models import huggingface
from primerl.node.models.created_model import OF_EXPERTS
from primerl.node.training.backend import Sample
from primerl.node.weights.state import Changed, State, Tensor

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {},
    "small": {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 768,
        "vocab_size": 1024,
    },
    "50m": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 50000,
    },
    "135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
    "0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
    },
    "4b": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "moe": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
}
"""Fields of [model.create]. `135m` has the sizes of SmolLM2; `moe` has 2.9 G parameters, of which 1.1 G are
active per token. On two CPU cores `small` takes some ten milliseconds for a token of 64 sequences."""


def make_model(directory: Path, shape: str) -> None:
    """Make a model directory of a shape with random weights, for rows of up to 131,072 tokens."""
    sizes = {"max_position_embeddings": 131072, "rope_theta": 1e6, **SHAPES[shape]}
    huggingface.create(directory, sizes, seed=0)


def fake_batch(lengths: list[int], vocabulary: int, *, seed: int) -> list[Sample]:
    """Make random samples, all tokens but the first trained, like prime-rl's fake loader."""
    rng = random.Random(seed)
    found: list[Sample] = []
    for length in lengths:
        ids = rng.choices(range(vocabulary), k=length)
        mask = [False, *([True] * (length - 1))]
        found.append(Sample(ids, mask, [-11.9] * length, rng.choice([-1.0, 1.0])))
    return found


def random_policy(directory: Path, shape: str, **changes: Any) -> dict[str, Tensor]:
    """Write config and tokenizer of a Qwen3 into `directory`; return a random bf16 state for it.

    `changes` are applied to the config. A shape with `num_experts` makes a Qwen3-MoE.
    """
    experts = {name: value for name, value in SHAPES[shape].items() if name in OF_EXPERTS}
    huggingface.create(directory, experts, 0)
    (directory / "model.safetensors").unlink()
    path = directory / "config.json"
    config = json.loads(path.read_text()) | SHAPES[shape] | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if k != "layer_types"}))
    pool = np.random.default_rng(0).normal(0, 0.02, (1 << 22) + 7).astype(np.float32)
    bits = (pool.view(np.uint32) >> 16).astype("<u2")
    twice = np.concatenate([bits, bits])
    state: dict[str, Tensor] = {}
    wanted = huggingface.policy_tensors(huggingface.empty_model(directory))
    for number, (name, empty) in enumerate(wanted.items()):
        size = tuple(empty.shape)
        # with equal experts the router's choice would have no effect
        first = 10007 * number % len(bits) if ".experts." in name else 0
        drawn = twice[first : first + min(len(bits), math.prod(size))]
        data = np.full(size, 0x3F80, "<u2") if len(size) == 1 else np.resize(drawn, size)
        state[name] = Tensor("BF16", size, data.reshape(-1))
    return state


def moved(state: State, share: float) -> tuple[State, Changed]:
    """Return `state` with the last bit of `share` of its elements flipped, and their positions."""
    rng = np.random.default_rng(1)
    new: dict[str, Tensor] = {}
    changed: dict[str, Any] = {}
    for name, tensor in state.items():
        size = tensor.data.size
        gaps = rng.geometric(share, int(1.2 * share * size) + 16)
        positions = np.cumsum(gaps) - 1
        changed[name] = positions = positions[positions < size]
        data = tensor.data.copy()
        data[positions] ^= 1
        new[name] = Tensor(tensor.dtype, tensor.shape, data)
    return new, changed
