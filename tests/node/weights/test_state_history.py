"""The policies that a trainer holds for audits."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from primerl.node.weights.state import Changed, State, Tensor, digests
from primerl.node.weights.state_history import StateHistory, between, known_changes, layout, take


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


def taken(state: State, name: str, positions: NDArray[np.int64]) -> list[int]:
    out = np.empty(len(positions), np.uint16)
    take(state, name, positions, out)
    return out.tolist()


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


def test_a_version_is_one_object_from_whole_to_gone_and_after() -> None:
    history, state = StateHistory(3, whole=1), first_state()
    expected = digests(state)
    history.add(0, state)
    held = history[0]
    for version in range(1, 6):
        state, _ = next_state(state, version)
        history.add(version, state)
        assert history.get(0) is (held if version < 3 else None)
        assert digests(held) == expected


@pytest.mark.parametrize("pair", [(0, 3), (3, 0), (1, 2), (2, 2), (0, 2), (2, 3), (0, 4)])
@pytest.mark.parametrize("whole", [1, 3])
def test_each_step_between_two_versions_is_known_without_comparing_them(
    whole: int, pair: tuple[int, int]
) -> None:
    history, state, changed = StateHistory(8, whole=whole), first_state(), None
    for version in range(5):
        history.add(version, state, changed)
        state, changed = next_state(state, version)
    old, new = (history[version] for version in pair)
    data = old["a"].data.copy()
    steps = between(old, new)
    assert len(steps) == abs(pair[0] - pair[1]) + 1
    for before, after in pairwise(steps):
        changed = known_changes(before, after)
        assert changed is not None
        assert changed.keys() == {"a"}
        positions = changed["a"]
        assert positions is not None
        assert positions.dtype == np.int64
        bits = np.empty(len(positions), np.uint16)
        take(after, "a", positions, bits)
        data[positions] = bits
    assert data.tolist() == new["a"].data.tolist()
    other = first_state()
    assert known_changes(old, other) is None
    assert between(old, other) == [old, other]


def test_a_step_makes_no_tensor_of_an_old_version() -> None:
    history, state, changed = StateHistory(8, whole=1), first_state(), None
    for version in range(5):
        history.add(version, state, changed)
        state, changed = next_state(state, version)
    for before, after in ((history[1], history[2]), (history[2], history[1])):
        known = known_changes(before, after)
        assert known is not None
        positions = known["a"]
        assert positions is not None
        taken(after, "a", positions)
        assert not after.made


def test_where_a_version_differs_from_one_that_was_replaced_is_found_by_comparison() -> None:
    history, state = StateHistory(8), first_state()
    history.add(0, state, None)
    first, changed = next_state(state, 1)
    history.add(1, first, changed)
    replaced = history[1]
    other, changed = next_state(state, 2)
    history.add(1, other, changed)
    assert known_changes(replaced, history[1]) is None
    known = known_changes(history[0], history[1])  # `changed` may be of what was replaced
    assert known is not None
    assert known.keys() == {"a"}
    positions = known["a"]
    assert positions is not None
    assert positions.tolist() == np.flatnonzero(state["a"].data != other["a"].data).tolist()


@given(st.integers(0, 6), st.lists(st.integers(0, 999), max_size=50), st.floats(0.01, 0.9))
def test_elements_of_any_version_can_be_read(
    version: int, positions: list[int], share: float
) -> None:
    history, state = StateHistory(8, whole=1), first_state()
    expected: list[State] = []
    for number in range(7):
        history.add(number, state)
        expected.append(state)
        state, _ = next_state(state, number, share)
    for name in "ab":
        wanted = np.array(sorted(set(positions)), np.int64)
        found = taken(history[version], name, wanted)
        assert found == expected[version][name].data[wanted].tolist()
    assert layout(history[version]) == layout(expected[version])


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
    assert digests(history[again]) == digests(other)


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
