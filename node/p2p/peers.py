"""The peer table: identities, addresses, and how reliable each peer has been.

Reliability is about service (it heals by itself); trust is about truth and lives in protocol/reputation.
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import nsmallest

from ...protocol.envelope import read_envelope
from ...protocol.errors import Reason
from ...protocol.manifests import Holding, PeerRecord
from ...protocol.recent import RecentDict
from .limits import network_of
from .transport import Connection, PathInfo

MAX_PEERS = 8192
"""Rows of the table, without connected peers."""
DROPPED = 128
"""Rows dropped at a time from a full table: choosing them takes 5 ms, and anyone can fill it."""
EMA = 0.3
ENOUGH_HOLDERS = 4
"""Peers that are fetching a version count as its sources where fewer than this claim to hold it."""
HEAL = 0.02
"""Every observation moves the success of all peers towards 1 by this much: no peer is excluded for ever."""


class Tier(IntEnum):
    """Tier of a peer by its proofs: lower tiers lose their connections first."""

    STRANGER = 0
    """Has a key only, and keys are free."""
    NEWCOMER = 1
    """Showed a ticket, and has no accepted work yet."""
    MEMBER = 2
    """Has accepted work; on a node that joined, also the trainer and the peers that it named."""


@dataclass
class Peer:
    """One row of the table."""

    node: bytes
    tier: Tier = Tier.STRANGER
    ticket: bytes = b""
    """Name of the ticket that it showed."""
    network: str = ""
    """See network_of(), of its last connection."""
    record: PeerRecord | None = None
    sealed: bytes = b""
    """The sealed record, to pass on to others."""
    retired: bool = False
    """Whether its key was retired: nothing is fetched from it any more."""
    record_until: float = 0.0
    """Unix seconds; the newest record of a node lasts longest."""
    hinted: bool = False
    """Whether a ticket names it: it is never forgotten."""
    addresses: tuple[str, ...] = ()
    connections: list[Connection] = field(default_factory=list[Connection])
    last_seen: float = 0.0
    """Unix seconds."""
    success: float = 1.0
    """EMA of requests that worked."""
    bandwidth: float = 0.0
    """EMA of bytes per second of chunks we fetched from it; 0 before the first."""
    sent: int = 0
    received: int = 0
    """Bytes over closed connections; traffic() adds the others."""
    blamed: Counter[Reason] = field(default_factory=Counter[Reason])
    holding: tuple[int, int, bool] | None = None
    """(epoch, version, complete), as it last announced; see PeerTable.holds()."""
    holding_until: float = 0.0
    """Unix seconds."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection: its path takes iroh several times as long."""
        return any(not connection.closed for connection in self.connections)

    def traffic(self) -> tuple[int, int]:
        """Return bytes (sent, received) over all connections ever, also those whose end went unnoticed."""
        return self.path_and_traffic()[1:]

    def path_and_traffic(self) -> tuple[PathInfo | None, int, int]:
        """Return the present connection, with the bytes over all ever, and traffic().

        Each connection is looked at once: that takes iroh 0.1 ms.
        """
        paths = [(connection.path(), connection.closed) for connection in self.connections]
        sent = self.sent + sum(info.bytes_sent for info, _ in paths)
        received = self.received + sum(info.bytes_received for info, _ in paths)
        live = [info for info, closed in paths if not closed]
        if not live:
            return None, sent, received
        # of several connections with a peer, iroh knows the round trip of one
        best = min(
            live, key=lambda info: (info.kind == "relayed", info.rtt_ms is None, info.rtt_ms or 0.0)
        )
        return PathInfo(best.kind, best.rtt_ms, sent, received), sent, received


