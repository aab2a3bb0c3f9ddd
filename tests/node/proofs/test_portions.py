"""Portions of an audit, the versions that it needs, and states that are recognised."""

import gc
from collections.abc import Sequence

import numpy as np
import pytest

from primerl.node.errors import EngineError
from primerl.node.proofs.auditor import AuditItem, Reply
from primerl.node.proofs.portions import (
    check_versions,
    other_versions,
    portions,
    wanted_versions,
)
from primerl.node.proofs.sameness import SameState
from primerl.node.weights.state import Tensor


def item(length: int = 10, versions: Sequence[int] = (3,)) -> AuditItem:
    count = len(versions)
    return AuditItem([0] * length, [Reply(1, 1 + count, 0)], [0.0] * count, versions, b"")


def test_every_item_is_in_one_portion_and_none_is_above_the_limit_but_a_long_one() -> None:
    items = [item(length) for length in (10, 20, 500, 30, 60, 20, 90)]
    found = portions(items, {}, limit=100)
    assert [one for portion in found for one in portion] == items
    assert [[len(one.token_ids) for one in portion] for portion in found] == [
        [10, 20],
        [500],
        [30, 60],
        [20],
        [90],
    ]
    assert portions([], {}, limit=100) == []


def test_each_version_that_is_compared_costs_as_much() -> None:
    items = [item(30), item(30), item(30)]
    assert len(portions(items, {}, limit=60)) == 2
    assert len(portions(items, {3: [2]}, limit=60)) == 3


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
