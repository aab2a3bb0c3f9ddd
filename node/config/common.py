"""What every run that this node owns has: a directory, a seed, a length, checkpoints to go on from."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_config import BaseConfig

from .training import Positive


class CheckpointConfig(BaseConfig):
    """Exact checkpoints of the trainer."""

    interval: Positive = 1
    """Steps between checkpoints; 1 lets --resume go on at exactly the published version."""
    keep_last: Positive = 2
    """The newest ones that are kept: should one be damaged, the one before is taken."""
    keep_interval: Annotated[int, Field(ge=0)] = 0
    """Keep those whose step is a multiple of this as well; 0 keeps none of them."""
    weights_interval: Annotated[int, Field(ge=0)] = 0
    """Steps between exports of the weights to weights/step_N, for `eval` and others; 0: the last step only."""
    async_save: bool = True
    """Write from a copy in the host's memory while training goes on, and, with interval 1, while the version
    is made ready; it is told to nobody before the checkpoint is on the disk."""


class ResumeConfig(BaseConfig):
    """Go on from a checkpoint; --resume alone takes the newest one of this run."""

    step: Annotated[int, Field(ge=0)] | None = None
    """The checkpoint of this step. What this run did after it is void: newer checkpoints are set aside."""
    dir: Annotated[Path, AfterValidator(Path.expanduser)] | None = None
    """Directory of another run: begin a new run with its weights, optimizer, step and place in the data."""


def _resume(value: object) -> object:
    """`resume = true` and `PRIMERL_RESUME=1` in place of an empty section."""
    word = str(value).lower() if isinstance(value, bool | int | str) else ""
    if word in ("true", "1", "yes", "on"):
        return {}
    return None if word in ("false", "0", "no", "off", "none") else value


Resume = Annotated[ResumeConfig | None, BeforeValidator(_resume)]


class OwnRunConfig(BaseConfig):
    """Where a run writes, how long it is, and whether it goes on from a checkpoint."""

    name: str = "run"
    """Run directory under output_dir."""
    output_dir: Path = Path("outputs")
    """Where run directories are."""
    seed: int = 0
    """Of weights that are made here, of the order of tasks and of what is held out."""
    max_steps: Positive = 200
    """Optimizer steps of the run."""
    resume: Resume = None
    clean: bool = False
    """Delete what an earlier run of this name left."""

    @property
    def run_dir(self) -> Path:
        """Where the run writes: logs, metrics, checkpoints, weights, summary."""
        return self.output_dir / self.name

    @property
    def goes_on(self) -> bool:
        """Whether the run in `run_dir` is continued; a fork begins a new one."""
        return self.resume is not None and self.resume.dir is None
