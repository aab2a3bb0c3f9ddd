"""Evaluate published versions while training continues.

Each evaluation measures one version, the newest when it began. It never delays a training step: an evaluation
that is due while another one is running is skipped and logged.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from ..environments.environment import EnvironmentFailed
from ..errors import BAD_FILE, NodeError, file_error
from ..ops.metrics import MetricsLog
from ..storage.run_files import write
from ..tasks import end_tasks
from ..weights.state import State
from .evaluator import EvalTask, Evaluator
from .statistics import EvalFigures, summarize

logger = logging.getLogger(__name__)


class Evaluated(msgspec.Struct, frozen=True):
    """The figures of one version, by environment."""

    version: int
    seconds: float
    environments: dict[str, EvalFigures]


EVALUATED = msgspec.json.Decoder(Evaluated)
"""Decoder of a line; several threads read the file for the page."""


class EvaluationLog:
    """evaluations.jsonl: one line for each evaluated version, in version order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.held: list[Evaluated] = []

    def open(self, version: int) -> None:
        """Read the evaluations up to `version`, where the run resumes; drop later ones.

        Raises StorageError.
        """
        try:
            lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        except OSError as error:
            raise file_error(error, self._path) from error
        evaluations = [
            evaluation
            for line in lines
            if (evaluation := _read(line)) and evaluation.version <= version
        ]
        self.held = sorted(evaluations, key=lambda evaluation: evaluation.version)
        if len(evaluations) < len(lines):
            self._write()

    def add(self, evaluation: Evaluated) -> None:
        """Add an evaluation. Raises StorageError."""
        self.held = [*self.held, evaluation]
        self._write()

    def has(self, version: int) -> bool:
        """Return whether `version` was evaluated."""
        return any(evaluation.version == version for evaluation in self.held)

    def latest(self) -> dict[str, dict[str, float]]:
        """Return the newest figures of each environment, by metric name."""
        if not self.held:
            return {}
        return {
            name: {"version": evaluation.version, **figures.flat()}
            for evaluation in self.held
            for name, figures in evaluation.environments.items()
        }

    def _write(self) -> None:
        write(
            self._path,
            "".join(msgspec.json.encode(evaluation).decode() + "\n" for evaluation in self.held),
        )


def _read(line: bytes) -> Evaluated | None:
    """Decode a line; None if it is invalid: that version is evaluated again if it is due."""
    try:
        return EVALUATED.decode(line)
    except BAD_FILE:
        logger.warning("an unreadable line of evaluations.jsonl is ignored")
        return None


class OnlineEvaluation:
    """Evaluates versions that are due.

    As a context manager, cancels a running evaluation at exit.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        tasks: Sequence[EvalTask],
        log: EvaluationLog,
        metrics: MetricsLog,
        *,
        interval: int,
        last: int,
        seed: int,
    ) -> None:
        """`interval` applies to tasks without one of their own (0: never).

        `last`: the run's last version.
        """
        self._evaluator = evaluator
        self._tasks = tasks
        self.log = log
        self._metrics = metrics
        self._interval = interval
        self._last = last
        self._seed = seed
        self._task: asyncio.Task[None] | None = None
        self._begun = False
        self.version = -1
        """The version being evaluated; -1 while none is."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)

    def begin(self, version: int, state: State) -> None:
        """Start to evaluate `version`, which was just published, if it is due; returns at once.

        Raises StorageError if the previous evaluation could not be stored.
        """
        due = self._due(version)
        if not due:
            return
        if self._task is not None and not self._task.done():
            if version != self._last:  # finish() evaluates the last one
                logger.warning(
                    "version %d is not evaluated, as version %d still is: raise evaluation.interval",
                    version,
                    self.version,
                )
            return
        self._raise_error()
        self._begun = True
        self._task = asyncio.create_task(self._evaluate(version, state, due), name="evaluation")

    async def finish(self, version: int, state: State) -> None:
        """Wait for a running evaluation, then evaluate the run's last version. Raises StorageError."""
        if self._task is not None:
            await asyncio.wait([self._task])
            self._raise_error()
        if due := self._due(version):
            await self._evaluate(version, state, due)

    def _due(self, version: int) -> list[EvalTask]:
        """List the tasks that are due: at the first version, every `interval`-th and the last one."""
        if self.log.has(version) or version == self.version:
            return []
        every = not (self.log.held or self._begun) or version == self._last
        intervals = ((task, task.interval or self._interval) for task in self._tasks)
        return [task for task, steps in intervals if steps and (every or version % steps == 0)]

    def _raise_error(self) -> None:
        """Raise the error of the finished evaluation, if any."""
        task, self._task = self._task, None
        if task is not None:
            task.result()

    async def _evaluate(self, version: int, state: State, due: Sequence[EvalTask]) -> None:
        self.version, began = version, time.monotonic()
        try:
            rollouts = await self._evaluator.evaluate_tasks(state, due, seed=self._seed)
        except (NodeError, EnvironmentFailed) as error:
            # training does not depend on it: this version has no figures
            logger.error("version %d could not be evaluated: %s", version, error)
            return
        finally:
            self.version = -1
        measured = {
            task.name: summarize(rollouts[task.name], samples=task.samples, success=task.success)
            for task in due
        }
        evaluation = Evaluated(version, round(time.monotonic() - began, 3), measured)
        self.log.add(evaluation)
        self._report(evaluation)

    def _report(self, evaluation: Evaluated) -> None:
        values: dict[str, float] = {"time/eval": evaluation.seconds}
        for name, figures in evaluation.environments.items():
            flat = {"version": evaluation.version, **figures.flat()}
            values |= {f"eval/{name}/{key}": value for key, value in flat.items()}
            shown = ", ".join(f"{key} {value:.3f}" for key, value in figures.flat().items())
            logger.info(
                "version %d on %s | %s | %.1f s",
                evaluation.version,
                name,
                shown,
                evaluation.seconds,
            )
        self._metrics.write(evaluation.version, values)
