"""Embedded engine: concurrent generate() calls become batches of one decode loop.

One thread does all computation, in order of submission. No other synchronisation is needed: a load runs between
two batches, so a batch has exactly one version.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ..config.run import EngineConfig
from ..errors import EngineError, EngineLost, StorageError, one_line
from ..models.json_files import read_json
from ..process.threads import importing
from ..tasks import end_tasks
from ..weights.checkpoint import read_checkpoint
from ..weights.state import Changed, State, check_update
from .engine import (
    Completion,
    EngineStats,
    GenerateRequest,
    WeightsFault,
    Written,
    check_request,
)
from .fingerprint import find_fingerprint
from .handover import read_update
from .numerics import check_quantized

if TYPE_CHECKING:
    from ...protocol.manifests import RouteShape
    from .decoding import DecodedReply
    from .fingerprint import Projection
    from .model import LanguageModel

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

BATCH_WINDOW_S = 0.003
"""Wait for more requests before a batch starts."""
CLOSE_TIMEOUT_S = 60.0
"""Longest wait for the call that runs while the thread is closed."""


class ComputeThread:
    """Thread that runs one call at a time, in order of submission."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in the thread; return its result. Cancelling the wait does not stop it."""
        future = self._pool.submit(function, *args, **kwargs)
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """End the thread after all submitted calls have run. Safe to call twice."""
        end = asyncio.to_thread(self._pool.shutdown, wait=True)
        try:
            await asyncio.wait_for(end, CLOSE_TIMEOUT_S)
        except TimeoutError:
            logger.warning("thread %s still runs after %.0fs", self._name, CLOSE_TIMEOUT_S)


QUEUE_BATCHES = 16
"""Most batches that may wait; further requests are refused."""
CLOSED = "the engine is closed: start another one"


@dataclass(frozen=True)
class Loaded:
    """A policy version and its network, replaced together."""

    version: int
    network: "LanguageModel"


@dataclass(frozen=True)
class DecodeJob:
    """A request and the future of its completion."""

    request: GenerateRequest
    done: asyncio.Future[Completion]


