"""Compose `primerl-node sft`: data, a trainer backend and checkpoints; no node, no network.

A checkpoint holds the place in the data, so that a resumed run learns what an unbroken one would have
learned.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from ..config.run import EnvironmentConfig, ResumeConfig
from ..config.sft import SftConfig
from ..environments.chat import dated
from ..environments.environment import Environment, EnvironmentFailed
from ..errors import RankFailed, UsageError
from ..ops.logs import configure
from ..ops.metrics import PhaseClock
from ..ops.monitors import check_monitors
from ..ops.strict_json import to_json
from ..sft.data import Data, check_files, open_rows, open_tasks
from ..sft.loop import SftLoop, Watch
from ..storage import run_files
from ..training.backend import TrainBackend
from ..training.checkpoint import Checkpoints
from ..training.restarts import Restarts
from .factories import make_backend, make_environment
from .rundir import prepare_model
from .startup import WARMUP_TASKS


@dataclass(frozen=True)
class SftFactories:
    """Factories of the computing parts: the real ones by default, fakes in tests."""

    backend: Callable[[SftConfig], TrainBackend] = make_backend
    environment: Callable[[EnvironmentConfig, Path, int, int, float], Environment] = (
        make_environment
    )
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


async def sft(config: SftConfig, *, watch: Watch, factories: SftFactories | None = None) -> Path:
    """Train to the end; returns the run directory, with weights in `weights/step_N`. Raises NodeError.

    `watch` is called after every step.
    """
    check_files(config)
    check_monitors(config.monitors)
    with run_files.held(config.run_dir):
        directory = prepare(config)
        configure(config.log, directory / "logs" / "sft.jsonl")
        await _SftRun(config, watch, factories or SftFactories()).run()
    return directory


def prepare(config: SftConfig) -> Path:
    """Make the run directory, or check that this one may be used. Raises UsageError, StorageError."""
    directory = config.run_dir
    used = (directory / run_files.METRICS).exists() or (directory / run_files.CHECKPOINTS).exists()
    other = config.resume.dir if config.resume else None
    if other is not None and other.resolve() == directory.resolve():
        raise UsageError(f"{directory} is this run itself: give --resume alone")
    if config.goes_on and not used:
        raise UsageError(f"nothing to resume in {directory}")
    if used and config.clean and not config.goes_on:
        run_files.clean(directory)
    elif used and not config.goes_on:
        raise UsageError(f"{directory} holds a run: add --resume, --clean, or another --name")
    run_files.check_kinds(directory)
    run_files.claim(directory, goes_on=config.goes_on)
    run_files.write(directory / run_files.CONFIG, config.model_dump_json(indent=2))
    return directory


class _SftRun:
    def __init__(self, config: SftConfig, watch: Watch, factories: SftFactories) -> None:
        self._config = config
        self._watch = watch
        self._factories = factories
        self._clock = PhaseClock()
        self._begun = run_files.begun_on(config.run_dir)

    async def run(self) -> None:
        """Train from the model to summary.json."""
        started = time.monotonic()
        with self._clock.phase("start"):
            model_dir = await prepare_model(self._config, self._config.run_dir / "model")
        environment = self._environment(model_dir)
        try:
            data = await self._data(environment, model_dir)
            summary = await self._learn(data, model_dir)
        finally:
            if environment is not None:
                await environment.close()
        seconds = {name: round(value, 3) for name, value in self._clock.seconds.items()}
        summary["seconds"] = {**seconds, "total": round(time.monotonic() - started, 3)}
        path = self._config.run_dir / run_files.SUMMARY
        await asyncio.to_thread(run_files.write, path, to_json(summary, indent=2))

    def _environment(self, model_dir: Path) -> Environment | None:
        wanted = self._config.data.environment
        if wanted is None:
            return None
        length = self._config.training.seq_len
        variables = dated(wanted.chat_template_kwargs, model_dir, self._begun)
        wanted = wanted.model_copy(update={"chat_template_kwargs": variables})
        return self._factories.environment(wanted, model_dir, self._config.seed, length, 1.0)

    async def _data(self, environment: Environment | None, model_dir: Path) -> Data:
        with self._clock.phase("data"):
            if environment is None:
                cache = self._config.run_dir / "data"
                return await asyncio.to_thread(
                    open_rows, self._config, model_dir, cache, self._begun
                )
            try:
                await environment.start()
            except EnvironmentFailed as error:
                raise UsageError(f"the environment does not start: {error}") from error
            loop = asyncio.get_running_loop()
            return await asyncio.to_thread(
                open_tasks, self._config, environment, WARMUP_TASKS, loop
            )

    async def _learn(self, data: Data, model_dir: Path) -> dict[str, object]:
        """Train; when a rank dies, go on from the last checkpoint with new ones. Raises NodeError."""
        config = self._config
        restarts = Restarts(sleep=self._factories.sleep)
        own = Checkpoints(config.run_dir / run_files.CHECKPOINTS, keep_last=1)
        resume = config.resume
        while True:
            backend = self._factories.backend(config)
            try:
                with self._clock.phase("start"):
                    await backend.start(model_dir)
                loop = SftLoop(config, data, backend, self._clock, self._watch)
                return await loop.run(resume)
            except RankFailed as error:
                newest = await asyncio.to_thread(own.latest)
                await restarts.after(error, newest)
                resume = config.resume if newest is None else ResumeConfig()
            finally:
                await backend.close()
