"""Configuration of monitors, which get the metrics of metrics.jsonl; names are prime-rl's."""

from pathlib import Path

from .base import BaseConfig


class WandbConfig(BaseConfig):
    """Weights & Biases: `pip install primerl-node[wandb]`."""

    project: str = "primerl"
    """Project of the run."""
    entity: str | None = None
    """User or team; default: that of the login."""
    name: str | None = None
    """Name of the run; default: `name`; with `join`, role and node id."""
    group: str | None = None
    """Group of runs; default: one group for the trainer and workers of a run."""
    tags: list[str] | None = None
    """Tags of the run."""
    offline: bool = False
    """Only write files to RUN_DIR/wandb (with `join`: to the data directory); `wandb sync` uploads them
    later."""


class TensorboardConfig(BaseConfig):
    """TensorBoard, by tensorboardX: `pip install primerl-node[tensorboard]`."""

    directory: Path | None = None
    """Directory of the event files; default: RUN_DIR/tensorboard; with `join`, in the data directory."""


class TrackioConfig(BaseConfig):
    """trackio, a local dashboard: `pip install primerl-node[trackio]`, then `trackio show`."""

    project: str = "primerl"
    """Project of the run."""
    name: str | None = None
    """Name of the run; default: `name`; with `join`, role and node id."""
    group: str | None = None
    """Group of runs; default: one group for the trainer and workers of a run."""
    space_id: str | None = None
    """Hugging Face space that shows the run, too, as user/space; default: this machine only."""


class MonitorsConfig(BaseConfig):
    """Monitors beside metrics.jsonl. They get metrics and the public part of the config, nothing else."""

    wandb: WandbConfig | None = None
    tensorboard: TensorboardConfig | None = None
    trackio: TrackioConfig | None = None
