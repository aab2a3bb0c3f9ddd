"""Measuring the way to another node: round trip and rate, with a few messages. Both ends.

What is measured is what a line would get: one stream of the same transport.
"""

import time
from dataclasses import dataclass

from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.messages import MAX_PROBE, Probe
from ...protocol.version import ALPN_PIPELINE, MIB
from ..p2p.connections import ConnectionPool
from ..p2p.limits import TokenBuckets
from ..p2p.rpc import ask, send
from ..p2p.transport import Stream

SMALL = 4
"""Empty probes; the quickest of them is the round trip."""
LARGE = 3
"""Full ones: the first open the congestion window, the quickest is the rate."""
LEAST_S = 1e-4
LANE = 1
RATE = 1.0 * MIB
BURST = 16.0 * MIB
"""Bytes that one peer may have us send."""


@dataclass(frozen=True)
class PathQuality:
    """From here to a node."""

    rtt_ms: float
    bytes_per_s: float
    """The lower of both directions."""


async def probe(links: ConnectionPool, peer: bytes, *, deadline: float) -> PathQuality:
    """Measure the way to `peer`; each message has `deadline` seconds. Raises Refused, TransportError."""
    connection = await links.get(peer, ALPN_PIPELINE, lane=LANE)

    async def took(request: Probe) -> float:
        begin = time.monotonic()
        reply = await ask(connection, request, Probe, deadline=deadline)
        if len(reply.payload) != request.answer:
            raise RemoteProtocolError(Reason.MALFORMED, "a probe was answered by another length")
        return max(LEAST_S, time.monotonic() - begin)

    round_trip = min([await took(Probe()) for _ in range(SMALL)])
    up = min([await took(Probe(bytes(MAX_PROBE))) for _ in range(LARGE)])
    down = min([await took(Probe(answer=MAX_PROBE)) for _ in range(LARGE)])
    slower = max(LEAST_S, max(up, down) - round_trip)
    return PathQuality(round_trip * 1e3, MAX_PROBE / slower)


class Answers:
    """Answers probes, so many bytes a peer."""

    def __init__(self, *, limit: int = 1024) -> None:
        self._buckets = TokenBuckets(RATE, BURST, limit)

    async def answer(self, peer: bytes, stream: Stream, request: Probe) -> None:
        """Send what was asked for. Raises RemoteProtocolError(RATE_LIMITED)."""
        size = len(request.payload) + request.answer
        if self._buckets.debt(peer, time.monotonic(), size) > 0:
            raise RemoteProtocolError(Reason.RATE_LIMITED, "too many probes: measure less often")
        await send(stream, Probe(bytes(request.answer)))
        await stream.finish()
