"""Merging adapters: the arithmetic, that it is the same everywhere, and what is refused before any of it."""

import math

import numpy as np
import pytest
import torch
from support.weights_cases import (
    ADAPTER_SHAPES,
    LAYERS,
    contract,
    make_adapters,
    make_base,
    random_tensor,
)

from primerl.node.errors import EngineError
from primerl.node.models.tensors import to_torch
from primerl.node.weights.adapters import (
    BLOCK,
    PREFIX,
    A,
    B,
    MergedAdapters,
    adapter_shapes,
    add_product,
    changes,
    merge,
    narrow,
    widen,
)
from primerl.node.weights.state import State, Tensor, digests

LAYER = LAYERS[0]


def bits(state: State) -> dict[str, bytes]:
    return digests(state)


def test_a_merged_layer_is_the_base_plus_the_scaled_product() -> None:
    base, adapters = make_base(), make_adapters()
    merged = merge(base, adapters, contract())
    for layer in LAYERS:
        weight, a, b = (
            to_torch(one).double()
            for one in (
                base[layer + ".weight"],
                adapters[PREFIX + layer + A],
                adapters[PREFIX + layer + B],
            )
        )
        expected = (weight.float() + (b @ a * 1.5).float()).bfloat16()
        assert torch.equal(to_torch(merged[layer + ".weight"]), expected)
        assert not torch.equal(expected.double(), weight)


def test_what_has_no_adapters_stays_the_same_object_and_nothing_that_went_in_is_written_to() -> (
    None
):
    base, adapters = make_base(), make_adapters()
    before = bits(base), bits(adapters)
    merged = merge(base, adapters, contract())
    assert merged.keys() == base.keys()
    for name in ("model.embed.weight", "model.norm.weight"):
        assert merged[name] is base[name]
    assert (bits(base), bits(adapters)) == before


def test_adapters_that_add_nothing_give_the_base_itself() -> None:
    base, adapters = make_base(), dict(make_adapters())
    for layer in LAYERS:
        zeros = Tensor("BF16", (40, 4), np.zeros(160, "<u2"))
        adapters[PREFIX + layer + B] = zeros
    merged = merge(base, adapters, contract())
    assert all(merged[name] is base[name] for name in base)


def test_the_order_in_which_a_library_sums_changes_no_bit() -> None:
    """Rounded in fp32 it would: the last check shows that this test can fail."""
    chance = np.random.default_rng(3)
    rank = 64
    weight = random_tensor(chance, (300, 200), 0.2)
    a, b = random_tensor(chance, (rank, 200)), random_tensor(chance, (300, rank), 0.01)
    expected = add_product(weight, a, b, 0.37)
    naive = set[bytes]()
    for _ in range(5):
        order = chance.permutation(rank)
        shuffled = Tensor("BF16", a.shape, a.data.reshape(rank, 200)[order].reshape(-1).copy())
        turned = Tensor("BF16", b.shape, b.data.reshape(300, rank)[:, order].reshape(-1).copy())
        assert np.array_equal(add_product(weight, shuffled, turned, 0.37).data, expected.data)
        left, right = (widen(one.data).reshape(one.shape) for one in (turned, shuffled))
        summed = np.zeros((300, 200), np.float32)
        for number in range(rank):
            summed += left[:, number : number + 1] * right[number : number + 1]
        naive.add(summed.tobytes())
    assert len(naive) > 1


def test_threads_change_no_bit() -> None:
    base, adapters = make_base(), make_adapters()
    whole = merge(base, adapters, contract())
    assert bits(merge(base, adapters, contract(), threads=3)) == bits(whole)


def test_a_layer_of_several_blocks_is_merged_as_one_is() -> None:
    chance = np.random.default_rng(4)
    rows = 2 * BLOCK // 500 + 3
    weight, b = random_tensor(chance, (rows, 500)), random_tensor(chance, (rows, 2))
    a = random_tensor(chance, (2, 500))
    product = (to_torch(b).double() @ to_torch(a).double() * 0.5).float()
    found = to_torch(add_product(weight, a, b, 0.5))
    assert torch.equal(found, (to_torch(weight).float() + product).bfloat16())


