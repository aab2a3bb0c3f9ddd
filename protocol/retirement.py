"""The end of a key: a statement that its own signature makes, true in every run and for ever. Sans I/O.

Whoever has the key can make one, a thief too: it takes nothing from anybody but from that key.
"""

import msgspec

from ..crypto.keys import NodeId, SecretKey
from .envelope import Purpose, seal, unseal
from .errors import Reason, RemoteProtocolError
from .manifests import UnixSeconds

EVERY_RUN = bytes(32)
"""Run of an envelope that holds in all of them."""
NEVER = 2**53
"""Unix seconds of an expiry that does not come."""


class Retirement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """My key is not mine alone any more, or of no use to me: believe nothing that it signs from now on."""

    node: NodeId
    made: UnixSeconds


def retire(key: SecretKey, now: int) -> bytes:
    """Sign the retirement of `key`; `now` in Unix seconds."""
    body = Retirement(key.node_id, now)
    return seal(key, Purpose.RETIREMENT, EVERY_RUN, body, expires=NEVER)


def read_retirement(sealed: bytes) -> Retirement:
    """Check a retirement, which only the key itself can have signed. Raises RemoteProtocolError."""
    opened = unseal(sealed, Purpose.RETIREMENT, Retirement, now=0, run=EVERY_RUN)
    if opened.body.node != opened.signer:
        raise RemoteProtocolError(Reason.WRONG_SIGNER, "a retirement of another key")
    return opened.body
