"""Facts from discovery: heads, records, holdings and equivocation proofs, each verified before it counts.

Gossip is the fast path only; nothing waits for it. Commands never come this way.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from ...crypto.hashing import short
from ...protocol.envelope import Purpose, read_envelope, unseal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import PeerRecord
from ...protocol.messages import HeadNotice
from ...protocol.trust import EquivocationProof
from .discovery import Discovery, Fact
from .heads import HeadBook
from .holdings import HOLDING_INTERVAL_S, OwnHoldings, read_holding
from .peers import PeerTable

logger = logging.getLogger(__name__)

RECORD_INTERVAL_S = 20.0


def read_record(sealed: bytes, run: bytes, now: int) -> PeerRecord:
    """A peer record that its own subject signed. Raises RemoteProtocolError."""
    opened = unseal(sealed, Purpose.PEER, PeerRecord, now=now, run=run)
    if opened.body.node != opened.signer:
        raise RemoteProtocolError(Reason.WRONG_SIGNER, "a record of somebody else")
    return opened.body


class Gossip:
    """Pumps facts between discovery and what this node believes."""

    def __init__(
        self,
        discovery: Discovery,
        book: HeadBook,
        peers: PeerTable,
        *,
        record: Callable[[], bytes],
        holdings: OwnHoldings,
        on_fraud: Callable[[RemoteProtocolError], None],
    ) -> None:
        self._discovery = discovery
        self._book = book
        self._peers = peers
        self._record = record
        self._holdings = holdings
        self._on_fraud = on_fraud

    async def run(self) -> None:
        """Listen and announce until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._announce())
            tasks.create_task(self._tell())

    async def publish(self, sealed: bytes) -> None:
        """Tell others a sealed fact, best effort."""
        await self._discovery.publish(sealed)

    async def _announce(self) -> None:
        while True:
            await self._discovery.publish(self._record())
            await asyncio.sleep(RECORD_INTERVAL_S)

    async def _tell(self) -> None:
        while True:
            await self._discovery.publish(await self._holdings.take())
            await asyncio.sleep(HOLDING_INTERVAL_S)

    async def _listen(self) -> None:
        async for fact in self._discovery.facts():
            try:
                await self._take(fact)
            except RemoteProtocolError as error:
                if error.reason == Reason.EQUIVOCATION:
                    self._on_fraud(error)
                elif fact.source:
                    self._peers.blame(fact.source, error.reason)
                logger.info("gossip from %s refused: %s", short(fact.source), error)

    async def _take(self, fact: Fact) -> None:
        purpose = read_envelope(fact.sealed).purpose
        run, now = self._book.trusted.run, int(time.time())
        if purpose == Purpose.HEAD:
            await self._book.admit(HeadNotice(fact.sealed))
        elif purpose == Purpose.PEER:
            self._peers.learn(read_record(fact.sealed, run, now), fact.sealed)
        elif purpose == Purpose.HOLDING:
            holding, until = read_holding(fact.sealed, run, now)
            if holding.node != self._holdings.node:
                self._peers.hold(holding, until)
        elif purpose == Purpose.EQUIVOCATION:
            told = unseal(fact.sealed, Purpose.EQUIVOCATION, EquivocationProof, now=now, run=run)
            self._book.trusted.check_proof(told.body)
        else:
            raise RemoteProtocolError(Reason.WRONG_PURPOSE, f"{purpose} is not gossiped")
