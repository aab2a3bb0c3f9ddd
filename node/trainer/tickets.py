"""Issue, list and revoke the join tickets of a running trainer.

A ticket is a bearer secret. An admitted node is identified by its key, so it needs a valid ticket only once.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...protocol import tickets
from ...protocol.manifests import Ticket
from ..errors import StorageError, UsageError
from ..p2p.services import NodeServices
from ..storage.ledger import IssuedTicket
from ..storage.run_files import write_private

logger = logging.getLogger(__name__)

DEFAULT = "default"
"""Label of the tickets that a trainer issues by itself."""
ID_BYTES = 8
"""Of a new ticket: random, unlike any other of this trainer."""
MAX_LABEL = 64
MAX_TTL_S = 10 * 365 * 86400
LOOK_S = 60.0
"""Interval of checks that the trainer's own ticket is fresh; shorter if tickets expire sooner."""


@dataclass(frozen=True)
class SignedTicket:
    """A ticket and its text."""

    ticket: Ticket
    text: str

    def shown(self) -> dict[str, object]:
        """Return the row of `primerl-node ticket --json`."""
        ticket = self.ticket
        return {
            "ticket": self.text,
            "id": ticket.id.hex(),
            "label": ticket.label,
            "issued": ticket.issued,
            "expires": ticket.expires,
            "uses": ticket.uses,
        }


class TicketIssuer:
    """The tickets of a running trainer; its own is kept fresh in a file."""

    def __init__(
        self,
        services: NodeServices,
        file: Path,
        *,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`ttl_s` is the default of a ticket; `clock` returns Unix seconds."""
        self._services = services
        self._file = file
        self._ttl_s = ttl_s
        self._clock = clock
        self._own: SignedTicket | None = None
        self._in_file = False
        """Whether the file holds the trainer's own ticket."""

    def current(self) -> SignedTicket:
        """Return the trainer's own ticket.

        A new one is issued if the last is in the second half of its life, revoked or used up. Raises
        StorageError.
        """
        if self._own is None or not self._fresh(self._own.ticket):
            self._own, self._in_file = self.issue(label=DEFAULT), False
        if not self._in_file:
            write_private(self._file, self._own.text + "\n")
            self._in_file = True
        return self._own

    @property
    def expires(self) -> float | None:
        """Unix time at which the trainer's own ticket expires; None before there is one."""
        return None if self._own is None else self._own.ticket.expires

    def issue(
        self, *, label: str = "", uses: int | None = None, expires_s: float | None = None
    ) -> SignedTicket:
        """Issue a new ticket. Raises UsageError."""
        lasts_s = self._ttl_s if expires_s is None else expires_s
        if not 1 <= lasts_s <= MAX_TTL_S:
            raise UsageError("a ticket is valid for at least a second and at most ten years")
        if len(label) > MAX_LABEL or not label.isprintable():
            raise UsageError(f"a label has at most {MAX_LABEL} printable characters")
        uses = uses or 0
        if not 0 <= uses <= 2**31:
            raise UsageError("uses is a number of nodes, or 0 for any number")
        services, now = self._services, int(self._clock())
        ticket = Ticket(
            run=services.run_id,
            trainer=services.trainer,
            addresses=services.addresses(),
            discovery=services.discovery_addresses(),
            issued=now,
            expires=now + int(lasts_s),
            id=secrets.token_bytes(ID_BYTES),
            label=label,
            uses=uses,
        )
        services.ledger.add_ticket(ticket.id, ticket)
        return SignedTicket(ticket, tickets.issue(services.key, ticket))

    def listed(self) -> list[IssuedTicket]:
        """Return all issued tickets, oldest first."""
        return self._services.ledger.tickets()

    def revoke(self, name: str) -> list[IssuedTicket]:
        """Revoke the tickets with label `name`, or the ticket whose id starts with it.

        Nodes already admitted stay. Raises UsageError.
        """
        known = [ticket for ticket in self.listed() if not ticket.revoked]
        matches = [ticket for ticket in known if ticket.label == name]
        if not matches and len(name) >= 4:
            matches = [ticket for ticket in known if ticket.id.hex().startswith(name.lower())]
            if len(matches) > 1:
                raise UsageError(f"{len(matches)} ids begin with {name}: give more of it")
        if not matches:
            raise UsageError(f"no ticket {name!r} can be revoked: `ticket list` shows them")
        for ticket in matches:
            self._services.ledger.revoke_ticket(ticket.id, int(self._clock()))
            logger.info("ticket %s (%s) was revoked", ticket.id.hex(), ticket.label)
        return matches

    async def keep_fresh(self) -> None:
        """Renew the trainer's own ticket, in its file, long before it expires."""
        while True:
            await asyncio.sleep(min(LOOK_S, self._ttl_s / 4))
            try:
                self.current()
            except StorageError as error:
                # the one in the file is still valid for half of its life: the run need not end
                logger.warning("the ticket cannot be renewed, trying again: %s", error)

    def _fresh(self, ticket: Ticket) -> bool:
        half = (ticket.issued + ticket.expires) / 2
        known = self._services.ledger.ticket(ticket.id)
        if known is None or known.revoked or self._clock() >= half:
            return False
        return not known.uses or known.admitted < known.uses
