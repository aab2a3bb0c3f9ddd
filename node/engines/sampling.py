"""Sampling that can be repeated: whoever knows the seed draws the same tokens from the same logits.

The noise is noise.py's, so what a row draws cannot depend on its neighbours, its row number or the
size of the batch.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from .noise import chunk, gumbel
from .noise import gumbel_at as gumbel_at


@dataclass(frozen=True)
class Drawn:
    """What draw() found, for each row [B]."""

    tokens: Tensor
    """int64"""
    logprobs: Tensor
    """fp32, of `tokens` under softmax(logits / temperature)."""
    scores: Tensor
    """fp32, the greatest logits / temperature + noise, which is that of `tokens`."""
    logsumexp: Tensor
    """fp32, of logits / temperature."""


def draw(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Drawn:
    """Draw one token a row from softmax(logits / temperature), without waiting for the device.

    `logits` [B, V], any float; `temperature` [B] fp32, > 0; `seeds` [B] int64; `positions` [B] int64, the
    index in its sequence of the token to draw. The Gumbel-max trick: argmax(log p + Gumbel noise) is
    distributed as p (Gumbel 1954; Maddison et al. 2014); the lowest of equal ones wins. Logits that are
    not numbers show in `logprobs`.
    """
    if logits.is_cuda and _has_triton():
        from .noise_kernel import draw_on_gpu

        return Drawn(*draw_on_gpu(logits, temperature, seeds, positions))
    return draw_eager(logits, temperature, seeds, positions)


def draw_eager(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Drawn:
    """As draw(), by torch's own operations on any device."""
    rows = max(1, chunk(logits.device) // logits.shape[-1])
    if len(logits) <= rows:
        return Drawn(*_draw(logits, temperature, seeds, positions))
    columns = [one.split(rows) for one in (logits, temperature, seeds, positions)]
    parts = [_draw(*part) for part in zip(*columns, strict=True)]
    return Drawn(*(torch.cat(one) for one in zip(*parts, strict=True)))


def _draw(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scaled = logits.float() * temperature.reciprocal()[:, None]
    noisy = gumbel(seeds, positions, logits.shape[-1]).add_(scaled)
    tokens = noisy.argmax(-1, keepdim=True)
    scores = noisy.gather(1, tokens)
    logprobs = torch.log_softmax(scaled, -1).gather(1, tokens)
    sums = scaled.gather(1, tokens) - logprobs
    return tokens[:, 0], logprobs[:, 0], scores[:, 0], sums[:, 0]


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
