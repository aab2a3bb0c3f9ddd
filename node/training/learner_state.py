"""A learner on disk: fp32 weights, optimizer moments, RNG and step.

Imports torch: import lazily. Written and read by torch DCP, so any number of ranks may read the files of any
other number; the bytes are safetensors and JSON: nothing here can run code. The header is written last and
names every tensor; the learner is not touched before all of a checkpoint was read.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ..errors import BAD_FILE, StorageError, one_line
from ..storage.partial import partial_of, whole_directory
from ..storage.run_files import written_by_learner
from .world import RankChannel

logger = logging.getLogger(__name__)

ALONE = RankChannel()

FILE_BYTES = 1 << 29
"""Approximate size of one file of a rank, which is also copied to host memory at once."""

Tensors = Mapping[str, torch.Tensor]
Stored = dict[str, TensorStorageMetadata]


@dataclass(frozen=True)
class ShardSlice:
    """One rank's part of a tensor, on any device, and its offsets in the whole."""

    name: str
    offsets: tuple[int, ...]
    data: torch.Tensor


def cut(tensors: Tensors, ranks: RankChannel, *, own: Tensors | None = None) -> list[ShardSlice]:
    """Return the slices of `tensors` that this rank writes.

    `tensors` have the same names on every rank, plain or DTensor. A plain tensor is written by rank 0, a copy
    of a shard by its first holder. `own` are plain tensors of this rank alone; their names have to be different
    on every rank. No tensor may have 0 dimensions. No copies. Not collective: the writer of each slice follows
    from the layout, so no plan goes over the wire.
    """
    mine = {name: tensor for name, tensor in tensors.items() if _is_writer(tensor, ranks)} | dict(
        own or {}
    )
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(mine, is_coordinator=True)
    slices: list[ShardSlice] = []
    for item in planner.finish_plan(planner.create_local_plan()).items:
        data = planner.resolve_data(item)
        assert isinstance(data, torch.Tensor)
        assert item.tensor_data is not None
        slices.append(
            ShardSlice(item.index.fqn, tuple(item.tensor_data.chunk.offsets), data.detach())
        )
    return slices


def write(slices: Sequence[ShardSlice], directory: Path, rank: int) -> None:
    """Write this rank's slices into an existing directory; the caller syncs.

    Raises OSError, SafetensorError.
    """
    files: list[list[ShardSlice]] = []
    room = 0
    for piece in slices:
        if room <= 0:
            files.append([])
            room = FILE_BYTES
        files[-1].append(piece)
        room -= piece.data.numel() * piece.data.element_size()
    for number, file in enumerate(files):
        _write_file(directory / f"shard-{rank:05}-{number:05}.safetensors", file)


def stored(directory: Path) -> Stored:
    """Return shape, dtype and slices of every tensor in a directory.

    Raises OSError, SafetensorError.
    """
    stored_tensors = _metadata(directory).state_dict_metadata
    return {
        name: tensor
        for name, tensor in stored_tensors.items()
        if isinstance(tensor, TensorStorageMetadata)
    }


def is_whole(tensor: TensorStorageMetadata) -> bool:
    """Return whether the slices cover the tensor.

    Slices do not overlap, so counting elements is enough.
    """
    return sum(math.prod(chunk.sizes) for chunk in tensor.chunks) == math.prod(tensor.size)


def fill(tensors: Tensors, directory: Path) -> None:
    """Read into `tensors`, which may be sharded in any way. Not collective.

    Raises OSError, SafetensorError; then some of them may have been filled.
    """
    metadata = _metadata(directory)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = HuggingFaceStorageReader(str(directory))
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()


def _metadata(directory: Path) -> Metadata:
    return HuggingFaceStorageReader(str(directory)).read_metadata()


def _write_file(path: Path, slices: Sequence[ShardSlice]) -> None:
    """Write one file in the format of HuggingFaceStorageReader.

    Its own writer would hold the data in memory twice, and the GIL.
    """
    offsets = {piece.name: {"saved_offsets": list(piece.offsets)} for piece in slices}
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    save_file(
        {piece.name: piece.data.cpu().contiguous() for piece in slices}, path, metadata=metadata
    )


def _is_writer(tensor: torch.Tensor, ranks: RankChannel) -> bool:
    """Return whether this rank is the first holder of its part of `tensor`."""
    if not isinstance(tensor, DTensor):
        return ranks.rank == 0
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return False
    return not any(
        at and how.is_replicate() for at, how in zip(place, tensor.placements, strict=True)
    )


SLAB_BYTES = 1 << 28
"""Page-locked memory is allocated in powers of two: small slices share a block of this size."""
ALIGNED = 64


