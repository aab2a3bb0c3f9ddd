"""From config and place to the engine of a stage: the only place that knows them by name."""

from ...engine_config import EngineConfig
from ...errors import UsageError
from ...pipeline.place import Place
from ...pipeline.port import Port
from .seams import HeadEngine, StageEngine

STALL_S = 120.0
"""The last resort of stage 0: its node's ring finds out earlier, by pp.stall_s, and knows who is at fault."""
NONE = "engine.type {} computes no stage of a pipeline: choose hf or vllm"


def build_head(config: EngineConfig, place: Place) -> HeadEngine:
    """The engine of stage 0, not started. Raises UsageError."""
    if config.type == "vllm":
        from .hosted_stage import HostedHead

        return HostedHead(config, place)
    if config.type == "hf":
        from .hf_head import HfPipeline

        return HfPipeline(config, place, lambda: _port(place), stall_s=STALL_S)
    raise UsageError(NONE.format(config.type))


def build_stage(config: EngineConfig, place: Place) -> StageEngine:
    """The engine of a later stage, not started. Raises UsageError."""
    if config.type == "vllm":
        from .hosted_stage import HostedStage

        return HostedStage(config, place)
    if config.type == "hf":
        from .hf_stage import HfStage

        return HfStage(config, place, lambda: _port(place))
    raise UsageError(NONE.format(config.type))


def _port(place: Place) -> Port:
    from ...pipeline.frame_codec import FrameLimits
    from ...pipeline.socket_port import SocketPort

    return SocketPort(place.socket, FrameLimits.of(place.shape))
