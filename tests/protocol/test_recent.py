"""Bounded memory."""

from primerl.protocol.recent import RecentCounter, RecentDict


def test_the_entry_that_was_set_longest_ago_is_forgotten() -> None:
    known = RecentDict[str, int](2)
    known["a"] = 1
    known["b"] = 2
    known["a"] = 3
    known["c"] = 4
    assert dict(known) == {"a": 3, "c": 4}


def test_no_way_of_adding_goes_beyond_the_limit_and_reading_renews_nothing() -> None:
    known = RecentDict[str, int](2)
    known.update(a=1, b=2)
    assert known["a"] == known.setdefault("a", 5) == 1
    assert known.setdefault("c", 3) == 3
    assert dict(known) == {"b": 2, "c": 3}
    known |= {"d": 4}
    assert dict(known) == {"c": 3, "d": 4}


def test_of_counts_those_that_were_counted_last_are_kept() -> None:
    counts = RecentCounter[str](2)
    counts["a"] += 5
    counts["b"] += 1
    counts["a"] += 2
    counts["c"] += 3
    assert counts == {"a": 7, "c": 3}
    assert (counts.total(), counts["b"], len(counts)) == (10, 0, 2)
