"""`primerl-node inference`: an engine behind the HTTP server, with weights from a disk or those of a run.

Two nodes share everything but where the weights come from: OwnPolicy loads a directory once, FollowedPolicy
joins a run and serves its newest version. Both answer 503 until there is a policy.
"""

import asyncio
import logging
import math
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from ..crypto.keys import SecretKey
from ..protocol.manifests import RunManifest
from .api.server import serving
from .api.service import Service, make_served
from .api.text import Text
from .config import JoinConfig
from .control import EngineRow, Status
from .engines.adapted import adapted
from .engines.engine import Engine
from .engines.hf import QUEUE_BATCHES
from .environments.environment import EnvironmentFailed
from .errors import UsageError
from .evaluation.candidates import Candidate, candidate, read
from .joined_node import Joined, JoinedNode
from .model_files import vocab_size
from .parts import Parts
from .roles.catchup import CatchUp
from .roles.observer import ObserverRole
from .serve_config import ApiConfig, ServeConfig
from .serving import Node

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Between two looks at whether the engine was given up."""
LOOK_AGAIN_S = 30.0
Announce = Callable[[str, str], None]
"""Is told (base URL, name of the model) once a policy is served."""


@asynccontextmanager
async def open_server(
    config: ServeConfig, engine: Engine, model_dir: Path, name: str
) -> AsyncGenerator[tuple[Service, str]]:
    """The server of `engine`, as long as the block lasts; gives its base URL. Raises NodeError."""
    try:
        form, known = config.api.reply_form, config.model.name
        text = await asyncio.to_thread(Text.load, model_dir, form=form, model_name=known)
    except EnvironmentFailed as error:
        raise UsageError(f"this model cannot be served: {error}") from error
    api = bounded(config)
    served = make_served(
        api.served_name or name,
        vocab_size=vocab_size(model_dir),
        max_model_len=config.engine.max_model_len,
        text=text,
        api=api,
    )
    service = Service(engine, text, served)
    async with serving(api, service) as url:
        logger.info("serving %s on %s", served.name, url)
        yield service, url


def bounded(config: ServeConfig) -> ApiConfig:
    """The API's limits, no wider than what the engine lets wait."""
    most = config.api.max_inflight
    if config.engine.type == "hf":
        most = min(most, QUEUE_BATCHES * config.engine.max_batch)
    return config.api.model_copy(update={"max_inflight": most})


async def watch_engine(engine: Engine) -> None:
    """Never returns. Raises EngineError when the engine was given up."""
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
        parts: Parts | None = None,
    ) -> None:
        super().__init__(config, key, config.directory, "inference")
        self._config = config
        self._announce = announce
        self._parts = parts or Parts()
        self._service: Service | None = None
        self._url = ""

    async def run(self) -> None:
        """Serve until it is stopped. Raises NodeError."""
        await self.serve(self._work, {"status": self._status}, "")

    async def _work(self) -> None:
        found = await asyncio.to_thread(find_policy, self._config)
        engine = self._parts.engine(self._config.engine)
        try:
            await self._serve_from(engine, found)
        finally:
            await engine.close()

    async def _serve_from(self, engine: Engine, found: Candidate) -> None:
        async with open_server(self._config, engine, found.model_dir, found.name) as (service, url):
            self._service, self._url = service, url
            self.phase = "loading"
            await engine.start(found.model_dir)
            await engine.load(found.step or 0, await asyncio.to_thread(read, found))
            self.phase = "running"
            self._announce(url, service.served.name)
            await watch_engine(engine)

    async def _status(self) -> Status:
        return shown(self.base_status(), self._config, self._service, self._url)


class FollowedPolicy(JoinedNode):
    """Joins a run to serve what it learns; asks for no lease."""

    def __init__(
        self,
        config: ServeConfig,
        key: SecretKey,
        announce: Announce,
        parts: Parts | None = None,
    ) -> None:
        shared = {name: getattr(config, name) for name in ("fsync", "network", "engine", "weights")}
        joining = JoinConfig(
            role="inference",
            ticket=config.ticket,
            log=config.log,
            wait=True,  # what was fetched can be served without any trainer
            wait_for_trainer_s=math.inf,
            **shared,
        )
        super().__init__(joining, key, config.directory, parts)
        self._serve_config = config
        self._announce = announce
        self._service: Service | None = None
        self._url = ""

    async def _take_part(self, joined: Joined) -> None:
        engine = adapted(self._parts.engine(self._config.engine), joined.documents.manifest)
        try:
            await self._serve_from(engine, joined)
        finally:
            await engine.close()

    async def _serve_from(self, engine: Engine, joined: Joined) -> None:
        stack, name = joined.stack, joined.documents.manifest.name
        async with open_server(self._serve_config, engine, joined.model_dir, name) as server:
            self._service, self._url = server
            await engine.start(joined.model_dir)
            catchup = self._make_catchup(joined, engine)
            role = ObserverRole(
                book=stack.heads,
                links=stack.links,
                trainer=stack.trainer,
                catchup=catchup,
                upstreams=joined.upstreams,
                record=stack.record,
            )
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(watch_engine(engine))
                tasks.create_task(self._say_when_ready(catchup))
                await self._follow_while(joined, role.run)
                self.phase = "serving the last version"

    async def _say_when_ready(self, catchup: CatchUp) -> None:
        while not await catchup.wait_order((0, 0), LOOK_AGAIN_S):
            logger.info("waiting for the first policy")
        assert self._service is not None  # it was made before
        self._announce(self._url, self._service.served.name)

    def _check_numerics(self, run: RunManifest) -> None:
        """Nobody audits what is served: any dtype will do."""

    async def _status(self) -> Status:
        return shown(await super()._status(), self._serve_config, self._service, self._url)


def find_policy(config: ServeConfig) -> Candidate:
    """The weights that model.name means. Downloads what is on the hub. Raises UsageError, EngineError."""
    from . import models

    name = config.model.name
    if not name:
        raise UsageError(
            "nothing to serve: give --model.name with a directory or a hub id, or --ticket with a run's"
        )
    directory = models.resolve(name)
    step = re.fullmatch(r"step_(\d{1,9})", directory.name)
    return candidate(name, directory, int(step[1]) if step else None, config.model.base)


def shown(status: Status, config: ServeConfig, service: Service | None, url: str) -> Status:
    """`status` with what a server adds."""
    if service is None:
        return status
    stats = service.stats()
    status.version = service.policy_version
    status.newest_version = max(status.newest_version, status.version)
    status.detail = f"{service.served.name} on {url}/v1"
    status.engine = EngineRow(
        config.engine.type,
        inflight=service.inflight,
        cap=service.served.api.max_inflight,
        running=stats.running,
        waiting=stats.waiting,
        kv_use=stats.kv_use,
        preemptions=stats.preemptions,
        generated_tokens=stats.generated_tokens,
        restarts=stats.restarts,
        fault=stats.fault,
    )
    return status
