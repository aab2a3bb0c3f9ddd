import math
from dataclasses import replace

import pytest
import torch
from support import loss_cases
from support.loss_cases import exchange

from primerl.node.config.training import LossConfig
from primerl.node.training.losses import FIGURES, PEAKS, LossSums, policy_loss

torch.set_num_threads(1)

DPPO = loss_cases.DPPO


def measured(sequences: list[int], *, reference: bool = False) -> LossSums:
    tokens = loss_cases.tokens().of(sequences).inputs(reference=reference)
    return policy_loss(DPPO, tokens, 15)[1]


def test_micro_batches_add_up_to_one() -> None:
    sums = LossSums()
    for part in ([0, 1], [2], [], [3, 4]):
        sums.add(measured(part, reference=True))
    whole = measured([0, 1, 2, 3, 4], reference=True)
    assert sums.tokens == 15
    assert sums.metrics() == pytest.approx(whole.metrics(), rel=1e-12)


def test_every_rank_sends_as_many_numbers_whatever_it_saw() -> None:
    sizes: set[tuple[int, ...]] = set()
    for sums in (LossSums(), measured([]), measured([2]), measured([0, 1], reference=True)):
        sent: list[int] = []

        def note(values: list[float], sent: list[int] = sent) -> list[float]:
            sent.append(len(values))
            return values

        sums.reduce(note, note)
        sizes.add(tuple(sent))
    assert sizes == {(2 * len(FIGURES), len(PEAKS))}


def test_ranks_agree_when_one_is_empty_and_one_has_nothing_masked() -> None:
    ranks = [LossSums(), measured([0, 4], reference=True), measured([1, 2, 3], reference=True)]
    expected = measured([0, 1, 2, 3, 4], reference=True).metrics()
    assert {"masked_mismatch_kl/mean", "ref_kl/all/mean"} <= set(expected)
    for reduced in exchange(ranks):
        assert reduced.metrics() == pytest.approx(expected, rel=1e-12)
        assert reduced.tokens == 15


def test_all_ranks_empty_is_an_empty_step() -> None:
    assert [one.metrics() for one in exchange([LossSums(), LossSums()])] == [{}, {}]


def test_each_figure_is_what_its_name_says() -> None:
    given = loss_cases.tokens()
    ratio = given.pi / given.mu
    k3 = ratio - [math.log(one) for one in ratio] - 1
    moved = given.pi - given.mu
    high = (given.advantage > 0) & (moved > 0.2)
    low = (given.advantage <= 0) & (moved < -0.1)
    toward = given.reference / given.pi
    metrics = measured([0, 1, 2, 3, 4], reference=True).metrics()
    entropy = -sum(math.log(one) for one in given.pi) / 15  # what the cases give for it
    assert metrics == pytest.approx(
        {
            "loss/mean": loss_cases.dppo(given)[0].mean(),
            "entropy/all/mean": entropy,
            "entropy/all/max": -math.log(given.pi.min()),
            "mismatch_kl/all/mean": k3.mean(),
            "mismatch_kl/all/max": k3.max(),
            "kl_ent_ratio/mean": k3.mean() / entropy,
            "importance_ratio/mean": ratio.mean(),
            "importance_ratio/max": ratio.max(),
            "is_masked/mean": (high | low).mean(),
            "is_masked_low/mean": low.mean(),
            "is_masked_high/mean": high.mean(),
            "masked_mismatch_kl/mean": k3[high | low].mean(),
            "unmasked_mismatch_kl/mean": k3[~(high | low)].mean(),
            "ref_kl/all/mean": (toward - [math.log(one) for one in toward] - 1).mean(),
            "tokens": 15.0,
        },
        rel=1e-9,
    )


def test_what_no_token_has_is_not_reported_as_zero() -> None:
    tokens = replace(loss_cases.tokens().inputs(reference=False), entropy=torch.zeros(15))
    metrics = policy_loss(LossConfig(dppo_mask_low=2.0, dppo_mask_high=2.0), tokens, 15)[
        1
    ].metrics()
    absent = {"masked_mismatch_kl/mean", "ref_kl/all/mean", "kl_ent_ratio/mean"}
    assert absent & set(metrics) == set()
    assert metrics["is_masked/mean"] == 0.0
