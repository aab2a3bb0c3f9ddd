"""The text model of a multimodal checkpoint.

Qwen3-VL, Qwen3.5 and later are published as one, Mistral 3, and most sizes of Gemma 3. A run trains the text
model: it is written once, as a checkpoint of its own under the names of a text model, and all nodes of a run
know only that.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config.paths import home_directory
from ..errors import EngineError, StorageError, one_line
from ..removal import remove_own
from ..storage.partial import sync, sync_tree
from .json_files import INDEX, read_json
from .tokenizer_files import TEMPLATE_FOLDER

logger = logging.getLogger(__name__)

TEXT_MODELS = ("gemma3", "mistral3", "qwen3_5", "qwen3_5_moe", "qwen3_vl")
"""`model_type` of the models that read images whose logits of text tests compare with their text model's."""
ALONE = {
    "gemma3_text": ("gemma3_text", "Gemma3ForCausalLM"),
    "ministral3": ("ministral3", "Ministral3ForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "qwen3_5_text": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_vl_text": ("qwen3", "Qwen3ForCausalLM"),
}
"""`model_type` of a text_config -> that of the text model as one of its own, and its architecture.

Qwen3-VL's is a Qwen3: of text all three parts of a position (time, height, width) are equal."""
PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
)
"""Names of the tensors of text models in such checkpoints, and as models of their own. All others are left out:
those of the vision encoder and of an MTP head."""

SIZES = tuple(
    """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim layer_types sliding_window max_position_embeddings tie_word_embeddings""".split()
)
"""Keys that a published text_config may leave to transformers' defaults, and other programs read."""
QUANTIZED = ("compression_config", "quantization", "quantization_config")
"""Keys that say how weights are quantized, those of the text model too; the second one is MLX's."""
FORMAT = b"1"
"""To be counted up when the text models that are written change."""
NEW_S = 60.0
"""Age in seconds below which a half-written directory may not be locked yet."""
_HALF = re.compile(r"\..*-[0-9a-f]{16}\.[a-z0-9_]{8}")
"""Names of half-written directories: that of the target, between a dot and the letters of mkdtemp()."""


def reads_images(config: Mapping[str, Any]) -> bool:
    """Return whether config.json is of a model in TEXT_MODELS."""
    return config.get("model_type") in TEXT_MODELS


def text_name(name: str) -> str:
    """Return a tensor's name in the text model; empty if it is not one of the text model's."""
    return next((new + name.removeprefix(old) for old, new in PREFIXES if name.startswith(old)), "")


def text_model(directory: Path, config: Mapping[str, Any]) -> Path:
    """Return the directory of a checkpoint's text model, whose config.json is `config`.

    The first call for a checkpoint writes it to the user's cache. Raises EngineError, StorageError.
    """
    weights = sorted(directory.glob("*.safetensors"))
    try:
        target = _cache() / f"{directory.name[:40]}-{_key(directory, weights)}"
    except OSError as error:
        raise EngineError(
            f"{directory} cannot be read ({error}): download the model again"
        ) from error
    if (target / "config.json").is_file():
        return target
    logger.info("writing the text model of %s to %s, once", directory, target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target.parent, now=time.time())
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        lock = os.open(partial, os.O_RDONLY)
        try:
            try_lock(lock)  # until it is written
            _write(directory, weights, config, partial)
            sync_tree(partial)
            partial.rename(target)
            sync(target.parent)
        finally:
            remove_own(partial)
            os.close(lock)
    except OSError as error:
        if (target / "config.json").is_file():
            return target  # another process was faster
        raise StorageError(
            f"cannot write the text model of {directory} to {target}: {error}: free disk space, or set "
            "XDG_CACHE_HOME"
        ) from error
    return target


def remove_stale(cache: Path, *, now: float) -> None:
    """Remove what conversions of processes that have ended left half written in `cache`.

    `now`: seconds since 1970. Directories younger than NEW_S stay.
    """
    for path in cache.glob(".*"):
        if not _HALF.fullmatch(path.name):
            continue
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_mtime < now - NEW_S and try_lock(lock):
                    logger.info("removing %s, which a conversion that was ended left", path)
                    remove_own(path)
            finally:
                os.close(lock)


def try_lock(directory: int) -> bool:
    """Lock a directory, given its descriptor; return whether no other process has locked it.

    The lock ends with the process, or when the descriptor is closed. False, too, on a disk without locks.
    """
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home or home_directory() / ".cache") / "primerl-node" / "text-models"


def _key(directory: Path, weights: list[Path]) -> str:
    """Return a digest of where a checkpoint is, of its files' sizes and times, and of its config."""
    from .model_files import contract_files

    files = sorted({*weights, *(directory / name for name in contract_files(directory))})
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    parts = json.dumps([str(directory.absolute()), stats]).encode()
    config = (directory / "config.json").read_bytes()
    return hashlib.sha256(FORMAT + parts + config).hexdigest()[:16]


def _write(directory: Path, weights: list[Path], config: Mapping[str, Any], target: Path) -> None:
    """Write the text model to `target`, file by file. Raises EngineError, OSError."""
    from safetensors import SafetensorError, safe_open

    from .model_files import contract_files, write_tensors

    places: dict[str, str] = {}
    index = directory / INDEX
    listed: Any = read_json(index).get("weight_map") if index.is_file() else {}
    if gone := set(map(str, listed.values())) - {path.name for path in weights}:
        raise EngineError(f"{directory} lacks {min(gone)}: download the model again")
    for path in weights:
        try:
            with safe_open(path, framework="pt") as reader:
                names = {name: new for name in reader.keys() if (new := text_name(name))}
                tensors = {new: reader.get_tensor(name) for name, new in names.items()}
        except (SafetensorError, OSError) as error:
            raise EngineError(
                f"{path} cannot be read ({one_line(error)}): download the model again"
            ) from error
        if tensors:
            write_tensors(tensors, target / path.name)
            places |= dict.fromkeys(tensors, path.name)
    if not places:
        raise EngineError(
            f"{directory} has no weights of a text model ({', '.join(old for old, _ in PREFIXES)}): "
            "download the model again"
        )
    if set(places.values()) != {INDEX.removesuffix(".index.json")}:
        (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=2))
    for name in contract_files(directory):
        shutil.copyfile(directory / name, target / name)
    if (directory / TEMPLATE_FOLDER).is_dir():
        shutil.copytree(directory / TEMPLATE_FOLDER, target / TEMPLATE_FOLDER)
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
