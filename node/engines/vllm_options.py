"""What the vLLM engine is started with: environment, arguments, and what a config may not override.

Pure data: nothing here imports vLLM. An override that would change what a logprob or a policy stamp
means is refused, never merged.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..config import EngineConfig
from ..errors import EngineError, UsageError
from .engine import GenerateRequest

SAMPLING = "primerl"
"""Key of SamplingParams.extra_args: [key of the request, seed, temperature]; see vllm_sampling.py."""

WORKER_EXTENSION = f"{__package__}.vllm_worker.WorkerExtension"

_CPU_STEP_TOKENS = 4096
_MIN_CPU_CACHE = 64 << 20
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

REFUSED = {
    "model": "the run's manifest names the model",
    "tokenizer": "the run's manifest names the model",
    "skip_tokenizer_init": "the engine takes and gives token ids",
    "trust_remote_code": "code that comes with a model is never run",
    "generation_config": "the sampling contract is the run's",
    "load_format": "weights come by load() only",
    "worker_cls": "weights are replaced through this package's worker extension",
    "worker_extension_cls": "weights are replaced through this package's worker extension",
    "quantization": "weights are replaced bit for bit, and other weights would fail every audit",
    "kv_cache_dtype": "keys and values of another precision would fail every audit",
    "logprobs_mode": "this package's sampler makes the logprobs",
    "logits_processors": "the contract is softmax(logits / temperature)",
    "speculative_config": "each step draws one token, from the noise of its own position",
    "use_fp64_gumbel": "this package's sampler draws",
    "pipeline_parallel_size": "a worker must see every tensor of a state",
    "data_parallel_size": "start one node per replica",
    "dtype": "set engine.dtype",
    "max_model_len": "set engine.max_model_len",
    "max_num_seqs": "set engine.max_batch",
}
"""Engine argument -> why `engine.vllm` may not set it."""


def read_shape(model_dir: Path) -> dict[str, Any]:
    """The model's config.json. Raises EngineError if it does not describe a causal language model."""
    path = model_dir / "config.json"
    try:
        shape = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read ({error}): fetch the model again") from error
    wanted = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    for name in wanted:
        if not isinstance(shape, dict) or not isinstance(shape.get(name), int):
            raise EngineError(f"{path} has no {name}: use a causal language model")
    return shape


def check_device(device: str, *, cpu: bool) -> None:
    """Raise UsageError if `engine.device` is not what this vLLM computes on."""
    built = "cpu" if cpu else "cuda"
    if device not in ("auto", built):
        raise UsageError(
            f"engine.device is {device!r} but this vLLM is built for {built}: set it to auto, and "
            "choose among GPUs with CUDA_VISIBLE_DEVICES"
        )


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Raise UsageError if `engine.vllm` holds an argument that this engine must set itself."""
    for name in overrides:
        if name in REFUSED:
            raise UsageError(f"engine.vllm.{name} cannot be set ({REFUSED[name]}): remove it")


def set_environment(*, cpu: bool) -> None:
    """Set what ENVIRONMENT lists, leaving alone what is already set."""
    for variable in ENVIRONMENT:
        if variable.where in ("both", "cpu" if cpu else "gpu"):
            os.environ.setdefault(variable.name, variable.value)


def engine_arguments(
    config: EngineConfig, model_dir: Path, shape: Mapping[str, Any], *, cpu: bool
) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs. `shape` is the model's config.json.

    `engine.vllm` is laid over them: call check_overrides() first.
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
        "seed": 0,
    }
    if cpu:
        arguments |= {
            "enforce_eager": True,
            "max_num_batched_tokens": max(config.max_batch, _CPU_STEP_TOKENS),
            # without it vLLM takes most of the machine's memory
            "kv_cache_memory_bytes": _cache_bytes(config, shape),
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
        "extra_args": {SAMPLING: [key, request.seed, request.temperature]},
    }


def head_size(shape: Mapping[str, Any]) -> int:
    """Elements of one attention head, by config.json."""
    return int(shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"])


def _cache_bytes(config: EngineConfig, shape: Mapping[str, Any]) -> int:
    """Room for max_batch sequences of max_model_len, at most an eighth of the machine's memory.

    Bytes of a token = 2 (key and value) x layers x key-value heads x head size x element size.
    """
    kv_heads = int(shape.get("num_key_value_heads") or shape["num_attention_heads"])
    layers = int(shape["num_hidden_layers"])
    token = 2 * layers * kv_heads * head_size(shape) * _DTYPE_BYTES[config.dtype]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = token * config.max_batch * config.max_model_len
    return max(_MIN_CPU_CACHE, min(most, machine // 8))
