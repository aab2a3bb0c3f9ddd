"""The policy from wherever it is trained to the host, and where it differs from the one before.

Comparison and compaction run where the weights are: on a GPU only changed elements cross to the host.
A State that was given away is never written to: what changes is copied, what does not is the same object.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..tensors import dtype_name, torch_dtype
from ..weights.state import BITS, State, Tensor, numel
from .backend import Snapshot

if TYPE_CHECKING:
    import torch

Positions = NDArray[np.int64]
Layout = dict[str, tuple[str, tuple[int, ...], str]]
"""Tensor name -> dtype name, shape, device."""

CHUNK = 1 << 25
"""Elements compared at once. Bounds what an export needs beside the bits that are kept on the device:
at most 20 bytes for each (its bits, a flag, and its position, twice), 640 MiB."""
MAX_THREADS = 16
"""More copy no faster."""
AHEAD_THREADS = 2
"""Few: the delta is being encoded meanwhile, and the next export is a step away."""
MAX_WAITING = 1 << 30
"""Bytes in page-locked memory before the host writes them; a chunk more at most."""
DENSE = 4
"""A chunk of which more than one in DENSE elements changed crosses whole: positions cost more than bits."""


class DeviceExporter:
    """Keeps the bits of what it exported last: 2 bytes for each bf16 element, on the weights' device."""

    def __init__(self, *, threads: int = 0, chunk: int = CHUNK, ahead: bool = False) -> None:
        """`threads` build the host's copy, 0 for one a core; `chunk` elements are compared at once.

        With `ahead` the host copies the last state while the next one is learned: an export then
        only writes what changed, and a second state's worth of memory is held.
        """
        self._threads = threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._chunk = chunk
        self._bits: dict[str, torch.Tensor] = {}
        self._layout: Layout = {}
        self._state: State | None = None
        self._ahead = _Ahead() if ahead else None

    def export(self, named: "Mapping[str, torch.Tensor]") -> Snapshot:
        """The tensors as a State, floating ones rounded to bf16, and what changed since the last call.

        The first call, and one with other names, shapes or devices, exports everything. Raises
        EngineError for a dtype that a state cannot hold, and RuntimeError when memory runs out;
        then the next call exports everything.
        """
        layout = _layout(named)
        base = self._state if layout == self._layout else None
        self._state = None
        if base is None:
            self._layout, self._bits = layout, {}
        with ThreadPoolExecutor(self._threads) as pool:
            host = _Host(pool, base, self._ahead)
            for name, tensor in named.items():
                self._start(name, tensor, host)
            state, changed = host.finish()
        self._state = state
        if self._ahead is not None:
            self._ahead.copy(state)
        return Snapshot(state) if base is None else Snapshot(state, base, changed)

    def close(self) -> None:
        """End the threads that copy ahead; what was exported stays."""
        if self._ahead is not None:
            self._ahead.close()

    def _start(self, name: str, tensor: "torch.Tensor", host: "_Host") -> None:
        """Compare one tensor on its device, and leave what the host has to do to `host`."""
        import torch

        dtype, shape, _ = self._layout[name]
        flat = tensor.detach().reshape(-1)
        storage = _storage(dtype)
        building = host.begin(name, dtype, shape)
        if building.old is None:
            self._bits[name] = torch.empty(flat.shape, dtype=storage, device=flat.device)
        held = self._bits[name]
        for part in parts(flat.numel(), self._chunk):
            new = flat[part].to(torch_dtype(dtype)).view(storage)
            piece = _whole(new) if building.old is None else compare(held[part], new)
            if piece is not None:
                held[part].copy_(new)
                host.put(building, part, piece)


class _Ahead:
    """Copies of the tensors of a state, made in the background, to write the next one into."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(AHEAD_THREADS, thread_name_prefix="copy-ahead")
        self._copies: dict[str, tuple[Tensor, Future[NDArray[Any]]]] = {}

    def copy(self, state: State) -> None:
        """Copy what was not copied yet."""
        self._copies = {
            name: self._copies[name]
            if name in self._copies and self._copies[name][0] is tensor
            else (tensor, self._pool.submit(tensor.data.copy))
            for name, tensor in state.items()
        }

    def take(self, name: str, tensor: Tensor) -> NDArray[Any] | None:
        """A copy of the data of `tensor`, from now on the caller's; None if there is none."""
        copied, future = self._copies.pop(name, (None, None))
        return future.result() if future is not None and copied is tensor else None

    def close(self) -> None:
        """Forget the copies and end the threads."""
        self._copies = {}
        self._pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class Piece:
    """What changed in one chunk, on its way to the host."""

    index: "torch.Tensor | None"
    """Positions in the chunk, increasing; None: `bits` are all of it."""
    bits: "torch.Tensor"
    ready: "torch.cuda.Event | None"

    @property
    def nbytes(self) -> int:
        """Bytes that cross to the host."""
        return self.bits.nbytes + (0 if self.index is None else self.index.nbytes)

    def wait(self) -> None:
        """Block until everything has arrived."""
        if self.ready is not None:
            self.ready.synchronize()


