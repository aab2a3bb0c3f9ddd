"""Configuration of monitors, which get the metrics of metrics.jsonl; names are prime-rl's."""

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


class MonitorsConfig(BaseConfig):
    """W&B beside metrics.jsonl. It gets metrics and the public part of the config, nothing else."""

    wandb: WandbConfig | None = None
