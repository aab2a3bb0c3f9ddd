"""The codec is lossless on any bits, and equal states give equal bytes."""

from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from support import weights_cases as cases

from primerl.node.weights.blocks import BLOCK
from primerl.node.weights.codec import LARGE, decode_full, encode_delta, encode_full
from primerl.node.weights.state import State, Tensor

VECTORS = Path(__file__).parents[2] / "vectors"


def full(state: State) -> bytes:
    return b"".join(encode_full(state))


def delta(base: State, new: State) -> bytes:
    return b"".join(encode_delta(base, new))


# -- lossless ----------------------------------------------------------------------------------


@given(cases.neighbours())
def test_delta_gives_back_every_bit(pair: tuple[State, State]) -> None:
    base, new = pair
    before = {name: t.data.tobytes() for name, t in base.items()}
    assert cases.same(cases.applied(base, delta(base, new), cases.infos(new)), new)
    assert {name: t.data.tobytes() for name, t in base.items()} == before


@given(st.dictionaries(cases.NAMES, cases.tensors(), max_size=5))
def test_full_gives_back_every_bit(state: State) -> None:
    assert cases.same(decode_full(full(state), cases.infos(state)), state)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.5, 0.7, 1.0])
def test_delta_is_lossless_at_every_density_and_across_blocks(share: float) -> None:
    base = {"w": cases.like_a_model(1, BLOCK + 4321)}
    new = {"w": cases.stepped(base["w"], 2, share)}
    payload = delta(base, new)
    assert cases.same(cases.applied(base, payload, cases.infos(new)), new)
    assert len(payload) < len(full(new))


@pytest.mark.parametrize("dtype", ["F32", "F64", "I32", "U8"])
@pytest.mark.parametrize("every", [1, 2, 1000])
def test_wide_elements_survive_in_every_method(dtype: str, every: int) -> None:
    bits = cases.BITS[dtype]
    rng = np.random.default_rng(7)
    data = np.frombuffer(rng.bytes(20_000 * bits.itemsize), bits).copy()
    moved = data.copy()
    moved[::every] += np.array(3, bits)
    base = {"w": Tensor(dtype, (20_000,), data)}
    new = {"w": Tensor(dtype, (20_000,), moved)}
    assert cases.same(cases.applied(base, delta(base, new), cases.infos(new)), new)


def test_one_far_change_at_the_end_of_a_block_uses_escapes() -> None:
    base = {"w": cases.bf16(*[0] * 60_000)}
    data = base["w"].data.copy()
    data[[3, 59_999]] = [0xFFFF, 0x7FFF]
    new = {"w": Tensor("BF16", (60_000,), data)}
    payload = delta(base, new)
    assert len(payload) < 80
    assert cases.same(cases.applied(base, payload, cases.infos(new)), new)


def test_unchanged_tensors_are_the_objects_of_the_base() -> None:
    base, new = cases.small_pair()
    result = cases.applied(base, delta(base, new), cases.infos(new))
    assert result["c.skip"] is base["c.skip"]
    assert not np.shares_memory(result["b.sparse"].data, base["b.sparse"].data)


def test_changes_in_the_second_block_only_keep_the_first() -> None:
    base = {"w": cases.like_a_model(1, BLOCK + 100)}
    data = base["w"].data.copy()
    data[BLOCK + 50] ^= 1
    new = {"w": Tensor("BF16", (BLOCK + 100,), data)}
    assert cases.same(cases.applied(base, delta(base, new), cases.infos(new)), new)


# -- bytes -------------------------------------------------------------------------------------


def test_equal_states_give_equal_bytes_in_any_order_and_with_any_threads() -> None:
    base = {"a": cases.like_a_model(1, 2 * BLOCK + 5), "b": cases.like_a_model(2, 100)}
    new = {name: cases.stepped(t, 3, 0.3) for name, t in base.items()}
    backwards = dict(reversed(list(new.items())))
    payload = delta(base, new)
    assert delta(base, backwards) == payload
    assert b"".join(encode_delta(base, new, threads=3)) == payload
    assert cases.same(cases.applied(base, payload, cases.infos(backwards), threads=3), new)
    assert b"".join(encode_full(new, threads=3)) == full(new)


def test_payload_may_arrive_in_pieces_of_any_size() -> None:
    base, new = cases.small_pair()
    payload = delta(base, new)
    for size in (1, 7, 1000):
        pieces = [payload[at : at + size] for at in range(0, len(payload), size)]
        assert cases.same(cases.applied(base, [b"", *pieces, b""], cases.infos(new)), new)


def test_golden_bytes_decode_for_ever() -> None:
    base, new = cases.golden_pair()
    info = cases.infos(new)
    assert cases.same(decode_full((VECTORS / "weights_full.bin").read_bytes(), info), new)
    assert cases.same(cases.applied(base, (VECTORS / "weights_delta.bin").read_bytes(), info), new)


@pytest.mark.skipif(zstandard.ZSTD_VERSION != (1, 5, 7), reason="frames differ between versions")
def test_encoder_writes_the_golden_bytes() -> None:
    base, new = cases.golden_pair()
    assert full(new) == (VECTORS / "weights_full.bin").read_bytes()
    assert delta(base, new) == (VECTORS / "weights_delta.bin").read_bytes()


def test_memory_of_a_large_tensor_is_used_again_only_once_no_view_of_it_is_left() -> None:
    first, second = ({"w": cases.like_a_model(seed, LARGE // 2 + 4321)} for seed in (1, 2))
    payloads, infos = [full(first), full(second)], cases.infos(first)

    def decoded(number: int) -> tuple[Tensor, int]:
        tensor = decode_full(payloads[number], infos)["w"]
        return tensor, tensor.data.ctypes.data

    tensor, place = decoded(0)
    view = tensor.data[1000:2000].view(np.uint8)[1:]
    expected = view.tobytes()
    del tensor
    other, elsewhere = decoded(1)
    assert elsewhere != place
    assert view.tobytes() == expected
    del view
    again, there = decoded(1)
    assert there == place
    assert cases.same({"w": again}, second)
    assert cases.same({"w": other}, second)
