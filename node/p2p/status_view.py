"""Show a node's network and its peers to the operator (`status`, `peers`)."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

from ...crypto.hashing import short
from ...protocol.manifests import MAX_NODE_NAME
from ..errors import printable
from ..ops.figures import PeerRow, Status
from .peers import Peer
from .services import NodeServices

T = TypeVar("T")

SILENT_S = 20.0
"""Workers send a request every five seconds (worker/loop.py, HEARTBEAT_S)."""
ROWS_AT_A_TIME = 64
"""Rows that are made before others have the loop: of hundreds of peers they take a tenth of a second."""


def show_network(status: Status, services: NodeServices) -> None:
    """Fill in `status` what every node knows of its run and its discovery."""
    status.run = services.run_id.hex()
    status.neighbours = services.discovery.neighbours() if services.discovery else 0


async def peer_rows(services: NodeServices) -> list[PeerRow]:
    """Make one row per known peer, the connected ones first; only a trainer knows their work."""
    own = services.key.node_id
    rows = [_row(peer) async for peer in in_turns(services.peers.rows()) if peer.node != own]
    return sorted(rows, key=lambda row: (row.path == "-", row.role, row.id))


async def in_turns(rows: Sequence[T]) -> AsyncGenerator[T]:
    """Iterate over rows, and let others have the loop now and then."""
    for number, row in enumerate(rows, 1):
        yield row
        if number % ROWS_AT_A_TIME == 0:
            await asyncio.sleep(0)


def _row(peer: Peer) -> PeerRow:
    path, sent, received = peer.path_and_traffic()
    last_seen_s = round(time.time() - peer.last_seen, 1) if peer.last_seen else None
    return PeerRow(
        id=peer.node.hex(),
        short=short(peer.node),
        role=peer.record.role if peer.record else "?",
        path=path.kind if path else "-",
        rtt_ms=round(path.rtt_ms, 1) if path and path.rtt_ms is not None else None,
        bytes_sent=sent,
        bytes_received=received,
        version=-1,
        lag=0,
        leases=0,
        accepted=0,
        rejected=0,
        top_reason="",
        trust=0.5,
        reliability=round(peer.success, 3),
        last_seen_s=last_seen_s,
        software=printable(peer.record.software) if peer.record else "?",
        silent_s=0.0 if path else shown_silence(last_seen_s or 0.0),
        name=shown_name(peer),
    )


def shown_name(peer: Peer) -> str:
    """Return what a peer calls itself, fit for a terminal; "" for nothing."""
    return printable(peer.record.name, MAX_NODE_NAME).strip() if peer.record else ""


def shown_silence(seconds: float) -> float:
    """Round a silence; 0 if it is too short to show."""
    return round(seconds, 1) if seconds >= SILENT_S else 0.0
