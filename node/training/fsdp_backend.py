"""The trainer backend over many GPUs: the daemon's calls to a torchrun group (rank.py).

A dead or silent rank raises RankFailed and never hangs: every call has a deadline. Afterwards this backend is
unusable; a new one can load the last checkpoint. Neither torch nor NCCL runs in the daemon.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from ..config.run import TrainingConfig
from ..errors import EngineError
from ..tasks import end_tasks
from ..weights.state import State
from .backend import SampleTerms, Snapshot
from .operations import (
    EvaluateCall,
    LearnerBackend,
    LearnerCall,
    MethodCall,
    StepCall,
    SupervisedStepCall,
    WriteSnapshotCall,
    absolute,
)
from .rank_group import NOT_RUNNING, RankGroup
from .rank_messages import RankDone, RankRequest, RankStart, RankWriteStaged
from .snapshot import SnapshotReader, exchange_directory

T = TypeVar("T")

STEP_TIMEOUTS = 2
SECONDS_PER_TOKEN = 0.01
"""Generous: slower than a small model on one core."""
MODEL_TIMEOUTS = 3
"""Deadline, in units of fsdp.timeout_s, of a call that writes or reads the whole model."""
STAGED_TIMEOUTS = 10
"""Deadline, in units of fsdp.timeout_s, of a checkpoint written during training; its disk may be slow."""
CPU_RANKS = 2


class FsdpBackend(LearnerBackend):
    """TrainBackend over ranks that share a model.

    If a caller is cancelled, its call still finishes; the next one queues behind it, and close() ends it.

    Deadlines: 2 x fsdp.timeout_s plus 10 ms per token for step(), evaluate() and supervised_step(),
    fsdp.start_timeout_s for compile_step(), 3 x fsdp.timeout_s for other calls unless they state another.
    """

    def __init__(
        self,
        config: TrainingConfig,
        *,
        max_steps: int,
        seed: int,
        temperature: float = 1.0,
        own: Mapping[str, SampleTerms] = MappingProxyType({}),
        ranks: RankGroup | None = None,
    ) -> None:
        """Configure the ranks; start() starts them.

        `temperature` is the sampling temperature; environments with terms in `own`, by name, have their own.
        `max_steps` shapes the schedule. Given `ranks` are used and left running by close(); otherwise start()
        starts new ones.
        """
        self._config = config
        self._max_steps = max_steps
        self._seed = seed
        self._temperature = temperature
        self._own = dict(own)
        self._given = ranks
        self._ranks: RankGroup | None = None
        self._reader = SnapshotReader(threads=config.threads, ahead=config.device != "cpu")
        self._started = False
        self._unread = False
        """Whether the last snapshot was not read: then the next one must be whole."""
        self._reading: asyncio.Task[Snapshot] | None = None
        self._turn = asyncio.Lock()
        self._calls: set[asyncio.Task[object]] = set()
        self._model_s = MODEL_TIMEOUTS * config.fsdp.timeout_s

    async def start(self, model_dir: Path) -> None:
        """Start the ranks; each loads its share of the model. Raises EngineError, RankFailed."""
        if self._started:
            raise EngineError("this backend was started before: make a new one")
        self._started = True
        ranks = self._given
        if ranks is None:
            count = await asyncio.to_thread(count_ranks, self._config)
            size = await asyncio.to_thread(_policy_bytes, model_dir)
            ranks = RankGroup(self._config, count)
            await ranks.start(exchange_directory(size))
        self._ranks = ranks
        ask = RankStart(
            absolute(model_dir), self._max_steps, self._seed, self._temperature, self._own
        )
        try:
            await self._ask(ask, self._config.fsdp.start_timeout_s)
        except BaseException:  # also when cancelled: ranks without a model are useless
            await self.close()
            raise

    async def state(self) -> State:
        """Return a copy of the bf16 policy."""

        async def read(ranks: RankGroup) -> State:
            path = ranks.directory / "state"
            await ranks.ask(MethodCall("write_state", str(path)), self._model_s)
            return await asyncio.to_thread(self._reader.state, path)

        return await self._in_turn(read)

    def snapshot(self) -> asyncio.Future[Snapshot]:
        """See TrainBackend. Later calls go on once the ranks have written it, while it is read."""
        written = self._begin(self._write_snapshot)

        async def read() -> Snapshot:
            return await asyncio.shield(await asyncio.shield(written))

        return asyncio.create_task(read())

    async def _write_snapshot(self, ranks: RankGroup) -> asyncio.Task[Snapshot]:
        """Have a snapshot written; return the task that reads it."""
        if self._reading is not None:
            await asyncio.wait([self._reading])
        path = ranks.directory / "snapshot"
        whole, self._unread = self._unread, True
        await ranks.ask(WriteSnapshotCall(str(path), whole), self._model_s)
        self._reading = asyncio.create_task(self._read(path))
        self._reading.add_done_callback(_retrieve)
        return self._reading

    async def _read(self, path: Path) -> Snapshot:
        snapshot = await asyncio.to_thread(self._reader.snapshot, path)
        self._unread = False
        return snapshot

    async def write_staged(self, directory: Path) -> None:
        """Write the newest stage(), while other calls go on. Deadline: 10 x fsdp.timeout_s."""
        if self._ranks is None:
            raise EngineError(NOT_RUNNING)
        deadline = STAGED_TIMEOUTS * self._config.fsdp.timeout_s
        await self._ranks.ask(RankWriteStaged(absolute(directory)), deadline)

    async def close(self) -> None:
        """End the ranks, also in the middle of a call; safe to call twice."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None and ranks is not self._given:
            await (ranks.kill() if self._calls else ranks.close())
        await end_tasks(*self._calls)
        if self._reading is not None:
            await asyncio.wait([self._reading])
        await asyncio.to_thread(self._reader.close)

    async def _perform(self, call: LearnerCall) -> dict[str, float]:
        fsdp = self._config.fsdp
        if isinstance(call, StepCall | EvaluateCall | SupervisedStepCall):
            limit_s = STEP_TIMEOUTS * fsdp.timeout_s + SECONDS_PER_TOKEN * call.tokens
        elif call == MethodCall("compile_step"):
            limit_s = fsdp.start_timeout_s
        else:
            limit_s = self._model_s
        return await self._ask(call, limit_s)

    async def _ask(self, request: RankRequest, timeout_s: float) -> dict[str, float]:
        """Send a request when it is this call's turn; returns the figures of the answer."""

        async def work(ranks: RankGroup) -> dict[str, float]:
            answer = await ranks.ask(request, timeout_s)
            assert isinstance(answer, RankDone)
            return answer.values

        return await self._in_turn(work)

    async def _in_turn(self, work: Callable[[RankGroup], Awaitable[T]]) -> T:
        """Run `work` in turn and to its end, also when the caller is cancelled."""
        return await asyncio.shield(self._begin(work))

    def _begin(self, work: Callable[[RankGroup], Awaitable[T]]) -> asyncio.Task[T]:
        """Begin `work` in turn: after all calls that were begun before."""
        ranks = self._ranks
        if ranks is None:
            raise EngineError(NOT_RUNNING)

        async def wait_and_work() -> T:
            async with self._turn:
                return await work(ranks)

        call = asyncio.create_task(wait_and_work(), name="call of ranks")
        self._calls.add(call)
        call.add_done_callback(self._forget)
        return call

    def _forget(self, call: "asyncio.Task[T]") -> None:
        self._calls.discard(call)
        _retrieve(call)


def _retrieve(call: "asyncio.Task[T]") -> None:
    """Retrieve an error: the caller may be cancelled, and the next call fails with it, too."""
    if not call.cancelled():
        call.exception()


def count_ranks(config: TrainingConfig) -> int:
    """Return the number of ranks on this machine: as configured, else one per GPU, else two.

    Imports torch.
    """
    if config.fsdp.ranks:
        return config.fsdp.ranks
    if config.device == "cpu":
        return CPU_RANKS
    import torch

    return torch.cuda.device_count() or CPU_RANKS


def _policy_bytes(model_dir: Path) -> int:
    """Add up the sizes of the model's weight files: about the size of its policy, bytes."""
    return sum(os.path.getsize(path) for path in model_dir.glob("*.safetensors"))
