"""Frame codec: frames round-trip; oversized or malformed ones are refused by their heads."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ring_cases import SHAPE, fields_of, step

from primerl.node.pipeline.frames import (
    BEAT,
    MAX_HEAD,
    MAX_WORDS,
    PREFIX_BYTES,
    Frame,
    FrameLimits,
    Kind,
    decode,
    encode,
    head_size,
    read_head,
    words_of,
)
from primerl.protocol.errors import LocalProtocolError, Reason, RemoteProtocolError

LIMITS = FrameLimits.of(SHAPE)


def read(data: bytes) -> Frame:
    size = head_size(data[:PREFIX_BYTES])
    head = read_head(data[PREFIX_BYTES : PREFIX_BYTES + size], LIMITS)
    return decode(head, data[PREFIX_BYTES + size :])


def wire(frame: Frame) -> bytes:
    return b"".join(encode(frame, LIMITS))


DTYPES = ["float32", "float16", "uint16", "uint8", "int8", "int32", "int64"]


@given(
    st.sampled_from(list(Kind)),
    st.integers(0, 2**53),
    st.binary(max_size=50),
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=4)), max_size=4
    ),
)
def test_a_frame_comes_back_as_it_was(
    kind: Kind, number: int, text: bytes, shapes: list[tuple[str, list[int]]]
) -> None:
    tensors = tuple(np.ones(shape, dtype) for dtype, shape in shapes if shape)
    frame = Frame(kind, number, 2**53 - number, text, tensors, text[::-1], 5, 6)
    found = read(wire(frame))
    assert fields_of(found) == fields_of(frame)
    assert (found.busy_us, found.waited_us) == (5, 6)


def test_tensors_are_not_copied_on_the_way_out() -> None:
    frame = step(1, 1)
    buffers = encode(frame, LIMITS)
    assert np.shares_memory(np.frombuffer(buffers[-2], np.float32), frame.tensors[0])


@pytest.mark.parametrize("length", range(5))
def test_tensors_are_aligned_whatever_is_before_them(length: int) -> None:
    found = read(wire(step(1, 1, body=bytes(length))))
    assert all(tensor.flags.aligned for tensor in found.tensors)
    assert fields_of(found) == fields_of(step(1, 1, body=bytes(length)))


def test_a_tensor_that_is_not_contiguous_is_encoded_right() -> None:
    tensor = np.arange(12, dtype=np.float32).reshape(3, 4).T
    found = read(wire(Frame(Kind.STEP, 1, 1, b"", (tensor,))))
    assert np.array_equal(found.tensors[0], tensor)


def test_frames_larger_than_the_plan_needs_are_refused_before_they_are_read() -> None:
    too_long = np.zeros((LIMITS.tensors // 4 + 1,), np.float32)
    for frame in (
        Frame(Kind.STEP, 1, 1, bytes(LIMITS.body + 1)),
        Frame(Kind.STEP, 1, 1, trail=bytes(LIMITS.trail + 1)),
        Frame(Kind.STEP, 1, 1, tensors=(too_long,)),
        Frame(Kind.FAULT, 1, 1, bytes(MAX_WORDS + 1)),
    ):
        with pytest.raises(LocalProtocolError, match="at most"):
            encode(frame, LIMITS)
        wide = FrameLimits(1 << 30, 1 << 30, 1 << 30)
        if frame.kind is Kind.STEP:
            raw = bytes(encode(frame, wide)[0])[PREFIX_BYTES:]
            with pytest.raises(RemoteProtocolError) as caught:
                read_head(raw, LIMITS)
            assert caught.value.reason is Reason.TOO_LARGE


def test_the_largest_micro_batch_of_a_plan_goes_through() -> None:
    states = np.zeros((SHAPE.max_step_tokens, SHAPE.hidden_size), np.float32)
    scales = np.zeros(SHAPE.max_step_tokens, np.float32)
    frame = Frame(Kind.STEP, 1, 1, b"", (states, states, scales, scales))
    assert fields_of(read(wire(frame))) == fields_of(frame)


def test_a_head_of_any_length_is_no_head() -> None:
    assert head_size(BEAT) == 0
    for size in (MAX_HEAD + 1, 2**32 - 1):
        with pytest.raises(RemoteProtocolError) as caught:
            head_size(size.to_bytes(PREFIX_BYTES, "big"))
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
        read_head(HEADS[name], LIMITS)


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_happens(data: bytes) -> None:
    try:
        read_head(data, LIMITS)
    except RemoteProtocolError:
        pass


def test_contents_of_another_length_are_refused() -> None:
    head = read_head(bytes(encode(step(1, 1), LIMITS)[0])[PREFIX_BYTES:], LIMITS)
    with pytest.raises(RemoteProtocolError):
        decode(head, bytes(head.size + 1))


def test_tensors_of_a_type_that_does_not_travel_are_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError, match="float64"):
        encode(Frame(Kind.STEP, 1, 1, tensors=(np.zeros(2),)), LIMITS)


def test_the_words_of_a_fault_are_one_printable_line() -> None:
    assert words_of(b"it\nfell\x1b[31m \xff") == "it fell [31m \ufffd"