def test_layers_whose_adapters_are_the_same_objects_are_not_merged_again() -> None:
    base, adapters = make_base(), make_adapters()
    first = MergedAdapters(adapters, merge(base, adapters, contract()))
    name = PREFIX + LAYERS[1] + B
    moved = {**adapters, name: random_tensor(np.random.default_rng(9), (40, 4))}
    second = merge(base, moved, contract(), before=first)
    assert second[LAYERS[0] + ".weight"] is first.state[LAYERS[0] + ".weight"]
    assert bits(second) == bits(merge(base, moved, contract()))
    assert bits(second) != bits(first.state)


def test_changes_are_the_positions_whose_bits_differ() -> None:
    old = make_base()
    data = old["model.embed.weight"].data.copy()
    data[[3, 17]] ^= 1
    new = {**old, "model.embed.weight": Tensor("BF16", (7, 24), data)}
    new[LAYER + ".weight"] = random_tensor(np.random.default_rng(5), (40, 24))
    equal = old["model.norm.weight"]
    new["model.norm.weight"] = Tensor(equal.dtype, equal.shape, equal.data.copy())
    found = changes(old, new)
    assert found.keys() == {"model.embed.weight", LAYER + ".weight"}
    assert found[LAYER + ".weight"] is None
    positions = found["model.embed.weight"]
    assert positions is not None
    assert positions.tolist() == [3, 17]


def test_rounding_is_that_of_torch() -> None:
    chance = np.random.default_rng(0)
    values = chance.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    special = [0.0, -0.0, math.inf, -math.inf, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 1e-45]
    values = np.concatenate([values, np.array(special, np.float32)])
    expected = torch.from_numpy(values.copy()).bfloat16()
    found = torch.from_numpy(narrow(values).view(np.int16)).view(torch.bfloat16)
    numbers = ~torch.isnan(expected)
    assert torch.equal(found[numbers].view(torch.int16), expected[numbers].view(torch.int16))
    assert torch.isnan(found[~numbers]).all()
    assert np.array_equal(narrow(widen(narrow(values[-8:]))), narrow(values[-8:]))


def test_what_overflows_is_infinite_or_not_a_number_and_no_warning() -> None:
    huge = Tensor("BF16", (1, 1), np.array([0x7F00], "<u2"))
    weight = Tensor("BF16", (1, 1), np.array([0xFF80], "<u2"))  # minus infinity
    assert add_product(huge, huge, huge, 1e30).data[0] == 0x7F80
    assert add_product(weight, huge, huge, 1e30).data[0] == 0x7FC0


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"target_modules": ("q_proj", "k_proj")}, "no layers k_proj"),
        ({"target_modules": ("q_proj", "up_proj", "")}, "no layers"),
        ({"target_modules": ("norm",)}, "adapters are for matrices"),
        ({"rank": 5}, "BF16"),
        ({"target_modules": ("q_proj",)}, "have .*up_proj"),
        ({"target_modules": ("q_proj", "up_proj", "embed")}, "lack .*embed"),
    ],
)
def test_adapters_of_another_contract_are_refused(changed: dict[str, object], reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        merge(make_base(), make_adapters(), contract(**changed))


def test_adapters_that_are_no_bf16_are_refused() -> None:
    adapters = dict(make_adapters())
    name = PREFIX + LAYER + A
    adapters[name] = Tensor("F32", (4, 24), np.zeros(96, "<u4"))
    with pytest.raises(EngineError, match="F32"):
        merge(make_base(), adapters, contract())


def test_shapes_are_known_before_anything_is_allocated() -> None:
    """A layer of 2^80 elements would not fit any memory."""
    found = adapter_shapes(
        {**ADAPTER_SHAPES, "x.q_proj.weight": (2**40, 2**40)}, contract(rank=1024)
    )
    assert found[PREFIX + "x.q_proj" + A] == (1024, 2**40)
    assert found[PREFIX + "x.q_proj" + B] == (2**40, 1024)
    assert len(found) == 6
