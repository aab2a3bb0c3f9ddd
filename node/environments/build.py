"""Make the configured environment."""

from pathlib import Path

from ..config.run import EnvironmentConfig
from .environment import Environment
from .hosted import HostedEnvironment


def build_environment(
    config: EnvironmentConfig,
    *,
    model_dir: Path,
    seed: int,
    max_tokens: int,
    temperature: float,
    text: bool = False,
) -> Environment:
    """The environment of a run, not yet started: nothing of it is imported or run before start().

    `model_dir` holds tokenizer.json and the chat template; with `text` conversations are of characters, and it
    holds nothing. `max_tokens` bounds one turn.
    """
    return HostedEnvironment(
        config,
        model_dir=model_dir,
        seed=seed,
        max_tokens=max_tokens,
        temperature=temperature,
        text=text,
    )
