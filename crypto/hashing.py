"""Content hashes: the name of a blob is the hash of its bytes (BLAKE3-256).

Every derived secret or seed goes through derive(), which separates uses by a context string.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec
from blake3 import blake3

DIGEST_BYTES = 32

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
"""32 bytes of BLAKE3. The annotation makes msgspec refuse any other length."""

NO_DIGEST = bytes(DIGEST_BYTES)
"""Stands where a chain has no predecessor."""


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3-256 of `data`."""
    return blake3(data).digest()


def digest_parts(parts: Iterable[bytes | bytearray | memoryview]) -> bytes:
    """BLAKE3-256 of the concatenation of `parts`, without building it."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def derive(context: str, *parts: bytes) -> bytes:
    """32 bytes bound to `context` and to every part; parts are length-prefixed, so none can bleed."""
    hasher = blake3(derive_key_context=f"primerl {context}")
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def short(name: bytes) -> str:
    """The first ten hex digits of a digest or node id, for people."""
    return name[:5].hex()
