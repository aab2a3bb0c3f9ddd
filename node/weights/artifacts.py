"""Put encoded states into a store, as chunks that an Artifact names."""

from collections.abc import Iterable, Sequence
from typing import Literal

from ...crypto.hashing import NO_DIGEST, digest
from ...protocol.manifests import Artifact, ChunkRef
from ..storage.chunk_store import Store
from .codec import CODEC
from .payload import LARGEST_CHUNK, Layout, Offsets, cut, ordered

STORED_AT_ONCE = 8
"""Chunks that are written side by side: each waits for the disk several times, which takes most of the time."""


def store_artifact(
    store: Store,
    payload: Iterable[bytes],
    *,
    base_version: int = -1,
    base_state: bytes = NO_DIGEST,
    keep: set[bytes] | None = None,
    layout: Sequence[Layout] = (),
    largest: int = LARGEST_CHUNK,
) -> Artifact:
    """Store an encoded snapshot or, with a base, a delta. Names of chunks are added to `keep` first.

    With the `layout` of its state the artifact says where each tensor begins. Chunks have at most `largest`
    bytes. Raises StorageError.
    """
    offsets = Offsets(layout)
    chunks = store_bytes(
        store, offsets.watch(payload) if layout else payload, keep=keep, largest=largest
    )
    kind: Literal["anchor", "delta"] = "anchor" if base_version < 0 else "delta"
    size = sum(chunk.size for chunk in chunks)
    return Artifact(
        kind, base_version, base_state, CODEC, size, chunks, offsets=offsets.found if layout else ()
    )


def store_bytes(
    store: Store,
    payload: Iterable[bytes],
    *,
    keep: set[bytes] | None = None,
    largest: int = LARGEST_CHUNK,
) -> tuple[ChunkRef, ...]:
    """Store bytes as chunks, some at a time. Names are added to `keep` first. Raises StorageError."""

    def put(piece: bytes) -> ChunkRef:
        if keep is not None:
            keep.add(digest(piece))
        return ChunkRef(store.put(piece), len(piece))

    pieces = ((piece,) for piece in cut(iter(payload), largest))
    return tuple(ordered(put, pieces, STORED_AT_ONCE))
