"""Named tensors in a directory, by torch DCP: each of N ranks writes its share, any number of them reads.

DCP cuts tensors into slices and finds the slices that a rank wants; the bytes are safetensors (DCP's own
`.metadata` would be a pickle, and so would plans that its save() sends to other ranks), so nothing that is read
here can run code. Imports torch: import lazily.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from .agreement import Ranks

FILE_BYTES = 1 << 29
"""About what one file of a rank holds: as much is copied to the host's memory at a time."""

Tensors = Mapping[str, torch.Tensor]
Stored = dict[str, TensorStorageMetadata]


@dataclass(frozen=True)
class Slice:
    """What one rank has of a tensor, on any device, and where in the whole it begins."""

    name: str
    offsets: tuple[int, ...]
    data: torch.Tensor


def cut(tensors: Tensors, ranks: Ranks, *, own: Tensors | None = None) -> list[Slice]:
    """The slices that this rank writes of `tensors` (the same names on every rank, plain or DTensor).

    A plain tensor is written by rank 0, a copy of a shard by its first holder. `own` are plain tensors of
    this rank alone; their names have to be different on every rank. No tensor may have 0 dimensions.
    No copies. Not collective: who writes what follows from the layout, so no plan goes over the wire.
    """
    mine = {name: one for name, one in tensors.items() if _is_writer(one, ranks)} | dict(own or {})
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(mine, is_coordinator=True)
    slices: list[Slice] = []
    for item in planner.finish_plan(planner.create_local_plan()).items:
        data = planner.resolve_data(item)
        assert isinstance(data, torch.Tensor)
        assert item.tensor_data is not None
        slices.append(Slice(item.index.fqn, tuple(item.tensor_data.chunk.offsets), data.detach()))
    return slices


def write(slices: Sequence[Slice], directory: Path, rank: int) -> None:
    """Write this rank's slices into an existing directory; the caller syncs.

    Raises OSError, SafetensorError.
    """
    files: list[list[Slice]] = []
    room = 0
    for one in slices:
        if room <= 0:
            files.append([])
            room = FILE_BYTES
        files[-1].append(one)
        room -= one.data.numel() * one.data.element_size()
    for number, file in enumerate(files):
        _write_file(directory / f"shard-{rank:05}-{number:05}.safetensors", file)


def stored(directory: Path) -> Stored:
    """Shape, dtype and slices of every tensor in a directory. Raises OSError, SafetensorError."""
    found = _metadata(directory).state_dict_metadata
    return {name: one for name, one in found.items() if isinstance(one, TensorStorageMetadata)}


def is_whole(one: TensorStorageMetadata) -> bool:
    """Whether the slices cover the tensor: slices do not overlap, so counting elements is enough."""
    return sum(math.prod(chunk.sizes) for chunk in one.chunks) == math.prod(one.size)


def fill(tensors: Tensors, directory: Path) -> None:
    """Read into `tensors`, which may be sharded in any way. Not collective. Raises OSError, SafetensorError.

    What fails may have filled some of them.
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


def _write_file(path: Path, slices: Sequence[Slice]) -> None:
    """One file as HuggingFaceStorageReader wants it; its writer would hold it in memory twice, and the GIL."""
    offsets = {one.name: {"saved_offsets": list(one.offsets)} for one in slices}
    said = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    save_file({one.name: one.data.cpu().contiguous() for one in slices}, path, metadata=said)


def _is_writer(tensor: torch.Tensor, ranks: Ranks) -> bool:
    """Whether this rank is the first that has what it has of `tensor`."""
    if not isinstance(tensor, DTensor):
        return ranks.is_first
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return False
    return not any(
        at and how.is_replicate() for at, how in zip(place, tensor.placements, strict=True)
    )
