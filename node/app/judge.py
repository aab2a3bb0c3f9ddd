"""`primerl-node judge`: serve a frozen model whose replies workers generate, each verified before it is given.

It is a run of its own: with a manifest that fixes model and sampling, tickets, leases, proofs and verdicts, and
one policy version that never changes. Its caller is an HTTP client, such as the trainer of another run.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...crypto.hashing import short
from ...crypto.keys import SecretKey
from ...protocol.leases import LEASED_PROMPTS
from ...protocol.manifests import RunManifest
from ...protocol.reputation import Reputation, ReputationSnapshot
from ...protocol.trust import RunDocuments
from ..api.completions import CHAT, EngineRoutes
from ..api.server import ApiError, Body, EventStream, HttpServer, Served, serving
from ..config.judge import JudgeRunConfig
from ..config.paths import expand_home
from ..config.run import (
    EnvironmentConfig,
    EvaluationConfig,
    KeepConfig,
    RolloutsConfig,
    RunConfig,
    SamplingConfig,
)
from ..config.training import TrainingConfig
from ..environments.chat import ChatFormat, dated
from ..environments.environment import EnvironmentFailed
from ..environments.leased_prompts import LeasedPrompts
from ..errors import UsageError
from ..evaluation.candidates import candidate, read
from ..memory_plan.stages import cut_model
from ..models.model_files import vocab_size
from ..ops.figures import PeerRow, Status
from ..p2p.services import NodeServices
from ..p2p.status_view import peer_rows, show_network
from ..storage.ledger import Ledger, readable
from ..storage.run_files import CONFIG, begun_on, check_kinds, claim, write_private
from ..trainer import run_manifest
from ..trainer.lease_book import LeaseBook
from ..trainer.leased_replies import (
    LeasedReplies,
    PromptDemand,
    PromptQueue,
    PromptSupply,
    ReplyQueue,
)
from ..trainer.publisher import Publisher, PublisherLimits
from ..trainer.requests import ControlHandler
from ..trainer.scheduler import LeaseScheduler, lease_policy
from ..trainer.state import LEASES_PER_BOOT, Progress
from ..trainer.status_view import show_leases, worker_rows
from ..trainer.submissions import SubmissionReceiver
from ..trainer.workers import WorkerRegistry
from ..training.backend import Snapshot
from ..weights.replica import prove
from ..weights.state import State
from . import rundir
from .factories import Factories
from .issuing_node import IssuingNode
from .services import open_store
from .trainer import Verification

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

AT_ONCE = 64
"""Prompts that newcomers may hold together while no proven worker is there; half as many beside one."""
REPLIES = 1_000_000
"""Number of replies over which FALSE_BANS of verification/bounds.py holds, about."""
LEASE_S = 120.0
"""After this a prompt goes to another worker."""
LEASES_PER_WORKER = 32
"""Most prompts that one worker may hold at a time; a newcomer gets one."""
FOR_EVER_S = 10 * 365 * 86400.0
LOOK_S = 0.5
"""Between two looks for leases that expired."""
BODIES_KEPT = 10_000
"""Newest submissions whose bytes stay in the ledger: their prompts, replies and proofs can be checked again."""
FAREWELL_S = 2.0
DIGEST_SHOWN = 16


@dataclass(frozen=True)
class JudgeAddress:
    """How to use a judge that is up."""

    ticket: str
    url: str
    model: str
    """The name that requests say: api.served_name, else one with the digest of its weights, so that no other
    judge answers them."""


def as_run(config: JudgeRunConfig) -> RunConfig:
    """Make the config of the run that a judge is: one environment of leased prompts, temperature 0."""
    shared = ("name", "output_dir", "seed", "data_dir", "fsync", "network", "engine", "log")
    shared = (*shared, "model", "verification")
    return RunConfig(
        **{name: getattr(config, name) for name in shared},
        max_steps=REPLIES // AT_ONCE,
        weights=config.weights,
        environment=EnvironmentConfig(id=LEASED_PROMPTS, max_turns=1),
        # a run that trains may not say 0
        sampling=SamplingConfig(max_tokens=config.max_tokens).model_copy(
            update={"temperature": 0.0}
        ),
        rollouts=RolloutsConfig(
            group_size=1,
            groups_per_batch=AT_ONCE,
            groups_per_lease=1,
            max_off_policy_steps=0,
            lease_timeout_s=LEASE_S,
            leases_per_worker=LEASES_PER_WORKER,
            keep=KeepConfig(share=0.0),
        ),
        training=TrainingConfig(seq_len=config.engine.max_model_len),
        evaluation=EvaluationConfig(prompts=0),
    )


class JudgeRoutes:
    """Chats, drawn as the judge's contract says; a request for other sampling is refused."""

    paths: tuple[str, ...] = (CHAT,)

    def __init__(self, routes: EngineRoutes) -> None:
        self._routes = routes

    async def answer(
        self, path: str, body: Body, raw: bytes, stream: EventStream
    ) -> "web.StreamResponse":
        """See Routes."""
        if body.get("temperature"):
            raise ApiError(
                400, "temperature: a judge takes the likeliest token, 0", param="temperature"
            )
        for name in ("stream", "ignore_eos"):
            if body.get(name):
                raise ApiError(400, f"{name}: a reply is given whole, once it is verified")
        return await self._routes.answer(path, {**body, "temperature": 0.0}, raw, stream)

    async def metrics(self) -> str:
        """See Routes."""
        return await self._routes.metrics()


