"""A trainer: makes or resumes a run, brings up backend, environment and desk, and trains to the end."""

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from ...crypto.keys import SecretKey
from ...protocol.leases import LeaseBook
from ..config.run import RunConfig
from ..environments.environment import Environment, EnvironmentFailed
from ..evaluation.evaluator import EvalResult, EvalSampling, EvalTask, Evaluator
from ..evaluation.online import EvaluationLog, OnlineEvaluation
from ..inference.adapted import adapted
from ..inference.engine import Engine
from ..memory_plan.stages import cut_model
from ..ops import summary
from ..ops.control import PeerRow, Status
from ..ops.errors import BusyError, RankFailed, RunFailed, UsageError, first_cause
from ..ops.metrics import MetricsLog, PhaseClock
from ..storage.ledger import IssuedTicket, Ledger, QueuedSubmission
from ..storage.run_files import CHECKPOINTS, TICKET, weights_dir
from ..trainer.audits import AuditQueue, RemoteAuditors, read_validators
from ..trainer.loop import TrainerRole
from ..trainer.publisher import Publisher
from ..trainer.scheduler import LeaseScheduler
from ..trainer.state import LEASES_PER_BOOT, Progress, check_ledger
from ..trainer.submission_queue import SubmissionQueue
from ..training.backend import TrainBackend
from ..training.buffer import RolloutBuffer
from ..training.checkpoint import Checkpoints
from ..verification.auditor import LocalAudits
from ..verification.duplicates import CopyDetector
from ..verification.verifier import Verifier
from ..weights.encoders import Encoders
from . import rundir
from .factories import Factories
from .lease_settings import lease_policy
from .restarts import Restarts, until_done
from .running_node import Node
from .services import NodeServices, open_services, open_store
from .startup import Startup
from .status_view import show_training, total_bytes, trainer_rows
from .tickets import TicketIssuer

FILE = "evaluations.jsonl"


async def open_eval_tasks(
    config: RunConfig,
    parts: Factories,
    own: Environment,
    model_dir: Path,
    open_things: AsyncExitStack,
) -> list[EvalTask]:
    """Start the environments of [evaluation], closed with `open_things`; `own` is the run's, started.

    Raises UsageError.
    """
    told, sampling = config.evaluation, config.sampling
    if not told.interval:
        return []
    if not told.environments:
        return [EvalTask(own.name, own, told.prompts, told.samples)]
    found: list[EvalTask] = []
    for one in told.environments:
        environment = parts.environment(
            one, model_dir, config.seed, sampling.max_tokens, sampling.temperature
        )
        open_things.push_async_callback(environment.close)
        try:
            await environment.start()
        except EnvironmentFailed as error:
            raise UsageError(
                f"environment {one.title!r} of [evaluation] does not start: {error}"
            ) from error
        found.append(EvalTask(one.title, environment, one.prompts, one.samples, one.success))
    return found


def online_evaluation(
    config: RunConfig, evaluator: Evaluator, tasks: Sequence[EvalTask], metrics: MetricsLog
) -> OnlineEvaluation:
    """Make the evaluation beside the training of `config`."""
    return OnlineEvaluation(
        evaluator,
        tasks,
        EvaluationLog(config.run_dir / FILE),
        metrics,
        interval=config.evaluation.interval,
        last=config.max_steps,
        seed=config.seed,
    )


class Verification:
    """Made before the desk that workers talk to, which passes on what validators say."""

    def __init__(
        self, config: RunConfig, documents: rundir.RunDocuments, trainer: bytes, parts: Factories
    ) -> None:
        """`trainer` is this node's id. Raises UsageError for validators that are no node ids."""
        settings = config.verification
        self._documents = documents
        self._auditor = parts.auditor(config.engine, settings.audit_timeout_s)
        self.desk = AuditQueue(
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
            LocalAudits(self._auditor),
            self.desk,
            run.proofs,
            epoch=lambda: publisher.order[0],
            chance=random.SystemRandom(),
        )
        run_id, states = self._documents.run_id, publisher.states
        return Verifier(run_id, run, environment, audits, states, CopyDetector())


logger = logging.getLogger(__name__)

INBOX = 64
"""Submissions that may wait for verification; more are told to come again."""
FAREWELL_S = 5.0
"""How long the trainer stays so that all workers hear of the end."""
MEMBER_S = 60.0
"""A proven worker that was heard within this time, and is not connected now, may be on its way back."""
STOP_FAREWELL_S = 2.0
"""As FAREWELL_S, of a trainer that is stopped or fails."""


