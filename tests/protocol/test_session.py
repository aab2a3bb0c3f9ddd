import itertools
import tracemalloc
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import protocol_cases

from primerl.protocol.envelope import Envelope
from primerl.protocol.errors import LocalProtocolError, Reason, RemoteProtocolError
from primerl.protocol.manifests import encode
from primerl.protocol.messages import ControlRequest, Goodbye
from primerl.protocol.session import HEADER_BYTES, decode, frame, payload_size
from primerl.protocol.version import MAX_GOSSIP, MAX_MESSAGE

DOCUMENTS: tuple[msgspec.Struct, ...] = (
    protocol_cases.MANIFEST,
    protocol_cases.POLICY_MANIFEST,
    protocol_cases.TICKET,
    protocol_cases.RECORD,
    protocol_cases.LEASE,
    protocol_cases.head(),
    protocol_cases.SUBMISSION,
    protocol_cases.RECEIPT,
    protocol_cases.VERDICT,
    protocol_cases.PROOF,
    msgspec.msgpack.decode(protocol_cases.SEALED_LEASE, type=Envelope),
)
EXAMPLES: tuple[msgspec.Struct, ...] = (*protocol_cases.MESSAGES, *DOCUMENTS)
"""One of everything that is ever decoded from bytes of a stranger."""
HUGE = [tag + b"\xff\xff\xff\xff" for tag in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")]
"""Headers of an array, a map, bytes, text and an extension that claim 2**32 - 1 entries to come."""


def test_a_frame_is_a_length_and_that_many_bytes() -> None:
    for message in protocol_cases.MESSAGES:
        framed = frame(message)
        size = payload_size(framed[:HEADER_BYTES])
        assert size == len(framed) - HEADER_BYTES
        assert decode(framed[HEADER_BYTES:], type(message)) == message
        assert decode(memoryview(framed)[HEADER_BYTES:], type(message)) == message


@pytest.mark.parametrize("limit", [0, 100, MAX_GOSSIP, MAX_MESSAGE])
def test_a_length_is_refused_above_the_limit_and_only_there(limit: int) -> None:
    assert payload_size(limit.to_bytes(4, "big"), limit) == limit
    for size in (limit + 1, 2**31, 2**32 - 1):
        with protocol_cases.refuses(Reason.TOO_LARGE):
            payload_size(size.to_bytes(4, "big"), limit)


def test_we_never_say_what_a_peer_would_refuse() -> None:
    message = Goodbye("x" * 100)
    size = len(frame(message)) - HEADER_BYTES
    assert frame(message, size)
    with pytest.raises(LocalProtocolError, match="Goodbye"):
        frame(message, size - 1)


def test_a_claimed_length_allocates_nothing() -> None:
    """As the whole document, and as the value of each of its fields."""
    for example in EXAMPLES:
        fields: Any = msgspec.to_builtins(example, builtin_types=(bytes,))
        claims = list(HUGE)
        names = range(len(fields)) if isinstance(fields, list) else fields
        for name, header in itertools.product(names, HUGE):
            changed: Any = list(fields) if isinstance(fields, list) else dict(fields)
            changed[name] = msgspec.Raw(header)
            claims.append(msgspec.msgpack.encode(changed))
        for claim in claims:
            tracemalloc.start()
            with protocol_cases.refuses(Reason.MALFORMED, case=type(example)):
                decode(claim, type(example))
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 2**20 + 4 * len(claim), type(example)


def test_deep_nesting_is_malformed() -> None:
    tags = (b"", b"\x82\xa4type\xa5Hello\xa4role", b"\x81\xa7unknown")
    openers = (b"\x91", b"\x81\xa1a", b"\x81\x91", b"\xdc\x00\x01")
    for tag, opener in itertools.product(tags, openers):
        nested = tag + opener * 100_000
        for kind in (*map(type, EXAMPLES), ControlRequest):
            with protocol_cases.refuses(Reason.MALFORMED, case=kind):
                decode(nested, kind)  # type: ignore[arg-type]


def test_what_is_cut_or_followed_by_more_is_malformed() -> None:
    for message in EXAMPLES:
        said = encode(message)
        step = max(1, len(said) // 400)
        for size in range(0, len(said), step):
            with protocol_cases.refuses(Reason.MALFORMED, case=(type(message), size)):
                decode(said[:size], type(message))
        for more in (b"\0", b"\xc0", said):
            with protocol_cases.refuses(Reason.MALFORMED, case=(type(message), more)):
                decode(said + more, type(message))


def survives(data: bytes, kind: Any) -> None:
    """Decodes, or raises RemoteProtocolError(MALFORMED); anything else fails the test."""
    refused: RemoteProtocolError | None = None
    try:
        decode(data, kind)
    except RemoteProtocolError as error:
        refused = error
    assert refused is None or refused.reason == Reason.MALFORMED
    assert refused is None or len(refused.detail) <= 200


@given(st.sampled_from(EXAMPLES), st.data())
def test_damaged_messages_raise_nothing_else(message: msgspec.Struct, data: st.DataObject) -> None:
    said = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(said) - 1))
        said[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    survives(bytes(said), type(message))


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 99), inner),
    max_leaves=8,
)


@given(st.sampled_from(EXAMPLES), st.data())
def test_any_value_in_any_field_raises_nothing_else(
    message: msgspec.Struct, data: st.DataObject
) -> None:
    fields: Any = msgspec.to_builtins(message, builtin_types=(bytes,))
    keys = list(range(len(fields)) if isinstance(fields, list) else fields)
    if keys:
        fields[data.draw(st.sampled_from(keys))] = data.draw(VALUES)
    survives(msgspec.msgpack.encode(fields), type(message))


@pytest.mark.parametrize("fields", [{"type": "x" * 5000}, {"type": "Goodbye", "x" * 5000: 1}])
def test_a_refusal_does_not_repeat_a_strangers_novel(fields: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(msgspec.msgpack.encode(fields), ControlRequest)  # type: ignore[arg-type]
    assert 50 < len(caught.value.detail) <= 200


def test_text_that_is_no_utf8_is_malformed() -> None:
    said = encode(Goodbye("abcd")).replace(b"abcd", b"ab\xff\xfe")
    with protocol_cases.refuses(Reason.MALFORMED):
        decode(said, Goodbye)


def test_a_stream_is_opened_by_requests_only() -> None:
    requests = get_args(ControlRequest)
    for message in protocol_cases.MESSAGES:
        if isinstance(message, requests):
            assert decode(encode(message), ControlRequest) == message  # type: ignore[arg-type]
        else:
            with protocol_cases.refuses(Reason.MALFORMED):
                decode(encode(message), ControlRequest)  # type: ignore[arg-type]
