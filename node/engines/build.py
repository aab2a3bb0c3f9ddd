"""From config to engine: the only place that knows every engine by name."""

from ..engine_config import EngineConfig
from .engine import Engine


def build_engine(config: EngineConfig) -> Engine:
    """The engine that `config.type` names, not started. Heavy libraries load when it starts."""
    if config.type == "vllm":
        from .hosted import HostedEngine

        return HostedEngine(config)
    if config.type == "scripted":
        from .scripted import ScriptedEngine

        return ScriptedEngine(max_model_len=config.max_model_len)
    from .hf import HfEngine

    return HfEngine(config)
