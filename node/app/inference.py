"""`primerl-node inference`: an engine behind the HTTP server, with weights from a disk or those of a run.

Two nodes share everything but where the weights come from: OwnPolicy loads a directory once, FollowedPolicy
joins a run and serves its newest version. Both answer 503 until there is a policy.
"""

import asyncio
import logging
import math
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ...crypto.keys import SecretKey
from ...protocol.manifests import RunManifest
from ..api.completions import EngineRoutes
from ..api.server import ApiLimits, HttpServer, Routes, Served, serving
from ..api.vllm_proxy import ProxyTargets, VllmProxy, api_options
from ..config.engine import EngineConfig
from ..config.limits import LimitsConfig
from ..config.run import JoinConfig
from ..config.serving import ServeConfig
from ..environments.chat import ChatFormat, dated
from ..environments.environment import EnvironmentFailed
from ..errors import UsageError
from ..evaluation.candidates import Candidate, candidate, read
from ..inference.adapted import adapted
from ..inference.engine import Engine
from ..inference.hf import QUEUE_BATCHES
from ..models.model_files import vocab_size
from ..ops.figures import Status
from ..storage.run_files import today
from ..tasks import end_tasks
from ..worker.weight_sync import WeightSync
from .factories import Factories
from .peer_node import JoinedRun, PeerNode
from .running_node import Node

logger = logging.getLogger(__name__)

LAST_VERSION_S = 30.0
"""Try to get the last version of a run that has ended for this long."""


POLL_S = 1.0
"""Between two looks at whether the engine was given up."""
LOOK_AGAIN_S = 30.0
Announce = Callable[[str, str], None]
"""Called with (base URL, name of the model) once a policy is served."""


@asynccontextmanager
async def open_server(
    config: ServeConfig, engine: Engine, hosted: Engine, model_dir: Path, name: str
) -> AsyncGenerator[tuple[HttpServer, str]]:
    """Serve `engine` until the block ends, which starts it; gives the server and its base URL.

    `hosted` is what `engine` holds where that merges adapters, else `engine` itself. Raises NodeError.
    """
    try:
        date = await asyncio.to_thread(dated, {}, model_dir, today())
        chat = await asyncio.to_thread(
            ChatFormat.load, model_dir, needs_template=False, defaults=date
        )
    except EnvironmentFailed as error:
        raise UsageError(f"this model cannot be served: {error}") from error
    api = config.api
    name = api.served_name or name
    longest = config.engine.max_model_len
    served = Served(name, vocab_size(model_dir), longest, api, api_limits(config.engine))
    routes: tuple[Routes, ...] = (EngineRoutes(engine, chat, served),)
    if isinstance(hosted, ProxyTargets) and hosted.serve_api(api_options(api, chat, name)):
        routes = (VllmProxy(hosted), *routes)
    server = HttpServer(engine, served, routes)
    async with serving(server) as url:
        logger.info("serving %s on %s", name, url)
        yield server, url


def api_limits(engine: EngineConfig) -> ApiLimits:
    """Return the API's limits, narrowed to the queue of the engine."""
    limits = ApiLimits()
    if engine.type != "hf":
        return limits
    return replace(limits, max_inflight=min(limits.max_inflight, QUEUE_BATCHES * engine.max_batch))


async def watch_engine(engine: Engine) -> None:
    """Raise EngineError once the engine was given up; never returns."""
    while True:
        engine.stats()
        await asyncio.sleep(POLL_S)


class OwnPolicy(Node):
    """Serves the weights of a directory."""

    def __init__(
        self,
        config: ServeConfig,
        key: SecretKey,
        announce: Announce,
        factories: Factories | None = None,
    ) -> None:
        super().__init__(config, key, config.directory, "server")
        self._config = config
        self._announce = announce
        self._factories = factories or Factories()
        self._server: HttpServer | None = None
        self._url = ""

    async def run(self) -> None:
        """Serve until it is stopped. Raises NodeError."""
        await self.serve(self._work, {}, "")

    async def _work(self) -> None:
        policy = await asyncio.to_thread(find_policy, self._config)
        engine = self._factories.engine(self._config.engine)
        try:
            await self._serve_from(engine, policy)
        finally:
            await engine.close()

    async def _serve_from(self, engine: Engine, policy: Candidate) -> None:
        opened = open_server(self._config, engine, engine, policy.model_dir, policy.name)
        async with opened as (server, url):
            self._server, self._url = server, url
            self.phase = "loading"
            await engine.start(policy.model_dir)
            await engine.load(policy.step or 0, await asyncio.to_thread(read, policy))
            self.phase = "running"
            self._announce(url, server.served.name)
            await watch_engine(engine)

    async def _status(self) -> Status:
        return shown(self.base_status(), self._config, self._server, self._url)


