"""A policy's tensors under their checkpoint names, however their rows are spread over ranks.

Every rank iterates over the same sources in the same order: taking one may be collective. Imports torch: import
this file lazily.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..errors import EngineError
from ..models import huggingface
from ..models.tensors import dtype_name, torch_dtype
from ..weights.state import numel

if TYPE_CHECKING:
    from ..models.huggingface import PreTrainedModel

LAYER = re.compile(r"^.*?\.\d+(?=\.)")
"""The prefix of a tensor's name that identifies its layer."""


@dataclass(frozen=True)
class TensorPiece:
    """A checkpoint tensor: the elements of one model tensor from `start` on."""

    name: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def stop(self) -> int:
        """Flat position after its last element."""
        return self.start + numel(self.shape)


@dataclass(frozen=True)
class Source:
    """One tensor of the model as a rank sees it."""

    name: str
    dtype: str
    """dtype in the checkpoint: BF16 for any floating dtype of the model."""
    shape: tuple[int, ...]
    runs: tuple[TensorPiece, ...]
    """The checkpoint tensors in it, ordered by start; together they cover it."""
    share: slice
    """The flat elements that this rank exports; each element has one exporting rank, also where several hold
    it."""
    take: Callable[[], torch.Tensor]
    """Return the elements of `share`, flat, of any floating type; may be collective."""
    gather: Callable[[], torch.Tensor]
    """Return the whole tensor in the checkpoint's type. Collective; shards are cast before they travel."""
    held: Callable[[], tuple[slice, torch.Tensor]] | None
    """Return the flat elements that this rank holds, exported by it or not, and a view of them. None if the
    model has them in another order than checkpoints."""


Item = tuple[str, torch.Tensor] | Source
Policy = Mapping[str, torch.Tensor] | Iterable[Item]


def named_sources(policy: Policy, rank: int) -> Iterator[Source]:
    """Yield the sources of tensors that have their checkpoint names.

    Tensors are sharded, or whole; then rank 0 exports them. Items that are already sources pass unchanged.
    """
    named = cast("Iterable[Item]", policy.items() if isinstance(policy, Mapping) else policy)
    for item in named:
        yield item if isinstance(item, Source) else _source(*item, None, rank)


def policy_sources(model: "PreTrainedModel", rank: int) -> list[Source]:
    """Return the sources of all weights and persistent buffers; a tied one appears once.

    transformers keeps some weights in another layout than checkpoints do: experts are fused into one tensor,
    and each is a run of it. A tensor that is not a run of one (a transposed one, say) is gathered together with
    its group (its layer, if possible) and converted back by transformers. The sources stay valid as long as the
    model has the same parameters: build them once.
    """
    tensors = huggingface.unique_tensors(model)
    runs, outputs = _checkpoint_layout(model, tensors)
    sources = [_source(name, tensors[name], pieces, rank) for name, pieces in runs.items()]
    rest = {name: tensor for name, tensor in tensors.items() if name not in runs}
    for names, outputs_of in _groups(model, rest, outputs):
        group = _Group(model, {name: rest[name] for name in names}, outputs_of, rank)
        sources += group.sources()
    return sources


