"""Places found by a dry run of a loader: a model with everything that loaders do, on two ranks."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from primerl.node.inference import handover
from primerl.node.inference.parameter_placement import ParameterPlacement, trace, write
from primerl.node.models.tensors import from_torch, to_torch
from primerl.node.weights.state import State
from primerl.node.weights.state import Tensor as StateTensor
from primerl.node.weights.state_history import StateHistory, known_changes

VOCAB, HIDDEN, HEADS, INNER = 10, 8, 12, 6
RANKS = 2


class ShardedModel:
    """One rank's share of a model: fused, tied, padded and turned parameters, and a loader for them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.parameters = {
            "embedding": torch.zeros(8, HIDDEN),  # 10 rows of the vocabulary padded to 16
            "qkv": torch.zeros(2 * HEADS // RANKS, HIDDEN),
            "out": torch.zeros(HIDDEN, HEADS // RANKS),
            "turned": torch.zeros(INNER, HIDDEN),
            "norm": torch.zeros(HIDDEN),
            "scaled": torch.zeros(HIDDEN),
            "stack": torch.zeros(3, HIDDEN),
        }

    def load(self, tensors: list[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            getattr(self, "_" + name)(tensor)

    def _embedding(self, tensor: Tensor) -> None:
        rows = min(8, VOCAB - 8 * self.rank)
        own = self.parameters["embedding"]
        own[:rows].data.copy_(tensor.narrow(0, 8 * self.rank, rows))
        own[rows:].data.fill_(0)

    def _q(self, tensor: Tensor) -> None:
        half = HEADS // RANKS
        self.parameters["qkv"].narrow(0, 0, half).copy_(tensor.narrow(0, half * self.rank, half))

    def _k(self, tensor: Tensor) -> None:
        half = HEADS // RANKS
        self.parameters["qkv"].narrow(0, half, half).copy_(tensor[half * self.rank :][:half])

    def _out(self, tensor: Tensor) -> None:
        half = HEADS // RANKS
        self.parameters["out"].data.copy_(tensor.narrow(1, half * self.rank, half))

    def _turned(self, tensor: Tensor) -> None:
        self.parameters["turned"].copy_(tensor.t())

    def _norm(self, tensor: Tensor) -> None:
        self.parameters["norm"].data.copy_(tensor)

    def _scaled(self, tensor: Tensor) -> None:
        self.parameters["scaled"].copy_(tensor + 1)

    def _row(self, tensor: Tensor) -> None:
        self.parameters["stack"].copy_(tensor.expand(3, HIDDEN))


SIZES = {
    "embedding": (VOCAB, HIDDEN),
    "q": (HEADS, HIDDEN),
    "k": (HEADS, HIDDEN),
    "out": (HIDDEN, HEADS),
    "turned": (HIDDEN, INNER),
    "norm": (HIDDEN,),
    "scaled": (HIDDEN,),
    "row": (HIDDEN,),
}
PLACELESS = ["row", "scaled"]
"""Computed on the way, or copied to several places at once."""


def random_state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: from_torch(torch.randn(size, generator=generator), "BF16")
        for name, size in SIZES.items()
    }


def pairs(state: State) -> Iterator[tuple[str, Tensor]]:
    return ((name, to_torch(tensor)) for name, tensor in state.items())


def places(model: ShardedModel, state: State) -> ParameterPlacement:
    found = trace(model.load, model.parameters, pairs(state))
    assert isinstance(found, ParameterPlacement), found
    return found


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_is_written_element_by_element_is_what_the_loader_would_have_copied(rank: int) -> None:
    """By way of the file's arrays, as the engine's worker does it."""
    old, new = random_state(0), random_state(1)
    changed = {
        name: np.sort(np.random.default_rng(2).choice(old[name].data.size, 5, replace=False))
        for name in sorted(SIZES)
        if name not in PLACELESS
    }
    blended = dict(old)
    for name, positions in changed.items():
        data = old[name].data.copy()
        data[positions] = new[name].data[positions]
        blended[name] = StateTensor("BF16", old[name].shape, data)
    model, wanted = ShardedModel(rank), ShardedModel(rank)
    placement = places(model, old)
    model.load(list(pairs(old)))
    wanted.load(list(pairs(blended)))
    delta = handover.make_delta(blended, changed, placement.placeless)
    for key, tensor in delta.tensors.items():
        if key.startswith(handover.WHOLE):
            model.load([(key.removeprefix(handover.WHOLE), to_torch(tensor))])
    values = to_torch(delta.tensors[handover.VALUES + "BF16"])
    positions = to_torch(delta.tensors[handover.POSITIONS + "BF16"])
    for one in placement.prepare(handover.read_spans(delta.metadata["BF16"]), positions, values):
        one.run()
    for name, parameter in model.parameters.items():
        assert parameter.equal(wanted.parameters[name]), name


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_tensor_is_written_where_the_model_has_other_bits(rank: int) -> None:
    old, new = random_state(0), random_state(1)
    model, wanted = ShardedModel(rank), ShardedModel(rank)
    placement = places(model, old)
    model.load(list(pairs(old)))
    wanted.load(list(pairs({**new, "scaled": old["scaled"], "row": old["row"]})))
    for name in SIZES:
        first = 5  # of each tensor the elements before stay
        data = new[name].data.copy()
        data[:first] = old[name].data[:first]
        mixed = to_torch(StateTensor("BF16", SIZES[name], data))
        found = placement.differing(name, mixed)
        if name in PLACELESS:
            assert found is None
            continue
        wanted.load([(name, mixed)])
        assert found is not None
        assert 0 < sum(len(one.offsets) for one in found) < mixed.numel()
        for one in found:
            one.run()
        assert placement.differing(name, mixed) == []
    for name, parameter in model.parameters.items():
        assert parameter.equal(wanted.parameters[name]), name


def test_the_dry_run_writes_nothing() -> None:
    model = ShardedModel(0)
    places(model, random_state(0))
    assert all(not parameter.any() for parameter in model.parameters.values())


def test_a_tensor_that_is_computed_or_copied_to_many_places_has_no_place() -> None:
    placement = places(ShardedModel(1), random_state(0))
    assert placement.placeless == PLACELESS
    with pytest.raises(KeyError):
        placement.prepare([("scaled", 1)], torch.tensor([0]), torch.tensor([1.0]))


def test_parameters_that_moved_are_noticed() -> None:
    model = ShardedModel(0)
    placement = places(model, random_state(0))
    assert placement.still_holds(model.parameters)
    model.parameters["norm"] = model.parameters["norm"].clone()
    assert not placement.still_holds(model.parameters)


def test_a_loader_that_is_not_given_what_it_wants_is_a_fault() -> None:
    def fault(state: State) -> str:
        model = ShardedModel(0)
        found = trace(model.load, model.parameters, pairs(state))
        assert isinstance(found, str)
        return found

    state = random_state(0)
    without = {name: tensor for name, tensor in state.items() if name != "k"}
    assert "'qkv' is missing" in fault(without)
    assert "'other'" in fault({**state, "other": state["norm"]})
    short = StateTensor("BF16", (1,), state["norm"].data[:1])
    assert "'norm'" in fault({**state, "norm": short})


class StagedModel(ShardedModel):
    """As a stage of a pipeline, which is not the one that has the norm."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        del self.parameters["norm"]

    def _norm(self, tensor: Tensor) -> None:
        pass


def test_a_tensor_that_another_stage_has_is_absent_and_updates_of_it_write_nothing() -> None:
    state = random_state(0)
    placement = places(StagedModel(0), state)
    assert placement.absent == {"norm"}
    assert placement.shapes["norm"] == (HIDDEN,)
    assert placement.placeless == PLACELESS
    assert places(ShardedModel(0), state).absent == frozenset()
    spans, at, values = [("norm", 2), ("k", 1)], torch.tensor([0, 1, 0]), torch.ones(3)
    writes = placement.prepare(spans, at, values)
    assert sum(len(write.offsets) for write in writes) == 1


def test_much_that_changed_and_what_has_no_place_goes_whole() -> None:
    state = {"a": from_torch(torch.zeros(80), "BF16"), "b": from_torch(torch.zeros(80), "F32")}
    few, many = np.arange(80 // handover.WHOLE_FROM), np.arange(80 // handover.WHOLE_FROM + 1)
    sparse = handover.make_delta(state, {"a": few, "b": few}, ())
    assert sorted(sparse.tensors) == [
        *(handover.POSITIONS + dtype for dtype in ("BF16", "F32")),
        *(handover.VALUES + dtype for dtype in ("BF16", "F32")),
    ]
    assert sparse.tensors[handover.POSITIONS + "F32"].dtype == "I32"
    whole = handover.make_delta(state, {"a": many, "b": few}, {"b"})
    assert sorted(whole.tensors) == [handover.WHOLE + "a", handover.WHOLE + "b"]
    assert handover.make_delta(state, {"a": None}, ()).tensors == {handover.WHOLE + "a": state["a"]}
    nothing = handover.make_delta(state, {"a": few[:0]}, ())
    assert (nothing.tensors, nothing.metadata) == ({}, {})


def test_neighbours_of_a_history_are_handed_over_as_if_gathered() -> None:
    history = StateHistory(4, whole=2)
    first = random_state(0)
    few = {name: np.arange(0, tensor.data.size, 90) for name, tensor in first.items()}
    for version in range(4):
        state = {
            name: StateTensor(tensor.dtype, tensor.shape, tensor.data.copy())
            for name, tensor in first.items()
        }
        for name, positions in few.items() if version % 2 else ():
            state[name].data[positions] ^= 1
        history.add(version, state, few if version else None)
    for old, new in ((0, 1), (1, 0), (2, 3), (3, 2)):
        known = known_changes(history[old], history[new])
        assert known is not None
        gathered = handover.make_delta(history[new], dict(known), ())
        delta = handover.make_delta(history[new], known, ())
        assert delta.metadata == gathered.metadata
        assert {
            name: (tensor.dtype, tensor.data.tolist()) for name, tensor in delta.tensors.items()
        } == {
            name: (tensor.dtype, tensor.data.tolist()) for name, tensor in gathered.tensors.items()
        }


def test_positions_that_may_not_be_written_to_are_read(recwarn: pytest.WarningsRecorder) -> None:
    positions = np.array([0, 3])
    positions.flags.writeable = False
    flat = torch.zeros(4)
    write(flat, from_torch(torch.arange(1.0, 5.0), "BF16"), positions)
    assert flat.tolist() == [1, 0, 0, 4]
    assert not recwarn.list
