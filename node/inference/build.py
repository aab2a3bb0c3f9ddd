"""Build an engine from its config: the only module that knows every engine by name."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..config.engine import EngineConfig
from ..gpus import is_on_gpu, usable
from .engine import Engine

if TYPE_CHECKING:
    from .engine_replica import EngineChild

ALONE = {"tp": 1, "pp": 1, "dp": 1, "sleep_after_s": 0.0}
"""Settings of hf, which is one engine on one device and keeps its memory."""


def build_engine(
    config: EngineConfig,
    gpus: Callable[[], Sequence[str]] = usable,
    *,
    hosted: bool = False,
    ahead: "EngineChild | None" = None,
) -> Engine:
    """Make the engine that `config.type` names, not started; heavy libraries load at start().

    On a GPU, and if `hosted`, it computes in a process of its own (docs/training.md says why). `gpus` returns
    the usable GPUs, `ahead` is a process of begun_ahead().
    """
    if config.type == "vllm":
        from .hosted import HostedEngine

        return HostedEngine(config, ahead=ahead)
    if hosted or is_on_gpu(config.device, gpus):
        from .hosted import HostedEngine

        return HostedEngine(config.model_copy(update=ALONE))
    from .hf import HfEngine

    return HfEngine(config)