class HostRoom:
    """Host memory for the slices of one learner. One thread at a time."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._pinned = torch.cuda.is_available()

    def copy(self, slices: list[ShardSlice]) -> list[ShardSlice]:
        """Return copies of `slices`, complete when this returns."""
        copies: list[ShardSlice] = []
        for piece in slices:
            buffer = self._held.get(piece.name)
            if (
                buffer is None
                or buffer.shape != piece.data.shape
                or buffer.dtype != piece.data.dtype
            ):
                buffer = self._held[piece.name] = self._room(piece.data)
            buffer.copy_(piece.data, non_blocking=True)
            copies.append(ShardSlice(piece.name, piece.offsets, buffer))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def _room(self, data: torch.Tensor) -> torch.Tensor:
        size = data.numel() * data.element_size()
        if size > SLAB_BYTES:
            room = self._allocate(size)
        else:
            if self._slab.numel() < size:
                self._slab = self._allocate(SLAB_BYTES if data.is_cuda else size)
            room = self._slab[:size]
            self._slab = self._slab[math.ceil(size / ALIGNED) * ALIGNED :]
        return room.view(data.dtype).view(data.shape)

    def _allocate(self, size: int) -> torch.Tensor:
        if self._pinned:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:  # the system has no more page-locked memory
                logger.warning("copies for checkpoints take longer: %s", error)
                self._pinned = False
        return torch.empty(size, dtype=torch.uint8)


FORMAT = 2
HEADER = "learner.json"
MODEL, OPTIMIZER, RNG = "model.", "optimizer.", "rng."


class _Format(msgspec.Struct, frozen=True):
    """The beginning of the header of every format."""

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
    slices: list[ShardSlice]

    def write(self, directory: Path, ranks: RankChannel = ALONE) -> None:
        """Write the share as SavedLearner.write(); in any thread, but only one at a time on `ranks`."""
        partial = partial_of(directory)
        with ExitStack() as stack:
            whole = whole_directory(directory, written_by_learner, fsync=False)
            ranks.first(lambda: stack.enter_context(whole))
            ranks.together(lambda: write(self.slices, partial, ranks.rank))
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

    def write(self, directory: Path, ranks: RankChannel = ALONE) -> None:
        """Write this learner to `directory`, whole or not at all; the caller syncs it. Collective.

        With several machines the directory has to be on a disk shared by all. Raises StorageError, on all
        ranks.
        """
        self.cut(ranks).write(directory, ranks)

    def staged(self, ranks: RankChannel = ALONE, room: HostRoom | None = None) -> "CutLearner":
        """Return the content of write(), copied to host memory: the learner may go on.

        A copy in `room` is overwritten when the next one is made there.
        """
        whole = self.cut(ranks)
        return replace(whole, slices=(room or HostRoom()).copy(whole.slices))

    def cut(self, ranks: RankChannel = ALONE) -> "CutLearner":
        """Return the content of write(), in the memory of the learner."""
        tensors = self.named()
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        header = _Header(FORMAT, self.step, ranks.size, tuple(sorted(self.rng)), shapes)
        own = {f"{RNG}{ranks.rank}.{device}": state for device, state in self.rng.items()}
        return CutLearner(header, cut(_at_least_1d(tensors), ranks, own=own))

    def named(self) -> dict[str, torch.Tensor]:
        """Return weights and moments by their names on disk."""
        weights = {MODEL + name: tensor for name, tensor in self.weights.items()}
        moments = {OPTIMIZER + name: tensor for name, tensor in self.moments.items()}
        return {name: tensor.detach() for name, tensor in {**weights, **moments}.items()}


def read_saved(
    directory: Path,
    parameters: Tensors,
    ranks: RankChannel = ALONE,
    *,
    moments_on: torch.device | str | None = None,
) -> SavedLearner:
    """Read a learner that write() wrote, of a model with these parameters, as fresh tensors.

    Collective. The tensors are laid out as `parameters` are, independent of the world that wrote them; moments
    are on `moments_on` or on their parameter's device, step counters always on the latter. The RNG is that of
    this rank; a rank that did not exist then keeps its own. Raises StorageError, on all ranks.
    """
    return ranks.together(lambda: _read(directory, parameters, ranks, moments_on))


def rng_state() -> dict[str, torch.Tensor]:
    """Return the states of torch's generators; nothing else in training draws random numbers."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: Tensors) -> None:
    """Continue from the states of rng_state()."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _read(
    directory: Path, parameters: Tensors, ranks: RankChannel, moments_on: torch.device | str | None
) -> SavedLearner:
    """Read the share of one rank. Raises StorageError."""
    try:
        header = _read_header(directory)
        _check(directory, header, parameters)
        tensors = stored(directory)
        _check_whole(directory, header, tensors)
        weights = {name: torch.empty_like(tensor) for name, tensor in parameters.items()}
        moments = {
            key.removeprefix(OPTIMIZER): _moment(key, header, tensors, parameters, moments_on)
            for key in header.tensors
            if key.startswith(OPTIMIZER)
        }
        rng = {
            device: torch.empty(tensors[key].size, dtype=torch.uint8)
            for device in header.rng
            if (key := f"{RNG}{ranks.rank}.{device}") in tensors
        }
        saved = SavedLearner(header.step, weights, moments, rng)
        own = {f"{RNG}{ranks.rank}.{device}": state for device, state in rng.items()}
        fill({**_at_least_1d(saved.named()), **own}, directory)
    except (*BAD_FILE, SafetensorError) as error:
        raise StorageError(
            f"{directory} cannot be read ({one_line(error)}): resume from an earlier checkpoint"
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
    """Check that this is a checkpoint of these parameters. Raises StorageError."""
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


def _check_whole(directory: Path, header: _Header, tensors: Stored) -> None:
    """Check that every slice of every tensor is there. Raises StorageError."""
    for name, shape in header.tensors.items():
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.size) != (shape or (1,)) or not is_whole(tensor):
            raise StorageError(
                f"{directory} lacks a part of {name}: resume from an earlier checkpoint"
            )


def _parameter_of(key: str) -> str:
    return key.removeprefix(OPTIMIZER).rpartition(":")[0]


def _moment(
    key: str,
    header: _Header,
    tensors: Stored,
    parameters: Tensors,
    device: torch.device | str | None,
) -> torch.Tensor:
    """Allocate one moment: sharded like its parameter if it has its shape, else a step counter."""
    parameter = parameters[_parameter_of(key)]
    dtype = tensors[key].properties.dtype
    if header.tensors[key] == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, device=device or parameter.device)
    return torch.empty(header.tensors[key], dtype=dtype, device=parameter.device)


def _at_least_1d(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return views with 0-dimensional tensors (step counters) as [1], for DCP's slices."""
    return {
        name: _local(tensor).reshape(1) if tensor.dim() == 0 else tensor
        for name, tensor in tensors.items()
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a shard, or the plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
