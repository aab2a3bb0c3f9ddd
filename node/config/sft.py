"""Configuration of `primerl-node sft`: supervised fine-tuning on demonstrations.

Same rules as run.py. The learner's settings are those of TrainingConfig, with defaults for supervised learning.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .base import BaseConfig
from .run import CheckpointConfig, EnvironmentConfig, LogConfig, ModelConfig, OwnRunConfig, RunName
from .training import Positive, RowsConfig, TrainingConfig


class SftTrainingConfig(TrainingConfig):
    """Settings of the learner; the loss is always cross entropy."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    scheduler: Literal["constant", "linear", "cosine"] = "linear"

    @model_validator(mode="after")
    def _learns_from_data_alone(self) -> Self:
        if self.sft is not None:
            raise ValueError("training.sft is for `train` and `rl`: use the data section instead")
        return self


class SftCheckpointConfig(CheckpointConfig):
    """Checkpoints, from which a run resumes exactly."""

    interval: Positive = 50
    """Steps between checkpoints; --resume continues from the last one."""


class DataConfig(RowsConfig):
    """The source of demonstrations (one of files, hub, environment), and the parts that are trained."""

    environment: EnvironmentConfig | None = None
    """Demonstrations from a taskset with answers, of tasks that reinforcement learning does not use."""

    @model_validator(mode="after")
    def _check_source(self) -> "DataConfig":
        given = [bool(self.files), bool(self.hub), self.environment is not None]
        if sum(given) > 1:
            raise ValueError("give one of data.files, data.hub and data.environment")
        return self


class ValidationConfig(BaseConfig):
    """Validation loss on rows that are not trained on."""

    files: list[str] = Field(default_factory=list[str])
    """Files or directories, as in data.files."""
    split: str = ""
    """With data.hub: the split to use."""
    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Or: share of the training rows to hold out, by a hash of their content."""
    rows: Positive = 512
    """Most rows; for an environment, most held-out tasks."""
    interval: Positive = 50
    """Steps between validations; there is also one before the first step and after the last."""

    @model_validator(mode="after")
    def _check_source(self) -> "ValidationConfig":
        if sum([bool(self.files), bool(self.split), self.fraction > 0]) > 1:
            raise ValueError("give one of validation.files, validation.split and .fraction")
        return self


class SftConfig(OwnRunConfig):
    """`primerl-node sft`."""

    name: RunName = "sft"
    """Run directory under output_dir."""
    max_epochs: Annotated[int, Field(ge=0)] = 0
    """Stop after this many epochs, if max_steps (which sets the learning rate schedule) is later; 0: no
    limit."""
    batch_size: Positive = 64
    """Sequences per optimizer step."""
    batch_tokens: Annotated[int, Field(ge=0)] = 0
    """If set: most tokens per optimizer step, instead of batch_size."""
    fsync: bool = True
    """Flush checkpoints to disk; without it they survive kill -9, but not a power failure."""
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
            raise ValueError("validation.split needs data.hub: give validation.files instead")
        given = self.validation.fraction or self.validation.files
        if given and self.data.environment is not None:
            raise ValueError(
                "an environment holds out tasks by itself: remove validation.fraction/.files"
            )
        return self
