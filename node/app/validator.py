"""A validator: a joined node with a shelf of policies and an auditor, that measures what it is asked about."""

from pathlib import Path

from ...crypto.keys import SecretKey
from ..config.run import JoinConfig
from ..ops.control import Status
from ..validator.loop import StateCache, ValidatorRole
from .factories import Factories
from .peer_node import JoinedRun, PeerNode

AUDIT_TIMEOUT_S = 120.0
"""After this the process that audits is killed and started anew; the trainer's own deadline counts too."""
MORE_VERSIONS = 3
"""Versions to keep beyond the staleness bound, as many as the trainer does."""


class ValidatorNode(PeerNode):
    """One validator process."""

    def __init__(
        self, config: JoinConfig, key: SecretKey, data_dir: Path, parts: Factories | None = None
    ) -> None:
        super().__init__(config, key, data_dir, parts)
        self._role: ValidatorRole | None = None

    async def _take_part(self, joined: JoinedRun) -> None:
        run, stack = joined.documents.manifest, joined.stack
        auditor = self._parts.auditor(self._config.engine, AUDIT_TIMEOUT_S)
        shelf = StateCache(run.limits.max_off_policy_steps + MORE_VERSIONS)
        try:
            await auditor.start(joined.model_dir, run)
            role = self._role = ValidatorRole(
                key=self.key,
                run_id=joined.documents.run_id,
                run=run,
                links=stack.links,
                book=stack.heads,
                fetcher=stack.fetcher,
                catchup=self._make_weights(joined, shelf, shelf.put),
                shelf=shelf,
                auditor=auditor,
                upstreams=joined.upstreams,
                record=stack.record,
            )
            await self._follow_while(joined, role.run)
        finally:
            await auditor.close()
            await shelf.close()

    def _waits_for(self) -> str:
        return super()._waits_for() or (self._role.waits_for if self._role else "")

    async def _status(self) -> Status:
        status = await super()._status()
        if self._role is not None:
            done = f"{self._role.rollouts} rollouts audited in {self._role.audits} jobs"
            status.detail = f"{done}, {status.detail}"
        return status
