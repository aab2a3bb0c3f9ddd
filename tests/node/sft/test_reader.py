import logging

import pytest

from primerl.node.errors import RunFailed, UsageError
from primerl.node.sft.examples import HELD_OUT, TOO_LONG, UNTRAINED, Fit, Holdout, Passed
from primerl.node.sft.order import Cursor, Shuffle
from primerl.node.sft.reader import Reader
from primerl.node.sft.rows import BadRow
from primerl.node.sft.template import Tokens
from primerl.node.training.backend import Sample


class Numbers:
    """Row n is a sample of n % 5 + 2 tokens n; some rows are bad or passed over."""

    def __init__(
        self,
        size: int | None,
        *,
        bad: frozenset[int] = frozenset(),
        passed: str = "",
        every: int = 0,
    ) -> None:
        self.size = size
        self.bad = bad
        self.passed = passed
        self.every = every

    def sample(self, index: int) -> Sample:
        if index in self.bad:
            raise BadRow("role", "an odd role")
        if self.every and index % self.every == 0:
            raise Passed(self.passed)
        length = index % 5 + 2
        return Sample([index] * length, [False] + [True] * (length - 1), [0.0] * length, 1.0)

    def where(self, index: int) -> str:
        return f"numbers:{index + 1}"

    def identity(self) -> str:
        return "numbers"


def reader(examples: Numbers, **changes: object) -> Reader:
    options: dict[str, object] = {"seed": 3, "shuffle": True, "max_bad_rows": 0.05, **changes}
    return Reader(examples, **options)  # type: ignore[arg-type]


def rows(samples: list[Sample]) -> list[int]:
    return [sample.token_ids[0] for sample in samples]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_an_order_has_every_row_once(size: int) -> None:
    order = Shuffle.of(size, seed=5, epoch=2)
    assert sorted(order.at(n) for n in range(size)) == list(range(size))
    with pytest.raises(IndexError):
        order.at(size)


def test_orders_differ_by_seed_and_epoch_and_look_random() -> None:
    orders = {
        tuple(Shuffle.of(500, seed, epoch).at(n) for n in range(500))
        for seed, epoch in [(0, 0), (0, 1), (1, 0)]
    }
    assert len(orders) == 3
    for order in orders:
        # the correlation of place and row of a random permutation has a standard deviation of 0.045
        mean = sum(range(500)) / 500
        covariance = sum((n - mean) * (row - mean) for n, row in enumerate(order))
        assert abs(covariance / sum((n - mean) ** 2 for n in range(500))) < 0.2


def test_the_order_is_the_same_for_ever() -> None:
    """A run resumes in it, also after an update of this program."""
    assert [Shuffle.of(10, 0, 0).at(n) for n in range(10)] == GOLDEN


GOLDEN = [4, 9, 8, 5, 2, 7, 3, 6, 0, 1]


def test_batches_walk_through_the_epochs_without_loss() -> None:
    read = reader(Numbers(10))
    cursor, seen = Cursor(), list[int]()
    for _ in range(5):
        portion = read.batch(cursor, size=4)
        assert len(portion.samples) == 4
        seen += rows(portion.samples)
        cursor = portion.cursor
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert (cursor.epoch, cursor.index, cursor.samples) == (2, 0, 20)
    assert cursor.tokens == 2 * sum(n % 5 + 2 for n in range(10))


def test_a_cursor_alone_says_what_comes_next() -> None:
    read = reader(Numbers(11, bad=frozenset({4})), max_bad_rows=1)
    first = read.batch(Cursor(), size=7)
    again = reader(Numbers(11, bad=frozenset({4})), max_bad_rows=1)
    read.batch(first.cursor, size=20)  # a reader that has gone on is no other one
    assert again.batch(first.cursor, size=7) == read.batch(first.cursor, size=7)


def test_without_shuffling_rows_come_in_their_order() -> None:
    portion = reader(Numbers(4), shuffle=False).batch(Cursor(), size=6)
    assert rows(portion.samples) == [0, 1, 2, 3, 0, 1]


