"""Put encoded states into a store, as chunks that an Artifact names."""

from collections.abc import Iterable
from typing import Literal

from ...crypto.hashing import NO_DIGEST, digest
from ...protocol.manifests import Artifact, ChunkRef
from ..storage.chunk_store import Store
from .codec import CODEC
from .payload import cut


def store_artifact(
    store: Store,
    payload: Iterable[bytes],
    *,
    base_version: int = -1,
    base_state: bytes = NO_DIGEST,
    keep: set[bytes] | None = None,
) -> Artifact:
    """Store an encoded snapshot or, with a base, a delta. Names of chunks are added to `keep` first.

    Raises StorageError.
    """
    chunks = store_bytes(store, payload, keep=keep)
    kind: Literal["anchor", "delta"] = "anchor" if base_version < 0 else "delta"
    size = sum(chunk.size for chunk in chunks)
    return Artifact(kind, base_version, base_state, CODEC, size, chunks)


def store_bytes(
    store: Store, payload: Iterable[bytes], *, keep: set[bytes] | None = None
) -> tuple[ChunkRef, ...]:
    """Store bytes as chunks. Names of chunks are added to `keep` first. Raises StorageError."""
    chunks: list[ChunkRef] = []
    for piece in cut(iter(payload)):
        if keep is not None:
            keep.add(digest(piece))
        chunks.append(ChunkRef(store.put(piece), len(piece)))
    return tuple(chunks)
