"""Loop of a worker: ask for leases, generate their rollouts, upload them.

Invariants: a worker generates only under a policy whose digest it has proved, and only what a lease asks for. A
submission stays on disk until the trainer's receipt has arrived.
"""

import asyncio
import logging
import math
import time
from contextlib import suppress

from ...protocol.envelope import Purpose
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease, environment_of
from ...protocol.manifests import RunManifest
from ...protocol.messages import (
    MAX_HELD,
    MAX_LEASES,
    LeaseReply,
    LeaseRequest,
    WorkerStats,
)
from ...protocol.numerics import NumericsClass
from ...protocol.reputation import WRONG_CLASS
from ...protocol.rollouts import Submission
from ..config.engine import EngineConfig
from ..environments.environment import Environment, EnvironmentGivenUp
from ..errors import EngineError, EngineLost, StorageError
from ..inference.concurrency import Concurrency
from ..inference.engine import Engine, EngineStats
from ..inference.numerics import numerics_of
from ..ops.figures import EngineRow
from ..ops.tracing import part
from ..p2p.rpc import Refused
from ..p2p.services import NodeServices
from ..p2p.transport import TransportError
from ..p2p.uploads import upload
from ..p2p.waiting import LogBackoff
from ..weights.chain import NOTHING
from .pipelined_engine import PipelinedEngine
from .rollouts import AdmissionControl, GenerationClock, LeaseResult, RolloutGenerator
from .upload import UploadQueue
from .verdicts import CLASS_ADVICE, VerdictLog
from .weight_sync import WeightSync

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 20.0
PAUSE_S = 0.2
PAUSE_MAX_S = 3.0
LOOK_S = 0.25
"""Most time in which a worker that wants no lease looks again whether it does."""
HEARTBEAT_S = 5.0
"""Interval of requests that need no lease: they are a sign of life, and bring verdicts."""
VERSION_WAIT_S = 30.0
IDLE_LOG_S = 60.0
"""A worker without a lease logs the trainer's reason at once, then after this many seconds, then after twice as
many each time."""
FULL_S = 10.0
"""Seconds without new leases after finished work could not be kept, as on a full disk: it would be lost."""
STALLED_S = 60.0
STALLED = 4.0
"""Seconds, and factor of a lease's usual time, without a token or the end of a rollout, after which the leases
are handed back: the engine hangs, and others can do the work meanwhile."""


async def stay_paused(services: NodeServices) -> None:
    """Give signs of life before there is an engine, as long as this node is paused."""
    while (why := services.paused()) and not services.heads.ended:
        request = LeaseRequest(0, WorkerStats(-1), paused=why)
        try:
            await services.ask_trainer(request, LeaseReply, deadline=ASK_TIMEOUT_S)
        except (TransportError, Refused, RemoteProtocolError) as error:
            logger.debug("the trainer does not hear that this node is paused: %s", error)
        await services.heads.wait(lambda: not services.paused(), HEARTBEAT_S)


class EngineProgress:
    """Watch whether the leases in progress advance, by the usual time of this node's leases."""

    def __init__(self) -> None:
        self._moved = 0.0
        """Monotonic seconds at which a rollout ended, a token came, or the first lease in progress began."""
        self._tokens = 0
        """Tokens that the engine had made by then; some engines do not count them."""
        self._usual_s = 0.0
        """Seconds that a lease takes, a running mean; 0 before the first."""

    def moved(self, now: float) -> None:
        """Note that a rollout ended, or that there is work again."""
        self._moved = now

    def lease_ended(self, seconds: float) -> None:
        """Count a lease that took so long."""
        self._usual_s += (seconds - self._usual_s) / (4.0 if self._usual_s else 1.0)

    def stalled(self, tokens: int, now: float) -> str:
        """Return why the leases in progress are to be handed back; empty while they advance.

        New `tokens` of the engine count as progress. Each time, the usual time is multiplied by four: an engine
        that has become slow, and does not count its tokens, does not hand back one lease after the other.
        """
        if tokens != self._tokens:
            self._tokens, self._moved = tokens, now
        quiet, usual = now - self._moved, self._usual_s
        if not usual or quiet < max(STALLED_S, STALLED * usual):
            return ""
        self._usual_s, self._moved = quiet, now
        return f"no rollout has ended for {quiet:.0f} s, a lease usually takes {usual:.0f} s"


