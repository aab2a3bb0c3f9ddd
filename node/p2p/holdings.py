"""Want and have: which version a node holds or fetches, told to all by gossip as one small signed fact.

A holding is a hint whom to watch for chunks. Nothing else may follow from it: anybody can claim anything.
"""

import asyncio
import time

from ...crypto.keys import SecretKey
from ...protocol.envelope import Purpose, seal, unseal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import Holding

HOLDING_TTL_S = 600
HOLDING_INTERVAL_S = 1.0
"""Between two facts of one node: of versions that pass faster only the latest is told."""


def read_holding(sealed: bytes, run: bytes, now: int) -> tuple[Holding, int]:
    """A holding that its own subject signed, and until when to believe it. Raises RemoteProtocolError."""
    opened = unseal(sealed, Purpose.HOLDING, Holding, now=now, run=run)
    if opened.body.node != opened.signer:
        raise RemoteProtocolError(Reason.WRONG_SIGNER, "a holding of somebody else")
    return opened.body, min(opened.expires, now + HOLDING_TTL_S)


class OwnHoldings:
    """What this node has to tell: only the newest counts, and none is told twice."""

    def __init__(self, key: SecretKey, run: bytes) -> None:
        self._key = key
        self._run = run
        self._newest = (0, -1, True)
        self._news = asyncio.Event()

    @property
    def node(self) -> bytes:
        """Our own id."""
        return self._key.node_id

    def tell(self, term: int, version: int, complete: bool) -> None:
        """We hold that version, or (not complete) begin to fetch it. Older news than before is none."""
        if (term, version, complete) > self._newest:
            self._newest = (term, version, complete)
            self._news.set()

    async def take(self) -> bytes:
        """Wait until there is something to tell; the sealed fact."""
        await self._news.wait()
        self._news.clear()
        holding = Holding(self.node, *self._newest)
        expires = int(time.time()) + HOLDING_TTL_S
        return seal(self._key, Purpose.HOLDING, self._run, holding, expires=expires)
