"""Sample tokens reproducibly: the same seed draws the same tokens from the same logits.

The noise is that of noise.py, so a row's draw cannot depend on its neighbours, its row number or the batch
size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..models.device import compiles, upload_array
from .noise import chunk, gumbel, gumbel_at

MOST_MARGIN = 32.0
"""Largest margin, nats, of a token that top_k or top_p may exclude."""
HALVINGS = 24
"""Steps of the search for such a margin: it is found to 2e-6 nats."""
REPLAYED = 2**23
"""Logits of narrowed rows that are replayed at a time: some 40 bytes for each."""


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

    def select(self, chosen: Tensor) -> "Narrowed":
        """Return the rows that are `chosen` [N] bool."""
        return Narrowed(self.rows[chosen], self.top_k[chosen], self.top_p[chosen])


@dataclass(frozen=True)
class Limits:
    """top_k and top_p that claimed tokens were drawn with, for each row [N], in the host's memory."""

    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]

    def narrowed(self, rows: slice, device: torch.device) -> Narrowed | None:
        """Return the limited rows among `rows`, counted from its start; None if there are none."""
        top_k, top_p = self.top_k[rows], self.top_p[rows]
        limited = np.flatnonzero((top_k > 0) | (top_p < 1))
        if not len(limited):
            return None
        columns = (limited, top_k[limited], top_p[limited])
        return Narrowed(*(upload_array(column, device) for column in columns))


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
    limits: Limits | None = None,
) -> Tensor:
    """Return margins and logprobs [2, N] fp32 of `tokens` [N] int64 claimed to be drawn.

    `logits(rows)` returns the logits of some rows, at most `at_once`, or None if this rank does not need them;
    the other arguments are as in draw(). A margin is the best score minus that of the claimed token: exactly 0
    if draw() draws it. Both results are infinite or NaN where a logit is not a number.

    `greedy`: the temperature is 0, which draws the likeliest token. Scores are then logits without noise, and
    logprobs are at temperature 1; `limits` exclude nothing.

    Tokens that were drawn under `limits` have the margins of narrowed_margins(). Logprobs are of all tokens.
    """
    if greedy:
        temperature, limits = torch.ones_like(temperature), None
    replayed: list[tuple[Tensor, Tensor]] = []
    # work for all rows at once is kept out of the loop, which would launch it for each part
    found = torch.zeros(3, len(tokens), device=tokens.device)
    for start in range(0, len(tokens), at_once):
        rows = slice(start, start + at_once)
        part = logits(rows)
        if part is None:
            continue
        narrowed = limits and limits.narrowed(rows, tokens.device)
        columns = temperature[rows], seeds[rows], positions[rows]
        best = draw(part, *columns, narrowed)
        found[0, rows] = part.amax(-1).float() if greedy else best.scores
        found[1, rows] = best.logsumexp
        found[2, rows] = part.gather(1, tokens[rows, None])[:, 0]
        if narrowed is not None:
            # Waits for the device: honest work has few others, and they cost much more.
            other = narrowed.select(best.tokens[narrowed.rows] != tokens[rows][narrowed.rows])
            if len(other.rows):
                margins = narrowed_margins(part, *columns, tokens[rows], other)
                replayed.append((other.rows + start, margins))
    scores, sums, claimed = found
    # the same operations as draw()
    scaled = claimed * temperature.reciprocal()
    claimed_scores = scaled if greedy else gumbel_at(seeds, positions, tokens) + scaled
    margins = scores - claimed_scores
    for rows, own in replayed:
        margins = margins.index_copy(0, rows, own)
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
    beyond = _beyond(ordered, top_k, top_p)
    return torch.empty_like(beyond).scatter_(1, order, beyond)