class HfEngine:
    """An Engine over transformers weights: start(), then load() and generate() at will, close().

    In float32 the batch size moves a logit by rounding only, so a seed gives the same tokens in any batch; in
    bfloat16 that rounding is coarse enough to flip a near tie once in a while.

    Memory grows with engine.max_batch x sequence length, and holds two networks during a load, one during an
    update.
    """

    def __init__(self, config: EngineConfig, *, model: "type[LanguageModel] | None" = None) -> None:
        self._config = config
        self._model = model
        self._model_dir: Path | None = None
        self._fingerprint: Projection | None = None
        self._route_shape: RouteShape | None = None
        self._loaded: Loaded | None = None
        self._jobs: asyncio.Queue[DecodeJob] = asyncio.Queue(QUEUE_BATCHES * config.max_batch)
        self._waiting: set[asyncio.Future[Completion]] = set()
        self._thread: ComputeThread | None = None
        self._batcher: asyncio.Task[None] | None = None
        self._closing = threading.Event()

    @property
    def policy_version(self) -> int:
        """See Engine."""
        loaded = self._loaded
        return loaded.version if loaded else -1

    @property
    def dead(self) -> bool:
        """Whether the engine was started and has ended."""
        return self._batcher is not None and self._batcher.done()

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine. A started engine must be closed."""
        from ..models import huggingface

        if self._thread is not None:
            raise EngineError("the engine was started before: make another one")
        if fingerprint:
            self._fingerprint = find_fingerprint(fingerprint)
        if self._config.quantization != "none":
            shape = await asyncio.to_thread(read_json, model_dir / "config.json")
            check_quantized(self._config, shape)
        self._thread = ComputeThread("hf-engine")
        await self._thread.run(huggingface.import_model, model_dir)
        if self._config.enable_return_routed_experts:
            from ..models.routers import route_shape

            self._route_shape = await self._thread.run(route_shape, model_dir)
        self._model_dir = model_dir
        self._batcher = asyncio.create_task(self._run_batches(), name="hf-engine batches")
        self._batcher.add_done_callback(self._ended)

    async def load(self, version: int, state: State) -> None:
        """See Engine. Waits for the running batch; a state that does not fit changes nothing."""
        await self._started().run(self._load, version, state)
        logger.debug("policy %d loaded", version)

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Engine. Writes in place, between two batches; a refused update changes nothing."""
        thread = self._started()
        check_update(state, changed)
        written = await thread.run(self._update, version, state, changed)
        logger.debug("policy %d %s", version, "updated in place" if written else "loaded whole")

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine. Also raises EngineError for a request that this model cannot answer."""
        self._started()
        loaded = self._loaded
        if loaded is None:
            raise EngineError("the engine holds no weights: load a policy version first")
        check_request(request, loaded.network.vocab_size, self._config.max_model_len)
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._enqueue(DecodeJob(request, done))
        self._waiting.add(done)
        try:
            return await done
        finally:
            self._waiting.discard(done)

    def stats(self) -> EngineStats:
        """See Engine. A batch runs to its end: requests that came after its start wait."""
        waiting = self._jobs.qsize()
        return EngineStats(running=len(self._waiting) - waiting, waiting=waiting)

    async def close(self) -> None:
        """See Engine. Returns when the compute thread has ended; may be called twice."""
        self._closing.set()
        await end_tasks(self._batcher)  # it awaits nothing that ignores a cancel
        if self._thread is not None:
            await self._thread.close()
        self._loaded = None

    # -- on the event loop ------------------------------------------------------------------------

    def _started(self) -> ComputeThread:
        """Return the compute thread. Raises EngineError if the engine cannot be used."""
        if self._closing.is_set():
            raise EngineError(CLOSED)
        if self._thread is None or self._batcher is None:
            raise EngineError("the engine is not started: call start() first")
        if self._batcher.done():
            raise EngineError("the engine died (its log says why): start another one")
        return self._thread

    def _enqueue(self, job: DecodeJob) -> None:
        try:
            self._jobs.put_nowait(job)
        except asyncio.QueueFull as error:
            raise EngineError(
                f"{self._jobs.maxsize} requests wait already: ask for fewer at once, "
                "or raise engine.max_batch"
            ) from error

    async def _run_batches(self) -> None:
        thread = self._thread
        assert thread is not None  # start() makes it before this task
        while True:
            batch = await self._next_batch()
            try:
                completions = await thread.run(self._generate, batch)
            except EngineError as error:  # of this batch only: the engine goes on running
                _fail([job.done for job in batch], str(error), error)
                continue
            for job, completion in zip(batch, completions, strict=True):
                if not job.done.done():
                    job.done.set_result(completion)

    async def _next_batch(self) -> list[DecodeJob]:
        """Wait for a request, then briefly for more; skip requests cancelled meanwhile."""
        batch = [await self._jobs.get()]
        if self._jobs.qsize() + 1 < self._config.max_batch:
            await asyncio.sleep(BATCH_WINDOW_S)
        while len(batch) < self._config.max_batch and not self._jobs.empty():
            batch.append(self._jobs.get_nowait())
        return [job for job in batch if not job.done.done()]

    def _ended(self, batcher: asyncio.Task[None]) -> None:
        """Fail the waiting requests when the batches end, by close() or by a fatal error."""
        error = None if batcher.cancelled() else batcher.exception()
        if error is None:
            _fail(self._waiting, CLOSED, None)
            return
        logger.error("the engine died", exc_info=error)
        _fail(self._waiting, f"the engine died ({one_line(error)}): start another one", error)

    # -- in the compute thread ---------------------------------------------------------------------

    def _load(self, version: int, state: State) -> None:
        with importing:
            from .model import LanguageModel

        self._check_open()
        assert self._model_dir is not None  # start() sets it
        config, model = self._config, self._model or LanguageModel
        try:
            network = model.build(
                self._model_dir,
                state,
                dtype=config.dtype,
                device=config.device,
                quantization=config.quantization,
            )
        except RuntimeError as error:  # raised by torch: no memory, no such device
            raise EngineError(
                f"policy {version} cannot be loaded ({one_line(error)}): "
                "check engine.device and free memory"
            ) from error
        self._loaded = Loaded(version, network)

    def _update(self, version: int, state: State, changed: Changed) -> bool:
        """Update in place and return True; if that is impossible, load the state and return False."""
        self._check_open()
        loaded = self._loaded
        try:
            written = loaded is not None and loaded.network.update(state, changed)
        except RuntimeError as error:  # raised by torch in the middle of writing
            logger.warning("policy %d cannot be written in place: %s", version, one_line(error))
            written, self._loaded = False, None
        if loaded is None or not written:
            self._load(version, state)
            return False
        self._loaded = Loaded(version, loaded.network)
        return True

    def _generate(self, batch: list[DecodeJob]) -> list[Completion]:
        from .decoding import decode

        self._check_open()
        loaded = self._loaded
        if loaded is None or not batch:
            return []

        def cancelled() -> bool:
            """Return whether every caller has given up, or the engine is closing."""
            return self._closing.is_set() or all(job.done.done() for job in batch)

        replies = decode(
            loaded.network,
            [job.request for job in batch],
            max_length=self._config.max_model_len,
            cancelled=cancelled,
            keep_hidden=self._fingerprint is not None,
            keep_routes=self._config.enable_return_routed_experts,
        )
        return [
            self._complete(reply, loaded.version, job.request)
            for reply, job in zip(replies, batch, strict=True)
        ]

    def _complete(
        self, reply: "DecodedReply", version: int, request: GenerateRequest
    ) -> Completion:
        return Completion(
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            finish="stop" if reply.stopped else "length",
            policy_first=version,
            policy_last=version,
            proof=self._prove(reply),
            routes=self._routes(reply),
            support=_support(reply) if request.supported else b"",
        )

    def _routes(self, reply: "DecodedReply") -> bytes:
        from ..models.routes import pack_routes

        if reply.routes is None or self._route_shape is None:
            return b""
        return pack_routes(reply.routes.cpu().numpy(), self._route_shape)

    def _prove(self, reply: "DecodedReply") -> bytes:
        from .fingerprint import ProofFailed

        if self._fingerprint is None:
            return b""
        assert reply.hidden is not None  # decode() was told to keep them
        try:
            return self._fingerprint.make(reply.hidden.cpu().numpy())
        except ProofFailed as error:
            raise EngineError(
                f"no proof can be made of a completion ({error}): load another version"
            ) from error

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise EngineError(CLOSED)


def _support(reply: "DecodedReply") -> bytes:
    from ..models.support import pack_support

    if reply.support is None:  # no request of its batch truncates
        return b""
    return pack_support(reply.support.cpu().numpy(), reply.token_ids)


class HfCore:
    """EngineCore around an HfEngine: gets its weights from files.

    It keeps the current state on the host, since a file of an update has only the differences.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._engine = HfEngine(config)
        self._state: State = {}
        self._staged: tuple[State, Changed] | None = None

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See EngineCore."""
        await self._engine.start(model_dir, fingerprint=fingerprint)

    async def check(self, path: str) -> WeightsFault:
        """Return no fault: load() refuses a state that does not fit, and then changes nothing."""
        return WeightsFault("")

    async def load(self, version: int, path: str) -> Written:
        """See Replica."""
        try:
            state = await asyncio.to_thread(read_checkpoint, Path(path))
        except StorageError as error:
            raise EngineError(f"policy {version} cannot be read: {error}") from error
        began = time.monotonic()
        await self._engine.load(version, state)
        self._state = state
        return _written(began)

    async def stage(self, path: str) -> WeightsFault:
        """See Replica."""
        try:
            self._staged = await asyncio.to_thread(read_update, Path(path), self._state)
        except (StorageError, ValueError, LookupError) as error:
            return WeightsFault(f"the update cannot be read ({error})")
        return WeightsFault("")

    async def write(self, version: int) -> Written:
        """See Replica."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise EngineError("no update is ready: stage one first")
        began = time.monotonic()
        await self._engine.update(version, *staged)
        self._state, _ = staged
        return _written(began)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Replica."""
        try:
            return await self._engine.generate(request)
        except EngineError as error:
            if self._engine.dead:  # a new process may work
                raise EngineLost(str(error)) from error
            raise

    def stats(self) -> EngineStats:
        """See EngineCore."""
        return self._engine.stats()

    def stuck_s(self) -> float:
        """See EngineCore. Always 0: a batch is one call of unknown duration."""
        return 0.0

    async def sleep(self) -> None:
        """Raise EngineError: this engine keeps its memory."""
        raise EngineError("hf keeps its memory: set engine.sleep_after_s to 0")

    async def wake(self) -> None:
        """See EngineCore; this engine never sleeps."""

    async def close(self) -> None:
        """See EngineCore."""
        await self._engine.close()


def _written(began: float) -> Written:
    took = time.monotonic() - began  # nothing is generated during a write
    return Written(took, took)


def _fail(
    futures: "list[asyncio.Future[Completion]] | set[asyncio.Future[Completion]]",
    message: str,
    cause: BaseException | None,
) -> None:
    for future in futures:
        if not future.done():
            error = EngineError(message)
            error.__cause__ = cause
            future.set_exception(error)
