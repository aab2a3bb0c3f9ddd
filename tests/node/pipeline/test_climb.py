"""Trials: what was better is kept, what was worse is given back and tried ever more rarely."""

from collections.abc import Callable
from itertools import pairwise

from primerl.node.pipeline.climb import Climb


def measure(
    climb: Climb, gives: Callable[[int], float], proposal: float, times: int, leap: int = 0
) -> list[int]:
    """So many decisions; the numbers that were measured."""
    seen: list[int] = []
    for _ in range(times):
        rates = [gives(climb.number)]
        while not climb.is_enough(rates):
            rates.append(gives(climb.number))
        seen.append(climb.number)
        climb.measured(rates, proposal, 64, leap=leap)
    return seen


def test_a_proposal_is_tried_at_most_doubling_and_kept_where_it_gives_more() -> None:
    climb = Climb(2)
    assert measure(climb, float, 20.0, 6) == [2, 4, 8, 16, 20, 20]
    assert climb.home == 20


def test_a_proposal_that_gives_less_is_given_back_and_tried_ever_more_rarely() -> None:
    climb = Climb(4)
    seen = measure(climb, lambda number: 1.0 / number if number > 4 else number / 16, 8.0, 300)
    assert climb.home == 4
    above = [at for at, number in enumerate(seen) if number > 4]
    assert above[0] == 1
    assert 2 <= len(above) <= 8
    gaps = [later - sooner for sooner, later in pairwise(above)]
    assert gaps == sorted(gaps)


def test_another_proposal_than_the_one_that_was_in_vain_is_tried_at_once() -> None:
    climb = Climb(4)
    assert measure(climb, lambda number: float(number <= 4), 8.0, 4) == [4, 8, 4, 4]
    assert measure(climb, float, 16.0, 3) == [4, 6, 12]


def test_what_nobody_proposes_is_found_too() -> None:
    """A model that sees no reason to have fewer, or more, is overruled by what is measured."""
    for best in (2, 10):
        climb = Climb(5)
        measure(climb, lambda number, best=best: 1.0 / (1 + abs(number - best)), 5.0, 100)
        assert climb.home == best


def test_a_smaller_number_that_is_proposed_need_only_give_the_same() -> None:
    climb = Climb(16)
    measure(climb, lambda _: 1.0, 4.0, 4)
    assert climb.home == 4
    climb = Climb(16)
    measure(climb, lambda _: 1.0, 16.0, 40)
    assert climb.home == 16


def test_one_hopeless_measurement_ends_a_trial_and_close_ones_need_many() -> None:
    climb = Climb(4)
    climb.measured([1.0], 8.0, 64)
    assert climb.trial == 8
    assert climb.is_enough([0.5])
    assert not climb.is_enough([0.85])
    assert climb.is_enough([0.85, 0.8])
    assert not climb.is_enough([1.02] * 8)
    assert climb.is_enough([1.02] * 12)


def test_there_are_never_more_than_the_most_and_never_none() -> None:
    climb = Climb(3)
    for _ in range(50):
        climb.measured([1.0], 40.0, 4)
        assert 1 <= climb.number <= 4
    climb = Climb(1)
    assert set(measure(climb, lambda number: 1.0 / number, 0.5, 60)) <= {1, 2}


def test_what_cannot_be_compared_is_no_trial() -> None:
    climb = Climb(4)
    climb.measured([1.0], 8.0, 64)
    climb.give_up()
    assert climb.number == 4
    climb.measured([0.01], 4.0, 64)
    assert climb.home == 4


def cliff(number: int) -> float:
    """Nothing is gained below 12, and much from there on."""
    return 2.0 if number >= 12 else 1.0


def test_what_steps_do_not_find_is_found_by_a_leap() -> None:
    climb = Climb(4)
    measure(climb, cliff, 4.0, 200)
    assert climb.home < 12
    climb = Climb(4)
    assert measure(climb, cliff, 4.0, 30, leap=12)[:2] == [4, 12]
    assert climb.home == 12


def test_a_leap_in_vain_is_given_back_and_tried_ever_more_rarely_beside_the_steps() -> None:
    climb = Climb(4)
    seen = measure(climb, lambda number: 1.0 / (1 + abs(number - 5)), 5.0, 300, leap=20)
    assert climb.home == 5
    leaps = [at for at, number in enumerate(seen) if number == 20]
    assert 2 <= len(leaps) <= 8
    gaps = [later - sooner for sooner, later in pairwise(leaps)]
    assert gaps[1:] == sorted(gaps[1:]), "finding 5 began anew"


def test_a_leap_goes_no_further_than_the_most_and_never_back() -> None:
    climb = Climb(4)
    climb.measured([1.0], 4.0, 8, leap=12)
    assert climb.trial == 8
    climb = Climb(8)
    assert 4 not in measure(climb, lambda _: 1.0, 8.0, 5, leap=4)
