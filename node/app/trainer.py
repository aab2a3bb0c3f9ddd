"""Compose a trainer: make or resume a run, start its parts, train to the end, answer the operator."""

import asyncio
import dataclasses
import logging
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path

from ...crypto.hashing import short
from ...crypto.keys import SecretKey
from ...protocol.audits import held_versions
from ...protocol.errors import RemoteProtocolError
from ...protocol.leaders import Leaders
from ...protocol.reputation import ban_test
from ...protocol.trust import RunDocuments
from ..config.node_ids import read_nodes
from ..config.run import RunConfig
from ..environments.chat import DATE, ChatFormat
from ..environments.chat_api import open_api, read_key
from ..environments.environment import Environment, EnvironmentFailed, shown_statuses
from ..errors import (
    BusyError,
    EngineError,
    RankFailed,
    RunFailed,
    SteppedDown,
    UsageError,
    first_cause,
    one_line,
)
from ..evaluation.evaluator import EvalResult, EvalSampling, EvalTask, Evaluator
from ..evaluation.online import EvaluationLog, OnlineEvaluation
from ..gpus import is_on_gpu, usable
from ..inference.adapted import adapted
from ..memory_plan.stages import cut_model
from ..models import base_weights
from ..ops.figures import BanRow, Curves, PeerRow, PublicFigures, Status, public_figures
from ..ops.metrics import MetricsLog, PhaseClock
from ..ops.monitors import WandbMonitor, group_of
from ..p2p.services import NodeServices
from ..p2p.status_view import peer_rows, show_network
from ..process.spawn import PARENT_VARIABLE, began
from ..reports import summary
from ..sft.data import MixedReader, check_mixed, open_mixed
from ..storage.ledger import Ledger
from ..storage.rollouts import RolloutFiles, StepSettings
from ..storage.run_files import (
    CHECKPOINTS,
    EVALUATIONS,
    ROLLOUTS,
    begun_on,
    is_copy,
    weights_dir,
)
from ..tasks import end_tasks
from ..trainer import run_manifest
from ..trainer.audits import AuditQueue, RemoteAuditors
from ..trainer.backups import Backups
from ..trainer.demonstrations import Demonstrations, Hints, Teacher
from ..trainer.kept_rollouts import RolloutKeeper
from ..trainer.learners import LearnerDesk, LearnerRounds
from ..trainer.lease_book import LeaseBook, TaskQueue
from ..trainer.loop import TrainerRole, newest_step, open_checkpoints, open_resume_points
from ..trainer.publisher import Publisher, no_outer_step
from ..trainer.requests import ControlHandler
from ..trainer.scheduler import LeaseDemand, LeaseScheduler, TaskSupply, lease_policy
from ..trainer.state import LEASES_PER_BOOT, Progress, check_ledger
from ..trainer.status_view import show_training, worker_rows
from ..trainer.submissions import SubmissionQueue, SubmissionReceiver
from ..trainer.succession import GIVE_S, HandOver, OtherLeaders
from ..trainer.workers import WorkerRegistry
from ..training.buffer import RolloutBuffer, buffer_capacity
from ..training.curriculum import Curriculum
from ..training.restarts import Restarts, until_done
from ..training.rounds import LearnerSettings
from ..verification.duplicates import CopyDetector
from ..verification.envelope import NoiseEnvelope, Reader
from ..verification.local_audits import LocalAudits, RoutedAuditor
from ..verification.self_calibration import SelfCalibration
from ..verification.verifier import Readings, Verifier
from ..weights.encoders import Encoders
from . import rundir
from .factories import Factories, auditing, sample_terms, sandboxed
from .issuing_node import IssuingNode
from .page_queries import PageQueries
from .services import open_store
from .startup import Startup, check_prompts, own_tasks


