"""The trainer backend in one process, on a CPU or one GPU.

All computation runs in one separate thread, never on the event loop; torch is not imported before start().
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from ..config.training import TrainingConfig
from ..ops.errors import EngineError, one_line
from ..weights.state import State
from .backend import Example, Sample, SampleTerms, Snapshot, StepMetrics, TrainBatch

if TYPE_CHECKING:
    from .learner import Learner

T = TypeVar("T")


class LocalBackend:
    """TrainBackend over one Learner.

    If a caller is cancelled, its step still finishes in the thread; the next call queues behind it and close()
    waits for it.
    """

    def __init__(
        self,
        config: TrainingConfig,
        *,
        max_steps: int,
        seed: int,
        temperature: float = 1.0,
        own: Mapping[str, SampleTerms] = MappingProxyType({}),
    ) -> None:
        """Configure the learner; start() builds it.

        `temperature` is the sampling temperature; environments with terms in `own`, by name, have their own.
        `max_steps` shapes the schedule.
        """
        self._config = config
        self._max_steps = max_steps
        self._seed = seed
        self._temperature = temperature
        self._own = own
        self._thread: ThreadPoolExecutor | None = None
        self._learner: Learner | None = None

    async def start(self, model_dir: Path) -> None:
        """Load the model of `model_dir` in fp32 and make its optimizer. Raises EngineError."""
        if self._thread is not None:
            raise EngineError("this backend was started before: make a new one")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._learner = await self._begin(lambda: self._build(model_dir))

    async def compile_step(self) -> None:
        """Compile what a step computes, where it is compiled; changes nothing. Raises EngineError."""
        await self._with(lambda learner: learner.compile_step())

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """Make one optimizer step; an empty batch only advances the schedule. Raises EngineError.

        Steps count upwards: a batch of a step that was trained before raises EngineError.
        """
        return await self._with(lambda learner: learner.step(batch))

    async def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Measure cross entropy per trained token without learning."""
        return await self._with(lambda learner: learner.evaluate(samples))

    async def state(self) -> State:
        """Return a copy of the bf16 policy."""
        return await self._with(lambda learner: learner.state())

    def snapshot(self) -> asyncio.Future[Snapshot]:
        """See TrainBackend; the thread makes one call after the other."""
        learner = self._started()
        return self._begin(learner.snapshot)

    async def save(self, directory: Path) -> None:
        """Write everything needed to resume into `directory`, whole or not at all."""
        await self._with(lambda learner: learner.save(directory))

    async def stage(self) -> None:
        """Copy the content of a checkpoint; afterwards the weights may change."""
        await self._with(lambda learner: learner.stage())

    async def write_staged(self, directory: Path) -> None:
        """Write the newest stage(), in a separate thread: step() and other calls may run meanwhile."""
        await asyncio.to_thread(self._started().write_staged, directory)

    async def load(self, directory: Path) -> None:
        """Continue exactly from the files that save() wrote. Raises StorageError."""
        await self._with(lambda learner: learner.load(directory))

    async def export(self, directory: Path) -> None:
        """Write the bf16 policy in Hugging Face format, tokenizer and config included."""
        await self._with(lambda learner: learner.export(directory))

    async def supervised_step(self, examples: Sequence[Example], lr: float) -> float:
        """Make one step of cross entropy on completions; returns the loss per token. For warm_up()."""
        return await self._with(lambda learner: learner.supervised_step(examples, lr))

    async def end_supervised(self) -> None:
        """Reset the optimizer after a warm-up."""
        await self._with(lambda learner: learner.end_supervised())

    async def close(self) -> None:
        """Wait for the step in progress and free everything."""
        thread, self._thread = self._thread, None
        learner, self._learner = self._learner, None
        if thread is not None:
            await asyncio.to_thread(thread.shutdown, wait=True, cancel_futures=True)
        if learner is not None:
            await asyncio.to_thread(learner.close)

    def _build(self, model_dir: Path) -> "Learner":
        from .learner import Learner

        return Learner.build(
            model_dir,
            self._config,
            max_steps=self._max_steps,
            seed=self._seed,
            temperature=self._temperature,
            own=self._own,
        )

    async def _with(self, work: "Callable[[Learner], T]") -> T:
        learner = self._started()
        return await self._begin(lambda: work(learner))

    def _started(self) -> "Learner":
        if self._learner is None:
            raise EngineError("the trainer backend is not running: call start() first")
        return self._learner

    def _begin(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Run `work` in the trainer's thread; turn torch's errors into EngineError."""

        def run() -> T:
            try:
                return work()
            except (RuntimeError, ValueError) as error:  # torch's errors, out of memory among them
                reason = one_line(error)
                raise EngineError(
                    f"the trainer failed: {reason}; if memory ran out, lower training.seq_len"
                ) from error

        assert self._thread is not None
        return asyncio.get_running_loop().run_in_executor(self._thread, run)
