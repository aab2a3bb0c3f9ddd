"""A learner on disk: fp32 weights, optimizer moments, RNG and step. Imports torch: import lazily.

Written and read by torch DCP (shards.py), so any number of ranks may read what any number wrote; the bytes
are safetensors and JSON: nothing here can run code. The header is written last and names every tensor; the
learner is not touched before all of a checkpoint was read.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor

from ...ops.errors import StorageError
from . import shards
from .agreement import ALONE, Ranks
from .durable import partial_of, whole_directory
from .staging import HostRoom

FORMAT = 2
HEADER = "learner.json"
MODEL, OPTIMIZER, RNG = "model.", "optimizer.", "rng."

Tensors = Mapping[str, torch.Tensor]


class _Format(msgspec.Struct, frozen=True):
    """What the header of every format begins with."""

    format: int


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of learner.json; `tensors` are name -> shape of all but the RNG states."""

    format: int
    step: int
    ranks: int
    rng: tuple[str, ...]
    tensors: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class CutLearner:
    """One rank's share of a checkpoint, and the header of the whole."""

    header: _Header
    slices: list[shards.Slice]

    def write(self, directory: Path, ranks: Ranks = ALONE) -> None:
        """See SavedLearner.write(); in any thread, but only one at a time on `ranks`."""
        partial = partial_of(directory)
        with ExitStack() as stack:
            ranks.first(lambda: stack.enter_context(whole_directory(directory, fsync=False)))
            ranks.together(lambda: shards.write(self.slices, partial, ranks.rank))
            header = msgspec.json.encode(self.header)
            ranks.first(lambda: (partial / HEADER).write_bytes(header))
            ranks.first(stack.close)


@dataclass(frozen=True)
class SavedLearner:
    """Everything that a resumed learner needs; moments are named `<parameter>:<moment>`.

    Weights and moments are plain tensors or shards (DTensor) of this rank; `rng` is this rank's rng_state().
    """

    step: int
    weights: Tensors
    moments: Tensors
    rng: Tensors

    def write(self, directory: Path, ranks: Ranks = ALONE) -> None:
        """Make `directory` hold this, whole or not at all; the caller syncs it. Collective.

        With several machines it has to be on a disk that all of them see. Raises StorageError, on all ranks.
        """
        self.cut(ranks).write(directory, ranks)

    def staged(self, ranks: Ranks = ALONE, room: HostRoom | None = None) -> "CutLearner":
        """What write() would write, copied to the host's memory: the learner may go on.

        A copy in `room` is gone when the next one is made there.
        """
        whole = self.cut(ranks)
        return replace(whole, slices=(room or HostRoom()).copy(whole.slices))

    def cut(self, ranks: Ranks = ALONE) -> "CutLearner":
        """What write() would write, in the memory of the learner."""
        tensors = self.named()
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        header = _Header(FORMAT, self.step, ranks.size, tuple(sorted(self.rng)), shapes)
        own = {f"{RNG}{ranks.rank}.{device}": state for device, state in self.rng.items()}
        return CutLearner(header, shards.cut(_at_least_1d(tensors), ranks, own=own))

    def named(self) -> dict[str, torch.Tensor]:
        """Weights and moments by the names they have on disk."""
        weights = {MODEL + name: tensor for name, tensor in self.weights.items()}
        moments = {OPTIMIZER + name: tensor for name, tensor in self.moments.items()}
        return {name: tensor.detach() for name, tensor in {**weights, **moments}.items()}


def read_saved(
    directory: Path,
    parameters: Tensors,
    ranks: Ranks = ALONE,
    *,
    moments_on: torch.device | str | None = None,
) -> SavedLearner:
    """What write() wrote, if it is of a model with these parameters, in fresh tensors. Collective.

    They are laid out as `parameters` are, whatever the world was that wrote them; moments are on `moments_on`
    or where their parameter is, step counters always there. The RNG is that of this rank; a rank that did not
    exist then keeps the one that it has. Raises StorageError, on all ranks.
    """
    return ranks.together(lambda: _read(directory, parameters, ranks, moments_on))


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


def _read(
    directory: Path, parameters: Tensors, ranks: Ranks, moments_on: torch.device | str | None
) -> SavedLearner:
    """The share of one rank. Raises StorageError."""
    try:
        header = _read_header(directory)
        _check(directory, header, parameters)
        found = shards.stored(directory)
        _check_whole(directory, header, found)
        weights = {name: torch.empty_like(tensor) for name, tensor in parameters.items()}
        moments = {
            key.removeprefix(OPTIMIZER): _moment(key, header, found, parameters, moments_on)
            for key in header.tensors
            if key.startswith(OPTIMIZER)
        }
        rng = {
            device: torch.empty(found[key].size, dtype=torch.uint8)
            for device in header.rng
            if (key := f"{RNG}{ranks.rank}.{device}") in found
        }
        saved = SavedLearner(header.step, weights, moments, rng)
        own = {f"{RNG}{ranks.rank}.{device}": state for device, state in rng.items()}
        shards.fill({**_at_least_1d(saved.named()), **own}, directory)
    except (OSError, msgspec.DecodeError, SafetensorError) as error:
        raise StorageError(
            f"{directory} cannot be read ({error}): resume from an earlier checkpoint"
        ) from error
    return saved if rng else replace(saved, rng=rng_state())


def _read_header(directory: Path) -> _Header:
    text = (directory / HEADER).read_bytes()
    known = msgspec.json.decode(text, type=_Format).format
    if known != FORMAT:
        raise StorageError(
            f"{directory} has format {known} and this version reads {FORMAT}: resume it with the version "
            "that wrote it"
        )
    return msgspec.json.decode(text, type=_Header)


def _check(directory: Path, header: _Header, parameters: Tensors) -> None:
    """That this is a checkpoint of these parameters. Raises StorageError."""
    theirs = {
        name.removeprefix(MODEL): shape
        for name, shape in header.tensors.items()
        if name.startswith(MODEL)
    }
    ours = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    moments = (name for name in header.tensors if name.startswith(OPTIMIZER))
    strangers = {_parameter_of(name) for name in moments} - ours.keys()
    if theirs != ours or strangers:
        raise StorageError(f"{directory} is of another model: resume with its own config")


def _check_whole(directory: Path, header: _Header, found: shards.Stored) -> None:
    """That every slice of every tensor is there. Raises StorageError."""
    for name, shape in header.tensors.items():
        one = found.get(name)
        if one is None or tuple(one.size) != (shape or (1,)) or not shards.is_whole(one):
            raise StorageError(
                f"{directory} lacks a part of {name}: resume from an earlier checkpoint"
            )


def _parameter_of(key: str) -> str:
    return key.removeprefix(OPTIMIZER).rpartition(":")[0]


def _moment(
    key: str,
    header: _Header,
    found: shards.Stored,
    parameters: Tensors,
    device: torch.device | str | None,
) -> torch.Tensor:
    """Room for one moment: sharded as its parameter is, if it has its shape; else it is a step counter."""
    parameter = parameters[_parameter_of(key)]
    dtype = found[key].properties.dtype
    if header.tensors[key] == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, device=device or parameter.device)
    return torch.empty(header.tensors[key], dtype=dtype, device=parameter.device)


def _at_least_1d(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Views without the tensors of no dimension (step counters), which DCP's slices cannot say."""
    return {
        name: _local(tensor).reshape(1) if tensor.dim() == 0 else tensor
        for name, tensor in tensors.items()
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a shard; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
