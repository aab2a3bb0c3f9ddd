"""The host's side of an export: the next State from the one before and what was found to differ.

A State that was given away is never written to: what changes is copied, what does not is the same object.
No torch here: the daemon builds states from files that other processes write (files.py).
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...ops.errors import EngineError
from ...weights.state import BITS, State, Tensor, numel
from ..backend import Snapshot

Positions = NDArray[np.int64]

MAX_THREADS = 16
"""More copy no faster."""
AHEAD_THREADS = 2
"""Few: the delta is being encoded meanwhile, and the next export is a step away."""
MAX_WAITING = 1 << 30
"""Bytes in page-locked memory before the host writes them; what one tensor changes by more at most."""


class Ready(Protocol):
    """Something that comes to pass on a device, as torch.cuda.Event."""

    def synchronize(self) -> object:
        """Block until it has."""
        ...


class Piece(Protocol):
    """Some elements of one tensor, new."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds until it is written."""
        ...

    def write(self, data: NDArray[Any]) -> Positions | None:
        """Write the elements into the whole tensor's bits; returns their positions, if few."""
        ...


@dataclass(frozen=True)
class HostPiece:
    """A piece in the host's memory, or on its way there."""

    start: int
    """Where the elements begin in the tensor; below 0 if the first of them are others'."""
    index: NDArray[np.int32] | None
    """Positions counted from `start`, increasing; None: `bits` are all from there on."""
    bits: NDArray[Any]
    ready: Ready | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds until it is written."""
        return self.bits.nbytes + (0 if self.index is None else self.index.nbytes)

    def wait(self) -> None:
        """Block until everything has arrived."""
        if self.ready is not None:
            self.ready.synchronize()

    def write(self, data: NDArray[Any]) -> Positions | None:
        """Write the elements into the whole tensor's bits; returns their positions, if few."""
        self.wait()
        if self.index is None:
            np.copyto(data[self.start : self.start + self.bits.size], self.bits)
            return None
        index = self.index.astype(np.int64)
        index += self.start
        data[index] = self.bits
        return index


@dataclass(frozen=True)
class Found:
    """What an export found about one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    whole: bool
    """Nothing was known about it: the pieces are all of it. Else they are what differs."""
    pieces: Sequence[Piece] = ()


class HostState:
    """Holds the last state that it built."""

    def __init__(self, *, threads: int = 0, ahead: bool = False) -> None:
        """`threads` copy, 0 for one a core.

        With `ahead` the last state is copied while the next one is learned: build() then only
        writes what changed, and a second state's worth of memory is held.
        """
        self._threads = threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._ahead = _Ahead() if ahead else None
        self._state: State | None = None

    @property
    def state(self) -> State | None:
        """What the next state may be told as a difference from; None: everything has to be told."""
        return self._state

    def build(self, found: Iterable[Found]) -> Snapshot:
        """The state that `found` tells of; a tensor may come in several parts.

        Nothing is held any more if this fails. Raises EngineError for a difference from a tensor
        that is not held.
        """
        base, self._state = self._state, None
        with ThreadPoolExecutor(self._threads) as pool:
            building = _Building(pool, base, self._ahead)
            for one in found:
                building.add(one)
            snapshot = building.finish()
        self._state = snapshot.state
        if self._ahead is not None:
            self._ahead.copy(snapshot.state)
        return snapshot

    def forget(self) -> None:
        """Hold nothing: the next state comes whole."""
        self._state = None

    def close(self) -> None:
        """End the threads that copy ahead; what was built stays."""
        if self._ahead is not None:
            self._ahead.close()


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


class _Growing:
    """The next version of one tensor."""

    def __init__(self, found: Found, old: Tensor | None) -> None:
        self.old = old
        self.data = None if old else np.empty(numel(found.shape), BITS[found.dtype])
        """What is written into; None as long as nothing has changed."""
        self.pieces: list[Piece] = []
        self.found: list[Positions | None] = []
        """Where each piece changed the tensor; None: anywhere in it."""
        self._layout = (found.dtype, found.shape)

    def tensor(self) -> Tensor:
        """The tensor: the old one, if nothing has changed."""
        if self.data is None:
            assert self.old is not None
            return self.old
        return Tensor(*self._layout, self.data)

    def positions(self) -> Positions | None:
        """Where the tensor differs from the old one; None: anywhere."""
        known = [one for one in self.found if one is not None]
        if len(known) < len(self.found):
            return None
        return known[0] if len(known) == 1 else np.concatenate(sorted(known, key=_first))

    def write(self) -> None:
        """Write the pieces that have come."""
        if self.data is None:
            assert self.old is not None
            self.data = self.old.data.copy()
        for piece in self.pieces:
            self.found.append(piece.write(self.data))
        self.pieces.clear()


def _first(positions: Positions) -> int:
    return int(positions[0])


class _Building:
    """One state being built: nothing is written while more is being found, then all at once.

    Threads that copy meanwhile would hold up the one that asks the device at each of its many short calls.
    """

    def __init__(self, pool: ThreadPoolExecutor, base: State | None, ahead: _Ahead | None) -> None:
        self._pool = pool
        self._base = base
        self._ahead = ahead
        self._growing: dict[str, _Growing] = {}
        self._waiting: dict[str, _Growing] = {}
        self._bytes = 0

    def add(self, found: Found) -> None:
        """One more tensor, or more pieces of one."""
        if found.name not in self._growing:
            self._growing[found.name] = _Growing(found, self._old(found))
        if not found.pieces:
            return
        growing = self._growing[found.name]
        growing.pieces.extend(found.pieces)
        self._waiting[found.name] = growing
        self._bytes += sum(piece.nbytes for piece in found.pieces)
        if self._bytes >= MAX_WAITING:
            self._write()

    def finish(self) -> Snapshot:
        """The state, and where it differs from its base if all of it was compared with that."""
        self._write()
        state = {name: one.tensor() for name, one in self._growing.items()}
        compared = all(one.old is not None for one in self._growing.values())
        if self._base is None or not compared or state.keys() != self._base.keys():
            return Snapshot(state)
        changed = {name: one.positions() for name, one in self._growing.items() if one.found}
        return Snapshot(state, self._base, changed)

    def _old(self, found: Found) -> Tensor | None:
        """What the pieces of `found` differ from."""
        if found.whole:
            return None
        old = self._base.get(found.name) if self._base is not None else None
        if old is None or (old.dtype, old.shape) != (found.dtype, found.shape):
            raise EngineError(
                f"a difference from {found.name!r} came, which is not held: export everything once"
            )
        return old

    def _write(self) -> None:
        for name, growing in self._waiting.items():
            if growing.data is None and self._ahead and growing.old:
                growing.data = self._ahead.take(name, growing.old)
        list(self._pool.map(_Growing.write, self._waiting.values()))
        self._waiting.clear()
        self._bytes = 0
