import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.training_cases import sample

from primerl.node.training.backend import Sample
from primerl.node.training.packing import MicroBatch, Packed, pack

LENGTHS = st.lists(st.integers(1, 40), max_size=30)


def numbered(lengths: list[int]) -> list[Sample]:
    """Samples whose tokens say which of them they belong to, from 1."""
    return [Sample([i + 1] * n, [True] * n, [-1.0] * n, float(i)) for i, n in enumerate(lengths)]


def rows_of(packed: Packed) -> list[MicroBatch]:
    return [row for rank in range(len(packed.dealt)) for row in packed.rank(rank)]


def sequences(row: MicroBatch) -> list[list[int]]:
    """Token ids of the sequences of a row, padding left out."""
    ends = [sum(row.lengths[: i + 1]) for i in range(len(row.lengths))]
    parts = [row.token_ids[a:b].tolist() for a, b in pairwise([0, *ends])]
    return [part for part in parts if any(part)]


@given(
    lengths=LENGTHS,
    seq_len=st.integers(2, 40),
    ranks=st.integers(1, 4),
    multiple=st.sampled_from([1, 4, 16]),
)
def test_every_fitting_sample_is_in_exactly_one_row_whole(
    lengths: list[int], seq_len: int, ranks: int, multiple: int
) -> None:
    packed = pack(numbered(lengths), seq_len, ranks=ranks, multiple=multiple)
    found = sorted((part[0], len(part)) for row in rows_of(packed) for part in sequences(row))
    assert found == [(i + 1, n) for i, n in enumerate(lengths) if 2 <= n <= seq_len]
    too_long = sorted(len(one.token_ids) for one in packed.too_long)
    assert too_long == sorted(n for n in lengths if n > seq_len)
    assert packed.tokens == sum(n - 1 for _, n in found)
    assert len({len(rows) for rows in packed.dealt}) == 1
    assert len(packed.dealt) == ranks
    for row in rows_of(packed):
        assert sum(row.lengths) == len(row.token_ids) == len(row.positions)
        assert len(row.token_ids) % multiple == 0
        assert len(row.token_ids) < seq_len + multiple


@given(lengths=LENGTHS, multiple=st.sampled_from([1, 8]))
def test_each_trained_token_is_predicted_from_the_one_before_it_in_its_own_sequence(
    lengths: list[int], multiple: int
) -> None:
    rng = random.Random(3)
    samples = [sample(rng, prompt=1, drawn=n) for n in lengths]
    for row in rows_of(pack(samples, 64, multiple=multiple)):
        for place, target, sequence in zip(row.rows, row.targets, row.sequences, strict=True):
            assert row.token_ids[place + 1] == target
            assert row.positions[place + 1] == row.positions[place] + 1
            assert sum(row.lengths[:sequence]) <= place < sum(row.lengths[: sequence + 1]) - 1


def test_position_zero_and_padding_are_never_trained() -> None:
    samples = [
        Sample([1, 2], [True, True], [-1.0, -1.0], 1.0),
        Sample([3] * 4, [True] * 4, [-1.0] * 4, 1.0),
    ]
    (row,) = rows_of(pack(samples, seq_len=8, multiple=8))
    assert row.token_ids.tolist() == [3, 3, 3, 3, 1, 2, 0, 0]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert row.rows.tolist() == [0, 1, 2, 4]
    assert row.targets.tolist() == [3, 3, 3, 2]
    assert row.sequences.tolist() == [0, 0, 0, 1]


def test_samples_without_a_trained_token_cost_no_row() -> None:
    assert rows_of(pack([Sample([1, 2], [True, False], [0.0, 0.0], 1.0)], 8)) == []


def test_a_rank_without_samples_gets_rows_of_padding_so_that_all_have_as_many() -> None:
    packed = pack(numbered([5]), 8, ranks=3, multiple=4)
    assert [len(rows) for rows in packed.dealt] == [1, 1, 1]
    idle = [next(packed.rank(rank)) for rank in (1, 2)]
    assert [row.tokens for row in idle] == [0, 0]
    assert [row.lengths for row in idle] == [[4], [4]]


def test_a_row_may_hold_more_than_the_longest_sample() -> None:
    packed = pack(numbered([8, 8, 8, 8, 9]), 8, row=32)
    assert [sorted(row.lengths) for row in rows_of(packed)] == [[8, 8, 8, 8]]
    assert [len(sample.token_ids) for sample in packed.too_long] == [9]


def test_rows_of_one_turn_cost_about_the_same_on_all_ranks() -> None:
    rng = random.Random(4)
    samples = [sample(rng, drawn=rng.choice([20, 40, 400])) for _ in range(200)]
    packed = pack(samples, 512, ranks=4)
    for turn in zip(*map(packed.rank, range(len(packed.dealt))), strict=True):
        sizes = [len(row.token_ids) for row in turn]
        assert max(sizes) <= 1.25 * min(sizes)


