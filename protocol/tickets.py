"""Join tickets as text: `primerl1-` and unpadded base64url of a sealed Ticket.

A ticket is signed by the trainer key that it names, so a damaged or invented one is noticed offline.
"""

import base64
import binascii

from ..crypto.hashing import digest
from ..crypto.keys import SecretKey
from .envelope import Purpose, check_age, read_envelope, seal, unseal
from .errors import Reason, RemoteProtocolError
from .manifests import Ticket, encode

PREFIX = "primerl1-"
MAX_TICKET_CHARACTERS = 8192


def issue(key: SecretKey, ticket: Ticket) -> str:
    """Sign a ticket as the trainer, and write it as text."""
    sealed = seal(key, Purpose.TICKET, ticket.run, ticket, expires=ticket.expires)
    return text_of(sealed)


def sealed_bytes(text: str) -> bytes:
    """Read the sealed bytes of a ticket text. Raises RemoteProtocolError(MALFORMED)."""
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > MAX_TICKET_CHARACTERS:
        raise RemoteProtocolError(Reason.MALFORMED, f"a ticket starts with {PREFIX}")
    body = text[len(PREFIX) :]
    try:
        sealed = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise RemoteProtocolError(Reason.MALFORMED, "the ticket is damaged") from error
    # One text for one ticket: base64 has spare bits and two alphabets, where damage would not show.
    if text_of(sealed) != text:
        raise RemoteProtocolError(Reason.MALFORMED, "the ticket is damaged")
    return sealed


def text_of(sealed: bytes) -> str:
    """Write a sealed ticket as text."""
    return PREFIX + base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()


def id_of(ticket: Ticket) -> bytes:
    """Return the id of a ticket; one without gets a digest of its contents."""
    return ticket.id or digest(encode(ticket))[:16]


def read(text: str, *, now: int) -> Ticket:
    """Read a ticket, and check its signature and expiry. Raises RemoteProtocolError."""
    return check(sealed_bytes(text), now=now)


def check(sealed: bytes, *, now: int) -> Ticket:
    """Check a sealed ticket, as read()."""
    envelope = read_envelope(sealed, "ticket")
    ticket = unseal(sealed, Purpose.TICKET, Ticket, now=now).body
    if (ticket.trainer, ticket.run) != (envelope.signer, envelope.run):
        raise RemoteProtocolError(Reason.WRONG_SIGNER, "not signed by the trainer it names")
    check_age("ticket", ticket.issued, now)
    return ticket
