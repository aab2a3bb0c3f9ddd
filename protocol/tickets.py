"""Join tickets as text: `primerl2-` and unpadded base64url of a packed Ticket.

A ticket is signed by the trainer key that it names, so a damaged or invented one is noticed offline. What is
signed and what travels in a Hello is the envelope: the text leaves out what follows from the rest of it, and is
read only if the same envelope, byte by byte, comes out. An envelope that cannot be packed so is written whole,
as `primerl1-`.
"""

import base64
import binascii
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated

import msgspec

from ..crypto.hashing import DIGEST_BYTES, digest
from ..crypto.keys import NODE_ID_BYTES, SIGNATURE_BYTES, SecretKey, peer_id_text
from .envelope import (
    ANYBODY,
    Envelope,
    Purpose,
    check_age,
    read_envelope,
    seal,
    unseal,
    wrong_document,
)
from .errors import Reason, RemoteProtocolError
from .manifests import Addresses, Ticket, encode
from .session import decode
from .version import MAX_ADDRESSES, SPOKEN

PREFIXES = WHOLE, PACKED = "primerl1-", "primerl2-"
"""Prefix of a ticket."""
MAX_TICKET_CHARACTERS = 8192
HEAD_BYTES = DIGEST_BYTES + NODE_ID_BYTES + SIGNATURE_BYTES
PORT_BYTES = 2
DAMAGED = "the ticket is damaged"
Seconds = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Rest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The part of a packed ticket after run, trainer and signature."""

    wire_version: Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)]
    issued: Seconds
    lasts_s: Seconds
    id: Annotated[bytes, msgspec.Meta(max_length=16)]
    label: Annotated[str, msgspec.Meta(max_length=64)]
    uses: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    ipv4: Annotated[bytes, msgspec.Meta(max_length=MAX_ADDRESSES * (4 + PORT_BYTES))]
    """Address and port of each, first in Ticket.addresses."""
    ipv6: Annotated[bytes, msgspec.Meta(max_length=MAX_ADDRESSES * (16 + PORT_BYTES))]
    """The same, after `ipv4`."""
    others: Addresses
    """The rest of Ticket.addresses, as they are."""
    discovery: Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)] | Addresses
    """The TCP port of the trainer's libp2p, at each address of `ipv4`; other multiaddrs as they are."""


def issue(key: SecretKey, ticket: Ticket) -> str:
    """Sign a ticket as the trainer, and write it as text."""
    sealed = seal(key, Purpose.TICKET, ticket.run, ticket, expires=ticket.expires)
    return text_of(sealed)


def sealed_bytes(text: str) -> bytes:
    """Read the sealed bytes of a ticket's text; white space in it does not count.

    Raises RemoteProtocolError: MALFORMED, or WRONG_VERSION for a packed ticket of another wire version.
    """
    if len(text) > MAX_TICKET_CHARACTERS:
        raise RemoteProtocolError(Reason.MALFORMED, "a ticket is not that long")
    text = "".join(text.split())
    if not text.startswith(PREFIXES):
        raise RemoteProtocolError(Reason.MALFORMED, f"a ticket starts with {PACKED}")
    body = text[len(PACKED) :]
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise RemoteProtocolError(Reason.MALFORMED, DAMAGED) from error
    sealed = data if text.startswith(WHOLE) else _unpack(data)
    # One text for one ticket: base64 has spare bits and two alphabets, where damage would not show.
    if text not in (_text(WHOLE, sealed), text_of(sealed)):
        raise RemoteProtocolError(Reason.MALFORMED, DAMAGED)
    return sealed


def text_of(sealed: bytes) -> str:
    """Write a sealed ticket as text."""
    packed = _pack(sealed)
    return _text(WHOLE, sealed) if packed is None else _text(PACKED, packed)


