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
from primerl.node.weights.state import Changed, State, Tensor
from primerl.node.weights.state_history import Edit, StepChanges, join_edits

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


def mixed_step() -> tuple[State, State]:
    """Tensors of several blocks, small ones, every density and method, and two dtypes in turns."""
    rng = np.random.default_rng(5)
    noise = [Tensor("F32", (6000,), rng.integers(0, 2**32, 6000, dtype="<u4")) for _ in range(2)]
    base = {
        "as it was": cases.like_a_model(9, 5000),
        "dense": cases.like_a_model(1, 9000),
        "empty": cases.tensor("BF16", (0,), b""),
        "long": cases.like_a_model(2, 2 * BLOCK + 100),
        "noise": noise[0],
        "small": cases.like_a_model(4, 64),
        "sparse": cases.like_a_model(3, 5000),
        "steps": cases.tensor("I64", (), bytes(8)),
    }
    shares = {"dense": 0.9, "long": 0.02, "small": 0.5, "sparse": 0.01}
    new = {name: cases.stepped(base[name], 6, share) for name, share in shares.items()}
    count = cases.tensor("I64", (), b"\x01" + bytes(7))
    return base, {**base, **new, "noise": noise[1], "steps": count}


def test_known_places_and_bits_give_the_bytes_of_a_comparison() -> None:
    base, new = mixed_step()
    plain = b"".join(encode_delta(base, new))
    places = {name: np.flatnonzero(t.data != new[name].data) for name, t in base.items()}
    exact: Changed = {name: index for name, index in places.items() if index.size}
    more: Changed = {**exact, "long": np.arange(base["long"].data.size), "small": None}
    every: Changed = {name: np.arange(tensor.data.size) for name, tensor in base.items()}
    for changed in (exact, more, every):
        assert b"".join(encode_delta(base, new, changed=changed, threads=2)) == plain
    edits = {
        name: Edit(index, base[name].data[index], new[name].data[index])
        for name, index in places.items()
        if index.size and base[name].dtype == "BF16"
    }
    before, after = (
        {name: tensor for name, tensor in state.items() if tensor.dtype == "BF16"}
        for state in (base, new)
    )
    known = StepChanges(join_edits("BF16", edits))
    assert b"".join(encode_delta(before, after, changed=known)) == b"".join(
        encode_delta(before, after)
    )


def test_a_tensor_is_coded_as_if_it_were_alone() -> None:
    base, new = mixed_step()
    alone = [
        part
        for name in sorted(base)
        for part in [*encode_delta({name: base[name]}, {name: new[name]})][1:]
    ]
    assert [*encode_delta(base, new)][1:] == alone


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
