"""One rank's share of a real learner: the model, and how its policy gets out. Imports torch: import lazily.

Every method is collective: all ranks call it with the same arguments.
"""

from pathlib import Path

from ...config.training import TrainingConfig
from ..backend import Sample, StepMetrics, TrainBatch
from ..export import SnapshotWriter
from ..learner import Learner
from ..learner_state import CutLearner, Ranks
from ..world import World
from .calls import Start


class LearnerShare:
    """A Learner, and the files that its policy and its checkpoints travel in."""

    def __init__(self, learner: Learner, world: World, ranks: Ranks) -> None:
        self._learner = learner
        self._ranks = ranks
        self._writer = SnapshotWriter(world)
        self._staged: CutLearner | None = None

    @classmethod
    def build(cls, ask: Start, config: TrainingConfig, world: World) -> "LearnerShare":
        """Load the model. Raises EngineError."""
        ranks = Ranks.join(config.fsdp.timeout_s)
        learner = Learner.build(
            Path(ask.model_dir),
            config,
            max_steps=ask.max_steps,
            seed=ask.seed,
            temperature=ask.temperature,
            world=world,
            ranks=ranks,
        )
        return cls(learner, world, ranks)

    def step(self, batch: TrainBatch) -> StepMetrics:
        """See Learner."""
        return self._learner.step(batch)

    def evaluate(self, samples: list[Sample]) -> dict[str, float]:
        """See Learner."""
        return self._learner.evaluate(samples)

    def supervised_step(self, examples: list[tuple[list[int], list[int]]], lr: float) -> float:
        """See Learner."""
        return self._learner.supervised_step(examples, lr)

    def end_supervised(self) -> None:
        """See Learner."""
        self._learner.end_supervised()

    def write_state(self, path: Path) -> None:
        """The policy in a file for state_file.SnapshotReader. Raises StorageError, EngineError."""
        self._writer.state(self._learner.sources(), path)

    def write_snapshot(self, path: Path, whole: bool) -> None:
        """As write_state(), but what changed since the last one, unless `whole`."""
        self._writer.snapshot(self._learner.sources(), path, whole=whole)

    def save(self, directory: Path) -> None:
        """See Learner."""
        self._learner.save(directory)

    def stage(self) -> None:
        """Copy what save() would write into the host's memory."""
        self._staged = self._learner.stage()

    def write_staged(self, directory: Path) -> None:
        """Write the newest stage(); runs beside everything but save() and load()."""
        if self._staged is None:
            raise ValueError("nothing was staged: call stage() first")
        staged, self._staged = self._staged, None
        staged.write(directory, self._ranks)

    def load(self, directory: Path) -> None:
        """See Learner."""
        self._learner.load(directory)

    def export(self, directory: Path) -> None:
        """See Learner."""
        self._learner.export(directory)

    def close(self) -> None:
        """See Learner; the world stays."""
        self._learner.close(keep_world=True)
