"""Parent's side of an engine's process (host.py): send requests, watch it, restart it.

EngineChild is one process. EngineReplica starts a new one when it is lost: after a pause that grows with each
consecutive failure, and with the newest policy before any work.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..config.engine import EngineConfig
from ..errors import EngineError, EngineLost, NodeError, UsageError
from ..process.child_process import EXIT_REASON_S, ChildProcess
from ..process.exit_reason import CROWDED, LOOK, Causes, exit_reason, known_cause
from ..process.frames import ProcessMessage
from ..tasks import end_tasks
from .engine import Completion, EngineStats, GenerateRequest, WeightsFault, Written
from .handover import HostedPolicy
from .host_messages import (
    ANSWERS,
    LOST,
    MAX_FRAME,
    USAGE,
    EngineCheck,
    EngineDone,
    EngineDraw,
    EngineDrawn,
    EngineDrop,
    EngineFailed,
    EngineImport,
    EngineKeep,
    EngineKept,
    EngineLoad,
    EnginePing,
    EnginePong,
    EnginePrefill,
    EnginePrefilled,
    EngineRecall,
    EngineRejoin,
    EngineRequest,
    EngineSetUp,
    EngineStage,
    EngineWrite,
)
from .prefill import PrefillRequest

logger = logging.getLogger(__name__)

A = TypeVar("A")

PROGRAM = (sys.executable, "-P", "-m", f"{__package__}.host")
MEMORY_ADVICE = "lower engine.max_batch or engine.max_model_len"
TITLES = {"vllm": "vLLM"}
"""Engine types as users read them."""

VLLM_CAUSES: Causes = (
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "vLLM has no room for its cache: raise engine.vllm.gpu_memory_utilization or lower "
        "engine.max_model_len",
    ),
    (
        r"Free memory on device \S* ?\(([^()]+)\).* is less than desired GPU memory utilization \(([^()]+)\)",
        f"{CROWDED} (\\1 free, \\2 asked for): lower engine.vllm.gpu_memory_utilization or end what else uses "
        "this GPU",
    ),
    (
        r"Free memory on device.* is less than desired",
        f"{CROWDED}: lower engine.vllm.gpu_memory_utilization or end what else uses this GPU",
    ),
    (
        r"CUDA out of memory\. Tried to allocate ([\d.]+ \w+)\..* of which ([\d.]+ \w+) is free",
        "vLLM ran out of GPU memory (\\2 free, \\1 asked for): lower engine.vllm.gpu_memory_utilization or "
        "engine.max_batch",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|cudaErrorMemoryAllocation",
        "vLLM ran out of GPU memory: lower engine.vllm.gpu_memory_utilization or engine.max_batch",
    ),
    (
        r"\bMemoryError\b|not enough memory: you tried|Cannot allocate memory",
        "vLLM ran out of the machine's memory: lower engine.max_batch or engine.max_model_len",
    ),
    (
        r"No space left on device",
        "vLLM found no space left: make room on the disk and in /dev/shm",
    ),
    (
        r"NCCL error|ncclUnhandled|ncclSystemError",
        "vLLM's GPUs lost each other: look at nvidia-smi and dmesg",
    ),
    (
        r"CUDA error|CUDA driver error|Xid",
        "vLLM's GPU failed: look at nvidia-smi and dmesg",
    ),
    (
        r"Engine core proc \S+ died|EngineCore died|EngineDeadError",
        "vLLM's engine process ended: look at its log lines above; without any, the machine may have "
        "run out of memory",
    ),
)
"""Known reasons for the end of a process with vLLM."""

OTHER_CAUSES: Causes = (
    (
        r"out of memory|OutOfMemoryError|\bMemoryError\b|not enough memory|Cannot allocate memory",
        "the engine ran out of memory: lower engine.max_batch or engine.max_model_len",
    ),
    (r"CUDA error|CUDA driver error|Xid", "the engine's GPU failed: look at nvidia-smi and dmesg"),
)
"""Known reasons for the end of a process with another engine."""


@dataclass(frozen=True)
class EngineTimeouts:
    """Time limits of an engine's process, and its restarts."""

    start_s: float = 1800.0
    """Time until it can generate; compiling and capturing a large model takes minutes."""
    load_s: float = 600.0
    """Time for a request that is not a draw."""
    ping_s: float = 5.0
    """Interval between heartbeats."""
    quiet_s: float = 20.0
    """Time without an answer to a heartbeat after which its work is given to others."""
    silent_s: float = 60.0
    """Time without an answer to a heartbeat after which it counts as hung."""
    stuck_s: float = 600.0
    """Time without a token, despite work, after which it counts as hung.

    One step of a large prompt on a CPU takes minutes.
    """
    end_s: float = 20.0
    """Time to end when asked to."""
    max_restarts: int = 5
    """Consecutive restarts after crashes before the node gives up."""
    first_restart_s: float = 1.0
    """Pause before the first restart in a row."""
    restart_factor: float = 3.0
    most_restart_s: float = 243.0
    steady_s: float = 300.0
    """Working time after which consecutive failures are counted from zero again."""

    def before_restart(self, failures: int) -> float:
        """Return the seconds to wait before a restart after `failures` consecutive ones."""
        pause = self.first_restart_s * self.restart_factor ** min(failures, 30)
        return min(self.most_restart_s, pause)


