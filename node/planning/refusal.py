"""Refuses to start an engine that could not hold one sequence: said in a line, before anything is loaded.

Only what is surely too much is refused: where nothing is known of a GPU or of a model, the engine is started.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from ..engine_config import EngineConfig
from ..errors import EngineError, UsageError
from ..gpu_memory import GpuMemory, visible
from ..json_files import read_json
from .bill import gib
from .fit import advise
from .shape import read_shape
from .worker import UTILIZATION, Device, plan_worker

logger = logging.getLogger(__name__)

LENIENCE = 0.85
"""Estimates may be wrong: what needs less than this much more than there is may still be tried."""


def refuse_here(config: EngineConfig, model_dir: Path, fingerprint: str = "") -> None:
    """refuse_what_cannot_fit() on the GPUs that this process sees; asks nvidia-smi, about 0.1 s."""
    if config.type == "vllm":
        refuse_what_cannot_fit(config, model_dir, visible(), fingerprint=fingerprint)


def refuse_what_cannot_fit(
    config: EngineConfig,
    model_dir: Path,
    gpus: Sequence[GpuMemory],
    *,
    fingerprint: str = "",
    taken: int = 0,
) -> None:
    """Raise UsageError if vLLM on `gpus` cannot hold one sequence of engine.max_model_len.

    `gpus` are those that the engine sees (gpu_memory.visible()); none, another engine than vllm and models
    that cannot be planned for are let through. `taken`: bytes of each that a trainer takes. Reads config.json
    only. Logs what fits.
    """
    if config.type != "vllm" or not gpus or config.device == "cpu":
        return
    tp = config.tp if isinstance(config.tp, int) else max(1, len(gpus) // (config.dp * config.pp))
    config = config.model_copy(update={"tp": tp})
    try:
        shape = read_shape(read_json(model_dir / "config.json"))
    except EngineError as error:
        logger.info("memory is not planned: %s", error)
        return
    smallest = min(gpu.total for gpu in gpus)
    device = Device("cuda", smallest, taken)
    plan = plan_worker(config, shape, device, fingerprint=fingerprint)
    advice = advise(config, shape, device, fingerprint=fingerprint)
    if plan.fits:
        logger.info("memory of %s: %s", gib(smallest), advice.verdict)
        return
    needed = plan.budget + plan.missing
    sure = sum(line.nbytes for line in plan.engine if not line.estimate) + plan.sequence
    most = plan.budget
    if "gpu_memory_utilization" not in config.vllm:  # only estimates made the plan's smaller
        most = max(most, int(UTILIZATION * (smallest - taken)))
    if plan.overdrawn <= 0 and sure <= most and needed * LENIENCE <= most:
        logger.warning("memory of %s: %s, by estimates: trying", gib(smallest), advice.verdict)
        return
    instead = advice.ways[0].flags if advice.ways else "a smaller model, or more GPUs"
    raise UsageError(
        f"{model_dir.name} {advice.verdict} on a GPU of {gib(smallest)}: give {instead} "
        "(`primerl-node doctor` has the whole plan)"
    )
