"""Create, find, load and convert Hugging Face models.

The only file that imports transformers; a call that may import more of it holds `importing`. It must never
run code that comes with a model: remote code is disabled everywhere, weights are read from safetensors only.
"""

import difflib
import inspect
import json
import logging
import re
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import redirect_stderr
from importlib import import_module
from io import StringIO
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.paths import expand_home
from ..errors import EngineError, StorageError, UsageError, named_line, one_line
from ..process.threads import importing
from ..storage.run_files import make_directory
from ..weights.state import FLOATS, State
from .created_model import SHAPE_FIELDS, created_config
from .json_files import read_json
from .model_files import (
    CONTRACT_PATTERNS,
    WEIGHT_PATTERNS,
    contract_files,
    export,
    read_state,
    read_tensors,
    tensor_names,
    unexpected,
    vocab_size,
)
from .tensors import bf16_state, to_torch, torch_dtype
from .text_models import ALONE, QUANTIZED, SIZES, reads_images, text_model
from .tokenizer_files import DEFAULT, TEMPLATE_FOLDER, read_tokenizer_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "checkpoint_tensors",
    "contract_files",
    "create",
    "create_random",
    "default_config",
    "export",
    "fetch_config",
    "load_config",
    "load_model",
    "load_tokenizer",
    "model_from_state",
    "multimodal_text_config",
    "policy_state",
    "policy_tensors",
    "read_state",
    "resolve",
    "stop_token_ids",
    "text_directory",
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
"""Not special tokens, so that decoded text shows them, as with Qwen3."""

