"""Merged deltas: they do exactly what the single ones do, byte for byte what one delta would say."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import weights_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl.node.weights.blocks import BLOCK
from primerl.node.weights.codec import apply_delta, encode_delta, encode_full, read_changes
from primerl.node.weights.errors import CodecError
from primerl.node.weights.merge import MAX_MERGED, combine, merge
from primerl.node.weights.moves import Changes, find
from primerl.node.weights.state import BITS, State, Tensor


def deltas(states: list[State]) -> list[bytes]:
    """The single deltas between neighbours."""
    return [b"".join(encode_delta(a, b)) for a, b in pairwise(states)]


def merged(states: list[State], piece: int = 1 << 20) -> bytes:
    """One delta of all, read in pieces of `piece` bytes."""
    payloads = [
        [payload[at : at + piece] for at in range(0, len(payload), piece)]
        for payload in deltas(states)
    ]
    return b"".join(merge(payloads, cases.infos(states[0])))


def drift(seed: int, elements: int, steps: int, share: float) -> list[State]:
    """Weights that move as an optimizer moves them: a few units in the last place, and back."""
    rng = np.random.default_rng(seed)
    states: list[State] = [{"w": cases.like_a_model(seed, elements)}]
    for _ in range(steps):
        data = states[-1]["w"].data.copy()
        chosen = rng.random(elements) < share
        data[chosen] += rng.choice(np.array([1, 0xFFFF], "<u2"), int(chosen.sum()))
        states.append({"w": Tensor("BF16", (elements,), data)})
    return states


@st.composite
def histories(draw: st.DrawFn) -> list[State]:
    """Up to five states of one layout, each a few elements away from the one before, any bits at all."""
    layout = draw(st.dictionaries(cases.NAMES, st.sampled_from(sorted(BITS)), max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 300))
    states: list[State] = [
        {
            name: cases.tensor(dtype, (count,), rng.bytes(count * BITS[dtype].itemsize))
            for name, dtype in layout.items()
        }
    ]
    for _ in range(draw(st.integers(1, 4))):
        new: dict[str, Tensor] = {}
        for name, held in states[-1].items():
            data = held.data.copy()
            for index in draw(st.lists(st.integers(0, count - 1), max_size=5)):
                bits = 8 * data.itemsize
                data[index] = draw(
                    st.sampled_from([0, 1 << (bits - 1), (1 << bits) - 1, 0x7FC1 % (1 << bits)])
                    | st.integers(0, (1 << bits) - 1)
                )
            new[name] = Tensor(held.dtype, held.shape, data)
        states.append(new)
    return states


@given(histories(), st.integers(1, 50))
def test_a_merged_delta_leads_to_the_last_state_bit_for_bit(
    states: list[State], piece: int
) -> None:
    try:
        payload = merged(states, piece)
    except CodecError as error:
        assert "does not say what changed" in str(error)  # noqa: PT017 - a tiny tensor may be raw
        return
    infos = cases.infos(states[-1])
    assert cases.same(apply_delta(states[0], payload, infos), states[-1])
    direct = deltas([states[0], states[-1]])[0]
    assert payload == direct or is_raw(direct, states[0])


def is_raw(payload: bytes, state: State) -> bool:
    """Whether a delta stores some block raw."""
    try:
        for _ in read_changes(payload, cases.infos(state)):
            pass
    except CodecError:
        return True
    return False


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_every_dtype_merges_over_wraps_nan_and_both_zeros(dtype: str) -> None:
    bits = 8 * BITS[dtype].itemsize
    top = (1 << bits) - 1
    edges = [
        0,
        1,
        top,
        top >> 1,
        1 << (bits - 1),
        (1 << (bits - 1)) | 1,
        0x7FC1 & top,
        0xFF80 & top,
    ]
    rng = np.random.default_rng(5)
    width = BITS[dtype].itemsize
    states: list[State] = [{"w": cases.tensor(dtype, (6000,), rng.bytes(6000 * width))}]
    for step in range(5):
        data = states[-1]["w"].data.copy()
        where = rng.choice(6000, 300, replace=False)
        data[where] = np.array(edges, data.dtype)[(np.arange(300) + step) % len(edges)]
        states.append({"w": Tensor(dtype, (6000,), data)})
    payload = merged(states)
    assert cases.same(apply_delta(states[0], payload, cases.infos(states[0])), states[-1])
    assert payload == deltas([states[0], states[-1]])[0]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.4, 0.9])
def test_a_merged_delta_is_the_delta_of_both_ends_in_bytes(share: float) -> None:
    states = drift(3, BLOCK + 5000, 3, share)
    assert merged(states) == deltas([states[0], states[-1]])[0]


def test_merging_again_gives_what_merging_at_once_gives() -> None:
    states = drift(9, 20_000, 6, 0.03)
    infos = cases.infos(states[0])
    single = deltas(states)
    halves = [b"".join(merge([[p] for p in part], infos)) for part in (single[:3], single[3:])]
    assert b"".join(merge([[half] for half in halves], infos)) == merged(states)


def test_there_and_back_again_is_no_change() -> None:
    there = drift(4, 9000, 1, 0.1)
    assert merged([there[0], there[1], there[0]]) == deltas([there[0], there[0]])[0]


def test_one_delta_merges_to_itself() -> None:
    states = drift(4, 9000, 1, 0.1)
    assert merged(states) == deltas(states)[0]


def test_the_bytes_do_not_depend_on_the_threads() -> None:
    states = drift(6, 3 * BLOCK, 2, 0.02)
    infos = cases.infos(states[0])
    twice = b"".join(merge([[payload] for payload in deltas(states)], infos, threads=3))
    assert twice == merged(states)


def test_eight_steps_in_one_are_smaller_than_eight_steps() -> None:
    states = drift(1, 200_000, 8, 0.018)
    assert len(merged(states)) < 0.9 * sum(map(len, deltas(states)))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 255)), max_size=30), st.integers(1, 4))
def test_combining_is_what_applying_one_after_the_other_is(
    writes: list[tuple[int, int]], count: int
) -> None:
    first = np.arange(10, dtype=np.uint8)
    states = [first]
    for start in range(count):
        data = states[-1].copy()
        for index, value in writes[start::count]:
            data[index] = value
        states.append(data)
    single = [find(a, b, "U8") for a, b in pairwise(states)]
    together, whole = combine(single, 10), find(first, states[-1], "U8")
    assert together.index.tolist() == whole.index.tolist()
    assert together.moves.tolist() == whole.moves.tolist()
    assert together.index.dtype == np.int64


# -- what cannot be merged -----------------------------------------------------------------------


def test_a_raw_block_cannot_be_merged() -> None:
    states = drift(2, 9000, 2, 0.05)
    states.append({"w": Tensor("BF16", (9000,), np.zeros(9000, "<u2"))})
    with pytest.raises(CodecError, match="does not say what changed"):
        merged(states)


SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda payload: payload[:-1],
    "longer": lambda payload: payload + b"x",
    "zeros": lambda payload: bytes(len(payload)),
    "empty": lambda payload: b"",
}


@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_spoilt_delta_ends_in_a_codec_error(kind: str, at: int) -> None:
    states = drift(2, 9000, 3, 0.05)
    payloads = deltas(states)
    payloads[at] = SPOILT[kind](payloads[at])
    with pytest.raises(CodecError):
        b"".join(merge([[payload] for payload in payloads], cases.infos(states[0])))


def test_a_full_state_or_a_delta_of_other_tensors_is_refused() -> None:
    states = drift(2, 9000, 2, 0.05)
    whole = b"".join(encode_full(states[0]))
    other = deltas(drift(2, 9001, 1, 0.05))[0]
    for stranger in (whole, other):
        with pytest.raises(CodecError, match="another format or kind"):
            b"".join(merge([[deltas(states)[0]], [stranger]], cases.infos(states[0])))


@pytest.mark.parametrize("count", [0, MAX_MERGED + 1])
def test_nothing_and_too_many_are_refused_before_anything_is_read(count: int) -> None:
    def unread() -> Iterator[bytes]:
        pytest.fail("it was read")
        yield b""

    with pytest.raises(CodecError, match="give 1 to"):
        merge([unread() for _ in range(count)], ())


@settings(max_examples=30)
@given(st.binary(max_size=200))
def test_any_bytes_end_in_a_codec_error_or_in_a_delta(noise: bytes) -> None:
    states = drift(2, 500, 1, 0.05)
    good = deltas(states)[0]
    try:
        payload = b"".join(merge([[good], [good[:21] + noise]], cases.infos(states[0])))
    except CodecError:
        return
    apply_delta(states[0], payload, cases.infos(states[0]))


def test_changes_of_nothing_come_to_nothing() -> None:
    empty = Changes(np.empty(0, np.int64), np.empty(0, "<u2"))
    assert combine([empty, empty], 10).index.size == 0
