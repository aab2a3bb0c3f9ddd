"""A worker: a joined node with engine and environment, that works until the run ends."""

import asyncio
import json
from pathlib import Path

import msgspec

from ..crypto.keys import SecretKey
from . import rundir
from .config import EnvironmentConfig, JoinConfig
from .control import Status
from .engines.adapted import adapted
from .engines.concurrency import Concurrency
from .engines.engine import Engine
from .environments.environment import Environment, EnvironmentFailed
from .errors import NodeError, UsageError
from .joined_node import Joined, JoinedNode
from .looplag import LoopLag
from .parts import Parts
from .roles.inference import InferenceRole
from .roles.verdicts import VerdictBox


class WorkerNode(JoinedNode):
    """One inference worker process."""

    def __init__(
        self, config: JoinConfig, key: SecretKey, data_dir: Path, parts: Parts | None = None
    ) -> None:
        super().__init__(config, key, data_dir, parts)
        self._role: InferenceRole | None = None
        self._lag = LoopLag()

    async def _take_part(self, joined: Joined) -> None:
        run = joined.documents.manifest
        engine = adapted(self._parts.engine(self._config.engine), run)
        environment = self._environment(joined.documents, joined.model_dir)
        try:
            await asyncio.gather(
                engine.start(joined.model_dir, fingerprint=run.proofs.fingerprint),
                environment.start(),
            )
            role = self._role = self._build(joined, engine, environment)
            await self._follow_while(joined, lambda: self._measured(role))
        except EnvironmentFailed as error:
            raise NodeError(f"the environment does not start: {error}") from error
        finally:
            if self._role is not None and not joined.stack.heads.ended:
                await self._role.leave()
            await environment.close()
            await engine.close()
            self._write_last_status()

    async def _measured(self, role: InferenceRole) -> None:
        async with asyncio.TaskGroup() as tasks:
            lag = tasks.create_task(self._lag.run())
            await role.run()
            lag.cancel()

    def _environment(self, documents: rundir.RunDocuments, model_dir: Path) -> Environment:
        contract = documents.manifest.environment
        try:
            config = EnvironmentConfig.model_validate(json.loads(contract.config))
        except ValueError as error:
            raise UsageError(
                f"this run's environment needs another version of us: {error}"
            ) from error
        sampling = documents.manifest.sampling
        return self._parts.environment(
            config, model_dir, contract.seed, sampling.max_tokens, sampling.temperature
        )

    def _build(self, joined: Joined, engine: Engine, environment: Environment) -> InferenceRole:
        stack, documents = joined.stack, joined.documents
        verdicts = VerdictBox(
            node=self.key.node_id,
            run_id=documents.run_id,
            trainer=stack.trainer,
            links=stack.links,
            ledger=stack.ledger,
            explain=f"primerl-node explain --data-dir {self.data_dir}",
        )
        return InferenceRole(
            key=self.key,
            run_id=documents.run_id,
            run=documents.manifest,
            links=stack.links,
            book=stack.heads,
            fetcher=stack.fetcher,
            catchup=self._make_catchup(joined, engine),
            engine=engine,
            engine_name=self._config.engine.type,
            environment=environment,
            ledger=stack.ledger,
            verdicts=verdicts,
            upstreams=joined.upstreams,
            leases=self._config.leases,
            concurrency=self._concurrency(),
        )

    def _concurrency(self) -> Concurrency:
        config = self._config.engine
        return Concurrency(
            config.concurrency,
            max_batch=config.max_batch * config.dp,
            max_model_len=config.max_model_len,
        )

    async def _status(self) -> Status:
        status = await super()._status()
        if self._role is not None:
            status.leases = self._role.held
            status.accepted = self._role.verdicts.accepted
            status.rejected = dict(self._role.verdicts.rejected)
            status.engine = self._role.engine_row()
            status.event_loop_lag = self._lag.read()
        return status

    def _write_last_status(self) -> None:
        """What this node did, for after it is gone."""
        if self._role is None:
            return
        last = {
            "accepted": self._role.verdicts.accepted,
            "rejected": dict(self._role.verdicts.rejected),
            "chunk_bytes_by_source": self._role.chunk_sources(),
            "engine": msgspec.structs.asdict(self._role.engine_row()),
            "event_loop_lag": self._lag.read(),
            "versions_loaded": self._catchup.versions_loaded if self._catchup else 0,
        }
        (self.data_dir / "last_status.json").write_text(json.dumps(last))