def _text(prefix: str, data: bytes) -> str:
    return prefix + base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _pack(sealed: bytes) -> bytes | None:
    """Pack a sealed ticket; None if that would lose any of its bytes."""
    try:
        envelope = read_envelope(sealed, "ticket")
        ticket = decode(envelope.payload, Ticket)
        ipv4, ipv6 = (
            b"".join(_numbers(ticket.addresses, family)) for family in (IPv4Address, IPv6Address)
        )
        count = len(ipv4) // (4 + PORT_BYTES) + len(ipv6) // (16 + PORT_BYTES)
        port = next(iter(ticket.discovery), "").partition("/tcp/")[2].partition("/")[0]
        rest = _Rest(
            envelope.wire_version,
            ticket.issued,
            ticket.expires - ticket.issued,
            ticket.id,
            ticket.label,
            ticket.uses,
            ipv4,
            ipv6,
            ticket.addresses[count:],
            ticket.discovery,
        )
        if port.isdecimal() and ticket.discovery == _multiaddrs(ticket.trainer, ipv4, int(port)):
            rest = msgspec.structs.replace(rest, discovery=int(port))
        packed = ticket.run + ticket.trainer + envelope.signature + msgspec.msgpack.encode(rest)
        return packed if _unpack(packed) == sealed else None
    except (RemoteProtocolError, msgspec.MsgspecError, OverflowError):
        return None


def _unpack(packed: bytes) -> bytes:
    """Make the sealed ticket again. Raises RemoteProtocolError."""
    head, rest = packed[:HEAD_BYTES], decode(packed[HEAD_BYTES:], _Rest)
    if not SPOKEN.speaks(rest.wire_version):
        raise wrong_document("ticket", rest.wire_version)
    run, trainer = head[:DIGEST_BYTES], head[DIGEST_BYTES : DIGEST_BYTES + NODE_ID_BYTES]
    numbered = (*_hints(rest.ipv4, 4), *_hints(rest.ipv6, 16))
    ports = rest.discovery
    ticket = Ticket(
        run=run,
        trainer=trainer,
        addresses=(*numbered, *rest.others),
        discovery=_multiaddrs(trainer, rest.ipv4, ports) if isinstance(ports, int) else ports,
        issued=rest.issued,
        expires=rest.issued + rest.lasts_s,
        id=rest.id,
        label=rest.label,
        uses=rest.uses,
    )
    envelope = Envelope(
        rest.wire_version,
        Purpose.TICKET,
        run,
        trainer,
        ANYBODY,
        0,
        ticket.expires,
        encode(ticket),
        head[DIGEST_BYTES + NODE_ID_BYTES :],
    )
    return msgspec.msgpack.encode(envelope)


def _numbers(
    hints: Sequence[str], family: type[IPv4Address] | type[IPv6Address]
) -> Iterator[bytes]:
    """Yield address and port of each `host:port` whose host is a number of that family."""
    for hint in hints:
        host, _, port = hint.rpartition(":")
        try:
            address = ip_address(host.strip("[]"))
            if isinstance(address, family):
                yield address.packed + int(port).to_bytes(PORT_BYTES, "big")
        except (ValueError, OverflowError):
            continue


def _hints(numbers: bytes, size: int) -> Iterator[str]:
    """Yield the `host:port` of addresses of `size` bytes, each with its port."""
    for at in range(0, len(numbers), size + PORT_BYTES):
        address, port = numbers[at : at + size], numbers[at + size : at + size + PORT_BYTES]
        if len(port) < PORT_BYTES:
            raise RemoteProtocolError(Reason.MALFORMED, DAMAGED)
        host = f"{ip_address(address)}"
        yield f"{f'[{host}]' if size > 4 else host}:{int.from_bytes(port, 'big')}"


def _multiaddrs(trainer: bytes, ipv4: bytes, port: int) -> tuple[str, ...]:
    """Make the multiaddrs of a trainer that listens on a TCP port at each of these addresses."""
    hosts = [hint.partition(":")[0] for hint in _hints(ipv4, 4)]
    return tuple(f"/ip4/{host}/tcp/{port}/p2p/{peer_id_text(trainer)}" for host in hosts)


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
