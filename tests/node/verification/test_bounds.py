"""Bounds: built in, made of honest rollouts, and whether cheats are outside of them."""

import math
from typing import Any

import numpy as np
import pytest
from support.noise_cases import noise, rollout

from primerl.node.config.run import RunConfig
from primerl.node.errors import UsageError
from primerl.node.verification import bounds
from primerl.node.verification.judgement import judge
from primerl.protocol.rollouts import MEASURES

CONTRACT = bounds.proof_contract(RunConfig())


@pytest.mark.parametrize("count", [64, 1_000, 20_000])
def test_the_tail_of_an_exponential_is_found_and_rather_too_high(count: int) -> None:
    truth = math.log(1 / bounds.BEYOND)
    found = [
        bounds.tail(np.random.default_rng(seed).exponential(1.0, count), bounds.BEYOND)
        for seed in range(40)
    ]
    assert sum(one >= truth for one in found) >= 34
    assert np.median(found) < 2.2 * truth


def test_the_tail_of_a_gaussian_is_not_underestimated() -> None:
    found = [
        bounds.tail(np.random.default_rng(seed).normal(0, 1, 2_000), bounds.BEYOND)
        for seed in range(20)
    ]
    assert min(found) > 4.26  # its 1 - 1e-5 quantile


def test_the_tail_of_equal_values_is_that_value() -> None:
    assert bounds.tail(np.full(50, 0.25), bounds.BEYOND) == pytest.approx(0.25)


def test_likelihood_ratios_widen_the_bound_by_a_long_tail_only() -> None:
    chance = np.random.default_rng(9)
    deep = chance.normal(-90, 30, 2_000)
    assert bounds.ratio_tail(deep, bounds.BEYOND) < 12 < bounds.tail(deep, bounds.BEYOND)
    long = chance.exponential(3.0, 2_000) - 3.0
    assert bounds.ratio_tail(long, bounds.BEYOND) > 3 * math.log(1 / bounds.BEYOND) - 5
    right = chance.exponential(1.0, 2_000)
    assert bounds.ratio_tail(right, bounds.BEYOND) == pytest.approx(
        math.log(1 / bounds.BEYOND), rel=0.1
    )


def test_clopper_pearson_agrees_with_published_values() -> None:
    assert bounds.upper_bound(0, 10_000) == pytest.approx(1 - 0.05**1e-4, rel=1e-6)
    assert bounds.upper_bound(0, 10_000) == pytest.approx(3 / 10_000, rel=0.01)
    # 95 % two-sided limit of 10 in 100, i.e. 97.5 % one-sided: 0.1762
    assert bounds.upper_bound(10, 100, 0.975) == pytest.approx(0.17622, abs=1e-4)
    assert bounds.upper_bound(5, 5) == 1.0
    assert bounds.upper_bound(0, 0) == 1.0


def test_as_many_events_as_surely_belong_to_a_share() -> None:
    assert bounds.surely_below(298, 0.01) == -1
    assert bounds.surely_below(299, 0.01) == 0  # the textbook's sample size for 95 % / 99 %
    for trials in (500, 5_000):
        most = bounds.surely_below(trials, 0.01)
        assert bounds.upper_bound(most, trials) <= 0.01 < bounds.upper_bound(most + 1, trials)


def test_the_binomial_tail_sums_to_one() -> None:
    assert bounds.at_least(0, 16, 0.01) == 1.0
    assert bounds.at_least(16, 16, 0.5) == pytest.approx(0.5**16, rel=1e-6)
    assert bounds.at_least(2, 2, 0.1) == pytest.approx(0.01)


def test_bounds_lie_above_every_honest_rollout() -> None:
    honest = noise(500, 1)
    found = bounds.bands(honest)
    for name in MEASURES:
        values = [getattr(one, name) for one in honest]
        assert getattr(found.reject, name) >= 1.2 * max(values)
        assert getattr(found.suspect, name) <= getattr(found.reject, name)


