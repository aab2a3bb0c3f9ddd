"""Hugging Face models: making, finding, loading and writing them.

The only file that imports transformers, and no line of it may run code that came with a model:
remote code is off everywhere and weights are read from safetensors only.
"""

import logging
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.run import ModelCreateConfig
from ..ops.errors import EngineError, one_line
from ..weights.state import FLOATS, State
from .json_files import read_json
from .model_files import (
    CONTRACT_PATTERNS,
    WEIGHT_PATTERNS,
    contract_files,
    export,
    read_state,
    vocab_size,
)
from .tensors import bf16_state, to_torch, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "checkpoint_tensors",
    "contract_files",
    "create",
    "export",
    "fetch_config",
    "load_config",
    "load_model",
    "load_tokenizer",
    "model_from_state",
    "policy_state",
    "policy_tensors",
    "read_state",
    "resolve",
    "stop_token_ids",
    "unique_tensors",
    "vocab_size",
]

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROLE_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
MARKUP_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Qwen3 keeps these visible when special tokens are left out of decoded text; so do we."""

COMPACT_TEMPLATE = (
    "{%- if tools -%}<|system|>"
    "{%- for tool in tools -%}"
    "{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})"
    "{%- if not loop.last -%}, {% endif -%}"
    "{%- endfor -%}<|im_end|>{%- endif -%}"
    "{%- for message in messages -%}"
    "<|{{ message.role }}|>{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] -%}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>"
    "{%- endfor -%}<|im_end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""One token per role: a byte-level tokenizer would spend 16 tokens a turn on ChatML's role names. Of a tool it
shows the name and those of its arguments; calls have the form that vLLM names hermes."""


def _transformers() -> Any:
    """Import transformers with its broken companions hidden and its chatter off.

    transformers imports torchvision, torchaudio and torchcodec wherever they are installed, even
    for text models. Beside a CPU build of torch the usual wheels (CUDA builds) fail to import, and
    every model class would fail with them. A None in sys.modules means "not installed".
    """
    if "transformers" not in sys.modules:
        for name in ("torchvision", "torchaudio", "torchcodec"):
            hide_if_broken(name)
    import transformers

    # It puts another object in its place when it is loaded: who waited in another thread would hold the first.
    library: Any = sys.modules[transformers.__name__]
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()  # our errors repeat what it would log
    return library


def hide_if_broken(name: str) -> None:
    """Make a module that is installed but cannot be imported look absent."""
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return  # absent, which is fine
        reason: Exception = error
    except (ImportError, RuntimeError, OSError) as error:
        reason = error
    else:
        return
    logger.info("%s does not fit this torch and is hidden: %s", name, reason)
    sys.modules[name] = None  # type: ignore[assignment]


# -- making ---------------------------------------------------------------------------------------


def create(directory: Path, config: ModelCreateConfig, seed: int) -> None:
    """Write a Qwen3 or Qwen3-MoE model with random fp32 weights and its byte-level tokenizer into `directory`.

    The same config and seed give the same bytes. Token ids 0..255 are the bytes themselves.
    Raises EngineError if the vocabulary cannot hold the tokenizer's tokens.
    """
    import torch

    transformers = _transformers()
    tokenizer = _byte_tokenizer(config.max_position_embeddings)
    if len(tokenizer) > config.vocab_size:
        raise EngineError(
            f"model.create.vocab_size is {config.vocab_size}: set {len(tokenizer)} or more"
        )
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    shape = config.shape()
    del shape["rope_theta"]
    family = "Qwen3Moe" if config.num_experts else "Qwen3"
    model_config = getattr(transformers, f"{family}Config")(
        **shape, **ends, bos_token_id=None, rope_parameters=rope, dtype="float32"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(model_config).to(torch.float32)
    model.generation_config = transformers.GenerationConfig(**ends)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)


