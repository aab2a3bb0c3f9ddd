"""Configuration of `primerl-node sft`: demonstrations in, a model that imitates them out.

The rules are run.py's. Everything about the learner is TrainingConfig's, with defaults that suit
supervised learning.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_config import BaseConfig

from .run import CheckpointConfig, EnvironmentConfig, LogConfig, ModelConfig, OwnRunConfig
from .training import Positive, RowsConfig, TrainingConfig


class SftTrainingConfig(TrainingConfig):
    """Settings of training; the objective is always cross entropy."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    scheduler: Literal["constant", "linear", "cosine"] = "linear"

    @model_validator(mode="after")
    def _learns_from_data_alone(self) -> Self:
        if self.sft is not None:
            raise ValueError("sft is of `train` and `rl`: give the data section here")
        return self


class SftCheckpointConfig(CheckpointConfig):
    """Exact checkpoints."""

    interval: Positive = 50
    """Steps between checkpoints; --resume goes on from the last."""


class DataConfig(RowsConfig):
    """The source of demonstrations (one of files, hub, environment), and which parts of them are learned."""

    environment: EnvironmentConfig | None = None
    """Demonstrations of a taskset whose data has answers, of tasks that reinforcement learning never leases."""

    @model_validator(mode="after")
    def _check_source(self) -> "DataConfig":
        given = [bool(self.files), bool(self.hub), self.environment is not None]
        if sum(given) > 1:
            raise ValueError("give one of data.files, data.hub and data.environment")
        return self


class ValidationConfig(BaseConfig):
    """Cross entropy on rows that are never learned from."""

    files: list[str] = Field(default_factory=list[str])
    """Files or directories, as in data.files."""
    split: str = ""
    """With data.hub: this split of it."""
    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Or: hold out this share of the training rows, by a hash of their content."""
    rows: Positive = 512
    """Most rows; of an environment, held-out tasks."""
    interval: Positive = 50
    """Steps between measurements; there is one before the first step and one after the last, too."""

    @model_validator(mode="after")
    def _check_source(self) -> "ValidationConfig":
        if sum([bool(self.files), bool(self.split), self.fraction > 0]) > 1:
            raise ValueError("give one of validation.files, validation.split and .fraction")
        return self


class SftConfig(OwnRunConfig):
    """`primerl-node sft`."""

    name: str = "sft"
    """Run directory under output_dir."""
    max_epochs: Annotated[int, Field(ge=0)] = 0
    """Stop after this many passes if max_steps, which the learning rate follows, is later; 0 is no bound."""
    batch_size: Positive = 64
    """Sequences per optimizer step."""
    batch_tokens: Annotated[int, Field(ge=0)] = 0
    """If set: most tokens of an optimizer step, in place of batch_size."""
    fsync: bool = True
    """Flush checkpoints to the disk; without it they survive kill -9, not a power cut."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    validation: ValidationConfig = ValidationConfig()
    training: SftTrainingConfig = SftTrainingConfig()
    checkpoint: SftCheckpointConfig = SftCheckpointConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _check_sizes(self) -> "SftConfig":
        if 0 < self.batch_tokens < self.training.seq_len:
            raise ValueError("batch_tokens must be 0, or at least training.seq_len")
        if self.validation.split and not self.data.hub:
            raise ValueError("validation.split needs data.hub: give validation.files")
        given = self.validation.fraction or self.validation.files
        if given and self.data.environment is not None:
            raise ValueError(
                "an environment holds out tasks by itself: remove validation.fraction/.files"
            )
        return self
