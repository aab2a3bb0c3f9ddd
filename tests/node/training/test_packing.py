import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from training_cases import sample

from primerl.node.training.backend import Sample
from primerl.node.training.packing import pack

LENGTHS = st.lists(st.integers(1, 40), max_size=30)


@given(lengths=LENGTHS, seq_len=st.integers(2, 40))
def test_every_fitting_sample_is_in_exactly_one_micro_batch_whole(
    lengths: list[int], seq_len: int
) -> None:
    samples = [Sample([i + 1] * n, [True] * n, [-1.0] * n, 1.0) for i, n in enumerate(lengths)]
    packed = pack(samples, seq_len)
    rows = [row[row > 0] for batch in packed.micro_batches for row in batch.token_ids]
    found = sorted((int(row[0]), len(row)) for row in rows)
    assert found == [(i + 1, n) for i, n in enumerate(lengths) if 2 <= n <= seq_len]
    assert sorted(len(s.token_ids) for s in packed.too_long) == sorted(
        n for n in lengths if n > seq_len
    )
    assert all(batch.token_ids.size <= seq_len for batch in packed.micro_batches)
    assert packed.tokens == sum(n - 1 for _, n in found)


def test_nothing_is_truncated_silently() -> None:
    long = sample(random.Random(0), prompt=10, drawn=10)
    packed = pack([long], seq_len=19)
    assert packed.too_long == [long]
    assert packed.micro_batches == []
    assert packed.tokens == 0


def test_position_zero_and_padding_are_never_trained() -> None:
    samples = [
        Sample([1, 2], [True, True], [-1.0, -1.0], 1.0),
        Sample([3] * 4, [True] * 4, [-1.0] * 4, 1.0),
    ]
    (batch,) = pack(samples, seq_len=8).micro_batches
    assert batch.mask.tolist() == [[False, True, True, True], [False, True, False, False]]


def test_samples_without_a_trained_token_cost_no_row() -> None:
    assert pack([Sample([1, 2], [True, False], [0.0, 0.0], 1.0)], 8).micro_batches == []


def test_rows_of_like_length_share_a_micro_batch() -> None:
    rng = random.Random(1)
    samples = [sample(rng, drawn=drawn) for drawn in (1, 20, 2, 19)]
    packed = pack(samples, seq_len=24, token_budget=48)
    assert [batch.token_ids.shape for batch in packed.micro_batches] == [(2, 24), (2, 6)]


def test_the_order_of_the_samples_decides_nothing_about_shapes() -> None:
    rng = random.Random(2)
    samples = [sample(rng, drawn=rng.randint(1, 9)) for _ in range(20)]
    shapes = [b.token_ids.shape for b in pack(samples, 32).micro_batches]
    assert [b.token_ids.shape for b in pack(samples[::-1], 32).micro_batches] == shapes


def test_advantage_and_logprobs_stay_with_their_tokens() -> None:
    (batch,) = pack(
        [Sample([7, 8, 9], [False, True, True], [0.0, -1.5, -2.5], 0.25)], 8
    ).micro_batches
    assert batch.logprobs.tolist() == [[0.0, -1.5, -2.5]]
    assert np.all(batch.advantages == 0.25)
