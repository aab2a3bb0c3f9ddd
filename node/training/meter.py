"""Speed of a step, by prime-rl's names. Imports torch: import lazily.

Tokens are those of whole sequences, prompts and padding included, as prime-rl counts them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

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
"""Dense bf16 FLOP/s by part of the device's name, from the vendors' specifications."""


@dataclass(frozen=True)
class Cost:
    """Terms of a model's training cost."""

    parameters: float
    """N: parameters, without embeddings (unless tied) and idle experts."""
    attention: float
    """Layers x heads x head width."""

    def flops(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of a step over sequences of these lengths."""
        return sum(6 * n * (self.parameters + self.attention * n) for n in lengths)


def cost_of(config: Any, parameters: int) -> Cost:
    """Return the cost of a model with this transformers config and number of `parameters`."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    tied = getattr(config, "tie_word_embeddings", False)
    embedding = 0 if tied else config.vocab_size * config.hidden_size
    idle = _idle_experts(config)
    return Cost(parameters - embedding - idle, config.num_hidden_layers * heads * width)


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a device; None if unknown."""
    for name in sorted(PEAKS, key=len, reverse=True):
        if name in device_name:
            return PEAKS[name]
    return None


def _idle_experts(config: Any) -> int:
    """Return the number of parameters of experts that a token does not visit."""
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
    """Return the first of these settings that the config has; 0 if none."""
    return next((value for name in names if (value := getattr(config, name, None))), 0)


GIB = 1 << 30


class _Mark:
    """A point in time: on the host, or in the order of a GPU's work."""

    def __init__(self, on_gpu: bool) -> None:
        self._host = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None
        if self._event is not None:
            self._event.record()

    def until(self, later: "_Mark") -> float:
        """Return the seconds in between; a GPU must have reached both."""
        if self._event is None or later._event is None:
            return later._host - self._host
        return float(self._event.elapsed_time(later._event)) / 1e3


class StepMeter:
    """Timing of one step's phases on one rank; the host waits for the device once, in figures()."""

    def __init__(self, cost: Cost, device: torch.device, ranks: int) -> None:
        self._cost = cost
        self._device = device
        self._ranks = ranks
        self._on_gpu = device.type == "cuda"
        self._began = 0.0
        self._marks: list[tuple[str, _Mark]] = []
        """Phases, each with its end; the first entry is the start."""

    def start(self) -> None:
        """Start the clock of a step."""
        self._began = time.perf_counter()
        self._marks = [("", _Mark(self._on_gpu))]

    def phase(self, name: str) -> None:
        """Attribute the time since the last call, or the start, to the phase `name`; of a GPU the device's."""
        self._marks.append((name, _Mark(self._on_gpu)))

    def figures(self, lengths: Sequence[int]) -> dict[str, float]:
        """Return the metrics of the step that ends now.

        `lengths` are those of the sequences on all ranks.
        """
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._began
        rate = sum(lengths) / max(seconds, 1e-9)
        figures: dict[str, float] = {}
        for (_, since), (name, end) in pairwise(self._marks):
            figures[f"time/{name}"] = figures.get(f"time/{name}", 0.0) + since.until(end)
        figures |= {
            "time/step": seconds,
            "perf/throughput": rate,
            "perf/throughput_per_gpu": rate / self._ranks,
        }
        if self._on_gpu:
            peak = peak_flops(torch.cuda.get_device_name(self._device))
            if peak:
                used = self._cost.flops(lengths) / max(seconds, 1e-9)
                figures["perf/mfu"] = 100 * used / self._ranks / peak
            figures["perf/peak_memory"] = torch.cuda.max_memory_allocated(self._device) / GIB
        return figures
