"""The standby role: keep the newest backup of the run, and take over when its trainer is lost.

It computes nothing. A backup is believed because the trainer's own connection brought its digests. The trainer
is lost once neither it nor any newer head was heard for a lease of the root's list; the n-th successor waits n
leases. A trainer that said that its operator stopped it is not lost.
"""

import asyncio
import logging
import math
import time

from ...protocol.errors import RemoteProtocolError
from ...protocol.manifests import RunManifest
from ...protocol.messages import Backup, BackupWait, GetBackup
from ..errors import NetworkError, UsageError
from ..p2p.rpc import Refused
from ..p2p.services import NodeServices, Obstacle
from ..p2p.transport import TransportError
from ..tasks import end_tasks
from .mirror import Mirror

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 300.0
"""Time for a backup to be made: a checkpoint of some hundred GB is hashed meanwhile."""
IDLE_S = 1.0
"""Time between two looks whether this node is still paused."""
LOOK_S = 0.5
"""Pause between two looks whether the trainer is lost."""


class StandbyRole:
    """Follows the backups of a run until the run ends."""

    def __init__(self, services: NodeServices, run: RunManifest, mirror: Mirror) -> None:
        self._services = services
        self._heads = services.heads
        self._run = run
        self.mirror = mirror
        self._obstacle = Obstacle(services, "backups", "`primerl-node root certify`")
        self.brought_at = 0.0
        """Unix seconds at which the newest was complete."""
        self._revoked_at = math.inf
        """Since when the trainer is revoked, time.monotonic()."""
        self.takes_over = ""
        """Why this node leads the run from now on; empty while it does not."""

    @property
    def waits_for(self) -> str:
        """Reason why there is no backup, or no newer one; empty while all is well."""
        return self._obstacle.reason

    async def run(self) -> None:
        """Follow until the run ends, or this node has to lead it. Raises StorageError."""
        copying = asyncio.create_task(self._copy(), name="backups")
        try:
            while not self._heads.ended and not self.takes_over and not copying.done():
                await self._heads.end_without_trainer(self.mirror.step, self._run.max_steps)
                self._look_for_loss()
                await asyncio.wait([copying], timeout=LOOK_S)
            if copying.done():
                copying.result()
        finally:
            await end_tasks(copying)

    async def _copy(self) -> None:
        """Bring backups until the run ends, or is handed over to this node. Raises StorageError."""
        while not self._heads.ended and not self.takes_over:
            try:
                wait = await self._step()
                self._obstacle.end()
            except (NetworkError, TransportError, Refused, RemoteProtocolError) as error:
                wait = self._obstacle.explain(error)
            await self._heads.wait(lambda: False, wait)

    async def _step(self) -> float:
        """Bring a newer backup, if there is one; return the seconds until the next question."""
        if self._services.paused():
            return IDLE_S
        reply = await self._services.ask_trainer(
            GetBackup(self.mirror.known),
            Backup | BackupWait,  # type: ignore[arg-type]
            deadline=ASK_TIMEOUT_S,
        )
        if isinstance(reply, BackupWait):
            if reply.lead:
                self.takes_over = "the trainer has handed it over"
            return reply.retry_after_ms / 1000
        began, before = time.monotonic(), self.mirror.fetched
        services = self._services
        await self.mirror.bring(
            reply,
            services.store,
            lambda chunks: services.fetcher.fetch(chunks, (), services.trainer),
        )
        self.brought_at = time.time()
        logger.info(
            "backup of step %d: %d B of %d fetched in %.1f s",
            reply.step,
            self.mirror.fetched - before,
            self.mirror.size,
            time.monotonic() - began,
        )
        return 0.0

    def take(self) -> None:
        """Lead the run from now on, as the operator wants it. Raises UsageError while it has a trainer."""
        if self.mirror.step < 0:
            raise UsageError("there is no copy of the run here yet")
        if self._silence() == 0 and not self._heads.stopped and not self._is_revoked():
            raise UsageError(
                "the trainer is there: `primerl-node handover` in its data directory hands the run over"
            )
        self.takes_over = "its operator wants it"

    def _look_for_loss(self) -> None:
        """Take over if the trainer was silent for our lease."""
        listed, own = self._services.leaders.listed, self._services.key.node_id
        if listed is None or own not in self._services.leaders or self.mirror.step < 0:
            return
        place = self._services.leaders.others(self._services.trainer).index(own)
        if self._is_revoked():
            self._revoked_at = min(self._revoked_at, time.monotonic())
            if time.monotonic() - self._revoked_at >= place * listed.lease_s:
                self.takes_over = "its trainer was revoked"
            return
        self._revoked_at, turn = math.inf, place + 1
        if self._silence() >= turn * listed.lease_s and not self._heads.stopped:
            self.takes_over = f"its trainer was silent for {self._silence():.0f} s"

    def _is_revoked(self) -> bool:
        """Return whether the root has revoked the node that led the run."""
        return self._services.trainer not in self._services.leaders

    def _silence(self) -> float:
        """Return the seconds since the trainer, or a newer head of it, was heard; 0 while it is."""
        return max(0.0, time.monotonic() - max(self._heads.unwatched_since, self._heads.news_at))
