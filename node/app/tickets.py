"""Choose the ticket to join with, and remember the one that admitted this node.

An admitted node is known by its key, so it needs a valid ticket only once.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...crypto.hashing import short
from ...protocol import tickets
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leaders import Leaders
from ...protocol.manifests import Ticket
from ..errors import TicketError
from ..storage.ledger import Ledger, LedgerView

logger = logging.getLogger(__name__)

TICKET = "ticket"
"""Key, in the ledger of a joined node, of the sealed ticket with which its trainer welcomed it last."""


def usable_ticket(given: str, data_dir: Path, now: int) -> str:
    """Choose the ticket to join with: `given`, or, without one, that of the run for which this directory
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
            "the ticket is damaged: copy it again, from its first character to its last"
        ) from error
    return given


@dataclass(frozen=True)
class TicketPlace:
    """The file or page that a ticket came from, where its operator may put a newer one."""

    name: str
    read: Callable[[], str]
    """Returns the text there, in a thread. Raises TicketError."""
    first_s: float = 30.0
    """Seconds without the trainer before it is read again, then ever more rarely."""
    most_s: float = 600.0


def read_again(place: TicketPlace, leaders: Leaders, now: int) -> tuple[str, Ticket]:
    """Read the ticket at its place again, and open it. `now` in Unix seconds.

    Raises TicketError for one that is not of the same run and a node that may lead it: whoever controls the
    place can then only hand out what such a node has signed.
    """
    try:
        text = place.read()
        ticket = tickets.read(text, now=now)
    except RemoteProtocolError as error:
        raise TicketError(f"it is no valid ticket: {error.detail or error.reason.value}") from error
    if ticket.run != leaders.run:
        raise TicketError(f"it is of another run ({short(ticket.run)})")
    if ticket.trainer not in leaders:
        raise TicketError(f"it names another trainer ({short(ticket.trainer)})")
    return text, ticket


def run_directory(data_dir: Path, run: bytes) -> Path:
    """Return the directory in which a joined node keeps one run's files."""
    return data_dir / "runs" / run.hex()[:16]


def remember(ledger: Ledger, ticket: str) -> None:
    """Note that the trainer welcomed us: from now on our key admits us."""
    ledger.set(TICKET, tickets.sealed_bytes(ticket))


def _was_welcomed(data_dir: Path, ticket: Ticket) -> bool:
    path = run_directory(data_dir, ticket.run) / "ledger.db"
    return path.is_file() and bool(_remembered(path))


def _remembered(path: Path) -> bytes:
    """Read the sealed ticket in a ledger; empty if it has none. Raises StorageError."""
    view = LedgerView(path)
    try:
        return view.get(TICKET) or b""
    finally:
        view.close()


def _last_ticket(data_dir: Path) -> str:
    for path in _ledgers(data_dir):
        if sealed := _remembered(path):
            ticket = tickets.text_of(sealed)
            logger.info("joining the run in %s again, by the key that it admitted", path.parent)
            return ticket
    raise TicketError(
        f"no ticket, and {data_dir} was never admitted to a run: give --ticket with what `primerl-node "
        "ticket` prints on the trainer's machine"
    )


def remembered_tickets(data_dir: Path) -> list[str]:
    """Return the ticket of each run that admitted this directory's key, newest first. Raises StorageError."""
    sealed = [_remembered(path) for path in _ledgers(data_dir)]
    return [tickets.text_of(document) for document in sealed if document]


def _ledgers(data_dir: Path) -> list[Path]:
    return sorted(data_dir.glob("runs/*/ledger.db"), key=_written, reverse=True)


def _written(path: Path) -> float:
    wal = path.with_name(path.name + "-wal")
    return max(file.stat().st_mtime for file in (path, wal) if file.exists())
