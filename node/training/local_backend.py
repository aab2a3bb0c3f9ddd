"""The trainer backend in one process, on a CPU or one GPU.

All computation runs in one separate thread, never on the event loop; torch is not imported before start().
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from ..config.training import TrainingConfig
from ..errors import EngineError, one_line
from ..process.threads import importing
from ..weights.state import State
from .backend import SampleTerms, Snapshot
from .operations import LearnerBackend, LearnerCall

if TYPE_CHECKING:
    from .learner import Learner

T = TypeVar("T")


class LocalBackend(LearnerBackend):
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

    async def state(self) -> State:
        """Return a copy of the bf16 policy."""
        return await self._begin(self._started().state)

    def snapshot(self) -> asyncio.Future[Snapshot]:
        """See TrainBackend; the thread makes one call after the other."""
        return self._begin(self._started().snapshot)

    async def write_staged(self, directory: Path) -> None:
        """Write the newest stage(), in a separate thread: step() and other calls may run meanwhile."""
        await asyncio.to_thread(self._started().write_staged, directory)

    async def close(self) -> None:
        """Wait for the step in progress and free everything."""
        thread, self._thread = self._thread, None
        learner, self._learner = self._learner, None
        if thread is not None:
            await asyncio.to_thread(thread.shutdown, wait=True, cancel_futures=True)
        if learner is not None:
            await asyncio.to_thread(learner.close)

    def _build(self, model_dir: Path) -> "Learner":
        with importing:
            from .learner import Learner

        return Learner.build(
            model_dir,
            self._config,
            max_steps=self._max_steps,
            seed=self._seed,
            temperature=self._temperature,
            own=self._own,
        )

    async def _perform(self, call: LearnerCall) -> dict[str, float]:
        learner = self._started()
        return await self._begin(lambda: call.perform(learner))

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
