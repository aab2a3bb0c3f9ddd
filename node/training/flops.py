"""What a step costs in floating-point operations, and how much of the device's peak it used. No torch.

The count is the one behind prime-rl's and torchtitan's published figures, so that they can be compared:

    FLOPs of a token = 6 N + 6 L S H D      (forward and backward; the causal half of attention)

N counts parameters (of a mixture of experts those active for a token; a tied embedding once, as the head), L
layers, S the sequence's length, H heads of D. Activations computed again in backward do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "A100": 312e12,
    "A40": 150e12,
    "A6000": 155e12,
    "L40S": 362e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Dense bf16 FLOP/s by part of the device's name, as the vendor states them."""


@dataclass(frozen=True)
class Cost:
    """Of one model."""

    parameters: float
    """N."""
    attention: float
    """L x H x D."""

    def flops(self, lengths: Sequence[int]) -> float:
        """Of a step over sequences of these lengths."""
        return sum(6 * n * (self.parameters + self.attention * n) for n in lengths)


def cost_of(config: Any, parameters: int) -> Cost:
    """The cost of a transformers config whose model has so many `parameters`."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    tied = getattr(config, "tie_word_embeddings", False)
    embedding = 0 if tied else config.vocab_size * config.hidden_size
    idle = _idle_experts(config)
    return Cost(parameters - embedding - idle, config.num_hidden_layers * heads * width)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device; None if it is not known."""
    for name in sorted(PEAKS, key=len, reverse=True):
        if name in device_name:
            return PEAKS[name]
    return None


def _idle_experts(config: Any) -> int:
    """Parameters of experts that a token does not visit."""
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    if not experts:
        return 0
    step = _first(config, "decoder_sparse_step") or 1
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    dense |= set(range(_first(config, "first_k_dense_replace")))
    layers = range(config.num_hidden_layers)
    sparse = sum(layer not in dense and not (layer + 1) % step for layer in layers)
    width = _first(config, "moe_intermediate_size", "intermediate_size")
    idle = experts - config.num_experts_per_tok
    return idle * 3 * config.hidden_size * width * sparse  # gate, up and down


def _first(config: Any, *names: str) -> int:
    """The first of these that the config has; 0 if none."""
    return next((value for name in names if (value := getattr(config, name, None))), 0)
