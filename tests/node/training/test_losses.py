import math

import pytest
import torch

from primerl.node.config import LossConfig
from primerl.node.training.losses import LossSums, TokenInputs, policy_loss, token_logprobs

DPPO = LossConfig(type="dppo_kl", kl_tau=0.01, adv_tau=2.0)
CLIPPED = LossConfig(type="grpo_two_sided", clip_low=0.2, clip_high=0.28, clip_ratio_max=4.0)
BOTH = pytest.mark.parametrize("config", [DPPO, CLIPPED], ids=["dppo_kl", "grpo_two_sided"])


def inputs(rows: list[tuple[float, float, float]]) -> TokenInputs:
    """Rows of (pi, mu, advantage), probabilities."""
    columns = torch.tensor(rows, dtype=torch.float32).reshape(-1, 3)
    logprobs = columns[:, 0].log().requires_grad_()
    return TokenInputs(logprobs, columns[:, 1].log(), columns[:, 2], torch.zeros(len(columns)))


def gradient(
    config: LossConfig, rows: list[tuple[float, float, float]], tokens: int
) -> list[float]:
    given = inputs(rows)
    loss, _ = policy_loss(config, given, tokens)
    (found,) = torch.autograd.grad(loss, given.logprobs)
    return found.tolist()


def test_dppo_is_its_formula_inside_the_trust_region() -> None:
    pi, mu, advantage = 0.3, 0.25, -0.7
    log_ratio = math.log(pi / mu)
    loss, sums = policy_loss(DPPO, inputs([(pi, mu, advantage)]), 4)
    assert loss.item() == pytest.approx((-2.0 * advantage * pi / mu + 0.01 * log_ratio**2) / 4)
    assert gradient(DPPO, [(pi, mu, advantage)], 4) == pytest.approx(
        [(-2.0 * advantage * pi / mu + 2 * 0.01 * log_ratio) / 4]
    )
    assert sums.metrics()["is_masked/mean"] == 0.0


@pytest.mark.parametrize(
    ("pi", "mu", "advantage", "side"),
    [
        (0.50, 0.25, 1.0, "high"),
        (0.25, 0.50, -1.0, "low"),
        (0.25, 0.50, 1.0, None),  # moving back towards the sampler is never masked
        (0.50, 0.25, -1.0, None),
        (0.02, 0.001, 1.0, None),  # a ratio of 20 that moves 2 % of probability
    ],
)
def test_dppo_masks_by_moved_probability_and_keeps_the_pull(
    pi: float, mu: float, advantage: float, side: str | None
) -> None:
    log_ratio = math.log(pi / mu)
    pull = 2 * 0.01 * log_ratio
    gain = 0.0 if side else 2.0 * advantage * pi / mu
    assert gradient(DPPO, [(pi, mu, advantage)], 1) == pytest.approx([pull - gain], rel=1e-4)
    metrics = policy_loss(DPPO, inputs([(pi, mu, advantage)]), 1)[1].metrics()
    assert metrics["is_masked_high/mean"] == float(side == "high")
    assert metrics["is_masked_low/mean"] == float(side == "low")


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.28, 0.0),  # DAPO's upper clip
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),
        (1.5, -1.0, 1.5, 1.5),  # one-sided clipping leaves this branch open
        (9.0, -1.0, 4.0, 0.0),  # the second side closes it
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_two_sided_clip_is_its_formula(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    row = (0.1 * ratio, 0.1, advantage)
    found, sums = policy_loss(CLIPPED, inputs([row]), 1)
    assert found.item() == pytest.approx(loss, rel=1e-5)
    assert gradient(CLIPPED, [row], 1) == pytest.approx([slope], rel=1e-5)
    flat = advantage != 0.0 and slope == 0.0
    assert sums.metrics()["is_masked/mean"] == float(flat)


@BOTH
def test_three_ranks_with_unequal_token_counts_add_up_to_one(config: LossConfig) -> None:
    generator = torch.Generator().manual_seed(3)
    draws = torch.rand(9, 2, generator=generator) * 0.9 + 0.05
    advantages = torch.randn(9, generator=generator)
    rows = [(float(p), float(m), float(a)) for (p, m), a in zip(draws, advantages, strict=True)]
    whole, whole_sums = policy_loss(config, inputs(rows), 9)
    ranks = [rows[:5], rows[5:6], rows[6:]]
    parts = [policy_loss(config, inputs(part), 9) for part in ranks]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), rel=1e-5)
    slopes = [slope for part in ranks for slope in gradient(config, part, 9)]
    assert slopes == pytest.approx(gradient(config, rows, 9), rel=1e-5)
    sums = LossSums()
    for _, part in parts:
        sums.add(part)
    assert sums.metrics() == pytest.approx(whole_sums.metrics())
    assert sums.metrics()["loss/mean"] == pytest.approx(whole.item(), rel=1e-5)


@BOTH
def test_an_absurd_ratio_gives_finite_numbers_and_moves_nothing(config: LossConfig) -> None:
    for advantage in (1.0, -1.0):
        logprobs = torch.tensor([-0.1], requires_grad=True)
        given = TokenInputs(
            logprobs, torch.tensor([-1000.0]), torch.tensor([advantage]), torch.zeros(1)
        )
        loss, sums = policy_loss(config, given, 1)
        (slope,) = torch.autograd.grad(loss, logprobs)
        assert slope.item() == 0.0
        assert all(math.isfinite(value) for value in sums.metrics().values())


@BOTH
def test_a_rank_without_tokens_adds_nothing(config: LossConfig) -> None:
    loss, sums = policy_loss(config, inputs([]), 5)
    assert loss.item() == 0.0
    assert sums.metrics() == {}


def test_a_token_count_of_one_rank_only_is_refused() -> None:
    with pytest.raises(ValueError, match="whole step"):
        policy_loss(DPPO, inputs([(0.5, 0.5, 1.0)] * 3), 2)


def test_mismatch_kl_is_the_k3_estimator() -> None:
    given = inputs([(0.4, 0.5, 0.0), (0.5, 0.5, 0.0)])
    metrics = policy_loss(DPPO, given, 2)[1].metrics()
    assert metrics["mismatch_kl/all/mean"] == pytest.approx((0.8 - math.log(0.8) - 1) / 2, rel=1e-4)
    assert metrics["importance_ratio/max"] == pytest.approx(1.0)
    assert metrics["importance_ratio/mean"] == pytest.approx(0.9)
    assert metrics["tokens"] == 2.0


def test_logprobs_and_entropy_are_those_of_the_tempered_distribution() -> None:
    logits = torch.tensor([[0.0, math.log(4.0)]])
    chosen, entropy = token_logprobs(logits, torch.tensor([1]), temperature=2.0)
    assert chosen.exp().item() == pytest.approx(2 / 3)
    expected = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert entropy.item() == pytest.approx(expected, rel=1e-5)