def _beyond(ordered: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return which of the logits `ordered` [N, V], likeliest first, top_k and top_p exclude.

    Sums are fp64: how a device adds up must not decide.
    """
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    beyond = (ranks >= top_k[:, None]) & (top_k[:, None] > 0)
    weights = (ordered - ordered[:, :1]).exp().masked_fill(beyond, 0.0)
    sums = weights.cumsum(-1, dtype=torch.float64)
    before = ((sums - weights) / sums[:, -1:]).float()
    beyond |= (before >= top_p[:, None]) & (top_p[:, None] < 1)
    beyond[:, 0] = False
    return beyond


# -- margins of tokens that were drawn from the likeliest ones -------------------------------------


def narrowed_margins(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    tokens: Tensor,
    narrowed: Narrowed,
) -> Tensor:
    """Return the margins [N] fp32 of the claimed `tokens` in the rows of `narrowed`, at most MOST_MARGIN.

    draw() draws none of them. A margin is the smallest m for which logits may draw the token
    that each differ from these by at most m / 2, after the division by the temperature. Two conditions are
    necessary: the token may be among those that the limits leave, and its score is at most m below the best of
    those that they surely leave. Without limits that is the difference of scores. Rounding of logits therefore
    costs an honest draw no more at the edge of the limits than elsewhere. Other arguments are as in weigh().
    """
    step = max(1, min(chunk(logits.device), REPLAYED) // logits.shape[-1])
    found: list[Tensor] = []
    for first in range(0, len(narrowed.rows), step):
        part = slice(first, first + step)
        rows = narrowed.rows[part]
        scaled = logits[rows].float() * temperature[rows].reciprocal()[:, None]
        noisy = gumbel(seeds[rows], positions[rows], logits.shape[-1]).add_(scaled)
        replay = _NarrowedReplay(
            scaled, noisy, tokens[rows, None], narrowed.top_k[part], narrowed.top_p[part]
        )
        found.append(replay.margins())
    return torch.cat(found)


class _NarrowedReplay:
    """Draws from the likeliest tokens, compared with the claimed ones [N, 1]; columns are [N, 1].

    Logits are ordered, the likeliest first, and each set of tokens here is a prefix of that order. With the
    odds o(A) = P(A) / (1 - P(A)) of a set, logits that each differ by at most m / 2 change o(A) by a factor
    of at most exp(m). So if top_p is exceeded by the sum over a set A with odds above exp(m) o(top_p), it is
    exceeded with the other logits, too, and if it is not reached with odds exp(-m) o(top_p), it is not there.
    """

    def __init__(
        self, scaled: Tensor, noisy: Tensor, tokens: Tensor, top_k: Tensor, top_p: Tensor
    ) -> None:
        self._ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        self._falling = -self._ordered
        """Ascending, as searchsorted() needs it."""
        noisy = noisy.gather(1, order)
        self._place = (order == tokens).byte().argmax(-1, keepdim=True)
        self._own = noisy.gather(1, self._place)
        self._best = noisy.cummax(-1).values
        """Best score of the first tokens, by their number less one."""
        self._shares = torch.softmax(self._ordered, -1).double()
        self._sums = self._shares.cumsum(-1)
        self._last = scaled.shape[-1] - 1
        self._top_k = top_k[:, None]
        self._all_k = (self._top_k == 0) | (self._top_k > self._last)
        self._all_p = top_p[:, None] >= 1
        self._log_odds = torch.logit(top_p[:, None].double())

    def margins(self) -> Tensor:
        """Return the smallest difference of logits that explains each claim [N], by halving intervals."""
        low = torch.zeros_like(self._own)
        high = torch.full_like(low, MOST_MARGIN)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            explains = self._explains(middle)
            low, high = low.where(explains, middle), middle.where(explains, high)
        return high[:, 0]

    def _explains(self, m: Tensor) -> Tensor:
        """Return whether logits that differ by m / 2 may have drawn the claimed tokens."""
        may_k, sure_k = self._limited(m)
        may_p, sure_p = self._nucleus(m, self._mass(may_k), self._mass(sure_k))
        may, sure = torch.minimum(may_k, may_p), torch.minimum(sure_k, sure_p)
        best = self._best.gather(1, (sure - 1).clamp_min(0))
        return (self._place < may) & ((sure == 0) | (best - self._own <= m))

    def _limited(self, m: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many tokens top_k may leave, and how many it surely leaves.

        A token that is left is not m below the k-th, and one that is not left is not m above the next one.
        """
        kth = self._ordered.gather(1, (self._top_k - 1).clamp(0, self._last))
        following = self._ordered.gather(1, self._top_k.clamp_max(self._last))
        may, sure = self._from(kth - m), self._above(following + m)
        return may.where(~self._all_k, self._last + 1), sure.where(~self._all_k, self._last + 1)

    def _nucleus(self, m: Tensor, may_k: Tensor, sure_k: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many tokens top_p may leave, and how many it surely leaves.

        `may_k` and `sure_k` are the probabilities of the tokens that top_k leaves. A token may be left if it is
        at most m below the last of the first tokens that have the greater share. It is surely left if all
        others that may be likelier (less than m below it) have less than the smaller share.
        """
        edge = self._edge(torch.sigmoid(self._log_odds + m) * may_k)
        may = self._from(self._ordered.gather(1, edge) - m)
        share = torch.sigmoid(self._log_odds - m) * sure_k
        edge = self._edge(share)
        last = self._ordered.gather(1, edge)
        rivals = self._mass(self._above(last - m)) - self._shares.gather(1, edge)
        sure = torch.where(rivals < share, edge + 1, self._above(last + m))
        return may.where(~self._all_p, self._last + 1), sure.where(~self._all_p, self._last + 1)

    def _above(self, limit: Tensor) -> Tensor:
        """Return the number of logits above `limit`."""
        return torch.searchsorted(self._falling, -limit)

    def _from(self, limit: Tensor) -> Tensor:
        """Return the number of logits not below `limit`."""
        return torch.searchsorted(self._falling, -limit, right=True)

    def _edge(self, share: Tensor) -> Tensor:
        """Return the first token up to which the probabilities add up to `share`."""
        return torch.searchsorted(self._sums, share).clamp_max(self._last)

    def _mass(self, count: Tensor) -> Tensor:
        """Return the probability of the first `count` tokens."""
        return torch.where(count > 0, self._sums.gather(1, (count - 1).clamp_min(0)), 0.0)
