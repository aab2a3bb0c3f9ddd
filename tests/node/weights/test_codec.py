"""The codec is lossless on any bits, and hostile bytes end in CodecError before they cost memory."""

import random
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
import weights_cases as cases
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl.crypto.hashing import digest
from primerl.node.weights.blocks import BLOCK, DENSE, RAW, SKIP, SPARSE, decode_block
from primerl.node.weights.codec import apply_delta, decode_full, encode_delta, encode_full
from primerl.node.weights.errors import CodecError
from primerl.node.weights.state import State, Tensor
from primerl.node.weights.streams import MAX_STREAM, StreamReader, StreamWriter, inflate
from primerl.protocol.manifests import TensorInfo

VECTORS = Path(__file__).parents[2] / "vectors"


def full(state: State) -> bytes:
    return b"".join(encode_full(state))


def delta(base: State, new: State) -> bytes:
    return b"".join(encode_delta(base, new))


def small_pair() -> tuple[State, State]:
    """A few tensors that between them use every method of the codec."""
    base = {
        "a.dense": cases.like_a_model(1, 6000),
        "b.sparse": cases.like_a_model(2, 9000),
        "c.skip": cases.bf16(0x8000, 0x7FC1, 0xFFFF),
        "d.raw": cases.tensor("F32", (50,), bytes(200)),
        "e.empty": cases.tensor("F16", (0, 4), b""),
        "f.scalar": cases.tensor("I64", (), bytes(8)),
    }
    noise = random.Random(3).randbytes(200)
    new = base | {
        "a.dense": cases.stepped(base["a.dense"], 4, 0.95),
        "b.sparse": cases.stepped(base["b.sparse"], 5, 0.02),
        "d.raw": cases.tensor("F32", (50,), noise),
        "f.scalar": cases.tensor("I64", (), b"\xff" * 8),
    }
    return base, new


# -- lossless ----------------------------------------------------------------------------------


@given(cases.neighbours())
def test_delta_gives_back_every_bit(pair: tuple[State, State]) -> None:
    base, new = pair
    before = {name: t.data.tobytes() for name, t in base.items()}
    assert cases.same(apply_delta(base, delta(base, new), cases.infos(new)), new)
    assert {name: t.data.tobytes() for name, t in base.items()} == before


@given(st.dictionaries(cases.NAMES, cases.tensors(), max_size=5))
def test_full_gives_back_every_bit(state: State) -> None:
    assert cases.same(decode_full(full(state), cases.infos(state)), state)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.5, 0.7, 1.0])
def test_delta_is_lossless_at_every_density_and_across_blocks(share: float) -> None:
    base = {"w": cases.like_a_model(1, BLOCK + 4321)}
    new = {"w": cases.stepped(base["w"], 2, share)}
    payload = delta(base, new)
    assert cases.same(apply_delta(base, payload, cases.infos(new)), new)
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
    assert cases.same(apply_delta(base, delta(base, new), cases.infos(new)), new)


def test_one_far_change_at_the_end_of_a_block_uses_escapes() -> None:
    base = {"w": cases.bf16(*[0] * 60_000)}
    data = base["w"].data.copy()
    data[[3, 59_999]] = [0xFFFF, 0x7FFF]
    new = {"w": Tensor("BF16", (60_000,), data)}
    payload = delta(base, new)
    assert len(payload) < 80
    assert cases.same(apply_delta(base, payload, cases.infos(new)), new)


def test_unchanged_tensors_are_the_objects_of_the_base() -> None:
    base, new = small_pair()
    result = apply_delta(base, delta(base, new), cases.infos(new))
    assert result["c.skip"] is base["c.skip"]
    assert not np.shares_memory(result["b.sparse"].data, base["b.sparse"].data)