def test_one_in_a_hundred_honest_rollouts_is_suspect_whatever_the_measure() -> None:
    bound = bounds.bands(noise(5_000, 2)).contract(CONTRACT)
    fresh = [judge(one, bound) for one in noise(20_000, 3)]
    assert sum(one.reason is not None for one in fresh) <= 1
    assert 0.002 < sum(one.suspect for one in fresh) / len(fresh) < 0.012


def test_exact_computation_still_leaves_room_for_another_machine() -> None:
    found = bounds.bands([rollout(number) for number in range(100)])
    assert found.reject == bounds.REJECT_FLOOR


def test_honest_rollouts_that_are_not_numbers_make_no_bounds() -> None:
    bad = [*noise(100, 1), rollout(100, logprob=math.nan)]
    with pytest.raises(UsageError, match="logprob = nan"):
        bounds.bands(bad)


def test_a_handful_of_rollouts_makes_no_bounds() -> None:
    with pytest.raises(UsageError, match="too few"):
        bounds.bands(noise(bounds.FEWEST - 1, 1))


def test_error_rates_are_counted_on_rollouts_that_made_no_bounds() -> None:
    # an outlier raises the bounds of its own half; the other half's must count it as an error
    honest = noise(400, 4)
    honest[7] = rollout(7, fingerprint=9.0)
    found = bounds.false_positives(honest, CONTRACT)
    assert (found.rollouts, found.rejected) == (400, 1)
    assert found.suspected >= 1
    assert found.rejected_at_most == pytest.approx(bounds.upper_bound(1, 400))


def test_too_few_rollouts_bound_no_error_rate() -> None:
    found = bounds.false_positives(noise(20, 4), CONTRACT)
    assert found.rollouts == 0
    assert found.rejected_at_most == 1.0


def test_likelihood_ratios_count_as_far_as_they_are_ratios() -> None:
    """x ~ N(-v/2, v) has a mean of e^x of 1: what the sequential test is made for."""
    rng = np.random.default_rng(5)
    assert bounds.other_scale(rng.normal(-0.5, 1.0, 4000)) > 0.8
    assert bounds.other_scale(np.zeros(64)) == 0.0  # nothing was compared
    loud = rng.normal(-20.0, 19.0, 4000)  # noise that auditor and worker have in common
    scale = bounds.other_scale(loud)
    assert 0.05 < scale < 0.15
    assert np.exp(np.clip(loud * scale, -5, 5)).mean() <= 1.0
    assert bounds.other_scale(rng.normal(3.0, 12.0, 4000)) == 0.0  # they lean to another policy


def test_what_is_suspect_comes_before_what_is_rejected() -> None:
    for reject, suspect in bounds.BUILT_IN.values():
        assert all(getattr(suspect, name) < getattr(reject, name) for name in MEASURES)


def test_built_in_bounds_in_bf16_are_refused_where_draws_are_truncated() -> None:
    """Honest supports of SmolLM2 have margins of 0.011 in the mean, the bound to suspect is 0.012."""
    asked: dict[str, Any] = {"verification": {"bounds": "built-in"}, "sampling": {"top_p": 0.9}}
    with pytest.raises(UsageError, match="built-in is for draws from all tokens"):
        bounds.proof_contract(RunConfig.model_validate({**asked, "engine": {"dtype": "bfloat16"}}))
    assert bounds.proof_contract(
        RunConfig.model_validate({**asked, "engine": {"dtype": "float32"}})
    )


def test_built_in_bounds_say_that_no_sample_is_behind_them() -> None:
    asked = {"verification": {"bounds": "built-in"}, "engine": {"dtype": "bfloat16"}}
    contract = bounds.proof_contract(RunConfig.model_validate(asked))
    assert contract.bounds == "fixed"
    assert (contract.honest_rollouts, contract.source) == (0, "built in for bfloat16")
    assert contract.other_scale == 0.0, "unmeasured noise bans nobody"
