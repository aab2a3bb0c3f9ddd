"""Tests of wiki-search: its tasks and its rewards."""

import pytest
from wiki_search import (
    WikiSearchConfig,
    WikiSearchTaskset,
    is_right,
    page_of,
    pages,
    search,
    sections,
)


def test_every_question_can_be_answered_from_the_pages():
    tasks = list(WikiSearchTaskset(WikiSearchConfig.model_validate({"id": "wiki-search"})).load())
    texts = [" ".join(parts.values()) for _, parts in pages().values()]
    assert tasks
    assert all(any(task.data.answer in text for text in texts) for task in tasks)


def test_a_page_is_found_by_its_title_and_equal_searches_have_equal_results():
    for page_id, (title, _) in pages().items():
        assert search(title).split()[0] == page_id
        assert search(title) == search(f"  {title.upper()}!")
    assert search("zzz") == "nothing found"
    with pytest.raises(ValueError, match="no such page"):
        page_of("zzz")


def test_a_page_is_split_at_its_headings():
    assert sections("Hello.\n# One two\na\n## Empty\n\n## 3\nb") == {
        "top": "Hello.",
        "one_two": "a",
        "3": "b",
    }


def test_an_answer_is_right_if_it_is_short_and_has_the_words_in_order():
    assert is_right("It is New York.", "new york")
    assert not is_right("york new", "New York")
    assert not is_right("New York " + "or another " * 20, "New York")
