"""The config of `primerl-node eval`: environments, and the models to measure on them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self, cast

from pydantic import BeforeValidator, Field, model_validator
from pydantic_config import BaseConfig

from .chat_api import ChatApiConfig
from .engine import EngineConfig
from .run import EvaluatedEnvironment, LogConfig, check_judges, check_names
from .sandbox import SandboxConfig


def _steps(value: object) -> object:
    """`5,10` as two numbers."""
    if isinstance(value, str | int):
        value = [value]
    if not isinstance(value, Sequence):
        return value
    parts = (str(one).split(",") for one in cast(Sequence[object], value))
    return [word.strip() for words in parts for word in words if word.strip()]


Steps = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_steps)]


class EvalSamplingConfig(BaseConfig):
    """Sampling of replies."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that hold this probability together."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from this many likeliest tokens; 0 is all."""
    max_tokens: Annotated[int, Field(ge=0)] = 0
    """Most tokens of one reply; 0 takes those of the run of weights_dir, or 512."""


class EndpointConfig(ChatApiConfig):
    """A model behind an API, to be evaluated."""

    name: str = ""
    """Name in the results; else the model."""
    send_seed: bool = True
    """Send a seed, the same for the same prompt and sample."""


class EvalConfig(BaseConfig):
    """`primerl-node eval`."""

    name: str = "eval"
    """Directory of the results, under output_dir."""
    output_dir: Path = Path("outputs")
    """Parent of the directories of results."""
    seed: int = 0
    """Seed of the tasks and of the sampling."""
    again: bool = False
    """Measure again where this directory has results."""
    environments: list[EvaluatedEnvironment] = []
    """Environments to evaluate; that of the run of weights_dir if none is named."""
    endpoints: list[EndpointConfig] = []
    """Models behind APIs."""
    models: list[str] = []
    """Directories or hub ids of models that are generated with here."""
    weights_dir: Path | None = None
    """The step weights of a run: outputs/RUN/weights."""
    steps: Steps = []
    """Steps of weights_dir, as 5,10; all if none are named."""
    eval_base: bool = True
    """With weights_dir: also the model that the run began with (--no-eval-base leaves it out)."""
    base: str = ""
    """Directory or hub id of that model, where the run's own config.json does not say."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    engine: EngineConfig = EngineConfig()
    sandbox: SandboxConfig = SandboxConfig()
    log: LogConfig = LogConfig()

    @property
    def directory(self) -> Path:
        """Directory of the results."""
        return self.output_dir / self.name

    @model_validator(mode="after")
    def _has_work(self) -> Self:
        if not (self.endpoints or self.models or self.weights_dir):
            raise ValueError(
                "nothing to evaluate: name models, weights_dir or [[endpoints]] (see --help)"
            )
        if not self.environments and self.weights_dir is None:
            raise ValueError("nothing to play: name [[environments]], each with its id")
        if self.steps and self.weights_dir is None:
            raise ValueError("steps are of weights_dir: name it, as outputs/RUN/weights")
        check_judges(self.environments)
        check_names("environments", [one.title for one in self.environments])
        check_names("endpoints", [one.name or one.model for one in self.endpoints])
        return self