class PeerTable:
    """Keep all known peers. What is done for each chunk does not take longer the more of them there are."""

    def __init__(self) -> None:
        self._peers: dict[bytes, Peer] = {}
        self._holding: dict[bytes, Peer] = {}
        """Those that announced what they hold."""
        self._served: dict[bytes, Peer] = {}
        """Those whose bandwidth is known."""
        self._failing: dict[bytes, Peer] = {}
        """Those whose success is below 1."""
        self._sent = self._received = 0
        """Bytes of rows that were dropped."""

    def get(self, node: bytes) -> Peer:
        """Return the row of `node`, adding it if it is new; may then forget rows that are no longer of use."""
        peer = self._peers.get(node)
        if peer is None:
            self._make_room()
            peer = self._peers[node] = Peer(node)
        return peer

    def _make_room(self) -> None:
        """Drop rows, those never seen first: anybody can gossip records of nodes that do not exist."""
        if len(self._peers) < MAX_PEERS:
            return
        idle = [peer for peer in self._peers.values() if not peer.hinted and not peer.connected]
        # sorts stably: of those that were never seen, the oldest go
        for peer in nsmallest(DROPPED, idle, key=lambda peer: (peer.tier, peer.last_seen)):
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        sent, received = peer.traffic()
        self._sent, self._received = self._sent + sent, self._received + received
        for table in (self._peers, self._holding, self._served, self._failing):
            table.pop(peer.node, None)

    def traffic(self) -> tuple[int, int]:
        """Return the bytes (sent, received) over all connections to all peers, also to those dropped since."""
        rows = [peer.traffic() for peer in self._peers.values()]
        return self._sent + sum(sent for sent, _ in rows), self._received + sum(
            got for _, got in rows
        )

    def forget(self, node: bytes) -> None:
        """Drop the row of a peer that is not connected, unless a ticket names it."""
        peer = self._peers.get(node)
        if peer is not None and not peer.hinted and not peer.connected:
            self._drop(peer)

    def with_records(self) -> int:
        """Count the peers whose record we hold."""
        return sum(peer.record is not None for peer in self._peers.values())

    def rows(self) -> list[Peer]:
        """Return a snapshot of all rows."""
        return list(self._peers.values())

    def learn(self, record: PeerRecord, sealed: bytes) -> None:
        """Add a verified peer record; ignore one that is older than ours while ours is valid.

        Anybody may pass on an old record and so lead us to an address that its node has left. An empty `sealed`
        stands for a record that is not passed on and that any other replaces.
        """
        peer = self.get(record.node)
        if peer.retired:
            return
        expires = read_envelope(sealed).expires if sealed else 0.0
        if time.time() < peer.record_until and expires < peer.record_until:
            return
        peer.record, peer.sealed, peer.record_until = record, sealed, expires
        peer.addresses = record.addresses or peer.addresses

    def has_record(self, node: bytes, sealed: bytes, now: float) -> bool:
        """Return whether exactly this record of `node` was learned, and is valid at `now` (Unix seconds)."""
        peer = self._peers.get(node)
        return peer is not None and peer.sealed == sealed != b"" and now < peer.record_until

    def hold(self, holding: Holding, until: float) -> None:
        """Add a verified holding, valid `until` then (Unix seconds, set by the caller).

        Only the newest of a node counts, and none is kept of nodes without a peer record here.
        """
        peer = self._peers.get(holding.node)
        news = (holding.term, holding.version, holding.complete)
        if peer is None or peer.record is None or (peer.holding and news <= peer.holding):
            return
        peer.holding, peer.holding_until = news, until
        self._holding[holding.node] = peer

    def holds(self, node: bytes, now: float) -> tuple[int, int, bool] | None:
        """Return (epoch, version, complete) as `node` announced, if still fresh; `now` in Unix seconds."""
        peer = self._peers.get(node)
        return peer.holding if peer is not None and now < peer.holding_until else None

    def holders(self, epoch: int, version: int, now: float) -> list[bytes]:
        """List peers that claim to hold that version or a later one of its epoch.

        Where these are few, also list peers that are fetching this version: they will soon have parts of it.
        """
        fresh = [
            (node, peer.holding) for node, peer in self._holding.items() if now < peer.holding_until
        ]
        whole = [(node, what) for node, what in fresh if what and what[2]]
        hold = [node for node, what in whole if what[0] == epoch and what[1] >= version]
        if len(hold) >= ENOUGH_HOLDERS:
            return hold
        return hold + [node for node, what in fresh if what == (epoch, version, False)]

    def retire(self, node: bytes) -> None:
        """Forget the addresses of a node whose key was retired; a node without a row has none."""
        if (peer := self._peers.get(node)) is not None and not peer.hinted:
            peer.retired, peer.record, peer.sealed, peer.addresses = True, None, b"", ()
            peer.holding = None
            self._holding.pop(node, None)

    def hint(self, node: bytes, addresses: Iterable[str]) -> None:
        """Add addresses from a ticket, before any record is known."""
        peer = self.get(node)
        peer.hinted = True
        peer.addresses = tuple(addresses) or peer.addresses

    def admit(self, node: bytes, tier: Tier, ticket: bytes = b"") -> None:
        """Set a peer's tier and ticket."""
        peer = self.get(node)
        peer.tier, peer.ticket = tier, ticket

    def tier(self, node: bytes) -> Tier:
        """Return the tier of a peer; the trainer that a ticket names is a member at once."""
        peer = self._peers.get(node)
        if peer is None:
            return Tier.STRANGER
        return Tier.MEMBER if peer.hinted else peer.tier

    def network_of(self, node: bytes) -> str:
        """Return the network that a peer last dialled from; empty where it is unknown or says nothing."""
        peer = self._peers.get(node)
        return peer.network if peer is not None else ""

    def seen_from(self, node: bytes) -> str:
        """Return address and port of a peer's newest connection; empty where they are not known."""
        peer = self._peers.get(node)
        live = [each for each in peer.connections if not each.closed] if peer is not None else []
        return live[-1].path().hint if live else ""

    def connected(self, node: bytes, connection: Connection) -> None:
        """Add a connection, dialled by either side."""
        peer = self.get(node)
        peer.connections.append(connection)
        peer.network = network_of(connection.path().remote)
        peer.last_seen = time.time()

    def disconnected(self, node: bytes, connection: Connection) -> None:
        """Remove a connection, but keep its byte counters."""
        peer = self.get(node)
        if connection in peer.connections:
            peer.connections.remove(connection)
            info = connection.path()
            peer.sent += info.bytes_sent
            peer.received += info.bytes_received

    def seen(self, node: bytes) -> None:
        """Record that the peer sent something valid."""
        self.get(node).last_seen = time.time()

    def served(self, node: bytes, size: int, seconds: float) -> None:
        """Record that the peer gave us `size` good bytes in `seconds`."""
        peer = self.get(node)
        peer.success += EMA * (1.0 - peer.success)
        rate = size / max(seconds, 1e-4)
        peer.bandwidth = (
            rate if not peer.bandwidth else peer.bandwidth + EMA * (rate - peer.bandwidth)
        )
        self._served[node] = peer
        self._heal()

    def failed(self, node: bytes) -> None:
        """Record that the peer did not deliver."""
        peer = self.get(node)
        peer.success -= EMA * peer.success
        self._failing[node] = peer
        self._heal()

    def blame(self, node: bytes, reason: Reason) -> None:
        """Record that the peer broke the protocol."""
        self.get(node).blamed[reason] += 1
        self.failed(node)

    def reliability(self, node: bytes) -> float:
        """Return the success in 0..1."""
        return self.get(node).success

    def has_served(self, node: bytes) -> bool:
        """Return whether it ever gave us a good chunk."""
        return self.get(node).bandwidth > 0.0

    def weight(self, node: bytes) -> float:
        """Return success times bandwidth, for choosing sources; an untried peer counts as average."""
        peer = self.get(node)
        known = [other.bandwidth for other in self._served.values()]
        typical = sorted(known)[len(known) // 2] if known else 1.0
        return max(peer.success, 0.01) * (peer.bandwidth or typical)

    def _heal(self) -> None:
        for node, peer in tuple(self._failing.items()):
            peer.success += HEAL * (1.0 - peer.success)
            if peer.success > HEALED:
                peer.success = 1.0
                del self._failing[node]


HEALED = 0.999
"""Success that counts as 1."""
SHUN_S = 60.0
"""Exclusion after the first lie; twice as long for each further one."""
SHUN_MAX_S = 3600.0
DETOUR_S = 60.0
NO_DETOUR_S = 15.0
"""Time with the usual path after a detour that failed or ended."""
REST_S = 30.0
PATIENCE_S = 2.0
"""Seconds that a source may keep us waiting in vain, in total, before we stop waiting for it."""
PATIENCE_GAIN = 0.1
"""Share of a fetch's time that a source which gave something may keep us waiting again."""
STALLS = 2
"""After this many fetches in a row in which a source was doubted and gave nothing, it is passed over for
STALL_S, then twice as long each time, at most STALL_MAX_S."""
STALL_S = 60.0
STALL_MAX_S = 600.0


class PeerScores:
    """Lies, failures, delays and detours of sources, by node id or name of a seed.

    Anybody can make node ids and announce that they hold chunks: of each figure the newest MAX_PEERS are kept.
    """

    def __init__(self) -> None:
        self._patience = RecentDict[bytes, float](MAX_PEERS)
        self._stalls = RecentDict[bytes, int](MAX_PEERS)
        self._passed_over = RecentDict[bytes, float](MAX_PEERS)
        self._lies = RecentDict[bytes, int](MAX_PEERS)
        self._shunned = RecentDict[bytes, float](MAX_PEERS)
        self._detours = RecentDict[bytes, float](MAX_PEERS)
        self._resting = RecentDict[bytes, float](MAX_PEERS)
        self._silent = RecentDict[bytes, None](MAX_PEERS)

    def lied(self, source: bytes, now: float) -> None:
        """Note that a source sent wrong bytes, or claimed chunks that it does not have."""
        count = self._lies[source] = self._lies.get(source, 0) + 1
        self._shunned[source] = now + min(SHUN_S * 2 ** (count - 1), SHUN_MAX_S)

    def shunned(self, source: bytes, now: float) -> bool:
        """Return whether a source is excluded for lies."""
        return now < self._shunned.get(source, 0.0)

    def patience(self, source: bytes) -> float:
        """Return the seconds that a source may keep us waiting in the next fetch; first PATIENCE_S."""
        return self._patience.get(source, PATIENCE_S)

    def stalled(self, source: bytes) -> bool:
        """Return whether a source kept us waiting in vain in the last fetch that needed it."""
        return source in self._stalls

    def passed_over(self, source: bytes, now: float) -> bool:
        """Return whether a source is left out because it repeatedly kept us waiting in vain."""
        return now < self._passed_over.get(source, 0.0)

    def fetched(
        self,
        source: bytes,
        now: float,
        *,
        waited: float,
        delivered: bool,
        doubted: bool,
        idle: bool,
        seconds: float,
    ) -> None:
        """Record how useful a source was in a fetch of `seconds`, of which we `waited` for it in vain.

        `doubted`: it kept us waiting longer than allowed. `idle`: it gave nothing, and others did in the same
        time.
        """
        patience = self.patience(source) - waited + (PATIENCE_GAIN * seconds if delivered else 0.0)
        self._patience[source] = min(max(patience, 0.0), PATIENCE_S)
        if delivered:
            self._stalls.pop(source, None)
        elif doubted:
            stalls = self._stalls[source] = self._stalls.get(source, 0) + 1
            if stalls >= STALLS:
                pause = min(STALL_S * 2 ** min(stalls - STALLS, 16), STALL_MAX_S)
                self._passed_over[source] = now + pause
        elif idle:
            self._stalls.setdefault(source, 0)

    def path_failed(self, source: bytes, now: float, *, detour: bool) -> None:
        """Use the other path to a source for a while: the usual one failed or, with `detour`, that one.

        Several calls may report one failure: those over the usual path do not end a detour that has begun.
        """
        if detour:
            self._detours[source] = min(now, self._detours.get(source, now))
        elif not self.detoured(source, now) and self._may_turn(source, now):
            self._detours[source] = now + DETOUR_S

    def _may_turn(self, source: bytes, now: float) -> bool:
        ended = self._detours.get(source)
        return ended is None or now >= ended + NO_DETOUR_S

    def detoured(self, source: bytes, now: float) -> bool:
        """Return whether to take the other path."""
        return now < self._detours.get(source, 0.0)

    def rest(self, source: bytes, now: float) -> None:
        """Leave a source alone for a while after a failure."""
        self._resting[source] = now + REST_S

    def resting(self, source: bytes, now: float) -> bool:
        """Return whether a source is left alone."""
        return now < self._resting.get(source, 0.0)

    def silent(self, source: bytes) -> None:
        """Note that a source did not list its chunks in time: the next fetch does not wait for it."""
        self._silent[source] = None

    def spoke(self, source: bytes) -> None:
        """Note that a source listed its chunks."""
        self._silent.pop(source, None)

    def awaited(self, source: bytes) -> bool:
        """Return whether a fetch should hear from it before it asks anybody else."""
        return source not in self._silent
