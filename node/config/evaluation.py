"""Configuration of `primerl-node eval`: environments, and the models to evaluate on them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self, cast

from pydantic import BeforeValidator, Field, model_validator

from .base import BaseConfig
from .chat_api import ChatApiConfig
from .engine import EngineConfig
from .run import EvaluatedEnvironment, LogConfig, ParentDir, RunName, check_judges, check_names
from .sandbox import SandboxConfig


def _steps(value: object) -> object:
    """Split `5,10` into two numbers."""
    if isinstance(value, str | int):
        value = [value]
    if not isinstance(value, Sequence):
        return value
    parts = (str(item).split(",") for item in cast(Sequence[object], value))
    return [word.strip() for words in parts for word in words if word.strip()]


Steps = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_steps)]


class EvalSamplingConfig(BaseConfig):
    """Sampling parameters."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature; 0 takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens whose probabilities add up to this."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many most likely tokens; 0: all."""
    max_tokens: Annotated[int, Field(ge=0)] = 0
    """Token limit of a reply; 0: that of the run of weights_dir, or 512."""


class EndpointConfig(ChatApiConfig):
    """A model behind an API to evaluate."""

    name: str = ""
    """Name in the results; default: the model's."""
    send_seed: bool = True
    """Send a seed, which depends on the prompt and the sample's number."""


class EvalConfig(BaseConfig):
    """`primerl-node eval`."""

    name: RunName = "eval"
    """Directory of the results, under output_dir."""
    output_dir: ParentDir = Path("outputs")
    """Parent of results directories."""
    seed: int = 0
    """Seed of tasks and sampling."""
    again: bool = False
    """Evaluate again what this directory already has results for."""
    environments: list[EvaluatedEnvironment] = []
    """Environments to evaluate on; default: that of the run of weights_dir."""
    endpoints: list[EndpointConfig] = []
    """Models behind APIs."""
    models: list[str] = []
    """Directories or hub ids of models to run on this machine."""
    weights_dir: Path | None = None
    """The step weights of a run: outputs/RUN/weights."""
    steps: Steps = []
    """Steps in weights_dir, such as 5,10; default: all."""
    eval_base: bool = True
    """With weights_dir: evaluate the model that the run began with, too (--no-eval-base: do not)."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    engine: EngineConfig = EngineConfig()
    sandbox: SandboxConfig = SandboxConfig()
    log: LogConfig = LogConfig()

    @property
    def directory(self) -> Path:
        """The results directory."""
        return self.output_dir / self.name

    @model_validator(mode="after")
    def _has_work(self) -> Self:
        if not (self.endpoints or self.models or self.weights_dir):
            raise ValueError(
                "no model to evaluate: set models, weights_dir or [[endpoints]] (see --help)"
            )
        if not self.environments and self.weights_dir is None:
            raise ValueError(
                "no environment to evaluate on: set [[environments]], each with its id"
            )
        if self.steps and self.weights_dir is None:
            raise ValueError("steps need weights_dir: set it, such as to outputs/RUN/weights")
        check_judges(self.environments)
        check_names("environments", [environment.title for environment in self.environments])
        check_names("endpoints", [endpoint.name or endpoint.model for endpoint in self.endpoints])
        return self
