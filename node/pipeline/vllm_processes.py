"""Child processes of pipeline stages: vLLM's engine for stage 0, its worker for others.

HeadCore runs all of vLLM's engine with the first layers. StageCore runs vLLM's worker without a scheduler: each
micro-batch arrives with its schedule (stage_loop.py, in a thread of its own), and weights are applied on a
SWITCH frame. With engine.tp this process is the first rank of the stage and answers for all ranks. Run as
`python -m ... head` or `stage`; both serve the protocol of inference/host.py.
"""

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from ..config.engine import EngineConfig
from ..errors import EngineError, EngineLost, named_line
from ..inference.engine import (
    Completion,
    EngineStats,
    GenerateRequest,
    WeightsFault,
    Written,
)
from ..inference.fingerprint import find_fingerprint
from ..inference.place import (
    NOT_STAGE_0,
    START_SHARE,
    StagePlace,
    check_placed,
    environment_of,
    placed_arguments,
)
from ..inference.vllm import START_FAULTS, VllmCore, join_checks, prepare_library
from ..inference.vllm_arguments import read_shape
from ..memory_plan.memory import tensor_parallel
from ..tasks import end_tasks
from .frames import FrameLimits
from .ports import Port, PortClosed, SocketPort
from .stage_loop import serve
from .vllm_followers import FAILED

logger = logging.getLogger(__name__)

LANES_POLL_S = 1.0
"""Interval at which the micro-batch figures are read."""
STAGING_POLL_S = 0.005
RECONNECT_S = 0.2


class HeadCore(VllmCore):
    """Implements EngineCore and RejoiningCore."""

    def __init__(self, config: EngineConfig, place: StagePlace) -> None:
        super().__init__(config)
        self._place = place
        self._lane_stats: list[float] = [0, 0, 0.0]
        self._polling: asyncio.Task[None] | None = None

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See VllmCore."""
        await super().start(model_dir, fingerprint=fingerprint)
        self._polling = asyncio.create_task(self._poll_lanes(), name="lanes")

    def stats(self) -> EngineStats:
        """Return the engine's stats with its micro-batch figures."""
        lanes, in_flight, stall_share = self._lane_stats
        return replace(
            super().stats(),
            lanes=int(lanes),
            in_flight=int(in_flight),
            stall_share=round(stall_share, 2),
        )

    async def close(self) -> None:
        """Close the engine."""
        await end_tasks(self._polling)
        await super().close()

    def stuck_s(self) -> float:
        """Return 0: without a healthy ring no tokens arrive, which is not this process's fault.

        RingClient gives up a ring epoch that stalls, and the ring has its own deadlines.
        """
        return 0.0

    async def rejoin(self, epoch: int) -> None:
        """Begin a ring epoch; sequences in flight are recomputed from their tokens.

        Raises EngineError.
        """
        self._require_alive()
        async with self._paused():
            (fault,) = await self._rpc("primerl_rejoin", epoch)
        if fault:
            raise EngineError(fault)

    async def _poll_lanes(self) -> None:
        while not self._fault:
            await asyncio.sleep(LANES_POLL_S)
            with contextlib.suppress(EngineError):
                (self._lane_stats,) = await self._rpc("primerl_lanes")

    def _arguments(self, model_dir: Path, shape: dict[str, Any], *, proven: bool) -> dict[str, Any]:
        check_placed(self._config, self._place, shape)
        os.environ.update(environment_of(self._place))
        from .vllm_head_executor import HeadExecutor

        arguments = super()._arguments(model_dir, shape, proven=proven)
        arguments.setdefault("gpu_memory_utilization", START_SHARE)
        arguments |= placed_arguments(self._place, shape, tensor_parallel(self._config))
        return arguments | {"distributed_executor_backend": HeadExecutor}


