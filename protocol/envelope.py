"""Envelopes: a signature over purpose, run, recipient, sequence, expiry and the exact payload bytes.

Verify, then decode; nothing is ever re-encoded to be verified.
"""

from enum import StrEnum
from typing import Annotated, Generic, TypeVar

import msgspec

from ..crypto.hashing import Digest
from ..crypto.keys import (
    NodeId,
    SecretKey,
    Signature,
    verify,
)
from .errors import Reason, RemoteProtocolError
from .session import decode
from .version import CLOCK_SKEW_S, MAX_SUBMISSION, WIRE_VERSION

DOMAIN = b"primerl envelope\x00"
ANYBODY = bytes(32)
"""Recipient of what is meant for all."""

T = TypeVar("T")


class Purpose(StrEnum):
    """What a signature is for. Bytes signed for one purpose never pass for another."""

    RUN = "run"
    TICKET = "ticket"
    HEAD = "head"
    PEER = "peer"
    LEASE = "lease"
    SUBMISSION = "submission"
    RECEIPT = "receipt"
    VERDICT = "verdict"
    EQUIVOCATION = "equivocation"
    HOLDING = "holding"
    AUDIT = "audit"
    PIPELINE = "pipeline"


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sealed form, as it travels."""

    purpose: Annotated[str, msgspec.Meta(max_length=32)]
    run: Digest
    signer: NodeId
    recipient: NodeId
    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    expires: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    payload: Annotated[bytes, msgspec.Meta(max_length=MAX_SUBMISSION)]
    signature: Signature


class Opened(msgspec.Struct, Generic[T], frozen=True):
    """What a verified envelope said, and who said it."""

    signer: bytes
    sequence: int
    expires: int
    body: T
    payload: bytes
    """The exact signed bytes; digests of documents are taken over these."""


def _preimage(
    purpose: str,
    run: bytes,
    signer: bytes,
    recipient: bytes,
    sequence: int,
    expires: int,
    payload: bytes,
) -> bytes:
    name = purpose.encode()
    return b"".join(
        [
            DOMAIN,
            WIRE_VERSION.to_bytes(2, "big"),
            len(name).to_bytes(1, "big"),
            name,
            run,
            signer,
            recipient,
            sequence.to_bytes(8, "big"),
            expires.to_bytes(8, "big"),
            len(payload).to_bytes(8, "big"),
            payload,
        ]
    )


def seal(
    key: SecretKey,
    purpose: Purpose,
    run: bytes,
    body: msgspec.Struct | bytes,
    *,
    expires: int,
    recipient: bytes = ANYBODY,
    sequence: int = 0,
) -> bytes:
    """Sign `body` (a Struct, or bytes already encoded) for one purpose. `expires` in Unix seconds."""
    payload = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    message = _preimage(purpose, run, key.node_id, recipient, sequence, expires, payload)
    signature = key.sign(message)
    envelope = Envelope(
        str(purpose), run, key.node_id, recipient, sequence, expires, payload, signature
    )
    return msgspec.msgpack.encode(envelope)


def unseal(
    sealed: bytes,
    purpose: Purpose,
    kind: type[T],
    *,
    now: int,
    run: bytes | None = None,
    signer: bytes | None = None,
    recipient: bytes | None = None,
) -> Opened[T]:
    """Open an envelope that must be for `purpose`, and, where given, of `run`, by `signer`, to `recipient`.

    `now` is Unix seconds. `run=None` is for the two documents that tell the run id themselves.

    Raises:
        RemoteProtocolError: MALFORMED, WRONG_PURPOSE, WRONG_RUN, WRONG_SIGNER, WRONG_RECIPIENT, EXPIRED or
            BAD_SIGNATURE; in each case nothing of the payload was decoded.
    """
    envelope = decode(sealed, Envelope)
    if envelope.purpose != purpose:
        raise RemoteProtocolError(Reason.WRONG_PURPOSE, f"{envelope.purpose}, not {purpose}")
    if run is not None and envelope.run != run:
        raise RemoteProtocolError(Reason.WRONG_RUN, "signed for another run")
    if signer is not None and envelope.signer != signer:
        raise RemoteProtocolError(Reason.WRONG_SIGNER, "signed by another key")
    if recipient is not None and envelope.recipient != recipient:
        raise RemoteProtocolError(Reason.WRONG_RECIPIENT, "meant for another node")
    if envelope.expires + CLOCK_SKEW_S < now:
        raise RemoteProtocolError(Reason.EXPIRED, f"expired {now - envelope.expires} s ago")
    message = _preimage(
        envelope.purpose,
        envelope.run,
        envelope.signer,
        envelope.recipient,
        envelope.sequence,
        envelope.expires,
        envelope.payload,
    )
    if not verify(envelope.signer, envelope.signature, message):
        raise RemoteProtocolError(Reason.BAD_SIGNATURE, "the signature does not fit")
    body = decode(envelope.payload, kind)
    return Opened(envelope.signer, envelope.sequence, envelope.expires, body, envelope.payload)
