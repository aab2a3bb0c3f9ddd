"""Join a run by ticket, as every role does: ticket, hello, model files, heads, peers.

The roles' own parts are in `worker.py` and `validator.py`.
"""

import asyncio
import logging
import math
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ... import __version__
from ...crypto.hashing import short
from ...crypto.keys import SecretKey
from ...protocol import tickets
from ...protocol.envelope import no_common_version, utc
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import ChunkRef, Role, RunManifest, Ticket
from ...protocol.messages import (
    GetHeads,
    Hello,
    WatchHeads,
    Welcome,
)
from ...protocol.trust import AdmittedHead, RunDocuments, read_documents
from ...protocol.version import ALPN_CONTROL, CLOCK_SKEW_S, MAX_NAME, WireRange
from ..config.run import JoinConfig, NodeConfig
from ..errors import (
    BusyError,
    NetworkError,
    NodeError,
    RunFailed,
    StorageError,
    TicketError,
    UsageError,
    first_cause,
    one_line,
    printable,
)
from ..inference.engine import Engine
from ..inference.numerics import check_exact, check_kept, check_quantization, check_routes
from ..models import base_weights
from ..ops.control import Command
from ..ops.figures import PeerRow, Status
from ..ops.limits import HomeLimits
from ..ops.machine import OtherPrograms
from ..ops.monitors import MonitoredRun, WandbMonitor, group_of
from ..p2p.connections import Handler, no_pipelines
from ..p2p.heads import HeadFollower
from ..p2p.rpc import Refused, receive
from ..p2p.services import KEY_REFUSALS, RECORD_TTL_S, NodeServices, key_error
from ..p2p.status_view import peer_rows, show_network
from ..p2p.transport import Stream, TransportError
from ..p2p.waiting import LogBackoff
from ..storage.chunk_store import LostChunk
from ..storage.ledger import MANIFEST, Ledger
from ..tasks import end_tasks
from ..weights.payload import TensorShare, everything
from ..worker.weight_sync import (
    OnPolicy,
    Upstreams,
    WeightSync,
    known_successors,
    learn_records,
)
from . import rundir
from .factories import Factories, sandboxed
from .page_queries import PageQueries
from .running_node import Node
from .services import drop_other_runs, open_services, open_store
from .tickets import TicketPlace, read_again, remember, run_directory, usable_ticket

T = TypeVar("T")
logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
LOOK_S = 1.0
LEAST_SILENCE_S = 60.0
"""Shortest silence that ends a node, if the trainer announced no stop; wait_for_trainer_s may be longer."""
RETRY_S = 0.5
RETRY_MAX_S = 5.0
FOLLOWED_PEERS = 2
LIMITS_EVERY_S = 5.0
MONITORED_EVERY_S = 30.0
PUBLIC_OF_NODE = {
    "engine": {"type", "dtype", "device", "tp", "pp", "dp", "max_batch", "max_model_len"}
}
"""Keys of a worker's config that its monitor gets."""
MAX_WORDS = 400
"""Longest text of a node's `waits_for`, characters."""
FETCHING_BASE = "fetching the base weights"
Questions = WatchHeads | GetHeads | Hello


@dataclass(frozen=True)
class JoinedRun:
    """A run that admitted this node."""

    services: NodeServices
    documents: RunDocuments
    model_dir: Path
    """The files of the model contract; no weights."""
    upstreams: Upstreams
    base: asyncio.Task[None]
    """Brings the weights of the base into model_dir, if policies are adapters; await it before reading them."""


@contextmanager
def _joinable() -> Generator[None]:
    """Raise TicketError for what is wrong with the base of a run."""
    try:
        yield
    except RemoteProtocolError as error:
        raise TicketError(f"this run cannot be joined ({error}): tell its trainer") from error


class RunOver(Exception):
    """The run has ended before this node could take part in it."""


