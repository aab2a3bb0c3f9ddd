"""Hostile payloads end in CodecError, and before they cost memory."""

import tracemalloc

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import weights_cases as cases

from primerl.crypto.hashing import digest
from primerl.node.weights import blocks, sparse, streams
from primerl.node.weights.codec import decode_full, encode_delta, encode_full
from primerl.node.weights.payload import framed
from primerl.node.weights.state import CodecError, State
from primerl.protocol.manifests import TensorInfo

WORD = np.dtype("<u2")
MAGICLESS = zstandard.FORMAT_ZSTD1_MAGICLESS


def full(state: State) -> bytes:
    return b"".join(encode_full(state))


def delta(base: State, new: State) -> bytes:
    return b"".join(encode_delta(base, new))


# -- hostile payloads --------------------------------------------------------------------------


def test_every_truncation_and_any_trailing_byte_is_refused() -> None:
    base, new = cases.small_pair()
    info = cases.infos(new)
    whole, payload = full(new), delta(base, new)
    for end in [*range(0, len(payload), 7), len(payload) - 1]:
        with pytest.raises(CodecError):
            cases.applied(base, payload[:end], info)
    for end in [*range(0, len(whole), 97), len(whole) - 1]:
        with pytest.raises(CodecError):
            decode_full([whole[:end]], info)
    for extra in (payload + b"\0", [payload, b"", b"\0"], payload + payload):
        with pytest.raises(CodecError, match="after the end"):
            cases.applied(base, extra, info)


def test_payload_for_other_tensors_is_refused() -> None:
    base, new = cases.small_pair()
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
        cases.applied({"x": new["c.skip"]}, payload, info)


@pytest.mark.parametrize("shape", [(-1,), (-2, -3), (2**30, 2**30)])
def test_senseless_manifest_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CodecError, match="out of bounds"):
        decode_full(b"", [TensorInfo("w", "BF16", shape, bytes(32))])
    with pytest.raises(CodecError, match="unknown"):
        decode_full(b"", [TensorInfo("w", "F8_E4M3", (2,), bytes(32))])


def test_states_of_different_layout_have_no_delta() -> None:
    with pytest.raises(CodecError, match="snapshot"):
        encode_delta({"w": cases.bf16(1)}, {"w": cases.bf16(1, 2)})


def test_full_state_cannot_refer_to_a_base() -> None:
    state = {"w": cases.bf16(1, 2)}
    for method in (blocks.SKIP, blocks.SPARSE, blocks.DENSE):
        hostile = full(state)[:21] + bytes([method]) + bytes(4)
        with pytest.raises(CodecError):
            decode_full(hostile, cases.infos(state))


