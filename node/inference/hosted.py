"""Engine in processes of its own, for vLLM and for hf on a GPU: `engine.dp` replicas.

A replica that ends, hangs or runs out of memory is lost, and is restarted with the newest weights. Its requests
raise EngineLost; the other replicas go on. All replicas read each state from one file.
"""

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from ...protocol.manifests import RunManifest
from ...protocol.recent import RecentDict
from ..config.engine import EngineConfig
from ..errors import EngineError, EngineLost, UsageError, first_cause
from ..gpus import VARIABLE, shown, visible
from ..memory_plan.memory import check_fits
from ..process.child_process import REST_S, REST_STARTS
from ..process.heap import trim_heap
from ..process.spawn import PARENT_VARIABLE, without_secrets
from ..tasks import end_tasks
from ..weights.state import Changed, State, check_update
from .engine import (
    Completion,
    EngineStats,
    GenerateRequest,
    check_request,
)
from .engine_replica import PROGRAM, TITLES, EngineChild, EngineReplica, EngineTimeouts
from .fingerprint import find_fingerprint
from .handover import HostedPolicy, read_adapter_base
from .host_messages import ApiOptions, EngineSetUp
from .place import StagePlace, check_placed, encode_place
from .vllm_arguments import is_installed, read_shape, resolve_parallel

logger = logging.getLogger(__name__)

T = TypeVar("T")

AUDITOR = "vllm auditor"
"""Name of the process of an engine that audits."""
UNSTARTED = "is not started: call start() first"
STARTING = "is starting: wait for start()"
CLOSED = "was closed: start another"
MOST_GROUPS = 4096
"""Most groups remembered with the replica that has their prompt in its cache."""


