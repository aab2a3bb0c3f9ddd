"""What the vLLM engine is started with: environment and arguments.

Pure data: nothing here imports vLLM. What `engine.vllm` may say is in vllm_features.py, what
tp, pp and dp may be in vllm_shape.py.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..config.run import EngineConfig
from ..memory_plan.memory import rank_cache_bytes, tensor_parallel
from ..ops.errors import UsageError
from .engine import GenerateRequest, narrowing
from .host_messages import ApiOptions
from .vllm_features import RELEASES
from .vllm_shape import has_experts, head_size, kv_heads

OLDEST, NEWEST = RELEASES[0].version, RELEASES[-1].version


SAMPLING = "primerl"
"""Key of SamplingParams.extra_args, which are read by vllm_sampling.py:
[key of the request, seed, temperature, top_k, top_p]."""

SERVED = "primerl_served"
"""Key of SamplingParams.extra_args for a request of vLLM's own server: vLLM's processors change its logits."""

GREEDY_BELOW = 1e-5
"""A temperature below it takes the likeliest token, as in vLLM."""

WORKER_EXTENSION = f"{__package__}.vllm_worker.WorkerExtension"

NO_DOMAIN = "media.invalid"
"""A client's messages must not make this machine fetch what they name, and no host has this name."""

_CPU_STEP_TOKENS = 4096
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class Variable(NamedTuple):
    """One environment variable, set before vLLM is imported unless the operator has set it."""

    name: str
    value: str
    where: str
    """`both`, `cpu` or `gpu`."""
    why: str


ENVIRONMENT = (
    Variable("VLLM_NO_USAGE_STATS", "1", "both", "vLLM must not report on this machine"),
    Variable("DO_NOT_TRACK", "1", "both", "the same, for the libraries that vLLM imports"),
    Variable("HF_HUB_OFFLINE", "1", "both", "the model directory is local and complete"),
    Variable(
        "VLLM_LOGGING_LEVEL", "ERROR", "both", "a dozen warnings at each start ask for no action"
    ),
    Variable("VLLM_LOGGING_STREAM", "ext://sys.stderr", "both", "stdout belongs to the command"),
    Variable(
        "VLLM_WORKER_MULTIPROC_METHOD",
        "spawn",
        "both",
        "a fork would copy the node's sockets and the locks that its threads hold",
    ),
    Variable(
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "0",
        "cpu",
        "the engine process is then the worker too: one process and 6 s of start-up less, and no "
        "pinning of threads to cores, which would pin two nodes of one machine to the same core",
    ),
    Variable("OMP_NUM_THREADS", "1", "cpu", "threads that spin on shared cores cost 10x; raise it"),
    Variable(
        "VLLM_CPU_OMP_THREADS_BIND",
        "nobind",
        "cpu",
        "several ranks would each want a NUMA node of their own",
    ),
    Variable(
        "TORCHDYNAMO_DISABLE",
        "1",
        "cpu",
        "parts of it are compiled even when it runs eager: that needs a C++ compiler and 2-17 s",
    ),
    Variable(
        "VLLM_USE_FLASHINFER_SAMPLER",
        "0",
        "gpu",
        "FlashInfer's sampler is compiled on first use, and this package draws by its own",
    ),
)


def check_device(device: str, *, cpu: bool) -> None:
    """Raise UsageError if `engine.device` is not what this vLLM computes on."""
    built = "cpu" if cpu else "cuda"
    if device not in ("auto", built):
        raise UsageError(
            f"engine.device is {device!r} but this vLLM is built for {built}: set it to auto, and "
            "choose among GPUs with CUDA_VISIBLE_DEVICES"
        )


def set_environment(*, cpu: bool) -> None:
    """Set what ENVIRONMENT lists, leaving alone what is already set."""
    for variable in ENVIRONMENT:
        if variable.where in ("both", "cpu" if cpu else "gpu"):
            os.environ.setdefault(variable.name, variable.value)


def engine_arguments(
    config: EngineConfig,
    model_dir: Path,
    shape: Mapping[str, Any],
    *,
    cpu: bool,
    api: ApiOptions | None = None,
) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs, for one engine. `shape` is the model's config.json.

    With `api` vLLM serves text, too. `engine.vllm` is laid over them: call check_overrides() first, and
    resolve_parallel().
    """
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "generation_config": "vllm",
        "load_format": "dummy",
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_batch,
        "tensor_parallel_size": config.tp,
        "pipeline_parallel_size": config.pp,
        "seed": 0,
    }
    if cpu:
        arguments |= {
            "enforce_eager": True,
            "max_num_batched_tokens": max(config.max_batch, _CPU_STEP_TOKENS),
            # without it vLLM takes most of the machine's memory
            "kv_cache_memory_bytes": _cache_bytes(config, shape),
        }
    elif has_experts(shape):
        arguments["moe_backend"] = "triton"  # others turn the weights into a form of their own
    if api is not None:
        arguments |= {
            "skip_tokenizer_init": False,
            "served_model_name": [api.served_name],
            "reasoning_parser": api.reasoning_parser,
            "logprobs_mode": "processed_logprobs",
            "allowed_media_domains": [NO_DOMAIN],
        }
    return arguments | config.vllm


def sampling_arguments(request: GenerateRequest, key: int) -> dict[str, Any]:
    """A request in vLLM's words: keyword arguments of SamplingParams. `key` names it to the worker.

    For vLLM it is greedy, which is the least work: the worker's own sampler reads the extra arguments.
    """
    return {
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,  # the request names every stop token; the model's config adds none
        "detokenize": False,
        "extra_args": {SAMPLING: [key, request.seed, *narrowing(request)]},
    }


def _cache_bytes(config: EngineConfig, shape: Mapping[str, Any]) -> int:
    """Of one rank. Bytes of a token in a layer = 2 (key and value) x heads x head size x element size."""
    heads = -(-kv_heads(shape) // tensor_parallel(config))
    token = 2 * heads * head_size(shape) * _DTYPE_BYTES[config.dtype]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return rank_cache_bytes(config, int(shape["num_hidden_layers"]), token, machine)
