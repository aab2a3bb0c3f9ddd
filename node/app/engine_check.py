"""What a command asks about `[engine]` before it starts anything, and before a dry run.

A dry run is done at once: nothing heavy may be imported here.
"""

from pathlib import Path

from ..config.run import EngineConfig, ModelConfig
from ..inference.vllm_arguments import (
    NOT_INSTALLED,
    check_installed,
    check_names,
    check_overrides,
    check_parallel,
    installed_arguments,
    is_installed,
    read_shape,
)
from ..ops.errors import EngineError, UsageError


def check_present(config: EngineConfig) -> None:
    """Raise EngineError if the engine's library is not installed here: asked before a node says hello."""
    if config.type == "vllm" and not is_installed():
        raise EngineError(NOT_INSTALLED)


def check_config(
    config: EngineConfig, model: ModelConfig | None = None, *, proven: bool = True
) -> None:
    """Raise UsageError or EngineError for what can be known to fail before anything is started.

    `model` is looked at where it is made here or lies in a directory.
    """
    if config.type != "vllm":
        if config.tp not in (1, "auto") or config.pp > 1 or config.dp > 1:
            raise UsageError(
                "engine.tp, engine.pp and engine.dp are vLLM's: leave them out, or set engine.type to vllm"
            )
        return
    check_overrides(config.vllm, proven=proven)
    check_names(config.vllm, installed_arguments())
    check_installed()
    if model is None:
        return
    directory = Path(model.name).expanduser()
    if model.create is not None:
        check_parallel(config, model.create.model_dump())
    elif (directory / "config.json").is_file():
        check_parallel(config, read_shape(directory))
