"""Placement of each element of a checkpoint's tensors in a model's own parameters.

Nothing is assumed about the model: its weight loader runs once with writing turned off, and its copies are
recorded instead. This covers fused projections, tied weights, shards and padding. A tensor that the loader does
not copy unchanged (but converts, say) has no placement: write it whole.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..models.tensors import to_torch
from ..weights.state import Tensor as StateTensor

Shapes = dict[str, tuple[int, ...]]

Load = Callable[[list[tuple[str, Tensor]]], object]
"""Weight loader of a model: [(name, tensor)] -> anything."""

_WRITES = (torch.ops.aten.copy_, torch.ops.aten.fill_, torch.ops.aten.zero_)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by the bytes of an element."""
_FAULTS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, ValueError)
"""Errors that weight loaders raise for a tensor that does not fit."""


@dataclass(frozen=True)
class Dim:
    """One dimension of a copied block, in elements."""

    size: int
    source: int
    """Stride in the checkpoint's tensor."""
    target: int
    """Stride in the parameter's storage."""


@dataclass(frozen=True)
class Part:
    """A block of a checkpoint's tensor and the place that it is copied to."""

    flat: Tensor
    """Whole storage of the parameter, [elements]; one of FP8 as int8."""
    source: int
    """Position of the block's first element in the checkpoint's tensor."""
    target: int
    """Position of the same element in `flat`."""
    dims: tuple[Dim, ...]
    """Dimensions of the block, largest source stride first."""
    whole: bool
    """Whether the block is the whole tensor of the checkpoint."""

    @property
    def straight(self) -> bool:
        """Whether neighbours in the checkpoint's tensor are neighbours in the parameter."""
        return all((dim.source, dim.target) == (1, 1) for dim in self.dims)

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the offsets in `flat` of those `positions` [N] int64 that are in the block.

        Also returns a mask [N] of those positions, None if all are.
        """
        if self.whole and self.straight:
            return (positions + self.target if self.target else positions), None
        rest = positions - self.source
        inside = None if self.whole else rest >= 0
        offsets = torch.full_like(rest, self.target)
        for dim in self.dims:
            at = rest if dim.source == 1 else rest.div(dim.source, rounding_mode="floor")
            rest = rest - at * dim.source
            offsets += at * dim.target
            if inside is not None:
                inside &= (at >= 0) & (at < dim.size)
        if inside is None:
            return offsets, None
        inside &= rest == 0
        return offsets[inside], inside

    def differing(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Find where `flat` differs bitwise from the checkpoint's `tensor`.

        Returns the offsets in `flat`, and the values of `tensor` there.
        """
        dims = self.dims or (Dim(1, 1, 1),)
        sizes = [dim.size for dim in dims]
        tensor = tensor.to(self.flat.dtype)
        new = tensor.as_strided(sizes, [dim.source for dim in dims], self.source)
        old = self.flat.as_strided(sizes, [dim.target for dim in dims], self.target)
        bits = _INTEGERS[tensor.element_size()]
        # the device is waited for once
        apart = (new.view(bits) != old.view(bits)).nonzero(as_tuple=True)
        offsets = torch.full((), self.target, device=self.flat.device)
        for dim, at in zip(dims, apart, strict=True):
            offsets = offsets + at * dim.target
        return offsets, new[apart]


@dataclass(frozen=True)
class PendingWrite:
    """Values to be written: `flat[offsets] = values`."""

    flat: Tensor
    offsets: Tensor
    values: Tensor

    def run(self) -> None:
        """Write the values; the order of several writes does not matter."""
        device = self.flat.device
        self.flat.index_copy_(0, self.offsets.to(device), self.values.to(device))


class ParameterPlacement:
    """Placement of all tensors of a model, as found by trace()."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        parts: dict[str, list[Part]],
        addresses: dict[str, int],
        absent: frozenset[str] = frozenset(),
    ) -> None:
        self.shapes = shapes
        self.absent = absent
        """Tensors that this rank's part of the model does not hold; another rank must."""
        self._parts = parts
        self._addresses = addresses
        self._device = next((p.flat.device for pieces in parts.values() for p in pieces), "cpu")

    @property
    def placeless(self) -> list[str]:
        """Tensors whose elements cannot be written one by one."""
        return sorted(self.shapes.keys() - self._parts.keys() - self.absent)

    def parts(self, name: str) -> Sequence[Part]:
        """Return the parts of a tensor; none if it has no placement, or is absent."""
        return self._parts.get(name, ())

    def still_holds(self, parameters: Mapping[str, Tensor]) -> bool:
        """Return whether parameters still have their addresses: writes to old ones would be lost."""
        return self._addresses == _addresses(parameters)

    def prepare(
        self, spans: Iterable[tuple[str, int]], positions: Tensor, values: Tensor
    ) -> list[PendingWrite]:
        """Prepare the writes of `values` [N] to `positions` [N], both moved to the model's device.

        They belong to the tensors of `spans` [(name, count)], `count` after `count`; positions must have been
        checked. Raises KeyError for a tensor without a placement.
        """
        writes: list[PendingWrite] = []
        at = 0
        positions, values = positions.to(self._device).long(), values.to(self._device)
        for name, count in spans:
            where, what = positions[at : at + count], values[at : at + count]
            at += count
            for part in () if name in self.absent else self._parts[name]:
                offsets, inside = part.locate(where)
                part_values = what if inside is None else what[inside]
                if len(offsets):
                    writes.append(PendingWrite(part.flat, offsets, part_values.to(part.flat.dtype)))
        return writes

    def differing(self, name: str, tensor: Tensor) -> list[PendingWrite] | None:
        """Prepare the writes of `tensor` where the bits of the model differ.

        `tensor` is contiguous and on the model's device. Returns None for a tensor without a placement.
        """
        if name in self.absent:
            return []
        if (parts := self._parts.get(name)) is None:
            return None
        differences = [(part.flat, *part.differing(tensor)) for part in parts]
        return [PendingWrite(*write) for write in differences if len(write[1])]


