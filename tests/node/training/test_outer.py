"""The outer step: what bf16 can see is sent, the rest is kept, and equal contributions make equal bits."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from primerl.node.training.backend import Sample
from primerl.node.training.outer import (
    ContributionError,
    Gated,
    OuterState,
    SparseChange,
    check_artifact,
    decode,
    encode,
    gate,
    merge,
    weigh,
)
from primerl.node.training.rounds import split, together, trained_tokens
from primerl.node.weights.codec import CODEC
from primerl.node.weights.state import CodecError, State, Tensor
from primerl.protocol.manifests import Artifact, LearnersContract

A, B, C, D = (bytes(31) + letter for letter in (b"a", b"b", b"c", b"d"))
RULE = LearnersContract((A,), 4, 0.5, 0.75)
PLAIN = LearnersContract((A,), 4, 1.0, 0.0)
Floats = NDArray[np.float32]


def masters(seed: int = 0, size: int = 4096) -> State:
    """Make masters of two tensors."""
    chance = np.random.default_rng(seed)
    return {
        name: tensor(0.02 * chance.standard_normal(size).astype(np.float32)) for name in ("v", "w")
    }


def tensor(values: Floats) -> Tensor:
    """Make an fp32 tensor."""
    return Tensor("F32", values.shape, values.view("<u4"))


def floats(own: Tensor) -> Floats:
    """Read an fp32 tensor."""
    return own.data.view(np.float32)


def moved(base: State, by: float, seed: int = 1) -> State:
    """Move masters at random, by `by` or so."""
    chance = np.random.default_rng(seed)
    return {
        name: tensor(
            floats(own) - np.float32(by) * chance.standard_normal(own.data.size).astype(np.float32)
        )
        for name, own in base.items()
    }


def bf16(values: Floats) -> NDArray[np.uint32]:
    """Round as torch does."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32)


def change_of(base: State, local: State) -> tuple[Gated, SparseChange]:
    """Send a change through the codec."""
    gated = gate(base, local, {})
    return gated, decode(OuterState.begin(0, base), encode(base, gated))


def sparse(*values: float) -> SparseChange:
    """Make a change of the first elements of `w`."""
    array = np.array(values, np.float32)
    norm = float(np.linalg.norm(array.astype(np.float64)))
    return SparseChange({"w": np.arange(array.size)}, {"w": array}, norm)


def test_only_elements_that_bf16_shows_changed_are_sent() -> None:
    base = masters()
    gated = gate(base, moved(base, 1e-5), {})
    assert 0 < gated.fired < 8192 / 2
    for name, positions in gated.changed.items():
        assert positions is not None
        before, after = floats(base[name]), floats(gated.masters[name])
        assert np.array_equal(np.flatnonzero(bf16(before) != bf16(after)), positions)
        assert np.array_equal(np.flatnonzero(before != after), positions)


def test_what_is_not_sent_is_kept_and_sent_once_it_can_be_seen() -> None:
    base = {"w": tensor(np.ones(64, np.float32))}
    local = {"w": tensor(np.full(64, 1 - 1e-3, np.float32))}
    residual: dict[str, Floats] = {}
    rounds = 0
    while not (gated := gate(base, local, residual)).fired:
        residual = dict(gated.residual)
        rounds += 1
    assert rounds > 0
    sent = floats(base["w"]) - floats(gated.masters["w"])
    whole = (rounds + 1) * (floats(base["w"]) - floats(local["w"]))
    assert np.allclose(sent + gated.residual["w"], whole, rtol=0, atol=1e-8)