class EngineChild(ChildProcess):
    """Replica in one process: start() first, close() or kill() last.

    Once it is lost, every request raises EngineLost.
    """

    Error = EngineError
    Lost = EngineLost
    answers = ANSWERS
    max_frame = MAX_FRAME

    def __init__(
        self,
        name: str,
        title: str,
        environment: Mapping[str, str],
        program: Sequence[str],
        timeouts: EngineTimeouts,
    ) -> None:
        super().__init__(name, title, program, environment)
        self._timeouts = timeouts
        self._ready = False
        self._stuck_s = 0.0
        self.stats = EngineStats()
        """Load that the process reported last."""

    async def begin(self) -> None:
        """Start the process, which imports its libraries, before the setup is known. Raises EngineError."""
        await self.spawn()
        self._send(EngineImport())

    async def start(self, setup: EngineSetUp) -> None:
        """Start the process, unless begin() did, and its engine.

        Raises EngineError, UsageError; then call kill().
        """
        if self.pid is None:
            await self.spawn()
        await self._ask(setup, EngineDone, self._timeouts.start_s)
        self._ready = True
        self._watch(EnginePing(), self._timeouts.ping_s, self._timeouts.silent_s)

    async def check(self, path: str) -> WeightsFault:
        """See Replica."""
        return await self._ask(EngineCheck(path), WeightsFault, self._timeouts.load_s)

    async def load(self, version: int, path: str) -> Written:
        """See Replica."""
        return await self._ask(EngineLoad(version, path), Written, self._timeouts.load_s)

    async def stage(self, path: str) -> WeightsFault:
        """See Replica."""
        return await self._ask(EngineStage(path), WeightsFault, self._timeouts.load_s)

    async def write(self, version: int) -> Written:
        """See Replica."""
        return await self._ask(EngineWrite(version), Written, self._timeouts.load_s)

    async def keep(self, key: int) -> list[int]:
        """Copy the weights; return the keys of all copies. Raises EngineError, EngineLost."""
        return (await self._ask(EngineKeep(key), EngineKept, self._timeouts.load_s)).keys

    async def recall(self, version: int, key: int) -> Written:
        """Write a copy again. Raises EngineError, and changes nothing, if there is none; EngineLost."""
        return await self._ask(EngineRecall(version, key), Written, self._timeouts.load_s)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Replica. There is no deadline, but a child that draws no token for long is lost."""
        return (await self._ask(EngineDraw(request), EngineDrawn, None)).completion

    async def prefill(self, requests: Sequence[PrefillRequest], timeout_s: float) -> list[bytes]:
        """Measure texts under the loaded policy; return the rows of each (see prefill.read_rows()).

        Raises EngineError; EngineLost, also after `timeout_s`; ValueError if the requests exceed a message.
        """
        request = EnginePrefill(list(requests))
        return (await self._ask(request, EnginePrefilled, timeout_s)).rows

    async def rejoin(self, epoch: int) -> None:
        """Begin a chain, as stage 0 of a pipeline. Raises EngineError, EngineLost."""
        await self._ask(EngineRejoin(epoch), EngineDone, self._timeouts.load_s)

    async def close(self) -> None:
        """End the process, by force if it takes too long; pending requests raise EngineError."""
        # a child that is still starting would first finish its start
        await self.end(self._timeouts.end_s if self._ready else 0.0)

    # -- asking ------------------------------------------------------------------------------------

    async def _ask(self, request: EngineRequest, kind: type[A], timeout_s: float | None) -> A:
        """Send a request and return its answer.

        Raises EngineError, UsageError; EngineLost if no answer comes in time, or the process is lost.
        """
        number = next(self._numbers)
        try:
            answer = await self._answer(request, timeout_s, number)
        except asyncio.CancelledError:
            if isinstance(request, EngineDraw | EnginePrefill) and not self._closing:
                self._send(EngineDrop(), number)
            raise
        if isinstance(answer, EngineFailed):
            raise await self._refused(answer)
        await self._expect(answer, kind)
        return answer

    async def _refused(self, answer: EngineFailed) -> NodeError:
        if answer.kind == USAGE:
            return UsageError(answer.detail)
        if answer.kind != LOST:
            return EngineError(answer.detail if self._ready else await self._cause(answer.detail))
        self._tail.append(answer.detail)
        await self._lose("")
        return self._failed()

    async def _cause(self, detail: str) -> str:
        """Explain why the engine did not start: vLLM's engine process reports it only in the log."""
        until = time.monotonic() + EXIT_REASON_S
        # log lines arrive by another pipe
        while not (known := known_cause(self._tail, self._causes)) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return f"{known} ({detail})" if known else detail

    def _exit_reason(self, code: int | None, lines: Sequence[str]) -> str:
        process = f"{self._title}'s process"
        return exit_reason(process, code, lines, causes=self._causes, memory_advice=MEMORY_ADVICE)

    @property
    def _causes(self) -> Causes:
        return VLLM_CAUSES if self._title == "vLLM" else OTHER_CAUSES

    def _take(self, message: ProcessMessage[Any]) -> None:
        if isinstance(message.body, EngineStats):
            self.stats = message.body
        elif isinstance(message.body, EnginePong):
            self._stuck_s = message.body.stuck_s
        else:
            super()._take(message)

    def _ailment(self) -> str:
        if self._stuck_s <= self._timeouts.stuck_s:
            return ""
        return f"{self._title} gave no token for {self._stuck_s:.0f} s though there is work: {LOOK}"


