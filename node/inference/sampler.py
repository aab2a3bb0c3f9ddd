"""Sample tokens reproducibly: the same seed draws the same tokens from the same logits.

The noise is noise.py's, so what a row draws cannot depend on its neighbours, its row number or the
size of the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .device import compiles
from .noise import chunk, gumbel, gumbel_at


@dataclass(frozen=True)
class SampledTokens:
    """What draw() found, for each row [B]."""

    tokens: Tensor
    """int64"""
    logprobs: Tensor
    """fp32, of `tokens` under softmax(logits / temperature) over the whole vocabulary."""
    scores: Tensor
    """fp32, the greatest logits / temperature + noise, which is that of `tokens`."""
    logsumexp: Tensor
    """fp32, of logits / temperature."""


@dataclass(frozen=True)
class Narrowed:
    """The rows of a batch that may draw from their likeliest tokens only."""

    rows: Tensor
    """[N] int64, ascending."""
    top_k: Tensor
    """[N] int64: draw from this many of the likeliest tokens; 0 is all."""
    top_p: Tensor
    """[N] fp32: those that hold this probability together, and one at least; 1 is all."""


def draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    narrowed: Narrowed | None = None,
) -> SampledTokens:
    """Draw one token a row from softmax(logits / temperature), without waiting for the device.

    `logits` [B, V], any float; `temperature` [B] fp32, > 0; `seeds` [B] int64; `positions` [B] int64, the
    index in its sequence of the token to draw. The Gumbel-max trick: argmax(log p + Gumbel noise) is
    distributed as p (Gumbel 1954; Maddison et al. 2014); the lowest of equal ones wins. Logits that are
    not numbers show in `logprobs`. The rows of `narrowed` are drawn once more, by the same noise, from
    fewer tokens: what the others draw does not depend on them. Logprobs and sums are of all tokens.
    """
    if compiles(logits):
        from .kernels import draw_on_gpu

        drawn = SampledTokens(*draw_on_gpu(logits, temperature, seeds, positions))
    else:
        drawn = draw_eager(logits, temperature, seeds, positions)
    if narrowed is not None:
        drawn = _draw_again(drawn, logits, temperature, seeds, positions, narrowed)
    return drawn


def weigh(
    logits: Callable[[slice], Tensor | None],
    at_once: int,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    tokens: Tensor,
    *,
    greedy: bool = False,
) -> Tensor:
    """Margins and logprobs [2, N] fp32 of `tokens` [N] int64 that are claimed to be drawn; others as draw().

    `logits(rows)` gives those of some rows, `at_once` at most; None: nobody needs them on this rank. A margin
    is by how much the best score beats that of the claimed token, exactly 0 if draw() draws it; both are
    infinite or NaN where some logit is no number.

    `greedy`: the temperature is 0, which draws the likeliest token. A score is a logit then, without noise, and
    logprobs are those at temperature 1.
    """
    if greedy:
        temperature = torch.ones_like(temperature)
    # what is done once for all rows is not launched for each part
    found = torch.zeros(3, len(tokens), device=tokens.device)
    for start in range(0, len(tokens), at_once):
        rows = slice(start, start + at_once)
        part = logits(rows)
        if part is None:
            continue
        best = draw(part, temperature[rows], seeds[rows], positions[rows])
        found[0, rows] = part.amax(-1).float() if greedy else best.scores
        found[1, rows] = best.logsumexp
        found[2, rows] = part.gather(1, tokens[rows, None])[:, 0]
    scores, sums, claimed = found
    # the very operations of draw()
    scaled = claimed * temperature.reciprocal()
    claimed_scores = scaled if greedy else gumbel_at(seeds, positions, tokens) + scaled
    margins = scores - claimed_scores
    logprobs = scaled - sums
    return torch.stack([margins.clamp_min(0).where(logprobs.isfinite(), torch.inf), logprobs])


def draw_eager(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> SampledTokens:
    """As draw(), by torch's own operations on any device."""
    rows = max(1, chunk(logits.device) // logits.shape[-1])
    if len(logits) <= rows:
        return SampledTokens(*_draw(logits, temperature, seeds, positions))
    columns = [one.split(rows) for one in (logits, temperature, seeds, positions)]
    parts = [_draw(*part) for part in zip(*columns, strict=True)]
    return SampledTokens(*(torch.cat(one) for one in zip(*parts, strict=True)))


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


def _draw_again(
    drawn: SampledTokens,
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    narrowed: Narrowed,
) -> SampledTokens:
    """`drawn`, with the rows of `narrowed` drawn from what these leave."""
    columns = [drawn.tokens, drawn.logprobs, drawn.scores, drawn.logsumexp]
    step = max(1, chunk(logits.device) // logits.shape[-1])
    for first in range(0, len(narrowed.rows), step):
        part = slice(first, first + step)
        rows = narrowed.rows[part]
        factor = temperature[rows].reciprocal()[:, None]
        scaled = logits[rows].float() * factor
        noisy = gumbel(seeds[rows], positions[rows], logits.shape[-1]).add_(scaled)
        left_out = _left_out(scaled, narrowed.top_k[part], narrowed.top_p[part])
        tokens = noisy.masked_fill_(left_out, -torch.inf).argmax(-1, keepdim=True)
        logprobs = torch.log_softmax(scaled, -1).gather(1, tokens)
        sums = scaled.gather(1, tokens) - logprobs
        found = (tokens, logprobs, noisy.gather(1, tokens), sums)
        columns = [
            old.index_copy(0, rows, new[:, 0].to(old.dtype))
            for old, new in zip(columns, found, strict=True)
        ]
    return SampledTokens(*columns)


def _left_out(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[N, V] bool: top_k counts first, top_p is a share of what it leaves (Holtzman et al. 2020).

    Of equal logits those with lower ids count as likelier, so that exactly top_k are left.
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scaled.shape[-1], device=scaled.device)
    beyond = (ranks >= top_k[:, None]) & (top_k[:, None] > 0)
    shares = torch.softmax(ordered.masked_fill(beyond, -torch.inf), -1)
    before = shares.cumsum(-1) - shares
    beyond |= (before >= top_p[:, None]) & (top_p[:, None] < 1)
    beyond[:, 0] = False
    return torch.empty_like(beyond).scatter_(1, order, beyond)
