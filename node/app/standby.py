"""A standby: a joined node that keeps a copy of the run, and leads it when its trainer is lost."""

import asyncio
import math
import time
from contextlib import closing
from pathlib import Path

from ...crypto.keys import KEY_FILE, SecretKey
from ...protocol.trust import RunDocuments, TrustedRun, read_documents
from ..config.run import JoinConfig
from ..errors import BusyError
from ..ops.control import Command
from ..ops.figures import Status
from ..ops.strict_json import to_json
from ..p2p.heads import HeadStore
from ..p2p.services import NodeServices
from ..standby.loop import StandbyRole
from ..standby.mirror import Mirror
from ..storage.ledger import LEADERS, MANIFEST, Ledger
from ..storage.run_files import CONFIG, is_copy, write, write_private
from ..tasks import end_tasks
from .factories import Factories
from .peer_node import JoinedRun, PeerNode
from .services import LIBP2P_PORT, PORT

COPY = "run"
"""Folder of the copy in the data directory."""
OWN_CONFIG = "takeover.json"
"""File with the part of the trainer's config that is this node's own."""


class StandbyNode(PeerNode):
    """One standby process."""

    def __init__(
        self, config: JoinConfig, key: SecretKey, data_dir: Path, factories: Factories | None = None
    ) -> None:
        # it is there for the time when the trainer is not
        config = config.model_copy(update={"wait": True, "wait_for_trainer_s": math.inf})
        super().__init__(config, key, data_dir, factories)
        self.copy = data_dir / COPY
        self._role: StandbyRole | None = None

    @property
    def step(self) -> int:
        """Step after which a trainer would go on from the copy, or a later one; -1 before there is one."""
        return -1 if self._role is None else self._role.mirror.step

    async def run(self) -> None:
        """Keep a copy until the run ends or this node has to lead it, which it does after a restart, too."""
        if await asyncio.to_thread(self._led):
            self.leads, self.farewell = True, "this node leads the run"
            return
        await super().run()
        if self._role is not None and self._role.takes_over:
            self.leads = True
            self.farewell = f"this node leads the run from now on: {self._role.takes_over}"

    def lead_arguments(self) -> list[str]:
        """Return the arguments of `primerl-node train` with which this node leads the run from its copy."""
        own = [f"{self._config.takeover_config}"] if self._config.takeover_config else []
        files = [str(self.copy / CONFIG), str(self.data_dir / OWN_CONFIG), *own]
        return [word for path in files for word in ("@", path)] + ["--resume"]

    async def _take_part(self, joined: JoinedRun) -> None:
        services = joined.services
        mirror = Mirror(self.copy, fsync=self._config.fsync)
        role = self._role = StandbyRole(services, joined.documents.manifest, mirror)
        asking = asyncio.create_task(joined.upstreams.keep_asking(), name="peer records")
        try:
            await self._follow_while(joined, role.run)
        finally:
            await end_tasks(asking)
        if role.takes_over:
            await asyncio.to_thread(self._prepare, services)

    def _commands(self) -> dict[str, Command]:
        return {**super()._commands(), "handover": self._take_run}

    async def _take_run(self) -> dict[str, object]:
        if self._role is None:
            raise BusyError("this node has not joined the run yet: ask again in a moment")
        self._role.take()
        return {"node": self.key.node_id.hex()}

    def _prepare(self, services: NodeServices) -> None:
        """Make the copy a run of this node's: with its key, at its ports, after all heads that it knows."""
        data_dir = self.copy / "trainer"
        if (own := self.data_dir / KEY_FILE).exists():
            write_private(data_dir / KEY_FILE, own.read_text())
        newest = services.heads.latest()
        with closing(Ledger(data_dir / "ledger.db", fsync=self._config.fsync)) as ledger:
            for name in (PORT, LIBP2P_PORT, LEADERS):
                if (value := services.ledger.get(name)) is not None:
                    ledger.set(name, value)
            if newest is not None and ledger.newest_head() < newest.order:
                ledger.add_head(*newest.order, newest.sealed, b"")
        config = self._config
        settings = {
            "output_dir": str(self.data_dir.absolute()),
            "name": COPY,
            "data_dir": str(data_dir.absolute()),
            # all of it: others know this node by the addresses that it has had
            "network": config.network.model_dump(mode="json"),
            "limits": config.limits.model_dump(
                mode="json", exclude_unset=True, include={"upload", "download"}
            ),
        }
        write(self.data_dir / OWN_CONFIG, to_json(settings) + "\n")

    def _led(self) -> bool:
        """Return whether this node led the run when it ended, and nobody else had taken over."""
        path = self.copy / "trainer" / "ledger.db"
        if is_copy(self.copy) or not path.exists() or not (self.data_dir / OWN_CONFIG).exists():
            return False
        with closing(Ledger(path, fsync=self._config.fsync)) as ledger:
            documents = read_documents(ledger.get(MANIFEST) or b"", now=0)
            trusted = TrustedRun(documents.run_id, self.key.node_id)
            newest = HeadStore(trusted, ledger).latest()
        return newest is not None and newest.signer == self.key.node_id

    def _documents_without_trainer(
        self, services: NodeServices, waited: float
    ) -> RunDocuments | None:
        """Return the documents of the last start once the trainer was silent for the lease."""
        listed, sealed = services.leaders.listed, services.ledger.get(MANIFEST)
        if listed is None or sealed is None or waited < listed.lease_s:
            return None
        return read_documents(sealed, services.run_id, now=0)

    @property
    def _computes(self) -> bool:
        return False

    def _waits_for(self) -> str:
        return super()._waits_for() or (self._role.waits_for if self._role else "")

    async def _status(self) -> Status:
        status = await super()._status()
        if self._role is not None and self.step >= 0:
            age = f", {time.time() - self._role.brought_at:.0f} s ago" * bool(self._role.brought_at)
            copied = f"a copy of the run after step {self.step}{age}, {self._role.mirror.size / 1e6:.1f} MB"
            status.detail = f"{copied}, {status.detail}"
        return status
