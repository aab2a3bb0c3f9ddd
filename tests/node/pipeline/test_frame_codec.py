"""Frame codec: frames round-trip; oversized or malformed ones are refused by their heads."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ring_cases import SHAPE, fields_of, step

from primerl.node.pipeline import frames
from primerl.protocol.errors import LocalProtocolError, Reason, RemoteProtocolError

LIMITS = frames.FrameLimits.of(SHAPE)


def read(data: bytes) -> frames.Frame:
    size = frames.head_size(data[: frames.PREFIX_BYTES])
    head = frames.read_head(data[frames.PREFIX_BYTES : frames.PREFIX_BYTES + size], LIMITS)
    return frames.decode(head, data[frames.PREFIX_BYTES + size :])


def wire(frame: frames.Frame) -> bytes:
    return b"".join(frames.encode(frame, LIMITS))


DTYPES = ["float32", "float16", "uint16", "uint8", "int8", "int32", "int64"]


@given(
    st.sampled_from(list(frames.Kind)),
    st.integers(0, 2**53),
    st.binary(max_size=50),
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=4)), max_size=4
    ),
)
def test_a_frame_comes_back_as_it_was(
    kind: frames.Kind, number: int, text: bytes, shapes: list[tuple[str, list[int]]]
) -> None:
    tensors = tuple(np.ones(shape, dtype) for dtype, shape in shapes if shape)
    frame = frames.Frame(kind, number, 2**53 - number, text, tensors, text[::-1], 5, 6)
    found = read(wire(frame))
    assert fields_of(found) == fields_of(frame)
    assert (found.busy_us, found.waited_us) == (5, 6)


def test_tensors_are_not_copied_on_the_way_out() -> None:
    frame = step(1, 1)
    buffers = frames.encode(frame, LIMITS)
    assert np.shares_memory(np.frombuffer(buffers[-2], np.float32), frame.tensors[0])


@pytest.mark.parametrize("length", range(5))
def test_tensors_are_aligned_whatever_is_before_them(length: int) -> None:
    found = read(wire(step(1, 1, body=bytes(length))))
    assert all(tensor.flags.aligned for tensor in found.tensors)
    assert fields_of(found) == fields_of(step(1, 1, body=bytes(length)))


def test_a_tensor_that_is_not_contiguous_is_encoded_right() -> None:
    tensor = np.arange(12, dtype=np.float32).reshape(3, 4).T
    found = read(wire(frames.Frame(frames.Kind.STEP, 1, 1, b"", (tensor,))))
    assert np.array_equal(found.tensors[0], tensor)


def test_frames_larger_than_the_plan_needs_are_refused_before_they_are_read() -> None:
    too_long = np.zeros((LIMITS.tensors // 4 + 1,), np.float32)
    for frame in (
        frames.Frame(frames.Kind.STEP, 1, 1, bytes(LIMITS.body + 1)),
        frames.Frame(frames.Kind.STEP, 1, 1, trail=bytes(LIMITS.trail + 1)),
        frames.Frame(frames.Kind.STEP, 1, 1, tensors=(too_long,)),
        frames.Frame(frames.Kind.FAULT, 1, 1, bytes(frames.MAX_WORDS + 1)),
    ):
        with pytest.raises(LocalProtocolError, match="at most"):
            frames.encode(frame, LIMITS)
        wide = frames.FrameLimits(1 << 30, 1 << 30, 1 << 30)
        if frame.kind is frames.Kind.STEP:
            raw = bytes(frames.encode(frame, wide)[0])[frames.PREFIX_BYTES :]
            with pytest.raises(RemoteProtocolError) as caught:
                frames.read_head(raw, LIMITS)
            assert caught.value.reason is Reason.TOO_LARGE


def test_the_largest_micro_batch_of_a_plan_goes_through() -> None:
    states = np.zeros((SHAPE.max_step_tokens, SHAPE.hidden_size), np.float32)
    scales = np.zeros(SHAPE.max_step_tokens, np.float32)
    frame = frames.Frame(frames.Kind.STEP, 1, 1, b"", (states, states, scales, scales))
    assert fields_of(read(wire(frame))) == fields_of(frame)


def test_a_head_of_any_length_is_no_head() -> None:
    assert frames.head_size(frames.BEAT) == 0
    for size in (frames.MAX_HEAD + 1, 2**32 - 1):
        with pytest.raises(RemoteProtocolError) as caught:
            frames.head_size(size.to_bytes(frames.PREFIX_BYTES, "big"))
        assert caught.value.reason is Reason.TOO_LARGE


HEADS = {
    "noise": b"\xc1\xc1",
    "nothing": b"",
    "another kind": msgspec.msgpack.encode(["pickle", 1, 1, 0, 0]),
    "too short": msgspec.msgpack.encode(["step", 1]),
    "negative sizes": msgspec.msgpack.encode(["step", 1, 1, -5, 0]),
    "another type of numbers": msgspec.msgpack.encode(["step", 1, 1, 0, 0, [["object", [1]]]]),
    "a negative length": msgspec.msgpack.encode(["step", 1, 1, 0, 0, [["int8", [-1, -1]]]]),
    "many dimensions": msgspec.msgpack.encode(["step", 1, 1, 0, 0, [["int8", [1] * 5]]]),
    "many tensors": msgspec.msgpack.encode(["step", 1, 1, 0, 0, [["int8", [0]]] * 9]),
    "more than a head": msgspec.msgpack.encode(["step", 1, 1, 0, 0, [], 0, 0, 0]),
    "a product that wraps": msgspec.msgpack.encode(["step", 1, 1, 0, 0, [["int64", [2**31] * 4]]]),
}


@pytest.mark.parametrize("name", HEADS)
def test_malformed_frame_heads_are_refused(name: str) -> None:
    with pytest.raises(RemoteProtocolError):
        frames.read_head(HEADS[name], LIMITS)


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_happens(data: bytes) -> None:
    try:
        frames.read_head(data, LIMITS)
    except RemoteProtocolError:
        pass


def test_contents_of_another_length_are_refused() -> None:
    head = frames.read_head(
        bytes(frames.encode(step(1, 1), LIMITS)[0])[frames.PREFIX_BYTES :], LIMITS
    )
    with pytest.raises(RemoteProtocolError):
        frames.decode(head, bytes(head.size + 1))


def test_tensors_of_a_type_that_does_not_travel_are_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError, match="float64"):
        frames.encode(frames.Frame(frames.Kind.STEP, 1, 1, tensors=(np.zeros(2),)), LIMITS)


def test_the_words_of_a_fault_are_one_printable_line() -> None:
    assert frames.words_of(b"it\nfell\x1b[31m \xff") == "it fell [31m \ufffd"