def eval_tasks(
    config: RunConfig, factories: Factories, own: Sequence[Environment], model_dir: Path
) -> list[EvalTask]:
    """Make the evaluations of a run with the environments of [evaluation], not started, or with its `own`."""
    evaluation, runs = config.evaluation, config.sampling
    if not evaluation.is_online:
        return []
    if not evaluation.environments:
        return own_tasks(config, own, evaluation.prompts)
    trained = {entry.id for entry in config.mixture}
    tasks: list[EvalTask] = []
    for entry in evaluation.environments:
        overrides = entry.sampling
        sampling = EvalSampling(
            overrides.max_tokens or runs.max_tokens,
            runs.temperature if overrides.temperature is None else overrides.temperature,
            top_p=overrides.top_p,
            top_k=overrides.top_k,
        )
        environment = factories.environment(
            entry, model_dir, config.seed, sampling.max_tokens, sampling.temperature
        )
        tasks.append(
            EvalTask(
                entry.title,
                environment,
                entry.prompts,
                entry.samples,
                entry.success,
                sampling,
                entry.interval,
                "eval" if entry.id in trained else "all",
            )
        )
    return tasks


async def start_evaluated(tasks: Sequence[EvalTask]) -> None:
    """Start the environments of [evaluation]. Raises UsageError with the name of one that does not start."""

    async def start(task: EvalTask) -> None:
        try:
            await task.environment.start()
        except EnvironmentFailed as error:
            raise UsageError(
                f"environment {task.name!r} of [evaluation] does not start: {error}"
            ) from error

    await asyncio.gather(*map(start, tasks))


def step_settings(config: RunConfig) -> StepSettings:
    """Collect what every step of this start is computed with."""
    return StepSettings(
        config.training.model_dump(mode="json"),
        config.max_steps,
        config.sampling.temperature,
        version("torch"),
        is_on_gpu(config.training.device, usable),
        {
            name: own.model_dump(mode="json")
            for name, own in config.training_on().items()
            if own != config.training
        },
        {
            entry.name: temperature
            for entry in config.mixture
            if (temperature := config.sampling_of(entry).temperature) != config.sampling.temperature
        },
    )


class Verification:
    """The auditor of a trainer, its queue of audits by validators, and its ban test."""

    def __init__(
        self,
        config: RunConfig,
        documents: RunDocuments,
        trainer: bytes,
        factories: Factories,
    ) -> None:
        """`trainer` is this node's id. Raises UsageError for validators that are not node ids."""
        settings = config.verification
        self._documents = documents
        self._auditor = factories.auditor(auditing(config), factories.timeouts.audit_s)
        proofs = documents.manifest.proofs
        self._reader: Reader | None = None
        if proofs.bounds == "measured" and proofs.quantization == "none":
            self._reader = factories.reader(auditing(config), factories.timeouts.audit_s)
        self._calibration: SelfCalibration | None = None
        self.queue = AuditQueue(
            run_id=documents.run_id,
            trainer=trainer,
            validators=read_nodes("verification.validators", settings.validators),
            timeout_s=factories.timeouts.audit_s,
        )
        self._references = read_nodes("verification.references", settings.references)
        largest = max(entry.group_size for entry in config.mixture)
        self._rollouts_per_step = config.rollouts.groups_per_batch * largest
        # all rollouts of the run, twice: some are refused, some are never trained
        rollouts = 2 * config.max_steps * self._rollouts_per_step
        self.test = ban_test(documents.manifest.proofs, rollouts)

    def calibration(self) -> SelfCalibration | None:
        """Make the self-calibration of this start; None where the manifest fixes the bounds."""
        proofs = self._documents.manifest.proofs
        if proofs.bounds != "measured":
            return None
        self._calibration = SelfCalibration(
            proofs,
            self._references,
            rollouts_per_step=self._rollouts_per_step,
            reads=self._reader is not None,
        )
        return self._calibration

    async def start(self, model_dir: Path) -> None:
        """Read the architecture. Raises EngineError."""
        await self._auditor.start(model_dir, self._documents.manifest)
        if self._reader is not None:
            await self._reader.start(model_dir, self._documents.manifest)

    def expect_stages(self) -> None:
        """Begin to start what audits the work of pipelines, of which there is one now."""
        if isinstance(self._auditor, RoutedAuditor):
            self._auditor.expect_stages()

    async def close(self) -> None:
        """End the processes that audit and read."""
        await self._auditor.close()
        if self._reader is not None:
            await self._reader.close()

    def verifier(
        self,
        environments: Sequence[Environment],
        publisher: Publisher,
        progress: Progress,
        leaders: Leaders,
        patience_s: Callable[[], float] = lambda: 0.0,
    ) -> Verifier:
        """Make a verifier for the versions that `publisher` holds, and work that `leaders` leased.

        An audit waits for others for `patience_s` at most; the clock of `progress` counts the time of audits.
        """
        run = self._documents.manifest
        own = LocalAudits(self._auditor, progress.clock, patience_s=patience_s)
        audits = RemoteAuditors(
            own,
            self.queue,
            epoch=lambda: publisher.order[0],
            chance=random.SystemRandom(),
        )
        readings = None
        if self._reader is not None and self._calibration is not None:
            readings = Readings(NoiseEnvelope(own, self._reader), self._calibration)
        return Verifier(
            leaders,
            run,
            environments,
            audits,
            publisher.states,
            CopyDetector(),
            readings,
            clock=progress.clock,
        )


