"""Sample tokens reproducibly: the same seed draws the same tokens from the same logits.

The noise is that of noise.py, so a row's draw cannot depend on its neighbours, its row number or the batch
size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .device import compiles
from .noise import chunk, gumbel, gumbel_at


@dataclass(frozen=True)
class SampledTokens:
    """Result of draw(), for each row [B]."""

    tokens: Tensor
    """Token ids, int64."""
    logprobs: Tensor
    """Logprobs, fp32, of `tokens` under softmax(logits / temperature), whole vocabulary."""
    scores: Tensor
    """Greatest logits / temperature + noise, fp32, which is that of `tokens`."""
    logsumexp: Tensor
    """Logsumexp of logits / temperature, fp32."""


@dataclass(frozen=True)
class Narrowed:
    """Rows of a batch that may draw only from their likeliest tokens."""

    rows: Tensor
    """Row indices [N] int64, ascending."""
    top_k: Tensor
    """Number of likeliest tokens to draw from, [N] int64; 0 is all."""
    top_p: Tensor
    """Probability of the likeliest tokens to draw from (at least one), [N] fp32; 1 is all."""


def draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    narrowed: Narrowed | None = None,
) -> SampledTokens:
    """Draw one token per row from softmax(logits / temperature), without waiting for the device.

    `logits` [B, V], any float; `temperature` [B] fp32, > 0; `seeds` [B] int64; `positions` [B] int64, the index
    in its sequence of the token to draw. Uses the Gumbel-max trick: argmax(log p + Gumbel noise) is distributed
    as p (Gumbel 1954; Maddison et al. 2014); the lowest of equal tokens wins. Logits that are not numbers show
    in `logprobs`. Rows of `narrowed` are drawn once more, with the same noise, from fewer tokens: the draws of
    other rows do not depend on them. Logprobs and sums are over all tokens.
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
    """Return margins and logprobs [2, N] fp32 of `tokens` [N] int64 claimed to be drawn.

    `logits(rows)` returns the logits of some rows, at most `at_once`, or None if this rank does not need them;
    the other arguments are as in draw(). A margin is the best score minus that of the claimed token: exactly 0
    if draw() draws it. Both results are infinite or NaN where a logit is not a number.

    `greedy`: the temperature is 0, which draws the likeliest token. Scores are then logits without noise, and
    logprobs are at temperature 1.
    """
    if greedy:
        temperature = torch.ones_like(temperature)
    # work for all rows at once is kept out of the loop, which would launch it for each part
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
    # the same operations as draw()
    scaled = claimed * temperature.reciprocal()
    claimed_scores = scaled if greedy else gumbel_at(seeds, positions, tokens) + scaled
    margins = scores - claimed_scores
    logprobs = scaled - sums
    return torch.stack([margins.clamp_min(0).where(logprobs.isfinite(), torch.inf), logprobs])


def draw_eager(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> SampledTokens:
    """Draw as draw() does, with torch's own operations on any device."""
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
    """Draw the rows of `narrowed` again, from the tokens that their limits leave."""
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
    """Return the tokens [N, V] bool that top_k and top_p exclude.

    top_k applies first; top_p is a share of the tokens that it leaves (Holtzman et al. 2020). Of equal logits
    those with lower ids count as likelier, so that exactly top_k are left.
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scaled.shape[-1], device=scaled.device)
    beyond = (ranks >= top_k[:, None]) & (top_k[:, None] > 0)
    shares = torch.softmax(ordered.masked_fill(beyond, -torch.inf), -1)
    before = shares.cumsum(-1) - shares
    beyond |= (before >= top_p[:, None]) & (top_p[:, None] < 1)
    beyond[:, 0] = False
    return torch.empty_like(beyond).scatter_(1, order, beyond)
