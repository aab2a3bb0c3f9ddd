"""Bounds: built in, made of honest rollouts, and whether cheats are outside of them."""

import json
import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from primerl.node.config.run import RunConfig
from primerl.node.errors import UsageError
from primerl.node.verification.bounds import (
    BEYOND,
    BUILT_IN,
    FEWEST,
    REJECT_FLOOR,
    at_least,
    bands,
    d_prime,
    false_positives,
    other_scale,
    proof_contract,
    quantiles,
    ratio_tail,
    surely_below,
    tail,
    upper_bound,
)
from primerl.node.verification.cheats import (
    batches_caught,
    int4,
    int8,
    most_suspects,
    nudged,
    separate,
)
from primerl.node.verification.judgement import judge
from primerl.node.weights.state import Tensor
from primerl.protocol.rollouts import MEASURES, Evidence

CONTRACT = proof_contract(RunConfig(), "")


def rollout(number: int, **measures: float) -> Evidence:
    values: dict[str, Any] = dict.fromkeys(MEASURES, 0.0) | measures
    return Evidence(group=0, rollout=number, tokens=64, **values)


def noise(count: int, seed: int, scale: float = 0.01) -> list[Evidence]:
    """Rollouts whose measures are independent and exponential."""
    drawn = np.random.default_rng(seed).exponential(scale, (count, len(MEASURES)))
    return [
        rollout(number, **dict(zip(MEASURES, map(float, row), strict=True)))
        for number, row in enumerate(drawn)
    ]


@pytest.mark.parametrize("count", [64, 1_000, 20_000])
def test_the_tail_of_an_exponential_is_found_and_rather_too_high(count: int) -> None:
    truth = math.log(1 / BEYOND)
    found = [
        tail(np.random.default_rng(seed).exponential(1.0, count), BEYOND) for seed in range(40)
    ]
    assert sum(one >= truth for one in found) >= 34
    assert np.median(found) < 2.2 * truth


def test_the_tail_of_a_gaussian_is_not_underestimated() -> None:
    found = [tail(np.random.default_rng(seed).normal(0, 1, 2_000), BEYOND) for seed in range(20)]
    assert min(found) > 4.26  # its 1 - 1e-5 quantile


def test_the_tail_of_equal_values_is_that_value() -> None:
    assert tail(np.full(50, 0.25), BEYOND) == pytest.approx(0.25)


def test_likelihood_ratios_widen_the_bound_by_a_long_tail_only() -> None:
    chance = np.random.default_rng(9)
    deep = chance.normal(-90, 30, 2_000)
    assert ratio_tail(deep, BEYOND) < 12 < tail(deep, BEYOND)
    long = chance.exponential(3.0, 2_000) - 3.0
    assert ratio_tail(long, BEYOND) > 3 * math.log(1 / BEYOND) - 5
    right = chance.exponential(1.0, 2_000)
    assert ratio_tail(right, BEYOND) == pytest.approx(math.log(1 / BEYOND), rel=0.1)


def test_clopper_pearson_agrees_with_published_values() -> None:
    assert upper_bound(0, 10_000) == pytest.approx(1 - 0.05**1e-4, rel=1e-6)
    assert upper_bound(0, 10_000) == pytest.approx(3 / 10_000, rel=0.01)
    # 95 % two-sided limit of 10 in 100, i.e. 97.5 % one-sided: 0.1762
    assert upper_bound(10, 100, 0.975) == pytest.approx(0.17622, abs=1e-4)
    assert upper_bound(5, 5) == 1.0
    assert upper_bound(0, 0) == 1.0


def test_as_many_events_as_surely_belong_to_a_share() -> None:
    assert surely_below(298, 0.01) == -1
    assert surely_below(299, 0.01) == 0  # the textbook's sample size for 95 % / 99 %
    for trials in (500, 5_000):
        most = surely_below(trials, 0.01)
        assert upper_bound(most, trials) <= 0.01 < upper_bound(most + 1, trials)


def test_the_binomial_tail_sums_to_one() -> None:
    assert at_least(0, 16, 0.01) == 1.0
    assert at_least(16, 16, 0.5) == pytest.approx(0.5**16, rel=1e-6)
    assert at_least(2, 2, 0.1) == pytest.approx(0.01)


