"""Evaluate every model on every environment, one cell at a time.

Finished cells are reused from disk. A cell's key is a digest of everything that determines its rollouts, so no
cell is measured twice, and a stored cell is always the right one.
"""

import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ...crypto.hashing import derive
from ..config.evaluation import EvalConfig
from ..config.run import EvaluatedEnvironment
from ..environments.environment import Environment, EnvironmentFailed, Split
from ..errors import BAD_FILE, StorageError, UsageError
from ..storage.run_files import make_directory, write
from .evaluator import PolicyClient, Rollout, evaluated, run_rollouts
from .statistics import EvalFigures, summarize

UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
FORM = 1
"""Version of the key; increase it when the meaning of a setting changes."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one model on one environment."""

    key: str
    environment: str
    model: str
    kind: str
    """`local` or `api`."""
    identity: str
    """Digest of the model's files, or of an API's settings."""
    step: int | None = None
    seed: int
    seconds: float
    rollouts: str
    """File with all rollouts, relative to the results directory."""
    figures: EvalFigures

    @property
    def counts(self) -> bool:
        """Whether any rollout was scored; else the cell is measured again next time."""
        return self.figures.failed < 1


def cell_key(**settings: Any) -> str:
    """Digest the settings that determine a cell (JSON values); hex."""
    encoded = msgspec.json.encode({"form": FORM, **settings}, order="deterministic")
    return derive("evaluation cell", encoded).hex()[:32]


class CellStore:
    """The finished cells of a results directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, key: str) -> Cell | None:
        """Read the finished cell with this key, if any. Raises StorageError if it is unreadable."""
        path = self._path(key)
        try:
            return msgspec.json.decode(path.read_bytes(), type=Cell)
        except FileNotFoundError:
            return None
        except BAD_FILE as error:
            raise StorageError(
                f"{path} cannot be read ({error}): delete it to measure the cell again"
            ) from error

    def rollouts_file(self, model: str, environment: str, key: str) -> str:
        """Return the path of a cell's rollouts, relative to the results directory."""
        name = "--".join(
            UNSAFE.sub("-", part)[:80].strip("-.") or "x" for part in (model, environment)
        )
        return f"rollouts/{name}--{key[:8]}.jsonl"

    def write_rollouts(self, file: str, rollouts: list[Rollout]) -> None:
        """Write all rollouts of a cell in order. Raises StorageError."""
        lines = b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in rollouts)
        self._write(self._directory / file, lines)

    def keep(self, cell: Cell) -> None:
        """Store a finished cell, whose rollouts are already written. Raises StorageError."""
        self._write(self._path(cell.key), msgspec.json.encode(cell))

    def write_results(self, cells: list[Cell]) -> Path:
        """Write these cells to results.json. Raises StorageError."""
        path = self._directory / "results.json"
        encoded = msgspec.json.encode({"cells": cells})
        self._write(path, msgspec.json.format(encoded, indent=2) + b"\n")
        return path

    def _path(self, key: str) -> Path:
        return self._directory / "cells" / f"{key}.json"

    def _write(self, path: Path, data: bytes) -> None:
        make_directory(path.parent)
        write(path, data.decode())


@dataclass(frozen=True)
class EvalProgress:
    """The progress of a cell."""

    cell: int
    """Number of the cell, from 1."""
    cells: int
    model: str
    environment: str
    done: int
    of: int
    reward: float
    """Mean reward of the rollouts so far."""
    failed: int
    found: bool = False
    """Whether the cell was read from disk."""


Watch = Callable[[EvalProgress], None]


@dataclass(frozen=True)
class EvalModel:
    """A model to evaluate; its client and environments are created when a cell needs them."""

    name: str
    kind: str
    """`local` or `api`."""
    identity: str
    """Digest of the model's files, or of an API's settings."""
    how: Mapping[str, object]
    """Further settings that determine its replies, apart from environment and sampling; JSON values."""
    at_once: int
    """Rollouts in flight."""
    policy: Callable[[], Awaitable[PolicyClient]]
    environment: Callable[[EvaluatedEnvironment], Awaitable[Environment]]
    """Starts an environment, which the callable's owner closes. Raises EnvironmentFailed."""
    step: int | None = None


