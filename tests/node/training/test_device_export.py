"""What the exporter says changed is what changed, on any device; states that were given away stay."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import weights_cases as cases

from primerl.node.errors import EngineError
from primerl.node.models.tensors import bf16_state
from primerl.node.training import snapshot as host_state
from primerl.node.training.backend import Snapshot
from primerl.node.training.export import PolicyExporter
from primerl.node.training.world import World
from primerl.node.weights.codec import encode_delta
from primerl.node.weights.state import State, digests

ALONE = World.alone(torch.device("cpu"))

Tensors = dict[str, torch.Tensor]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def weights(seed: int = 0) -> Tensors:
    """fp32 masters of several shapes, a bf16 one, and one that is no float."""
    rng = torch.Generator().manual_seed(seed)
    return {
        "wide": torch.randn(40, 50, generator=rng),
        "row": torch.randn(7, generator=rng),
        "scalar": torch.randn((), generator=rng),
        "empty": torch.randn(0, 3, generator=rng),
        "half": torch.randn(300, generator=rng).to(torch.bfloat16),
        "steps": torch.arange(12).reshape(3, 4),
    }


def copy(state: State) -> dict[str, bytes]:
    return {name: tensor.data.tobytes() for name, tensor in state.items()}


def check(found: Snapshot, before: State, named: Mapping[str, torch.Tensor]) -> None:
    """`found` is the state of `named`, and says exactly where it differs from `before`."""
    assert cases.same(found.state, bf16_state(named.items()))
    assert list(found.state) == list(named)
    assert found.base is before
    changed = found.changed_since(before)
    assert changed is not None
    for name, tensor in found.state.items():
        differs = np.flatnonzero(tensor.data != before[name].data)
        if not differs.size:
            assert name not in changed
            assert tensor is before[name]
            continue
        told = changed[name]
        assert told is None or (told.dtype == np.int64 and np.array_equal(told, differs))
        assert not np.shares_memory(tensor.data, before[name].data)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("bundles", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_every_export_is_the_state_and_tells_the_difference(
    chunk: int, bundles: bool, ahead: bool, device: str
) -> None:
    exporter = PolicyExporter(ALONE, threads=2, chunk=chunk, bundles=bundles, ahead=ahead)
    named = {name: tensor.to(device) for name, tensor in weights().items()}
    first = exporter.snapshot(named)
    assert first.base is None
    assert cases.same(first.state, bf16_state(named.items()))
    before, bits = first.state, copy(first.state)
    rng = torch.Generator().manual_seed(1)
    for share in (0.0, 0.01, 0.1, 0.3, 1.0, 0.0):
        for tensor in named.values():
            chosen = (torch.rand(tensor.shape, generator=rng) < share).to(device)
            tensor[chosen] = tensor[chosen] * 3 + 1
        found = exporter.snapshot(named)
        check(found, before, named)
        assert copy(before) == bits  # what was given away has not moved
        before, bits = found.state, copy(found.state)
    exporter.close()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 199), st.floats(width=32)), max_size=40), st.integers(1, 80)
)
def test_any_floats_are_rounded_and_compared_by_their_bits(
    writes: list[tuple[int, float]], chunk: int
) -> None:
    named = {"w": torch.zeros(200)}
    exporter = PolicyExporter(ALONE, threads=1, chunk=chunk)
    before = exporter.snapshot(named).state
    for at, value in writes:
        named["w"][at] = value
    check(exporter.snapshot(named), before, named)


def test_a_change_below_the_rounding_is_none_and_a_sign_of_zero_is_one() -> None:
    named = {"w": torch.tensor([1.0, 0.0])}
    exporter = PolicyExporter(ALONE, threads=1)
    before = exporter.snapshot(named).state
    named["w"][0] += 1e-4
    assert exporter.snapshot(named).state["w"] is before["w"]
    named["w"][1] = -0.0
    found = exporter.snapshot(named)
    assert found.state["w"].data.tolist() == [0x3F80, 0x8000]


def test_few_changes_are_exported_by_position_and_many_as_a_whole_tensor() -> None:
    named = {"w": torch.zeros(1000)}
    exporter = PolicyExporter(ALONE, threads=1, chunk=500)
    exporter.snapshot(named)
    named["w"][[0, 499, 500, 999]] = 1.0
    told = exporter.snapshot(named).changed["w"]
    assert told is not None
    assert told.tolist() == [0, 499, 500, 999]
    named["w"][:200] = 2.0  # too many in one of the two chunks
    assert exporter.snapshot(named).changed["w"] is None


def test_what_waits_to_be_written_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_state, "MAX_WAITING", 500)
    exporter = PolicyExporter(ALONE, threads=2, chunk=50)
    named = weights()
    before = exporter.snapshot(named).state
    for tensor in named.values():
        tensor += 1
    check(exporter.snapshot(named), before, named)


def test_a_tensor_that_rests_for_a_while_is_copied_ahead_once() -> None:
    exporter = PolicyExporter(ALONE, threads=1, ahead=True)
    named = weights()
    before = exporter.snapshot(named).state
    for name in ("wide", "row", "wide", "row", "half", "wide"):
        named[name] += 1
        found = exporter.snapshot(named)
        check(found, before, named)
        before = found.state
    exporter.close()


def test_the_hint_gives_the_bytes_that_a_comparison_gives() -> None:
    named = weights()
    exporter = PolicyExporter(ALONE, threads=2, chunk=300)
    before = exporter.snapshot(named).state
    rng = torch.Generator().manual_seed(2)
    for share in (0.02, 0.6):
        for tensor in named.values():
            tensor[torch.rand(tensor.shape, generator=rng) < share] += 1
        found = exporter.snapshot(named)
        hinted = encode_delta(before, found.state, changed=found.changed_since(before))
        assert b"".join(hinted) == b"".join(encode_delta(before, found.state))
        before = found.state


def test_a_snapshot_speaks_only_of_the_very_state_it_was_compared_with() -> None:
    named = {"w": torch.zeros(10)}
    exporter = PolicyExporter(ALONE, threads=1)
    first = exporter.snapshot(named).state
    named["w"][1] = 1.0
    lost = exporter.snapshot(named)  # never published, say: the disk was full
    named["w"][2] = 1.0
    third = exporter.snapshot(named)
    assert third.changed_since(first) is None
    assert third.changed_since(dict(lost.state)) is None
    assert third.changed_since(lost.state) is third.changed


@pytest.mark.parametrize("how", ["renamed", "reshaped", "one more", "another type"])
def test_other_tensors_are_exported_whole(how: str) -> None:
    named = weights()
    exporter = PolicyExporter(ALONE, threads=1)
    exporter.snapshot(named)
    if how == "renamed":
        named["line"] = named.pop("row")
    elif how == "reshaped":
        named["row"] = torch.ones(8)
    elif how == "one more":
        named["more"] = torch.ones(3)
    else:
        named["steps"] = named["steps"].to(torch.int32)
    found = exporter.snapshot(named)
    assert found.base is None
    assert cases.same(found.state, bf16_state(named.items()))
    named["wide"][0, 0] = 9.0
    check(exporter.snapshot(named), found.state, named)


def test_a_failed_export_is_followed_by_a_whole_one() -> None:
    class Unreadable(torch.Tensor):
        def detach(self) -> torch.Tensor:
            raise RuntimeError("out of memory")

    named = weights()
    exporter = PolicyExporter(ALONE, threads=2)
    exporter.snapshot(named)
    named["wide"] += 1
    broken = named | {"steps": named["steps"].as_subclass(Unreadable)}
    with pytest.raises(RuntimeError, match="out of memory"):
        exporter.snapshot(broken)
    found = exporter.snapshot(named)  # `wide` was noted as exported, but nobody holds it
    assert found.base is None
    assert cases.same(found.state, bf16_state(named.items()))


def test_a_state_does_not_change_with_the_weights_it_came_from() -> None:
    named = {"w": torch.ones(50, dtype=torch.bfloat16)}
    exporter = PolicyExporter(ALONE, threads=1)
    states = [exporter.snapshot(named).state]
    named["w"][3] = 2.0
    states.append(exporter.snapshot(named).state)
    told = [digests(state) for state in states]
    named["w"].fill_(7.0)
    states.append(exporter.snapshot(named).state)
    assert [digests(state) for state in states[:2]] == told


def test_a_dtype_that_no_state_holds_is_refused() -> None:
    with pytest.raises(EngineError, match="complex64"):
        PolicyExporter(ALONE, threads=1).snapshot({"w": torch.zeros(2, dtype=torch.complex64)})