def test_changes_in_the_second_block_only_keep_the_first() -> None:
    base = {"w": cases.like_a_model(1, BLOCK + 100)}
    data = base["w"].data.copy()
    data[BLOCK + 50] ^= 1
    new = {"w": Tensor("BF16", (BLOCK + 100,), data)}
    assert cases.same(apply_delta(base, delta(base, new), cases.infos(new)), new)


# -- bytes -------------------------------------------------------------------------------------


def test_equal_states_give_equal_bytes_in_any_order_and_with_any_threads() -> None:
    base = {"a": cases.like_a_model(1, 2 * BLOCK + 5), "b": cases.like_a_model(2, 100)}
    new = {name: cases.stepped(t, 3, 0.3) for name, t in base.items()}
    backwards = dict(reversed(list(new.items())))
    payload = delta(base, new)
    assert delta(base, backwards) == payload
    assert b"".join(encode_delta(base, new, threads=3)) == payload
    assert cases.same(apply_delta(base, payload, cases.infos(backwards), threads=3), new)
    assert b"".join(encode_full(new, threads=3)) == full(new)


def test_payload_may_arrive_in_pieces_of_any_size() -> None:
    base, new = small_pair()
    payload = delta(base, new)
    for size in (1, 7, 1000):
        pieces = [payload[at : at + size] for at in range(0, len(payload), size)]
        assert cases.same(apply_delta(base, [b"", *pieces, b""], cases.infos(new)), new)


def golden_pair() -> tuple[State, State]:
    """From integer arithmetic alone, so that no library can change it."""
    mixed = (np.arange(12_000, dtype=np.uint64) * 2654435761 >> 13).astype("<u4")
    base = {
        "dense": Tensor("BF16", (60, 50), (mixed[:3000] & 0xFF).astype("<u2") + 0x3C00),
        "sparse": Tensor("BF16", (9000,), (mixed[:9000] & 0x81FF).astype("<u2")),
        "single": Tensor("F32", (1,), mixed[5:6].copy()),
        "same": Tensor("F16", (3,), np.array([0x8000, 0x7E01, 1], "<u2")),
    }
    sparse = base["sparse"].data.copy()
    sparse[:: 37 * 8] += 3
    sparse[4000] = 0x7FC0
    dense = base["dense"].data + (mixed[3000:6000] & 3).astype("<u2")
    new = base | {
        "dense": Tensor("BF16", (60, 50), dense),
        "sparse": Tensor("BF16", (9000,), sparse),
        "single": Tensor("F32", (1,), ~base["single"].data),
    }
    return base, new


def test_golden_bytes_decode_for_ever() -> None:
    base, new = golden_pair()
    info = cases.infos(new)
    assert cases.same(decode_full((VECTORS / "weights_full.bin").read_bytes(), info), new)
    assert cases.same(apply_delta(base, (VECTORS / "weights_delta.bin").read_bytes(), info), new)


@pytest.mark.skipif(zstandard.ZSTD_VERSION != (1, 5, 7), reason="frames differ between versions")
def test_encoder_writes_the_golden_bytes() -> None:
    base, new = golden_pair()
    assert full(new) == (VECTORS / "weights_full.bin").read_bytes()
    assert delta(base, new) == (VECTORS / "weights_delta.bin").read_bytes()


# -- hostile payloads --------------------------------------------------------------------------


def test_every_truncation_and_any_trailing_byte_is_refused() -> None:
    base, new = small_pair()
    info = cases.infos(new)
    whole, payload = full(new), delta(base, new)
    for end in [*range(0, len(payload), 7), len(payload) - 1]:
        with pytest.raises(CodecError):
            apply_delta(base, payload[:end], info)
    for end in [*range(0, len(whole), 97), len(whole) - 1]:
        with pytest.raises(CodecError):
            decode_full([whole[:end]], info)
    for extra in (payload + b"\0", [payload, b"", b"\0"], payload + payload):
        with pytest.raises(CodecError, match="after the end"):
            apply_delta(base, extra, info)


