"""Networks that compute something else than the contract says: a rounded cache, a cut distribution."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primerl.node.inference.model import LanguageModel, LayerHooks, pick_device
from primerl.node.inference.qwen3 import Attend, Qwen3Network
from primerl.node.models import huggingface
from primerl.node.weights.state import State


class RoundedCache(Qwen3Network):
    """Keys and values go through float8 (e4m3) before anything attends to them."""

    def run(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: LayerHooks | None = None
    ) -> Tensor:
        """See Qwen3Network."""

        def rounded(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(layer, q, _through_float8(k), _through_float8(v))

        return super().run(tokens, positions, rounded, taps)


class BestOnly(Qwen3Network):
    """Only the `kept` likeliest tokens can be drawn."""

    kept = 20

    def logits(self, hidden: Tensor) -> Tensor:
        """See Qwen3Network."""
        found = super().logits(hidden)
        least = found.topk(self.kept, -1).values[..., -1:]
        return found.masked_fill(found < least, -torch.inf)


class Nucleus(Qwen3Network):
    """Only the likeliest tokens that together make up `kept` of the probability can be drawn."""

    kept = 0.98

    def logits(self, hidden: Tensor) -> Tensor:
        """See Qwen3Network."""
        found = super().logits(hidden)
        likely, order = found.float().softmax(-1).sort(-1, descending=True)
        tail = likely.cumsum(-1) - likely > self.kept
        return found.masked_fill(tail.scatter(-1, order, tail), -torch.inf)


def _through_float8(values: Tensor) -> Tensor:
    """As a cache in e4m3 without scales keeps them; 448 is its largest number."""
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).to(values.dtype)


def build_rounded_cache(model_dir: Path, state: State, *, dtype: str, device: str) -> LanguageModel:
    """A NetworkBuilder."""
    config: Any = huggingface.load_config(model_dir)
    return RoundedCache(config, state, dtype=dtype, device=pick_device(device))


def build_best_only(model_dir: Path, state: State, *, dtype: str, device: str) -> LanguageModel:
    """A NetworkBuilder."""
    config: Any = huggingface.load_config(model_dir)
    return BestOnly(config, state, dtype=dtype, device=pick_device(device))


def build_nucleus(model_dir: Path, state: State, *, dtype: str, device: str) -> LanguageModel:
    """A NetworkBuilder."""
    config: Any = huggingface.load_config(model_dir)
    return Nucleus(config, state, dtype=dtype, device=pick_device(device))
