"""A validator: a joined node that keeps the last policies and audits for the trainer."""

import asyncio
from pathlib import Path

from ...crypto.keys import SecretKey
from ...protocol.audits import held_versions
from ..config.run import JoinConfig, default_auditor
from ..ops.figures import Status
from ..validator.loop import StateCache, ValidatorRole
from ..verification.local_audits import LocalAudits
from .factories import Factories
from .peer_node import JoinedRun, PeerNode

AUDIT_TIMEOUT_S = 120.0
"""Longest audit: after it the audit process is killed and started anew; the trainer's own deadline counts
too."""
VLLM_JOBS = 16
"""Jobs at a time where vLLM audits: those that wait are measured together. The trainer hands out no more."""


class ValidatorNode(PeerNode):
    """One validator process."""

    def __init__(
        self, config: JoinConfig, key: SecretKey, data_dir: Path, factories: Factories | None = None
    ) -> None:
        super().__init__(config, key, data_dir, factories)
        self._role: ValidatorRole | None = None

    async def _take_part(self, joined: JoinedRun) -> None:
        run = joined.documents.manifest
        kind = (
            "vllm" if run.proofs.vllm_alone else default_auditor(self._config.engine, exact=False)
        )
        engine = self._config.engine.model_copy(update={"type": kind})
        auditor = LocalAudits(self._factories.auditor(engine, AUDIT_TIMEOUT_S))
        cache = StateCache(held_versions(run.limits.max_off_policy_steps))
        sync = self._make_weights(joined, cache, cache.put)
        role = ValidatorRole(joined.services, run, sync, cache, auditor)
        if kind == "vllm":
            role.jobs_at_once = VLLM_JOBS

        async def work() -> None:
            async with asyncio.TaskGroup() as tasks:
                asking = joined.upstreams.keep_asking()
                loops = [tasks.create_task(sync.run()), tasks.create_task(asking)]
                await role.run()
                for task in loops:
                    task.cancel()

        try:
            await joined.base
            await auditor.start(joined.model_dir, run)
            self._role = role
            await self._follow_while(joined, work)
        finally:
            await auditor.close()
            await cache.close()

    def _waits_for(self) -> str:
        return super()._waits_for() or (self._role.waits_for if self._role else "")

    async def _status(self) -> Status:
        status = await super()._status()
        if self._role is not None:
            done = f"{self._role.rollouts} rollouts audited in {self._role.audits} jobs"
            status.detail = f"{done}, {status.detail}"
        return status
