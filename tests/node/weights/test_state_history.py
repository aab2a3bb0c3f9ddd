"""The policies that a trainer holds for audits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl.node.weights.state import Changed, State, Tensor, digests
from primerl.node.weights.state_history import StateHistory, known_changes


def first_state(size: int = 1000) -> dict[str, Tensor]:
    bits = np.random.default_rng(0).integers(0, 2**16, (2, size)).astype(np.uint16)
    return {"a": Tensor("BF16", (size,), bits[0]), "b": Tensor("BF16", (size,), bits[1])}


def next_state(state: State, seed: int, share: float = 0.02) -> tuple[State, Changed]:
    """Change a share of tensor a."""
    rng = np.random.default_rng(seed)
    data = state["a"].data.copy()
    positions = np.sort(rng.choice(data.size, max(1, int(share * data.size)), replace=False))
    data[positions] ^= 1
    return {"a": Tensor("BF16", data.shape, data), "b": state["b"]}, {"a": positions}


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("share", [0.02, 0.9])
def test_old_versions_have_the_bits_that_they_had(told: bool, share: float) -> None:
    history, state = StateHistory(8, whole=2), first_state()
    history.add(0, state)
    expected = {0: digests(state)}
    for version in range(1, 12):
        state, changed = next_state(state, version, share)
        history.add(version, state, changed if told else None)
        expected[version] = digests(state)
    assert list(history) == list(range(4, 12))
    assert {version: digests(history[version]) for version in history} == {
        version: expected[version] for version in range(4, 12)
    }
    with pytest.raises(KeyError):
        history[3]


def test_an_old_version_takes_little_memory_and_shares_what_never_changed() -> None:
    history, state = StateHistory(8, whole=1), first_state()
    history.add(0, state)
    newer, changed = next_state(state, 1)
    history.add(1, newer, changed)
    assert history[0]["b"] is newer["b"]
    old = history[0]
    tensor = old["a"]
    assert old["a"] is tensor  # while it is held
    assert tensor.data.tolist() == state["a"].data.tolist()


def test_an_old_version_is_one_object_while_somebody_holds_it() -> None:
    history, state = StateHistory(8, whole=1), first_state()
    for version in range(4):
        history.add(version, state)
        state, _ = next_state(state, version)
    old = history[1]
    assert history[1] is old
    history.add(4, state)
    assert history[1] is old
    assert digests(history[1]) == digests(dict(old))


@pytest.mark.parametrize("pair", [(0, 3), (3, 0), (1, 2), (2, 2), (0, 2)])
def test_what_differs_between_versions_is_known_from_how_they_are_held(
    pair: tuple[int, int],
) -> None:
    history, state = StateHistory(8, whole=1), first_state()
    for version in range(4):
        history.add(version, state)
        state, _ = next_state(state, version)
    old, new = (history[version] for version in pair)
    changed = known_changes(old, new)
    assert changed is not None
    data = old["a"].data.copy()
    for name, positions in changed.items():
        assert name == "a"
        assert positions is not None
        assert positions.dtype == np.int64
        data[positions] = new["a"].data[positions]
    assert data.tolist() == new["a"].data.tolist()
    assert known_changes(old, first_state()) is None


@pytest.mark.parametrize(("again", "held"), [(4, [1, 2, 3, 4]), (3, [3]), (2, [2])])
def test_a_version_that_comes_again_takes_the_place_of_those_from_it_on(
    again: int, held: list[int]
) -> None:
    history, state = StateHistory(4, whole=2), first_state()
    states: list[State] = []
    for version in range(5):
        history.add(version, state)
        states.append(state)
        state, _ = next_state(state, version)
    other, changed = next_state(states[again - 1], 99)
    history.add(again, other, changed)
    assert list(history) == held
    assert [digests(history[one]) for one in held[:-1]] == [digests(states[v]) for v in held[:-1]]
    assert history[again] is other


@given(st.lists(st.integers(1, 3), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 3))
def test_versions_may_be_left_out(gaps: list[int], keep: int, whole: int) -> None:
    history, state, version = StateHistory(keep, whole=whole), first_state(50), 0
    expected: dict[int, dict[str, bytes]] = {}
    for gap in gaps:
        version += gap
        state, changed = next_state(state, version)
        history.add(version, state, changed)
        expected[version] = digests(state)
    held = sorted(expected)[-keep:]
    assert list(history) == held
    assert {one: digests(history[one]) for one in held} == {one: expected[one] for one in held}
