"""Configuration of `primerl-node sft`: demonstrations in, a model that imitates them out.

The rules are run.py's. Everything about the learner is TrainingConfig's, with defaults that suit
supervised learning.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_config import BaseConfig

from .run import CheckpointConfig, EnvironmentConfig, LogConfig, ModelConfig, OwnRunConfig
from .training import Fraction, Positive, TrainingConfig

Role = Literal["assistant", "user", "system", "tool"]
DatasetId = Annotated[str, Field(pattern=r"^([\w.-]+/)?[\w.-]*$", max_length=200)]


class SftTrainingConfig(TrainingConfig):
    """How the trainer learns; the objective is always cross entropy."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    scheduler: Literal["constant", "linear", "cosine"] = "linear"


class SftCheckpointConfig(CheckpointConfig):
    """Exact checkpoints."""

    interval: Positive = 50
    """Steps between checkpoints; --resume goes on from the last."""


class DataConfig(BaseConfig):
    """The source of demonstrations (one of files, hub, environment), and which parts of them are learned."""

    files: list[str] = Field(default_factory=list[str])
    """.jsonl, .json, either with .gz, and .parquet files, or directories of them."""
    hub: DatasetId = ""
    """A data set of the Hugging Face hub, as the `datasets` library reads it; its code is never run."""
    subset: str = ""
    """Of `hub`: the configuration, where the data set has several."""
    revision: str = "main"
    """Of `hub`: branch, tag or commit."""
    split: str = "train"
    """Of `hub`: a split that the data set names."""
    environment: EnvironmentConfig | None = None
    """Demonstrations of a taskset whose data has answers, of tasks that reinforcement learning never leases."""
    strings: Literal["chat", "raw"] = "chat"
    """What prompt and completion are when they are text: a user's message and the reply to it, or tokens as
    they stand, without the chat template."""
    renderer: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=40)] = "template"
    """`template`: the model's own chat template, the tokens that `train` makes of a conversation; a name of the
    `renderers` package (`qwen3`); `auto`: its renderer for model.name, else the template."""
    loss_roles: Annotated[tuple[Role, ...], Field(min_length=1)] = ("assistant",)
    """Roles whose messages are learned: of the assistant's everything that it would generate, the stop token
    included; of others their text alone."""
    too_long: Literal["drop", "truncate"] = "drop"
    """Treatment of a row of more than training.seq_len tokens."""
    shuffle: bool = True
    """Another order every epoch, by `seed`."""
    max_bad_rows: Fraction = 0.05
    """Share of rows that may be unusable; more end the run."""
    max_row_mib: Annotated[float, Field(gt=0, le=1024)] = 16.0
    """A longer row is a bad one."""

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
    """If set: tokens per optimizer step at most, in place of batch_size."""
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