class PeerNode(Node):
    """A node that joined a run by its ticket."""

    def __init__(
        self,
        config: JoinConfig,
        key: SecretKey,
        data_dir: Path,
        factories: Factories | None = None,
        *,
        role: Role | None = None,
    ) -> None:
        """`role` is by default the config's."""
        self._peer_role: Role = role or config.role
        super().__init__(config, key, data_dir, self._peer_role)
        self.queries = {**self.queries, **PageQueries(data_dir).all()}
        self._config = config
        self._factories = factories or sandboxed(config)
        self._ticket = ""
        self.ticket_place: TicketPlace | None = None
        """Where its ticket may be read again; None: nowhere."""
        self._weights: WeightSync | None = None
        self._name = ""
        self._obstacle = ""
        """Reason why this node has not joined yet; empty once it has."""
        self._fetching = ""
        """Files that are being fetched before the first version, and why they do not come; else empty."""
        self._newer_release = ""
        """That the trainer's release is newer than this node's; empty if it is not."""
        self.farewell = ""
        """Why this node left, once the run has ended."""
        self.leads = False
        """Whether this node has to lead the run from now on: only a standby may."""
        self.limits = HomeLimits(config.limits, data_dir, time.time(), fsync=config.fsync)

    async def run(self) -> None:
        """Join and work until the run ends. Raises TicketError, NodeError; RunFailed where the run failed."""
        self.limits.open(time.time())
        self._ticket = usable_ticket(self._config.ticket, self.data_dir, int(time.time()))
        ticket = tickets.read(self._ticket, now=0)
        directory = run_directory(self.data_dir, ticket.run)
        ledger = self._factories.ledger(directory / "ledger.db", fsync=self.config.fsync)
        try:
            await self.serve(
                lambda: self._work(ticket, ledger, directory),
                self._commands(),
                ticket.run.hex()[:16],
            )
        finally:
            ledger.close()

    async def _take_part(self, joined: JoinedRun) -> None:
        """Do the role's work until the run ends."""
        raise NotImplementedError

    def lead_arguments(self) -> list[str]:
        """Return the arguments of `primerl-node train` with which this node leads the run."""
        raise NotImplementedError

    def _commands(self) -> Mapping[str, Command]:
        """Return what its owner may tell it, beside what every node is told."""
        if self.role == "server":
            return {}
        return {"pause": self._pause, "resume": self._resume}

    def _pipelines(self, services: NodeServices) -> Handler:
        """Return the handler of pipeline streams."""
        return no_pipelines

    async def _work(self, ticket: Ticket, ledger: Ledger, directory: Path) -> None:
        await asyncio.to_thread(drop_other_runs, directory)
        async with open_services(
            self._config,
            self.key,
            ledger,
            open_store(self._config, directory),
            run_id=ticket.run,
            trainer=ticket.trainer,
            role=self._peer_role,
            bootstrap=ticket.discovery,
            factories=self._factories,
            rates=self.rates,
        ) as services:
            self._services = services
            services.paused = lambda: self.limits.why
            services.peers.hint(ticket.trainer, ticket.addresses)
            learn_records(services.peers, ticket.run, known_successors(ledger), now=0)
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(
                        services.router(
                            PeerHandler(services).handle, self._pipelines(services)
                        ).run()
                    ),
                    tasks.create_task(services.watch_fraud()),
                    tasks.create_task(services.watch_key()),
                    tasks.create_task(self._keep_limits(services)),
                ]
                if self.ticket_place is not None:
                    rereading = self._read_ticket_again(services, self.ticket_place)
                    background.append(tasks.create_task(rereading))
                gossip = services.gossip()
                if gossip is not None:
                    background.append(tasks.create_task(gossip.run()))
                try:
                    joined = await self._join(services, ticket, directory)
                    try:
                        async with self._monitored(joined.documents):
                            await self._take_part(joined)
                    finally:
                        await end_tasks(joined.base)
                    self.farewell = printable(
                        f"the run has ended: {services.heads.ended}", MAX_NAME
                    )
                    if services.heads.outcome == "failed":
                        raise RunFailed(
                            printable(f"the run failed: {services.heads.ended}", MAX_NAME)
                        )
                except RunOver as over:
                    self.farewell = printable(f"the run has ended: {over}", MAX_NAME)
                except (NodeError, ExceptionGroup) as error:
                    await self._say_why(services, error)
                    raise
                except asyncio.CancelledError:
                    if services.admitted.is_set() and not services.left:
                        await services.say_goodbye()
                    raise
                finally:
                    for task in background:
                        task.cancel()

    async def _join(self, services: NodeServices, ticket: Ticket, directory: Path) -> JoinedRun:
        self.phase = "joining"
        documents = await self._hello(services, ticket)
        services.admitted.set()
        run = documents.manifest
        await asyncio.to_thread(self._check_environments, run)
        logger.info(
            "joined run %s (%s): model %s, %s, %d steps",
            printable(run.name),
            short(ticket.run),
            printable(run.model.name),
            ", ".join(printable(environment.name) for environment in run.environments),
            run.max_steps,
        )
        self._name, self._obstacle = run.name, ""
        remember(services.ledger, self._ticket)
        # `explain` checks verdicts by it when no trainer can be asked.
        services.ledger.set(MANIFEST, documents.sealed)
        upstreams, model_dir = Upstreams(services), directory / "model"
        base: list[ChunkRef] = []
        if self._computes:
            chunks = [file.chunk for file in run.model.files]
            services.keep_chunks.update(chunk.digest for chunk in chunks)
            await self._bring(
                services,
                chunks,
                "fetching the files of the model",
                lambda: rundir.write_model_files(run, services.store, model_dir),
            )
            self._check_numerics(run)
            # before versions are fetched, which may make room for themselves
            base = await self._find_base(services, run)
        bringing = self._fetch_base(services, run, model_dir, upstreams, base)
        task = asyncio.create_task(bringing, name="base weights")
        return JoinedRun(services, documents, model_dir, upstreams, task)

    @asynccontextmanager
    async def _monitored(self, documents: RunDocuments) -> AsyncGenerator[None]:
        """Log to this node's monitor what its status says, and once more at the end."""
        section = self._config.monitors.wandb
        if section is None:
            yield
            return
        run_id, node = documents.run_id, self.key.node_id
        run = MonitoredRun(
            name=f"{self.role}-{short(node)}",
            id=f"{run_id.hex()[:16]}-{node.hex()[:16]}",
            role=self.role,
            group=group_of(documents.manifest.name, run_id),
            directory=str(self.data_dir.absolute()),
            config=self._config.model_dump(mode="json", include=PUBLIC_OF_NODE),
        )
        monitor = WandbMonitor(section, run)

        async def log() -> None:
            status = await self.status()
            if status.version >= 0:
                monitor.log(status.version, node_metrics(status))

        async def keep_logging() -> None:
            while True:
                await asyncio.sleep(MONITORED_EVERY_S)
                await log()

        task = asyncio.create_task(keep_logging(), name="monitor")
        try:
            yield
        finally:
            await end_tasks(task)
            await log()
            await asyncio.to_thread(monitor.close)

    async def _find_base(self, services: NodeServices, run: RunManifest) -> list[ChunkRef]:
        """Return the chunks of the base model of an adapter run, and keep them; of another run none."""
        if run.adapters is None:
            return []
        services.keep_chunks.add(run.adapters.base.digest)
        with _joinable():
            chunks = await self._bring(
                services,
                [run.adapters.base],
                FETCHING_BASE,
                lambda: base_weights.chunks(run, services.store),
            )
        services.keep_chunks.update(chunk.digest for chunk in chunks)
        return chunks

    async def _fetch_base(
        self,
        services: NodeServices,
        run: RunManifest,
        model_dir: Path,
        upstreams: Upstreams,
        chunks: Sequence[ChunkRef],
    ) -> None:
        """Fetch the base of _find_base(), from other workers where they have it, and write it."""
        if not chunks:
            return
        while self.limits.why:
            await services.heads.wait(lambda: not self.limits.why, LOOK_S)
        await upstreams.ask()
        with _joinable():
            await self._bring(
                services,
                chunks,
                FETCHING_BASE,
                lambda: base_weights.write(run, services.store, model_dir),
                neighbours=upstreams.nodes,
                using="writing the base weights",
            )

    async def _bring(
        self,
        services: NodeServices,
        chunks: Sequence[ChunkRef],
        what: str,
        use: Callable[[], T],
        *,
        neighbours: Sequence[bytes] = (),
        using: str = "",
    ) -> T:
        """Fetch files of the run, `use` them in a thread and return what that returns.

        A chunk of an earlier start counts as fetched by its name. Where reading it shows that it was damaged
        on the disk, all of them are read, and those that are damaged are fetched again, once. Raises as
        _fetch() and `use`.
        """
        await self._fetch(services, chunks, what, neighbours)
        try:
            self._fetching = using
            return await asyncio.to_thread(use)
        except LostChunk:
            logger.warning("%s again: some were damaged on this disk", what)
        finally:
            self._fetching = ""
        for chunk in chunks:
            await asyncio.to_thread(services.store.get, chunk.digest)  # drops a damaged one
        await self._fetch(services, chunks, what, neighbours)
        return await asyncio.to_thread(use)

    async def _fetch(
        self,
        services: NodeServices,
        chunks: Sequence[ChunkRef],
        what: str,
        neighbours: Sequence[bytes] = (),
    ) -> None:
        """Fetch files of the run, again while nobody has them: a trainer that begins again is away.

        Raises NetworkError after wait_for_trainer_s, StorageError.
        """
        pause, start = RETRY_S, time.monotonic()
        limit = max(self._config.wait_for_trainer_s, LEAST_SILENCE_S)
        self._fetching = what
        try:
            while True:
                try:
                    return await services.fetcher.fetch(chunks, neighbours, services.trainer)
                except NetworkError as error:
                    if time.monotonic() - start > limit:
                        raise
                    self._fetching = f"{what}: {error}"
                    logger.info("%s: trying again", self._fetching)
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, RETRY_MAX_S)
        finally:
            self._fetching = ""

    async def _hello(self, services: NodeServices, ticket: Ticket) -> RunDocuments:
        """Say hello until a leader of the run answers; it may not be up yet. Raises RunOver, NodeError."""
        pause, lines, start = RETRY_S, LogBackoff(), time.monotonic()
        limit = max(self._config.wait_for_trainer_s, LEAST_SILENCE_S)
        for trainer in _leaders_to_ask(services, ticket):
            hello = Hello(
                services.wire.newest,
                self._peer_role,
                __version__,
                tickets.sealed_bytes(self._ticket),
                services.record(),
                unix_time=int(time.time()),
                oldest_wire_version=services.wire.stated_oldest(),
            )
            try:
                welcome = await services.links.request(
                    trainer, ALPN_CONTROL, hello, Welcome, deadline=HELLO_TIMEOUT_S
                )
                _check_welcome(welcome, services.wire, int(time.time()))
                self._compare_release(welcome.software)
                documents = read_documents(welcome.manifest, ticket.run, now=int(time.time()))
                services.heads.trusted.trust(documents)
                if welcome.leaders:
                    await services.heads.admit_leaders(welcome.leaders)
                services.leaders.check(trainer)
                return documents
            except TransportError as error:
                self._obstacle = f"the trainer is not reached: {error}"
                waited = time.monotonic() - start
                documents = self._documents_without_trainer(services, waited)
                if documents is not None:
                    return documents
                if waited > limit:
                    raise NetworkError(
                        f"the trainer did not answer for {waited:.0f} s ({error}): is it running, and are "
                        f"the addresses in the ticket its own ({', '.join(ticket.addresses) or 'none'})?"
                    ) from error
                if lines.due():
                    logger.info(
                        "waiting for trainer %s, %.0f s%s: %s",
                        short(trainer),
                        waited,
                        "" if math.isinf(limit) else f" of at most {limit:.0f}",
                        error,
                    )
            except Refused as refusal:
                if refusal.reason == Reason.WRONG_CLOCK:
                    raise NodeError(f"the trainer refuses us: {refusal.detail}") from refusal
                if refusal.reason == Reason.RUN_ENDED:
                    raise RunOver(refusal.detail) from refusal
                if refusal.reason in KEY_REFUSALS:
                    raise key_error(refusal) from refusal
                if refusal.reason not in (Reason.BUSY, Reason.RATE_LIMITED, Reason.NOT_FOUND):
                    raise TicketError(f"the trainer refuses us: {refusal}") from refusal
                self._obstacle = f"the trainer is busy: {refusal}"
            except RemoteProtocolError as error:
                if error.reason == Reason.WRONG_VERSION:
                    raise TicketError(error.detail) from error
                raise TicketError(f"the trainer's run manifest is not genuine: {error}") from error
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, RETRY_MAX_S)
        raise AssertionError  # leaders are asked for ever

    async def _read_ticket_again(self, services: NodeServices, place: TicketPlace) -> None:
        """Go on with the addresses of the ticket at its place, while the trainer is not heard."""
        pause, said = place.first_s, ""
        while True:
            await asyncio.sleep(pause)
            if time.monotonic() - services.heads.unwatched_since < place.first_s:
                pause = place.first_s
                continue
            pause = min(pause * 1.5, place.most_s)
            try:
                text, ticket = await asyncio.to_thread(
                    read_again, place, services.leaders, int(time.time())
                )
            except TicketError as error:
                why = printable(f"the ticket in {place.name} is not used: {error}", None)
                if why != said:
                    logger.warning("%s", why)
                said = why
                continue
            if text != self._ticket:
                self._ticket, said = text, ""
                services.peers.hint(ticket.trainer, ticket.addresses)
                logger.warning(
                    "the trainer is not heard, %s has a newer ticket: trying %s",
                    printable(place.name),
                    ", ".join(ticket.addresses),
                )

    def _documents_without_trainer(
        self, services: NodeServices, waited: float
    ) -> RunDocuments | None:
        """Return the run's documents if this node goes on after `waited` seconds without a trainer."""
        return None

    @property
    def _computes(self) -> bool:
        """Whether this node needs the model of the run."""
        return True

    def _check_environments(self, run: RunManifest) -> None:
        """Raise UsageError if this node plays environments, and its owner has allowed none of the run's."""

    def _check_numerics(self, run: RunManifest) -> None:
        """Check the dtype before any work is done: another one would make proofs that no audit accepts."""
        wanted, own = run.proofs.dtype, self._config.engine.dtype
        if own != wanted:
            raise UsageError(
                f"this run is computed in {wanted}, engine.dtype is {own}: set --engine.dtype {wanted}"
            )
        check_exact(self._config.engine, run)
        check_routes(self._config.engine, run)
        check_quantization(self._config.engine, run)
        check_kept(self._config.engine, run)
        if run.proofs.kv_cache == "kept" and self._config.pp.wanted:
            raise UsageError(
                "this run's engines keep keys and values, which no pipeline does: remove pp"
            )
        if run.proofs.quantization != "none" and self._config.pp.wanted:
            raise UsageError("this run's weights are quantized, which no pipeline does: remove pp")
        if run.proofs.numerics == "exact" and self._config.pp.wanted:
            raise UsageError("this run's numerics are exact, which a pipeline cannot be: remove pp")

    def _make_weights(
        self,
        joined: JoinedRun,
        engine: Engine,
        on_policy: OnPolicy = lambda policy, changed: None,
        share: TensorShare = everything,
        goal: Callable[[], AdmittedHead | None] | None = None,
        ready: asyncio.Event | None = None,
    ) -> WeightSync:
        self._weights = WeightSync(
            joined.services,
            engine,
            joined.upstreams,
            share=share,
            goal=goal,
            on_policy=on_policy,
            ready=ready,
            held=lambda: bool(self.limits.why) and not self._held(),
        )
        return self._weights

    # -- heads and peers ---------------------------------------------------------------------------

    async def _follow_while(self, joined: JoinedRun, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` while the heads of the trainer, and of a few peers, are watched."""
        services = joined.services
        leader = services.follower(services.trainer, authority=True)
        async with asyncio.TaskGroup() as tasks:
            watches = [
                tasks.create_task(self._follow_leader(joined, leader)),
                tasks.create_task(self._follow_peers(joined)),
                tasks.create_task(self._stay_known(joined, leader)),
                tasks.create_task(self._leave_without_trainer(leader)),
            ]
            try:
                await joined.upstreams.ask()
                self.phase = "running"
                await work()
                self.phase = "ended"
            finally:
                for task in watches:
                    task.cancel()

    async def _follow_leader(self, joined: JoinedRun, follower: HeadFollower) -> None:
        """Watch the node that leads the run; once a head of another one is newer, say hello to that one."""
        services = joined.services
        while not services.heads.ended:
            leader = follower.peer
            watch = asyncio.create_task(follower.run())
            try:
                while services.trainer == leader and not services.heads.ended:
                    await services.heads.wait_news(services.heads.order(), LOOK_S)
            finally:
                await end_tasks(watch)
            if services.heads.ended:
                return
            follower.peer = services.trainer
            logger.warning(
                "%s leads the run now, in epoch %d", short(follower.peer), services.heads.order()[0]
            )
            await self._hello(services, tickets.read(self._ticket, now=0))
            self._obstacle = ""
            await self._succeeded()

    async def _succeeded(self) -> None:
        """Do what a new leader of the run needs of this node, which it has admitted."""

    async def _stay_known(self, joined: JoinedRun, trainer: HeadFollower) -> None:
        """Tell the trainer our record whenever it comes back, and before the last one runs out."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RECORD_TTL_S / 3):
                    await trainer.came_back.wait()
            trainer.came_back.clear()
            await joined.upstreams.ask()
            record = joined.services.peers.get(joined.services.trainer).record
            if record is not None:
                self._compare_release(record.software)

    async def _leave_without_trainer(self, trainer: HeadFollower) -> None:
        """End this node when its trainer was stopped, or is silent, for longer than the config waits.

        Raises NetworkError.
        """
        silence, reason = 0.0, ""
        while True:
            trainer.heard.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await trainer.heard.wait()
            if trainer.heard.is_set():
                if reason:
                    logger.info("the trainer is back")
                    self._obstacle = ""
                silence, reason = 0.0, ""
                continue
            silence += LOOK_S  # by ticks: this process, or the machine, may have slept itself
            limit = self._config.wait_for_trainer_s
            stopped = self._services.heads.stopped if self._services else ""
            if stopped and not reason:
                reason = printable(stopped, MAX_NAME)
                if not self._config.wait:
                    raise NetworkError(
                        f"{reason}: `primerl-node join --data-dir {self.data_dir}` joins it again, "
                        "--wait waits for it"
                    )
                self._obstacle = reason
                most = "" if math.isinf(limit) else f" for up to {limit:.0f} s"
                logger.warning("%s: waiting for it%s", reason, most)
            if silence > (limit if reason else max(limit, LEAST_SILENCE_S)):
                why = reason or "the trainer is silent"
                raise NetworkError(
                    f"{why}, and was not there for {silence:.0f} s: `primerl-node join --data-dir "
                    f"{self.data_dir}` joins it again, --wait waits for ever"
                )

    async def _follow_peers(self, joined: JoinedRun) -> None:
        """Keep watches on the nearest upstream peers, as they come and go."""
        services = joined.services
        followed: dict[bytes, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while not services.heads.ended:
                near, successors = joined.upstreams.nodes, joined.upstreams.successors
                others = {services.key.node_id, services.trainer}
                wanted = {*near[:FOLLOWED_PEERS], *successors} - others
                for peer in [peer for peer in followed if peer not in wanted]:
                    followed.pop(peer).cancel()
                for peer in [peer for peer in wanted if peer not in followed]:
                    followed[peer] = tasks.create_task(services.follower(peer).run())
                await asyncio.sleep(1.0)
            for task in followed.values():
                task.cancel()

    async def _say_why(self, services: NodeServices, error: Exception) -> None:
        """Tell the trainer what ended this node, so that its operator sees it in the run's status."""
        cause = first_cause(error) if isinstance(error, ExceptionGroup) else error
        if isinstance(cause, TicketError | NetworkError | RunFailed | BusyError):
            return  # it never let us in, is not there, or knows
        await services.say_goodbye(printable(one_line(cause), MAX_NAME))

    # -- limits of its owner -------------------------------------------------------------------------

    async def _keep_limits(self, services: NodeServices) -> None:
        """Decide anew every few seconds whether this node is paused; count what it sends and receives."""
        limits, others, lines = self.limits, OtherPrograms(), LogBackoff()
        try:
            while True:
                use = await others.look() if limits.watches_others else None
                now = time.time()
                limits.look(now, services.traffic(), use)
                await self._apply_limits()
                if limits.is_due(now):
                    try:
                        await asyncio.to_thread(limits.save, now)
                    except StorageError as error:
                        if lines.due():
                            logger.warning("the month's bytes are not kept: %s", error)
                await asyncio.sleep(LIMITS_EVERY_S)
        finally:
            limits.look(time.time(), services.traffic())
            with suppress(StorageError):
                limits.save(time.time())

    async def _apply_limits(self) -> None:
        """Serve chunks or not, and let those that wait for a change look."""
        if self._services is not None:
            self._services.blobs.closed = not self.limits.serves
            await self._services.heads.wake()

    async def _pause(self, seconds: float | None = None, now: bool = False) -> dict[str, object]:
        """Pause this node for `seconds`, or until it is resumed; `now` hands its work back."""
        await asyncio.to_thread(self.limits.pause, seconds, time.time())
        await self._apply_limits()
        held = self._hand_back() if now else self._held()
        return {"paused": self.limits.text(time.time()), "held": held, "handed_back": now}

    async def _resume(self) -> dict[str, object]:
        """End a pause of its owner; what else pauses it, stays."""
        await asyncio.to_thread(self.limits.resume, time.time())
        await self._apply_limits()
        return {"paused": self.limits.text(time.time())}

    def _held(self) -> int:
        """Count what this node works on and finishes when it is paused."""
        return 0

    def _hand_back(self) -> int:
        """Give what it works on back; return how much that was."""
        return 0

    async def _limit(self, config: NodeConfig) -> None:
        await super()._limit(config)
        if isinstance(config, JoinConfig):
            self.limits.configure(config.limits, time.time())
            await self._apply_limits()

    # -- what the operator sees ----------------------------------------------------------------------

    def _compare_release(self, software: str) -> None:
        """Note whether the trainer's release is newer than ours; log it once for each release."""
        line = newer_release(software)
        if line and line != self._newer_release:
            logger.warning("%s", line)
        self._newer_release = line

    def _waits_for(self) -> str:
        """Describe what this node waits for, in peers' words too; empty while it works."""
        if self.limits.why:
            held = self._held()
            return (
                f"paused: {self.limits.text(time.time())}"
                + f"; {held} leases are finished" * bool(held)
            )
        return (
            self._fetching or self._obstacle or (self._weights.waits_for if self._weights else "")
        )

    async def _status(self) -> Status:
        status = self.base_status()
        status.waiting_for = printable(self._waits_for(), MAX_WORDS)
        services, weights = self._services, self._weights
        if services is None:
            return status
        show_network(status, services)
        status.warnings = [self._newer_release] if self._newer_release else []
        status.run_name = self._name
        if self.role != "server":
            status.limits = self.limits.row(time.time())
        status.newest_version = services.heads.order()[1]
        if weights is not None:
            if weights.version < 0 and self.phase == "running":
                status.phase = "catching up"
            status.version = weights.version
            status.chunk_bytes_by_source = services.fetcher.by_source(services.trainer)
            if weights.version >= 0:
                status.detail = f"state {short(weights.state_digest)}"
        if self.limits.why and self.phase == "running":
            status.phase = "paused"
        return status

    async def peers(self) -> list[PeerRow]:
        """Make a row for each known peer."""
        return await peer_rows(self._services) if self._services is not None else []


def node_metrics(status: Status) -> dict[str, object]:
    """Name the figures of a worker's or validator's status as a monitor shows them."""
    engine = msgspec.structs.asdict(status.engine) if status.engine else {}
    return {
        "rollouts/accepted": status.accepted,
        "rollouts/rejected": sum(status.rejected.values()),
        "leases/held": status.leases,
        "trust": status.trust,
        **{
            f"trust/{name}": value
            for name, value in status.trusts.items()
            if len(status.trusts) > 1
        },
        "network/bytes_sent": status.bytes_sent,
        "network/bytes_received": status.bytes_received,
        **{f"inference/{name}": value for name, value in engine.items()},
    }


def newer_release(software: str, own: str = __version__) -> str:
    """Return the line for the operator if a trainer's release is newer than `own`, else ""."""
    from packaging.version import InvalidVersion, Version

    try:
        newer = Version(software) > Version(own)
    except InvalidVersion:
        return ""
    if not newer:
        return ""
    return (
        f"the trainer runs primerl-node {Version(software)}, this node {own}: upgrade it when it suits you "
        "(UPGRADING.md)"
    )


def _check_welcome(welcome: Welcome, spoken: WireRange, now: int) -> None:
    """Raise if the trainer speaks no wire version that we do, or its clock and ours differ too much."""
    if not spoken.speaks(welcome.wire_version):
        theirs = WireRange(welcome.wire_version, welcome.wire_version)
        software = printable(welcome.software, MAX_NAME)
        raise no_common_version(theirs, spoken, called="this node", software=software)
    ahead = now - welcome.unix_time
    if welcome.unix_time and abs(ahead) > CLOCK_SKEW_S:
        raise NodeError(
            f"the clock of this machine ({utc(now)}) is {abs(ahead)} s "
            f"{'ahead of' if ahead > 0 else 'behind'} the trainer's: set it"
        )


def _leaders_to_ask(services: NodeServices, ticket: Ticket) -> Iterator[bytes]:
    """Yield the nodes that may lead the run, again and again: the likeliest first."""
    while True:
        reachable = (node for node in services.leaders.places() if services.peers.get(node).record)
        yield from dict.fromkeys((services.trainer, ticket.trainer, *reachable))


class PeerHandler:
    """Answers the control requests of peers: heads, and nothing that only a trainer may grant."""

    def __init__(self, services: NodeServices) -> None:
        self._services = services

    async def handle(self, peer: bytes, stream: Stream) -> None:
        """Answer one control request (a router handler)."""
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            request = await receive(stream, Questions)  # type: ignore[arg-type]
        if isinstance(request, WatchHeads):
            await self._services.head_server.watch(peer, stream, request)
        elif isinstance(request, GetHeads):
            await self._services.head_server.get(stream, request)
        else:
            raise RemoteProtocolError(Reason.NOT_FOUND, "this node is no trainer")
