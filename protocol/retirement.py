"""The end of a key, and the key that takes its place: statements true in every run and for ever. Sans I/O.

A retirement is signed by the key that it ends, and one with a successor by the new key too: nobody is given a
key's standing, or its bans, without both. Whoever has the key can make one, a thief too: it takes nothing from
anybody but from that key.
"""

from typing import Annotated

import msgspec

from ..crypto.keys import NodeId, SecretKey
from .envelope import Purpose, read_envelope, seal, unseal
from .errors import Reason, RemoteProtocolError
from .manifests import UnixSeconds

EVERY_RUN = bytes(32)
"""Run of an envelope that holds in all of them."""
NEVER = 2**53
"""Unix seconds of an expiry that does not come."""
MAX_SUCCESSION = 512


class Succession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """I take the place of that key, with all that is known of it."""

    previous: NodeId
    made: UnixSeconds


class Retirement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """My key is not mine alone any more, or of no use to me: believe nothing that it signs from now on."""

    node: NodeId
    made: UnixSeconds
    succession: Annotated[bytes, msgspec.Meta(max_length=MAX_SUCCESSION)] = b""
    """The sealed Succession of the key that takes its place; empty: none does."""

    @property
    def successor(self) -> bytes:
        """Id of the key that takes its place; empty for none."""
        return read_envelope(self.succession).signer if self.succession else b""


def retire(key: SecretKey, now: int, successor: SecretKey | None = None) -> bytes:
    """Sign the retirement of `key`, in favour of `successor` if there is one; `now` in Unix seconds."""
    succession = b""
    if successor is not None:
        consent = Succession(key.node_id, now)
        succession = seal(successor, Purpose.SUCCESSION, EVERY_RUN, consent, expires=NEVER)
    body = Retirement(key.node_id, now, succession)
    return seal(key, Purpose.RETIREMENT, EVERY_RUN, body, expires=NEVER)


def read_retirement(sealed: bytes) -> Retirement:
    """Check a retirement, which only the key itself can have signed, and the consent of its successor.

    Raises RemoteProtocolError.
    """
    opened = unseal(sealed, Purpose.RETIREMENT, Retirement, now=0, run=EVERY_RUN)
    retirement = opened.body
    if retirement.node != opened.signer:
        raise RemoteProtocolError(Reason.WRONG_SIGNER, "a retirement of another key")
    if retirement.succession:
        consent = unseal(
            retirement.succession, Purpose.SUCCESSION, Succession, now=0, run=EVERY_RUN
        )
        if consent.body != Succession(retirement.node, retirement.made):
            raise RemoteProtocolError(Reason.WRONG_SIGNER, "the new key agreed to something else")
        if consent.signer == retirement.node:
            raise RemoteProtocolError(Reason.MALFORMED, "a key cannot take its own place")
    return retirement