class Body:
    """The body of a block, part by part."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def number(self, value: int) -> None:
        self._parts.append(streams.varint(value))

    def bits(self, ones: NDArray[np.bool_]) -> None:
        self._parts.append(np.packbits(ones).tobytes())

    def stream(self, values: NDArray[np.uint8]) -> None:
        self._parts.append(streams.coded_stream(values))

    def positions(self, index: NDArray[np.int64], size: int) -> None:
        self._parts += sparse.code_positions(index, np.array([index.size]), [size])

    def finish(self) -> bytes:
        return b"".join(self._parts)


def refuse_sparse(writer: Body, why: str) -> None:
    """The body in `writer` is refused for a block of 1000 elements."""
    hostile = (memoryview(writer.finish()), slice(0, 1000))
    with pytest.raises(CodecError, match=why):
        sparse.decode_changes([hostile], WORD)
    (body,) = sparse.encode_sparse(sparse.Changes(np.array([2]), np.ones(1, WORD)), [1], [9])
    sound = (memoryview(body), slice(0, 9))
    with pytest.raises(CodecError):
        sparse.decode_changes([sound, hostile, sound], WORD)


def flags(*ones: int, size: int = 0) -> NDArray[np.bool_]:
    found = np.zeros(size or max(ones) + 1, np.bool_)
    found[list(ones)] = True
    return found


def places(count: int, shift: int, low: list[int], ones: NDArray[np.bool_]) -> Body:
    writer = Body()
    writer.number(count)
    writer.number(shift)
    writer.bits(np.array(low, np.bool_))
    writer.number(ones.size)
    if shift:
        writer.bits(ones)
    else:
        writer.stream(np.packbits(ones))
    return writer


def with_small_moves(writer: Body, count: int) -> Body:
    """Append `count` moves of one up."""
    writer.bits(np.zeros(count, np.bool_))
    writer.number(0)
    return writer


@pytest.mark.parametrize(
    ("count", "shift", "low", "ones", "why"),
    [
        (1001, 0, [], flags(0), "1001 or more positions"),
        (2**60, 0, [], flags(0), "or more positions"),
        (1, 21, [0] * 21, flags(0), "low bits of a gap"),
        (1, 0, [], flags(0, size=1002), "1002 or more bits of"),
        (1, 0, [], flags(1000), "position 1000 in"),
        (2, 0, [], flags(3), "2 positions announced, 1 found"),
        (1, 0, [], flags(3, 4), "1 positions announced, 2 found"),
        (2, 9, [1] * 18, flags(0, 1), "position 1023 in"),
        (1, 10, [1] * 10, flags(0), "position 1023 in"),
        (2, 20, [1] * 40, flags(0, 1), "position 2097151 in"),
    ],
)
def test_positions_outside_the_block_are_refused(
    count: int, shift: int, low: list[int], ones: NDArray[np.bool_], why: str
) -> None:
    refuse_sparse(with_small_moves(places(count, shift, low, ones), min(count, 9)), why)


def test_sparse_block_must_change_something() -> None:
    writer = Body()
    writer.number(0)
    refuse_sparse(writer, "without a change")
    nowhere = places(2, 0, [], flags(7, 8))  # 1 << 15 of magnitude wraps to no move at all
    nowhere.bits(np.zeros(2, np.bool_))
    nowhere.positions(np.arange(2), 2)
    more = np.ones(2 * 15, np.bool_)
    more[-2:] = False
    nowhere.number(more.size)
    nowhere.bits(more)
    nowhere.bits(np.zeros(more.size, np.bool_))
    refuse_sparse(nowhere, "does not move")


def far_moves(count: int, levels: list[NDArray[np.bool_]], low: int) -> Body:
    """Of `count` moves all are above 2, with these levels of bits that say whether there are more."""
    writer = places(count, 0, [], flags(*range(count)))
    writer.bits(np.zeros(count, np.bool_))
    writer.positions(np.arange(count), count)
    more = np.concatenate(levels)
    writer.number(more.size)
    writer.bits(more)
    writer.bits(np.zeros(low, np.bool_))
    return writer


def test_magnitudes_must_end_within_their_width() -> None:
    refuse_sparse(far_moves(9, [flags(0, 1, size=9), flags(1)], 11), "do not end")
    refuse_sparse(far_moves(9, [flags(0, 1, size=9), flags(size=3)], 12), "end early")
    refuse_sparse(far_moves(2, [flags(0, 1)] * 16, 32), "do not end")
    refuse_sparse(far_moves(2, [flags(0, 1)] * 17, 34), "34 or more bits of magnitudes")
    refuse_sparse(far_moves(2, [flags(size=2)], 99), "after the end of a block")


def test_the_tensor_is_named_whose_block_among_many_is_bad() -> None:
    base = {name: cases.like_a_model(1, 5000) for name in "abcd"}
    new = {name: cases.stepped(tensor, 2, 0.01) for name, tensor in base.items()}
    payload = list(encode_delta(base, new))
    assert all(part[0] == blocks.SPARSE for part in payload[1:])
    bad = with_small_moves(places(2, 0, [], flags(1)), 2)
    payload[3] = framed(blocks.SPARSE, bad.finish())
    with pytest.raises(CodecError, match=r"^c: 2 positions announced, 1 found"):
        cases.applied(base, payload, cases.infos(new))


def test_unknown_method_and_garbage_after_a_block_are_refused() -> None:
    base = np.zeros(4, "<u2")
    with pytest.raises(CodecError, match="method 9"):
        blocks.decode_block(9, memoryview(b""), base, base.copy(), "BF16")
    with pytest.raises(CodecError, match="after the end of a block"):
        blocks.decode_block(blocks.RAW, memoryview(bytes([1, 1, 9])), base, base.copy(), "BF16")


# -- bombs -------------------------------------------------------------------------------------


def bomb(size: int, *, announced: bool = True) -> bytes:
    """A frame of `size` zeros, as the codec would write it but for `announced`."""
    options = zstandard.ZstdCompressionParameters(
        format=MAGICLESS, window_log=20, write_content_size=announced
    )
    return zstandard.ZstdCompressor(compression_params=options).compress(bytes(size))


def relabelled(frame: bytes, size: int) -> bytes:
    """A frame of more than 1 MiB, so with a window descriptor, that now announces `size`."""
    assert zstandard.get_frame_parameters(frame, format=MAGICLESS).content_size > 1 << 20
    return frame[:2] + size.to_bytes(4, "little") + frame[6:]


def peak_of_refusal(payload: bytes, info: list[TensorInfo]) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            decode_full(payload, info)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def raw_block(stream: bytes) -> bytes:
    return bytes([blocks.RAW]) + streams.varint(len(stream)) + stream


def test_bombs_are_refused_before_they_unfold() -> None:
    state = {"w": cases.tensor("U8", (100_000,), bytes(100_000))}
    head = full(state)[:21]
    huge = bomb(1 << 28)
    for frame in (huge, bomb(1 << 28, announced=False), relabelled(huge, 100_000)):
        assert len(frame) < 100_000
        block = raw_block(streams.varint(len(frame)) + frame)
        assert peak_of_refusal(head + block, list(cases.infos(state))) < 1_500_000


def test_frames_that_lie_about_themselves_are_refused() -> None:
    honest = bomb(5000)
    assert streams.inflate(memoryview(honest), 5000) == bytes(5000)
    long = bomb(2_000_000)
    wide = bytearray(long)
    wide[1] = (27 - 10) << 3  # the window descriptor: 128 MiB
    lies = [
        (honest, 4999, "announce"),
        (bomb(5000, announced=False), 5000, "announce"),
        (relabelled(long, 70_000), 70_000, "zstd"),
        (relabelled(long, 2_100_000), 2_100_000, "zstd"),
        (relabelled(bytes(wide), 5000), 5000, "window"),
        (honest + honest, 5000, "zstd"),
        (honest[:-1], 5000, "zstd"),
        (bytes.fromhex("28b52ffd") + honest, 5000, "zstd"),
        (b"", 4, "zstd"),
    ]
    for frame, size, why in lies:
        with pytest.raises(CodecError, match=why):
            streams.inflate(memoryview(frame), size)


def test_huge_announced_lengths_allocate_nothing() -> None:
    state = {"w": cases.tensor("U8", (1000,), bytes(1000))}
    head, info = full(state)[:21], list(cases.infos(state))
    for length in (b"\xff" * 4, b"\xff" * 9, streams.varint(1 << 34), streams.varint(3065)):
        assert peak_of_refusal(head + bytes([blocks.RAW]) + length + bytes(9), info) < 100_000
        assert peak_of_refusal(head + raw_block(length + bytes(9)), info) < 100_000


def test_numbers_must_end_and_fit() -> None:
    for value in (0, 1, 127, 128, 300, 1 << 20):
        assert streams.StreamReader(streams.varint(value)).number(1 << 20, "things") == value
    for body in (streams.varint(301), streams.varint(1 << 60), b"\x80" * 9, b"\xff" * 9):
        with pytest.raises(CodecError, match="at most 300"):
            streams.StreamReader(body).number(300, "things")
    with pytest.raises(CodecError, match="ends inside"):
        streams.StreamReader(b"\x80").number(300, "things")


def test_a_manifest_of_a_terabyte_costs_nothing_without_the_bytes() -> None:
    info = [TensorInfo("w", "U8", (1 << 40,), bytes(32))]
    layout = msgspec.msgpack.encode([("w", "U8", (1 << 40,))])
    header = b"PRLW\0" + digest(layout)[:16]
    assert header == full({"w": cases.bf16(1)})[:5] + header[5:]
    assert peak_of_refusal(header + 50 * raw_block(bytes([streams.ZEROS])), info) < 100_000


def test_stream_longer_than_its_plane_is_refused() -> None:
    with pytest.raises(CodecError, match="coded bytes of a stream of 10"):
        streams.StreamReader(streams.varint(11) + bytes(11)).stream(10)
    assert blocks.MAX_STREAM == blocks.BLOCK


@given(
    st.binary(max_size=120),
    st.integers(1, 300),
    st.sampled_from([blocks.SPARSE, blocks.DENSE, blocks.RAW]),
)
def test_any_body_decodes_to_its_block_or_is_refused(body: bytes, size: int, method: int) -> None:
    try:
        out, changed = cases.decoded_block(method, body, np.zeros(size, "<u2"), "BF16")
    except CodecError:
        return
    if method == blocks.SPARSE:
        assert changed is not None
        assert set(np.flatnonzero(out)) <= set(changed)
