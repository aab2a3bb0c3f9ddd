"""Make the configured environment."""

from pathlib import Path

from ..config import EnvironmentConfig
from .chat import Chat
from .environment import Environment
from .verifiers import VerifiersEnvironment


def build_environment(
    config: EnvironmentConfig,
    *,
    model_dir: Path,
    seed: int,
    max_tokens: int,
    temperature: float,
    deadline: float = 60.0,
    chat: Chat | None = None,
) -> Environment:
    """The environment of a run, not yet started: nothing heavy is imported before start().

    `model_dir` holds tokenizer.json and the chat template, unless `chat` stands in for them; `max_tokens`
    bounds one turn; `deadline` bounds the environment's own code between two turns, in seconds.
    """
    return VerifiersEnvironment(
        config,
        model_dir=model_dir,
        seed=seed,
        max_tokens=max_tokens,
        temperature=temperature,
        deadline=deadline,
        chat=chat,
    )
