import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl.crypto.hashing import (
    DIGEST_BYTES,
    NO_DIGEST,
    Digest,
    derive,
    digest,
    digest_parts,
    short,
)

PARTS = st.lists(st.binary(max_size=12), max_size=4)


def test_a_digest_is_blake3() -> None:
    # The published test vectors of BLAKE3 for the empty input and for the one byte 0.
    assert digest(b"").hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert digest(b"\0").hex() == "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"


@given(PARTS)
def test_a_digest_of_parts_is_the_digest_of_them_joined(parts: list[bytes]) -> None:
    assert digest_parts(parts) == digest(b"".join(parts))
    assert digest_parts(memoryview(part) for part in parts) == digest(bytearray(b"".join(parts)))


@given(PARTS, PARTS)
def test_derived_bytes_differ_wherever_the_parts_differ(
    left: list[bytes], right: list[bytes]
) -> None:
    # Also where the parts joined are equal: (ab, c) is not (a, bc).
    assert (derive("test", *left) == derive("test", *right)) == (left == right)


@given(st.binary(min_size=1, max_size=30), st.binary(min_size=1, max_size=30))
def test_a_part_cannot_bleed_into_its_neighbour(left: bytes, right: bytes) -> None:
    joined = derive("test", left + right)
    assert derive("test", left, right) != joined
    assert derive("test", left + right, b"") not in (joined, derive("test", b"", left + right))


@given(st.text(max_size=20), st.text(max_size=20), PARTS)
def test_contexts_separate(left: str, right: str, parts: list[bytes]) -> None:
    assert (derive(left, *parts) == derive(right, *parts)) == (left == right)


@given(st.text(max_size=20), PARTS)
def test_derived_bytes_are_nobodys_digest(context: str, parts: list[bytes]) -> None:
    derived = derive(context, *parts)
    assert len(derived) == DIGEST_BYTES
    assert derived not in (digest_parts(parts), NO_DIGEST)


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_a_digest_field_takes_32_bytes_and_no_other_length(size: int) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(NO_DIGEST), type=Digest) == NO_DIGEST
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(bytes(size)), type=Digest)


def test_the_short_form_is_ten_hex_digits() -> None:
    assert short(bytes(range(32))) == "0001020304"