def whole_tensors(sources: Iterable[Source], rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (checkpoint name, tensor) of every tensor, on the first rank.

    One model tensor is gathered at a time. Collective: the other ranks iterate along, yield nothing and drop
    each tensor at once.
    """
    for source in sources:
        flat = source.gather().reshape(-1)
        for run in source.runs if rank == 0 else ():
            yield run.name, flat[run.start : run.stop].view(run.shape)


def adopt(sources: Iterable[Source], policy: Callable[[str], torch.Tensor]) -> None:
    """Set the elements of the model that differ from `policy` in its type; others keep their exact values.

    `policy` gives a checkpoint tensor by its name, flat, on any device. Not collective: each rank sets what it
    holds. Raises EngineError for a tensor that the model has in another order, and the errors of `policy`.
    """
    everything = list(sources)
    for source in everything:
        if source.held is None:
            raise EngineError(f"{source.name} is kept in another order than in a checkpoint")
    for source in everything:
        assert source.held is not None
        place, own = source.held()
        for run in source.runs:
            first, last = max(run.start, place.start), min(run.stop, place.stop)
            if first >= last:
                continue
            part = own[first - place.start : last - place.start]
            new = policy(run.name)[first - run.start : last - run.start].to(part.device)
            same = _bits(part.to(new.dtype)) == _bits(new)
            part.copy_(torch.where(same, part, new.to(part.dtype)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.itemsize])


def _source(
    name: str, tensor: torch.Tensor, runs: tuple[TensorPiece, ...] | None, rank: int
) -> Source:
    dtype = "BF16" if tensor.is_floating_point() else dtype_name(tensor.dtype)
    shape = tuple(tensor.shape)
    part, share = _part(tensor), _share(tensor, rank)

    def held() -> tuple[slice, torch.Tensor]:
        assert part is not None
        now = tensor.detach()
        local = now.to_local() if isinstance(now, DTensor) else now
        return part, local.view(-1)[: part.stop - part.start]

    def gather() -> torch.Tensor:
        return _whole(tensor.detach())

    def take() -> torch.Tensor:
        if share is None:
            return _mine(gather(), rank)
        now = tensor.detach()  # the parameter's storage may have been replaced
        local = now.to_local() if isinstance(now, DTensor) else now
        return local.reshape(-1)[: share.stop - share.start]

    own = _all_or_nothing(numel(shape), rank) if share is None else share
    pieces = runs or (TensorPiece(name, shape),)
    return Source(name, dtype, shape, pieces, own, take, gather, None if part is None else held)


def _share(tensor: torch.Tensor, rank: int) -> slice | None:
    """Return the flat elements of `tensor` that this rank exports; None if not contiguous.

    Among replicas, the first of each mesh dimension exports.
    """
    if not isinstance(tensor, DTensor):
        return _all_or_nothing(tensor.numel(), rank)
    part, coordinates = _part(tensor), tensor.device_mesh.get_coordinate()
    if part is None or coordinates is None:
        return part
    placed = zip(tensor.placements, coordinates, strict=True)
    copied = any(at and isinstance(placement, Replicate) for placement, at in placed)
    return slice(0, 0) if copied else part


def _part(tensor: torch.Tensor) -> slice | None:
    """Return the flat elements of `tensor` that this rank holds; None if not contiguous.

    fully_shard() cuts a parameter into rows: a run of flat elements for each rank of the mesh.
    """
    if not isinstance(tensor, DTensor):
        return slice(0, tensor.numel())
    coordinates = tensor.device_mesh.get_coordinate()
    if coordinates is None:
        return slice(0, 0)
    placed = list(zip(tensor.placements, coordinates, tensor.device_mesh.shape, strict=True))
    cuts = [placed_dim for placed_dim in placed if not isinstance(placed_dim[0], Replicate)]
    if len(cuts) > 1 or any(type(dim) is not Shard or dim.dim for dim, _, _ in cuts):
        return None
    return _rows(tuple(tensor.shape), *cuts[0][1:]) if cuts else slice(0, tensor.numel())


def _rows(shape: tuple[int, ...], at: int, ranks: int) -> slice:
    """Return rank `at`'s elements of a tensor that torch.chunk() shards by rows."""
    width = numel(shape[1:])
    rows = -(-shape[0] // ranks)
    first, last = (min(shape[0], rows * row) for row in (at, at + 1))
    return slice(first * width, last * width)


def _all_or_nothing(count: int, rank: int) -> slice:
    return slice(0, 0 if rank else count)


def _mine(whole: torch.Tensor, rank: int) -> torch.Tensor:
    return whole.reshape(-1)[_all_or_nothing(whole.numel(), rank)]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of `tensor` in its checkpoint type; collective if it is sharded."""
    if tensor.is_floating_point():
        tensor = tensor.to(torch_dtype("BF16"))
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _Followed(torch.Tensor):
    """A tensor without memory whose pieces stay views of it, which reveals where they come from."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        """Skip copies; everything else is unchanged."""
        if func in (torch.Tensor.contiguous, torch.Tensor.clone):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def _hollow(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").as_subclass(_Followed)
        for name, tensor in tensors.items()
    }


Outputs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def _checkpoint_layout(
    model: "PreTrainedModel", tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, tuple[TensorPiece, ...]], Outputs]:
    """Return the runs in each tensor made of runs, and the checkpoint tensors in no run."""
    hollow = _hollow(tensors)
    owners = {id(tensor.untyped_storage()): name for name, tensor in hollow.items()}
    runs: dict[str, list[TensorPiece]] = {name: [] for name in tensors}
    checkpoint = huggingface.checkpoint_tensors(model, hollow)
    for name, tensor in checkpoint.items():
        owner = owners.get(id(tensor.untyped_storage()))
        if owner is not None and torch.Tensor.is_contiguous(tensor):
            runs[owner].append(TensorPiece(name, tuple(tensor.shape), int(tensor.storage_offset())))
    ordered = {name: tuple(sorted(pieces, key=_by_place)) for name, pieces in runs.items()}
    complete = {
        name: pieces for name, pieces in ordered.items() if _tile(pieces, tensors[name].numel())
    }
    in_runs = {run.name for pieces in complete.values() for run in pieces}
    return complete, {
        name: (tensor.dtype, tuple(tensor.shape))
        for name, tensor in checkpoint.items()
        if name not in in_runs
    }


def _by_place(run: TensorPiece) -> tuple[int, int, str]:
    return run.start, run.stop, run.name


def _tile(runs: tuple[TensorPiece, ...], count: int) -> bool:
    """Return whether the runs cover all `count` elements, each exactly once."""
    starts = [run.start for run in runs]
    return bool(runs) and [0, *(run.stop for run in runs)] == [*starts, count]


def _groups(
    model: "PreTrainedModel", rest: Mapping[str, torch.Tensor], outputs: Outputs
) -> list[tuple[list[str], Outputs]]:
    """Group the tensors that are converted together, by layer if possible, with their outputs."""
    if not rest:
        return []
    layers: dict[str, list[str]] = {}
    for name in rest:
        layer = LAYER.match(name)
        layers.setdefault(layer.group() if layer else "", []).append(name)
    groups = [
        (names, _become(model, {name: rest[name] for name in names})) for names in layers.values()
    ]
    together = [item for _, outputs_of in groups for item in outputs_of.items()]
    if len(together) == len(outputs) and dict(together) == outputs:
        return groups
    return [(list(rest), _become(model, rest))]


def _become(model: "PreTrainedModel", tensors: Mapping[str, torch.Tensor]) -> Outputs:
    checkpoint = huggingface.checkpoint_tensors(model, _hollow(tensors))
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in checkpoint.items()}


class _Group:
    """Model tensors that are converted to checkpoint tensors only together.

    They are gathered when the first of the outputs is taken.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tensors: dict[str, torch.Tensor],
        outputs: Outputs,
        rank: int,
    ) -> None:
        self._model = model
        self._tensors = tensors
        self._outputs = outputs
        self._rank = rank
        self._made: dict[str, torch.Tensor] = {}

    def sources(self) -> list[Source]:
        """Return one source per checkpoint tensor; they have to be taken in this order."""
        return [self._one(name, *layout) for name, layout in self._outputs.items()]

    def _one(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Source:
        def gather() -> torch.Tensor:
            return self._give(name)

        def take() -> torch.Tensor:
            return _mine(gather(), self._rank)

        label = "BF16" if dtype.is_floating_point else dtype_name(dtype)
        share = _all_or_nothing(numel(shape), self._rank)
        return Source(name, label, shape, (TensorPiece(name, shape),), share, take, gather, None)

    def _give(self, name: str) -> torch.Tensor:
        """Return the tensor and drop it; empty on ranks other than the first."""
        if name == next(iter(self._outputs)):
            whole = {key: _whole(tensor.detach()) for key, tensor in self._tensors.items()}
            self._made = (
                huggingface.checkpoint_tensors(self._model, whole) if not self._rank else {}
            )
        return self._made.pop(name) if not self._rank else torch.empty(0)