def _retrieve(task: asyncio.Task[None]) -> None:
    """Take an error that counts once the task is awaited, and is not logged if something else failed before."""
    if not task.cancelled():
        task.exception()


async def _finished(task: asyncio.Task[None]) -> None:
    await asyncio.shield(task)


logger = logging.getLogger(__name__)

MEMBER_S = 60.0
"""A proven worker heard within this time, but not connected, may be about to come back."""


@dataclasses.dataclass(frozen=True)
class Farewell:
    """Seconds, at most, that a trainer stays to tell workers of its end."""

    finished_s: float = 5.0
    stopped_s: float = 2.0
    """After a stop or a failure."""
    returned_s: float = 30.0
    """Counted from its start, if it resumed a run: workers may first wait for an answer of the process before
    it."""

    def after(self, uptime_s: float) -> float:
        """Return the seconds to stay after the last step of a trainer that resumed a run, up for `uptime_s`."""
        return max(self.finished_s, self.returned_s - uptime_s)


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """A run's opened parts, which outlive the ranks of its learner."""

    services: NodeServices
    documents: RunDocuments
    environments: Sequence[Environment]
    metrics: MetricsLog
    evaluator: Evaluator
    verification: Verification
    eval_tasks: Sequence[EvalTask]
    evaluated: asyncio.Task[None]
    """Starts the environments of [evaluation]."""
    kept: RolloutKeeper


