"""The trainer backend over many GPUs: the daemon asks, a torchrun group of ranks computes (rank.py).

A dead or silent rank is RankFailed, never a hang: every call has a deadline. After it this backend is of no
more use; a new one can load the last checkpoint. Neither torch nor NCCL runs in the daemon.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ...config.run import TrainingConfig
from ...ops.errors import EngineError
from ...weights.state import State
from ..backend import Sample, Snapshot, StepMetrics, TrainBatch
from ..snapshot import SnapshotReader, exchange_directory
from .calls import (
    Ask,
    EndSupervised,
    Evaluate,
    Export,
    Figures,
    Load,
    Save,
    Stage,
    Start,
    Step,
    Supervise,
    WriteSnapshot,
    WriteStaged,
    WriteState,
    tokens,
)
from .group import NOT_RUNNING, RankGroup

if TYPE_CHECKING:
    from ..learner import Example

T = TypeVar("T")

STEP_TIMEOUTS = 2
SECONDS_PER_TOKEN = 0.01
"""Slower than a small model on one core."""
MODEL_TIMEOUTS = 3
"""What writes or reads all of the model may take so many fsdp.timeout_s."""
STAGED_TIMEOUTS = 10
"""A checkpoint that is written beside the training may go to a slow disk."""
CPU_RANKS = 2


class FsdpBackend:
    """TrainBackend over ranks that share a model.

    A caller that is cancelled leaves its call to finish; the next one queues behind it, close() ends it.
    """

    def __init__(
        self,
        config: TrainingConfig,
        *,
        max_steps: int,
        seed: int,
        temperature: float = 1.0,
        ranks: RankGroup | None = None,
    ) -> None:
        """`temperature` is the one that samples are drawn at; `max_steps` shapes the schedule.

        `ranks` are used if they are given, and left running by close(); else start() starts some.
        """
        self._config = config
        self._max_steps = max_steps
        self._seed = seed
        self._temperature = temperature
        self._given = ranks
        self._ranks: RankGroup | None = None
        self._reader: SnapshotReader | None = None
        self._closed = False
        self._whole = False
        """The last snapshot was not read: the next one must be whole."""
        self._turn = asyncio.Lock()
        self._calls: set[asyncio.Task[object]] = set()

    async def start(self, model_dir: Path) -> None:
        """Start the ranks; each loads its share of the model. Raises EngineError, RankFailed."""
        if self._reader is not None:
            raise EngineError("this backend was started before: make a new one")
        self._reader = SnapshotReader(
            threads=self._config.threads, ahead=self._config.device != "cpu"
        )
        ranks = self._given
        if ranks is None:
            count = await asyncio.to_thread(count_ranks, self._config)
            size = await asyncio.to_thread(_model_bytes, model_dir)
            ranks = RankGroup(self._config, count)
            await ranks.start(exchange_directory(size))
        self._ranks = ranks
        ask = Start(_absolute(model_dir), self._max_steps, self._seed, self._temperature)
        try:
            await self._ask(ask, self._config.fsdp.start_timeout_s)
        except BaseException:  # also when cancelled: without a model the ranks are of no use
            await self.close()
            raise

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """One optimizer step; an empty batch only advances the schedule. Raises EngineError, RankFailed.

        Deadline: 2 x fsdp.timeout_s and 10 ms for each token.
        """
        return StepMetrics(await self._figures(Step(batch), batch.samples))

    async def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Cross entropy per trained token, nothing learned. Deadline as for step()."""
        return await self._figures(Evaluate(list(samples)), samples)

    async def state(self) -> State:
        """The bf16 policy, a copy. Deadline of this and all below: 3 x fsdp.timeout_s."""

        async def read(ranks: RankGroup) -> State:
            path = ranks.directory / "state"
            await ranks.ask(WriteState(str(path)), self._model_s())
            return await asyncio.to_thread(self._read().state, path)

        return await self._with(read)

    async def snapshot(self) -> Snapshot:
        """The bf16 policy, and where it differs from the last snapshot."""

        async def read(ranks: RankGroup) -> Snapshot:
            path = ranks.directory / "snapshot"
            whole, self._whole = self._whole, True
            await ranks.ask(WriteSnapshot(str(path), whole), self._model_s())
            found = await asyncio.to_thread(self._read().snapshot, path)
            self._whole = False
            return found

        return await self._with(read)

    async def save(self, directory: Path) -> None:
        """Write everything that resume needs into `directory`, whole or not at all."""
        await self._ask(Save(_absolute(directory)), self._model_s())

    async def stage(self) -> None:
        """Copy what save() would write into the ranks' memory."""
        await self._ask(Stage(), self._model_s())

    async def write_staged(self, directory: Path) -> None:
        """Write the newest stage(), while other calls go on. Deadline: 10 x fsdp.timeout_s."""
        if self._ranks is None:
            raise EngineError(NOT_RUNNING)
        deadline = STAGED_TIMEOUTS * self._config.fsdp.timeout_s
        await self._ranks.ask(WriteStaged(_absolute(directory)), deadline)

    async def load(self, directory: Path) -> None:
        """Continue exactly from what save() wrote. Raises StorageError."""
        await self._ask(Load(_absolute(directory)), self._model_s())

    async def export(self, directory: Path) -> None:
        """Write the bf16 policy in Hugging Face format, tokenizer and config included."""
        await self._ask(Export(_absolute(directory)), self._model_s())

    async def supervised_step(self, examples: Sequence["Example"], lr: float) -> float:
        """One step of cross entropy on completions; returns the loss per token. For warm_up()."""
        rows = [(list(prompt), list(completion)) for prompt, completion in examples]
        count = sum(len(prompt) + len(completion) for prompt, completion in rows)
        found = await self._ask(Supervise(rows, lr), self._step_s(count))
        return found["loss"]

    async def end_supervised(self) -> None:
        """Reset the optimizer after a warm-up."""
        await self._ask(EndSupervised(), self._model_s())

    async def close(self) -> None:
        """End the ranks, also in the middle of a call."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None and ranks is not self._given:
            await (ranks.kill() if self._calls else ranks.close())
        for call in list(self._calls):
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)
        if self._reader is not None and not self._closed:
            self._closed = True
            await asyncio.to_thread(self._reader.close)

    def _step_s(self, count: int) -> float:
        return STEP_TIMEOUTS * self._config.fsdp.timeout_s + SECONDS_PER_TOKEN * count

    def _model_s(self) -> float:
        return MODEL_TIMEOUTS * self._config.fsdp.timeout_s

    def _read(self) -> SnapshotReader:
        assert self._reader is not None
        return self._reader

    async def _figures(self, ask: Ask, samples: Sequence[Sample]) -> dict[str, float]:
        return await self._ask(ask, self._step_s(tokens(samples)))

    async def _ask(self, ask: Ask, timeout_s: float) -> dict[str, float]:
        """The figures of an answer, if it has any."""

        async def work(ranks: RankGroup) -> dict[str, float]:
            answer = await ranks.ask(ask, timeout_s)
            return answer.values if isinstance(answer, Figures) else {}

        return await self._with(work)

    async def _with(self, work: Callable[[RankGroup], Awaitable[T]]) -> T:
        """Do `work` when it is its turn, to its end, also when nobody waits for it any more."""
        ranks = self._ranks
        if ranks is None:
            raise EngineError(NOT_RUNNING)

        async def in_turn() -> T:
            async with self._turn:
                return await work(ranks)

        call = asyncio.create_task(in_turn(), name="call of ranks")
        self._calls.add(call)
        call.add_done_callback(self._done)
        return await asyncio.shield(call)

    def _done(self, call: "asyncio.Task[T]") -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # whoever waits has it; if nobody does, the next call meets it, too


def count_ranks(config: TrainingConfig) -> int:
    """Ranks on this machine: as configured, else one for each GPU, else two. Blocks: imports torch."""
    if config.fsdp.ranks:
        return config.fsdp.ranks
    if config.device == "cpu":
        return CPU_RANKS
    import torch

    return torch.cuda.device_count() or CPU_RANKS


def _absolute(path: Path) -> str:
    """The ranks stand in the same directory as we do, but they should not have to."""
    return os.path.abspath(path)


def _model_bytes(model_dir: Path) -> int:
    """Bytes of the model's weights on the disk: about those of its policy."""
    return sum(os.path.getsize(path) for path in model_dir.glob("*.safetensors"))
