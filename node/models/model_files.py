"""Read and write the files of a Hugging Face model directory: contract files and weights.

Code that comes with a model is never read; weights are safetensors only.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...crypto.hashing import short
from ..errors import EngineError, one_line
from ..storage.partial import whole_directory
from ..storage.run_files import written_to_model
from ..weights.replica import prove
from ..weights.state import State, memory_threads
from ..weights.state_history import TensorLayout, layout
from .json_files import INDEX, read_json
from .tensors import bf16_state, from_torch, to_torch

if TYPE_CHECKING:
    import torch

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
QUANTIZED_TENSORS = re.compile(
    r"(^|[._])(absmax|biases|blocks|qweight|qzeros|quant_state.*|scale_inv|scales?|weight_packed)$"
)
"""Ends of the names that programs give to parts of quantized weights."""


def contract_files(directory: Path) -> list[str]:
    """List the files that determine tokens and shapes, sorted; never weights or code."""
    return sorted(
        entry.name
        for entry in directory.iterdir()
        if entry.is_file()
        and any(fnmatch(entry.name, pattern) for pattern in CONTRACT_PATTERNS)
        and entry.suffix not in (".py", ".safetensors")
    )


def vocab_size(directory: Path) -> int:
    """Return the rows of the model's embedding (config.json). Raises EngineError."""
    size = read_json(directory / "config.json").get("vocab_size")
    if not isinstance(size, int):
        raise EngineError(
            f"{directory / 'config.json'} has no vocab_size: use a causal language model"
        )
    return size


def check_same_tokens(teacher: Path, student: Path) -> None:
    """Check that every token id of `student` is the same token of `teacher`. Raises EngineError."""
    fewer = vocab_size(teacher) < vocab_size(student)
    if fewer or _tokens(teacher) != _tokens(student):
        raise EngineError(
            f"training.loss.reference: the tokens of {teacher} differ from those of the trained model: "
            "give a teacher with the same tokenizer"
        )


def _tokens(directory: Path) -> dict[str, int]:
    """Map tokens to ids, including added tokens (tokenizer.json)."""
    tokenizer = read_json(directory / "tokenizer.json")
    try:
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # a unigram model: [token, score] in order of the ids
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        return {**vocabulary, **added}
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"{directory / 'tokenizer.json'} has no vocabulary ({one_line(error)}): download the model again"
        ) from error


def position_count(directory: Path) -> int:
    """Return the model's max_position_embeddings (config.json); 0 if not given."""
    return _count(directory, "max_position_embeddings")


def layer_count(directory: Path) -> int:
    """Return the model's number of layers (config.json); 0 if not given."""
    return _count(directory, "num_hidden_layers")


def _count(directory: Path, key: str) -> int:
    value = read_json(directory / "config.json").get(key)
    return value if isinstance(value, int) else 0


def tensor_names(directory: Path) -> set[str]:
    """Return the names of all tensors in a directory's safetensors files, or in their index.

    Raises EngineError.
    """
    from safetensors import SafetensorError, safe_open

    names: set[str] = set()
    if (directory / INDEX).is_file():
        listed: Any = read_json(directory / INDEX).get("weight_map")
        return set(map(str, listed)) if isinstance(listed, dict) else names
    for path in directory.glob("*.safetensors"):
        try:
            with safe_open(path, framework="np") as reader:
                names.update(reader.keys())
        except (SafetensorError, OSError) as error:
            raise EngineError(
                f"{path} cannot be read ({one_line(error)}): download the model again"
            ) from error
    return names


def unexpected(directory: Path, names: Sequence[str]) -> str:
    """Return the reason why a checkpoint with these further tensors is refused; "" without any."""
    if not names:
        return ""
    if any(QUANTIZED_TENSORS.search(name) for name in names):
        return (
            f"the weights in {directory} are quantized, as {names[0]} says: use the model in bf16"
        )
    return (
        f"the model of config.json has no place for {len(names)} of the tensors in {directory}, as {names[0]}: "
        "they are of another one (a draft, or one of own code), choose a causal language model"
    )


def read_state(directory: Path) -> State:
    """Read all tensors of a directory's safetensors files, bit for bit. Raises EngineError."""
    return {name: from_torch(tensor) for name, tensor in _stored(directory)}


def view_state(directory: Path, *, bf16: bool = False) -> State:
    """Map the tensors of a directory's safetensors files into memory: they are read where they are used.

    With `bf16` floating-point tensors of another dtype are cast, which copies them. The files must not change
    while the result is used. Raises EngineError.
    """
    if bf16:
        return bf16_state(_stored(directory), view=True)
    return {name: from_torch(tensor, view=True) for name, tensor in _stored(directory)}


def _stored(directory: Path, names: Sequence[str] = ()) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield the names and tensors of a directory's safetensors files, all or those of `names`."""
    from safetensors import SafetensorError, safe_open

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise EngineError(
            f"{directory} has no *.safetensors: convert the model to safetensors first"
        )
    known: set[str] = set()
    for path in files:
        try:
            with safe_open(path, framework="pt") as reader:
                for name in reader.keys():
                    if name in known:
                        raise EngineError(f"{path} repeats {name!r}: remove the stale weight file")
                    known.add(name)
                    if names and name not in names:
                        continue
                    yield name, reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise EngineError(
                f"{path} cannot be read ({one_line(error)}): download the model again"
            ) from error


def read_tensors(directory: Path, names: Sequence[str]) -> "list[torch.Tensor]":
    """Map those tensors of these names into memory that a directory's safetensors files have, in order.

    Raises EngineError.
    """
    tensors = {name: tensor for name, tensor in _stored(directory, names)}
    return [tensors[name] for name in names if name in tensors]


def read_base(directory: Path, digest: bytes) -> State:
    """Read the weights of a model directory and check them against a run's state digest.

    Raises EngineError.
    """
    return _checked(read_state(directory), directory, digest)


def base_layout(directory: Path, digest: bytes) -> dict[str, TensorLayout]:
    """Check the weights of a model directory as read_base() does; return only their layouts, by name."""
    return layout(_checked(view_state(directory), directory, digest))


def _checked(state: State, directory: Path, digest: bytes) -> State:
    own = prove(0, state, threads=memory_threads()).digest
    if own != digest:
        raise EngineError(
            f"the weights in {directory} have digest {short(own)}, but the run needs {short(digest)}: "
            "delete that directory and start again"
        )
    return state


def export(state: State, model_dir: Path, directory: Path) -> None:
    """Write `state` and the contract files of `model_dir` as a Hugging Face model, atomically.

    Previous contents of `directory` are moved aside once the new files are on disk, then deleted. Raises
    StorageError.
    """
    with whole_directory(directory, written_to_model) as partial:
        tensors = {name: to_torch(tensor) for name, tensor in state.items()}
        write_tensors(tensors, partial / "model.safetensors")
        for name in contract_files(model_dir):
            shutil.copyfile(model_dir / name, partial / name)


def write_tensors(tensors: "dict[str, torch.Tensor]", path: Path) -> None:
    """Write a safetensors file. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # the library's word for a full disk
        raise OSError(one_line(error)) from error
