"""Configuration of monitors, which get what metrics.jsonl gets; names are prime-rl's."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator
from pydantic_config import BaseConfig


class WandbConfig(BaseConfig):
    """Weights & Biases: `pip install primerl-node[wandb]`."""

    project: str = "primerl"
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team; default: that of the login."""
    name: str | None = None
    """Name of the run there; default: `name`; of `join` role and node id."""
    group: str | None = None
    """Group of runs; default: trainer and workers of a run are one."""
    tags: list[str] | None = None
    """Tags of the run."""
    offline: bool = False
    """Write files in RUN_DIR/wandb (of `join`: in the data directory) alone; `wandb sync` sends them later."""


class TensorboardConfig(BaseConfig):
    """TensorBoard, by tensorboardX: `pip install primerl-node[tensorboard]`."""

    directory: Annotated[Path, AfterValidator(Path.expanduser)] | None = None
    """Directory of the event files; default: RUN_DIR/tensorboard, of `join` that in the data directory."""


class TrackioConfig(BaseConfig):
    """trackio, a local dashboard: `pip install primerl-node[trackio]`, then `trackio show`."""

    project: str = "primerl"
    """Project that the run belongs to."""
    name: str | None = None
    """Name of the run there; default: `name`; of `join` role and node id."""
    group: str | None = None
    """Group of runs; default: trainer and workers of a run are one."""
    space_id: str | None = None
    """Space of the Hugging Face hub that shows it as well, user/space; default: this machine alone."""


class MonitorsConfig(BaseConfig):
    """Monitors beside metrics.jsonl. They get metrics and the public part of the config, and nothing else."""

    wandb: WandbConfig | None = None
    tensorboard: TensorboardConfig | None = None
    trackio: TrackioConfig | None = None
