"""Hugging Face models: making, finding, loading and writing them.

The only file that imports transformers, and no line of it may run code that came with a model:
remote code is off everywhere and weights are read from safetensors only.
"""

import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import ModelCreateConfig
from .errors import EngineError, StorageError
from .tensors import bf16_state, from_torch, to_torch, torch_dtype
from .weights.state import State, Tensor

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CONTRACT_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "*.tiktoken",
)
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")

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
    "{%- for message in messages -%}"
    "<|{{ message.role }}|>{{ message.content or '' }}<|im_end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""One token per role: a byte-level tokenizer would spend 16 tokens a turn on ChatML's role names."""


def _transformers() -> Any:
    """Import transformers with its broken companions hidden and its progress bars off.

    transformers imports torchvision, torchaudio and torchcodec wherever they are installed, even
    for text models. Beside a CPU build of torch the usual wheels (CUDA builds) fail to import, and
    every model class would fail with them. A None in sys.modules means "not installed".
    """
    if "transformers" not in sys.modules:
        for name in ("torchvision", "torchaudio", "torchcodec"):
            _hide_if_broken(name)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


def _hide_if_broken(name: str) -> None:
    try:
        __import__(name)
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
    """Write a Qwen3 model with random fp32 weights and its byte-level tokenizer into `directory`.

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
    shape = config.model_dump(exclude={"rope_theta"})
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    model_config = transformers.Qwen3Config(
        **shape, **ends, bos_token_id=None, rope_parameters=rope, dtype="float32"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(model_config).to(torch.float32)
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


def contract_files(directory: Path) -> list[str]:
    """Sorted names of the files that tokens and shapes depend on; never weights, never code."""
    return sorted(
        entry.name
        for entry in directory.iterdir()
        if entry.is_file()
        and any(fnmatch(entry.name, pattern) for pattern in CONTRACT_PATTERNS)
        and entry.suffix not in (".py", ".safetensors")
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise EngineError(
            f"{path} is missing: give a complete Hugging Face model directory"
        ) from error
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read ({error}): fetch the model again") from error
    if not isinstance(loaded, dict):
        raise EngineError(f"{path} does not hold a JSON object: fetch the model again")
    return loaded


def vocab_size(directory: Path) -> int:
    """Rows of the model's embedding (config.json); token ids are below this."""
    config = _json(directory / "config.json")
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise EngineError(
            f"{directory / 'config.json'} has no vocab_size: use a causal language model"
        )
    return size


def stop_token_ids(directory: Path) -> tuple[int, ...]:
    """Ids that end a completion, ascending: generation config's (else config's) and the tokenizer's."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        if (directory / name).is_file() and not found:
            ids = _json(directory / name).get("eos_token_id")
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
            f"the tokenizer of {directory} cannot be loaded: {_line(error)}"
        ) from error


def load_config(directory: Path) -> Any:
    """The model's transformers config object. Raises EngineError."""
    auto = _transformers().AutoConfig
    try:
        return auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise EngineError(f"the config of {directory} cannot be loaded: {_line(error)}") from error


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
        raise EngineError(f"the model of {directory} cannot be loaded: {_line(error)}") from error
    return model.to(device).eval()


def model_from_state(
    directory: Path, state: State, *, dtype: str = "float32", device: "torch.device | str" = "cpu"
) -> "PreTrainedModel":
    """A fresh model with the architecture of `directory` and the weights of `state`, in eval mode.

    Raises EngineError if the tensors of `state` are not exactly those of the architecture.
    """
    config = load_config(directory)
    family = _model_class(config)
    wanted = torch_dtype(dtype)
    weights = {name: to_torch(tensor) for name, tensor in state.items()}
    try:
        model, report = family.from_pretrained(
            None, config=config, state_dict=weights, dtype=wanted, output_loading_info=True
        )
    except (ValueError, RuntimeError) as error:
        raise EngineError(f"the state does not fit {directory}: {_line(error)}") from error
    faults = {key: sorted(map(str, names)) for key, names in report.items() if names}
    if faults:
        raise EngineError(f"the state does not fit {directory}: {_line(faults)}")
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


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300]


# -- states ---------------------------------------------------------------------------------------


def policy_state(model: "PreTrainedModel") -> State:
    """bf16 copy of the model's weights under their checkpoint names; a tied weight appears once.

    transformers keeps some weights in another layout than checkpoints do (experts fused into one
    tensor); those are turned back, so that any engine reads them.
    """
    _transformers()
    from transformers.core_model_loading import revert_weight_conversion

    once: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.numel() and tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        once[name] = tensor
    return bf16_state(revert_weight_conversion(model, once).items())


def read_state(directory: Path) -> State:
    """Every tensor in the safetensors files of a model directory, bits as stored."""
    from safetensors import SafetensorError, safe_open

    state: dict[str, Tensor] = {}
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise EngineError(
            f"{directory} holds no *.safetensors: convert the model to safetensors first"
        )
    for path in files:
        try:
            with safe_open(path, framework="pt") as reader:
                names = list(reader.keys())
                tensors = {name: from_torch(reader.get_tensor(name)) for name in names}
        except (SafetensorError, OSError) as error:
            raise EngineError(
                f"{path} cannot be read ({_line(error)}): fetch the model again"
            ) from error
        if twice := state.keys() & tensors.keys():
            raise EngineError(f"{path} repeats {min(twice)!r}: remove the stale weight file")
        state |= tensors
    return state


def export(state: State, model_dir: Path, directory: Path) -> None:
    """Write `state` and the contract files of `model_dir` as a Hugging Face model, atomically.

    Whatever `directory` held is replaced once the new files are on disk. Raises StorageError.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_weights(state, partial / "model.safetensors")
        for name in contract_files(model_dir):
            shutil.copyfile(model_dir / name, partial / name)
        for path in (*partial.iterdir(), partial):
            _fsync(path)
        _replace(partial, directory)
    except OSError as error:
        raise StorageError(f"cannot export to {directory}: {error}") from error


def _write_weights(state: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {name: to_torch(tensor) for name, tensor in state.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def _replace(source: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    source.rename(target)
    _fsync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
