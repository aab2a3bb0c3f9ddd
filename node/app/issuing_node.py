"""A running node that a run belongs to, a trainer or a judge: its network services and its tickets."""

import dataclasses
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from ...crypto.keys import SecretKey
from ...protocol.trust import RunDocuments
from ..config.run import NodeConfig, RunConfig
from ..errors import BusyError
from ..ops.control import Command
from ..ops.figures import Status
from ..p2p.services import NodeServices
from ..storage.chunk_store import FileStore
from ..storage.ledger import IssuedTicket, Ledger
from ..storage.run_files import TICKET
from ..trainer import run_manifest
from ..trainer.tickets import TicketIssuer
from . import rundir
from .factories import Factories
from .running_node import Node
from .services import open_services


class IssuingNode(Node):
    """A node that a run belongs to: it issues tickets, and its operator may list and revoke them."""

    def __init__(self, config: NodeConfig, key: SecretKey, data_dir: Path, role: str) -> None:
        super().__init__(config, key, data_dir, role)
        self.queries = {**self.queries, "ticket": self._own_ticket}
        self.tickets: TicketIssuer | None = None
        """None before the node is reachable."""

    @asynccontextmanager
    async def open_run(
        self,
        config: RunConfig,
        ledger: Ledger,
        store: FileStore,
        documents: RunDocuments,
        factories: Factories,
    ) -> AsyncGenerator[NodeServices]:
        """Open the services of the node's own run; tickets can be issued within the block.

        Raises UsageError if the clock is behind what this run has signed.
        """
        async with open_services(
            config,
            self.key,
            ledger,
            store,
            run_id=documents.run_id,
            trainer=self.key.node_id,
            role="trainer",
            factories=factories,
            rates=self.rates,
        ) as services:
            run = documents.manifest
            run_manifest.check_clock(run, services.heads.latest(), int(time.time()))
            services.keep_chunks.update(rundir.pinned(run, store))
            self.tickets = TicketIssuer(
                services,
                config.run_dir / TICKET,
                ttl_s=factories.timeouts.ticket_s,
            )
            yield services

    def base_status(self) -> Status:
        """Make the status that every node has, with its ticket."""
        status = super().base_status()
        status.ticket_expires = self.tickets.expires if self.tickets else None
        return status

    @property
    def issued(self) -> TicketIssuer:
        """The issuer of tickets. Raises BusyError before there is one."""
        if self.tickets is None:
            raise BusyError("there is no ticket yet: ask again in a moment")
        return self.tickets

    @property
    def ticket_commands(self) -> Mapping[str, Command]:
        """What its operator may ask about tickets."""
        return {"ticket": self._ticket, "tickets": self._list_tickets, "revoke": self._revoke}

    async def _own_ticket(self) -> dict[str, object]:
        return self.issued.current().shown()

    async def _ticket(
        self, label: str | None = None, uses: int | None = None, expires_s: float | None = None
    ) -> dict[str, object]:
        """Return the node's own ticket or, with any argument, a new one."""
        if label is None and uses is None and expires_s is None:
            return self.issued.current().shown()
        return self.issued.issue(label=label or "", uses=uses, expires_s=expires_s).shown()

    async def _list_tickets(self) -> list[dict[str, object]]:
        return [_ticket_row(ticket) for ticket in self.issued.listed()]

    async def _revoke(self, name: str) -> list[dict[str, object]]:
        return [_ticket_row(ticket) for ticket in self.issued.revoke(name)]


def _ticket_row(ticket: IssuedTicket) -> dict[str, object]:
    return {**dataclasses.asdict(ticket), "id": ticket.id.hex()}