class StageCore:
    """Implements EngineCore; generate() is refused."""

    def __init__(self, config: EngineConfig, place: StagePlace) -> None:
        self._config = config
        self._place = place
        self._executor: Any = None
        self._steps: Any = None
        self._port: Port | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._fault = ""

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """Start vLLM's worker with dummy weights. Raises EngineError, UsageError."""
        fingerprint = fingerprint and find_fingerprint(fingerprint).name
        shape = read_shape(model_dir)
        try:
            await asyncio.to_thread(self._build, model_dir, shape, fingerprint)
        except START_FAULTS as error:
            traceback.print_exc()
            raise EngineError(
                f"vLLM did not start on {model_dir} ({named_line(error)}): see its log lines above"
            ) from error
        self._thread = threading.Thread(target=self._serve, name="primerl-stage", daemon=True)
        self._thread.start()

    async def check(self, path: str) -> WeightsFault:
        """See Replica."""
        fit = join_checks(await self._call(self._ranks().call_concurrently, "primerl_check", path))
        return WeightsFault(fit.fault, [] if fit.fault else sorted(fit.placeless))

    async def load(self, version: int, path: str) -> Written:
        """Load a full state: at once before the first ring epoch, later on its SWITCH."""
        self._ranks()
        await self._call(self._steps.load, version, path)
        return Written(0.0, 0.0)

    async def stage(self, path: str) -> WeightsFault:
        """See Replica."""
        ranks = self._ranks()
        await self._call(ranks.call_concurrently, "primerl_stage", path)
        fault = await self._call(_staged, ranks)
        return WeightsFault(fault, [])

    async def write(self, version: int) -> Written:
        """Write the staged update: at once before the first ring epoch, later on its SWITCH."""
        self._ranks()
        await self._call(self._steps.write, version)
        return Written(0.0, 0.0)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raise EngineError: only stage 0 generates."""
        raise EngineError(NOT_STAGE_0)

    def stats(self) -> EngineStats:
        """Return empty stats: a later stage counts nothing."""
        return EngineStats()

    def stuck_s(self) -> float:
        """Return 0: stage 0 and the ring detect stalls."""
        return 0.0

    async def sleep(self) -> None:
        """Do nothing: stages do not sleep (check_placed())."""

    async def wake(self) -> None:
        """Do nothing: stages do not sleep (check_placed())."""

    async def close(self) -> None:
        """Close the port and end the ranks."""
        self._closing = True
        if self._port is not None:
            self._port.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 6.0)
        if self._executor is not None:
            await asyncio.to_thread(self._executor.followers.close)

    async def _call(self, work: Any, *arguments: Any) -> Any:
        try:
            return await asyncio.to_thread(work, *arguments)
        except EngineError:
            raise
        except Exception as error:  # vLLM raises anything; its weights are in an unknown state then
            self._fault = f"failed ({type(error).__name__} {error})"
            raise EngineLost(f"vLLM {self._fault}") from error

    def _ranks(self) -> Any:
        if self._fault:
            raise EngineLost(f"vLLM {self._fault}")
        return self._executor

    # -- the slow part of start() ------------------------------------------------------------------

    def _build(self, model_dir: Path, shape: dict[str, Any], fingerprint: str) -> None:
        check_placed(self._config, self._place, shape)
        os.environ.update(environment_of(self._place))
        arguments = prepare_library(self._config, model_dir, shape, proven=bool(fingerprint))
        arguments.setdefault("gpu_memory_utilization", START_SHARE)
        arguments |= placed_arguments(self._place, shape, tensor_parallel(self._config))
        executor = self._executor = _executor(arguments)
        faults = executor.collective_rpc("primerl_record", args=(fingerprint,))
        if fault := next(filter(None, faults), ""):
            raise EngineError(fault)
        from .vllm_stage_worker import StageSteps

        self._steps = StageSteps(self._place, executor)

    # -- the thread that computes ------------------------------------------------------------------

    def _serve(self) -> None:
        limits = FrameLimits.of(self._place.shape)
        try:
            self._executor.settle_thread()
            while not self._closing:
                try:
                    self._port = SocketPort(self._place.socket, limits)
                except PortClosed as error:
                    logger.warning("the node's end of the pipeline cannot be reached: %s", error)
                else:
                    serve(self._port, self._steps, rank=self._place.rank)
                if not self._closing:
                    time.sleep(RECONNECT_S)
        except BaseException:  # a bug or a lost device: the node starts another process
            traceback.print_exc()
            os._exit(FAILED)


def _staged(ranks: Any) -> str:
    """Wait until all ranks have staged an update; return the first fault, "" for none."""
    while None in (faults := ranks.call_concurrently("primerl_staged")):
        time.sleep(STAGING_POLL_S)
    return next(filter(None, faults), "")


def _executor(arguments: dict[str, Any]) -> Any:
    """Make an executor with its layers and an empty cache, as vLLM's engine does."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore
    from vllm.v1.engine.core import EngineCore  # pyright: ignore

    from .vllm_rank import StageExecutor

    core: Any = EngineCore
    arguments["distributed_executor_backend"] = StageExecutor
    config: Any = AsyncEngineArgs(**arguments).create_engine_config()
    executor = StageExecutor(config)
    stand_in = SimpleNamespace(
        model_executor=executor,
        available_gpu_memory_for_kv_cache=-1,
        collective_rpc=executor.collective_rpc,
    )
    core._initialize_kv_caches(stand_in, config)
    return executor


if __name__ == "__main__":
    from ..inference.host import main

    main({"head": HeadCore, "stage": StageCore}[sys.argv[1]])