class InferenceRole:
    """Worker that asks for leases, generates and uploads them, until the run ends."""

    def __init__(
        self,
        services: NodeServices,
        run: RunManifest,
        weights: WeightSync,
        engine: Engine,
        config: EngineConfig,
        environments: dict[int, Environment],
        verdicts: VerdictLog,
    ) -> None:
        """`environments` are those available here, by their index in the run.

        One that is given up while others work is removed.
        """
        self._services = services
        self._book = services.heads
        self._run = run
        self._weights = weights
        self._engine = engine
        self._config = config
        self._numerics: NumericsClass | None = None
        """Numerics class of this node, sent in runs that measure bounds for each class."""
        self.verdicts = verdicts
        self._told = ""
        """The value of services.paused() that was last sent to the trainer."""
        self._catch_up = (0, NOTHING)
        """(epoch, version) to hold before a lease is asked for: the newest one at the end of a pause."""
        self._environments = environments
        concurrency = Concurrency(
            max_batch=config.max_batch * config.replicas,
            max_model_len=config.max_model_len,
        )
        self._admission = AdmissionControl(engine, concurrency)
        self._generator = RolloutGenerator(
            run_id=services.run_id,
            run=run,
            node=services.key.node_id,
            environments=environments,
            admission=self._admission,
            rollout_ended=self._rollout_ended,
        )
        self._uploads = UploadQueue(
            services,
            self._upload,
            verdicts.count_refusal,
            keep_versions=run.limits.max_off_policy_steps,
        )
        self._active: dict[int, int] = {}
        """Number of rollouts still to be made, by lease."""
        self._working: dict[int, asyncio.Task[None]] = {}
        self._progress = EngineProgress()
        self._per_lease = 0
        """Rollouts of the largest lease so far: requesting twice is better than hoarding."""
        self._room = asyncio.Event()
        """Set when the end of a rollout or a lease made room for another lease."""
        self._given_up = False
        """Whether the trainer still has to learn of abandoned leases."""
        self._asked = float("-inf")
        self._obstacle = ""
        """Reason why the last request brought no leases; empty if it did, or asked for none."""
        self._rest_until = 0.0
        """Time before which no lease is requested, in monotonic seconds."""
        self._unkept = ""
        """Why the last finished work was not kept; empty after a rest."""
        self._clock = GenerationClock()

    @property
    def held(self) -> int:
        """Number of leases being worked on."""
        return len(self._active)

    @property
    def waits_for(self) -> str:
        """Reason why nothing is generated now; empty while something is."""
        fault = self._engine.stats().fault
        if fault:
            return f"the engine: {fault}"
        if self._admission.inflight:
            return ""
        reason = "" if self._active else self._unkept or self._obstacle
        rest = self._rest_until - time.monotonic()
        if reason and rest > 0:
            reason = f"resting {rest:.0f} s: {reason}"
        if reason and self._uploads.leases():
            reason += f" ({len(self._uploads.leases())} finished submissions are kept for it)"
        return reason or self._weights.waits_for

    async def run(self) -> None:
        """Work until the run ends, beside WeightSync.run().

        Raises EngineError when the engine cannot be restarted.
        """
        self._uploads.open()
        if self._run.proofs.bounds == "measured":
            pipeline = isinstance(self._engine, PipelinedEngine)
            self._numerics = await asyncio.to_thread(numerics_of, self._config, pipeline=pipeline)
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(self.verdicts.fetch()),
                tasks.create_task(self.verdicts.fetch_bounds(self._numerics)),
                tasks.create_task(self._admission.run()),
                tasks.create_task(self._uploads.run()),
            ]
            await self._lease_loop(tasks)
            # The run is over: no task that is under way is needed.
            for task in [*loops, *self._working.values()]:
                task.cancel()

    def chunk_sources(self) -> dict[str, int]:
        """Return the bytes of fetched chunks by source."""
        return self._services.fetcher.by_source(self._services.trainer)

    def engine_row(self) -> EngineRow:
        """Describe the engine's state for the operator."""
        try:
            stats = self._engine.stats()
        except EngineError as error:  # it has failed for good, and this node is about to end
            stats = EngineStats(fault=str(error))
        admission = self._admission
        row = stats.row(self._config.type, inflight=admission.inflight, cap=admission.cap)
        row.taken_back = admission.taken_back
        row.tokens_per_s = round(admission.tokens_per_s, 1)
        return row

    # -- leases ----------------------------------------------------------------------------------

    async def _lease_loop(self, tasks: asyncio.TaskGroup) -> None:
        pause, lines, idle = PAUSE_S, LogBackoff(), LogBackoff(IDLE_LOG_S)
        while not self._book.ended:
            await self._book.end_without_trainer(self._weights.version, self._run.max_steps)
            if self._book.ended:
                break
            stats = self._engine.stats()
            fault = stats.fault
            if self._working:
                now = time.monotonic()
                if why := fault or self._progress.stalled(stats.generated_tokens, now):
                    self._give_up(why)
            if paused := self._services.paused():
                self._catch_up = self._book.order()
            if time.monotonic() >= self._rest_until:
                self._unkept = ""
            waits = fault or paused or self._unkept or self._weights.order < self._catch_up
            wanted = 0 if waits else self._wanted()
            if not wanted and not self._has_news():
                self._room.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._room.wait()
                continue
            try:
                reply = await self._ask_leases(wanted)
            except (TransportError, Refused, RemoteProtocolError) as error:
                if isinstance(error, Refused) and error.reason == Reason.BANNED:
                    seconds = await self.verdicts.refused(error.detail)
                    advice = CLASS_ADVICE if error.detail.startswith(WRONG_CLASS) else ""
                    self._obstacle = (
                        f"refused work ({error.detail}), see `primerl-node explain`"
                        f"{advice and '. '}{advice}"
                    )
                    self._rest_until = time.monotonic() + seconds
                    await self._rest(seconds)
                    continue
                refused = "refuses" if isinstance(error, Refused) else "is not reached"
                self._obstacle = f"the trainer {refused}: {error}"
                if lines.due():
                    logger.info("no leases: %s", error)
                await asyncio.sleep(pause)
                pause = min(pause * 1.6, PAUSE_MAX_S)
                continue
            pause = PAUSE_S
            lines.reset()
            self.verdicts.welcome()
            self._obstacle = ""
            if wanted and not reply.leases:
                self._obstacle = f"no work is leased: {reply.why or 'the trainer has none'}"
                if not self._active and idle.due():
                    logger.info("%s", self._obstacle)
            try:
                for sealed in reply.leases:
                    self._accept(sealed, tasks)
            except RemoteProtocolError as error:  # as where this machine's clock was set wrong
                self._obstacle = f"a lease is not taken: {error}"
                if idle.due():
                    logger.warning("%s", self._obstacle)
                await asyncio.sleep(PAUSE_MAX_S)
            if wanted and not reply.leases and not reply.verdicts:
                await asyncio.sleep(reply.retry_after_ms / 1000)

    def _wanted(self) -> int:
        """Count the leases to ask for: enough to fill the engine, and one in reserve."""
        if self._weights.version < 0:
            return 0
        if not self._per_lease:
            return 0 if self._active else 1
        room = self._admission.cap + self._per_lease - sum(self._active.values())
        return min(max(0, math.ceil(room / self._per_lease)), MAX_LEASES)

    def _has_news(self) -> bool:
        """Return whether to send a request although no lease is wanted."""
        waited = time.monotonic() - self._asked
        paused = self._services.paused()
        if self._given_up or self._told != paused:
            return True
        return waited >= HEARTBEAT_S and (bool(paused) or self._weights.version >= 0)

    async def _rest(self, seconds: float) -> None:
        """Sleep for `seconds` or until the run ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._book.ended:
                    await self._book.wait_news(self._book.order(), seconds)

    async def _ask_leases(self, wanted: int) -> LeaseReply:
        self._asked, self._given_up = time.monotonic(), False
        paused = self._services.paused()
        working, generating = self._clock.read(time.monotonic())
        stats = WorkerStats(self._weights.version, working, generating, self.chunk_sources())
        reply = await self._services.ask_trainer(
            LeaseRequest(wanted, stats, self._holding(), self._numerics, self._playable(), paused),
            LeaseReply,
            deadline=ASK_TIMEOUT_S,
        )
        self._told = paused
        self._weights.upstreams.learn(reply.upstreams, reply.downstreams)
        self._weights.upstreams.learn_successors(reply.successors)
        for sealed in reply.verdicts:
            await self.verdicts.take(sealed)
        return reply

    def _playable(self) -> tuple[int, ...] | None:
        """Return the environments available here; None for all."""
        playable = tuple(sorted(self._environments))
        return None if len(playable) == len(self._run.environments) else playable

    def _holding(self) -> tuple[int, ...]:
        """List the leases that are held here or whose submissions wait for upload."""
        return tuple(sorted({*self._active, *self._uploads.leases()})[-MAX_HELD:])

    def _accept(self, sealed: bytes, tasks: asyncio.TaskGroup) -> None:
        own = self._services.key.node_id
        lease = self._services.unseal(sealed, Purpose.LEASE, Lease, recipient=own).body
        name = environment_of(self._run, lease).name
        self.verdicts.leased(lease.lease_id, name)
        if lease.environment not in self._environments:
            logger.warning("lease %d is of %r, which this node cannot play", lease.lease_id, name)
            self._given_up = True
            return
        self._admission.groups_of(lease.group_size)
        rollouts = len(lease.tasks) * lease.group_size
        self._per_lease = max(self._per_lease, rollouts)
        if not self._working:
            self._progress.moved(time.monotonic())
        self._active[lease.lease_id] = rollouts
        work = tasks.create_task(self._work(lease, sealed))
        self._working[lease.lease_id] = work
        work.add_done_callback(lambda _: self._done(lease.lease_id))

    def _done(self, lease_id: int) -> None:
        self._working.pop(lease_id, None)
        del self._active[lease_id]
        self._room.set()

    def _rollout_ended(self, lease_id: int) -> None:
        self._active[lease_id] -= 1
        self._progress.moved(time.monotonic())
        if not self._room.is_set() and self._wanted():
            self._room.set()

    async def _upload(self, sealed: bytes, lease_id: int) -> bytes:
        services = self._services
        with services.tracing.lease("upload", lease_id, bytes=len(sealed)):
            return await upload(
                services.links,
                services.trainer,
                sealed,
                lease_id,
                deadline=ASK_TIMEOUT_S,
                pacer=services.rates.up,
            )

    # -- the work of a lease ---------------------------------------------------------------------

    async def _work(self, lease: Lease, sealed: bytes) -> None:
        """Carry out one lease; a lease that cannot be done in time expires."""
        rollouts = len(lease.tasks) * lease.group_size
        try:
            with self._services.tracing.lease(
                "lease", lease.lease_id, root=True, rollouts=rollouts
            ):
                began = time.monotonic()
                with part("generate"):
                    played = await self._generate(lease)
                self._working.pop(lease.lease_id, None)  # it needs the engine no longer
                self._progress.lease_ended(time.monotonic() - began)
                if played is not None:
                    with part("prove"):
                        await self._uploads.put(lease, self._submission(sealed, played))
        except TimeoutError:
            logger.warning("lease %d ran out of time", lease.lease_id)
        except EngineLost as error:
            logger.warning("lease %d is abandoned: %s", lease.lease_id, error)
            self._given_up = True
        except EnvironmentGivenUp as error:
            if self._environments.keys() <= {lease.environment}:
                raise
            self._environments.pop(lease.environment, None)
            self._given_up = True
            logger.error("%s: this node goes on with its other environments", error)
        except StorageError as error:
            logger.error("lease %d is lost: %s", lease.lease_id, error)
            self._unkept = str(error)
            self._rest_until = time.monotonic() + FULL_S

    def _submission(self, sealed: bytes, played: LeaseResult) -> Submission:
        return Submission(
            sealed, played.groups, self._config.type, played.plan, played.crossed, self._numerics
        )

    async def _generate(self, lease: Lease) -> LeaseResult | None:
        """Generate the groups of a lease; None if its policy version does not arrive."""
        async with asyncio.timeout(max(0.0, lease.deadline - time.time())):
            order = (lease.term, lease.min_version)
            if not await self._weights.wait_order(order, VERSION_WAIT_S):
                return None
            with self._clock.generating():
                return await self._generator.play(lease)

    async def succeeded(self) -> None:
        """Give the run's new leader what the one before may not have passed on; fetch its verdicts."""
        await self._uploads.resend()
        await self.verdicts.fetch()

    def hand_back(self, why: str) -> int:
        """Abandon all leases, so that other workers get them; return how many that are."""
        leases = len(self._working)
        if leases:
            self._give_up(why)
        return leases

    def _give_up(self, fault: str) -> None:
        logger.warning("%d lease(s) are abandoned: %s", len(self._working), fault)
        self._given_up = True
        for task in self._working.values():
            task.cancel()
        self._working.clear()
