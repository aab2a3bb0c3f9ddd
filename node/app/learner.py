"""A learner: a joined node that trains the run together with its trainer."""

import asyncio
from pathlib import Path

from ...crypto.keys import SecretKey
from ...protocol.manifests import RunManifest
from ..config.run import JoinConfig
from ..errors import UsageError
from ..learner.loop import LearnerRole
from ..models.base_weights import FILE
from ..ops.figures import Status
from ..tasks import end_tasks
from ..training.backend import TrainBackend
from ..training.rounds import InnerLoop, LearnerSettings
from ..validator.loop import StateCache
from ..weights.checkpoint import write_checkpoint
from .factories import Factories
from .peer_node import JoinedRun, PeerNode

MASTERS = "learner"
"""Folder of the files by which masters come and go."""
FIRST_S = 1.0


class LearnerNode(PeerNode):
    """One learner process."""

    def __init__(
        self, config: JoinConfig, key: SecretKey, data_dir: Path, factories: Factories | None = None
    ) -> None:
        super().__init__(config, key, data_dir, factories)
        self._role: LearnerRole | None = None
        self._backend: TrainBackend | None = None

    @property
    def merged(self) -> int:
        """Contributions of this start that are part of a version."""
        return 0 if self._role is None else self._role.merged

    @property
    def version(self) -> int:
        """Version that it trains from; -1 before the first."""
        return -1 if self._role is None else self._role.version

    async def _take_part(self, joined: JoinedRun) -> None:
        run, own = joined.documents.manifest, self.key.node_id
        if run.learners is None or own not in run.learners.nodes:
            raise UsageError(
                "the trainer of this run does not name this node as a learner: learners.nodes has to list "
                f"{own.hex()} when a run begins"
            )

        async def start(settings: LearnerSettings) -> InnerLoop:
            return await self._start(joined, settings)

        directory = joined.model_dir.parent
        role = self._role = LearnerRole(joined.services, run, start, directory)
        asking = asyncio.create_task(joined.upstreams.keep_asking(), name="peer records")
        try:
            await self._follow_while(joined, role.run)
        finally:
            await end_tasks(asking)
            if self._backend is not None:
                await self._backend.close()

    async def _start(self, joined: JoinedRun, settings: LearnerSettings) -> InnerLoop:
        """Start the backend, with any published policy: its masters are replaced. Raises EngineError."""
        config = settings.config(self._config.training)
        await joined.base
        if joined.documents.manifest.adapters is None:
            await self._write_policy(joined)
        self._backend = self._factories.learner(config, settings)
        await self._backend.start(joined.model_dir)
        return InnerLoop(self._backend, joined.model_dir.parent / MASTERS)

    async def _write_policy(self, joined: JoinedRun) -> None:
        """Fetch the newest policy, and write it beside the model's files."""
        cache = StateCache(1)
        sync = self._make_weights(joined, cache, cache.put)
        following = asyncio.create_task(sync.run(), name="policy")
        try:
            while not await sync.wait_order((0, 0), FIRST_S):
                if following.done():
                    following.result()
        finally:
            await end_tasks(following)
            self._weights = None
        states = cache.states((sync.version,))
        assert states is not None
        await asyncio.to_thread(
            write_checkpoint,
            joined.model_dir / FILE,
            states[sync.version],
            metadata={"format": "pt"},
        )

    def _check_numerics(self, run: RunManifest) -> None:
        """Accept any: nothing is generated here."""

    def _waits_for(self) -> str:
        return super()._waits_for() or (self._role.waits_for if self._role else "")

    async def _status(self) -> Status:
        status = await super()._status()
        role = self._role
        if role is not None:
            status.version = role.version
            done = f"{role.tokens} tokens trained in {role.rounds} rounds"
            status.detail = f"{done}, {role.merged} of them merged"
        return status
