"""Numerics classes in words: two engines of one class compute equal bits.

A run with exact numerics has its class in the manifest, and every node compares it with its own before it takes
part. The words are shown to operators; only their equality counts. Other runs bound the noise of each
NumericsClass, which is coarser.
"""

import json
import platform
import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...protocol.manifests import RunManifest
from ...protocol.numerics import MAX_LABEL, NumericsClass
from ..config.engine import (
    KEPT_NEEDS_VLLM,
    SPECULATIVE,
    STAGES_WITHOUT_ROUTES,
    EngineConfig,
)
from ..errors import UsageError
from ..gpus import torch_without_gpus, visible_memory
from ..memory_plan.memory import tensor_parallel_on
from .vllm_arguments import (
    has_experts,
    has_linear_attention,
    installed_release,
    visible_gpus,
)

NOT_KERNELS = (
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "max_num_partial_prefills",
    "long_prefill_token_threshold",
    "kv_offloading_size",
    "kv_offloading_backend",
    "kv_transfer_config",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "async_scheduling",
    "cudagraph_mode",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
)
"""Options of `engine.vllm` about memory, requests and graphs, which select no kernels.

Options that set the tokens of a step are not listed: kernels are compiled for that number.
"""
KERNELS = 2
"""Version of the replacements for vLLM's batch-invariant GPU kernels (vllm_worker.py)."""
BRANDS = re.compile(r"^(NVIDIA |GeForce |Tesla )+")
CPU_LEVELS = ("amx_tile", "avx512_bf16", "avx512f", "avx2", "asimd")
"""Flags of /proc/cpuinfo by which libraries choose their kernels, the widest first."""


def engine_class(
    config: EngineConfig, release: str | None = None, device: Callable[[], str] | None = None
) -> str:
    """Name the class of an engine of `config` on this machine; asks NVML.

    `release` and `device` default to this machine's.
    """
    gpus = visible_gpus(config)
    tp = tensor_parallel_on(config, gpus)
    named = device() if device else (gpu_family() if gpus else cpu_family())
    words = [f"vLLM {installed_release() if release is None else release}", named]
    words += [f"tp {tp}", *([f"pp {config.pp}"] if config.pp > 1 else [])]
    if gpus:
        words.append(f"kernels {KERNELS}")
    if kernels := kernel_options(config.vllm):
        words.append(json.dumps(kernels, sort_keys=True))
    return ", ".join(words)


def kernel_options(vllm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `engine.vllm` that may select kernels, also in compilation_config."""
    options = {name: value for name, value in vllm.items() if name not in NOT_KERNELS}
    compilation = options.pop("compilation_config", None)
    if isinstance(compilation, dict):
        compilation = {
            str(name): value
            for name, value in compilation.items()  # pyright: ignore[reportUnknownVariableType]
            if name not in NOT_KERNELS
        }
    return {**options, "compilation_config": compilation} if compilation else options


def gpu_family() -> str:
    """Name the first GPU up to its number: "NVIDIA H100" of "NVIDIA H100 80GB HBM3"."""
    names = [gpu.name for gpu in visible_memory()]
    return family_of(names[0]) if names else "GPU"


def family_of(name: str) -> str:
    """Cut the name of a GPU after the first word that has a digit."""
    words = name.replace("-", " ").split()
    last = next((at for at, word in enumerate(words) if re.search(r"\d", word)), len(words))
    return " ".join(words[: last + 1])


def cpu_family() -> str:
    """Name this machine's processor by its widest instruction set."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return f"{platform.machine()} CPU {widest(text)}".rstrip()


def widest(cpuinfo: str) -> str:
    """Return the first of CPU_LEVELS in the text of /proc/cpuinfo; empty if there is none."""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.M)
    flags = line[1].split() if line else []
    return next((name for name in CPU_LEVELS if name in flags), "")


def numerics_of(
    config: EngineConfig,
    *,
    pipeline: bool = False,
    release: Callable[[], str] | None = None,
    device: Callable[[], str] = gpu_family,
    gpus: Callable[[EngineConfig], int] = visible_gpus,
) -> NumericsClass:
    """Return the numerics class of an engine of `config`, for bounds of noise.

    `pipeline`: it is stage 0 of several nodes. Coarser than engine_class(): noise is measured, so engines that
    differ a little may share a class; the options that engine_ways() names are part of the engine's name.
    """
    count, hosted = gpus(config), config.type == "vllm"
    if release is None:
        release = installed_release if hosted else lambda: version("torch")
    return NumericsClass(
        engine=_label(
            ", ".join(
                [
                    f"{config.type} pipeline" if pipeline else config.type,
                    *(engine_ways(config, gpu=count > 0) if hosted else ()),
                ]
            )
        ),
        release=_label(release()),
        device=_label(BRANDS.sub("", device())) if count else "cpu",
        tp=tensor_parallel_on(config, count) if hosted else 1,
        dtype=config.dtype,
    )


