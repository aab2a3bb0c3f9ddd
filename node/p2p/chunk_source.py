"""The seam of other ways to a chunk than iroh: a peer over TCP, an HTTP seed.

A source is never trusted: whoever asks checks size and digest, and a source only promises to stop at the
size that was signed. Implementations: seeds.py, libp2p_chunks.py. Suite: tests/conformance/chunk_source.py.
"""

from typing import Protocol

from ...protocol.manifests import ChunkRef


class ChunkSource(Protocol):
    """Somewhere that may have chunks."""

    @property
    def name(self) -> str:
        """What to call it in tables and logs."""
        ...

    async def get(self, chunk: ChunkRef, *, deadline: float) -> bytes:
        """At most `chunk.size` + 1 bytes that claim to be this chunk, within `deadline` seconds.

        Raises:
            TransportError: it cannot be reached, or is too slow.
            Refused: it says that it has none (NOT_FOUND) or will not give it.
        """
        ...


class PeerPaths(Protocol):
    """Another way to the peers that we know."""

    async def get(self, peer: bytes, chunk: ChunkRef, *, deadline: float) -> bytes:
        """As ChunkSource.get(), from this peer."""
        ...
