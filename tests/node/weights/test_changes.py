"""What changed is known on both sides: as a hint to the encoder, and as what a delta says of each block."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import weights_cases as cases

from primerl.node.weights.blocks import BLOCK, RAW
from primerl.node.weights.codec import (
    BlockChanges,
    apply_delta,
    apply_delta_changed,
    encode_changes_stream,
    encode_delta,
    encode_full,
    read_changes,
)
from primerl.node.weights.errors import CodecError
from primerl.node.weights.moves import Changes
from primerl.node.weights.payload import DELTA, PayloadReader, blocks_of, check_layout
from primerl.node.weights.state import Changed, State, Tensor
from primerl.protocol.manifests import TensorInfo


def delta(base: State, new: State, changed: Changed | None = None, threads: int = 1) -> bytes:
    return b"".join(encode_delta(base, new, changed=changed, threads=threads))


def positions(base: State, new: State) -> dict[str, np.ndarray | None]:
    """Every change, and nothing else."""
    found = {n: np.flatnonzero(base[n].data != new[n].data).astype(np.int64) for n in base}
    return {name: index for name, index in found.items() if index.size}


def model() -> tuple[State, State]:
    """Two blocks and a bit at several densities, and a tensor that stays."""
    base = {
        "dense": cases.like_a_model(1, BLOCK + 99),
        "same": cases.like_a_model(2, 500),
        "some": cases.like_a_model(3, 2 * BLOCK + 7),
    }
    moved = base["some"].data.copy()
    moved[[0, 5, BLOCK - 1, BLOCK, 2 * BLOCK + 6]] ^= 3
    new = {
        "dense": cases.stepped(base["dense"], 4, 0.9),
        "same": base["same"],
        "some": Tensor("BF16", base["some"].shape, moved),
    }
    return base, new


# -- the hint ----------------------------------------------------------------------------------


@settings(max_examples=50)
@given(cases.neighbours(), st.data())
def test_hint_leaves_the_bytes_as_they_are(pair: tuple[State, State], data: st.DataObject) -> None:
    base, new = pair
    hint = positions(base, new)
    for name, index in list(hint.items()):
        assert index is not None
        more = data.draw(st.lists(st.integers(0, base[name].data.size - 1), max_size=4))
        hint[name] = data.draw(st.sampled_from([None, np.union1d(index, np.array(more, np.int64))]))
    assert delta(base, new, hint) == delta(base, new)


def test_hint_is_cut_at_the_blocks() -> None:
    base, new = model()
    assert delta(base, new, positions(base, new), threads=2) == delta(base, new)


def test_only_hinted_positions_are_compared() -> None:
    """So that a caller sees what a hint that misses a change costs."""
    base, new = model()
    assert delta(base, new, {}) == delta(base, base)


# -- what the receiver learns ------------------------------------------------------------------


@settings(max_examples=50)
@given(cases.neighbours())
def test_receiver_learns_a_superset_of_what_changed(pair: tuple[State, State]) -> None:
    base, new = pair
    state, changed = apply_delta_changed(base, delta(base, new), cases.infos(new))
    assert cases.same(state, new)
    for name, index in positions(base, new).items():
        told = changed[name]
        assert index is not None
        assert told is None or set(index) <= set(told)
    assert all(state[name] is base[name] for name in base.keys() - changed.keys())


@pytest.mark.parametrize("threads", [1, 3])
def test_few_changes_are_told_exactly_and_many_as_all(threads: int) -> None:
    base, new = model()
    payload = delta(base, new)
    _, changed = apply_delta_changed(base, payload, cases.infos(new), threads=threads)
    assert sorted(changed) == ["dense", "some"]
    assert changed["dense"] is None
    told = changed["some"]
    assert told is not None
    assert told.dtype == np.int64
    assert told.tolist() == [0, 5, BLOCK - 1, BLOCK, 2 * BLOCK + 6]


# -- deltas without a state --------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_changes_of_a_delta_make_the_same_delta_again(threads: int) -> None:
    base, new = model()
    payload, info = delta(base, new), cases.infos(new)
    blocks = read_changes(payload, info, threads=threads)
    assert b"".join(encode_changes_stream(info, blocks, threads=threads)) == payload


def raw_blocks(payload: bytes, info: Sequence[TensorInfo]) -> int:
    """How many blocks of a delta are raw."""
    layout = check_layout(info)
    reader = PayloadReader(payload)
    reader.header(DELTA, layout)
    parts = [(part, dtype) for _, dtype, shape in layout for part in blocks_of(shape)]
    return sum(reader.block(part, dtype)[0] == RAW for part, dtype in parts)


@settings(max_examples=50)
@given(cases.neighbours())
def test_changes_give_back_every_bit_unless_a_block_is_raw(pair: tuple[State, State]) -> None:
    base, new = pair
    info = cases.infos(new)
    payload = delta(base, new)
    if raw_blocks(payload, info):
        with pytest.raises(CodecError, match="does not say what changed"):
            list(read_changes(payload, info))
        return
    blocks = read_changes(payload, info)
    again = b"".join(encode_changes_stream(info, blocks))
    assert cases.same(apply_delta(base, again, info), new)


def test_blocks_come_by_name_and_with_their_place() -> None:
    base, new = model()
    blocks = list(read_changes(delta(base, new), cases.infos(new)))
    assert [(b.name, b.part.start, b.part.stop) for b in blocks] == [
        ("dense", 0, BLOCK),
        ("dense", BLOCK, BLOCK + 99),
        ("same", 0, 500),
        ("some", 0, BLOCK),
        ("some", BLOCK, 2 * BLOCK),
        ("some", 2 * BLOCK, 2 * BLOCK + 7),
    ]
    assert [b.changes.index.size for b in blocks[2:]] == [0, 3, 1, 1]


def test_anchor_and_raw_block_do_not_say_what_changed() -> None:
    base = {"w": cases.like_a_model(1, 3000)}
    info = cases.infos(base)
    with pytest.raises(CodecError, match="another format or kind"):
        list(read_changes(b"".join(encode_full(base)), info))
    noise = np.random.default_rng(5).integers(0, 1 << 16, 3000).astype("<u2")
    payload = delta(base, {"w": Tensor("BF16", (3000,), np.minimum(noise, 3).astype("<u2"))})
    with pytest.raises(CodecError, match="w: method 3 does not say"):
        list(read_changes(payload, info))


def test_every_truncation_and_any_trailing_byte_is_refused() -> None:
    base = {"a": cases.like_a_model(1, 900), "b": cases.like_a_model(2, 50)}
    new = {name: cases.stepped(tensor, 3, 0.2) for name, tensor in base.items()}
    payload, info = delta(base, new), cases.infos(new)
    for end in range(0, len(payload), 3):
        with pytest.raises(CodecError):
            list(read_changes(payload[:end], info))
    with pytest.raises(CodecError, match="after the end"):
        list(read_changes(payload + b"\0", info))


def test_changes_of_other_blocks_are_refused() -> None:
    base, new = model()
    info = cases.infos(new)
    blocks = list(read_changes(delta(base, new), info))
    nothing = Changes(np.empty(0, np.int64), np.empty(0, "<u2"))
    for wrong in (
        blocks[1:],
        blocks[:-1],
        [*blocks, BlockChanges("z", "F16", slice(0, 1), nothing)],
    ):
        with pytest.raises(CodecError):
            b"".join(encode_changes_stream(info, wrong))
