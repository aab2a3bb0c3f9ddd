"""A standby: a joined node that keeps a copy of the run, from which a trainer can go on."""

import time
from pathlib import Path

from ...crypto.keys import SecretKey
from ...protocol.manifests import RunManifest
from ..config.run import JoinConfig
from ..ops.figures import Status
from ..standby.loop import StandbyRole
from ..standby.mirror import Mirror
from .factories import Factories
from .peer_node import JoinedRun, PeerNode

COPY = "run"
"""Folder of the copy in the data directory."""


class StandbyNode(PeerNode):
    """One standby process."""

    def __init__(
        self, config: JoinConfig, key: SecretKey, data_dir: Path, factories: Factories | None = None
    ) -> None:
        super().__init__(config, key, data_dir, factories)
        self._role: StandbyRole | None = None

    @property
    def step(self) -> int:
        """Step after which a trainer would go on from the copy, or a later one; -1 before there is one."""
        return -1 if self._role is None else self._role.mirror.step

    async def _take_part(self, joined: JoinedRun) -> None:
        mirror = Mirror(self.data_dir / COPY, fsync=self._config.fsync)
        self._role = StandbyRole(joined.services, joined.documents.manifest, mirror)
        await self._follow_while(joined, self._role.run)

    def _check_numerics(self, run: RunManifest) -> None:
        """Do nothing: a standby computes nothing."""

    def _waits_for(self) -> str:
        return super()._waits_for() or (self._role.waits_for if self._role else "")

    async def _status(self) -> Status:
        status = await super()._status()
        if self._role is not None and self.step >= 0:
            age = f", {time.time() - self._role.brought_at:.0f} s ago" * bool(self._role.brought_at)
            copied = f"a copy of the run after step {self.step}{age}, {self._role.mirror.size / 1e6:.1f} MB"
            status.detail = f"{copied}, {status.detail}"
        return status
