"""Who else may have chunks, as the trainer tells us: a hint, and each record is signed by its node."""

import logging
import time
from collections.abc import Sequence

from ...protocol.errors import RemoteProtocolError
from ..network.exchange import BlobFetcher
from ..network.gossip import read_record
from ..network.peers import PeerTable

logger = logging.getLogger(__name__)


class Upstreams:
    """The peers to fetch from, first those admitted before us, the nearest first, then others."""

    def __init__(self, run_id: bytes, peers: PeerTable, fetcher: BlobFetcher) -> None:
        self._run_id = run_id
        self._peers = peers
        self._fetcher = fetcher
        self.nodes: list[bytes] = []

    def learn(self, records: Sequence[bytes], later: Sequence[bytes] = ()) -> None:
        """Take in the sealed records of peers that the trainer names as sources: before us, and after us."""
        before = self._learn(records)
        self._fetcher.place = len(before)
        self.nodes = before + self._learn(later)

    def _learn(self, records: Sequence[bytes]) -> list[bytes]:
        nodes: list[bytes] = []
        for sealed in records:
            try:
                record = read_record(sealed, self._run_id, int(time.time()))
            except RemoteProtocolError as error:
                logger.info("bad peer record from the trainer: %s", error)
                continue
            self._peers.learn(record, sealed)
            nodes.append(record.node)
        return nodes