def _byte_tokenizer(max_length: int) -> "PreTrainedTokenizerBase":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([*SPECIAL_TOKENS, *ROLE_TOKENS])
    inner.add_tokens(list(MARKUP_TOKENS))
    tokenizer = _transformers().PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", *ROLE_TOKENS],
        model_max_length=max_length,
    )
    tokenizer.chat_template = COMPACT_TEMPLATE
    return tokenizer


def _byte_vocabulary() -> dict[str, int]:
    """Byte-level BPE's printable stand-in of every byte -> that byte.

    GPT-2's rule: printable Latin-1 stands for itself, the others take the characters from U+0100
    on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    vocabulary = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return vocabulary | {chr(0x100 + index): byte for index, byte in enumerate(others)}


# -- finding --------------------------------------------------------------------------------------


def resolve(name: str) -> Path:
    """The directory of a model: `name` itself if it is one, else a snapshot of that hub id.

    Only safetensors, configuration and tokenizer files are downloaded. Raises EngineError.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        found = snapshot_download(name, allow_patterns=[*CONTRACT_PATTERNS, *WEIGHT_PATTERNS])
    except HFValidationError as error:
        raise EngineError(
            f"model {name!r} is neither a directory nor a hub id: correct model.name"
        ) from error
    except OSError as error:  # every HTTP, cache and connection error of the hub client is one
        raise EngineError(
            f"cannot download model {name!r} ({type(error).__name__}): check name and network, "
            "or set model.name to a local directory"
        ) from error
    return Path(found)


def fetch_config(name: str) -> dict[str, Any]:
    """The config.json of a hub id alone; one that was fetched before is taken. Raises EngineError."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, "config.json")
        if not isinstance(path, str):
            _reach_hub(name)
            path = hf_hub_download(name, "config.json")
        return read_json(Path(path))
    except HFValidationError as error:
        raise EngineError(
            f"model {name!r} is neither a directory nor a hub id: correct model.name"
        ) from error
    except OSError as error:
        raise EngineError(
            f"the hub cannot be asked for {name!r} ({type(error).__name__}): check name and network, or give "
            "--model.name a directory with its config.json"
        ) from error


def _reach_hub(name: str) -> None:
    """Ask the hub for a model once. Raises OSError where a download would try again for half a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (OSError, ValueError):  # of the hub client: what the hub answered; an id that is none
        raise
    except Exception as error:  # of its HTTP client, which is not the same in all releases
        raise OSError(f"no connection: {one_line(error)}") from error


def stop_token_ids(directory: Path) -> tuple[int, ...]:
    """Ids that end a completion, ascending: generation config's (else config's) and the tokenizer's."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        if (directory / name).is_file() and not found:
            ids = read_json(directory / name).get("eos_token_id")
            found = ids if isinstance(ids, list) else [ids]
    found.append(load_tokenizer(directory).eos_token_id)
    ends = tuple(sorted({token for token in found if isinstance(token, int)}))
    if not ends:
        raise EngineError(
            f"{directory} names no end-of-sequence token: add eos_token_id to its generation_config.json"
        )
    return ends


# -- loading --------------------------------------------------------------------------------------


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model directory. Raises EngineError."""
    auto = _transformers().AutoTokenizer
    try:
        return auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise EngineError(
            f"the tokenizer of {directory} cannot be loaded: {one_line(error)}"
        ) from error


def load_config(directory: Path) -> Any:
    """The model's transformers config object. Raises EngineError."""
    auto = _transformers().AutoConfig
    try:
        return auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise EngineError(
            f"the config of {directory} cannot be loaded: {one_line(error)}"
        ) from error


