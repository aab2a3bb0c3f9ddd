"""Supports of truncated draws: what is stated, the logprobs over it, and the margins of false ones."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from primerl.node.inference.sampler import (
    MOST_MARGIN,
    Limits,
    Narrowed,
    SampledTokens,
    draw,
    support_margins,
    weigh,
)
from primerl.node.models.support import NO_SUPPORT
from primerl.protocol.rollouts import MAX_SUPPORT

torch.set_num_threads(1)
ROWS, HEAT = 300, 0.7
LIMITED = [(0, 0.9), (0, 0.3), (3, 1.0), (9, 0.8), (50, 0.95), (0, 0.999), (0, 1e-3), (99, 0.9)]


def drawn_with(logits: Tensor, top_k: int, top_p: float) -> SampledTokens:
    rows = torch.arange(len(logits))
    narrowed = Narrowed(rows, torch.full_like(rows, top_k), torch.full((len(logits),), top_p))
    return draw(logits, torch.full((len(logits),), HEAT), rows, rows, narrowed)


class Weighed(NamedTuple):
    margins: Tensor
    logprobs: Tensor


def weighed(logits: Tensor, drawn: SampledTokens, top_k: int, top_p: float) -> Weighed:
    rows = torch.arange(len(logits))
    limits = Limits(np.full(len(logits), top_k), np.full(len(logits), top_p, np.float32))
    return Weighed(
        *weigh(
            logits.__getitem__,
            64,
            torch.full((len(logits),), HEAT),
            rows,
            rows,
            drawn.tokens,
            limits=limits,
            support=drawn.support,
        )
    )


def spread(seed: int, size: int = 40) -> Tensor:
    """Logits from nearly equal ones to very unequal ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, size, generator=generator) * torch.linspace(0.1, 4, ROWS)[:, None]


def wide(logits: Tensor, top_k: int, top_p: float) -> "list[set[int]]":
    """The tokens that are left, from the definition, one by one."""
    found: list[set[int]] = []
    rows: list[list[float]] = (logits / HEAT).double().softmax(-1).tolist()
    for row in rows:
        likely = sorted(range(len(row)), key=row.__getitem__, reverse=True)  # stable
        likely = likely[: top_k or len(row)]
        total, before, kept = sum(row[one] for one in likely), 0.0, set[int]()
        for one in likely:
            if kept and before >= top_p * total:
                break
            kept.add(one)
            before += row[one]
        found.append(kept if top_p < 1 else set(likely))
    return found


@pytest.mark.parametrize(("top_k", "top_p"), LIMITED)
def test_a_draw_states_the_tokens_that_were_left_and_its_logprob_over_them(
    top_k: int, top_p: float
) -> None:
    logits = spread(top_k)
    drawn = drawn_with(logits, top_k, top_p)
    assert drawn.support is not None
    assert drawn.support_logprobs is not None
    wanted = wide(logits, top_k, top_p)
    stated = [set(row) - {-1} for row in drawn.support.tolist()]
    assert sum(mine == theirs for mine, theirs in zip(stated, wanted, strict=True)) >= ROWS - 1
    for row, token in enumerate(drawn.tokens.tolist()):
        over = (logits[row, sorted(stated[row])] / HEAT).logsumexp(0)
        assert token in stated[row]
        assert float(drawn.support_logprobs[row]) == pytest.approx(
            float(logits[row, token] / HEAT - over), abs=1e-5
        )


def test_more_tokens_than_are_stated_leave_a_logprob_over_all() -> None:
    drawn = drawn_with(torch.zeros(4, 400), 0, 0.9)
    assert drawn.support is not None
    assert drawn.support.shape == (4, MAX_SUPPORT)
    assert (drawn.support == -1).all()
    assert drawn.support_logprobs is not None
    assert torch.equal(drawn.support_logprobs, drawn.logprobs)
    just = drawn_with(torch.zeros(4, 400), MAX_SUPPORT, 1.0)
    assert just.support is not None
    assert (just.support >= 0).all()


@pytest.mark.parametrize("size", [40, 400])
@pytest.mark.parametrize(("top_k", "top_p"), LIMITED)
def test_an_honest_support_has_no_margin_and_its_logprobs_are_those_that_were_stated(
    top_k: int, top_p: float, size: int
) -> None:
    logits = spread(1, size)
    drawn = drawn_with(logits, top_k, top_p)
    found = weighed(logits, drawn, top_k, top_p)
    assert float(found.margins.max()) == 0.0
    assert drawn.support_logprobs is not None
    assert torch.allclose(found.logprobs, drawn.support_logprobs, atol=2e-5)


@pytest.mark.parametrize("size", [40, 400])
@pytest.mark.parametrize(("top_k", "top_p"), LIMITED)
def test_the_margin_of_a_support_is_at_most_the_noise_of_the_logits(
    top_k: int, top_p: float, size: int
) -> None:
    logits = spread(2, size)
    generator = torch.Generator().manual_seed(3)
    changed = 0
    for noise in (0.01, 0.3, 2.0):
        off = (torch.rand(logits.shape, generator=generator) - 0.5) * noise
        drawn = drawn_with(logits + HEAT * off, top_k, top_p)
        found = weighed(logits, drawn, top_k, top_p).margins
        assert float(found.max()) <= noise * (1 + 1e-5) + 1e-5
        changed += int((found > 0).sum())
    assert changed