def test_bounds_lie_above_every_honest_rollout() -> None:
    honest = noise(500, 1)
    found = bands(honest)
    for name in MEASURES:
        values = [getattr(one, name) for one in honest]
        assert getattr(found.reject, name) >= 1.2 * max(values)
        assert getattr(found.suspect, name) <= getattr(found.reject, name)


def test_one_in_a_hundred_honest_rollouts_is_suspect_whatever_the_measure() -> None:
    bound = bands(noise(5_000, 2)).contract(CONTRACT)
    fresh = [judge(one, bound) for one in noise(20_000, 3)]
    assert sum(one.reason is not None for one in fresh) <= 1
    assert 0.002 < sum(one.suspect for one in fresh) / len(fresh) < 0.012


def test_exact_computation_still_leaves_room_for_another_machine() -> None:
    found = bands([rollout(number) for number in range(100)])
    assert found.reject == REJECT_FLOOR


def test_honest_rollouts_that_are_not_numbers_make_no_bounds() -> None:
    bad = [*noise(100, 1), rollout(100, logprob=math.nan)]
    with pytest.raises(UsageError, match="logprob = nan"):
        bands(bad)


def test_a_handful_of_rollouts_makes_no_bounds() -> None:
    with pytest.raises(UsageError, match="too few"):
        bands(noise(FEWEST - 1, 1))


def test_error_rates_are_counted_on_rollouts_that_made_no_bounds() -> None:
    # an outlier raises the bounds of its own half; the other half's must count it as an error
    honest = noise(400, 4)
    honest[7] = rollout(7, fingerprint=9.0)
    found = false_positives(honest, CONTRACT)
    assert (found.rollouts, found.rejected) == (400, 1)
    assert found.suspected >= 1
    assert found.rejected_at_most == pytest.approx(upper_bound(1, 400))


def test_too_few_rollouts_bound_no_error_rate() -> None:
    found = false_positives(noise(20, 4), CONTRACT)
    assert found.rollouts == 0
    assert found.rejected_at_most == 1.0


def test_quantiles_ascend_to_the_largest() -> None:
    honest = noise(300, 5)
    for name, row in quantiles(honest).items():
        assert row == sorted(row)
        assert row[-1] == max(getattr(one, name) for one in honest)


def test_d_prime_is_in_standard_deviations() -> None:
    chance = np.random.default_rng(6)
    ours = [rollout(0, fingerprint=float(v)) for v in chance.normal(1.0, 0.1, 4_000)]
    theirs = [rollout(0, fingerprint=float(v)) for v in chance.normal(1.5, 0.1, 4_000)]
    assert d_prime(ours, theirs) == pytest.approx(5.0, rel=0.1)


def test_a_cheat_separates_by_rejections_or_by_many_suspects_and_not_within_the_band() -> None:
    bound = bands(noise(1_000, 7))
    contract = bound.contract(CONTRACT)
    far = [rollout(n, fingerprint=10 * bound.reject.fingerprint) for n in range(32)]
    found = separate("far", far, contract)
    assert (found.rejected, found.suspected, found.batches) == (32, 32, 1.0)
    between = (bound.suspect.fingerprint + bound.reject.fingerprint) / 2
    odd = separate("between", [rollout(n, fingerprint=between) for n in range(32)], contract)
    assert (odd.rejected, odd.separates) == (0, True)
    inside = separate("inside", noise(64, 8), contract)
    assert (inside.separates, inside.batches < 0.2) == (False, True)


def test_batches_are_caught_as_often_as_arithmetic_says() -> None:
    assert batches_caught(10, 1, 1) == pytest.approx(1 - 0.9**16)
    assert batches_caught(10, 0, 10) == pytest.approx(1.0)
    assert batches_caught(0, 0, 0) == batches_caught(10, 0, 0) == 0.0


def test_a_few_suspects_in_a_batch_are_coincidence() -> None:
    limit = most_suspects(16)
    assert at_least(limit + 1, 16, 0.01) <= 1e-5 < at_least(limit, 16, 0.01)
    assert limit == 4


def bf16(values: np.ndarray) -> Tensor:
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return Tensor("BF16", values.shape, bits.reshape(-1))


def floats(tensor: Tensor) -> np.ndarray:
    return (tensor.data.astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)


