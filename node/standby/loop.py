"""The standby role: ask the trainer for backups of the run, and keep the newest.

It computes nothing. A backup is believed because the trainer's own connection brought its digests.
"""

import logging
import time

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import RunManifest
from ...protocol.messages import Backup, BackupWait, GetBackup
from ..errors import NetworkError
from ..p2p.rpc import Refused
from ..p2p.services import NodeServices
from ..p2p.transport import TransportError
from ..p2p.waiting import LogBackoff
from .mirror import Mirror

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 300.0
"""Time for a backup to be made: a checkpoint of some hundred GB is hashed meanwhile."""
PAUSE_S, PAUSE_MAX_S = 1.0, 10.0
REFUSED_PAUSE_S = 30.0
"""Pause after the trainer refused this node as a standby: its operator may add it."""


class StandbyRole:
    """Follows the backups of a run until the run ends."""

    def __init__(self, services: NodeServices, run: RunManifest, mirror: Mirror) -> None:
        self._services = services
        self._heads = services.heads
        self._run = run
        self.mirror = mirror
        self._obstacle = ""
        self._lines = LogBackoff()
        self.brought_at = 0.0
        """Unix seconds at which the newest was complete."""

    @property
    def waits_for(self) -> str:
        """Reason why there is no backup, or no newer one; empty while all is well."""
        return self._obstacle

    async def run(self) -> None:
        """Follow until the run ends. Raises StorageError."""
        pause = PAUSE_S
        while not self._heads.ended:
            await self._heads.end_without_trainer(self.mirror.step, self._run.max_steps)
            try:
                wait = await self._step()
                pause, self._obstacle = PAUSE_S, ""
                self._lines.reset()
            except (NetworkError, TransportError, Refused, RemoteProtocolError) as error:
                wait = self._explain(error, pause)
                pause = min(pause * 1.6, PAUSE_MAX_S)
            await self._heads.wait(lambda: False, wait)

    async def _step(self) -> float:
        """Bring a newer backup, if there is one; return the seconds until the next question."""
        if self._services.paused():
            return PAUSE_S
        reply = await self._services.ask_trainer(
            GetBackup(self.mirror.known),
            Backup | BackupWait,  # type: ignore[arg-type]
            deadline=ASK_TIMEOUT_S,
        )
        if isinstance(reply, BackupWait):
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

    def _explain(self, error: Exception, pause: float) -> float:
        """Report why there was no backup; return the seconds to wait."""
        self._obstacle = f"the trainer gives no backup: {error}"
        if isinstance(error, Refused) and error.reason == Reason.NOT_ADMITTED:
            logger.error(
                "the trainer gives this node no backups (%s). Its id, for checkpoint.standbys of the trainer: "
                "%s. Asking again in %.0f s",
                error.detail,
                self._services.key.node_id.hex(),
                REFUSED_PAUSE_S,
            )
            return REFUSED_PAUSE_S
        if self._lines.due():
            logger.info("no backup from %s: %s", short(self._services.trainer), error)
        return pause
