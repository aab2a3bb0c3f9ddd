"""Tests of letter-count: its tasks and its rewards."""

from itertools import islice

from letter_count import LetterCountConfig, LetterCountTaskset, score


def first(count: int, **options: int) -> list[tuple[str, str]]:
    config = LetterCountConfig.model_validate({"id": "letter-count", **options})
    tasks = islice(LetterCountTaskset(config).load(), count)
    return [(task.data.prompt, task.data.answer) for task in tasks]


def test_tasks_depend_on_the_options_alone():
    assert first(20) == first(20)
    assert first(20) != first(20, seed=1)


def test_the_answer_alone_earns_the_reward():
    for _, answer in first(20):
        assert score(answer, answer) == 1.0
        assert score("no", answer) == score("", answer) == 0.0