class TrainerNode(IssuingNode):
    """One trainer process."""

    def __init__(
        self,
        config: RunConfig,
        key: SecretKey,
        data_dir: Path,
        announce: Callable[[str], None],
        factories: Factories | None = None,
    ) -> None:
        super().__init__(config, key, data_dir, "trainer")
        queries = PageQueries(data_dir, config.run_dir, self._audited_versions)
        self.queries = {**self.queries, **queries.all()}
        self.farewell = Farewell()
        self._config = config.in_versions()
        self._announce = announce
        self._factories = factories or sandboxed(config, judged=True)
        self._clock = PhaseClock(began(int(os.environ.get(PARENT_VARIABLE) or os.getpid())))
        self.trainer_role: TrainerRole | None = None
        self._evaluation: OnlineEvaluation | None = None
        self._environments: Sequence[Environment] = ()
        self._mixed: MixedReader | None = None
        self._hints: Hints | None = None
        self._teachers: Sequence[Teacher] = ()
        self._encoders = Encoders()
        self._hand_over = HandOver(lambda: [])
        self._others: OtherLeaders | None = None
        self._backend = self._factories.backend(config)

    async def run(self) -> None:
        """Train. Raises NodeError."""
        ledger = self._factories.ledger(self.data_dir / "ledger.db", fsync=self.config.fsync)
        try:
            commands = {
                "ban": self._ban,
                "pardon": self._pardon,
                "bans": self._bans,
                "retire": self._retire,
                "handover": self._give_run,
                "public": self._public,
                **self.ticket_commands,
            }
            await self.serve(lambda: self._work(ledger), commands, self._config.name)
        finally:
            ledger.close()

    async def _work(self, ledger: Ledger) -> None:
        if self._config.goes_on:
            check_ledger(open_checkpoints(self._config), open_resume_points(self._config), ledger)
        if self._config.training.sft is not None:
            check_mixed(self._config.training.sft)
        # a cancellation while one part closes must not keep the others open
        async with AsyncExitStack() as cleanup:
            with self._clock.phase("start"):
                model_dir = await rundir.prepare_model(self._config, self._config.run_dir / "model")
                await rundir.prepare_teacher(self._config.training)
                self._config = await asyncio.to_thread(
                    *(run_manifest.dated_config, self._config, self.key.node_id, ledger, model_dir),
                    begun_on(self._config.run_dir),
                )
                environments = self._environments = self._factories.mixture(self._config, model_dir)
                for environment in environments:
                    cleanup.push_async_callback(environment.close)
                starting = asyncio.create_task(self._start_environments(environments))
                starting.add_done_callback(_retrieve)
                cleanup.push_async_callback(end_tasks, starting)
                # The manifest names the run, and the run names the discovery topic: so it comes first.
                store = open_store(self._config, self.data_dir)
                documents = await run_manifest.documents(
                    self._config, self.key, ledger, store, model_dir
                )
            async with self.open_run(
                self._config, ledger, store, documents, self._factories
            ) as services:
                self._services = services
                self._clock.reach("ticket")
                self._announce(self.issued.current().text)
                await self._lead(
                    services, self._open(services, documents, environments, starting, model_dir)
                )

    async def _lead(self, services: NodeServices, work: Coroutine[None, None, None]) -> None:
        """Do the work of the run's leader while this node is it. Raises SteppedDown, and what `work` does."""
        newest = services.heads.latest()
        goes_on = newest is not None and is_copy(self._config.run_dir)
        self._hand_over = HandOver(lambda: services.leaders.others(self.key.node_id))
        others = self._others = OtherLeaders(
            services, newest.head.term if newest and goes_on else -1
        )
        async with asyncio.TaskGroup() as tasks:
            watches = [tasks.create_task(others.run()), tasks.create_task(others.watch())]
            try:
                await work
            except Exception:  # whatever failed, that own heads count no more is the reason
                others.check()
                raise
            finally:
                for watch in watches:
                    watch.cancel()

    async def _open(
        self,
        services: NodeServices,
        documents: RunDocuments,
        environments: Sequence[Environment],
        starting: asyncio.Task[None],
        model_dir: Path,
    ) -> None:
        """Open what outlives the ranks of a learner, and train; `environments` are `starting`."""
        group = group_of(documents.manifest.name, documents.run_id)
        monitor = await asyncio.to_thread(WandbMonitor.of_run, self._config, group=group)
        metrics = MetricsLog(self._config.run_dir / "metrics.jsonl", monitor)
        async with AsyncExitStack() as cleanup:
            cleanup.push_async_callback(asyncio.to_thread, self._encoders.close)
            cleanup.push_async_callback(self._close_backend)
            cleanup.push_async_callback(asyncio.to_thread, metrics.close)
            self._teachers = await self._open_teachers(model_dir, cleanup)
            await self._train(services, documents, environments, starting, metrics, model_dir)

    async def _start_environments(self, environments: Sequence[Environment]) -> None:
        """Start all of them. Raises UsageError with the name of one that does not start."""

        async def start(name: str, environment: Environment) -> None:
            try:
                await environment.start()
            except EnvironmentFailed as error:
                raise UsageError(f"the environment {name!r} does not start: {error}") from error

        names = [entry.name for entry in self._config.mixture]
        await asyncio.gather(*map(start, names, environments))
        self._clock.reach("environments")

    async def _open_teachers(self, model_dir: Path, cleanup: AsyncExitStack) -> list[Teacher]:
        """Open the endpoints of losses, if there are any, until `cleanup`. Raises UsageError."""
        losses = {name: training.loss for name, training in self._config.training_on().items()}
        teachers: list[Teacher] = []
        for config in [loss.endpoint for loss in losses.values() if loss.endpoint]:
            taught = [name for name, loss in losses.items() if loss.endpoint == config]
            if any(teacher.teaches(taught[0]) for teacher in teachers):
                continue  # of several environments
            api = await cleanup.enter_async_context(open_api(config, read_key(config, os.environ)))
            teachers.append(Teacher(config, api, taught))
            try:
                await teachers[-1].check(await asyncio.to_thread(ChatFormat.load, model_dir))
            except EnvironmentFailed as error:
                raise UsageError(str(error)) from error
        return teachers

    async def _open_hints(
        self, environments: Sequence[Environment], model_dir: Path
    ) -> Hints | None:
        """Make what training.loss.hint needs, if it is set. Raises UsageError."""
        template = self._config.training.loss.hint
        if not template:
            return None
        try:
            date = self._config.mixture[0].chat_template_kwargs.get(DATE)
            chat = await asyncio.to_thread(
                ChatFormat.load, model_dir, defaults={} if date is None else {DATE: date}
            )
        except EnvironmentFailed as error:
            raise UsageError(str(error)) from error
        losses = [training.loss for training in self._config.training_on().values()]
        names = [entry.name for entry in self._config.mixture]
        hinted = {
            name: environment
            for name, environment, loss in zip(names, environments, losses, strict=True)
            if loss.hint
        }
        hints = Hints(template, chat, hinted)
        await hints.check()
        return hints

    async def _train(
        self,
        services: NodeServices,
        documents: RunDocuments,
        environments: Sequence[Environment],
        starting: asyncio.Task[None],
        metrics: MetricsLog,
        model_dir: Path,
    ) -> None:
        manifest, store = documents.manifest, services.store
        model_dir = rundir.trained_model(manifest, store, model_dir, self.data_dir / "model")
        verification = Verification(self._config, documents, self.key.node_id, self._factories)
        async with AsyncExitStack() as cleanup:
            cleanup.push_async_callback(verification.close)
            base = asyncio.create_task(
                asyncio.to_thread(base_weights.write, manifest, store, model_dir)
            )
            engine = adapted(self._factories.evaluation_engine(self._config.engine), manifest, base)
            cleanup.push_async_callback(engine.close)

            tasks = eval_tasks(self._config, self._factories, environments, model_dir)
            evaluated = tasks if self._config.evaluation.environments else []
            for task in evaluated:
                cleanup.push_async_callback(task.environment.close)

            async def start_auditor() -> None:
                await base
                await verification.start(model_dir)

            async def start_learner() -> None:
                await base
                await self._start_backend(model_dir)

            async def start_evaluation() -> None:
                await engine.start(model_dir)
                self._clock.reach("evaluation engine")

            async def check_environments() -> None:
                await starting
                names = [entry.name for entry in self._config.mixture]
                replies = [
                    self._config.sampling_of(entry).max_tokens for entry in self._config.mixture
                ]
                longest = manifest.limits.max_model_len
                await check_prompts(names, environments, longest, replies)

            # they start side by side, and workers can be admitted meanwhile
            parts = [start_auditor(), start_learner(), check_environments()]
            if self._config.evaluates:
                parts.append(start_evaluation())
            started = [asyncio.create_task(part) for part in parts]
            beside = asyncio.create_task(start_evaluated(evaluated))
            for task in (base, *started, beside):
                cleanup.push_async_callback(end_tasks, task)
                task.add_done_callback(_retrieve)
            with self._clock.phase("start"):
                self._mixed = await asyncio.to_thread(
                    open_mixed, self._config, model_dir, self._config.run_dir / "data"
                )
            self._hints = await self._open_hints(environments, model_dir)
            evaluator = Evaluator(
                engine,
                EvalSampling(
                    self._config.sampling.max_tokens,
                    self._config.sampling.temperature,
                    manifest.model.stop_token_ids,
                ),
                at_once=2 * self._config.engine.max_batch,
                longest=manifest.limits.max_model_len,
            )
            keeper = RolloutKeeper(
                RolloutFiles(self._config.run_dir / ROLLOUTS, fsync=self._config.fsync),
                self._config.rollouts.keep,
                environments=[contract.name for contract in documents.manifest.environments],
                model_dir=model_dir,
                settings=step_settings(self._config),
            )
            cleanup.push_async_callback(asyncio.to_thread, keeper.close)
            run = TrainingRun(
                services,
                documents,
                environments,
                metrics,
                evaluator,
                verification,
                tasks,
                beside,
                keeper,
            )
            await until_done(
                lambda again: self._learn(
                    run,
                    self._backend.start(model_dir) if again else asyncio.gather(*started),
                    again,
                ),
                Restarts(),
                newest=lambda: newest_step(self._config),
                replace=self._replace_backend,
            )

    async def _close_backend(self) -> None:
        """Close the current backend: dead ranks may have been replaced."""
        await self._backend.close()

    async def _replace_backend(self) -> None:
        self.phase = "restarting"
        await self._backend.close()
        self._backend = self._factories.backend(self._config)

    async def _start_backend(self, model_dir: Path) -> None:
        """Start the first backend. Raises EngineError, also where ranks die: others would die, too."""
        try:
            await self._backend.start(model_dir)
        except RankFailed as error:
            raise EngineError(str(error)) from error
        self._clock.reach("learner")

    async def _learn(self, run: TrainingRun, started: Awaitable[object], again: bool) -> None:
        """Do all of `run` or, with `again`, the rest of it after the newest checkpoint.

        `started` ends when the backend has started and, the first time, all else that a first version needs.
        """
        config, services, documents = self._config, run.services, run.documents
        evaluation = self._evaluation = OnlineEvaluation(
            run.evaluator,
            run.eval_tasks,
            EvaluationLog(config.run_dir / EVALUATIONS),
            run.metrics,
            interval=config.evaluation.interval,
            last=config.max_steps,
            seed=config.seed,
        )
        boot = services.ledger.count_boot()
        desk = self._desk(run)
        backend = self._backend
        rounds: LearnerRounds | None = None
        if desk is not None:
            directory = config.run_dir / CHECKPOINTS
            backend = rounds = LearnerRounds(
                self._backend,
                desk,
                config.learners,
                directory,
                own=self.key.node_id,
                term=lambda: publisher.order[0],
            )
        publisher = Publisher(
            services,
            keep_states=held_versions(config.rollouts.max_off_policy_steps),
            encoders=self._encoders,
            outer_step=no_outer_step if rounds is None else rounds.outer_step,
        )
        curricula = {
            name: Curriculum(training, environment=name, seed=config.seed)
            for name, training in config.training_on().items()
        }
        registry = WorkerRegistry(
            services,
            documents.sealed,
            LeaseBook(
                lease_policy(config, documents.manifest.routes),
                next_lease=boot << LEASES_PER_BOOT,
                tasks=[
                    TaskQueue(draw=curriculum.draw if curriculum.chooses else None)
                    for curriculum in curricula.values()
                ],
            ),
            run.verification.queue,
            cut_model(documents.manifest, services.store, config.engine.max_batch),
            calibration=run.verification.calibration(),
            environments=documents.manifest.environments,
        )
        registry.pipelines.expect(run.verification.expect_stages)
        buffer = RolloutBuffer(
            max_off_policy_steps=config.rollouts.max_off_policy_steps,
            capacity=buffer_capacity(
                config.rollouts.max_off_policy_steps, config.rollouts.groups_per_batch
            ),
        )
        progress = Progress(clock=self._clock)
        demand = LeaseDemand(config, registry, buffer, progress)
        longest = documents.manifest.limits.max_model_len
        tasks = [
            TaskSupply(environment, registry.book, at, longest=longest)
            for at, environment in enumerate(run.environments)
        ]
        scheduler = LeaseScheduler(registry, tasks, publisher, demand)
        submissions = SubmissionQueue(
            scheduler,
            run.verification.verifier(
                run.environments,
                publisher,
                progress,
                services.leaders,
                # longer, and the trainer would often wait for them: it does as soon as a step is done
                lambda: registry.book.lead.step_s / 2 if progress.training else 0.0,
            ),
            documents.manifest.proofs,
            run.verification.test,
            buffer,
            progress,
            run.kept,
            curricula,
        )
        role = self.trainer_role = TrainerRole(
            config,
            scheduler,
            submissions,
            backend,
            publisher,
            run.metrics,
            evaluation,
            Demonstrations(self._mixed, self._hints, self._teachers),
        )
        backups = Backups(
            config.run_dir,
            checkpoints=role.checkpoints,
            resume_points=role.resume_points,
            ledger=services.ledger,
            store=services.store,
            hand_over=self._hand_over,
            announced=lambda: services.heads.order()[1],
        )
        receiver = SubmissionReceiver(scheduler, submissions, boot)
        handler = ControlHandler(scheduler, receiver, backups, self._hand_over, desk)
        startup = Startup(
            config, run.environments, backend, run.evaluator, self._clock, self._enter
        )
        async with AsyncExitStack() as cleanup, evaluation, asyncio.TaskGroup() as group:
            if desk is not None:
                cleanup.push_async_callback(desk.close)
            background = [
                group.create_task(services.router(handler.handle, gate=registry.gate).run()),
                group.create_task(services.watch_fraud()),
                group.create_task(self.issued.keep_fresh()),
            ]
            gossip = services.gossip()
            if gossip is not None:
                background.append(group.create_task(gossip.run()))
            try:
                with self._clock.phase("restart" if again else "start"):
                    await started
                    if self._others is not None:
                        await self._others.ask()
                background += [group.create_task(supply.run(scheduler)) for supply in tasks]
                background.append(group.create_task(_finished(run.evaluated)))
                step = await startup.first_version(role, services.ledger, boot, restarted=again)
                await asyncio.to_thread(evaluation.log.open, step)
                # beside training, and after the evaluation whose rollouts it shares
                evaluation.begin(step, publisher.states[step])
                before = group.create_task(
                    startup.evaluate_before(services.ledger, step, publisher.states[step])
                )
                self.phase = "running"
                with self._clock.phase("training"):
                    await self._until_handed_over(role.run(step))
            except BaseException as error:
                if not background[0].cancelling():  # otherwise no request is answered any more
                    await self._tell_workers(services, registry.left(), error)
                raise
            self.phase = "finishing"
            await services.heads.end("the run has reached its last step")
            await evaluation.finish(progress.step, publisher.states[progress.step])
            after = await startup.evaluate_after(publisher.states[progress.step])
            await self._finish(documents, role, await before, after)
            await services.head_server.wait_told(
                registry.members(MEMBER_S) | registry.joining(),
                registry.left(),
                self.farewell.after(registry.uptime_s if step else math.inf),
            )
            for task in background:
                task.cancel()

    def _desk(self, run: TrainingRun) -> LearnerDesk | None:
        """Make the desk of the run's learners; None if this node trains alone."""
        contract, config = run.documents.manifest.learners, self._config
        if contract is None:
            return None
        settings = LearnerSettings(
            config.training.model_dump_json(),
            config.optimizer_steps,
            config.seed,
            config.sampling.temperature,
            sample_terms(config),
        )
        return LearnerDesk(run.services, contract, settings)

    async def _until_handed_over(self, training: Coroutine[None, None, None]) -> None:
        """Train until the end, or until the run is handed over. Raises SteppedDown then."""
        hand_over = self._hand_over
        async with asyncio.TaskGroup() as tasks:
            task, wanted = tasks.create_task(training), tasks.create_task(hand_over.wanted.wait())
            await asyncio.wait({task, wanted}, return_when=asyncio.FIRST_COMPLETED)
            wanted.cancel()
            if task.done():
                return
            self._enter("handing over", f"to {short(hand_over.successor)}")
            await end_tasks(task)  # which writes a checkpoint
            hand_over.ready = True
            await asyncio.wait_for(hand_over.taken.wait(), GIVE_S)
            await asyncio.sleep(self.farewell.stopped_s)  # for the answers that say so
        raise SteppedDown(f"the run was handed over to {hand_over.successor.hex()}")

    async def _tell_workers(
        self, services: NodeServices, left: set[bytes], error: BaseException
    ) -> None:
        """Tell workers why the trainer ends, and whether it may come back."""
        cause = first_cause(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(cause, RankFailed | SteppedDown):
            return  # new ranks go on at once, or another node does
        newest, own = services.heads.latest(), self.key.node_id
        if isinstance(cause, RunFailed):
            await services.heads.end(str(cause), "failed")
        elif newest is not None and newest.signer != own:
            return  # another node leads the run
        elif services.leaders.others(own) and not isinstance(cause, asyncio.CancelledError):
            return  # to a standby this is a loss: it goes on
        else:
            await services.heads.end("the trainer was stopped and may be resumed", "stopped")
        await services.head_server.wait_told((), left, self.farewell.stopped_s)

    def _enter(self, phase: str, detail: str = "") -> None:
        self.phase, self.detail = phase, detail

    async def _finish(
        self,
        documents: RunDocuments,
        role: TrainerRole,
        before: EvalResult,
        after: EvalResult,
    ) -> None:
        """Export the last weights and write the summary."""
        self.phase = "finishing"
        weights = weights_dir(self._config.run_dir, role.progress.step)
        with self._clock.phase("export"):
            await self._backend.export(weights)
        registry = role.scheduler.registry
        await asyncio.to_thread(
            summary.write,
            self._config,
            documents,
            progress=role.progress,
            before=before,
            after=after,
            evaluations=self._evaluation.log.held if self._evaluation else (),
            delta_bytes=role.publisher.delta_bytes,
            full_bytes=role.publisher.full_bytes,
            workers=registry.workers,
            reputations=registry.reputations,
            weights=weights,
            seconds=self._clock.seconds,
        )

    async def _status(self) -> Status:
        status = self.base_status()
        status.run_name, status.max_steps = self._config.name, self._config.max_steps
        status.seconds = {name: round(value, 2) for name, value in self._clock.seconds.items()}
        role = self.trainer_role
        if self._services is None:
            return status
        show_network(status, self._services)
        if role is not None:
            show_training(status, role)
            status.waiting_for = role.waits_for() if self.phase == "running" else ""
        rewards = role.submissions.verifier.fault if role is not None else ""
        status.environment = rewards or shown_statuses(self._environments)
        if self._evaluation is not None:
            status.evaluating = self._evaluation.version
            status.evaluations = self._evaluation.log.latest()
        return status

    async def _give_run(self) -> dict[str, object]:
        if self.phase != "running":
            raise BusyError("no step can be taken yet: ask again in a moment")
        successor = await self._hand_over.give(time.monotonic())
        return {"node": successor.hex()}

    async def _ban(self, name: str, why: str = "", lasts_s: float | None = None) -> BanRow:
        return self._registry().ban(name, why, lasts_s)

    async def _pardon(self, name: str) -> dict[str, object]:
        return {"node": self._registry().pardon(name).hex()}

    async def _bans(self) -> list[BanRow]:
        return self._registry().bans()

    async def _public(self) -> PublicFigures:
        return public_figures(await self.figures(), self.curves())

    async def _retire(self, sealed: str) -> dict[str, object]:
        registry = self._registry()
        try:
            return {"node": (await registry.retire(bytes.fromhex(sealed))).hex()}
        except (ValueError, RemoteProtocolError) as error:
            raise UsageError(f"this retirement is not taken: {one_line(error)}") from error

    def _registry(self) -> WorkerRegistry:
        """Return the workers of the run. Raises BusyError before it has begun."""
        if self.trainer_role is None:
            raise BusyError("the run has not begun: ask again in a moment")
        return self.trainer_role.scheduler.registry

    def _audited_versions(self) -> Mapping[str, int]:
        return {} if self.trainer_role is None else dict(self.trainer_role.progress.audited)

    def curves(self) -> Curves:
        """Return the curves of the run so far."""
        return Curves() if self.trainer_role is None else self.trainer_role.curves.curves()

    async def peers(self) -> list[PeerRow]:
        """Make a row for each known peer."""
        if self._services is None:
            return []
        if self.trainer_role is None:
            return await peer_rows(self._services)
        return await worker_rows(self._services, self.trainer_role.scheduler)
