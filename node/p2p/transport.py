"""The transport interface: authenticated streams between nodes that are named by their keys.

A connection is made to a NodeId, never to an address: addresses are hints. The side that opens closes. Every
method may be cancelled; after a cancelled read or write only abort() may be called on the stream.
Implementation: iroh.py (QUIC); tests use tests/support/memory_network.py (one process). Suite:
tests/conformance/test_transport.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


class TransportError(Exception):
    """A transport could not perform a call. Base class of the three below."""


class Unreachable(TransportError):
    """No address led to that node in time, or it refused the ALPN."""


class StreamClosed(TransportError):
    """The stream ended before all requested bytes came, or was reset by the peer."""


class ConnectionLost(TransportError):
    """The connection is lost, with all its streams."""


class AddressInUse(TransportError):
    """The bind address is taken by another program."""


@dataclass(frozen=True)
class PathInfo:
    """The present path of a connection."""

    kind: Literal["direct", "relayed", "memory"]
    rtt_ms: float | None
    bytes_sent: int
    bytes_received: int
    remote: str = ""
    """IP address of the peer; empty where it is not known, over a relay for example."""
    port: int = 0
    """UDP port of the peer at that address; 0 where it is not known."""
    mtu: int = 0
    """Most bytes of a UDP packet that this path was found to carry; 0 where it is not known."""

    @property
    def hint(self) -> str:
        """Address and port of the peer, as in Transport.addresses(); empty where they are not known."""
        host = f"[{self.remote}]" if ":" in self.remote else self.remote
        return f"{host}:{self.port}" if self.remote and self.port else ""


class Stream(Protocol):
    """One bidirectional byte stream."""

    async def read_exact(self, size: int) -> bytes:
        """Read exactly `size` bytes. Raises StreamClosed if the peer finishes or resets before that."""
        ...

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; waits for flow control."""
        ...

    async def finish(self) -> None:
        """End our direction: nothing more will be written. The other direction stays open."""
        ...

    async def abort(self) -> None:
        """Reset both directions. Never raises."""
        ...


class Connection(Protocol):
    """An authenticated connection to one peer under one ALPN."""

    @property
    def peer(self) -> bytes:
        """The NodeId that the handshake proved."""
        ...

    @property
    def alpn(self) -> bytes:
        """The protocol that both sides agreed on."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the connection is known to be gone."""
        ...

    async def open_stream(self) -> Stream:
        """Open a stream; the peer sees it once something is written."""
        ...

    async def accept_stream(self) -> Stream:
        """Accept the next stream that the peer opened. Raises ConnectionLost when there will be none."""
        ...

    def path(self) -> PathInfo:
        """Return the path kind, round-trip time and byte counters of this connection."""
        ...

    async def answers(self, within: float) -> bool:
        """Return whether the peer's transport shows within `seconds` that it still has this connection.

        The peer's program need not take part. Never raises.
        """
        ...

    async def close(self, reason: str = "") -> None:
        """Close the connection and all its streams. Never raises; closing twice is fine."""
        ...


class Transport(Protocol):
    """One node's endpoint."""

    @property
    def node_id(self) -> bytes:
        """Our own NodeId."""
        ...

    def addresses(self) -> tuple[str, ...]:
        """Return addresses for others, as `host:port` hints (or relay URLs)."""
        ...

    async def connect(
        self, peer: bytes, addresses: Sequence[str], alpn: bytes, *, deadline: float
    ) -> Connection:
        """Connect to `peer` within `deadline` seconds. Raises Unreachable."""
        ...

    async def accept(self) -> Connection:
        """Accept the next incoming connection, handshake done. Raises ConnectionLost once closed."""
        ...

    def prefer(self, connection: Connection) -> None:
        """Give this peer priority when it connects again from the same address, however many others come."""
        ...

    async def close(self) -> None:
        """Close everything. Never raises."""
        ...
