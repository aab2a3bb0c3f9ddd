"""Envelopes: a signature over purpose, run, recipient, sequence, expiry and the exact payload bytes.

Verify, then decode; nothing is ever re-encoded to be verified. The first element is the wire version, now and
in every version to come: it is read before anything else, so that another version is not taken for damage.
"""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Generic, TypeVar

import msgspec

from .. import __version__
from ..crypto.hashing import Digest
from ..crypto.keys import NodeId, SecretKey, Signature, verify
from .errors import Reason, RemoteProtocolError
from .session import decode
from .version import CLOCK_SKEW_S, MAX_SUBMISSION, SPOKEN, WireRange

DOMAIN = b"primerl envelope\x00"
ANYBODY = bytes(32)
"""Recipient of an envelope for all."""

T = TypeVar("T")


class Purpose(StrEnum):
    """The purpose of a signature. Bytes signed for one purpose never pass for another."""

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
    BOUNDS = "bounds"
    RETIREMENT = "retirement"
    SUCCESSION = "succession"
    LEADERS = "leaders"
    ASSIGNMENT = "assignment"
    CONTRIBUTION = "contribution"
    OUTER_STEP = "outer_step"


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sealed form, as it travels."""

    wire_version: Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)]
    purpose: Annotated[str, msgspec.Meta(max_length=32)]
    run: Digest
    signer: NodeId
    recipient: NodeId
    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    expires: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    payload: Annotated[bytes, msgspec.Meta(max_length=MAX_SUBMISSION)]
    signature: Signature


class _Beginning(msgspec.Struct, frozen=True, array_like=True):
    """The first element of an envelope of any version."""

    first: int | Annotated[str, msgspec.Meta(max_length=32)]
    """The wire version; an envelope of version 1 began with its purpose."""


class Opened(msgspec.Struct, Generic[T], frozen=True):
    """The contents of a verified envelope, and its signer."""

    signer: bytes
    sequence: int
    expires: int
    body: T
    payload: bytes
    """The exact signed bytes; digests of documents are taken over these."""


def wrong_document(what: str, version: int, spoken: WireRange = SPOKEN) -> RemoteProtocolError:
    """Make the refusal of a document, called `what`, of a wire version that this node does not speak."""
    advice = (
        "upgrade this node"
        if version > spoken.newest
        else "it is of an older release: ask for a new one, or install that release"
    )
    return RemoteProtocolError(
        Reason.WRONG_VERSION,
        f"this {what} is of wire version {version}, this node (primerl-node {__version__}) speaks {spoken}: "
        f"{advice} (UPGRADING.md)",
    )


def no_common_version(
    trainer: WireRange, node: WireRange, *, called: str, software: str
) -> RemoteProtocolError:
    """Make the refusal for a trainer and a node whose wire versions do not meet.

    The node's operator reads it. `called` is the node for that reader, `software` the trainer's release.
    """
    advice = (
        f"upgrade {called} to it or a later one"
        if node.newest < trainer.oldest
        else f"ask for the trainer to be upgraded, or install that release for {called}"
    )
    return RemoteProtocolError(
        Reason.WRONG_VERSION,
        f"this trainer (primerl-node {software}) speaks wire {trainer}, {called} {node}: {advice} "
        "(UPGRADING.md)",
    )


def read_envelope(sealed: bytes, what: str = "document", *, spoken: WireRange = SPOKEN) -> Envelope:
    """Read the fields of an envelope, none of them verified; an error calls it `what`.

    Raises:
        RemoteProtocolError: WRONG_VERSION for a version outside `spoken`, before anything else was looked at;
            MALFORMED.
    """
    first = decode(sealed, _Beginning).first
    version = 1 if isinstance(first, str) else first
    if not spoken.speaks(version):
        raise wrong_document(what, version, spoken)
    return decode(sealed, Envelope)


def check_age(what: str, created: int, now: int) -> None:
    """Refuse a document that was made in our future; `now` in Unix seconds, 0 for do not ask.

    Raises RemoteProtocolError(WRONG_CLOCK).
    """
    if now and created > now + CLOCK_SKEW_S:
        raise RemoteProtocolError(
            Reason.WRONG_CLOCK,
            f"the {what} was made {created - now} s in the future by our clock ({utc(now)}): "
            "check the clock of this machine",
        )


def utc(seconds: int) -> str:
    """Format a time in Unix seconds for people."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _preimage(envelope: Envelope) -> bytes:
    """Lay out the bytes that are signed: every field but the signature."""
    name = envelope.purpose.encode()
    return b"".join(
        [
            DOMAIN,
            envelope.wire_version.to_bytes(2, "big"),
            len(name).to_bytes(1, "big"),
            name,
            envelope.run,
            envelope.signer,
            envelope.recipient,
            envelope.sequence.to_bytes(8, "big"),
            envelope.expires.to_bytes(8, "big"),
            len(envelope.payload).to_bytes(8, "big"),
            envelope.payload,
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
    version: int = SPOKEN.oldest,
) -> bytes:
    """Sign `body` (a Struct, or bytes already encoded) for one purpose. `expires` in Unix seconds.

    `version` is the oldest wire version whose nodes can read it.
    """
    payload = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    unsigned = Envelope(
        version, str(purpose), run, key.node_id, recipient, sequence, expires, payload, b""
    )
    signature = key.sign(_preimage(unsigned))
    return msgspec.msgpack.encode(msgspec.structs.replace(unsigned, signature=signature))


def unseal(
    sealed: bytes | Envelope,
    purpose: Purpose,
    kind: type[T],
    *,
    now: int,
    run: bytes | None = None,
    signer: bytes | None = None,
    recipient: bytes | None = None,
    spoken: WireRange = SPOKEN,
) -> Opened[T]:
    """Open an envelope that must be for `purpose`, and, where given, of `run`, by `signer`, to `recipient`.

    `sealed` may have been read already (read_envelope).
    Its wire version is one of `spoken`. `now` is Unix seconds. `run=None` is for the two documents that tell
    the run id themselves.

    Raises:
        RemoteProtocolError: WRONG_VERSION, MALFORMED, WRONG_PURPOSE, WRONG_RUN, WRONG_SIGNER,
            WRONG_RECIPIENT, EXPIRED or BAD_SIGNATURE; in each case nothing of the payload was decoded.
    """
    envelope = (
        sealed if isinstance(sealed, Envelope) else read_envelope(sealed, purpose, spoken=spoken)
    )
    if envelope.purpose != purpose:
        raise RemoteProtocolError(Reason.WRONG_PURPOSE, f"{envelope.purpose}, not {purpose}")
    if run is not None and envelope.run != run:
        raise RemoteProtocolError(Reason.WRONG_RUN, "signed for another run")
    if signer is not None and envelope.signer != signer:
        raise RemoteProtocolError(Reason.WRONG_SIGNER, "signed by another key")
    if recipient is not None and envelope.recipient != recipient:
        raise RemoteProtocolError(Reason.WRONG_RECIPIENT, "meant for another node")
    if envelope.expires + CLOCK_SKEW_S < now:
        raise RemoteProtocolError(
            Reason.EXPIRED,
            f"the {purpose} expired {now - envelope.expires} s ago by our clock ({utc(now)}): "
            "if that is not so, check the clock of this machine",
        )
    if not verify(envelope.signer, envelope.signature, _preimage(envelope)):
        raise RemoteProtocolError(Reason.BAD_SIGNATURE, "the signature does not fit")
    body = decode(envelope.payload, kind)
    return Opened(envelope.signer, envelope.sequence, envelope.expires, body, envelope.payload)