class EngineReplica:
    """Supervisor of one engine: start() first, close() last."""

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        setup: EngineSetUp,
        environment: Mapping[str, str],
        program: Sequence[str],
        timeouts: EngineTimeouts,
        policy: HostedPolicy,
        child: EngineChild | None = None,
    ) -> None:
        """`number` counts the replicas of one node; a new process gets the policy of `policy`.

        `child` is the first process, where one has begun.
        """
        self._name = f"{config.type}[{number}]"
        self._title = TITLES.get(config.type, config.type)
        self._setup = setup
        self._environment = environment
        self._program = program
        self._timeouts = timeouts
        self._policy = policy
        self._child = child or self._make()
        self._up = self._closed = False
        self._failures = 0
        self._watching: asyncio.Task[None] | None = None
        self._reason = ""
        self._past = EngineStats()
        """Counts of the earlier processes, all else empty."""
        self.restarts = 0
        self.given_up = False
        """Whether the engine will not be restarted."""
        self.load = 0
        """Requests under way at the engine."""

    @property
    def child(self) -> EngineChild | None:
        """Process that takes requests and weights; None while there is none."""
        return self._child if self._up and not self._child.lost.is_set() else None

    @property
    def fault(self) -> str:
        """Reason why no engine works now; empty while one works."""
        return self._reason or self._child.fault

    @property
    def stats(self) -> EngineStats:
        """Load of the engine; totals include earlier processes."""
        return self._past if self.child is None else self._child.stats.with_totals(self._past)

    async def start(self) -> None:
        """Start and watch the first process. Raises the errors of its start, without a retry."""
        await self._child.start(self._setup)
        self._up = True
        self._start_watch()

    async def rest(self) -> None:
        """End the process, which must have no request, until wake()."""
        await end_tasks(self._watching)
        self._past = self._past.with_totals(self._child.stats)
        self._down("")
        await self._child.close()

    async def wake(self) -> None:
        """Start a process again after rest(), with the newest policy; if that fails, as after a loss."""
        await self._restart()
        if not self._closed:
            self._start_watch()

    async def close(self) -> None:
        """End the watch and the process, without force if it works."""
        self._closed = True
        await end_tasks(self._watching)
        await self._child.close()

    def _start_watch(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name=f"{self._name} watch")
        self._watching.add_done_callback(self._ended)

    def _make(self) -> EngineChild:
        return EngineChild(
            self._name, self._title, self._environment, self._program, self._timeouts
        )

    async def _watch(self) -> None:
        """Restart the process whenever it is lost; return when it is given up."""
        while not self.given_up:
            if self._up:
                began = time.monotonic()
                await self._child.lost.wait()
                if time.monotonic() - began >= self._timeouts.steady_s:
                    self._failures = 0
                self._past = self._past.with_totals(self._child.stats)
                self._down(self._child.fault)
                await self._child.kill()
            await self._replace()

    async def _replace(self) -> None:
        while not self._up:
            if self._failures >= self._timeouts.max_restarts:
                self._give_up(f"{self.fault} (given up after {self._failures} restarts in a row)")
                return
            pause = self._timeouts.before_restart(self._failures)
            self._failures += 1
            logger.warning(
                "%s is lost: %s; it is started again in %g s (%d of %d)",
                *(self._name, self.fault, pause, self._failures, self._timeouts.max_restarts),
            )
            await asyncio.sleep(pause)
            self.restarts += await self._restart()

    async def _restart(self) -> bool:
        """Start a new process; returns whether it works."""
        child = self._child = self._make()
        try:
            await child.start(self._setup)
            async with self._policy.gate:  # no version is missed between renew() and the next load
                await self._policy.renew(child)
                self._up, self._reason = True, ""
                self._policy.replicas_changed.set()
        except (NodeError, OSError) as error:
            self._down(child.fault or str(error))
            await child.kill()
            return False
        logger.info("%s works again", self._name)
        return True

    def _down(self, fault: str) -> None:
        self._up, self._reason = False, fault
        self._policy.replicas_changed.set()

    def _give_up(self, fault: str) -> None:
        self.given_up = True
        self._down(fault)
        logger.error("%s: %s", self._name, fault)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Give up if the watch ends by an internal error: requests must not wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._give_up(f"its watch ended with {error!r}: report this")
