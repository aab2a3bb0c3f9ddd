"""The discovery seam: finding peers, and best-effort gossip of small sealed facts.

Nothing here is believed: a fact is a sealed envelope that the receiver verifies itself, and a node
works with discovery switched off. Implementation: libp2p.py; tests use tests/support/memory_network.py.
Suite: tests/conformance/test_discovery.py.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ...crypto.keys import NODE_ID_BYTES, PEER_ID_PREFIX
from .transport import Stream


def peer_id_of(node_id: bytes) -> bytes:
    """Convert a node id to a libp2p peer id, 38 bytes. Raises ValueError for anything else."""
    if len(node_id) != NODE_ID_BYTES:
        raise ValueError(f"a node id has {NODE_ID_BYTES} bytes, not {len(node_id)}")
    return PEER_ID_PREFIX + node_id


def node_id_of(peer_id: bytes) -> bytes:
    """Extract the node id from a libp2p peer id. Raises ValueError unless it holds an Ed25519 key."""
    node_id = peer_id[len(PEER_ID_PREFIX) :]
    if not peer_id.startswith(PEER_ID_PREFIX) or len(node_id) != NODE_ID_BYTES:
        raise ValueError("not the peer id of an Ed25519 key: only such keys name nodes")
    return node_id


T = TypeVar("T")


@dataclass(frozen=True)
class GossipFact:
    """A gossiped fact as it came in: the sealed bytes and which neighbour handed them over."""

    sealed: bytes
    source: bytes
    """NodeId of the neighbour (not of the signer); empty when unknown."""


class StreamCarrier(Protocol):
    """Streams over the connections of discovery: the way to a peer where QUIC does not get through."""

    async def converse(
        self, peer: bytes, addresses: Sequence[str], talk: Callable[[Stream], Awaitable[T]]
    ) -> T:
        """Reach `peer`, open a stream, and return the result of `talk` on it; the stream ends with it.

        `talk` may run in another thread, under another loop: it waits for nothing but the stream. The
        caller holds the deadline.

        Raises:
            Unreachable: no connection, and none of `addresses` (as of Discovery.addresses()) leads to it.
            StreamClosed: it hung up; and whatever `talk` raises.
        """
        ...

    def callers(self) -> AsyncIterator[tuple[bytes, Stream]]:
        """Iterate over (NodeId, stream) of peers that converse with us; ends with close().

        Streams are refused while nothing iterates. The reader aborts every stream in the end.
        """
        ...


class Discovery(StreamCarrier, Protocol):
    """Finds peers of one run and spreads facts among them."""

    def addresses(self) -> tuple[str, ...]:
        """Return our own discovery addresses (multiaddrs with our peer id), for tickets and records."""
        ...

    async def start(self, bootstrap: Sequence[str]) -> None:
        """Listen, then connect to `bootstrap` in the background; unreachable entries are retried."""
        ...

    async def publish(self, sealed: bytes) -> None:
        """Gossip a sealed fact of at most MAX_GOSSIP bytes. Best effort; never blocks for long."""
        ...

    def facts(self) -> AsyncIterator[GossipFact]:
        """Yield facts from others, de-duplicated by content; the queue is bounded and drops the oldest."""
        ...

    def neighbours(self) -> int:
        """Count the open discovery connections."""
        ...

    async def close(self) -> None:
        """Stop within seconds. Never raises."""
        ...
