"""Measure the round trip to a peer by a request that every node answers.

The request asks for heads newer than any, whose reply is empty, over the connection that is there, else over a
new one. It changes nothing at the peer.
"""

import asyncio
import time
from collections.abc import Iterable

from ...crypto.hashing import short
from ...protocol.errors import RemoteProtocolError
from ...protocol.messages import GetHeads, Heads
from ...protocol.version import ALPN_CONTROL, MAX_NAME
from ..errors import UsageError, printable
from ..ops.figures import PingRow
from .peers import Peer
from .rpc import Refused, ask
from .services import NodeServices
from .status_view import shown_name
from .transport import TransportError

NO_HEADS = GetHeads(after=2**53)
MIN_PREFIX = 4
"""Hex digits of an id that name a peer."""
MIN_WAIT_S, MAX_WAIT_S = 0.1, 8.0
"""Limits of the time for one reply; the control socket answers within ten seconds."""


async def ping(services: NodeServices, peer: str, wait_s: float) -> PingRow:
    """Ask the peer with this name, or whose id begins so, once; wait at most `wait_s` seconds.

    Raises UsageError for no such peer.
    """
    if not MIN_WAIT_S <= wait_s <= MAX_WAIT_S:
        raise UsageError(f"a reply is waited for between {MIN_WAIT_S} and {MAX_WAIT_S:.0f} s")
    own = services.key.node_id
    known = find_peer((row for row in services.peers.rows() if row.node != own), peer)
    record = known.record
    row = PingRow(
        known.node.hex(), short(known.node), record.role if record else "?", shown_name(known)
    )
    begun = time.perf_counter()
    try:
        async with asyncio.timeout(wait_s):
            connection = await services.links.get(known.node, ALPN_CONTROL, patience=wait_s)
            asked = time.perf_counter()
            row.connect_ms = 1000 * (asked - begun)
            try:
                await ask(connection, NO_HEADS, Heads, deadline=wait_s)
            except Refused as refusal:  # an answer, too
                row.why = printable(str(refusal), MAX_NAME)
            row.rtt_ms = 1000 * (time.perf_counter() - asked)
        path = connection.path()
        row.path, row.remote, row.path_rtt_ms = path.kind, path.remote, path.rtt_ms
    except TimeoutError:
        row.why = f"no reply in {wait_s:g} s"
    except (TransportError, RemoteProtocolError) as error:
        row.why = printable(str(error), MAX_NAME)
    return row


def find_peer(peers: Iterable[Peer], wanted: str) -> Peer:
    """Return the only peer whose id begins with `wanted`, or that calls itself so. Raises UsageError."""
    begun, peers = wanted.strip().lower(), list(peers)
    matches = [
        peer for peer in peers if len(begun) >= MIN_PREFIX and peer.node.hex().startswith(begun)
    ]
    matches = matches or [peer for peer in peers if wanted and shown_name(peer) == wanted]
    if not matches:
        raise UsageError(
            f"no peer is called {printable(wanted)!r}: give a name, or at least {MIN_PREFIX} digits of an id, "
            "that `primerl-node peers` shows"
        )
    if len(matches) > 1:
        raise UsageError(
            f"{len(matches)} peers are called {printable(wanted)!r}: give more digits of an id"
        )
    return matches[0]