def _whole(new: "torch.Tensor") -> Piece:
    (bits,), ready = _fetch(new)
    return Piece(None, bits, ready)


def compare(held: "torch.Tensor", new: "torch.Tensor") -> Piece | None:
    """What is not as `held`, on the device; None for nothing."""
    import torch

    index = torch.nonzero(new != held).view(-1)  # waits for the device: how many is known now
    if not index.numel():
        return None
    if index.numel() * DENSE > new.numel():
        return _whole(new)
    (where, bits), ready = _fetch(index.to(torch.int32), new[index])
    return Piece(where, bits, ready)


def _fetch(*found: "torch.Tensor") -> "tuple[list[torch.Tensor], torch.cuda.Event | None]":
    """Tensors of the host that hold these once the event has come to pass."""
    import torch

    if not found[0].is_cuda:
        return [one.cpu() for one in found], None
    hosts = [torch.empty_like(one, device="cpu", pin_memory=True) for one in found]
    for host, one in zip(hosts, found, strict=True):
        host.copy_(one, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(found[0].device))
    return hosts, ready


class _Building:
    """The host's next version of one tensor."""

    def __init__(self, dtype: str, shape: tuple[int, ...], old: Tensor | None) -> None:
        self.old = old
        self.data = None if old else np.empty(numel(shape), BITS[dtype])
        """What is written into; None as long as nothing has changed."""
        self.pieces: list[tuple[slice, Piece]] = []
        self.found: list[Positions | None] = []
        """Where each piece changed the tensor; None: anywhere in it."""
        self._layout = (dtype, shape)

    def tensor(self) -> Tensor:
        """The tensor: the old one, if nothing has changed."""
        if self.old is not None and self.data is None:
            return self.old
        assert self.data is not None
        return Tensor(*self._layout, self.data)

    def positions(self) -> Positions | None:
        """Where the tensor differs from the old one; None: anywhere."""
        known = [one for one in self.found if one is not None]
        if len(known) < len(self.found):
            return None
        return known[0] if len(known) == 1 else np.concatenate(known)

    def write(self) -> None:
        """Write the pieces that have come."""
        if self.data is None:
            assert self.old is not None
            self.data = self.old.data.copy()
        for part, piece in self.pieces:
            self.found.append(_write(self.data[part], piece, part.start))
        self.pieces.clear()


class _Host:
    """What the host does for an export: nothing while the device is being asked, then all at once.

    Threads that copy meanwhile would hold up the one that asks at each of its many short calls.
    """

    def __init__(self, pool: ThreadPoolExecutor, base: State | None, ahead: _Ahead | None) -> None:
        self._pool = pool
        self._base = base
        self._ahead = ahead
        self._built: dict[str, _Building] = {}
        self._waiting: dict[int, _Building] = {}
        self._bytes = 0

    def begin(self, name: str, dtype: str, shape: tuple[int, ...]) -> _Building:
        """A tensor that is compared from now on."""
        old = None if self._base is None else self._base[name]
        self._built[name] = _Building(dtype, shape, old)
        return self._built[name]

    def put(self, building: _Building, part: slice, piece: Piece) -> None:
        """`part` of a tensor changes by `piece`."""
        building.pieces.append((part, piece))
        self._waiting[id(building)] = building
        self._bytes += piece.nbytes
        if self._bytes >= MAX_WAITING:
            self._write()

    def finish(self) -> tuple[State, dict[str, Positions | None]]:
        """The state, and where it differs from its base."""
        self._write()
        state = {name: one.tensor() for name, one in self._built.items()}
        return state, {name: one.positions() for name, one in self._built.items() if one.found}

    def _write(self) -> None:
        for name, building in self._built.items():
            if building.pieces and building.data is None and self._ahead and building.old:
                building.data = self._ahead.take(name, building.old)
        list(self._pool.map(_Building.write, self._waiting.values()))
        self._waiting.clear()
        self._bytes = 0


def _write(out: NDArray[Any], piece: Piece, start: int) -> Positions | None:
    """Write `piece` into `out`, the elements from `start` of a tensor; returns positions, if few."""
    piece.wait()
    bits = piece.bits.numpy().view(out.dtype)
    if piece.index is None:
        np.copyto(out, bits)
        return None
    index = piece.index.numpy().astype(np.int64)
    out[index] = bits
    index += start
    return index


def _layout(named: "Mapping[str, torch.Tensor]") -> Layout:
    return {
        name: (
            "BF16" if tensor.is_floating_point() else dtype_name(tensor.dtype),
            tuple(tensor.shape),
            str(tensor.device),
        )
        for name, tensor in named.items()
    }


def _storage(dtype: str) -> "torch.dtype":
    """The torch type that holds the bits of a safetensors dtype."""
    import torch

    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return widths[BITS[dtype].itemsize]


def parts(count: int, chunk: int = CHUNK) -> Iterator[slice]:
    """`count` elements in chunks."""
    return (slice(at, min(at + chunk, count)) for at in range(0, count, chunk))
