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

from ...protocol.rollouts import MAX_SUPPORT
from ..models.device import compiles, upload_array
from ..models.support import NO_SUPPORT
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
    support: Tensor | None = None
    """Tokens that the limits of each row leave [B, W] int32, likeliest first, filled up with -1; -1 alone where
    more than MAX_SUPPORT are left. None without limits."""
    support_logprobs: Tensor | None = None
    """Logprobs of `tokens` over their supports [B] fp32; over all tokens where more are left."""


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

        sampled = SampledTokens(*draw_on_gpu(logits, temperature, seeds, positions))
    else:
        sampled = draw_eager(logits, temperature, seeds, positions)
    if narrowed is not None:
        sampled = _draw_again(sampled, logits, temperature, seeds, positions, narrowed)
    return sampled


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
    support: Tensor | None = None,
) -> Tensor:
    """Return margins and logprobs [2, N] fp32 of `tokens` [N] int64 claimed to be drawn.

    `logits(rows)` returns the logits of some rows, at most `at_once`, or None if this rank does not need them;
    the other arguments are as in draw(). A margin is the best score minus that of the claimed token: exactly 0
    if draw() draws it. Both results are infinite or NaN where a logit is not a number.

    `greedy`: the temperature is 0, which draws the likeliest token. Scores are then logits without noise, and
    logprobs are at temperature 1; `limits` exclude nothing.

    Tokens that were drawn under `limits` have the margins of narrowed_margins(), and their logprobs are of all
    tokens. Where `support` [N, W] (as SampledTokens.support, in any order; NO_SUPPORT: no claim) states the
    tokens that were left, the margin is the greater of the draw's among these and of support_margins(), and
    logprobs are over these.
    """
    if greedy:
        temperature, limits = torch.ones_like(temperature), None
    replayed: list[tuple[Tensor, Tensor]] = []
    # work for all rows at once is kept out of the loop, which would launch it for each part
    measures = torch.zeros(3, len(tokens), device=tokens.device)
    least = torch.zeros(len(tokens), device=tokens.device)
    for start in range(0, len(tokens), at_once):
        rows = slice(start, start + at_once)
        part = logits(rows)
        if part is None:
            continue
        narrowed = limits and limits.narrowed(rows, tokens.device)
        columns = temperature[rows], seeds[rows], positions[rows]
        best = draw(part, *columns, narrowed)
        measures[0, rows] = part.amax(-1).float() if greedy else best.scores
        measures[1, rows] = best.logsumexp
        measures[2, rows] = part.gather(1, tokens[rows, None])[:, 0]
        if narrowed is not None:
            # Waits for the device: honest work has few others, and they cost much more.
            other = narrowed.select(best.tokens[narrowed.rows] != tokens[rows][narrowed.rows])
            if support is not None:
                claims = support[rows]
                stated = narrowed.rows[claims[narrowed.rows, 0] >= 0]
                heat, *places = (each[stated] for each in columns)
                own = _best_of(part[stated], heat, places[0], places[1], claims[stated])
                own[1] += 0 * best.logsumexp[stated]  # NaN where a logit is not a number
                measures[:2, stated + start] = own
                apart = narrowed.select(_differs(claims[narrowed.rows], best, narrowed.rows))
                least[apart.rows + start] = support_margins(
                    part, columns[0], tokens[rows], claims, apart
                )
                other = other.select(claims[other.rows, 0] < 0)
            if len(other.rows):
                margins = narrowed_margins(part, *columns, tokens[rows], other)
                replayed.append((other.rows + start, margins))
    scores, sums, claimed = measures
    # the same operations as draw()
    scaled = claimed * temperature.reciprocal()
    claimed_scores = scaled if greedy else gumbel_at(seeds, positions, tokens) + scaled
    margins = scores - claimed_scores
    for rows, own in replayed:
        margins = margins.index_copy(0, rows, own)
    logprobs = scaled - sums
    margins = torch.maximum(margins, least)
    return torch.stack([margins.clamp_min(0).where(logprobs.isfinite(), torch.inf), logprobs])


