"""Whom a libp2p discovery dials, and when: bootstrap peers, Kademlia's finds, and whoever we must talk to.

For the trio thread only. Every dial has a deadline, and a dial that fails is an everyday answer.
"""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .transport import Unreachable
from .trio_thread import attempt

if TYPE_CHECKING:
    import trio
    from libp2p.abc import IHost
    from libp2p.kad_dht.kad_dht import KadDHT
    from libp2p.peer.id import ID
    from libp2p.peer.peerinfo import PeerInfo

WANTED_NEIGHBOURS = 4
"""Below this, bootstrap peers are dialled again."""
DIAL_SECONDS = 10.0
REACH_SECONDS = 3.0
"""For one address of a peer that somebody waits for: there may be others, and other peers."""
RETRY_SECONDS = (1.0, 30.0)
"""First and longest pause between two dials of a bootstrap peer."""
LOOKUP_SECONDS = 20.0
LOOKUP_PAUSES = (2.0, 600.0)
"""First and longest pause between two rounds of Kademlia."""
DIALS_PER_LOOKUP = 3


class Dialler:
    """Keeps one host connected."""

    def __init__(
        self,
        host: "IHost",
        dht: "KadDHT",
        content: str,
        *,
        neighbours: Callable[[], int],
        known: "Callable[[], list[PeerInfo]]",
    ) -> None:
        """`content`: the key of the run; `known()`: peers whose addresses we have from mDNS or better days."""
        self._host = host
        self._dht = dht
        self._content = content
        self._neighbours = neighbours
        self._known = known
        self._reaching: dict[ID, trio.Lock] = {}

    def is_connected(self, peer: "ID") -> bool:
        """Whether there is a connection to `peer`, or it is us."""
        return peer == self._host.get_id() or bool(self._host.get_network().get_connections(peer))

    async def reach(self, infos: "Sequence[PeerInfo]", peer: "ID") -> None:
        """Be connected to `peer`, by the first of `infos` that leads to it; those of others are not used.

        Raises Unreachable.
        """
        import trio

        lock = self._reaching.setdefault(peer, trio.Lock())
        try:
            async with lock:
                await self._reach([info for info in infos if info.peer_id == peer], peer)
        finally:
            if not lock.locked():
                self._reaching.pop(peer, None)

    async def _reach(self, infos: "Sequence[PeerInfo]", peer: "ID") -> None:
        # One address after the other: left to itself, the library dials only the first of each kind.
        for address in [address for info in infos for address in info.addrs]:
            if self.is_connected(peer):
                return
            await attempt(REACH_SECONDS, self._host.get_network().dial_addr, address, peer)
        if not self.is_connected(peer):
            raise Unreachable(f"no TCP address of {peer} led to it: is its libp2p port open?")

    async def keep_dialling(self, info: "PeerInfo") -> None:
        """Dial a bootstrap peer whenever we are short of neighbours."""
        import trio

        pause, longest = RETRY_SECONDS
        while True:
            if self._neighbours() < WANTED_NEIGHBOURS and not self.is_connected(info.peer_id):
                pause = RETRY_SECONDS[0] if await self._dial(info) else min(2 * pause, longest)
            await trio.sleep(pause * random.uniform(0.8, 1.2))

    async def keep_looking(self, tidy: Callable[[], None]) -> None:
        """Ask Kademlia for others of the run now and then; `tidy()` comes before every round."""
        import trio

        pause, longest = LOOKUP_PAUSES
        while True:
            await trio.sleep(pause * random.uniform(0.8, 1.2))
            tidy()
            alone = not self._host.get_connected_peers()
            await (self._dial_some(self._known()) if alone else self._look())
            pause = min(2 * pause, RETRY_SECONDS[1] if alone else longest)

    async def _look(self) -> None:
        """One round of Kademlia: who else serves this run, and tell that we do."""
        for peer in self._host.get_connected_peers():
            await attempt(LOOKUP_SECONDS, self._dht.add_peer, peer)
        found = await attempt(LOOKUP_SECONDS, self._find) or []
        await attempt(LOOKUP_SECONDS, self._dht.provide, self._content)
        await self._dial_some([info for info in found if not self.is_connected(info.peer_id)])

    async def _dial_some(self, infos: "list[PeerInfo]") -> None:
        for info in random.sample(infos, min(DIALS_PER_LOOKUP, len(infos))):
            await self._dial(info)

    async def _find(self) -> "list[PeerInfo]":
        """Providers of the run: those that told us, and those that others know of."""
        records, key = self._dht.provider_store.providers, bytes.fromhex(self._content)
        # A key with local records, our own among them, is never looked up elsewhere.
        told = records.pop(key, {})
        try:
            found = await self._dht.find_providers(self._content)
        finally:
            records.setdefault(key, {}).update(told)
        return found + [record.provider_info for record in told.values()]

    async def _dial(self, info: "PeerInfo") -> bool:
        await attempt(DIAL_SECONDS, self._host.connect, info)
        return self.is_connected(info.peer_id)
