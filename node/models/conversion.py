"""Convert a GGUF file or a model directory to a directory that every part of this program takes.

transformers reads the source and writes the result. What it leaves out is said, and where that could change
what the model computes nothing is written. The result appears whole or not at all, and never in place of
anything.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import EngineError, UsageError, one_line
from ..storage.partial import whole_directory
from ..storage.run_files import written_to_model
from . import huggingface
from .architectures import untrainable
from .json_files import read_json
from .model_files import WEIGHT_PATTERNS, contract_files, tensor_names
from .text_models import reads_images

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NOT_KEPT = (
    "_attn_implementation_autoset",
    "_model_name_or_path",
    "_name_or_path",
    "auto_map",
    "quantization_config",
)
"""Keys of config.json that say where a model was, whose code it had, and how its weights were stored."""
OF_THE_SOURCE = ("_from_model_config", "is_local", "local_files_only", "name_or_path")
"""Keys that transformers writes of how it read a model."""
HYPERPARAMETERS: Mapping[str, tuple[str, ...]] = {
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.sliding_window": ("sliding_window",),
    "attention.value_length": ("head_dim",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_used_count": ("num_experts_per_tok",),
    "feed_forward_length": ("intermediate_size",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "rope.dimension_count": ("head_dim",),
    "rope.freq_base": ("rope_theta",),
    "rope.scaling.factor": ("factor",),
    "rope.scaling.original_context_length": ("original_max_position_embeddings",),
    "rope.scaling.type": ("rope_type",),
    "vocab_size": ("vocab_size",),
}
"""Hyperparameter of a GGUF file, below the name of its architecture -> its keys in config.json."""
ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
"""Tokens that end a reply in a GGUF file; transformers reads the first."""
TEMPLATE = "tokenizer.chat_template"
OF_THE_FORMAT = tuple(
    f"general.{name}" for name in "architecture file_type name quantization_version type".split()
)
SPLITS_AS_GPT2 = ("default", "gpt-2", "gpt2")


class ReadModel(NamedTuple):
    """A model that was read, and a line for each thing of its source that the result does not have."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    generation: Mapping[str, Any]
    """What generation_config.json says beside the tokens of config.json."""
    dropped: list[str]


def convert(source: Path, target: Path) -> list[str]:
    """Write the model of a GGUF file or a directory to the new directory `target`.

    Returns what was written and what was left out, in lines. Raises UsageError for a `target` that exists and a
    `source` that does not, EngineError for a model that cannot be read or trained, StorageError.
    """
    if target.is_symlink() or target.exists():
        raise UsageError(f"{target} exists: name a new directory")
    if not source.exists():
        raise UsageError(f"{source} is neither a GGUF file nor a model directory")
    read_model = _of_directory(source) if source.is_dir() else _of_gguf(source)
    weights = sum(
        tensor.numel() for tensor in huggingface.unique_tensors(read_model.model).values()
    )
    dtype = str(read_model.model.dtype).removeprefix("torch.")
    with whole_directory(target, written_to_model) as partial:
        huggingface.save(read_model.model, read_model.tokenizer, partial)
        _clean(partial / "config.json", NOT_KEPT)
        _clean(partial / "tokenizer_config.json", OF_THE_SOURCE)
        _clean(partial / "generation_config.json", OF_THE_SOURCE, read_model.generation)
        huggingface.check_tokenizer(partial)
        if reason := untrainable(read_json(partial / "config.json"), 1):
            raise EngineError(f"{source} cannot be trained: {reason}")
        if target.exists():
            raise UsageError(f"{target} was made meanwhile: name a new directory")
    summary = f"{target}: {read_model.model.config.model_type}, {weights:,} weights in {dtype}"
    template = (
        [] if read_model.tokenizer.chat_template else ["no chat template: add chat_template.jinja"]
    )
    return [f"wrote {summary}", *read_model.dropped, *template]


