"""Portions of an audit, the versions that it needs, and states that are recognised."""

import gc
from collections.abc import Sequence

import numpy as np
import pytest

from primerl.node.ops.errors import EngineError
from primerl.node.verification.auditor import (
    AuditItem,
    SameState,
    SampledSpan,
    check_versions,
    other_versions,
    wanted_versions,
)
from primerl.node.verification.hf_auditor import (
    FIRST_PORTION,
    LARGEST_PORTION,
    SMALLEST_PORTION,
    Pace,
    portion_size,
)
from primerl.node.weights.state import Tensor


def item(length: int = 10, versions: Sequence[int] = (3,)) -> AuditItem:
    count = len(versions)
    return AuditItem([0] * length, [SampledSpan(1, 1 + count, 0)], [0.0] * count, versions, b"")


def test_a_portion_is_within_its_limit_unless_one_item_alone_is_not() -> None:
    items = [item(length) for length in (10, 20, 500, 30, 60, 20, 90)]
    taken: list[int] = []
    while sum(taken) < len(items):
        taken.append(portion_size(items[sum(taken) :], {}, limit=100))
    assert taken == [2, 1, 2, 1, 1]
    assert portion_size(items[4:], {}, limit=170) == 3
    assert portion_size([], {}, limit=100) == 0


def test_each_version_that_is_compared_costs_as_much() -> None:
    items = [item(30), item(30), item(30)]
    assert portion_size(items, {}, limit=60) == 2
    assert portion_size(items, {3: [2]}, limit=60) == 1


def test_portions_take_a_quarter_of_the_time_that_there_is() -> None:
    pace = Pace(100.0)
    assert pace.limit == FIRST_PORTION
    pace.done(FIRST_PORTION, 8.192)  # a thousand a second
    assert pace.limit == 25_000
    pace.done(10, 1.0)  # a network was loaded
    assert pace.limit == 25_000
    pace.done(25_000, 0.0)
    assert pace.limit == LARGEST_PORTION
    for _ in range(9):
        pace.failed()
    assert pace.limit == SMALLEST_PORTION
    pace.done(SMALLEST_PORTION, 50.0)
    assert pace.limit == SMALLEST_PORTION


def test_a_branch_of_one_version_is_never_compared_with_itself() -> None:
    others = {3: [2, 3, 4], 4: [3]}
    assert other_versions(item(), others) == [2, 4]
    assert wanted_versions(item(), others) == [2, 3, 4]
    # of two versions: each of them may have drawn all of it
    assert other_versions(item(versions=[3, 4]), others) == [2, 3, 4]
    assert other_versions(item(versions=[7]), others) == []


def test_a_version_that_is_not_held_is_named() -> None:
    check_versions([item()], {3: None}, {})
    with pytest.raises(EngineError, match="policy 2"):
        check_versions([item()], {3: None}, {3: [2]})


def test_a_state_is_the_same_only_if_its_tensors_are() -> None:
    def tensor() -> Tensor:
        return Tensor("F32", (2,), np.zeros(2, "<u4"))

    state = {"a": tensor(), "b": tensor()}
    seen = SameState(state)
    assert seen.matches(state)
    assert seen.matches(dict(state))
    assert not seen.matches(state | {"a": tensor()})
    assert not seen.matches(state | {"c": tensor()})
    assert not seen.matches({"a": state["a"]})
    del state["b"]
    gc.collect()
    assert not seen.matches(state | {"b": tensor()})
