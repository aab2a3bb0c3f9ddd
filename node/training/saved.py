"""A learner on disk: fp32 weights, optimizer moments, RNG and step. Imports torch: import lazily.

Tensors are safetensors and the rest is JSON: nothing here can run code, and what is read is exactly what was
written, bit by bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..errors import StorageError
from .durable import whole_directory

FORMAT = 1
WEIGHTS, MOMENTS, RNG = "model.safetensors", "optimizer.safetensors", "rng.safetensors"
HEADER = "learner.json"

Tensors = Mapping[str, torch.Tensor]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    step: int


@dataclass(frozen=True)
class SavedLearner:
    """Everything that a resumed learner needs; moments are named `<parameter>:<moment>`."""

    step: int
    weights: Tensors
    moments: Tensors
    rng: Tensors

    def write(self, directory: Path) -> None:
        """Make `directory` hold this, whole or not at all; the caller syncs it. Raises StorageError."""
        with whole_directory(directory, fsync=False) as partial:
            save_file(_owned(self.weights), partial / WEIGHTS)
            save_file(_owned(self.moments), partial / MOMENTS)
            save_file(_owned(self.rng), partial / RNG)
            (partial / HEADER).write_bytes(msgspec.json.encode(_Header(FORMAT, self.step)))


def read_saved(directory: Path, parameters: Tensors) -> SavedLearner:
    """What write() wrote, if it is of a model with these parameters. Raises StorageError."""
    try:
        header = msgspec.json.decode((directory / HEADER).read_bytes(), type=_Header)
        weights = load_file(directory / WEIGHTS)
        moments = load_file(directory / MOMENTS)
        rng = load_file(directory / RNG)
    except (OSError, msgspec.DecodeError, SafetensorError) as error:
        raise StorageError(
            f"{directory} cannot be read ({error}): resume from an earlier checkpoint"
        ) from error
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    strangers = {key.rpartition(":")[0] for key in moments} - parameters.keys()
    if header.format != FORMAT or strangers or shapes != _shapes(parameters):
        raise StorageError(f"{directory} is of another model or format: resume with its own config")
    return SavedLearner(header.step, weights, moments, rng)


def rng_state() -> dict[str, torch.Tensor]:
    """State of torch's generators; nothing else in training draws random numbers."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: Tensors) -> None:
    """Continue where rng_state() was taken."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _shapes(tensors: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _owned(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors, as safetensors wants them."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