@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_are_refused(noise: bytes, with_header: bool) -> None:
    base, new = small_pair()
    payload = delta(base, new)[:21] + noise if with_header else noise
    with pytest.raises(CodecError):
        apply_delta(base, payload, cases.infos(new))
    with pytest.raises(CodecError):
        decode_full(noise, cases.infos(new))


@settings(max_examples=300)
@given(st.data())
def test_mutated_payloads_decode_to_the_layout_or_are_refused(data: st.DataObject) -> None:
    base, new = small_pair()
    kind = data.draw(st.sampled_from(["full", "delta"]))
    payload = bytearray(full(new) if kind == "full" else delta(base, new))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.integers(0, 255))
    info = cases.infos(new)
    try:
        got = decode_full(payload, info) if kind == "full" else apply_delta(base, payload, info)
    except CodecError:
        return
    assert {n: (t.dtype, t.shape) for n, t in got.items()} == {
        n: (t.dtype, t.shape) for n, t in new.items()
    }


def test_payload_for_other_tensors_is_refused() -> None:
    base, new = small_pair()
    payload = delta(base, new)
    info = list(cases.infos(new))
    other_shape = TensorInfo("a.dense", "BF16", (3000, 2), bytes(32))
    with pytest.raises(CodecError, match="other tensors"):
        decode_full(full(new), info[1:])  # one missing
    with pytest.raises(CodecError, match="other tensors"):
        decode_full(full(new), [*info, TensorInfo("z", "F16", (), bytes(32))])  # one unknown
    with pytest.raises(CodecError, match="other tensors"):
        decode_full(full(new), [other_shape, *info[1:]])
    with pytest.raises(CodecError, match="other tensors"):
        decode_full(payload, info)  # a delta is no full state
    with pytest.raises(CodecError, match="twice"):
        decode_full(full(new), [*info, info[0]])
    with pytest.raises(CodecError, match="held state differs"):
        apply_delta({"x": new["c.skip"]}, payload, info)


@pytest.mark.parametrize("shape", [(-1,), (-2, -3), (2**30, 2**30)])
def test_senseless_manifest_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CodecError, match="out of bounds"):
        decode_full(b"", [TensorInfo("w", "BF16", shape, bytes(32))])
    with pytest.raises(CodecError, match="unknown"):
        decode_full(b"", [TensorInfo("w", "F8_E4M3", (2,), bytes(32))])


def test_states_of_different_layout_have_no_delta() -> None:
    with pytest.raises(CodecError, match="anchor"):
        encode_delta({"w": cases.bf16(1)}, {"w": cases.bf16(1, 2)})


def test_full_state_cannot_refer_to_a_base() -> None:
    state = {"w": cases.bf16(1, 2)}
    for method in (SKIP, SPARSE, DENSE):
        hostile = full(state)[:21] + bytes([method]) + bytes(4)
        with pytest.raises(CodecError):
            decode_full(hostile, cases.infos(state))


def sparse_body(count: int, gaps: list[int], moves: list[int]) -> memoryview:
    writer = StreamWriter()
    writer.uint32(count)
    writer.small(np.array(gaps, "<u4"), 2)
    writer.small(np.array(moves, "<u2"), 2)
    return memoryview(writer.finish())


@pytest.mark.parametrize(
    ("count", "gaps", "moves", "why"),
    [
        (0, [], [], "0 changed"),
        (1001, [0] * 1001, [1] * 1001, "1001 changed"),
        (2**32 - 1, [0], [1], "changed elements"),
        (1, [1000], [1], "changed element 1000"),
        (2, [999, 0], [1, 1], "changed element 1000"),
        (3, [65535, 65535, 65535], [1, 1, 1], "changed element 196607"),
        (2, [0], [1], "zstd"),
    ],
)
def test_positions_outside_the_block_are_refused(
    count: int, gaps: list[int], moves: list[int], why: str
) -> None:
    base = np.zeros(1000, "<u2")
    with pytest.raises(CodecError, match=why):
        decode_block(SPARSE, sparse_body(count, gaps, moves), base, base.copy(), "BF16")