class TrainerNode(Node):
    """One trainer process."""

    def __init__(
        self,
        config: RunConfig,
        key: SecretKey,
        data_dir: Path,
        announce: Callable[[str], None],
        parts: Factories | None = None,
    ) -> None:
        super().__init__(config, key, data_dir, "trainer")
        self._config = config
        self._announce = announce
        self._parts = parts or Factories()
        self._tickets: TicketIssuer | None = None
        self._clock = PhaseClock()
        self._boot = 0
        self._stack: NodeServices | None = None
        self._desk: LeaseScheduler | None = None
        self._role: TrainerRole | None = None
        self._publisher: Publisher | None = None
        self._online: OnlineEvaluation | None = None
        self._environment: Environment | None = None
        self._encoders = Encoders()
        self._backend = self._parts.backend(config)

    async def run(self) -> None:
        """Train. Raises NodeError."""
        ledger = self._parts.ledger(self.data_dir / "ledger.db", fsync=self.config.fsync)
        try:
            commands = {
                "status": self._status,
                "peers": self._peers,
                "ticket": self._ticket,
                "tickets": self._list_tickets,
                "revoke": self._revoke,
            }
            await self.serve(lambda: self._work(ledger), commands, self._config.name)
        finally:
            ledger.close()

    async def _work(self, ledger: Ledger) -> None:
        if self._config.goes_on:
            check_ledger(self._make_checkpoints(), ledger)
        with self._clock.phase("start"):
            model_dir = await rundir.prepare_model(self._config, self._config.run_dir / "model")
            # The manifest names the run, and the run names the discovery topic: so it comes first.
            store = open_store(self._config, self.data_dir)
            documents = await rundir.documents(self._config, self.key, ledger, store, model_dir)
            run, own = documents.manifest, self.data_dir / "model"
            model_dir = await asyncio.to_thread(rundir.trained_model, run, store, model_dir, own)
        async with open_services(
            self._config,
            self.key,
            ledger,
            store,
            run_id=documents.run_id,
            trainer=self.key.node_id,
            role="trainer",
            parts=self._parts,
        ) as stack:
            self._stack = stack
            rundir.check_clock(run, stack.heads.latest(), int(time.time()))
            stack.keep_chunks.update(rundir.pinned(run, store))
            self._tickets = TicketIssuer(
                stack,
                self._config.run_dir / TICKET,
                ttl_s=self._config.ticket_ttl_s,
                uses=self._config.ticket_uses,
            )
            self._announce(self._tickets.current().text)
            environment = self._environment = self._make_environment(model_dir)
            metrics = MetricsLog(self._config.run_dir / "metrics.jsonl")
            # whoever is cancelled while it closes one thing closes the others all the same
            async with AsyncExitStack() as open_things:
                open_things.push_async_callback(asyncio.to_thread, self._encoders.close)
                open_things.push_async_callback(self._close_backend)
                open_things.push_async_callback(environment.close)
                open_things.callback(metrics.close)
                await self._train(stack, documents, environment, metrics, model_dir)

    def _make_environment(self, model_dir: Path) -> Environment:
        sampling = self._config.sampling
        return self._parts.environment(
            self._config.environment,
            model_dir,
            self._config.seed,
            sampling.max_tokens,
            sampling.temperature,
        )

    async def _train(
        self,
        stack: NodeServices,
        documents: rundir.RunDocuments,
        environment: Environment,
        metrics: MetricsLog,
        model_dir: Path,
    ) -> None:
        with self._clock.phase("start"):
            try:
                await asyncio.gather(environment.start(), self._backend.start(model_dir))
            except EnvironmentFailed as error:
                raise UsageError(f"the environment does not start: {error}") from error
        engine = adapted(self._parts.evaluation_engine(self._config.engine), documents.manifest)
        verification = Verification(self._config, documents, self.key.node_id, self._parts)
        async with AsyncExitStack() as open_things:
            open_things.push_async_callback(verification.close)
            open_things.push_async_callback(engine.close)
            await asyncio.gather(engine.start(model_dir), verification.start(model_dir))
            eval_tasks = await open_eval_tasks(
                self._config, self._parts, environment, model_dir, open_things
            )
            work = (stack, documents, environment, metrics, engine, verification, eval_tasks)
            await until_done(
                lambda again: self._learn(*work, again),
                Restarts(self._config.training.fsdp.max_restarts),
                newest=self._make_checkpoints().latest,
                replace=lambda: self._replace_backend(model_dir),
            )

    async def _close_backend(self) -> None:
        """The one that is there now: dead ranks may have been replaced."""
        await self._backend.close()

    async def _replace_backend(self, model_dir: Path) -> None:
        self.phase = "restarting"
        await self._backend.close()
        self._backend = self._parts.backend(self._config)
        with self._clock.phase("restart"):
            await self._backend.start(model_dir)

    async def _learn(
        self,
        stack: NodeServices,
        documents: rundir.RunDocuments,
        environment: Environment,
        metrics: MetricsLog,
        engine: Engine,
        verification: Verification,
        eval_tasks: Sequence[EvalTask],
        again: bool,
    ) -> None:
        """All of a run, or, `again`, what is left of it after the newest checkpoint."""
        backend = self._backend
        evaluator = Evaluator(
            engine,
            environment,
            EvalSampling(
                self._config.sampling.max_tokens,
                self._config.sampling.temperature,
                documents.manifest.model.stop_token_ids,
            ),
            at_once=2 * self._config.engine.max_batch,
        )
        opening = Startup(self._config, environment, backend, evaluator, self._clock, self._enter)
        role, publisher, desk = self._build(stack, documents, environment, metrics, verification)
        self._role, self._publisher, self._desk = role, publisher, desk
        online = self._online = online_evaluation(self._config, evaluator, eval_tasks, metrics)
        async with online, asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(stack.router(desk.handle).run()),
                tasks.create_task(stack.watch_fraud()),
                tasks.create_task(self._issued.keep_fresh()),
                tasks.create_task(desk.prepare_tasks()),
            ]
            gossip = stack.gossip()
            if gossip is not None:
                background.append(tasks.create_task(gossip.run()))
            step, before = await opening.first_version(
                role, publisher, stack.ledger, self._boot, restarted=again
            )
            await asyncio.to_thread(online.log.open, step)
            online.begin(step, publisher.states[step])
            self.phase = "running"
            try:
                with self._clock.phase("training"):
                    await role.run(step)
            except BaseException as error:
                if not background[0].cancelling():  # else nobody is answered any more
                    await self._tell_workers(stack, error)
                raise
            self.phase = "finishing"
            await stack.heads.end("the run has reached its last step")
            await online.finish(role.progress.step, publisher.states[role.progress.step])
            after = await opening.evaluate()
            await self._finish(documents, role, publisher, backend, desk, before, after)
            await stack.head_server.wait_told(desk.members(MEMBER_S), FAREWELL_S)
            for task in background:
                task.cancel()

    async def _tell_workers(self, stack: NodeServices, error: BaseException) -> None:
        """Tell those who watch our heads why we leave, and whether we may come back."""
        cause = first_cause(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(cause, RankFailed):
            return  # new ranks go on at once
        if isinstance(cause, RunFailed):
            await stack.heads.end(str(cause), "failed")
        else:
            await stack.heads.end("the trainer was stopped and may be resumed", "stopped")
        await stack.head_server.wait_told((), STOP_FAREWELL_S)

    def _build(
        self,
        stack: NodeServices,
        documents: rundir.RunDocuments,
        environment: Environment,
        metrics: MetricsLog,
        verification: Verification,
    ) -> tuple[TrainerRole, Publisher, LeaseScheduler]:
        boot = self._boot = stack.ledger.count_boot()
        arrivals: asyncio.Queue[QueuedSubmission] = asyncio.Queue(INBOX)
        publisher = self._make_publisher(stack, documents)
        role: TrainerRole
        desk = LeaseScheduler(
            key=self.key,
            run_id=documents.run_id,
            sealed_manifest=documents.sealed,
            book=LeaseBook(lease_policy(self._config), next_lease=boot << LEASES_PER_BOOT),
            boot=boot,
            ledger=stack.ledger,
            peers=stack.peers,
            heads=stack.head_server,
            environment=environment,
            capacity=lambda node: role.capacity(node),
            order=lambda: publisher.order,
            arrivals=arrivals,
            audits=verification.desk,
            model=cut_model(documents.manifest, stack.store, self._config.engine.max_batch),
        )
        buffer, progress = self._make_buffer(), Progress()
        inbox = SubmissionQueue(
            key=self.key,
            run_id=documents.run_id,
            ledger=stack.ledger,
            desk=desk,
            arrivals=arrivals,
            buffer=buffer,
            verifier=verification.verifier(environment, publisher),
            progress=progress,
            version=lambda: publisher.version,
            contract=documents.manifest.proofs,
            expected_audits=verification.expected_audits,
        )
        role = TrainerRole(
            config=self._config,
            ledger=stack.ledger,
            heads=stack.heads,
            desk=desk,
            inbox=inbox,
            buffer=buffer,
            progress=progress,
            backend=self._backend,
            publisher=publisher,
            checkpoints=self._make_checkpoints(),
            metrics=metrics,
            clock=self._clock,
            gossip=stack.discovery.publish if stack.discovery else _nowhere,
            published=self._evaluate,
        )
        return role, publisher, desk

    def _evaluate(self, version: int) -> None:
        """A version was published: evaluate it beside training, if it is due."""
        if self._online is not None and self._publisher is not None:
            self._online.begin(version, self._publisher.states[version])

    def _make_publisher(self, stack: NodeServices, documents: rundir.RunDocuments) -> Publisher:
        return Publisher(
            key=self.key,
            run=documents.run_id,
            book=stack.heads,
            store=stack.store,
            arrivals=stack.arrivals,
            config=self._config.weights,
            keep_states=self._config.rollouts.max_off_policy_steps + 3,
            keep_chunks=stack.keep_chunks,
            encoders=self._encoders,
        )

    def _make_buffer(self) -> RolloutBuffer:
        rollouts = self._config.rollouts
        return RolloutBuffer(
            max_off_policy_steps=rollouts.max_off_policy_steps,
            capacity=4 * rollouts.groups_per_batch,
        )

    def _make_checkpoints(self) -> Checkpoints:
        config = self._config
        return Checkpoints(
            config.run_dir / CHECKPOINTS,
            keep_last=config.checkpoint.keep_last,
            keep_interval=config.checkpoint.keep_interval,
            fsync=config.fsync,
        )

    def _enter(self, phase: str) -> None:
        self.phase = phase

    async def _finish(
        self,
        documents: rundir.RunDocuments,
        role: TrainerRole,
        publisher: Publisher,
        backend: TrainBackend,
        desk: LeaseScheduler,
        before: EvalResult,
        after: EvalResult,
    ) -> None:
        self.phase = "finishing"
        weights = weights_dir(self._config.run_dir, role.progress.step)
        with self._clock.phase("export"):
            await backend.export(weights)
        await asyncio.to_thread(
            summary.write,
            self._config,
            documents,
            progress=role.progress,
            before=before,
            after=after,
            evaluations=self._online.log.held if self._online else (),
            delta_bytes=publisher.delta_bytes,
            full_bytes=publisher.full_bytes,
            workers=desk.workers,
            reputations=desk.reputations,
            weights=weights,
            seconds=self._clock.seconds,
        )

    @property
    def _issued(self) -> TicketIssuer:
        if self._tickets is None:
            raise BusyError("the trainer has no ticket yet: ask again in a moment")
        return self._tickets

    async def _ticket(
        self, label: str | None = None, uses: int | None = None, expires_s: float | None = None
    ) -> dict[str, object]:
        """The trainer's own ticket, or, where anything is asked of it, a new one."""
        if label is None and uses is None and expires_s is None:
            return self._issued.current().shown()
        return self._issued.issue(label=label or "", uses=uses, expires_s=expires_s).shown()

    async def _list_tickets(self) -> list[dict[str, object]]:
        return [_ticket_row(one) for one in self._issued.listed()]

    async def _revoke(self, name: str) -> list[dict[str, object]]:
        return [_ticket_row(one) for one in self._issued.revoke(name)]

    async def _status(self) -> Status:
        status = self.base_status()
        status.run_name, status.max_steps = self._config.name, self._config.max_steps
        status.seconds = {name: round(value, 2) for name, value in self._clock.seconds.items()}
        stack, role, publisher, desk = self._stack, self._role, self._publisher, self._desk
        if stack is None:
            return status
        status.run = stack.run_id.hex()
        status.bytes_sent, status.bytes_received = total_bytes(stack.peers)
        status.peers = sum(1 for peer in stack.peers.rows() if peer.path() is not None)
        status.neighbours = stack.discovery.neighbours() if stack.discovery else 0
        if role is not None and publisher is not None and desk is not None:
            show_training(status, role, publisher, desk)
            status.waiting_for = role.waits_for() if self.phase == "running" else ""
        if self._environment is not None:
            rewards = role.inbox.verifier.fault if role is not None else ""
            status.environment = rewards or self._environment.status
        if self._online is not None:
            status.evaluating = self._online.version
            status.evaluations = self._online.log.latest()
        return status

    async def _peers(self) -> list[PeerRow]:
        stack, desk, publisher = self._stack, self._desk, self._publisher
        if stack is None or desk is None or publisher is None:
            return []
        return trainer_rows(stack.peers, desk, newest=publisher.version, own=self.key.node_id)


def _ticket_row(one: IssuedTicket) -> dict[str, object]:
    return {**dataclasses.asdict(one), "id": one.id.hex()}


async def _nowhere(sealed: bytes) -> None:
    """Gossip of a node without discovery."""