def test_a_batch_of_tokens_is_never_more_and_loses_nothing() -> None:
    read = reader(Numbers(20))
    cursor, seen = Cursor(), list[int]()
    while cursor.epoch == 0:
        portion = read.batch(cursor, size=1, tokens=13)
        held = sum(len(sample.token_ids) for sample in portion.samples)
        assert 13 - 6 < held <= 13
        seen += rows(portion.samples)
        cursor = portion.cursor
    assert sorted(seen[:20]) == list(range(20))


def test_a_row_longer_than_the_batch_is_a_batch_of_its_own() -> None:
    assert len(reader(Numbers(5)).batch(Cursor(), size=1, tokens=1).samples) == 1


def test_max_epochs_ends_the_data_with_a_short_batch_and_then_nothing() -> None:
    read = reader(Numbers(10), max_epochs=1)
    last = read.batch(read.batch(Cursor(), size=7).cursor, size=7)
    assert len(last.samples) == 3
    assert read.batch(last.cursor, size=7).samples == []


def test_bad_rows_cost_themselves_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        portion = reader(Numbers(100, bad=frozenset({7, 8}))).batch(Cursor(), size=98)
    assert len(portion.samples) == 98
    assert portion.cursor.skipped == {"role": 2}
    assert portion.cursor.bad == 2
    assert {"numbers:8", "numbers:9"} == {
        record.getMessage().split()[2][:-1] for record in caplog.records
    }


def test_too_many_bad_rows_end_the_run_and_name_one() -> None:
    with pytest.raises(
        RunFailed, match=r"6 of \d+ rows are bad \(6 role\), the last at numbers:\d"
    ):
        reader(Numbers(100, bad=frozenset(range(6)))).batch(Cursor(), size=100)


def test_the_first_bad_rows_of_many_rows_end_nothing() -> None:
    """The share is one of a thousand rows, not of the first three."""
    read = reader(Numbers(5000, bad=frozenset(range(5))), shuffle=False)
    assert read.batch(Cursor(), size=10).cursor.bad == 5


def test_rows_passed_over_are_nobodys_fault() -> None:
    read = reader(Numbers(10, passed=TOO_LONG, every=2))
    cursor = read.batch(Cursor(), size=10).cursor
    assert cursor.skipped[TOO_LONG] >= 5
    assert cursor.bad == 0
    held_out = reader(Numbers(10, passed=HELD_OUT, every=2)).batch(Cursor(), size=10)
    assert held_out.cursor.skipped == {}
    assert held_out.cursor.rows == 10


@pytest.mark.parametrize("size", [6, None])
def test_data_without_any_sample_end_with_the_reason(size: int | None) -> None:
    with pytest.raises(UsageError, match=f"{size or 1000} too_long"):
        reader(Numbers(size, passed=TOO_LONG, every=1)).batch(Cursor(), size=1)


def tokens(length: int, trained: int) -> Tokens:
    return Tokens(list(range(length)), [n >= length - trained for n in range(length)])


def test_long_rows_are_dropped_or_cut() -> None:
    with pytest.raises(Passed, match=TOO_LONG):
        Fit(8, "drop").sample(tokens(9, 4))
    cut = Fit(8, "truncate").sample(tokens(9, 4))
    assert len(cut.token_ids) == len(cut.mask) == len(cut.logprobs) == 8
    assert sum(cut.mask) == 3
    with pytest.raises(Passed):  # nothing that is trained is left of it
        Fit(8, "truncate").sample(tokens(12, 3))
    assert len(Fit(8, "drop").sample(tokens(8, 1)).token_ids) == 8


def test_nothing_predicts_the_first_token() -> None:
    assert Fit(8, "drop").sample(tokens(3, 3)).mask == [False, True, True]
    with pytest.raises(Passed, match=UNTRAINED):
        Fit(8, "drop").sample(Tokens([1, 2], [True, False]))


def test_a_holdout_takes_its_share_and_doubles_stay_together() -> None:
    holdout = Holdout(0.25)
    taken = [holdout.takes(b"row %d" % n) for n in range(2000)]
    assert 400 < sum(taken) < 600  # five standard deviations
    assert [holdout.takes(b"row %d\r" % n) for n in range(2000)] == taken
    assert not any(Holdout(0.0).takes(b"row %d" % n) for n in range(50))