def test_unknown_method_and_garbage_after_a_block_are_refused() -> None:
    base = np.zeros(4, "<u2")
    with pytest.raises(CodecError, match="unknown method 9"):
        decode_block(9, memoryview(b""), base, base.copy(), "BF16")
    with pytest.raises(CodecError, match="after the end of a block"):
        decode_block(RAW, memoryview(bytes(9)), base, base.copy(), "BF16")


# -- bombs -------------------------------------------------------------------------------------


def bomb(size: int, *, announced: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=announced).compress(bytes(size))


def relabelled(frame: bytes, size: int) -> bytes:
    """A frame of more than 64 KiB and one window descriptor that now announces `size`."""
    assert zstandard.get_frame_parameters(frame).content_size > 65_791
    return frame[:6] + size.to_bytes(4, "little") + frame[10:]


def peak_of_refusal(payload: bytes, info: list[TensorInfo]) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            decode_full(payload, info)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_bombs_are_refused_before_they_unfold() -> None:
    state = {"w": cases.tensor("U8", (100_000,), bytes(100_000))}
    head = full(state)[:21]
    huge = bomb(1 << 28)
    for frame in (huge, bomb(1 << 28, announced=False), relabelled(huge, 100_000)):
        assert len(frame) < 100_000
        stream = len(frame).to_bytes(4, "little") + frame
        block = bytes([RAW]) + len(stream).to_bytes(4, "little") + stream
        assert peak_of_refusal(head + block, list(cases.infos(state))) < 1_000_000


def test_frames_that_lie_about_themselves_are_refused() -> None:
    honest = bomb(5000)
    assert inflate(memoryview(honest), 5000) == bytes(5000)
    wide = bytearray(bomb(100_000_000))
    wide[5] = (27 - 10) << 3  # the window descriptor: 128 MiB
    skippable = bytes.fromhex("502a4d18") + (4).to_bytes(4, "little") + bytes(4)
    lies = [
        (honest, 4999, "announce"),
        (bomb(5000, announced=False), 5000, "announce"),
        (relabelled(bomb(100_000), 70_000), 70_000, "zstd"),
        (relabelled(bomb(100_000), 200_000), 200_000, "zstd"),
        (relabelled(bytes(wide), 5000), 5000, "window"),
        (honest + honest, 5000, "zstd"),
        (honest[:-1], 5000, "zstd"),
        (skippable, 4, "zstd"),
        (b"", 4, "zstd"),
    ]
    for frame, size, why in lies:
        with pytest.raises(CodecError, match=why):
            inflate(memoryview(frame), size)


def test_huge_announced_lengths_allocate_nothing() -> None:
    state = {"w": cases.tensor("U8", (1000,), bytes(1000))}
    head, info = full(state)[:21], list(cases.infos(state))
    block = head + bytes([RAW])
    assert peak_of_refusal(block + b"\xff" * 4, info) < 100_000
    assert peak_of_refusal(block + (8).to_bytes(4, "little") + b"\xff" * 8, info) < 100_000


def test_a_manifest_of_a_terabyte_costs_nothing_without_the_bytes() -> None:
    info = [TensorInfo("w", "U8", (1 << 40,), bytes(32))]
    layout = msgspec.msgpack.encode([("w", "U8", (1 << 40,))])
    header = b"PRLW\0" + digest(layout)[:16]
    assert header == full({"w": cases.bf16(1)})[:5] + header[5:]
    all_zeros = bytes([RAW]) + (4).to_bytes(4, "little") + bytes(4)
    assert peak_of_refusal(header + 50 * all_zeros, info) < 100_000


def test_stream_longer_than_its_plane_is_refused() -> None:
    reader = StreamReader((11).to_bytes(4, "little") + bytes(11))
    with pytest.raises(CodecError, match="announces 11"):
        reader.stream(10)
    assert MAX_STREAM == BLOCK