def _clean(path: Path, names: Iterable[str], more: Mapping[str, Any] | None = None) -> None:
    """Remove keys from a JSON file and set others."""
    values = {key: value for key, value in read_json(path).items() if key not in names}
    text = json.dumps({**values, **(more or {})}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


# -- a directory -----------------------------------------------------------------------------------


def _of_directory(source: Path) -> ReadModel:
    config = read_json(source / "config.json")
    if config.get("quantization_config"):
        raise EngineError(f"the weights of {source} are quantized: import the model in bf16")
    if (source / "adapter_config.json").exists():
        raise EngineError(
            f"{source} has adapters: merge them into their base first, with `merge_and_unload` of peft"
        )
    files = {path.name for path in source.iterdir()}
    weights = (path.name for pattern in WEIGHT_PATTERNS for path in source.glob(pattern))
    copied = {*contract_files(source), *weights}
    dropped = [f"dropped files: {', '.join(sorted(files - copied))}"] if files - copied else []
    if keys := [key for key in NOT_KEPT if config.get(key)]:
        dropped.append(f"dropped from config.json: {', '.join(keys)}")
    if reads_images(config):
        dropped.append("dropped all but the text model")
    directory = huggingface.text_directory(source)
    if not tensor_names(directory):
        raise EngineError(
            f"{source} has no *.safetensors, and other files may run code: save the model as safetensors"
        )
    model, unread = huggingface.read_model(directory)
    if inner := next((name for name in unread if _is_inner(name, model)), ""):
        raise EngineError(
            f"{source} has {inner}, which transformers' {model.config.model_type} does not: it is another model"
        )
    if unread:
        dropped.append(
            f"dropped {len(unread)} tensors that the model does not have, as {unread[0]}"
        )
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    return ReadModel(model, huggingface.load_tokenizer(directory), generation, dropped)


def _is_inner(name: str, model: "PreTrainedModel") -> bool:
    """Return whether a tensor is named as one of the model's own layers."""
    place = re.match(rf"(?:{model.base_model_prefix}\.)?layers\.(\d+)\.", name)
    return place is not None and int(place[1]) < model.config.num_hidden_layers


# -- a GGUF file -----------------------------------------------------------------------------------


def _of_gguf(source: Path) -> ReadModel:
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise EngineError(
                f"{source} needs the package {package}: pip install 'primerl-node[gguf]'"
            )
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
        kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    except Exception as error:  # gguf raises whatever numpy meets in a damaged file
        raise EngineError(
            f"{source} cannot be read as GGUF ({one_line(error)}): fetch it again"
        ) from error
    model, tokenizer = huggingface.load_gguf(source)
    weights = sum(tensor.numel() for tensor in huggingface.unique_tensors(model).values())
    stored = sum(tensors.values())
    if stored != weights:
        odd = [name for name in tensors if not re.match(r"(blk\.\d+|token_embd|output)", name)]
        raise EngineError(
            f"{source} has {stored:,} weights, and the model that transformers makes of it {weights:,}"
            f"{', without ' if odd else ''}{', '.join(odd[:4])}: import the model's own directory"
        )
    _check_hyperparameters(source, fields, model.config)
    if len(tokenizer) > model.config.vocab_size:
        raise EngineError(
            f"{source} has {len(tokenizer)} tokens for {model.config.vocab_size} rows of its embedding"
        )
    _add_templates(tokenizer, fields)
    ends = sorted({int(fields[name]) for name in ENDS if name in fields})
    generation = {"eos_token_id": ends} if len(ends) > 1 else {}
    return ReadModel(model, tokenizer, generation, list(_lost(fields, kinds, str(model.dtype))))


def _check_hyperparameters(source: Path, fields: Mapping[str, Any], config: Any) -> None:
    """Raise EngineError unless each hyperparameter of the file is the model's."""
    family = str(fields.get("general.architecture"))
    rope = config.rope_parameters or {}
    values = {**config.to_dict(), **rope}
    values["head_dim"] = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    for key, value in fields.items():
        name = key.removeprefix(f"{family}.")
        if name == key:
            continue
        known = [values.get(key) for key in HYPERPARAMETERS.get(name, ())]
        if not any(_equals(value, own) for own in known):
            raise EngineError(
                f"{source} sets {key} to {one_line(value)}, which is not found in the config that transformers "
                "makes of it: import the model's own directory"
            )


def _equals(value: Any, other: Any) -> bool:
    numbers = (int, float)
    if isinstance(value, numbers) and isinstance(other, numbers):
        return isclose(value, other, rel_tol=1e-6)
    return value == other


def _add_templates(tokenizer: "PreTrainedTokenizerBase", fields: Mapping[str, Any]) -> None:
    """Add the named templates of a GGUF file; transformers reads the one without a name."""
    named = {
        key.removeprefix(f"{TEMPLATE}."): str(text)
        for key, text in fields.items()
        if key.startswith(f"{TEMPLATE}.")
    }
    if named:
        default = {"default": tokenizer.chat_template} if tokenizer.chat_template else {}
        target: Any = tokenizer
        target.chat_template = {**default, **named}


def _lost(fields: Mapping[str, Any], kinds: Mapping[str, int], dtype: str) -> Iterator[str]:
    """Yield a line for each thing of a GGUF file that a model directory does not have."""
    formats = [f"{count} of {kind}" for kind, count in sorted(kinds.items()) if kind != "BF16"]
    if formats:
        yield f"dropped the number formats of tensors ({', '.join(formats)}): {dtype[6:]} now"
    split = str(fields.get("tokenizer.ggml.pre", "default"))
    known = {*huggingface.gguf_splits(), *SPLITS_AS_GPT2}
    if fields.get("tokenizer.ggml.model") == "gpt2" and split not in known:
        yield f"dropped tokenizer.ggml.pre ({split}), unknown to transformers: text is split as by GPT-2"
    about = [key for key in fields if key.startswith("general.") and key not in OF_THE_FORMAT]
    if about:
        yield f"dropped metadata: {', '.join(about)}"