def draw_eager(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> SampledTokens:
    """Draw as draw() does, with torch's own operations on any device."""
    rows = max(1, chunk(logits.device) // logits.shape[-1])
    if len(logits) <= rows:
        return SampledTokens(*_draw(logits, temperature, seeds, positions))
    columns = [column.split(rows) for column in (logits, temperature, seeds, positions)]
    parts = [_draw(*part) for part in zip(*columns, strict=True)]
    return SampledTokens(*(torch.cat(column) for column in zip(*parts, strict=True)))


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
    sampled: SampledTokens,
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    narrowed: Narrowed,
) -> SampledTokens:
    """Draw the rows of `narrowed` again, from the tokens that their limits leave."""
    columns = [
        sampled.tokens,
        sampled.logprobs,
        sampled.scores,
        sampled.logsumexp,
        sampled.logprobs,
    ]
    size = min(MAX_SUPPORT, logits.shape[-1])
    support = torch.full((len(logits), size), -1, dtype=torch.int32, device=logits.device)
    step = max(1, chunk(logits.device) // logits.shape[-1])
    for first in range(0, len(narrowed.rows), step):
        part = slice(first, first + step)
        rows = narrowed.rows[part]
        factor = temperature[rows].reciprocal()[:, None]
        scaled = logits[rows].float() * factor
        noisy = gumbel(seeds[rows], positions[rows], logits.shape[-1]).add_(scaled)
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        beyond = _beyond(ordered, narrowed.top_k[part], narrowed.top_p[part])
        left_out = torch.empty_like(beyond).scatter_(1, order, beyond)
        tokens = noisy.masked_fill_(left_out, -torch.inf).argmax(-1, keepdim=True)
        logprobs = torch.log_softmax(scaled, -1).gather(1, tokens)
        sums = scaled.gather(1, tokens) - logprobs
        more = ~beyond[:, size:].all(1, keepdim=True)
        support[rows] = order[:, :size].masked_fill(beyond[:, :size] | more, -1).int()
        log_mass = ordered.masked_fill(beyond & ~more, -torch.inf).logsumexp(-1, keepdim=True)
        over = scaled.gather(1, tokens) - log_mass
        redrawn = (tokens, logprobs, noisy.gather(1, tokens), sums, over)
        columns = [
            old.index_copy(0, rows, new[:, 0].to(old.dtype))
            for old, new in zip(columns, redrawn, strict=True)
        ]
    return SampledTokens(*columns[:4], support=support, support_logprobs=columns[4])


def _beyond(ordered: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return which of the logits `ordered` [N, V], likeliest first, top_k and top_p exclude.

    top_k applies first; top_p is a share of the tokens that it leaves (Holtzman et al. 2020). Of equal logits
    those with lower ids count as likelier, so that exactly top_k are left. Sums are fp64: how a device adds up
    must not decide.
    """
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    beyond = (ranks >= top_k[:, None]) & (top_k[:, None] > 0)
    weights = (ordered - ordered[:, :1]).exp().masked_fill(beyond, 0.0)
    sums = weights.cumsum(-1, dtype=torch.float64)
    before = ((sums - weights) / sums[:, -1:]).float()
    beyond |= (before >= top_p[:, None]) & (top_p[:, None] < 1)
    beyond[:, 0] = False
    return beyond


# -- margins of the tokens that are said to be left ------------------------------------------------


def _best_of(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, support: Tensor
) -> Tensor:
    """Return the best scores among the stated tokens `support` [N, W], and their logsumexps [2, N] fp32."""
    ids = support.clamp_min(0).long()
    scaled = logits.gather(1, ids).float() * temperature.reciprocal()[:, None]
    noisy = gumbel_at(seeds[:, None], positions[:, None], ids) + scaled
    best = noisy.masked_fill(support < 0, -torch.inf).amax(-1)
    return torch.stack([best, scaled.masked_fill(support < 0, -torch.inf).logsumexp(-1)])


def _differs(claimed: Tensor, sampled: SampledTokens, rows: Tensor) -> Tensor:
    """Return whether the claimed supports [N, W] differ from those drawn at `rows`; no claim never does."""
    assert sampled.support is not None  # its rows are limited
    own = sampled.support[rows]
    size = max(own.shape[1], claimed.shape[1])
    both = [
        torch.nn.functional.pad(ids.int(), (0, size - ids.shape[1]), value=-1).sort(-1).values
        for ids in (own, claimed)
    ]
    return (both[0] != both[1]).any(-1) & (claimed[:, 0] != NO_SUPPORT)


def support_margins(
    logits: Tensor, temperature: Tensor, tokens: Tensor, support: Tensor, narrowed: Narrowed
) -> Tensor:
    """Return the margins [N] fp32 of the claimed supports in the rows of `narrowed`, at most MOST_MARGIN.

    A margin is at most the smallest m for which logits that each differ from these by at most m / 2, after the
    division by the temperature, may leave just the tokens `support` [B, W] of a row, `tokens` [B] among them;
    or more than MAX_SUPPORT tokens, if it is -1 alone. Logits are as in draw(), of all rows.
    """
    step = max(1, min(chunk(logits.device), REPLAYED) // logits.shape[-1])
    margins = [logits.new_empty(0, dtype=torch.float32)]
    for first in range(0, len(narrowed.rows), step):
        part = slice(first, first + step)
        rows = narrowed.rows[part]
        scaled = logits[rows].float() * temperature[rows].reciprocal()[:, None]
        limits = narrowed.top_k[part], narrowed.top_p[part]
        margins.append(_support_margins(scaled, tokens[rows, None], support[rows], *limits))
    return torch.cat(margins)


def _support_margins(
    scaled: Tensor, tokens: Tensor, support: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """Compute support_margins() of the logits `scaled` [N, V]; every column here is [N, 1].

    Logits that each differ by at most m / 2 change the odds of a set of tokens by a factor of at most exp(m),
    and the order of two tokens only if they are at most m apart. So m is at least

    - the gap by which a token that is not stated is likelier than the drawn one;
    - the largest such gap of a stated token, times the probability of all that are stated or missing in place
      of others: honest noise swaps unlikely tokens, and the largest gap of hundreds is its extreme;
    - what the odds of the stated tokens lack to those of top_p, in logarithms;
    - what their odds without the last token exceed those of top_p, or what this token is likelier than the
      least likely one: any of them may be the last.

    Odds are of the tokens that top_k leaves: the stated ones and the likeliest of the others.
    """
    is_stated, sizes = support[:, :1] >= 0, (support >= 0).sum(-1, keepdim=True)
    ids = support.where(support >= 0, support[:, :1]).clamp_min(0).long()
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scaled.shape[-1], device=scaled.device)
    inside = torch.zeros_like(scaled, dtype=torch.bool).scatter_(1, ids, True).gather(1, order)
    inside = torch.where(is_stated, inside, ranks < MAX_SUPPORT)
    sizes = torch.where(is_stated, sizes, MAX_SUPPORT)
    top_k, target = top_k[:, None], torch.logit(top_p.double())[:, None]
    beside = ~inside & ((top_k == 0) | ((~inside).cumsum(-1) <= top_k - sizes))
    weights = (ordered - ordered[:, :1]).double().exp()
    total = weights.masked_fill(~inside, 0).sum(-1, keepdim=True)
    rest = weights.masked_fill(~beside, 0).sum(-1, keepdim=True)
    lacking = (target - total.log() + rest.log()).where(rest > 0, -torch.inf)
    lowest = ordered.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)
    highest = ordered.masked_fill(inside, -torch.inf).amax(-1, keepdim=True)
    swapped = weights.masked_fill(inside == (ranks < sizes), 0).sum(-1, keepdim=True)
    swapped = (swapped / (total + rest)).clamp_max(1)
    gap = (highest - lowest).where(swapped > 0, 0) * swapped
    gap = torch.maximum(gap, highest - scaled.gather(1, tokens))
    odds = (total - weights).clamp_min(0).log() - (rest + weights).log()
    last = torch.maximum((ordered - lowest).double(), odds - target)
    last = last.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)
    stated = torch.maximum(torch.maximum(gap.double(), lacking), last)
    stated = stated.masked_fill((top_k > 0) & (sizes > top_k), torch.inf)
    margins = torch.where(is_stated, stated, (-lacking).masked_fill(rest == 0, torch.inf))
    return margins.clamp(0, MOST_MARGIN).float()[:, 0]


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
    margins: list[Tensor] = []
    for first in range(0, len(narrowed.rows), step):
        part = slice(first, first + step)
        rows = narrowed.rows[part]
        scaled = logits[rows].float() * temperature[rows].reciprocal()[:, None]
        noisy = gumbel(seeds[rows], positions[rows], logits.shape[-1]).add_(scaled)
        replay = _NarrowedReplay(
            scaled, noisy, tokens[rows, None], narrowed.top_k[part], narrowed.top_p[part]
        )
        margins.append(replay.margins())
    return torch.cat(margins)


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
