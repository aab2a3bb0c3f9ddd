"""Bits to torch and back: nothing may be lost and nothing shared by accident."""

import numpy as np
import pytest
import torch

from primerl.node.errors import EngineError
from primerl.node.models.tensors import bf16_state, from_torch, to_torch
from primerl.node.weights.state import BITS, Tensor, digests


def bits(name: str, count: int) -> Tensor:
    """Every kind of bit pattern, NaNs and negative zeros among them."""
    top = 2 if name == "BOOL" else int(np.iinfo(BITS[name]).max)
    data = np.random.default_rng(0).integers(0, top, count, dtype=BITS[name], endpoint=top > 2)
    return Tensor(name, (count,), data)


@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)])
def test_every_bit_survives_the_round_trip(shape: tuple[int, ...]) -> None:
    for name in BITS:
        tensor = Tensor(name, shape, bits(name, int(np.prod(shape))).data)
        back = from_torch(to_torch(tensor))
        assert (back.dtype, back.shape) == (name, shape)
        assert back.data.tolist() == tensor.data.tolist(), name


def test_signs_of_zero_and_payloads_of_nan_survive() -> None:
    patterns = np.array([0x8000, 0x7FC1, 0xFFFF, 0x7F80, 0x0001], dtype="<u2")
    back = from_torch(to_torch(Tensor("BF16", (5,), patterns)))
    assert back.data.tolist() == patterns.tolist()


def test_writeable_bits_are_shared_and_read_only_bits_are_not() -> None:
    tensor = bits("F32", 8)
    tensor.data[0] = 0
    shared = to_torch(tensor)
    tensor.data[0] = 0x3F800000
    assert float(shared[0]) == 1.0
    tensor.data.flags.writeable = False
    copied = to_torch(tensor)
    copied[0] = 5.0
    assert tensor.data[0] == 0x3F800000


def test_what_comes_from_torch_is_its_own_copy() -> None:
    source = torch.ones(4, 4)
    for view in (source, source.T, source[:, 1], source.bfloat16()):
        assert not np.shares_memory(from_torch(view).data, source.numpy())
    taken = from_torch(source)
    source.zero_()
    assert set(taken.data.tolist()) == {0x3F800000}


def test_a_view_shares_memory_where_nothing_has_to_be_converted() -> None:
    source = torch.arange(16.0).reshape(4, 4)
    assert np.shares_memory(from_torch(source, view=True).data, source.numpy())
    for other in (source.T, source[:, 1]):
        assert not np.shares_memory(from_torch(other, view=True).data, source.numpy())
        assert from_torch(other, view=True).data.tolist() == from_torch(other).data.tolist()
    assert (
        from_torch(source, "BF16", view=True).data.tolist()
        == from_torch(source, "BF16").data.tolist()
    )
    halves = bf16_state([("a", source), ("b", source.bfloat16()), ("c", source.int())], view=True)
    assert digests(halves) == digests(
        bf16_state([("a", source), ("b", source), ("c", source.int())])
    )


def test_views_are_taken_in_their_own_order() -> None:
    source = torch.arange(6).reshape(2, 3)
    assert from_torch(source.T).data.tolist() == [0, 3, 1, 4, 2, 5]


def test_conversion_on_the_way_in() -> None:
    tensor = from_torch(torch.tensor([1.5, -2.0]), "BF16")
    assert to_torch(tensor, "cpu", torch.float32).tolist() == [1.5, -2.0]


def test_a_bf16_state_casts_floats_and_keeps_the_rest() -> None:
    named = {"w": torch.ones(2), "h": torch.ones(2).half(), "n": torch.ones(2).long()}
    state = bf16_state(named.items())
    assert {name: tensor.dtype for name, tensor in state.items()} == {
        "w": "BF16",
        "h": "BF16",
        "n": "I64",
    }


def test_dtypes_that_a_state_cannot_hold_are_refused() -> None:
    with pytest.raises(EngineError, match="convert"):
        from_torch(torch.ones(1, dtype=torch.complex64))
    with pytest.raises(EngineError, match="F5"):
        from_torch(torch.ones(1), "F5")
