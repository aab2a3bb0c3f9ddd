"""The rows that `peers` and `status` show, from what a node knows."""

import time
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from ...crypto.hashing import short
from ...protocol.messages import WorkerStats
from ...protocol.reputation import Reputation
from ..ops.control import PeerRow, Status
from ..ops.errors import printable
from ..p2p.peers import Peer, PeerTable
from ..trainer.audits import ValidatorRecord
from ..trainer.loop import TrainerRole
from ..trainer.publisher import Publisher
from ..trainer.scheduler import LeaseScheduler

SILENT_S = 20.0
"""Workers say something every five seconds (roles/inference.py, HEARTBEAT_S)."""


def peer_rows(
    peers: PeerTable,
    *,
    newest: int,
    leases: Mapping[bytes, int],
    stats: Mapping[bytes, WorkerStats],
    reputations: Mapping[bytes, Reputation],
    validators: Mapping[bytes, ValidatorRecord] = MappingProxyType({}),
    own: bytes,
) -> list[PeerRow]:
    """One row per known peer, the connected ones first."""
    rows = [
        _row(
            peer,
            newest,
            leases.get(peer.node, 0),
            stats.get(peer.node),
            reputations.get(peer.node) or Reputation(),
            validators.get(peer.node) or ValidatorRecord(),
        )
        for peer in peers.rows()
        if peer.node != own
    ]
    return sorted(rows, key=lambda row: (row.path == "-", row.role, row.id))


def trainer_rows(
    peers: PeerTable, desk: LeaseScheduler, *, newest: int, own: bytes
) -> list[PeerRow]:
    """The rows of a trainer, which knows what is on lease, and to whom."""
    leases = Counter(held.node for held in desk.book.held.values())
    rows = peer_rows(
        peers,
        newest=newest,
        leases=leases,
        stats={node: worker.stats for node, worker in desk.workers.items()},
        reputations=desk.reputations,
        validators=desk.audits.records(),
        own=own,
    )
    for row in rows:
        node = bytes.fromhex(row.id)
        row.stage = desk.pipelines.place(node)
        worker = desk.workers.get(node)
        if worker is not None:
            row.left, silence = worker.left, desk.silence(node)
            row.silent_s = round(silence, 1) if row.left else _silence(silence)
    return rows


def show_training(
    status: Status, role: TrainerRole, publisher: Publisher, desk: LeaseScheduler
) -> None:
    """Say in `status` how training goes."""
    progress = role.progress
    status.step, status.reward = progress.step, progress.reward
    status.staleness, status.history = progress.staleness, progress.history
    status.version = status.newest_version = publisher.version
    status.leases = len(desk.book.held)
    status.waiting_groups = role.waiting_groups()
    status.accepted, status.rejected = progress.accepted, dict(progress.rejected)
    status.pipelines = desk.pipelines.rows()
    status.warnings = desk.warnings()


def _row(
    peer: Peer,
    newest: int,
    leases: int,
    stats: WorkerStats | None,
    known: Reputation,
    validator: ValidatorRecord,
) -> PeerRow:
    path = peer.path()
    sent, received = peer.traffic()
    version = stats.version if stats else -1
    seen = round(time.time() - peer.last_seen, 1) if peer.last_seen else None
    return PeerRow(
        id=peer.node.hex(),
        short=short(peer.node),
        role=peer.record.role if peer.record else "?",
        path=path.kind if path else "-",
        rtt_ms=round(path.rtt_ms, 1) if path and path.rtt_ms is not None else None,
        bytes_sent=sent,
        bytes_received=received,
        version=version,
        lag=newest - version if version >= 0 else 0,
        leases=leases,
        accepted=known.accepted,
        rejected=sum(known.rejected.values()),
        top_reason=known.top_reason(),
        trust=round(known.trust, 3),
        reliability=round(peer.success, 3),
        last_seen_s=seen,
        software=printable(peer.record.software) if peer.record else "?",
        audited=known.audited,
        suspicion=round(known.suspicion, 3),
        refused=known.refused
        or (validator.disqualified and f"disqualified: {validator.disqualified}"),
        audits=validator.jobs,
        silent_s=0.0 if path else _silence(seen or 0.0),
    )


def _silence(seconds: float) -> float:
    """Seconds, where they are worth a word."""
    return round(seconds, 1) if seconds >= SILENT_S else 0.0


def total_bytes(peers: PeerTable) -> tuple[int, int]:
    """(sent, received) over all peers ever."""
    traffic = [peer.traffic() for peer in peers.rows()]
    return sum(sent for sent, _ in traffic), sum(received for _, received in traffic)