def load_model(
    directory: Path, *, dtype: str = "float32", device: "torch.device | str" = "cpu"
) -> "PreTrainedModel":
    """The causal language model of a directory, in eval mode. Raises EngineError.

    `dtype` is a torch or safetensors name ("float32", "BF16").
    """
    auto = _transformers().AutoModelForCausalLM
    try:
        model = auto.from_pretrained(
            directory,
            dtype=torch_dtype(dtype),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise EngineError(
            f"the model of {directory} cannot be loaded: {one_line(error)}"
        ) from error
    return model.to(device).eval()


def empty_model(directory: Path) -> "PreTrainedModel":
    """The causal language model of a directory without weights: its layers alone. Raises EngineError."""
    import torch

    config = load_config(directory)
    with torch.device("meta"):
        return _model_class(config)(config)


def register_attention(name: str, attend: "Callable[..., Any]") -> None:
    """Let models use `attend` under `name`, without a mask: it knows by itself who sees whom."""
    transformers = _transformers()
    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, _no_mask)


def use_attention(model: "PreTrainedModel", name: str) -> None:
    """Have `model` use the attention registered under `name`; architectures.py says which models may."""
    model.set_attn_implementation(name)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def model_from_state(
    directory: Path, state: State, *, dtype: str = "float32", device: "torch.device | str" = "cpu"
) -> "PreTrainedModel":
    """A fresh model with the architecture of `directory` and the weights of `state`, in eval mode.

    Raises EngineError if the tensors of `state` are not exactly those of the architecture.
    """
    config = load_config(directory)
    family = _model_class(config)
    wanted = torch_dtype(dtype)
    if odd := next((name for name, one in state.items() if one.dtype not in FLOATS), ""):
        raise EngineError(
            f"the state's {odd} is {state[odd].dtype}: load a state of floating-point numbers"
        )
    # cloned: transformers keeps tensors that have the right dtype already, and ours are shared
    weights = {name: to_torch(tensor).clone() for name, tensor in state.items()}
    try:
        model, report = family.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=wanted,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    except (ValueError, RuntimeError) as error:
        raise EngineError(f"the state does not fit {directory}: {one_line(error)}") from error
    faults = {key: sorted(map(str, names)) for key, names in report.items() if names}
    if faults:
        raise EngineError(f"the state does not fit {directory}: {one_line(faults)}")
    return model.to(device).eval()


def _model_class(config: Any) -> Any:
    transformers = _transformers()
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    try:
        return known[type(config)]
    except KeyError as error:
        raise EngineError(
            f"transformers has no causal language model {config.model_type!r}: choose another model"
        ) from error


def layers_of(causal: Any) -> "list[torch.nn.Module]":
    """The blocks of a model, one after the other. Raises EngineError."""
    names: set[str] = set(getattr(causal, "_no_split_modules", None) or ())
    found = [one for one in causal.modules() if type(one).__name__ in names]
    if not found:
        raise EngineError(
            f"{type(causal).__name__} does not say what its layers are: choose a causal model of transformers"
        )
    return found


def policy_state(model: "PreTrainedModel") -> State:
    """bf16 copy of the model's weights, as policy_tensors() names them."""
    return bf16_state(policy_tensors(model).items())


def policy_tensors(model: "PreTrainedModel") -> "dict[str, torch.Tensor]":
    """The model's weights under their checkpoint names, where they lie; a tied weight appears once.

    transformers keeps some weights in another layout than checkpoints do (experts fused into one
    tensor); those are turned back, so that any engine reads them.
    """
    held = {name: tensor.detach() for name, tensor in unique_tensors(model).items()}
    return checkpoint_tensors(model, held)


def unique_tensors(model: "PreTrainedModel") -> "dict[str, torch.Tensor]":
    """Parameters and persistent buffers by the model's own names; a tied one has its first name only.

    By identity: where a tensor is sharded, a rank's part of it may have no elements and no address.
    """
    once: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            once[name] = tensor
    return once


def checkpoint_tensors(
    model: "PreTrainedModel", tensors: "Mapping[str, torch.Tensor]"
) -> "dict[str, torch.Tensor]":
    """Tensors by the model's names, some or all of its own, as a checkpoint would have them."""
    _transformers()
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors))
