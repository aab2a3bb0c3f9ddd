"""Facts from discovery: heads, records, holdings and equivocation proofs, each verified before it counts.

Gossip is the fast path only: nothing waits for it, and commands never come this way.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable

from ...crypto.hashing import short
from ...crypto.keys import SecretKey
from ...protocol.envelope import Envelope, Purpose, read_envelope, seal, unseal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import Holding, PeerRecord
from ...protocol.messages import HeadNotice
from ...protocol.retirement import read_retirement
from ...protocol.trust import EquivocationProof
from .discovery import Discovery, GossipFact
from .heads import HeadStore
from .peers import PeerTable

HOLDING_TTL_S = 600
HOLDING_INTERVAL_S = 1.0
"""Seconds between two facts of one node: if versions pass faster, only the latest is announced."""
HOLDERS = 128
"""Nodes that announce a version, on average: every node hears and checks each of them, and asks a few."""


def read_holding(sealed: bytes | Envelope, run: bytes, now: int) -> tuple[Holding, int]:
    """Read what a node signed that it holds, and until when to believe it. Raises RemoteProtocolError."""
    opened = unseal(sealed, Purpose.HOLDING, Holding, now=now, run=run)
    if opened.body.node != opened.signer:
        raise RemoteProtocolError(Reason.WRONG_SIGNER, "a holding of another node")
    return opened.body, min(opened.expires, now + HOLDING_TTL_S)


class HoldingsAnnouncer:
    """A node's own announcements: only the newest counts, and none is sent twice."""

    def __init__(self, key: SecretKey, run: bytes) -> None:
        self._key = key
        self._run = run
        self._newest = (0, -1, True)
        self._news = asyncio.Event()

    @property
    def node(self) -> bytes:
        """Our own id."""
        return self._key.node_id

    def tell(self, epoch: int, version: int, complete: bool) -> None:
        """Announce that we hold that version, or (not complete) began to fetch it; ignore older news."""
        if (epoch, version, complete) > self._newest:
            self._newest = (epoch, version, complete)
            self._news.set()

    async def take(self) -> bytes:
        """Wait until there is something to announce; return the sealed fact."""
        await self._news.wait()
        self._news.clear()
        holding = Holding(self.node, *self._newest)
        expires = int(time.time()) + HOLDING_TTL_S
        return seal(self._key, Purpose.HOLDING, self._run, holding, expires=expires)


logger = logging.getLogger(__name__)

RECORD_INTERVAL_S, RECORD_INTERVAL_MAX_S = 20.0, 1200.0
"""Seconds between two records of one node; the longest is well below the life of a record."""
RECORDS_PER_S = 5.0
"""Records of all nodes together: the more nodes, the longer each waits, as in RTCP (RFC 3550, 6.2)."""


def read_record(sealed: bytes | Envelope, run: bytes, now: int) -> PeerRecord:
    """Read a peer record that its own subject signed. Raises RemoteProtocolError."""
    opened = unseal(sealed, Purpose.PEER, PeerRecord, now=now, run=run)
    if opened.body.node != opened.signer:
        raise RemoteProtocolError(Reason.WRONG_SIGNER, "a record of another node")
    return opened.body


def record_interval(nodes: int) -> float:
    """Return the seconds between two records of one node, in a swarm of so many."""
    return min(max(RECORD_INTERVAL_S, nodes / RECORDS_PER_S), RECORD_INTERVAL_MAX_S)


class Gossip:
    """Pass facts between discovery and this node's state.

    A fact reaches all nodes, so the more of them there are, the less often each speaks: what one node hears
    does not grow with the swarm. Who gossips records of nodes that do not exist makes others speak less;
    nothing waits for it.
    """

    def __init__(
        self,
        discovery: Discovery,
        book: HeadStore,
        peers: PeerTable,
        *,
        record: Callable[[], bytes],
        holdings: HoldingsAnnouncer,
        on_fraud: Callable[[RemoteProtocolError], None],
        admitted: asyncio.Event | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`admitted` is set once this node may be announced; a second one with its key must not be.

        `chance` draws from 0 to 1.
        """
        self._discovery = discovery
        self._book = book
        self._peers = peers
        self._record = record
        self._holdings = holdings
        self._on_fraud = on_fraud
        self._admitted = admitted
        self._chance = chance

    async def run(self) -> None:
        """Listen and announce until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._announce())
            tasks.create_task(self._tell())

    async def _announce(self) -> None:
        if self._admitted is not None:
            await self._admitted.wait()
        while True:
            await self._discovery.publish(self._record())
            await asyncio.sleep(record_interval(self._peers.with_records()))

    async def _tell(self) -> None:
        while True:
            sealed = await self._holdings.take()
            if self._chance() * self._peers.with_records() < HOLDERS:
                await self._discovery.publish(sealed)
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

    async def _take(self, fact: GossipFact) -> None:
        envelope = read_envelope(fact.sealed)
        purpose = envelope.purpose
        run, now = self._book.trusted.run, int(time.time())
        if purpose == Purpose.HEAD:
            await self._book.admit(HeadNotice(fact.sealed))
        elif purpose == Purpose.PEER:
            self._peers.learn(read_record(envelope, run, now), fact.sealed)
        elif purpose == Purpose.HOLDING:
            holding, until = read_holding(envelope, run, now)
            if holding.node != self._holdings.node:
                self._peers.hold(holding, until)
        elif purpose == Purpose.RETIREMENT:
            self._peers.retire(read_retirement(fact.sealed).node)
        elif purpose == Purpose.EQUIVOCATION:
            proof = unseal(fact.sealed, Purpose.EQUIVOCATION, EquivocationProof, now=now, run=run)
            self._book.trusted.check_proof(proof.body)
        else:
            raise RemoteProtocolError(Reason.WRONG_PURPOSE, f"{purpose} is not gossiped")
