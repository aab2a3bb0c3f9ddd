"""Join tickets: the account that a trainer keeps of those it issued, and the one that a joined node remembers.

A ticket is a bearer secret. What admits a node once admitted is its key, so it needs a valid ticket only once.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...protocol import tickets
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import Ticket
from ..ops.errors import StorageError, TicketError, UsageError
from ..storage.ledger import IssuedTicket, Ledger, LedgerView
from ..storage.run_files import write_private

if TYPE_CHECKING:
    from ..p2p.services import (
        NodeServices,  # all of the network: a ticket is checked before that is loaded
    )

logger = logging.getLogger(__name__)

TICKET = "ticket"
"""Key, in the ledger of a joined node, of the sealed ticket with which its trainer welcomed it last."""
DEFAULT = "default"
"""Label of the tickets that a trainer issues by itself."""
MAX_LABEL = 64
MAX_TTL_S = 10 * 365 * 86400
LOOK_S = 60.0
"""Between two looks at whether the trainer's own ticket is still fresh; less where tickets live shorter."""


@dataclass(frozen=True)
class SignedTicket:
    """A ticket and its text."""

    ticket: Ticket
    text: str

    def shown(self) -> dict[str, object]:
        """Return the row of `primerl-node ticket --json`."""
        one = self.ticket
        return {
            "ticket": self.text,
            "id": one.id.hex(),
            "label": one.label,
            "issued": one.issued,
            "expires": one.expires,
            "uses": one.uses,
        }


class TicketIssuer:
    """The tickets of a running trainer; its own is kept fresh in a file."""

    def __init__(
        self,
        services: "NodeServices",
        file: Path,
        *,
        ttl_s: float,
        uses: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`ttl_s` and `uses` are of tickets for which nothing else is asked; `clock` says Unix seconds."""
        self._services = services
        self._file = file
        self._ttl_s = ttl_s
        self._uses = uses
        self._clock = clock
        self._own: SignedTicket | None = None
        self._in_file = False
        """Whether the file holds it."""

    def current(self) -> SignedTicket:
        """The trainer's own ticket, a new one where the last is in the second half of its life, revoked or used
        up. Raises StorageError."""
        if self._own is None or not self._fresh(self._own.ticket):
            self._own, self._in_file = self.issue(label=DEFAULT), False
        if not self._in_file:
            write_private(self._file, self._own.text + "\n")
            self._in_file = True
        return self._own

    def issue(
        self, *, label: str = "", uses: int | None = None, expires_s: float | None = None
    ) -> SignedTicket:
        """A new ticket. Raises UsageError."""
        lasts_s = self._ttl_s if expires_s is None else expires_s
        if not 1 <= lasts_s <= MAX_TTL_S:
            raise UsageError("a ticket is valid for at least a second and at most ten years")
        if len(label) > MAX_LABEL or not label.isprintable():
            raise UsageError(f"a label has at most {MAX_LABEL} printable characters")
        uses = self._uses if uses is None else uses
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
            id=secrets.token_bytes(16),
            label=label,
            uses=uses,
        )
        services.ledger.add_ticket(ticket.id, ticket)
        return SignedTicket(ticket, tickets.issue(services.key, ticket))

    def listed(self) -> list[IssuedTicket]:
        """All that were issued, oldest first."""
        return self._services.ledger.tickets()

    def revoke(self, name: str) -> list[IssuedTicket]:
        """Stop admitting nodes by the tickets with label `name`, or by the one whose id starts with it.

        Nodes that they admitted stay. Raises UsageError.
        """
        known = [one for one in self.listed() if not one.revoked]
        found = [one for one in known if one.label == name]
        if not found and len(name) >= 4:
            found = [one for one in known if one.id.hex().startswith(name.lower())]
            if len(found) > 1:
                raise UsageError(f"{len(found)} ids begin with {name}: give more of it")
        if not found:
            raise UsageError(f"no ticket {name!r} can be revoked: `ticket list` shows them")
        for one in found:
            self._services.ledger.revoke_ticket(one.id, int(self._clock()))
            logger.info("ticket %s (%s) was revoked", one.id.hex(), one.label)
        return found

    async def keep_fresh(self) -> None:
        """Renew the trainer's own ticket, in its file, long before it expires."""
        while True:
            await asyncio.sleep(min(LOOK_S, self._ttl_s / 4))
            try:
                self.current()
            except StorageError as error:
                # the one in the file is good for half of its life yet: no reason to end a run
                logger.warning("the ticket cannot be renewed, trying again: %s", error)

    def _fresh(self, ticket: Ticket) -> bool:
        half = (ticket.issued + ticket.expires) / 2
        known = self._services.ledger.ticket(ticket.id)
        if known is None or known.revoked or self._clock() >= half:
            return False
        return not known.uses or known.admitted < known.uses


def usable_ticket(given: str, data_dir: Path, now: int) -> str:
    """The text of the ticket to join with: `given`, or, without one, that of the run for which this directory
    worked last. An expired one will do where its trainer admitted this directory's key. `now` in Unix seconds.

    Raises:
        TicketError, with what to do.
        StorageError: a ledger of another version.
    """
    if not given:
        return _last_ticket(data_dir)
    try:
        tickets.read(given, now=now)
    except RemoteProtocolError as error:
        if error.reason == Reason.EXPIRED:
            if _was_welcomed(data_dir, tickets.read(given, now=0)):
                return given
            raise TicketError(
                f"{error.detail}; else ask the trainer's operator for a new one (`primerl-node ticket`)"
            ) from error
        if error.reason in (Reason.WRONG_VERSION, Reason.WRONG_CLOCK):
            raise TicketError(error.detail) from error
        raise TicketError(
            f"this is no ticket that can be trusted ({error}): copy it again, whole and in one line"
        ) from error
    return given


def run_directory(data_dir: Path, run: bytes) -> Path:
    """Return the directory in which a joined node keeps one run's files."""
    return data_dir / "runs" / run.hex()[:16]


def remember(ledger: Ledger, ticket: str) -> None:
    """The trainer welcomed us: from now on our key is what admits us."""
    ledger.set(TICKET, tickets.sealed_bytes(ticket))


def _was_welcomed(data_dir: Path, ticket: Ticket) -> bool:
    path = run_directory(data_dir, ticket.run) / "ledger.db"
    return path.is_file() and bool(_remembered(path))


def _remembered(path: Path) -> bytes:
    """The sealed ticket in a ledger, or nothing. Raises StorageError."""
    view = LedgerView(path)
    try:
        return view.get(TICKET) or b""
    finally:
        view.close()


def _last_ticket(data_dir: Path) -> str:
    ledgers = sorted(data_dir.glob("runs/*/ledger.db"), key=_written, reverse=True)
    for path in ledgers:
        if sealed := _remembered(path):
            ticket = tickets.text_of(sealed)
            logger.info("joining the run in %s again, by the key that it admitted", path.parent)
            return ticket
    raise TicketError(
        f"no ticket, and {data_dir} was never admitted to a run: give --ticket with what `primerl-node "
        "ticket` prints on the trainer's machine"
    )


def _written(path: Path) -> float:
    wal = path.with_name(path.name + "-wal")
    return max(one.stat().st_mtime for one in (path, wal) if one.exists())
