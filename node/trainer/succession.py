"""A trainer among the leaders of its run: it watches the others, and steps down for one that is newer.

Invariant: who finds a newer epoch of another leader publishes no version any more.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from ..errors import BusyError, SteppedDown, UsageError
from ..p2p.heads import HeadFollower
from ..p2p.services import NodeServices
from ..tasks import end_tasks

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Pause between two looks for leaders that became reachable."""
PRESENT_S = 60.0
"""A standby that asked for a backup this long ago is there."""
GIVE_S = 300.0
"""Longest time for a successor to fetch the last backup."""
ASK_S = 10.0
"""Longest wait, at the start, for the answers of other leaders."""


class OtherLeaders:
    """Watches of the nodes that may lead the run beside this one."""

    def __init__(self, services: NodeServices, floor: int) -> None:
        """Another leader's epochs up to `floor` are those that this trainer goes on from; -1: none are."""
        self._services = services
        self._floor = floor
        self._followers: dict[bytes, HeadFollower] = {}
        self._watches: dict[bytes, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Watch all that are reachable until cancelled."""
        try:
            while True:
                self._begin()
                await asyncio.sleep(LOOK_S)
        finally:
            await end_tasks(*self._watches.values())

    def _begin(self) -> None:
        """Watch those that became reachable, and no more those that lead no more."""
        services = self._services
        others = services.leaders.others(services.key.node_id)
        reachable = {node for node in others if services.peers.get(node).addresses}
        for node in [node for node in self._watches if node not in reachable]:
            self._watches.pop(node).cancel()
            del self._followers[node]
        for node in reachable - self._watches.keys():
            follower = self._followers[node] = services.follower(node)
            self._watches[node] = asyncio.create_task(follower.run(), name=f"watch {short(node)}")

    async def ask(self) -> None:
        """Wait until each of them has answered once, or has not. Raises SteppedDown."""
        self._begin()
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_S):
                for follower in list(self._followers.values()):
                    await follower.tried.wait()
        self.check()

    def check(self) -> None:
        """Raise SteppedDown if another leader has begun a newer epoch, or the root has revoked this one."""
        if self._services.key.node_id not in self._services.leaders:
            raise SteppedDown(
                "the run's root has revoked this trainer: what it signs counts no more"
            )
        newest = self._services.heads.latest()
        if newest is None or newest.signer == self._services.key.node_id:
            return
        if newest.head.term > self._floor:
            raise SteppedDown(
                f"node {newest.signer.hex()} leads this run since it began epoch {newest.head.term} with "
                "what it had of it: this trainer has stepped down. Join the run as a standby with a ticket of "
                "that node, in another --data-dir"
            )

    async def watch(self) -> None:
        """Wait until another leader has begun a newer epoch; then raise SteppedDown."""
        heads = self._services.heads
        while not heads.ended:
            self.check()
            await heads.wait_news(heads.order(), LOOK_S)


class HandOver:
    """A planned change of the leader: training ends, the successor gets all, then this trainer ends."""

    def __init__(self, may_lead: Callable[[], Sequence[bytes]]) -> None:
        """`may_lead` returns the nodes that may lead the run after this one, in order."""
        self.may_lead = may_lead
        self.standbys: dict[bytes, float] = {}
        """When each standby asked for a backup last, time.monotonic()."""
        self.successor = b""
        """Node that the run goes to; empty while nobody asked for that."""
        self.wanted = asyncio.Event()
        self.ready = False
        """Whether training has ended, and a backup made from now on is the last."""
        self.taken = asyncio.Event()
        """Set once the successor has the last backup, and was told to lead."""

    async def give(self, now: float) -> bytes:
        """Hand the run over to the first standby that keeps a copy; return it once it leads.

        `now` is time.monotonic().

        Raises UsageError if there is none, BusyError if it does not take the run.
        """
        present = [
            node for node in self.may_lead() if now - self.standbys.get(node, -math.inf) < PRESENT_S
        ]
        if not present:
            raise UsageError(
                "no standby of this run is here: `primerl-node root certify` names one, and `primerl-node join "
                "--role standby` starts it"
            )
        self.successor = present[0]
        self.wanted.set()
        try:
            async with asyncio.timeout(GIVE_S):
                await self.taken.wait()
        except TimeoutError as error:
            raise BusyError(
                f"{short(self.successor)} did not take the run in {GIVE_S:.0f} s: go on here with --resume"
            ) from error
        return self.successor

    def check_working(self) -> None:
        """Raise RemoteProtocolError(BUSY) once the run is handed over: the successor answers then."""
        if self.wanted.is_set():
            raise RemoteProtocolError(Reason.BUSY, "the run is handed over to another node")
