"""Closed forms, and how often an interval holds what it should: in simulations with fixed seeds."""

import itertools

import numpy as np
import pytest

from primerl.node.evaluation import statistics
from primerl.node.evaluation.statistics import Estimate, mean, pass_at, share, tries_of


@pytest.mark.parametrize(("samples", "solved"), [(1, 0), (1, 1), (4, 1), (5, 3), (6, 6), (8, 0)])
def test_pass_at_is_the_share_of_subsets_that_hold_a_solution(samples: int, solved: int) -> None:
    outcomes = [True] * solved + [False] * (samples - solved)
    for tries in range(1, samples + 1):
        subsets = list(itertools.combinations(outcomes, tries))
        assert pass_at(samples, solved, tries) == pytest.approx(
            sum(map(any, subsets)) / len(subsets)
        )


@pytest.mark.parametrize(("samples", "solved", "tries"), [(4, 5, 1), (4, 1, 5), (4, 1, 0)])
def test_impossible_numbers_are_refused(samples: int, solved: int, tries: int) -> None:
    with pytest.raises(ValueError, match="possible"):
        pass_at(samples, solved, tries)


def test_tries_double_up_to_all_samples() -> None:
    assert tries_of(1) == [1]
    assert tries_of(8) == [1, 2, 4, 8]
    assert tries_of(6) == [1, 2, 4, 6]


def test_shares_of_solved_prompts_have_the_exact_interval() -> None:
    # Clopper and Pearson's for 3 of 10, from the quantiles of the beta distribution
    found = share([1.0] * 3 + [0.0] * 7)
    assert found.method == "exact"
    assert (found.low, found.high) == (
        pytest.approx(0.06674, abs=1e-5),
        pytest.approx(0.65245, abs=1e-5),
    )
    none = share([0.0] * 20)
    assert (none.low, none.high) == (0.0, pytest.approx(1 - 0.025 ** (1 / 20)))
    every = share([1.0] * 20)
    assert (every.low, every.high) == (pytest.approx(0.025 ** (1 / 20)), 1.0)


def test_prompts_that_are_all_alike_still_have_an_interval() -> None:
    found = share([0.5] * 20)
    others = 1 - 0.025 ** (1 / 20)
    assert (found.value, found.method) == (0.5, "exact")
    assert (found.low, found.high) == (
        pytest.approx(0.5 * (1 - others)),
        pytest.approx(0.5 + 0.5 * others),
    )


def test_equal_rewards_of_unknown_range_have_none() -> None:
    assert mean([2.5] * 9) == Estimate(2.5, None, None, "none")
    assert mean([-1.0, 3.0]).method == "bootstrap"


def test_the_same_figures_have_the_same_interval() -> None:
    values = [0.25, 0.5, 0.75, 1.0, 0.0, 0.5]
    assert share(values) == share(values)


def test_the_quantile_of_student_is_right() -> None:
    for count, known in ((5, 2.776), (10, 2.262), (20, 2.093), (121, 1.980)):
        assert statistics._student(0.975, count) == pytest.approx(known, rel=0.01)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("prompts", "samples"), [(15, 4), (60, 8)])
def test_the_interval_of_a_bootstrap_holds_the_truth_95_times_in_100(
    prompts: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    generator = np.random.default_rng(7)
    held = 0
    for _ in range(300):
        chances = generator.beta(1.0, 1.5, prompts)  # mean 0.4: prompts are easy or hard
        solved = generator.binomial(samples, chances)
        found = share([float(count) / samples for count in solved])
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.4 <= found.high
    assert 0.915 <= held / 300 <= 0.985