class EvalSuite:
    """Measures models on all environments of a config, and writes results.json."""

    def __init__(
        self,
        config: EvalConfig,
        cells: CellStore,
        watch: Watch,
        models: int,
        trained: Collection[str] = (),
    ) -> None:
        """`models`: number of models that will be measured, for the progress.

        `trained`: ids of the environments on which the models were trained; of these held-out tasks are
        measured, of others all.
        """
        self._config = config
        self._trained = frozenset(trained)
        self._cells = cells
        self._watch = watch
        self._total = models * len(config.environments)
        self.found: list[Cell] = []

    def _split(self, environment: EvaluatedEnvironment) -> Split:
        return "eval" if environment.id in self._trained else "all"

    async def measure(self, model: EvalModel) -> None:
        """Measure a model on every environment. Raises NodeError.

        Finished cells stay in results.json.
        """
        for environment in self._config.environments:
            await self._cell(model, environment)

    async def _cell(self, model: EvalModel, environment: EvaluatedEnvironment) -> None:
        config = self._config
        key = cell_key(
            identity=model.identity,
            how=model.how,
            environment=environment.model_dump(mode="json", exclude={"name"}),
            sampling=config.sampling.model_dump(mode="json"),
            seed=config.seed,
            split=self._split(environment),
        )
        cell = None if config.again else self._cells.find(key)
        if cell is None:
            cell = await self._measure_cell(key, model, environment)
            if cell.counts:
                self._cells.keep(cell)
        else:
            count, reward = cell.figures.prompts * cell.figures.samples, cell.figures.avg.value
            progress = self._progress(model, environment, count)
            self._watch(replace(progress, done=count, reward=reward, found=True))
        self.found.append(cell)
        self._cells.write_results(self.found)

    async def _measure_cell(
        self, key: str, model: EvalModel, environment: EvaluatedEnvironment
    ) -> Cell:
        began, samples = time.monotonic(), environment.samples
        try:
            running = await model.environment(environment)
            tasks = await evaluated(running, environment.prompts, self._split(environment))
        except EnvironmentFailed as error:
            raise UsageError(f"environment {environment.title!r} failed: {error}") from error
        total = len(tasks) * samples
        progress = _CellProgress(self._watch, self._progress(model, environment, total))
        rollouts = await run_rollouts(
            running,
            tasks,
            await model.policy(),
            samples=samples,
            seed=self._config.seed,
            concurrency=model.at_once,
            done=progress.done,
        )
        file = self._cells.rollouts_file(model.name, environment.title, key)
        self._cells.write_rollouts(file, rollouts)
        return Cell(
            key=key,
            environment=environment.title,
            model=model.name,
            kind=model.kind,
            identity=model.identity,
            step=model.step,
            seed=self._config.seed,
            seconds=round(time.monotonic() - began, 3),
            rollouts=file,
            figures=summarize(rollouts, samples=samples, success=environment.success),
        )

    def _progress(
        self, model: EvalModel, environment: EvaluatedEnvironment, of: int
    ) -> EvalProgress:
        number = len(self.found) + 1
        return EvalProgress(number, self._total, model.name, environment.title, 0, of, 0.0, 0)


class _CellProgress:
    """Reports the progress of one cell."""

    def __init__(self, watch: Watch, progress: EvalProgress) -> None:
        self._watch = watch
        self._progress = progress
        self._total = 0.0
        watch(progress)

    def done(self, rollout: Rollout) -> None:
        """Count and report a finished rollout."""
        before = self._progress
        done, failed = before.done + 1, before.failed + bool(rollout.error)
        self._total += rollout.reward
        reward = self._total / done
        self._progress = replace(before, done=done, failed=failed, reward=reward)
        self._watch(self._progress)