class FollowedPolicy(PeerNode):
    """Joins a run to serve its newest policy; asks for no lease."""

    def __init__(
        self,
        config: ServeConfig,
        key: SecretKey,
        announce: Announce,
        factories: Factories | None = None,
    ) -> None:
        shared = {
            name: getattr(config, name)
            for name in ("fsync", "network", "engine", "weights", "dashboard")
        }
        shared["limits"] = LimitsConfig(**config.limits.model_dump())
        joining = JoinConfig(
            ticket=config.ticket,
            log=config.log,
            wait=True,  # policies fetched earlier can be served without a trainer
            wait_for_trainer_s=math.inf,
            **shared,
        )
        super().__init__(joining, key, config.directory, factories, role="server")
        self._serve_config = config
        self._announce = announce
        self._server: HttpServer | None = None
        self._url = ""

    async def _take_part(self, joined: JoinedRun) -> None:
        hosted = self._factories.engine(self._config.engine)
        engine = adapted(hosted, joined.documents.manifest, joined.base)
        try:
            await self._serve_from(engine, hosted, joined)
        finally:
            await engine.close()

    async def _serve_from(self, engine: Engine, hosted: Engine, joined: JoinedRun) -> None:
        name = joined.documents.manifest.name
        opened = open_server(self._serve_config, engine, hosted, joined.model_dir, name)
        async with opened as (self._server, self._url):
            await engine.start(joined.model_dir)
            weights = self._make_weights(joined, engine)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(watch_engine(engine))
                tasks.create_task(self._say_when_ready(weights))
                await self._follow_while(joined, lambda: self._follow(joined, weights))
                self.phase = "serving the last version"

    async def _follow(self, joined: JoinedRun, weights: WeightSync) -> None:
        """Keep the engine at the newest version until the run ends, then get the last one if a peer has it."""
        asking = asyncio.create_task(joined.upstreams.keep_asking())
        try:
            await weights.run()
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_VERSION_S):
                    await weights.reach_last()
        finally:
            await end_tasks(asking)
        logger.info("the run has ended: %s", joined.services.heads.ended)

    async def _say_when_ready(self, weights: WeightSync) -> None:
        while not await weights.wait_order((0, 0), LOOK_AGAIN_S):
            logger.info("waiting for the first policy")
        assert self._server is not None  # it was made before
        self._announce(self._url, self._server.served.name)

    def _check_numerics(self, run: RunManifest) -> None:
        """Accept any dtype: served replies are not audited."""

    async def _status(self) -> Status:
        return shown(await super()._status(), self._serve_config, self._server, self._url)


def find_policy(config: ServeConfig) -> Candidate:
    """Find or download the weights that model.name means. Raises UsageError, EngineError."""
    from ..models import huggingface

    name = config.model.name
    if not name:
        raise UsageError(
            "nothing to serve: give --model.name with a directory or a hub id, or --ticket with a run's"
        )
    directory = huggingface.resolve(name)
    step = re.fullmatch(r"step_(\d{1,9})", directory.name)
    return candidate(name, directory, int(step[1]) if step else None, config.model.base)


def shown(status: Status, config: ServeConfig, server: HttpServer | None, url: str) -> Status:
    """Add a server's fields to `status`."""
    if server is None:
        return status
    status.version = server.policy_version
    status.newest_version = max(status.newest_version, status.version)
    status.detail = f"{server.served.name} on {url}/v1"
    status.engine = server.stats().row(
        config.engine.type, inflight=server.inflight, cap=server.served.limits.max_inflight
    )
    return status