def trace(
    load: Load,
    parameters: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
) -> ParameterPlacement | str:
    """Pass all `tensors` through `load` without writing; return their placement, or an error.

    Each copied tensor must be copied without broadcasting, and together they must fill every parameter. A
    tensor that is copied nowhere is `absent`; if it is absent on every rank, the model does not have it.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    absent: set[str] = set()
    parts: dict[str, list[Part]] = {}
    recorder = _Recorder()
    for name, tensor in tensors:
        recorder.copies.clear()
        try:
            with torch.no_grad(), recorder:
                load([(name, tensor)])
        except _FAULTS as error:
            kind = type(error).__name__
            return f"tensor {name!r} of shape {list(tensor.shape)} does not fit: {kind} {error}"
        shapes[name] = tuple(tensor.shape)
        if not recorder.copies:
            absent.add(name)
            continue
        if any(target.shape != source.shape for target, source in recorder.copies):
            return f"tensor {name!r} has shape {list(tensor.shape)}, which the model does not want"
        traced = [_part(tensor, *copy) for copy in recorder.copies if copy[1].numel()]
        if all(traced):
            parts[name] = [part for part in traced if part]
    for name, parameter in parameters.items():
        if recorder.written.get(_address(parameter), 0) < parameter.numel():
            return f"what fills the parameter {name!r} is missing"
    return ParameterPlacement(shapes, parts, _addresses(parameters), frozenset(absent))


def difference(known: Shapes, shapes: Shapes) -> str:
    """Return why a state of `shapes` does not fit one of `known` shapes; "" if it does."""
    if missing := known.keys() - shapes.keys():
        return f"tensor {min(missing)!r} is missing"
    if extra := shapes.keys() - known.keys():
        return f"tensor {min(extra)!r} is not the model's"
    for name, shape in shapes.items():
        if shape != known[name]:
            return f"tensor {name!r} has shape {list(shape)}, the model wants {list(known[name])}"
    return ""


def write(flat: Tensor, tensor: StateTensor, positions: NDArray[np.int64] | None) -> None:
    """Copy the elements of `tensor` at `positions` (None: all) into its place `flat` [numel]."""
    if positions is None:
        flat.copy_(to_torch(tensor).view(-1))
        return
    bits = StateTensor(tensor.dtype, (len(positions),), tensor.data[positions])
    values = to_torch(bits, flat.device, flat.dtype)
    owned = positions if positions.flags.writeable else positions.copy()  # torch wants it writeable
    flat.index_copy_(0, torch.from_numpy(owned).to(flat.device), values)


class _Recorder(TorchDispatchMode):
    """Recorder of in-place writes, in place of doing them: a dry run of a weight loader."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []
        """(target, source) views of the copies recorded since the list was cleared."""
        self.written: dict[int, int] = {}
        """Storage address -> number of elements that would have been written."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket not in _WRITES:
            return func(*args, **(kwargs or {}))
        target = args[0]
        storage = _address(target)
        self.written[storage] = self.written.get(storage, 0) + target.numel()
        if func.overloadpacket is torch.ops.aten.copy_:
            self.copies.append((target, args[1]))
        return target


def _part(tensor: Tensor, target: Tensor, source: Tensor) -> Part | None:
    """Describe the copy of `source` to `target` by the elements of `tensor`; None if unclear."""
    plain = tensor.is_contiguous() and source.dtype == tensor.dtype
    if not plain or _address(source) != _address(tensor):
        return None
    triples = zip(source.shape, source.stride(), target.stride(), strict=True)
    dims = _merged([Dim(*triple) for triple in triples if triple[0] > 1])
    if dims is None:
        return None
    length = target.untyped_storage().nbytes() // target.element_size()
    flat = torch.as_strided(target.detach(), (length,), (1,), 0)
    return Part(
        flat=flat.view(torch.int8) if flat.dtype.itemsize == 1 else flat,  # index_copy_ lacks FP8
        source=int(source.storage_offset() - tensor.storage_offset()),
        target=int(target.storage_offset()),
        dims=tuple(dims),
        whole=source.numel() == tensor.numel(),
    )


def _merged(dims: list[Dim]) -> list[Dim] | None:
    """Merge dimensions to as few as possible; None if one position could be two elements."""
    dims.sort(key=lambda dim: -dim.source)
    merged: list[Dim] = []
    extent = 1
    for dim in reversed(dims):
        if dim.source < extent:
            return None
        extent += (dim.size - 1) * dim.source
        inner = merged[-1] if merged else None
        if (
            inner
            and dim.source == inner.size * inner.source
            and (dim.target == inner.size * inner.target)
        ):
            merged[-1] = Dim(dim.size * inner.size, inner.source, inner.target)
        else:
            merged.append(dim)
    return merged[::-1]


def _addresses(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in parameters.items()}


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