class JudgeNode(IssuingNode):
    """One judge."""

    def __init__(
        self,
        config: JudgeRunConfig,
        key: SecretKey,
        data_dir: Path,
        announce: Callable[[JudgeAddress], None],
        factories: Factories | None = None,
    ) -> None:
        """`announce` is called once the judge can be joined and asked."""
        super().__init__(config, key, data_dir, "judge")
        self._config = config
        self._announce = announce
        self._factories = factories or Factories()
        self._scheduler: LeaseScheduler | None = None
        self._prompts: PromptQueue | None = None
        self._progress = Progress()
        self._served = ""

    async def run(self) -> None:
        """Serve until it is stopped. Raises NodeError."""
        directory = self._config.run_dir
        check_kinds(directory)
        claim(directory)
        write_private(directory / CONFIG, self._config.model_dump_json(indent=2))
        ledger = self._factories.ledger(self.data_dir / "ledger.db", fsync=self.config.fsync)
        try:
            await self.serve(lambda: self._work(ledger), self.ticket_commands, self._config.name)
        finally:
            ledger.close()

    @property
    def _other_model(self) -> str:
        return (
            f"{self._config.run_dir} is of a judge with other weights: give another --name, as rewards of two "
            "judges do not compare"
        )

    async def _work(self, ledger: Ledger) -> None:
        config = as_run(self._config)
        self.phase = "loading"
        model_dir = await rundir.prepare_model(config, self._config.run_dir / "model")
        state = await asyncio.to_thread(read, candidate(config.model.name, model_dir))
        store = open_store(config, self.data_dir)
        if (known := run_manifest.known_documents(ledger, self.key.node_id)) is not None:
            # in words of its own: a judge has no checkpoint to begin another one from
            check_contract(config, known.manifest)
        try:
            documents = await run_manifest.documents(config, self.key, ledger, store, model_dir)
        except run_manifest.OtherModelFiles as error:
            raise UsageError(self._other_model) from error
        async with self.open_run(config, ledger, store, documents, self._factories) as services:
            self._services = services
            newest = services.heads.latest()
            weights = (await asyncio.to_thread(prove, 0, state)).digest
            if newest is not None and newest.head.state != weights:
                raise UsageError(self._other_model)
            own_name = f"{public_name(config.model.name)}@{weights.hex()[:DIGEST_SHOWN]}"
            name = self._config.api.served_name or own_name
            verification = Verification(config, documents, self.key.node_id, self._factories)
            try:
                await verification.start(model_dir)
                await self._judge(config, documents, services, verification, model_dir, state, name)
            finally:
                await verification.close()

    async def _judge(
        self,
        config: RunConfig,
        documents: RunDocuments,
        services: NodeServices,
        verification: Verification,
        model_dir: Path,
        state: State,
        name: str,
    ) -> None:
        """Answer workers and clients until cancelled."""
        run, ledger = documents.manifest, services.ledger
        boot = ledger.count_boot()
        prompts = self._prompts = PromptQueue(boot << LEASES_PER_BOOT)
        publisher = Publisher(
            services, keep_states=1, limits=PublisherLimits(head_ttl_s=FOR_EVER_S)
        )
        book = LeaseBook(
            lease_policy(config, run.routes),
            next_lease=boot << LEASES_PER_BOOT,
            tasks=[prompts.tasks],
        )
        registry = WorkerRegistry(
            services,
            documents.sealed,
            book,
            verification.queue,
            cut_model(run, services.store, config.engine.max_batch),
            calibration=verification.calibration(),
            environments=run.environments,
        )
        for node, (_, snapshot) in ledger.reputations().items():
            names = [environment.name for environment in run.environments]
            with readable(ledger.path, f"reputation of {short(node)}"):
                stored = msgspec.json.decode(snapshot, type=ReputationSnapshot)
                registry.reputations[node] = Reputation.restore(stored, names)
        progress = self._progress
        progress.verified_up_to = ledger.judged_up_to()
        supply = PromptSupply(prompts, book)
        demand = PromptDemand(config, registry, prompts, progress)
        scheduler = self._scheduler = LeaseScheduler(registry, [supply], publisher, demand)
        verifier = verification.verifier([LeasedPrompts()], publisher, progress, services.leaders)
        submissions = ReplyQueue(
            scheduler, verifier, run.proofs, verification.test, progress, prompts
        )
        handler = ControlHandler(scheduler, SubmissionReceiver(scheduler, submissions, boot))
        engine = LeasedReplies(run, prompts)
        async with self._http(engine, run, model_dir, name) as url, asyncio.TaskGroup() as group:
            for work in (
                services.router(handler.handle, gate=registry.gate).run(),
                services.watch_fraud(),
                self.issued.keep_fresh(),
                supply.run(scheduler),
                submissions.run(),
                self._keep_house(scheduler, ledger),
            ):
                group.create_task(work)
            gossip = services.gossip()
            if gossip is not None:
                group.create_task(gossip.run())
            await publisher.resume(0, Snapshot(state))
            head = services.heads.latest()
            if head is not None and services.discovery is not None:
                await services.discovery.publish(head.sealed)
            await engine.load(0, state)
            self.phase, self._served = "running", f"{name} on {url}/v1"
            self._announce(JudgeAddress(self.issued.current().text, url, name))
            try:
                await asyncio.Event().wait()
            finally:
                await services.heads.end(
                    "the judge was stopped and may be started again", "stopped"
                )
                await services.head_server.wait_told((), registry.left(), FAREWELL_S)

    @asynccontextmanager
    async def _http(
        self, engine: LeasedReplies, run: RunManifest, model_dir: Path, name: str
    ) -> AsyncGenerator[str]:
        """Answer chats until the block ends; gives the base URL."""
        try:
            date = await asyncio.to_thread(dated, {}, model_dir, begun_on(self._config.run_dir))
            chat = await asyncio.to_thread(ChatFormat.load, model_dir, defaults=date)
        except EnvironmentFailed as error:
            raise UsageError(f"this model cannot be a judge: {error}") from error
        limit = run.limits.max_model_len
        served = Served(name, vocab_size(model_dir), limit, self._config.api)
        routes = (JudgeRoutes(EngineRoutes(engine, chat, served)),)
        async with serving(HttpServer(engine, served, routes)) as url:
            yield url

    async def _keep_house(self, scheduler: LeaseScheduler, ledger: Ledger) -> None:
        """Take back leases that expired, and forget old submissions, until cancelled."""
        forgotten = 0
        while True:
            await asyncio.sleep(LOOK_S)
            late = scheduler.take_back(time.time())
            for lease in late:
                logger.info("lease %d of %s is taken back", lease.lease.lease_id, short(lease.node))
            if late:
                await scheduler.work_changed()
            old = self._progress.verified_up_to - BODIES_KEPT
            if old > forgotten:
                ledger.forget_covered(old)
                forgotten = old

    async def _status(self) -> Status:
        status = self.base_status()
        status.run_name, status.detail = self._config.name, self._served
        services, scheduler, prompts = self._services, self._scheduler, self._prompts
        if services is None:
            return status
        show_network(status, services)
        if scheduler is None or prompts is None:
            return status
        show_leases(status, scheduler, self._progress)
        status.waiting_groups = len(prompts)
        if waiting := prompts.unleased():
            status.waiting_for = f"{waiting} prompts wait for workers: `primerl-node join` them"
        return status

    async def peers(self) -> list[PeerRow]:
        """Make a row for each known peer."""
        if self._services is None:
            return []
        if self._scheduler is None:
            return await peer_rows(self._services)
        return await worker_rows(self._services, self._scheduler)


def public_name(model: str) -> str:
    """Name a model to other nodes: a hub id as it is, of a directory no more than its own name."""
    directory = expand_home(model)
    return directory.resolve().name if directory.is_dir() else model


def check_contract(config: RunConfig, run: RunManifest) -> None:
    """Refuse to go on with other terms than a judge began with. Raises UsageError."""
    (begun,) = run.environments
    most, longest = config.sampling.max_tokens, config.engine.max_model_len
    if begun.sampling.max_tokens != most or run.limits.max_model_len > longest:
        raise UsageError(
            f"this judge began with max_tokens {begun.sampling.max_tokens} and sequences of "
            f"{run.limits.max_model_len} tokens, now they are {most} and {longest}: change them back, or give "
            "another --name"
        )
