"""A worker: a joined node with engine and environment, that works until the run ends."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...crypto.keys import SecretKey
from ...protocol.manifests import RunManifest
from ..config.run import EngineConfig, EnvironmentConfig, JoinConfig
from ..environments.allowed import check_allowed, options_of
from ..environments.environment import Environment, EnvironmentFailed, shown_statuses
from ..errors import EngineError, NodeError, StorageError, UsageError
from ..inference.adapted import adapted
from ..inference.engine import Engine
from ..inference.hosted import HostedEngine
from ..inference.numerics import config_for_run
from ..memory_plan.memory import replicated
from ..memory_plan.shape import read_shape
from ..memory_plan.stages import cannot_cut, cannot_hold
from ..models.json_files import read_json
from ..ops.figures import Status
from ..ops.strict_json import to_json
from ..p2p.connections import Handler, no_pipelines
from ..p2p.services import NodeServices
from ..pipeline.acceptor import LinkAcceptor
from ..storage import run_files
from ..verification.self_calibration import bounds_row
from ..weights.payload import TensorShare, everything
from ..worker.loop import InferenceRole, stay_paused
from ..worker.pipelined_engine import Order
from ..worker.verdicts import VerdictLog
from ..worker.weight_sync import WeightSync, no_goal
from .factories import Factories
from .peer_node import JoinedRun, PeerNode
from .stage_supervisor import StageSupervisor

logger = logging.getLogger(__name__)


class WorkerNode(PeerNode):
    """One inference worker process."""

    def __init__(
        self, config: JoinConfig, key: SecretKey, data_dir: Path, factories: Factories | None = None
    ) -> None:
        super().__init__(config, key, data_dir, factories)
        self._role: InferenceRole | None = None
        self._verdicts: VerdictLog | None = None
        """Verdicts of all stages that this node ever holds."""
        self._allowed: dict[int, EnvironmentConfig] = {}
        """Environments of the run that may be played here, by place."""
        self._environments: dict[int, Environment] = {}
        self._acceptor: LinkAcceptor | None = None
        self._stages: StageSupervisor | None = None

    async def _take_part(self, joined: JoinedRun) -> None:
        try:
            await self._work_together(joined)
        except BaseException:  # however the work ends, its record is kept
            try:
                self._write_last_status()
            except StorageError as error:  # the operator needs the first error, not this one
                logger.warning("this node's record of its work is not kept: %s", error)
            raise
        self._write_last_status()

    async def _work_together(self, joined: JoinedRun) -> None:
        """Work as a whole engine or, where the model does not fit here, as a stage."""
        run = joined.documents.manifest
        config, longest = self._config.engine, served_length(self._config.engine, run)
        if longest < run.limits.max_model_len:
            logger.warning(
                "engine.max_model_len is %d, and a sequence of this run may have %d: replies that it cuts "
                "short are refused (bad_termination), so raise it or leave it out",
                longest,
                run.limits.max_model_len,
            )
        config = config_for_run(config.model_copy(update={"max_model_len": longest}), run)
        if await self._is_split(joined, config):
            self.limits.free(
                "this node holds a stage of a pipeline, whose other nodes wait for it: it cannot be paused, "
                "`primerl-node stop` takes it out"
            )
            stages = self._stages = self._make_stages(joined)
            await self._follow_while(joined, stages.run)
            return
        config = await asyncio.to_thread(replicated, config, joined.model_dir)
        hosted = self._factories.engine(config)
        if isinstance(hosted, HostedEngine):
            hosted.rest_while(lambda: bool(self.limits.why))
        engine = adapted(hosted, run, joined.base)

        async def work() -> None:
            # an engine takes the GPU
            await stay_paused(joined.services)
            await self.infer(joined, engine, config, everything)

        await self._follow_while(joined, work)

    # -- pipelines -----------------------------------------------------------------------------------

    def _pipelines(self, services: NodeServices) -> Handler:
        if self._config.pp.mode == "off":
            return no_pipelines
        self._acceptor = LinkAcceptor(self.key.node_id, services.run_id, services.trainer)
        return self._acceptor.handle

    async def _is_split(self, joined: JoinedRun, engine: EngineConfig) -> bool:
        """Return whether to share the model with others. Raises UsageError if that is wanted and impossible."""
        config, run = self._config, joined.documents.manifest
        if config.pp.wanted:
            if run.adapters is None:
                return True
            raise UsageError("a model with adapters cannot be shared by nodes: remove pp")
        fixed = config.pp.mode == "off"
        # stages round what they send, or cut it elsewhere, do not quantize weights, and keep no keys and values
        proofs = run.proofs
        alone = proofs.vllm_alone or proofs.quantization != "none"
        if fixed or alone or run.adapters is not None or engine.replicas * engine.pp > 1:
            return False
        try:
            shape = read_shape(read_json(joined.model_dir / "config.json"))
            uncut = cannot_cut(shape, engine.type)
            why = await asyncio.to_thread(
                cannot_hold, engine, shape, fingerprint=run.proofs.fingerprint
            )
        except EngineError as error:
            logger.info("whether the model fits is not known: %s", error)
            return False
        if why and uncut:
            logger.warning(
                "the model may not fit here: %s; no other node can hold a part of it: %s",
                why,
                uncut,
            )
        elif why:
            logger.warning("this node offers to hold a part of the model: %s", why)
        return bool(why) and not uncut

    def _make_stages(self, joined: JoinedRun) -> StageSupervisor:
        assert self._acceptor is not None  # made with the router, before anything is joined
        return StageSupervisor(
            self._config, self.data_dir, self._factories, joined, self._acceptor, self
        )

    # -- what a pipeline stage asks of its node ------------------------------------------------------

    @property
    def writing(self) -> Order | None:
        """The (epoch, version) that is being loaded."""
        return self._weights.writing if self._weights else None

    async def infer(
        self, joined: JoinedRun, engine: Engine, config: EngineConfig, share: TensorShare
    ) -> None:
        """Run an inference worker with that engine until the run ends.

        The newest version is fetched and proved while the engine starts.
        """
        run, ready = joined.documents.manifest, asyncio.Event()
        environments = self._make_environments(run, joined.model_dir)
        weights = self._make_weights(joined, engine, share=share, ready=ready)
        self._obstacle = "starting the engine and the environments"
        try:
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(weights.run())
                _, self._environments = await asyncio.gather(
                    engine.start(joined.model_dir, fingerprint=run.proofs.fingerprint),
                    start_environments(run, environments),
                )
                self._obstacle = ""
                ready.set()
                await joined.services.heads.wake()
                role = self._role = self._build(joined, weights, engine, config)
                await role.run()
                following.cancel()
        finally:
            # a worker that only changes its stage in a pipeline does not leave the run
            if self._stages is None and not joined.services.heads.ended:
                await joined.services.say_goodbye()
            for environment in environments.values():
                await environment.close()
            await engine.close()

    def stage_weights(self, joined: JoinedRun, engine: Engine, share: TensorShare) -> WeightSync:
        """Keep a later stage's share of the weights at the newest version."""
        return self._make_weights(joined, engine, share=share, goal=no_goal)

    def enter(self, phase: str) -> None:
        """Begin a phase, which the status names."""
        self.phase = phase

    def _check_environments(self, run: RunManifest) -> None:
        allow, refused = self._config.environments.allow, list[UsageError]()
        for number, contract in enumerate(run.environments):
            try:
                check_allowed(contract, allow, self.data_dir)
                self._allowed[number] = options_of(contract)
            except UsageError as error:
                refused.append(error)
        if not self._allowed:
            raise refused[0]
        for error in refused:
            logger.warning("an environment is not played here: %s", error)

    def _make_environments(self, run: RunManifest, model_dir: Path) -> dict[int, Environment]:
        return {
            number: self._factories.environment(
                options,
                model_dir,
                run.environments[number].seed,
                run.environments[number].sampling.max_tokens,
                run.environments[number].sampling.temperature,
            )
            for number, options in self._allowed.items()
        }

    def _build(
        self,
        joined: JoinedRun,
        weights: WeightSync,
        engine: Engine,
        config: EngineConfig,
    ) -> InferenceRole:
        if self._verdicts is None:
            explain = f"primerl-node explain --data-dir {self.data_dir}"
            self._verdicts = VerdictLog(joined.services, explain)
        return InferenceRole(
            joined.services,
            joined.documents.manifest,
            weights,
            engine,
            config,
            self._environments,
            self._verdicts,
        )

    def _held(self) -> int:
        return self._role.held if self._role is not None else 0

    def _hand_back(self) -> int:
        return self._role.hand_back("paused by its owner") if self._role is not None else 0

    async def _succeeded(self) -> None:
        if self._role is not None:
            await self._role.succeeded()

    def _waits_for(self) -> str:
        stages, role = self._stages, self._role
        if stages is not None and stages.waits_for:
            return stages.waits_for
        if (
            self._obstacle
            or self.limits.why
            or role is None
            or (stages is not None and not stages.leads)
        ):
            return super()._waits_for()
        return role.waits_for

    async def _status(self) -> Status:
        status = await super()._status()
        if (
            verdicts := self._verdicts
        ) is not None:  # also where it led a pipeline and does no more
            status.trusts = verdicts.trusts()
            status.trust = min(status.trusts.values(), default=None)
            status.accepted, status.rejected = verdicts.accepted, dict(verdicts.rejected)
            status.bounds = [bounds_row(verdicts.bounds)] if verdicts.bounds else []
        if self._role is not None and (self._stages is None or self._stages.leads):
            status.leases = self._role.held
            status.engine = self._role.engine_row()
        status.environment = shown_statuses(self._environments.values())
        if self._stages is not None:
            status.stage = self._stages.row()
            if self._stages.row() is None:
                status.phase = self.phase
        return status

    def _write_last_status(self) -> None:
        """Write the final status of this node to its directory. Raises StorageError."""
        if self._role is None:
            return
        last = {
            "accepted": self._role.verdicts.accepted,
            "rejected": dict(self._role.verdicts.rejected),
            "chunk_bytes_by_source": self._role.chunk_sources(),
            "engine": msgspec.structs.asdict(self._role.engine_row()),
            "event_loop_lag": self.lag.read(),
            "versions_loaded": self._weights.versions_loaded if self._weights else 0,
        }
        run_files.write(self.data_dir / "last_status.json", to_json(last))


async def start_environments(
    run: RunManifest, environments: Mapping[int, Environment]
) -> dict[int, Environment]:
    """Start environments of a run, by place, side by side; return those that work.

    Raises NodeError where none does.
    """
    outcomes = await asyncio.gather(
        *(environment.start() for environment in environments.values()), return_exceptions=True
    )
    works, faults = dict[int, Environment](), list[str]()
    for (number, environment), outcome in zip(environments.items(), outcomes, strict=True):
        if outcome is None:
            works[number] = environment
        elif isinstance(outcome, EnvironmentFailed):
            faults.append(
                f"the environment {run.environments[number].name!r} does not start: {outcome}"
            )
        else:
            raise outcome
    if not works:
        raise NodeError("; ".join(faults))
    for fault in faults:
        logger.error("%s: this node goes on with its other environments", fault)
    return works


def served_length(config: EngineConfig, run: RunManifest) -> int:
    """Compute the longest sequence that a worker's engine serves: that of the run's manifest.

    Fewer tokens if engine.max_model_len was set to fewer.
    """
    longest = run.limits.max_model_len
    if "max_model_len" in config.model_fields_set:
        longest = min(longest, config.max_model_len)
    return longest
