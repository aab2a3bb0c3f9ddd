"""Small bases, adapters and contracts for the tests of runs with adapters."""

from typing import Any

import numpy as np

from primerl.crypto.hashing import digest
from primerl.node.weights.adapters import PREFIX, A, B, narrow
from primerl.node.weights.state import State, Tensor
from primerl.protocol.manifests import AdapterContract, ChunkRef

LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj")
SHAPES = {"model.embed.weight": (7, 24), "model.norm.weight": (24,)} | {
    f"{layer}.weight": (40, 24) for layer in LAYERS
}


def contract(**changes: Any) -> AdapterContract:
    """Adapters of rank 4 on both layers."""
    fields: dict[str, Any] = {
        "rank": 4,
        "alpha": 6.0,
        "target_modules": ("q_proj", "up_proj"),
        "base": ChunkRef(digest(b"table"), 5),
    }
    return AdapterContract(**{**fields, **changes})


def random_tensor(
    chance: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0
) -> Tensor:
    """Normal numbers in bf16."""
    values = chance.standard_normal(shape).astype(np.float32) * np.float32(scale)
    return Tensor("BF16", shape, narrow(values.reshape(-1)))


def make_base(seed: int = 0) -> State:
    """A base with two layers that adapters fit."""
    chance = np.random.default_rng(seed)
    return {name: random_tensor(chance, shape, 0.2) for name, shape in SHAPES.items()}


def make_adapters(seed: int = 1, rank: int = 4) -> State:
    """Adapters of both layers, none of them zero."""
    chance = np.random.default_rng(seed)
    found: State = {}
    for layer in LAYERS:
        found = {
            **found,
            PREFIX + layer + A: random_tensor(chance, (rank, 24)),
            PREFIX + layer + B: random_tensor(chance, (40, rank), 0.02),
        }
    return found