def matrices(seed: int) -> dict[str, Tensor]:
    drawn = np.random.default_rng(seed).normal(0, 0.02, (64, 256))
    return {
        "model.layers.0.mlp.up_proj.weight": bf16(drawn),
        "model.embed_tokens.weight": bf16(drawn),
        "model.norm.weight": bf16(np.ones(256)),
    }


def test_quantised_weights_have_few_levels_and_leave_the_embedding_alone() -> None:
    state = matrices(1)
    name = "model.layers.0.mlp.up_proj.weight"
    for made, levels, error in ((int8(state), 255, 0.01), (int4(state), 2 * 15, 0.2)):
        assert made["model.embed_tokens.weight"] is state["model.embed_tokens.weight"]
        assert made["model.norm.weight"] is state["model.norm.weight"]
        assert len(np.unique(floats(made[name])[0])) <= levels
        apart = floats(made[name]) - floats(state[name])
        relative = np.sqrt((apart**2).mean() / (floats(state[name]) ** 2).mean())
        assert error / 4 < relative < error


def test_a_nudged_state_moves_by_the_step_on_average() -> None:
    state = matrices(2)
    name = "model.layers.0.mlp.up_proj.weight"
    for step in (1e-6, 1e-4):
        moved = np.abs(floats(nudged(state, step, 3)[name]) - floats(state[name]))
        assert moved.mean() == pytest.approx(step, rel=0.2)
    assert (moved > 0).mean() > 0.3
    small = floats(nudged(state, 1e-7, 3)[name]) != floats(state[name])
    assert 0 < small.mean() < 0.05  # most weights of a bf16 policy do not change in a step
    again = nudged(state, 1e-4, 3)[name]
    assert json.dumps(again.data.tolist()) == json.dumps(nudged(state, 1e-4, 3)[name].data.tolist())


def test_likelihood_ratios_count_as_far_as_they_are_ratios() -> None:
    """x ~ N(-v/2, v) has a mean of e^x of 1: what the sequential test is made for."""
    rng = np.random.default_rng(5)
    assert other_scale(rng.normal(-0.5, 1.0, 4000)) > 0.8
    assert other_scale(np.zeros(64)) == 0.0  # nothing was compared
    loud = rng.normal(-20.0, 19.0, 4000)  # noise that auditor and worker have in common
    scale = other_scale(loud)
    assert 0.05 < scale < 0.15
    assert np.exp(np.clip(loud * scale, -5, 5)).mean() <= 1.0
    assert other_scale(rng.normal(3.0, 12.0, 4000)) == 0.0  # they lean to another policy


def config(fingerprint: str, dtype: str) -> RunConfig:
    return RunConfig.model_validate(
        {"verification": {"fingerprint": fingerprint}, "engine": {"dtype": dtype}}
    )


def test_what_is_suspect_comes_before_what_is_rejected() -> None:
    for reject, suspect in BUILT_IN.values():
        assert all(getattr(suspect, name) < getattr(reject, name) for name in MEASURES)


def test_built_in_bounds_in_bf16_are_refused_where_draws_are_truncated() -> None:
    """Honest supports of SmolLM2 have margins of 0.011 in the mean, the bound to suspect is 0.012."""
    asked: dict[str, Any] = {"verification": {"bounds": "built-in"}, "sampling": {"top_p": 0.9}}
    with pytest.raises(UsageError, match="built-in are of draws from all tokens"):
        proof_contract(RunConfig.model_validate({**asked, "engine": {"dtype": "bfloat16"}}), "")
    assert proof_contract(RunConfig.model_validate({**asked, "engine": {"dtype": "float32"}}), "")


def test_built_in_bounds_say_that_no_sample_is_behind_them() -> None:
    asked = {"verification": {"bounds": "built-in"}, "engine": {"dtype": "bfloat16"}}
    contract = proof_contract(RunConfig.model_validate(asked), "")
    assert contract.bounds == "fixed"
    assert (contract.honest_rollouts, contract.source) == (0, "built in for bfloat16")
    assert contract.other_scale == 0.0, "unmeasured noise bans nobody"


def test_a_fingerprint_that_was_removed_says_what_to_set() -> None:
    with pytest.raises(
        ValidationError, match=r'removed: set verification\.fingerprint = "projection"'
    ):
        config("toploc", "float32")
    with pytest.raises(ValidationError, match="projection"):
        config("other", "float32")
