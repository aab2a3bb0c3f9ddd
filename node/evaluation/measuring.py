"""Every environment with whoever is evaluated: one cell after the other, each found or measured and kept."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from ..config import EvaluatedEnvironment
from ..environments.environment import Environment, EnvironmentFailed
from ..errors import UsageError
from ..eval_config import EvalConfig
from .cells import Cell, CellStore, cell_key
from .figures import figures
from .rollouts import Player, Rollout, held_out, play


@dataclass(frozen=True)
class Progress:
    """How far a cell is."""

    cell: int
    """From 1."""
    cells: int
    model: str
    environment: str
    done: int
    of: int
    reward: float
    """Mean of the rollouts so far."""
    failed: int
    found: bool = False
    """Nothing was measured: the cell was there."""


Watch = Callable[[Progress], None]


@dataclass(frozen=True)
class Entrant:
    """Somebody to be measured. What costs time is made when a cell needs it."""

    name: str
    kind: str
    """`local` or `api`."""
    identity: str
    """Of the model: what its files hold, or how it is asked."""
    how: Mapping[str, object]
    """Whatever else its replies follow from, but for the environment and the sampling; JSON values."""
    at_once: int
    """Rollouts in flight."""
    player: Callable[[], Awaitable[Player]]
    environment: Callable[[EvaluatedEnvironment], Awaitable[Environment]]
    """Started, and closed by whoever made the entrant. Raises EnvironmentFailed."""
    step: int | None = None


class Measurer:
    """Fills a directory of results, cell by cell."""

    def __init__(self, config: EvalConfig, cells: CellStore, watch: Watch, entrants: int) -> None:
        """`entrants` is how many will be measured, for the progress."""
        self._config = config
        self._cells = cells
        self._watch = watch
        self._total = entrants * len(config.environments)
        self.found: list[Cell] = []

    async def measure(self, entrant: Entrant) -> None:
        """Every environment. Raises NodeError; results.json holds what was finished before."""
        for environment in self._config.environments:
            await self._cell(entrant, environment)

    async def _cell(self, entrant: Entrant, environment: EvaluatedEnvironment) -> None:
        config = self._config
        key = cell_key(
            identity=entrant.identity,
            how=entrant.how,
            environment=environment.model_dump(mode="json", exclude={"name"}),
            sampling=config.sampling.model_dump(mode="json"),
            seed=config.seed,
        )
        cell = None if config.again else self._cells.find(key)
        if cell is None:
            cell = await self._played(key, entrant, environment)
            if cell.counts:
                self._cells.keep(cell)
        else:
            count, reward = cell.figures.prompts * cell.figures.samples, cell.figures.avg.value
            blank = self._blank(entrant, environment, count)
            self._watch(replace(blank, done=count, reward=reward, found=True))
        self.found.append(cell)
        self._cells.write_results(self.found)

    async def _played(self, key: str, entrant: Entrant, environment: EvaluatedEnvironment) -> Cell:
        began, samples = time.monotonic(), environment.samples
        try:
            played = await entrant.environment(environment)
            tasks = await held_out(played, environment.prompts)
        except EnvironmentFailed as error:
            raise UsageError(f"environment {environment.title!r} failed: {error}") from error
        view = _View(self._watch, self._blank(entrant, environment, len(tasks) * samples))
        rollouts = await play(
            played,
            tasks,
            await entrant.player(),
            samples=samples,
            seed=self._config.seed,
            concurrency=entrant.at_once,
            done=view.done,
        )
        file = self._cells.rollouts_file(entrant.name, environment.title, key)
        self._cells.write_rollouts(file, rollouts)
        return Cell(
            key=key,
            environment=environment.title,
            model=entrant.name,
            kind=entrant.kind,
            identity=entrant.identity,
            step=entrant.step,
            seed=self._config.seed,
            seconds=round(time.monotonic() - began, 3),
            rollouts=file,
            figures=figures(rollouts, samples=samples, success=environment.success),
        )

    def _blank(self, entrant: Entrant, environment: EvaluatedEnvironment, of: int = 0) -> Progress:
        number = len(self.found) + 1
        return Progress(number, self._total, entrant.name, environment.title, 0, of, 0.0, 0)


class _View:
    """Tells how far one cell is."""

    def __init__(self, watch: Watch, progress: Progress) -> None:
        self._watch = watch
        self._progress = progress
        self._total = 0.0
        watch(progress)

    def done(self, rollout: Rollout) -> None:
        """One more."""
        before = self._progress
        done, failed = before.done + 1, before.failed + bool(rollout.error)
        self._total += rollout.reward
        reward = self._total / done
        self._progress = replace(before, done=done, failed=failed, reward=reward)
        self._watch(self._progress)