COMPACT_TEMPLATE = (
    "{%- if tools -%}<|system|>"
    "{%- for tool in tools -%}"
    "{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})"
    "{%- if tool.function.description -%}: {{ tool.function.description }}{%- endif -%}"
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
"""Chat template with one token per role: ChatML's role names would take 16 byte-level tokens a turn. A tool is
rendered as its name, argument names and description; calls have the format that vLLM calls hermes."""


def _transformers(name: str) -> Any:
    """Import what transformers has under a dotted name, without broken packages, progress bars and log output.

    It imports torchvision, torchaudio and torchcodec if they are installed, even for text models.
    With a CPU build of torch their usual CUDA wheels fail to import, and every model class with them. A None in
    sys.modules means "not installed". accelerate, too, is imported here and whole: its modules import each
    other, and two threads of which each begins with another one fail.
    """
    with importing:
        if "transformers" not in sys.modules:
            for package in ("torchvision", "torchaudio", "torchcodec", "accelerate"):
                hide_if_broken(package)
            _hide_gpu_kernels()
        import transformers

        # the module replaces itself there; who waited for the import would get the old object
        library: Any = sys.modules[transformers.__name__]
        library.utils.logging.disable_progress_bar()
        library.utils.logging.set_verbosity_error()  # our errors contain its messages
        return attrgetter(name)(library)


def hide_if_broken(name: str) -> None:
    """Make an installed module that cannot be imported appear as not installed."""
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return  # not installed
        reason: Exception = error
    except (ImportError, RuntimeError, OSError) as error:
        reason = error
    else:
        return
    logger.info("%s does not work with this torch and is ignored: %s", name, reason)
    sys.modules[name] = None  # type: ignore[assignment]


def _hide_gpu_kernels() -> None:
    """Make flash-linear-attention appear as not installed on a machine without a GPU.

    transformers calls its kernels, which cannot read CPU tensors, wherever it is installed.
    """
    import torch

    if not torch.cuda.is_available():
        sys.modules.setdefault("fla", None)  # type: ignore[arg-type]


PROBE = (
    "Hello,  World! \u00e9\u00df \u4f60\u597d \U0001f600\n\n\tx = 12345.678 + y;  don't\r\n"
    " \u00a0 Zo\u00eb's 3rd_name <a href='b'>"
)
"""Text by which two tokenizers are compared."""


# -- making ---------------------------------------------------------------------------------------


OURS = frozenset("dtype architectures eos_token_id pad_token_id bos_token_id".split())
"""Fields of a created model's config that follow from its tokenizer, or from the others."""


def check_fields(config: Mapping[str, Any]) -> None:
    """Check that its config class has all fields of a model that is made here. Raises UsageError."""
    family = config["model_type"]
    has = inspect.signature(_created_class(family, "Config").__init__).parameters.keys() - OURS
    for name in sorted(config.keys() - SHAPE_FIELDS - has):
        close = difflib.get_close_matches(name, [*has, *SHAPE_FIELDS], n=1)
        hint = f": did you mean {close[0]}?" if close else ""
        raise UsageError(f"model.create.{name} is no field of a new {family}{hint}")


def _created_class(family: str, kind: str) -> Any:
    name = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[family]
    return _transformers(f"{name}{kind}")


def create(directory: Path, fields: Mapping[str, Any], seed: int) -> None:
    """Write a Qwen3 or Qwen3-MoE model with random fp32 weights and a byte-level tokenizer.

    `fields` are those of [model.create]. The same ones and the same seed give the same files. Token ids 0..255
    are the bytes themselves. Raises UsageError for fields that transformers refuses, EngineError if the
    vocabulary is smaller than the tokenizer's, StorageError.
    """
    import torch

    config = created_config(fields)
    check_fields(config)
    tokenizer = _byte_tokenizer(config["max_position_embeddings"])
    if len(tokenizer) > config["vocab_size"]:
        raise EngineError(
            f"model.create.vocab_size is {config['vocab_size']}: set {len(tokenizer)} or more"
        )
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    shape: dict[str, Any] = {"rope_parameters": rope, **config}
    family = shape.pop("model_type")
    del shape["rope_theta"]
    make_model = _created_class(family, "ForCausalLM")
    try:
        made = _created_class(family, "Config")(**shape, **ends, bos_token_id=None, dtype="float32")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = make_model(made).to(torch.float32)
    except Exception as error:  # transformers raises whatever it comes upon
        raise UsageError(f"model.create: transformers refuses it: {one_line(error)}") from error
    make_directory(directory)
    try:
        save(model, tokenizer, directory)
    except StorageError:
        (directory / "config.json").unlink(missing_ok=True)  # it says that a model is there
        raise


def save(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write a model and its tokenizer to a directory.

    config.json says whether the head has weights of its own, as is the case; generation_config.json has the
    tokens that end a reply, of config.json. Raises StorageError.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    model.config.tie_word_embeddings = head.weight is embedding.weight
    # without what else the source's says: transformers refuses to write some of that
    model.generation_config = _transformers("GenerationConfig").from_model_config(model.config)
    try:
        tokenizer.save_pretrained(directory)
        model.save_pretrained(directory)
    except Exception as error:  # of a full disk tokenizers raises a bare one, safetensors its own
        raise StorageError(f"cannot write {directory}: {one_line(error)}") from error


def create_random(directory: Path, config: Mapping[str, Any], seed: int) -> None:
    """Write the causal language model that a config.json describes, with random fp32 weights.

    No weight is trivial, norms and biases neither; config.json stays as given. Raises EngineError.
    """
    import torch

    described = json.dumps(dict(config))
    (directory / "config.json").write_text(described)
    loaded = load_config(directory)
    try:
        with _building, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _model_class(loaded)(loaded).float()
            for tensor in model.state_dict().values():
                if tensor.ndim == 1 and tensor.is_floating_point():
                    tensor += 0.1 * torch.randn_like(tensor)
        model.save_pretrained(directory)
    except EngineError:
        raise
    except Exception as error:  # transformers raises whatever it comes upon
        raise EngineError(f"transformers cannot make it: {one_line(error)}") from error
    (directory / "config.json").write_text(described)


def _byte_tokenizer(max_length: int) -> "PreTrainedTokenizerBase":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([*SPECIAL_TOKENS, *ROLE_TOKENS])
    inner.add_tokens(list(MARKUP_TOKENS))
    tokenizer = _transformers("PreTrainedTokenizerFast")(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", *ROLE_TOKENS],
        model_max_length=max_length,
    )
    tokenizer.chat_template = COMPACT_TEMPLATE
    return tokenizer


def _byte_vocabulary() -> dict[str, int]:
    """Map the printable character of every byte in byte-level BPE to the byte.

    GPT-2's rule: printable Latin-1 bytes map to themselves, the others to characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    vocabulary = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return vocabulary | {chr(0x100 + index): byte for index, byte in enumerate(others)}


# -- finding --------------------------------------------------------------------------------------


def resolve(name: str) -> Path:
    """Return a model's directory: `name` if it is one, else a snapshot of that hub id.

    Downloads only safetensors, configuration and tokenizer files. Of a model that also reads images it is that
    of its text model. Raises EngineError, also for a directory that transformers reads otherwise than this
    program does, and StorageError.
    """
    path = _found(name)
    if (path / "tokenizer.json").is_file():
        check_tokenizer(path)
    if (path / "config.json").is_file():
        _check_head(path)
    return path


def _check_head(directory: Path) -> None:
    """Raise EngineError if the weights have a head of their own and config.json says that it is the embedding.

    transformers takes the head that is there, other programs the embedding.
    """
    pair = ("model.embed_tokens.weight", "lm_head.weight")
    if not tensor_names(directory) >= set(pair) or not load_config(directory).tie_word_embeddings:
        return
    embedding, head = read_tensors(directory, pair)
    if not head.equal(embedding):
        raise EngineError(
            f"{directory} has a head of its own, lm_head.weight, and its config.json says that it is the "
            f"embedding: set tie_word_embeddings to false, or `primerl-node model import {directory} OUT`"
        )


def _found(name: str) -> Path:
    path = expand_home(name)
    if path.is_dir():
        return text_directory(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        wanted = [*CONTRACT_PATTERNS, *WEIGHT_PATTERNS, f"{TEMPLATE_FOLDER}/*"]
        snapshot = snapshot_download(name, allow_patterns=wanted)
    except HFValidationError as error:
        raise _no_model(name) from error
    except OSError as error:  # base of all HTTP, cache and connection errors of the hub client
        raise EngineError(
            f"cannot download model {name!r} ({type(error).__name__}): check name and network, "
            "or set model.name to a local directory"
        ) from error
    return text_directory(Path(snapshot))


def _no_model(name: str) -> EngineError:
    """Make the error for a name that is neither a directory nor a hub id; it names step weights beside it."""
    path = expand_home(name)
    steps = sorted(other.name for other in path.parent.glob("step_*")) if path.name else []
    there = f": {path.parent} has {', '.join(steps[-3:])}" if steps else ": correct model.name"
    return EngineError(f"model {name!r} is neither a directory nor a hub id{there}")


def text_directory(directory: Path) -> Path:
    """Return the directory of the text model of one that also reads images; any other directory as it is.

    Raises EngineError, StorageError.
    """
    path = directory / "config.json"
    if not path.is_file() or not reads_images(config := read_json(path)):
        return directory
    return text_model(directory, multimodal_text_config(config))


def fetch_config(name: str) -> dict[str, Any]:
    """Fetch only the config.json of a hub id, from the cache if possible. Raises EngineError."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, "config.json")
        if not isinstance(path, str):
            _reach_hub(name)
            path = hf_hub_download(name, "config.json")
        return read_json(Path(path))
    except HFValidationError as error:
        raise _no_model(name) from error
    except OSError as error:
        raise EngineError(
            f"the hub cannot be reached for {name!r} ({type(error).__name__}): check name and network, or set "
            "--model.name to a directory with its config.json"
        ) from error


def _reach_hub(name: str) -> None:
    """Request a model's metadata from the hub once, without a download's half minute of retries.

    Raises OSError.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (OSError, ValueError):  # the hub's answers; an invalid id
        raise
    except Exception as error:  # from the HTTP client, which differs between releases
        raise OSError(f"no connection: {one_line(error)}") from error


def stop_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the token ids that end a completion, ascending.

    Taken from the generation config (else the config) and from the tokenizer. Raises EngineError if there are
    none.
    """
    ids: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        if (directory / name).is_file() and not ids:
            stated = read_json(directory / name).get("eos_token_id")
            ids = stated if isinstance(stated, list) else [stated]
    ids.append(load_tokenizer(directory).eos_token_id)
    ends = tuple(sorted({token for token in ids if isinstance(token, int)}))
    if not ends:
        raise EngineError(
            f"{directory} names no end-of-sequence token: add eos_token_id to its generation_config.json"
        )
    return ends


# -- loading --------------------------------------------------------------------------------------


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model directory. Raises EngineError."""
    auto = _transformers("AutoTokenizer")
    try:
        with importing:
            return auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise whatever they come upon
        raise EngineError(
            f"the tokenizer of {directory} cannot be loaded: {one_line(error)}"
        ) from error


def check_tokenizer(directory: Path) -> None:
    """Compare what the files of a directory say of its tokenizer with what transformers reads of them.

    A special token that no template reads may differ, unless it ends replies. Raises EngineError.
    """
    from tokenizers import Tokenizer

    theirs, own = load_tokenizer(directory), read_tokenizer_files(directory)
    chat_template: Any = theirs.chat_template or {}
    templates = chat_template if isinstance(chat_template, dict) else {DEFAULT: chat_template}
    if own.templates != templates:
        differing = sorted(own.templates.keys() ^ templates.keys()) or sorted(templates)
        raise _differs(directory, f"its chat templates {', '.join(differing)}")
    text = "\n".join(own.templates.values())
    special: dict[str, str] = {key: str(token) for key, token in theirs.special_tokens_map.items()}
    for name in sorted(own.special.keys() | special.keys()):
        used = name == "eos_token" or name in text
        if used and own.special.get(name) != special.get(name):
            raise _differs(
                directory,
                f"its {name} as {special.get(name)!r} and not {own.special.get(name)!r}",
            )
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known, vocabulary = tokenizer.get_vocab(with_added_tokens=True), theirs.get_vocab()
    unread = {token for name, token in special.items() if name not in text and name != "eos_token"}
    odd = {token for token, index in vocabulary.items() if known.get(token) != index} - unread
    odd |= known.keys() - vocabulary.keys()
    if odd:
        raise _differs(directory, f"{len(odd)} tokens, as {min(odd)!r},")
    added = (token.content for token in tokenizer.get_added_tokens_decoder().values())
    for probe in (PROBE, " ".join(added), *own.special.values()):
        try:
            ids = tokenizer.encode(probe, add_special_tokens=False).ids
            read = theirs(probe, add_special_tokens=False).input_ids
        except Exception as error:  # of a text that it cannot read tokenizers raises a bare one
            raise _differs(directory, f"{probe[:40]!r} ({one_line(error)})") from error
        if ids != read:
            raise _differs(directory, f"{probe[:40]!r}")


def _differs(directory: Path, what: str) -> EngineError:
    return EngineError(
        f"transformers reads {what} otherwise than the files of {directory} say: `primerl-node model import "
        f"{directory} OUT` writes them as it does"
    )


def load_config(directory: Path) -> Any:
    """Load the transformers config of a model directory. Raises EngineError."""
    auto = _transformers("AutoConfig")
    try:
        with importing:
            return auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever it comes upon
        raise EngineError(
            f"the config of {directory} cannot be loaded: {one_line(error)}"
        ) from error


def default_config(kind: str) -> dict[str, Any]:
    """Return the config.json that transformers assumes for a `model_type`, all defaults included."""
    auto = _transformers("AutoConfig")
    with importing:
        config = auto.for_model(kind)
    return json.loads(config.to_json_string(use_diff=False))  # type: ignore[no-any-return]


def multimodal_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text model in a model of TEXT_MODELS, given its config.json.

    It is the checkpoint's own text_config, with the sizes that it leaves to transformers' defaults. Raises
    EngineError.
    """
    auto = _transformers("AutoConfig")
    kind = str(config["model_type"])
    given = {key: value for key, value in config.items() if key != "model_type"}
    try:
        text = dict(config.get("text_config") or {})
        with importing:
            inner = auto.for_model(kind, **given).get_text_config()
        filled = json.loads(inner.to_json_string(use_diff=False))
        inner_kind = str(filled["model_type"])
    except Exception as error:  # transformers' own checks raise whatever they come upon
        raise EngineError(
            f"the config.json of {kind!r} cannot be read: {one_line(error)}"
        ) from error
    text_config = {key: filled[key] for key in SIZES if filled.get(key) is not None} | text
    if "tie_word_embeddings" in config:
        text_config["tie_word_embeddings"] = config["tie_word_embeddings"]
    text_config = {**{key: config[key] for key in QUANTIZED if key in config}, **text_config}
    if inner_kind not in ALONE:
        raise EngineError(
            f"the text model of {kind!r} is a {inner_kind!r}, which was never compared with transformers' own: "
            "choose another model"
        )
    family, architecture = ALONE[inner_kind]
    if family != inner_kind:  # with other defaults
        rope = filled["rope_parameters"].items()
        text_config["rope_parameters"] = {
            key: value for key, value in rope if not key.startswith("mrope_")
        }
        text_config = {
            key: value
            for key, value in text_config.items()
            if key not in ("rope_scaling", "rope_theta")
        }
    return {**text_config, "model_type": family, "architectures": [architecture]}


_building = threading.RLock()
"""While a model is built, transformers replaces functions of the whole process: beside that, another thread's
model would have no tied head. It is taken before `importing`, never after it."""


def load_model(
    directory: Path, *, dtype: str = "float32", device: "torch.device | str" = "cpu"
) -> "PreTrainedModel":
    """Load the causal language model of a directory, in eval mode. Raises EngineError.

    `dtype` is a torch or safetensors name ("float32", "BF16").
    """
    read, unread = read_model(directory, dtype=dtype)
    if reason := unexpected(directory, unread):
        raise EngineError(reason)
    model: Any = read
    return model.to(device).eval()


def read_model(
    directory: Path, *, dtype: str | None = None
) -> "tuple[PreTrainedModel, tuple[str, ...]]":
    """Read a causal language model, and the names of those tensors of its files that it does not have.

    Without `dtype` the weights are as the files have them. Raises EngineError.
    """
    import_model(directory)
    auto = _transformers("AutoModelForCausalLM")
    kind = "auto" if dtype is None else torch_dtype(dtype)
    try:
        with _building:
            model, report = auto.from_pretrained(
                directory,
                dtype=kind,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises anything, safetensors its own class
        raise EngineError(
            f"the model of {directory} cannot be loaded: {one_line(error)}"
        ) from error
    if missing := sorted(report["missing_keys"]):  # transformers makes them up
        raise EngineError(
            f"{directory} lacks {len(missing)} weights of its model, as {missing[0]}: download the model again"
        )
    return _with_soft_caps(model), tuple(sorted(report["unexpected_keys"]))


def load_gguf(path: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Read the model, in bfloat16, and the tokenizer of a GGUF file. Raises EngineError."""
    import torch

    try:
        quantization = _transformers("GgufConfig")
    except AttributeError as error:
        raise EngineError(
            f"transformers {_transformers('__version__')} cannot write what it reads of a GGUF file: "
            "install 5.17"
        ) from error
    options = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    try:
        # alone: files beside it would be read, too; and without the bar that transformers always draws
        with (
            _building,
            importing,
            tempfile.TemporaryDirectory() as alone,
            redirect_stderr(StringIO()),
        ):
            (Path(alone) / path.name).symlink_to(path.absolute())
            tokenizer = _transformers("AutoTokenizer").from_pretrained(alone, **options)
            model, report = _transformers("AutoModelForCausalLM").from_pretrained(
                alone,
                **options,
                dtype=torch.bfloat16,
                # else it is loaded as float32 that is named quantized, and cannot be saved (seen in 5.24)
                quantization_config=quantization(dequantize=True),
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises whatever it comes upon
        raise EngineError(
            f"{path} cannot be read as a model: {named_line(error)}: import the model's own directory"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise EngineError(f"{path} lacks {len(missing)} weights of its model, as {missing[0]}")
    return _with_soft_caps(model), tokenizer


def gguf_splits() -> frozenset[str]:
    """Return the values of tokenizer.ggml.pre that transformers knows; none in some versions."""
    name = "integrations.gguf.gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS"
    try:
        return frozenset(_transformers(name))
    except (AttributeError, ImportError):
        return frozenset()


def _with_soft_caps(model: Any) -> Any:
    """Choose attention that caps its scores if the model does.

    transformers chooses torch's, which leaves that out (seen in 5.19; 5.24 refuses it).
    """
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    return model


def empty_model(directory: Path) -> "PreTrainedModel":
    """Build the causal language model of a directory on the meta device. Raises EngineError."""
    import torch

    config = load_config(directory)
    with _building, torch.device("meta"):
        return _model_class(config)(config)


def without_place(directory: Path, names: "Iterable[str]") -> list[str]:
    """List those of a checkpoint's tensors that the model of its config.json has no place for.

    Those that it skips are not listed. Raises EngineError.
    """
    model: Any = empty_model(directory)
    skipped = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    own = policy_tensors(model).keys() | model.state_dict().keys()
    return sorted(
        name
        for name in names
        if name not in own and not any(re.search(pattern, name) for pattern in skipped)
    )


def register_attention(name: str, attend: "Callable[..., Any]") -> None:
    """Register `attend` as an attention implementation that masks by itself."""
    _transformers("AttentionInterface").register(name, attend)
    _transformers("AttentionMaskInterface").register(name, _no_mask)


def use_attention(model: "PreTrainedModel", name: str) -> None:
    """Set a model's attention to one of register_attention().

    See architectures.py for the models.
    """
    model.set_attn_implementation(name)


def head_logits(model: "PreTrainedModel", hidden: "torch.Tensor") -> "torch.Tensor":
    """Return the logits [T, V] that `model` computes from hidden states [T, d]; no layer runs."""
    make_output = _transformers("modeling_outputs.MoeModelOutputWithPast")
    output = make_output(last_hidden_state=hidden[None])

    def forward(*_: Any, **__: Any) -> Any:
        return output

    base: Any = model.base_model
    base.forward = forward
    try:
        ids = hidden.new_zeros(1, len(hidden)).long()
        return model(input_ids=ids, use_cache=False).logits[0]
    finally:
        del base.forward


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def model_from_state(
    directory: Path, state: State, *, dtype: str = "float32", device: "torch.device | str" = "cpu"
) -> "PreTrainedModel":
    """Build a model with `directory`'s architecture and the weights of `state`, in eval mode.

    Raises EngineError if the tensors of `state` are not exactly those of the architecture.
    """
    config = load_config(directory)
    family = _model_class(config)
    wanted = torch_dtype(dtype)
    if odd := next((name for name, tensor in state.items() if tensor.dtype not in FLOATS), ""):
        raise EngineError(
            f"tensor {odd} of the state is {state[odd].dtype}: load a state of floating-point tensors"
        )
    # cloned, as transformers keeps tensors that already have the right dtype, and ours are shared
    weights = {name: to_torch(tensor).clone() for name, tensor in state.items()}
    try:
        with _building:
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
    return _with_soft_caps(model).to(device).eval()


def _model_class(config: Any) -> Any:
    known = _transformers("models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING")
    try:
        with importing:
            return known[type(config)]
    except KeyError as error:
        raise EngineError(
            f"transformers has no causal language model {config.model_type!r}: choose another model"
        ) from error


def import_model(directory: Path) -> None:
    """Import the class of a directory's model, which takes a while. Raises EngineError if there is none."""
    _model_class(load_config(directory))


def layers_of(causal: Any) -> "list[torch.nn.Module]":
    """List the transformer blocks of a model, in order. Raises EngineError."""
    names: set[str] = set(getattr(causal, "_no_split_modules", None) or ())
    layers = [module for module in causal.modules() if type(module).__name__ in names]
    if not layers:
        raise EngineError(
            f"{type(causal).__name__} does not declare its layers: choose a causal model of transformers"
        )
    return layers


def policy_state(model: "PreTrainedModel", *, view: bool = False) -> State:
    """Copy the model's weights to bf16, under the names of policy_tensors(). `view`: see from_torch()."""
    return bf16_state(policy_tensors(model).items(), view=view)


def policy_tensors(model: "PreTrainedModel") -> "dict[str, torch.Tensor]":
    """Return the model's weights under their checkpoint names, without copying.

    Tied weights once. transformers keeps some weights in another layout than checkpoints do (experts fused into
    one tensor); those are converted back, so that any engine can read them.
    """
    tensors = {name: tensor.detach() for name, tensor in unique_tensors(model).items()}
    return checkpoint_tensors(model, tensors)


def unique_tensors(model: "PreTrainedModel") -> "dict[str, torch.Tensor]":
    """Return parameters and persistent buffers by the model's names.

    Tied ones by their first name. Ties are found by object identity: a rank's shard of a tensor may have no
    elements and no address.
    """
    unique: dict[str, torch.Tensor] = {}
    ids: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in ids:
            ids.add(id(tensor))
            unique[name] = tensor
    return unique


def checkpoint_tensors(
    model: "PreTrainedModel", tensors: "Mapping[str, torch.Tensor]"
) -> "dict[str, torch.Tensor]":
    """Convert some or all of a model's tensors from its own names and layout to a checkpoint's."""
    revert = _transformers("core_model_loading.revert_weight_conversion")
    return revert(model, dict(tensors))  # type: ignore[no-any-return]
