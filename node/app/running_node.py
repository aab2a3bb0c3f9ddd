"""A running node of any role: its control socket, its entry in the registry, its status and peer rows."""

import asyncio
import dataclasses
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ... import __version__
from ...crypto.hashing import short
from ...crypto.keys import SecretKey
from ..config.run import NodeConfig
from ..ops.control import Command, ControlServer, PeerRow, Status, register, unregister
from ..ops.errors import BusyError, first_cause, printable
from ..ops.metrics import EventLoopMonitor
from ..p2p.peers import Peer
from ..p2p.services import NodeServices
from ..storage.ledger import IssuedTicket
from .tickets import TicketIssuer


class Node:
    """A node process: does its work while it answers the control socket."""

    def __init__(self, config: NodeConfig, key: SecretKey, data_dir: Path, role: str) -> None:
        self.config = config
        self.key = key
        self.data_dir = data_dir
        self.role = role
        self.phase = "starting"
        self.lag = EventLoopMonitor()
        self._started = time.monotonic()
        self._stop = asyncio.Event()

    def base_status(self) -> Status:
        """Make the status that every node has."""
        return Status(
            id=self.key.node_id.hex(),
            short=short(self.key.node_id),
            role=self.role,
            software=__version__,
            pid=os.getpid(),
            uptime_s=round(time.monotonic() - self._started, 1),
            data_dir=str(self.data_dir.resolve()),
            phase=self.phase,
            event_loop_lag=self.lag.read(),
        )

    async def request_stop(self) -> dict[str, Any]:
        """End the node soon (the `stop` command)."""
        self._stop.set()
        return {}

    async def serve(
        self, work: Callable[[], Awaitable[None]], commands: Mapping[str, Command], run: str
    ) -> None:
        """Do `work` while answering the control socket; `stop` or cancellation ends both.

        Raises the error that ended the work, a NodeError first.
        """
        control = ControlServer(self.data_dir, {**commands, "stop": self.request_stop})
        await control.start()
        entry = register(self.data_dir, self.role, run)
        lag = asyncio.create_task(self.lag.run(), name="event loop lag")
        try:
            await self._until_done(work)
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        finally:
            lag.cancel()
            unregister(entry)
            await control.close()
            await asyncio.wait([lag])

    async def _until_done(self, work: Callable[[], Awaitable[None]]) -> None:
        working = asyncio.ensure_future(work())
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not working.done():
                working.cancel()
                with suppress(asyncio.CancelledError):
                    await working
        if not working.cancelled():
            working.result()


class IssuingNode(Node):
    """A node that a run belongs to: it issues tickets, and its operator may list and revoke them."""

    def __init__(self, config: NodeConfig, key: SecretKey, data_dir: Path, role: str) -> None:
        super().__init__(config, key, data_dir, role)
        self.tickets: TicketIssuer | None = None
        """None before the node is reachable."""

    @property
    def issued(self) -> TicketIssuer:
        """The issuer of tickets. Raises BusyError before there is one."""
        if self.tickets is None:
            raise BusyError("the trainer has no ticket yet: ask again in a moment")
        return self.tickets

    @property
    def ticket_commands(self) -> Mapping[str, Command]:
        """What its operator may ask about tickets."""
        return {"ticket": self._ticket, "tickets": self._list_tickets, "revoke": self._revoke}

    async def _ticket(
        self, label: str | None = None, uses: int | None = None, expires_s: float | None = None
    ) -> dict[str, object]:
        """Return the node's own ticket or, with any argument, a new one."""
        if label is None and uses is None and expires_s is None:
            return self.issued.current().shown()
        return self.issued.issue(label=label or "", uses=uses, expires_s=expires_s).shown()

    async def _list_tickets(self) -> list[dict[str, object]]:
        return [_ticket_row(one) for one in self.issued.listed()]

    async def _revoke(self, name: str) -> list[dict[str, object]]:
        return [_ticket_row(one) for one in self.issued.revoke(name)]


def _ticket_row(one: IssuedTicket) -> dict[str, object]:
    return {**dataclasses.asdict(one), "id": one.id.hex()}


SILENT_S = 20.0
"""Workers send a request every five seconds (worker/loop.py, HEARTBEAT_S)."""


def show_network(status: Status, services: NodeServices) -> None:
    """Fill in `status` what every node knows of its run and its peers."""
    status.run = services.run_id.hex()
    peers = services.peers.rows()
    traffic = [peer.traffic() for peer in peers]
    status.bytes_sent = sum(sent for sent, _ in traffic)
    status.bytes_received = sum(received for _, received in traffic)
    status.peers = sum(1 for peer in peers if peer.path() is not None)
    status.neighbours = services.discovery.neighbours() if services.discovery else 0


def peer_rows(services: NodeServices) -> list[PeerRow]:
    """Make one row per known peer, the connected ones first; only a trainer knows their work."""
    own = services.key.node_id
    rows = [_row(peer) for peer in services.peers.rows() if peer.node != own]
    return sorted(rows, key=lambda row: (row.path == "-", row.role, row.id))


def _row(peer: Peer) -> PeerRow:
    path = peer.path()
    sent, received = peer.traffic()
    seen = round(time.time() - peer.last_seen, 1) if peer.last_seen else None
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
        last_seen_s=seen,
        software=printable(peer.record.software) if peer.record else "?",
        silent_s=0.0 if path else shown_silence(seen or 0.0),
    )


def shown_silence(seconds: float) -> float:
    """Round a silence; 0 if it is too short to show."""
    return round(seconds, 1) if seconds >= SILENT_S else 0.0
