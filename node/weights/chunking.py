"""Cutting a payload into chunks: small ones first, so that even a small delta has parts to swap.

A swarm spreads a version the faster the more parts it has, and a large one should not have millions: so a
chunk is about a 64th of what came before it, between SMALLEST and the configured size.
"""

from collections.abc import Iterator

from ...protocol.version import KIB, MAX_CHUNK

SMALLEST = 128 * KIB
"""Below this the round trip costs more than the bytes."""
PARTS = 64


def cut(payload: Iterator[bytes], largest: int) -> Iterator[bytes]:
    """`payload` again in chunks of at most `largest` bytes, the last one shorter; no empty chunk.

    Equal payloads give equal chunks, however they were split.
    """
    if not 0 < largest <= MAX_CHUNK:
        raise ValueError(f"chunk size {largest} is not in 1..{MAX_CHUNK}")
    held = bytearray()
    total = 0
    for part in payload:
        held += part
        while len(held) >= (size := _size(total, largest)):
            yield bytes(held[:size])
            del held[:size]
            total += size
    if held:
        yield bytes(held)


def _size(total: int, largest: int) -> int:
    """Bytes of the chunk that comes after `total` bytes."""
    return min(largest, max(SMALLEST, total // PARTS))