def test_first_fit_decreasing_leaves_little_room() -> None:
    rng = random.Random(5)
    samples = numbered([rng.randint(2, 100) for _ in range(300)])
    packed = pack(samples, 128)
    assert len(rows_of(packed)) <= 1.03 * sum(packed.lengths) / 128 + 1


def test_the_order_of_the_samples_decides_nothing_about_shapes() -> None:
    rng = random.Random(2)
    samples = [sample(rng, drawn=rng.randint(1, 9)) for _ in range(20)]
    shapes = [row.lengths for row in rows_of(pack(samples, 32))]
    assert [row.lengths for row in rows_of(pack(samples[::-1], 32))] == shapes


def test_advantage_and_logprobs_stay_with_their_tokens() -> None:
    one = Sample([7, 8, 9], [False, True, True], [0.0, -1.5, -2.5], 0.25)
    (row,) = rows_of(pack([one], 8))
    assert (row.targets.tolist(), row.logprobs.tolist()) == ([8, 9], [-1.5, -2.5])
    assert row.advantages.tolist() == [0.25, 0.25]


def test_the_environments_tokens_are_trained_as_such_and_counted_apart() -> None:
    drawn, said = [False, True, False, False, True], [False, False, True, True, False]
    one = Sample([7, 8, 9, 10, 11], drawn, [0.0, -1.5, 0.0, 0.0, -2.5], 0.25, said)
    plain = replace(one, echo=None)
    packed = pack([one, plain], 16, multiple=4)
    (row,) = rows_of(packed)
    assert row.targets.tolist() == [8, 9, 10, 11, 8, 11]
    assert row.echo.tolist() == [False, True, True, False, False, False]
    assert (packed.tokens, packed.echo_tokens) == (4, 2)
    assert [flag for index in range(4) for flag in row.part(index, 4).echo] == row.echo.tolist()


def test_demonstrations_share_rows_with_rollouts_and_are_counted_apart() -> None:
    rollout = Sample([7, 8, 9, 10], [False, True, False, True], [0.0, -1.5, 0.0, -2.5], 0.25)
    packed = pack([rollout, replace(rollout, token_ids=[4, 5, 6, 7], given=True)], 16, multiple=4)
    (row,) = rows_of(packed)
    assert row.given.tolist() == [False, False, True, True]
    assert not row.echo.any()
    assert (packed.tokens, packed.echo_tokens, packed.given_tokens) == (2, 0, 2)
    assert [flag for index in range(4) for flag in row.part(index, 4).given] == row.given.tolist()


def test_a_teacher_reads_hints_before_the_same_trained_tokens_in_the_same_order() -> None:
    rng = random.Random(6)
    samples = [
        replace(sample(rng, drawn=rng.randint(1, 9)), hint=[1] * rng.randint(0, 7))
        for _ in range(30)
    ]
    samples[3] = replace(samples[3], mask=[True] * len(samples[3].mask), hint=[1, 2])
    packed = pack(samples, 32, ranks=2, multiple=4)
    for rank in range(2):
        both = zip(packed.rank(rank), packed.rank(rank, hinted=True), strict=True)
        for row, other in both:
            assert row.targets.tolist() == other.targets.tolist()
            assert row.sequences.tolist() == other.sequences.tolist()
            assert len(other.token_ids) <= 32
            assert other.token_ids[other.rows + 1].tolist() == other.targets.tolist()
    assert pack([replace(sample(rng, prompt=20, drawn=9), hint=[1] * 4)], 32).too_long


def test_a_sample_with_only_tokens_of_the_environment_to_train_has_a_row() -> None:
    only = Sample([1, 2, 3], [False] * 3, [0.0] * 3, 0.0, [False, False, True])
    packed = pack([only], 8)
    (row,) = rows_of(packed)
    assert (row.targets.tolist(), row.echo.tolist()) == ([3], [True])
    assert (packed.tokens, packed.echo_tokens) == (0, 1)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_parts_of_a_row_are_the_row(count: int) -> None:
    rng = random.Random(6)
    (row,) = rows_of(pack([sample(rng) for _ in range(5)], 64, multiple=4))
    parts = [row.part(index, count) for index in range(count)]
    size = len(row.token_ids) // count
    assert [t for part in parts for t in part.token_ids] == row.token_ids.tolist()
    assert [t for part in parts for t in part.targets] == row.targets.tolist()
    back = [place + i * size for i, part in enumerate(parts) for place in part.rows]
    assert back == row.rows.tolist()
    assert all(part.lengths == row.lengths for part in parts)