def engine_ways(config: EngineConfig, *, gpu: bool) -> list[str]:
    """Name what an engine of vLLM is told to do otherwise than by default, where that changes many bits.

    Eager layers differ from compiled ones in every logprob. How prompts are cut and cached does not count: that
    differs from step to step within any one engine, and the noise that is measured has it.
    """
    vllm, ways = config.vllm, list[str]()
    compilation = vllm.get("compilation_config")
    given: dict[str, Any] = compilation if isinstance(compilation, dict) else {}
    mode = compilation if isinstance(compilation, int) else given.get("mode", given.get("level"))
    # vLLM's CPU build is always eager here
    if gpu and (vllm.get("enforce_eager") or mode in (0, "NONE")):
        ways.append("eager")
    elif gpu and mode is not None:
        ways.append(f"compiled {mode}")
    if config.batch_invariant:
        ways.append("batch-invariant")
    attention = vllm.get("attention_config")
    chosen: dict[str, Any] = attention if isinstance(attention, dict) else {}
    backend = vllm.get("attention_backend") or chosen.get("backend")
    if backend:
        ways.append(f"attention {backend}")
    return ways


def _label(text: str) -> str:
    """Keep the printable ASCII of a text, at most as much as a NumericsClass may hold."""
    return "".join(letter for letter in text if " " <= letter <= "~")[:MAX_LABEL]


def check_exact(config: EngineConfig, run: RunManifest) -> None:
    """Raise UsageError if `run` needs exact numerics and `config` on this machine has others."""
    if run.proofs.numerics != "exact":
        return
    wanted = run.proofs.engine_class
    if config.draft_head is not None:
        raise UsageError(
            "this run's numerics are exact, and drafts of an MTP head were not tried with them: remove "
            f"engine.vllm.{SPECULATIVE}"
        )
    if config.type != "vllm":
        raise UsageError(f"this run's numerics are exact: set engine.type to vllm, of {wanted}")
    if (own := engine_class(config)) != wanted:
        raise UsageError(
            f"this run's numerics are exact for {wanted}, and this machine is {own}: take part from such a "
            "machine, with these settings of engine"
        )


def check_routes(config: EngineConfig, run: RunManifest) -> None:
    """Raise UsageError if an engine of `config` cannot record or measure the routes of `run`."""
    if run.routes is not None and config.type == "vllm" and config.pp > 1:
        raise UsageError(
            f"this run replays routes, and {STAGES_WITHOUT_ROUTES}: set engine.pp to 1"
        )


def check_quantization(config: EngineConfig, run: RunManifest) -> None:
    """Raise UsageError if `config` contradicts the quantization of `run`, which is the one that counts."""
    own, wanted = config.quantization, run.proofs.quantization
    if "quantization" in config.model_fields_set and own != wanted:
        raise UsageError(
            f"this run's manifest says quantization {wanted}, engine.quantization is {own}: leave it out"
        )


def check_kept(config: EngineConfig, run: RunManifest) -> None:
    """Raise UsageError if an engine of `config` cannot keep keys and values, as those of `run` do."""
    if run.proofs.kv_cache == "kept" and config.type != "vllm":
        raise UsageError(f"this run's engines keep keys and values: {KEPT_NEEDS_VLLM}")


def check_keeps(config: EngineConfig, shape: Mapping[str, Any]) -> None:
    """Raise UsageError if engine.keep_kv_cache is set and blocks of this model's layers are not alike.

    `shape` is the model's config.json.
    """
    if not config.keep_kv_cache:
        return
    windows = shape.get("sliding_window") and shape.get("use_sliding_window") is not False
    kinds = {
        "has sliding windows": windows or "sliding_attention" in (shape.get("layer_types") or ()),
        "has linear attention": has_linear_attention(shape),
        "has latent attention": bool(shape.get("kv_lora_rank")),
    }
    why = "whose blocks of keys and values are not kept yet: leave engine.keep_kv_cache out"
    _refuse_any(kinds, why)


def check_quantized(config: EngineConfig, shape: Mapping[str, Any]) -> None:
    """Raise UsageError if engine.quantization is set and an engine cannot compute this model with it.

    `shape` is the model's config.json.
    """
    if config.quantization == "none":
        return
    if config.type == "vllm" and config.dtype == "float32" and not torch_without_gpus():
        raise UsageError(
            "FP8 products on a GPU are rounded to bfloat16: set engine.dtype to bfloat16"
        )
    kinds = {
        "is a mixture of experts": has_experts(shape),
        "is of linear attention": has_linear_attention(shape),
        "is of latent attention": bool(shape.get("kv_lora_rank")),
    }
    why = "whose weights FP8 rollouts do not quantize yet: leave engine.quantization out"
    _refuse_any(kinds, why)


def _refuse_any(kinds: Mapping[str, object], why: str) -> None:
    """Raise UsageError for the first of the `kinds` that the model is of."""
    for kind, is_of_kind in kinds.items():
        if is_of_kind:
            raise UsageError(f"the model {kind}, {why}")


def config_for_run(config: EngineConfig, run: RunManifest) -> EngineConfig:
    """Return `config` with what the manifest of `run` decides: kernels, quantization, recorded routes."""
    wanted: dict[str, Any] = {
        "enable_return_routed_experts": run.routes is not None,
        "quantization": run.proofs.quantization,
        "keep_kv_cache": run.proofs.kv_cache == "kept",
    }
    if run.proofs.numerics == "exact":
        wanted["batch_invariant"] = True
    return config.model_copy(update=wanted)