@pytest.mark.parametrize("claims", [0.97, 0.8])
def test_a_support_that_was_widened_or_narrowed_has_a_margin_though_the_draw_is_right(
    claims: float,
) -> None:
    logits = spread(4)
    right, other = drawn_with(logits, 0, 0.9), drawn_with(logits, 0, claims)
    assert right.support is not None
    assert other.support is not None
    inside = (other.support == right.tokens[:, None]).any(-1)
    forged = torch.where(inside[:, None], other.support, right.support)
    found = weighed(logits, replace(right, support=forged), 0, 0.9)
    differs = (forged.sort(-1).values != right.support.sort(-1).values).any(-1)
    assert float(found.margins[differs].min()) > 0
    assert float(found.margins.clamp(max=1).mean()) > 0.05


def test_a_margin_is_no_more_than_the_noise_with_which_the_stated_tokens_may_be_left() -> None:
    """Tried with the noise that helps most: all corners of the box of logits, for few tokens."""
    generator = torch.Generator().manual_seed(5)
    corners = torch.cartesian_prod(*[torch.tensor([-0.5, 0.5])] * 5)
    apart: list[float] = []
    for _ in range(40):
        logits = torch.randn(1, 5, generator=generator) * HEAT
        top_p = float(torch.rand(1, generator=generator)) * 0.8 + 0.1
        claim = drawn_with(logits + HEAT * torch.randn(1, 5, generator=generator), 0, top_p)
        assert claim.support is not None
        wanted, low, high = set(claim.support[0].tolist()) - {-1}, 0.0, 16.0
        for _ in range(20):
            middle = (low + high) / 2
            left = wide(logits + HEAT * middle * corners, 0, top_p)
            low, high = (low, middle) if wanted in left else (middle, high)
        one = Narrowed(torch.arange(1), torch.zeros(1, dtype=torch.int64), torch.tensor([top_p]))
        heat = torch.tensor([HEAT])
        margin = float(support_margins(logits, heat, claim.tokens, claim.support, one))
        assert margin <= high + 1e-4
        apart.append(high - margin)
    assert sorted(apart)[len(apart) // 4] < 1e-4  # and often as much


def test_a_token_that_was_drawn_from_all_and_added_to_its_support_has_the_margin_of_its_rank() -> (
    None
):
    logits = spread(10)
    rows = torch.arange(ROWS)
    free = draw(logits, torch.full((ROWS,), HEAT), rows, rows)
    right = drawn_with(logits, 0, 0.5)
    assert right.support is not None
    outside = (right.support != free.tokens[:, None]).all(1)
    support = right.support.clone()
    support[rows, (support >= 0).sum(1).clamp_max(39)] = free.tokens.int()
    support = support.where(outside[:, None], right.support)
    found = weighed(logits, replace(free, support=support), 0, 0.5).margins
    edge = (logits / HEAT).masked_fill(
        torch.zeros_like(logits, dtype=torch.int64).scatter_add(
            1, support.clamp_min(0).long(), (support >= 0).long()
        ) > 0,
        -torch.inf,
    ).amax(1)  # fmt: skip
    below = edge - (logits / HEAT).gather(1, free.tokens[:, None])[:, 0]
    assert (found[outside] >= below[outside] - 1e-5).all()
    assert float(found.clamp(max=1).mean()) > 0.05


def test_a_claim_that_too_many_tokens_were_left_is_measured() -> None:
    sharp = spread(6, 400) * 3
    drawn = drawn_with(sharp, 0, 0.9)
    assert drawn.support is not None
    hidden = replace(drawn, support=torch.full_like(drawn.support, -1))
    few = (drawn.support >= 0).any(-1)
    found = weighed(sharp, hidden, 0, 0.9)
    assert float(found.margins[few].min()) > 0
    assert float(found.margins[~few].max()) == 0
    assert float(weighed(sharp, hidden, 9, 0.9).margins.min()) == MOST_MARGIN


def test_a_support_of_another_size_than_top_k_leaves_is_as_wrong_as_can_be() -> None:
    logits = spread(7)
    for size in (2, 4):
        found = weighed(logits, drawn_with(logits, size, 1.0), 3, 1.0).margins
        assert float(found.min()) == MOST_MARGIN


def test_claims_without_a_support_are_weighed_as_before() -> None:
    logits = spread(8)
    drawn = drawn_with(logits, 0, 0.9)
    silent = replace(drawn, support=torch.full((ROWS, 1), NO_SUPPORT))
    found = weighed(logits, silent, 0, 0.9)
    assert float(found.margins.max()) == 0
    assert torch.allclose(found.logprobs, drawn.logprobs, atol=2e-5)


def test_logits_that_are_not_numbers_are_infinitely_far_off_also_outside_of_a_support() -> None:
    logits = spread(9)
    drawn = drawn_with(logits, 0, 0.5)
    assert drawn.support is not None
    for row in range(ROWS):
        outside = set(range(40)) - set(drawn.support[row].tolist())
        logits[row, min(outside)] = torch.nan
    found = weighed(logits, drawn, 0, 0.5)
    assert not found.logprobs.isfinite().any()
    assert not found.margins.isfinite().any()