def test_a_contribution_is_read_as_it_was_sent() -> None:
    base = masters()
    gated, change = change_of(base, moved(base, 1e-4))
    for name, values in change.values.items():
        positions = change.positions[name]
        assert np.array_equal(
            floats(base[name])[positions] - values, floats(gated.masters[name])[positions]
        )
    assert change.norm == pytest.approx(
        np.sqrt(
            sum(np.sum(np.square(values, dtype=np.float64)) for values in change.values.values())
        )
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_refused(bad: float) -> None:
    base = masters()
    local = dict(base)
    values = floats(base["w"]).copy()
    values[7] = bad
    gated = Gated({**local, "w": tensor(values)}, {"w": np.array([7])}, {}, 1)
    with pytest.raises(ContributionError, match="not finite"):
        decode(OuterState.begin(0, base), encode(base, gated))


def test_bytes_that_are_no_contribution_are_refused_and_change_nothing() -> None:
    base = masters()
    state = OuterState.begin(0, base)
    payload = b"".join(encode(base, gate(base, moved(base, 1e-4), {})))
    for broken in (b"", payload[: len(payload) // 2], payload[::-1], payload + b"x"):
        with pytest.raises(ContributionError):
            decode(state, [broken])
    assert state.digest == OuterState.begin(0, base).digest


def test_a_payload_larger_than_all_masters_is_refused_before_it_is_fetched() -> None:
    state = OuterState.begin(0, masters())
    check_artifact(Artifact("delta", 0, state.digest, CODEC, 1000, ()), state)
    with pytest.raises(ContributionError, match="all masters have"):
        check_artifact(Artifact("delta", 0, state.digest, CODEC, 2**40, ()), state)
    with pytest.raises(ContributionError, match="codec"):
        check_artifact(Artifact("delta", 0, state.digest, "other", 1000, ()), state)


def test_an_outer_step_is_nesterov_on_the_weighed_sum() -> None:
    state = OuterState.begin(3, {"w": tensor(np.ones(4, np.float32))})
    parts = [(sparse(0.5, 0.25), 0.5), (sparse(0.0, 0.25, 1.0), 0.25)]
    after = merge(state, parts, RULE)
    gradient = np.array([0.25, 0.1875, 0.25, 0.0])
    assert np.array_equal(floats(after.momentum["w"]), gradient.astype(np.float32))
    assert np.allclose(floats(after.masters["w"]), 1 - 0.5 * (gradient + 0.75 * gradient))
    again = merge(after, [], RULE)
    assert (again.version, again.digest) == (5, after.digest)


def test_equal_contributions_make_equal_bits_today_as_ever() -> None:
    base = masters()
    state = OuterState.begin(0, base)
    parts = [
        (change_of(base, moved(base, 1e-4, seed))[1], weight)
        for seed, weight in ((1, 0.625), (2, 0.375))
    ]
    made = merge(state, parts, RULE)
    assert made.digest == merge(state, parts, RULE).digest
    assert made.digest.hex() == GOLDEN


GOLDEN = "775a6e447f529be440f8c0314d2e1ce0f380b7c50c38612b86250638fcbe5d22"
"""Digest of that outer state, on every machine."""


def test_one_contribution_without_momentum_is_the_learner_itself() -> None:
    base = masters()
    gated, change = change_of(base, moved(base, 1e-3))
    after = merge(OuterState.begin(0, base), [(change, 1.0)], PLAIN)
    for name, own in after.masters.items():
        assert np.array_equal(own.data, gated.masters[name].data)


def test_weights_are_shares_of_the_tokens() -> None:
    weights, refused = weigh({A: sparse(1, 1), B: sparse(1, 0.5)}, {A: 300, B: 100}, A)
    assert (weights, refused) == ({A: 0.75, B: 0.25}, {})


def test_a_large_contribution_is_clipped_and_an_enormous_one_refused() -> None:
    changes = {A: sparse(1, 0), B: sparse(5, 0), C: sparse(1, 0.5), D: sparse(200, 0)}
    weights, refused = weigh(changes, dict.fromkeys(changes, 100), A)
    assert set(refused) == {D}
    assert "norm" in refused[D]
    assert weights[A] == pytest.approx(1 / 3)
    assert weights[B] == pytest.approx(1 / 3 * 3 * changes[C].norm / 5, rel=0.2)


def test_a_contribution_that_points_against_the_others_is_refused() -> None:
    changes = {
        A: sparse(1, 1, 0),
        B: sparse(1, 0.5, 0.5),
        C: sparse(0.5, 1, 0),
        D: sparse(-1, -1, 0),
    }
    weights, refused = weigh(changes, dict.fromkeys(changes, 100), A)
    assert set(refused) == {D}
    assert "against" in refused[D]
    assert sum(weights.values()) == pytest.approx(1)


def test_ones_own_contribution_is_never_refused() -> None:
    weights, refused = weigh({A: sparse(1, 0), B: sparse(1e-9, 0)}, {A: 1, B: 1}, A)
    assert not refused
    assert set(weights) == {A, B}


def test_an_outer_state_of_other_tensors_is_refused() -> None:
    with pytest.raises(CodecError):
        OuterState.of(0, masters())
    bf = {"masters/w": Tensor("BF16", (2,), np.zeros(2, "<u2"))}
    with pytest.raises(CodecError):
        OuterState.of(0, {**bf, "momentum/w": bf["masters/w"]})


def sample(tokens: int, trained: int) -> Sample:
    """Make a sample of which `trained` tokens are trained."""
    mask = [False] * (tokens - trained) + [True] * trained
    return Sample(list(range(tokens)), mask, [0.0] * tokens, 1.0)


def test_every_sample_is_given_to_one_learner_in_one_inner_step() -> None:
    samples = [sample(4 + number % 7, 2) for number in range(64)]
    parts = split(samples, [0.5, 0.25, 0.25], 4)
    assert [len(part) for part in parts] == [4, 4, 4]
    flat = [one for part in parts for batch in part for one in batch]
    assert flat == samples
    assert all(batch for part in parts for batch in part)
    sizes = [sum(len(one.token_ids) for batch in part for one in batch) for part in parts]
    assert sizes[0] == pytest.approx(2 * sizes[1], rel=0.2)
    assert sum(trained_tokens(part) for part in parts) == 128


def test_demonstrations_are_divided_as_rollouts_are() -> None:
    rollouts = [sample(8, 2) for _ in range(16)]
    given = [replace(sample(8, 4), given=True) for _ in range(8)]
    for part in split([*rollouts, *given], [0.5, 0.5], 2):
        for batch in part:
            assert [one.given for one in batch] == [False] * 4 + [True] * 2


def test_figures_of_inner_steps_are_weighed_by_their_tokens() -> None:
    figures = together(
        [
            {"tokens": 100.0, "loss/mean": 1.0, "optim/lr": 1.0, "optim/skipped": 0.0},
            {"tokens": 300.0, "loss/mean": 2.0, "optim/lr": 2.0, "optim/skipped": 1.0},
        ]
    )
    assert figures == {"tokens": 400.0, "loss/mean": 1.75, "optim/lr": 2.0, "optim/skipped": 1.0}
