"""Tests of guess-env: its tasks and its rewards."""

from itertools import islice

from guess_env import GuessEnvConfig, GuessEnvTaskset, answer, read_guess


def numbers(count: int, **options: int) -> list[int]:
    config = GuessEnvConfig.model_validate({"id": "guess-env", **options})
    return [task.data.number for task in islice(GuessEnvTaskset(config).load(), count)]


def test_tasks_depend_on_the_options_alone():
    assert numbers(50) == numbers(50)
    assert numbers(50) != numbers(50, seed=1)
    assert set(numbers(200, highest=3)) == {1, 2, 3}


def test_what_it_says_depends_on_guess_and_number_alone():
    assert read_guess("I say 12, or 13") == 12
    assert read_guess("no idea") == -1
    assert "higher" in answer(3, 5)
    assert "lower" in answer(9, 5)
    assert "no number" in answer(-1, 5)