class HostedEngine:
    """Implementation of Engine."""

    def __init__(
        self,
        config: EngineConfig,
        program: Sequence[str] = PROGRAM,
        timeouts: EngineTimeouts | None = None,
        *,
        place: StagePlace | None = None,
        ahead: EngineChild | None = None,
    ) -> None:
        """`program`: command of each process (host.py); `place`: a pipeline stage's place.

        Pipeline stages are started by pipeline/hosted_stage.py. `ahead` is a process of begun_ahead(), which
        this engine uses or ends.
        """
        self._ahead = ahead
        self._config = config
        self._title = TITLES.get(config.type, config.type)
        self._program = program
        self._place = place
        self._timeouts = timeouts or EngineTimeouts()
        self._replicas: list[EngineReplica] = []
        self._policy = HostedPolicy()
        self._groups = RecentDict[bytes, EngineReplica](MOST_GROUPS)
        self._vocab_size = 0
        self._pending: set[asyncio.Task[Any]] = set()
        self._in_turn = asyncio.Lock()
        self._fault = UNSTARTED
        self._run: RunManifest | None = None
        """Run whose adapters the engines merge; None if they merge none."""
        self._fetched: Awaitable[None] | None = None
        """Done when the base of these adapters is in the model's directory; None if it is there."""
        self._api: ApiOptions | None = None
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        self._rest_s = REST_S
        self._used_at = time.monotonic()
        self._may_rest: Callable[[], bool] = lambda: (
            config.type != "vllm"
        )  # which takes long to start
        self._rests = False
        """Whether the processes have ended for want of work, until there is some."""
        self._turning = asyncio.Lock()
        """Held while they end so, and while they are started again."""
        self._resting: asyncio.Task[None] | None = None

    @property
    def policy_version(self) -> int:
        """Version that every working replica has; -1 before the first load()."""
        return self._policy.version

    @property
    def pids(self) -> list[int]:
        """Process ids of the replicas, each the leader of its process group."""
        return [child.pid for child in self._children() if child.pid]

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """Start every engine on the config of `model_dir` with dummy weights.

        vLLM takes 10-30 s on a CPU. Raises EngineError if vLLM is missing or fails, UsageError for settings
        that `engine.vllm` may not have. An engine whose first start fails is not tried again.
        """
        fingerprint = fingerprint and find_fingerprint(fingerprint).name
        if self._fault is not UNSTARTED:
            raise EngineError(f"the {self._title} engine was started before: make a new one")
        self._fault = STARTING
        began = time.monotonic()
        shape = read_shape(model_dir)
        self._vocab_size = int(shape["vocab_size"])
        whole = await asyncio.to_thread(resolve_parallel, self._config, shape)
        if self._place is None:
            await asyncio.to_thread(check_fits, whole, model_dir, fingerprint=fingerprint)
        else:
            check_placed(whole, self._place, shape)
        environments = await asyncio.to_thread(environments_of, whole, os.environ)
        ahead, self._ahead = await take_ahead(self._ahead, whole), None
        self._require(STARTING)
        setup = EngineSetUp(
            config=whole.model_copy(update={"dp": 1}).model_dump_json().encode(),
            model_dir=str(model_dir),
            fingerprint=fingerprint,
            place=encode_place(self._place) if self._place else b"",
        )
        for number, environment in enumerate(environments):
            api = self._api and replace(self._api, socket=self._socket(number))
            self._replicas.append(
                EngineReplica(
                    number,
                    self._config,
                    replace(setup, api=api),
                    environment,
                    self._program,
                    self._timeouts,
                    self._policy,
                    None if number else ahead,
                )
            )
        await asyncio.gather(self._start_replicas(), self._read_base(model_dir))
        self._require(STARTING)
        self._fault = ""
        took_s = time.monotonic() - began
        logger.info("%d x %s started in %.1f s", len(environments), self._title, took_s)
        if self._config.type != "vllm":
            self._rest_s = max(REST_S, took_s * REST_STARTS)
        self._resting = asyncio.create_task(self._rest_when_idle(), name="engine rests")

    def rest_while(self, paused: Callable[[], bool]) -> None:
        """Let the processes end after the usual time without work also where they take long to start, while
        `paused` says so."""
        usual = self._may_rest
        self._may_rest = lambda: usual() or paused()

    def merge_adapters(self, run: RunManifest, fetched: Awaitable[None] | None = None) -> bool:
        """Make every engine merge adapters into the base of `run`; call before start().

        The directory given to start() must have the base's files once `fetched` is done. Returns False if the
        engine cannot merge adapters.
        """
        merging = self._config.type == "vllm" and self._place is None
        if run.adapters is None or not merging:
            return False
        self._require(UNSTARTED)
        self._run, self._fetched = run, fetched
        return True

    async def load(self, version: int, state: State) -> None:
        """Replace the weights in place; running requests go on under the new ones.

        Waits for an engine if all are being restarted. Raises EngineError: if the state does not fit, the old
        weights stay; after any other error no engine is left.
        """
        await self._kept(self._change(lambda engines: self._policy.load(engines, version, state)))

    async def _read_base(self, model_dir: Path) -> None:
        """Read and prove the base that the engines merge adapters into; keep only its layout."""
        if self._run is not None:
            if self._fetched is not None:
                await self._fetched
            self._policy.base = await asyncio.to_thread(read_adapter_base, model_dir, self._run)

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """Load a state like load(), sending the engines only the changes.

        They prepare the changes beside generation, which pauses only for the write. An engine that cannot
        prepare them loads the whole state.
        """
        check_update(state, changed)
        await self._kept(
            self._change(lambda engines: self._policy.update(engines, version, state, changed))
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion; see Engine. Raises EngineError, EngineLost."""
        self._require_weights()
        longest = self._config.max_model_len
        check_request(request, self._vocab_size, longest)
        await self._wake()
        with self._chosen(request.group) as (_, child):
            return await child.generate(request)

    # -- vLLM's own OpenAI server ------------------------------------------------------------------

    def serve_api(self, options: ApiOptions) -> bool:
        """Make every engine serve vLLM's OpenAI routes on a Unix socket; call before start().

        Returns False if the engine has no such server.
        """
        if self._config.type != "vllm" or self._place is not None:
            return False
        self._require(UNSTARTED)
        self._api = options
        # mode 0700: only its owner reaches the sockets, which ask for no key
        self._sockets = tempfile.TemporaryDirectory(prefix="primerl-api-")
        return True

    @contextmanager
    def upstream(self) -> Generator[str]:
        """Choose the least busy engine for one request, and yield the path of its socket.

        Raises EngineError, EngineLost.
        """
        self._require_weights()
        with self._chosen(b"") as (number, _):
            yield self._socket(number)

    def upstreams(self) -> list[str]:
        """Return the sockets of all engines that work."""
        return [
            self._socket(number) for number, replica in enumerate(self._replicas) if replica.child
        ]

    def _socket(self, number: int) -> str:
        assert self._sockets is not None  # serve_api() made it
        return f"{self._sockets.name}/{number}.sock"

    @contextmanager
    def _chosen(self, group: bytes) -> Generator[tuple[int, EngineChild]]:
        """Choose a replica for one request, and count the request. Raises EngineError, EngineLost."""
        replica = self._choose_replica(group)
        child = replica.child if replica else None
        if replica is None or child is None:
            raise EngineLost(f"the {self._title} engine is being started again: {self._down()}")
        replica.load += 1
        try:
            yield self._replicas.index(replica), child
        finally:
            replica.load -= 1
            self._used_at = time.monotonic()

    def stats(self) -> EngineStats:
        """See Engine. Raises EngineError if every engine was given up."""
        fault = "" if self._fault or self._rests else self._down() or self._hanging()
        stats = [replica.stats for replica in self._replicas]
        whole = EngineStats(
            running=sum(engine.running for engine in stats),
            waiting=sum(engine.waiting for engine in stats),
            kv_use=max((engine.kv_use for engine in stats), default=0.0),
            kv_tokens=sum(engine.kv_tokens for engine in stats),
            restarts=sum(replica.restarts for replica in self._replicas),
            fault=fault,
        )
        return whole.with_totals(*stats)

    async def close(self) -> None:
        """End the processes, by force if need be; pending requests raise EngineError."""
        self._fault = CLOSED
        await end_tasks(self._resting)
        # close the engines first: pending requests then report that the engine was closed
        await asyncio.gather(*(replica.close() for replica in self._replicas))
        if self._ahead is not None:
            await self._ahead.kill()
        await end_tasks(*self._pending)
        if self._sockets is not None:
            self._sockets.cleanup()

    # -- starting ----------------------------------------------------------------------------------

    async def _start_replicas(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for replica in self._replicas:
                    tasks.create_task(replica.start(), name="engine start")
        except BaseException as error:  # also when cancelled: a part of them is useless
            await asyncio.gather(*(replica.close() for replica in self._replicas))
            if not isinstance(error, BaseExceptionGroup):
                raise
            cause = first_cause(error)
            if isinstance(cause, EngineLost):
                raise EngineError(f"{self._title} did not start: {cause}") from cause
            raise cause from None

    # -- without work ------------------------------------------------------------------------------

    async def _rest_when_idle(self) -> None:
        """End the processes whenever there was no work for some time."""
        while True:
            left_s = self._used_at + self._rest_s - time.monotonic()
            await asyncio.sleep(max(left_s, self._rest_s / 10))
            async with self._in_turn, self._turning:
                busy = any(replica.load for replica in self._replicas) or not self._children()
                idle = time.monotonic() >= self._used_at + self._rest_s
                if self._rests or busy or not idle or not self._may_rest():
                    continue
                self._rests = True  # a request that comes meanwhile waits for the lock
                await asyncio.gather(*(replica.rest() for replica in self._replicas))
                trim_heap()

    async def _wake(self) -> None:
        """Start processes that rest; a caller that is cancelled leaves none half-started."""
        if self._rests:
            await self._kept(self._wake_all())

    async def _wake_all(self) -> None:
        async with self._turning:
            if self._rests:
                await asyncio.gather(*(replica.wake() for replica in self._replicas))
                self._rests = False
                self._used_at = time.monotonic()

    # -- weights -----------------------------------------------------------------------------------

    async def _change(
        self, change: Callable[[list[EngineChild]], Coroutine[Any, Any, None]]
    ) -> None:
        self._require("")
        async with self._in_turn:
            await self._wake()
            self._used_at = time.monotonic()
            while True:
                await self._wait_for_one()
                try:
                    async with self._policy.gate:
                        return await change(self._children())
                except EngineLost as error:
                    logger.warning("no engine has the new policy yet: %s", error)

    async def _wait_for_one(self) -> None:
        """Wait until a replica works. Raises EngineError if none ever will."""
        while not self._children():
            self._policy.replicas_changed.clear()
            self._require("")
            self._down()
            await self._policy.replicas_changed.wait()

    async def _kept(self, work: Coroutine[Any, Any, T]) -> T:
        """Finish `work` even if the caller is cancelled: half of it would leave unknown weights."""
        task = asyncio.create_task(work)
        self._pending.add(task)
        task.add_done_callback(self._over)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and not _cancelling():
                raise EngineError(f"the {self._title} engine {self._fault or CLOSED}") from None
            raise

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._pending.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it: the caller may be gone

    # -- small parts -------------------------------------------------------------------------------

    def _require(self, fault: str) -> None:
        if self._fault != fault:
            raise EngineError(f"the {self._title} engine {self._fault}")

    def _require_weights(self) -> None:
        self._require("")
        if self._policy.version < 0:
            raise EngineError(f"the {self._title} engine holds no weights: call load() first")

    def _children(self) -> list[EngineChild]:
        """Return the processes that work."""
        return [child for replica in self._replicas if (child := replica.child)]

    def _down(self) -> str:
        """Return why no replica works; empty if one does. Raises EngineError if none ever will."""
        if self._children():
            return ""
        hopeful = [replica for replica in self._replicas if not replica.given_up]
        if not hopeful:
            raise EngineError(
                self._replicas[-1].fault if self._replicas else "no engine was started"
            )
        return hopeful[0].fault

    def _hanging(self) -> str:
        """Return why no replica makes progress although all run; empty if one does, or has nothing to do."""
        children = [child for replica in self._replicas if (child := replica.child)]
        silence = min((min(child.silent_s, child.missed_s) for child in children), default=0.0)
        busy = any(replica.load for replica in self._replicas)
        if not busy or silence < self._timeouts.quiet_s:
            return ""
        return f"{self._title} has given no sign of life for {silence:.0f} s"

    def _choose_replica(self, group: bytes) -> EngineReplica | None:
        """Choose the replica with the group's prompt, else the least busy; None if all are down."""
        if group and (known := self._groups.get(group)) is not None and known.child:
            self._groups.move_to_end(group)
            return known
        working = (replica for replica in self._replicas if replica.child)
        replica = min(working, key=lambda replica: replica.load, default=None)
        if group and replica is not None:
            self._groups[group] = replica
        return replica


def imports_plainly(config: EngineConfig) -> bool:
    """Return whether vLLM is imported without variables that a run decides, in one process for one engine."""
    alone = config.replicas == 1 or config.shares_gpu
    return alone and not config.batch_invariant and not config.draft_tokens


@asynccontextmanager
async def begun_ahead(
    config: EngineConfig, name: str = "vllm[0]", timeouts: EngineTimeouts | None = None
) -> AsyncGenerator[EngineChild | None]:
    """Start the process of an engine that the block makes later, for its imports; end it after the block.

    None where there is nothing to gain. Raises EngineError.
    """
    if config.type != "vllm" or not is_installed() or not imports_plainly(config):
        yield None
        return
    environment = environments_of(config, os.environ)[0]
    ahead = EngineChild(name, TITLES["vllm"], environment, PROGRAM, timeouts or EngineTimeouts())
    await ahead.begin()
    try:
        yield ahead
    finally:
        await ahead.kill()


async def take_ahead(ahead: EngineChild | None, config: EngineConfig) -> EngineChild | None:
    """Return the process that has begun, if it imports what an engine of `config` needs; else end it."""
    if ahead is not None and (ahead.lost.is_set() or not imports_plainly(config)):
        await ahead.kill()
        return None
    return ahead


def environments_of(config: EngineConfig, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Make the environment of each replica's process; several replicas get separate GPUs, or share one.

    Raises UsageError if there are too few.
    """
    ours = without_secrets(environ) | {PARENT_VARIABLE: str(os.getpid())}
    count = config.replicas
    gpus = visible(environ) if count > 1 and config.device != "cpu" else ()
    if not gpus or (config.shares_gpu and len(gpus) == 1):
        return [ours] * count
    each = len(gpus) // count if config.tp == "auto" else config.tp * config.pp
    if not each or each * count > len(gpus):
        raise UsageError(
            f"engine.dp = {count} with tp = {config.tp} wants {max(1, each) * count} GPUs, and "
            f"{len(gpus)} are visible: lower one of them"
        )
    return [
        ours | {VARIABLE: shown(gpus[number * each : (number + 1) * each])}
        for number in range(count)
    ]


def _cancelling() -> bool:
    """Return whether the running task itself was cancelled, not only the task it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
