"""Who else may have chunks, as the trainer tells us: a hint, and each record is signed by its node."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from ...protocol.errors import RemoteProtocolError
from ...protocol.messages import SyncRecords
from ...protocol.version import ALPN_CONTROL
from ..p2p.exchange import BlobFetcher
from ..p2p.gossip import read_record
from ..p2p.links import Links
from ..p2p.peers import PeerTable, Tier
from ..p2p.rpc import Refused
from ..p2p.transport import TransportError

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 20.0
SYNC_S = 10.0
"""Between two questions about who else has chunks."""


class Upstreams:
    """The peers to fetch from, first those admitted before us, the nearest first, then others."""

    def __init__(self, run_id: bytes, peers: PeerTable, fetcher: BlobFetcher) -> None:
        self._run_id = run_id
        self._peers = peers
        self._fetcher = fetcher
        self.nodes: list[bytes] = []

    def learn(self, records: Sequence[bytes], later: Sequence[bytes] = ()) -> None:
        """Take in the sealed records of peers that the trainer names as sources: before us, and after us."""
        before = learn_records(self._peers, self._run_id, records)
        self._fetcher.place = len(before)
        self.nodes = before + learn_records(self._peers, self._run_id, later)

    async def keep_asking(self, links: Links, trainer: bytes, record: Callable[[], bytes]) -> None:
        """Keep knowing who else has chunks, for a node that asks for no leases; `record` makes our own
        sealed peer record."""
        while True:
            try:
                reply = await links.request(
                    trainer,
                    ALPN_CONTROL,
                    SyncRecords((record(),)),
                    SyncRecords,
                    deadline=ASK_TIMEOUT_S,
                )
                self.learn(reply.records)
            except (TransportError, Refused, RemoteProtocolError) as error:
                logger.debug("no peer records: %s", error)
            await asyncio.sleep(SYNC_S)


def learn_records(peers: PeerTable, run_id: bytes, records: Sequence[bytes]) -> list[bytes]:
    """Take in sealed peer records that the trainer sent; the nodes that they are of, without the bad ones."""
    nodes: list[bytes] = []
    for sealed in records:
        try:
            record = read_record(sealed, run_id, int(time.time()))
        except RemoteProtocolError as error:
            logger.info("bad peer record from the trainer: %s", error)
            continue
        peers.learn(record, sealed)
        peers.admit(record.node, Tier.MEMBER)
        nodes.append(record.node)
    return nodes
