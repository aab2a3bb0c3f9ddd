"""What verifies submissions in a trainer: the verifier, its own auditor, and the desk for validators."""

import random
from pathlib import Path

from ..config.run import RunConfig
from ..environments.environment import Environment
from ..trainer.audit_queue import AuditDesk
from ..trainer.publisher import Publisher
from ..trainer.remote_audits import RemoteAuditors, read_validators
from ..verification.calls import OwnAudits
from ..verification.copies import Copies
from ..verification.verifier import Verifier
from . import rundir
from .factories import Parts


class Verification:
    """Made before the desk that workers talk to, which passes on what validators say."""

    def __init__(
        self, config: RunConfig, documents: rundir.RunDocuments, trainer: bytes, parts: Parts
    ) -> None:
        """`trainer` is this node's id. Raises UsageError for validators that are no node ids."""
        settings = config.verification
        self._documents = documents
        self._auditor = parts.auditor(config.engine, settings.audit_timeout_s)
        self.desk = AuditDesk(
            run_id=documents.run_id,
            trainer=trainer,
            validators=read_validators(settings.validators),
            timeout_s=settings.audit_timeout_s,
        )
        rollouts = config.rollouts
        batch = rollouts.groups_per_batch * rollouts.group_size
        self.expected_audits = 2 * config.max_steps * batch
        """All rollouts of the run, twice: some are refused, some are made in vain."""

    async def start(self, model_dir: Path) -> None:
        """Read the architecture. Raises EngineError."""
        await self._auditor.start(model_dir, self._documents.manifest)

    async def close(self) -> None:
        """End the process that audits."""
        await self._auditor.close()

    def verifier(self, environment: Environment, publisher: Publisher) -> Verifier:
        """A verifier of the versions that `publisher` holds."""
        run = self._documents.manifest
        audits = RemoteAuditors(
            OwnAudits(self._auditor),
            self.desk,
            run.proofs,
            term=lambda: publisher.order[0],
            chance=random.SystemRandom(),
        )
        run_id, states = self._documents.run_id, publisher.states
        return Verifier(run_id, run, environment, audits, states, Copies())
