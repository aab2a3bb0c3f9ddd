"""Where a learner computes: a function of the config and the visible GPUs, decided before anything starts.

On a GPU nothing computes in a daemon: its network does all its reading and writing in one thread that needs
Python's interpreter, and whoever compiles or launches kernels beside it keeps that for seconds.
"""

import logging
from collections.abc import Callable, Sequence

from ..config.training import TrainingConfig
from ..ops.gpus import is_on_gpu

logger = logging.getLogger(__name__)

ALONE = {"ranks": 1, "nodes": 1, "replicas": 1, "rendezvous": ""}
"""The ranks of a learner that has one GPU for itself: nothing is sharded (world.py)."""


def resolve_backend(config: TrainingConfig, visible: Callable[[], Sequence[str]]) -> TrainingConfig:
    """`config` with a backend that is "local" or "fsdp": "auto" is one rank where there is a GPU, else local.

    `visible` names the GPUs that a process may use; it is asked only where that matters.
    """
    if config.backend == "fsdp":
        return config
    gpu = is_on_gpu(config.device, visible)
    if config.backend == "auto" and gpu:
        fsdp = config.fsdp.model_copy(update=ALONE)
        return config.model_copy(update={"backend": "fsdp", "fsdp": fsdp})
    if gpu:
        logger.warning(
            'training.backend = "local" computes in the daemon: on a GPU its network stands still for seconds '
            "at a time; leave it out, and the learner has a process of its own"
        )
    return config.model_copy(update={"backend": "local"})
