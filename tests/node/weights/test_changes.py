"""Where a state changed: a hint to the encoder, a result of the decoder, and summed up for an engine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import weights_cases as cases

from primerl.node.weights.blocks import BLOCK
from primerl.node.weights.codec import apply_delta, encode_delta
from primerl.node.weights.state import Changed, PendingChanges, State, Tensor


def delta(base: State, new: State, changed: Changed | None = None, threads: int = 1) -> bytes:
    return b"".join(encode_delta(base, new, changed=changed, threads=threads))


def positions(base: State, new: State) -> dict[str, np.ndarray | None]:
    """Every change, and nothing else."""
    found = {n: np.flatnonzero(base[n].data != new[n].data).astype(np.int64) for n in base}
    return {name: index for name, index in found.items() if index.size}


def model() -> tuple[State, State]:
    """Two blocks and a bit at several densities, and a tensor that stays."""
    base = {
        "dense": cases.like_a_model(1, BLOCK + 99),
        "same": cases.like_a_model(2, 500),
        "some": cases.like_a_model(3, 2 * BLOCK + 7),
    }
    moved = base["some"].data.copy()
    moved[[0, 5, BLOCK - 1, BLOCK, 2 * BLOCK + 6]] ^= 3
    new = {
        "dense": cases.stepped(base["dense"], 4, 0.9),
        "same": base["same"],
        "some": Tensor("BF16", base["some"].shape, moved),
    }
    return base, new


# -- the hint ----------------------------------------------------------------------------------


@settings(max_examples=50)
@given(cases.neighbours(), st.data())
def test_hint_leaves_the_bytes_as_they_are(pair: tuple[State, State], data: st.DataObject) -> None:
    base, new = pair
    hint = positions(base, new)
    for name, index in list(hint.items()):
        assert index is not None
        more = data.draw(st.lists(st.integers(0, base[name].data.size - 1), max_size=4))
        hint[name] = data.draw(st.sampled_from([None, np.union1d(index, np.array(more, np.int64))]))
    assert delta(base, new, hint) == delta(base, new)


def test_hint_is_cut_at_the_blocks() -> None:
    base, new = model()
    assert delta(base, new, positions(base, new), threads=2) == delta(base, new)


def test_only_hinted_positions_are_compared() -> None:
    """So that a caller sees what a hint that misses a change costs."""
    base, new = model()
    assert delta(base, new, {}) == delta(base, base)


# -- what the receiver learns ------------------------------------------------------------------


@settings(max_examples=50)
@given(cases.neighbours())
def test_receiver_learns_a_superset_of_what_changed(pair: tuple[State, State]) -> None:
    base, new = pair
    state, changed = apply_delta(base, delta(base, new), cases.infos(new))
    assert cases.same(state, new)
    for name, index in positions(base, new).items():
        told = changed[name]
        assert index is not None
        assert told is None or set(index) <= set(told)
    assert all(state[name] is base[name] for name in base.keys() - changed.keys())


@pytest.mark.parametrize("threads", [1, 3])
def test_few_changes_are_listed_by_position_and_many_as_a_whole_tensor(threads: int) -> None:
    base, new = model()
    payload = delta(base, new)
    _, changed = apply_delta(base, payload, cases.infos(new), threads=threads)
    assert sorted(changed) == ["dense", "some"]
    assert changed["dense"] is None
    told = changed["some"]
    assert told is not None
    assert told.dtype == np.int64
    assert told.tolist() == [0, 5, BLOCK - 1, BLOCK, 2 * BLOCK + 6]


# -- what an engine has not been given yet ----------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c"])
POSITIONS = st.none() | st.lists(st.integers(0, 20), unique=True).map(
    lambda listed: np.array(sorted(listed), np.int64)
)


@given(st.lists(st.dictionaries(NAMES, POSITIONS)))
def test_what_is_unwritten_is_the_union_of_all_steps(steps: list[Changed]) -> None:
    unwritten = PendingChanges()
    unwritten.none()
    for step in steps:
        unwritten.add(step)
    changed = unwritten.changed
    assert changed is not None
    assert set(changed) == {name for step in steps for name in step}
    for name, positions in changed.items():
        parts = [step[name] for step in steps if name in step]
        if any(part is None for part in parts):
            assert positions is None
        else:
            assert positions is not None
            assert positions.tolist() == sorted({int(i) for p in parts if p is not None for i in p})


def test_everything_is_unwritten_at_first_and_after_an_unknown_step() -> None:
    unwritten = PendingChanges()
    unwritten.add({"a": None})
    assert unwritten.changed is None
    unwritten.none()
    assert unwritten.changed == {}
    unwritten.add(None)
    unwritten.add({"a": None})
    assert unwritten.changed is None
    unwritten.none()
    unwritten.all()
    assert unwritten.changed is None
