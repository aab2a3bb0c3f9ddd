"""The parent's end of one process that holds an engine (host.py): asked many things at once, watched, killed.

It is a ChildProcess (node/process/child_process.py): once lost, everything that was asked raises EngineLost.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..config.engine import EngineConfig
from ..ops.errors import EngineError, EngineLost, NodeError, UsageError
from ..process.child_process import EXIT_REASON_S, ChildProcess
from ..process.exit_reason import LOOK, Causes, exit_reason, known_cause
from .engine import Completion, GenerateRequest, WeightsFault, Written
from .host_frames import (
    LOST,
    USAGE,
    Answer,
    ApiOptions,
    Busy,
    Check,
    Checked,
    Done,
    Draw,
    Drawn,
    Drop,
    Failed,
    Load,
    Ping,
    Pong,
    Rejoin,
    Request,
    SetUp,
    Stage,
    Write,
    Wrote,
    as_completion,
    as_draw,
    read_answer,
)

A = TypeVar("A")

PROGRAM = (sys.executable, "-P", "-m", f"{__package__}.host")
MEMORY_ADVICE = "lower engine.max_batch or engine.max_model_len"

VLLM_CAUSES: Causes = (
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "vLLM has no room for its cache: raise engine.vllm.gpu_memory_utilization or lower "
        "engine.max_model_len",
    ),
    (
        r"Free memory on device.* is less than desired",
        "less GPU memory is free than vLLM was told to take: lower engine.vllm.gpu_memory_utilization "
        "or end what else uses this GPU",
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
"""Why a process with vLLM ended."""

OTHER_CAUSES: Causes = (
    (
        r"out of memory|OutOfMemoryError|\bMemoryError\b|not enough memory|Cannot allocate memory",
        "the engine ran out of memory: lower engine.max_batch or engine.max_model_len",
    ),
    (r"CUDA error|CUDA driver error|Xid", "the engine's GPU failed: look at nvidia-smi and dmesg"),
)
"""Why a process with another engine ended."""


@dataclass(frozen=True)
class Patience:
    """How long things may take, in seconds."""

    start: float = 1800.0
    """From nothing to an engine that generates; a large model is compiled and captured for minutes."""
    load: float = 600.0
    ping: float = 5.0
    """Between two questions whether it is there."""
    silent: float = 60.0
    """Without an answer to that it hangs."""
    stuck: float = 600.0
    """Without a token though there is work it hangs; one step of a large prompt on a CPU takes minutes."""
    end: float = 20.0
    """To end in peace."""


class EngineChild(ChildProcess):
    """Implements Replica: one process. start() first, close() or kill() last."""

    Error = EngineError
    Lost = EngineLost

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str],
        program: Sequence[str] = PROGRAM,
        patience: Patience | None = None,
        *,
        title: str = "vLLM",
    ) -> None:
        """`name` is what logs call it, `title` what holds the model there."""
        super().__init__(name, title, program, environment)
        self._patience = patience or Patience()
        self._numbers = itertools.count(1)
        self._ready = False
        self._stuck_s = 0.0
        self.busy = Busy()
        """What it told last."""

    async def start(
        self,
        config: EngineConfig,
        model_dir: Path,
        fingerprint: str,
        place: bytes = b"",
        api: ApiOptions | None = None,
    ) -> None:
        """Start the process and its engine; `place`: of a stage; `api`: serve vLLM's routes, too.

        Raises EngineError, UsageError; kill() it then.
        """
        await self.spawn()
        setup = SetUp(
            next(self._numbers),
            config.model_dump_json().encode(),
            str(model_dir),
            fingerprint,
            place,
            api,
        )
        await self._ask(setup, Done, self._patience.start)
        self._ready = True
        self._watch(lambda: Ping(0), self._patience.ping, self._patience.silent)

    async def check(self, path: str) -> WeightsFault:
        """See Replica."""
        found = await self._ask(Check(next(self._numbers), path), Checked, self._patience.load)
        return WeightsFault(found.fault, found.placeless)

    async def load(self, version: int, path: str) -> Written:
        """See Replica."""
        request = Load(next(self._numbers), version, path)
        wrote = await self._ask(request, Wrote, self._patience.load)
        return Written(wrote.paused_s, wrote.writing_s)

    async def stage(self, path: str) -> WeightsFault:
        """See Replica."""
        found = await self._ask(Stage(next(self._numbers), path), Checked, self._patience.load)
        return WeightsFault(found.fault, found.placeless)

    async def write(self, version: int) -> Written:
        """See Replica."""
        request = Write(next(self._numbers), version)
        wrote = await self._ask(request, Wrote, self._patience.load)
        return Written(wrote.paused_s, wrote.writing_s)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Replica. There is no deadline, but a child that gives nothing at all for long is lost."""
        draw = as_draw(next(self._numbers), request)
        return as_completion(await self._ask(draw, Drawn, None))

    async def rejoin(self, epoch: int) -> None:
        """Stage 0 of a pipeline: begin a chain. Raises EngineError, EngineLost."""
        await self._ask(Rejoin(next(self._numbers), epoch), Done, self._patience.load)

    async def close(self) -> None:
        """End it in peace, by force if it takes too long; what was asked raises EngineError."""
        # one that is still starting would go on until it has started
        await self.end(self._patience.end if self._ready else 0.0)

    # -- asking ------------------------------------------------------------------------------------

    async def _ask(self, request: Request, kind: type[A], timeout_s: float | None) -> A:
        """Its answer. Raises EngineError, UsageError; EngineLost if none comes in time, or none ever."""
        try:
            answer = await self._answer(request, timeout_s)
        except asyncio.CancelledError:
            if isinstance(request, Draw) and not self._closing:
                self._send(Drop(request.number))
            raise
        if isinstance(answer, Failed):
            raise await self._refused(answer)
        await self._expect(answer, kind)
        return answer

    async def _refused(self, answer: Failed) -> NodeError:
        if answer.kind == USAGE:
            return UsageError(answer.detail)
        if answer.kind != LOST:
            return EngineError(answer.detail if self._ready else await self._cause(answer.detail))
        self._tail.append(answer.detail)
        await self._lose("")
        return self._failed()

    async def _cause(self, detail: str) -> str:
        """Why it did not start: vLLM's engine process says it in the log, and only there."""
        until = time.monotonic() + EXIT_REASON_S
        # the lines come by another pipe
        while not (known := known_cause(self._tail, self._causes)) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return f"{known} ({detail})" if known else detail

    def _decode(self, body: bytes) -> Answer | Busy:
        return read_answer(body)

    def _exit_reason(self, code: int | None, lines: Sequence[str]) -> str:
        process = f"{self._title}'s process"
        return exit_reason(process, code, lines, causes=self._causes, memory_advice=MEMORY_ADVICE)

    @property
    def _causes(self) -> Causes:
        return VLLM_CAUSES if self._title == "vLLM" else OTHER_CAUSES

    def _take(self, message: Any) -> None:
        if isinstance(message, Busy):
            self.busy = message
        elif isinstance(message, Pong):
            self._stuck_s = message.stuck_s
        else:
            super()._take(message)

    def _ailment(self) -> str:
        if self._stuck_s <= self._patience.stuck:
            return ""
        return f"{self._title} gave no token for {self._stuck_s:.0f} s though there is work: {LOOK}"
