"""Hold the policies of a run that may still be claimed: the newest whole, older ones as differences.

A step changes a few percent of the bf16 bits, so nine versions of a model take little more memory than three.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate, pairwise, starmap
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from .state import BITS, Changed, State, Tensor, numel

WHOLE = 3
"""Newest states that are held whole: audits claim these, and the version before the claimed one."""

Bits = NDArray[np.unsignedinteger]


class Edit(NamedTuple):
    """Where a tensor differs between two neighbouring versions, and its bits there."""

    positions: NDArray[Any]
    """Flat positions, ascending."""
    older: Bits
    newer: Bits

    def matches(self, positions: NDArray[np.int64]) -> bool:
        """Return whether these are just `positions`."""
        return self.positions.size == positions.size and np.array_equal(self.positions, positions)


class JoinedEdits(NamedTuple):
    """All differences of a patch, one tensor after the other; each tensor's Edit is a view of them."""

    dtype: str
    """That of every tensor."""
    counts: dict[str, int]
    """Name -> number of positions, in order."""
    positions: Bits
    older: Bits
    newer: Bits


class Patch(dict[str, "Tensor | Edit"]):
    """What makes a state from the next newer one: name -> whole tensor, or its difference.

    Other tensors are equal.
    """

    joined: JoinedEdits | None = None
    """None where a tensor is whole, or dtypes differ."""


class StepChanges(Mapping[str, NDArray[np.int64]]):
    """Where two neighbouring versions differ, as Changed, with the bits of both there."""

    def __init__(self, edits: JoinedEdits, *, to_newer: bool = True) -> None:
        """`to_newer`: the newer version is the one that is changed to."""
        self.edits = edits
        self.new_bits = edits.newer if to_newer else edits.older
        """In the order of edits.positions."""
        ends = accumulate(edits.counts.values(), initial=0)
        self._parts = dict(zip(edits.counts, starmap(slice, pairwise(ends)), strict=True))

    def edit(self, name: str) -> Edit:
        """Return the difference of one tensor; empty if it has none."""
        part, edits = self._parts.get(name, slice(0)), self.edits
        return Edit(edits.positions[part], edits.older[part], edits.newer[part])

    def __getitem__(self, name: str) -> NDArray[np.int64]:
        return self.edits.positions[self._parts[name]].astype(np.int64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


class HeldState(Mapping[str, Tensor]):
    """A version of a StateHistory: one object for as long as the history has it, whole or not.

    Tensors of a version that is not whole are made when they are read, and shared while they are held. Hold it
    for the time of an audit, and weakly beyond: it keeps the differences of all versions after it in memory.
    """

    def __init__(self, whole: State, changed: Changed | None) -> None:
        """`changed` says where it may differ from the version before; None: anywhere."""
        self._stored: State | tuple[HeldState, Patch] = whole
        """All tensors, or a newer version and the differences: replaced in one step."""
        self._changed = changed
        self.patch: Patch | None = None
        """Differences from the version that follows; None while there is none."""
        self.newer: HeldState | None = None
        """The version that follows."""
        self._older: Callable[[], HeldState | None] = lambda: None
        self.made: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        """Tensors that were made and are still held by a reader."""

    @property
    def is_whole(self) -> bool:
        """Whether all of its tensors are in memory."""
        return not isinstance(self._stored, tuple)

    def precede(self, newer: "HeldState") -> None:
        """Set the version that follows; this one is whole."""
        assert not isinstance(self._stored, tuple)
        self.patch = _patch(self._stored, newer, newer._changed)
        newer._changed = None  # the patch has it
        self.newer = newer
        newer._older = weakref.ref(self)

    def shrink(self) -> None:
        """Hold only the differences from the next version from now on."""
        assert self.newer is not None
        assert self.patch is not None
        self._stored = self.newer, self.patch

    def __getitem__(self, name: str) -> Tensor:
        tensor, patches = self._layers(name)
        if not patches:
            return tensor
        copy = self.made.get(name)
        if copy is None:
            data = tensor.data.copy()
            for edit in patches:
                data[edit.positions] = edit.older
            copy = self.made[name] = Tensor(tensor.dtype, tensor.shape, data)
        return copy

    def __iter__(self) -> Iterator[str]:
        return iter(self._line()[0])

    def __len__(self) -> int:
        return len(self._line()[0])

    @cached_property
    def layout(self) -> "dict[str, TensorLayout]":
        """Layouts by name, which stay when a version is no longer whole."""
        return {name: _layout(self._layers(name)[0]) for name in self}

    def take(self, name: str, positions: NDArray[np.int64], out: Bits) -> None:
        """Read elements of a tensor at flat `positions`, which exist, into `out`.

        Makes no tensor where these are just what a step from or to a neighbour changes.
        """
        known = self._bits_of_step(name, positions)
        if known is None:
            self[name].data.take(positions, out=out, mode="clip")
        else:
            out[:] = known

    def _bits_of_step(self, name: str, positions: NDArray[np.int64]) -> Bits | None:
        """Return the bits at `positions` if a step from or to a neighbour changes just these; else None."""
        own, older = self._edit(name), self._older()
        if own is not None and own.matches(positions):
            return own.older
        before = None if older is None else older._edit(name)
        return before.newer if before is not None and before.matches(positions) else None

    def _edit(self, name: str) -> Edit | None:
        entry = None if self.patch is None else self.patch.get(name)
        return entry if isinstance(entry, Edit) else None

    def up_to(self, newer: "HeldState") -> "list[HeldState]":
        """List the versions from this one to `newer`, both included; empty if `newer` does not follow."""
        versions: list[HeldState] = [self]
        at: HeldState = self
        while at is not newer:
            if at.newer is None:
                return []
            at = at.newer
            versions.append(at)
        return versions

    def _line(self) -> tuple[State, list[Patch]]:
        """Return the whole version that this one is made of, and the patches to apply in order."""
        patches: list[Patch] = []
        stored = self._stored
        while isinstance(stored, tuple):
            newer, patch = stored
            patches.append(patch)
            stored = newer._stored
        return stored, patches[::-1]

    def _layers(self, name: str) -> tuple[Tensor, list[Edit]]:
        """Return a tensor, and what to write into a copy of it in order."""
        whole, line = self._line()
        tensor = whole[name]
        patches: list[Edit] = []
        for patch in line:
            change = patch.get(name)
            if isinstance(change, Tensor):
                tensor, patches = change, []
            elif change is not None:
                patches.append(change)
        return tensor, patches


class StateHistory(Mapping[int, HeldState]):
    """Version -> state, ascending. add() may run in a thread while others read."""

    def __init__(self, keep: int, whole: int = WHOLE) -> None:
        """Hold the newest `keep` versions, the newest `whole` of them as whole states."""
        self._keep = max(1, keep)
        self._most_whole = max(1, min(whole, keep))
        self._held: Mapping[int, HeldState] = {}
        """Replaced in one step."""

    def add(self, version: int, state: State, changed: Changed | None = None) -> None:
        """Hold a state; `changed` says where it may differ from the one added before, None: anywhere.

        It takes the place of the versions from it on: a trainer went back. Older ones that are not whole may
        be lost by that.
        """
        self.hold(version, state, changed)
        self.compact()

    def hold(self, version: int, state: State, changed: Changed | None = None) -> None:
        """Do the part of add() that takes no time: all may be read, and too much is held until compact()."""
        older = {number: state for number, state in self._held.items() if number < version}
        if len(older) < len(self._held):
            changed = None
        if not any(state.is_whole for state in older.values()):
            older = {}
        self._held = {**older, version: HeldState(state, changed)}

    def compact(self) -> None:
        """Reduce older states to differences, and drop the oldest; one thread at a time."""
        states = self._held
        for before, after in pairwise(states):
            if states[before].newer is not states[after]:
                states[before].precede(states[after])
        whole = [number for number in states if states[number].is_whole]
        for number in whole[: -self._most_whole]:
            states[number].shrink()
        self._held = {number: states[number] for number in [*states][-self._keep :]}

    def __getitem__(self, version: int) -> HeldState:
        return self._held[version]

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class TensorLayout(NamedTuple):
    """Shape and dtype of a tensor, without its elements."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return numel(self.shape) * BITS[self.dtype].itemsize


def layout(state: State) -> dict[str, TensorLayout]:
    """Map names to layouts; makes no tensor."""
    if isinstance(state, HeldState):
        return state.layout
    return {name: _layout(tensor) for name, tensor in state.items()}


def state_bytes(state: State) -> int:
    """Count the bytes of all elements of `state`; makes no tensor."""
    return sum(tensor.nbytes for tensor in layout(state).values())


def _layout(tensor: Tensor) -> TensorLayout:
    return TensorLayout(tensor.dtype, tensor.shape)


def take(state: State, name: str, positions: NDArray[np.int64], out: Bits) -> None:
    """Read elements of a tensor at flat `positions`, which exist, into `out`."""
    if isinstance(state, HeldState):
        state.take(name, positions, out)
    else:
        state[name].data.take(positions, out=out, mode="clip")


def between(old: State, new: State) -> list[State]:
    """List the versions of one history from `old` to `new`, both included; just these two if it has none."""
    if isinstance(old, HeldState) and isinstance(new, HeldState):
        if versions := old.up_to(new):
            return [*versions]
        if versions := new.up_to(old):
            return [*versions[::-1]]
    return [old, new]


def known_changes(old: State, new: State) -> Changed | None:
    """Say where two neighbouring versions of one history may differ; None if it does not tell.

    A version differs nowhere from itself.
    """
    if not isinstance(old, HeldState) or not isinstance(new, HeldState):
        return None
    if old is new:
        return {}
    for first, second in ((old, new), (new, old)):
        if first.newer is second and (patch := first.patch) is not None:
            if patch.joined is None:
                return _places(patch)
            return StepChanges(patch.joined, to_newer=new is second)
    return None


def _places(patch: Patch) -> Changed:
    """Return the positions that a patch writes."""
    return {
        name: None if isinstance(change, Tensor) else change.positions.astype(np.int64)
        for name, change in patch.items()
    }


def _patch(older: State, newer: State, changed: Changed | None) -> Patch:
    """Make the difference from `newer` to `older`."""
    patch = Patch()
    if isinstance(changed, StepChanges) and not any(
        _is_dense(older[name], count) for name, count in changed.edits.counts.items()
    ):
        patch.update({name: changed.edit(name) for name in changed})
        patch.joined = changed.edits
        return patch
    edited: dict[str, dict[str, NDArray[np.int64]]] = {}
    for name, tensor in older.items():
        if changed is not None and name not in changed:
            continue
        known = None if changed is None else changed[name]
        positions = (
            np.flatnonzero(tensor.data != newer[name].data).astype(np.int64)
            if known is None
            else known
        )
        if _is_dense(tensor, positions.size):
            patch[name] = tensor
        elif positions.size:
            edited.setdefault(tensor.dtype, {})[name] = positions
    is_whole = bool(patch)
    for dtype, places in edited.items():
        joined = _join(dtype, places, older, newer)
        at = 0
        for name, count in joined.counts.items():
            part = slice(at, at := at + count)
            patch[name] = Edit(joined.positions[part], joined.older[part], joined.newer[part])
        if not is_whole and len(edited) == 1:
            patch.joined = joined
    return patch


def _is_dense(tensor: Tensor, count: int) -> bool:
    """Return whether an Edit at `count` positions takes as much memory as the tensor."""
    size = 2 * tensor.data.itemsize + np.dtype(_width(tensor)).itemsize
    return count * size >= tensor.data.nbytes


def _width(tensor: Tensor) -> type[np.unsignedinteger]:
    return np.uint32 if tensor.data.size <= 2**31 else np.uint64


def join_edits(dtype: str, edits: Mapping[str, Edit]) -> JoinedEdits:
    """Join the differences of tensors of one dtype, at least one."""
    ends = [edit.positions for edit in edits.values()]
    width = np.uint32 if max(int(positions[-1]) for positions in ends) < 2**31 else np.uint64
    return JoinedEdits(
        dtype,
        {name: edit.positions.size for name, edit in edits.items()},
        np.concatenate(ends, dtype=width, casting="unsafe"),
        np.concatenate([edit.older for edit in edits.values()]),
        np.concatenate([edit.newer for edit in edits.values()]),
    )


def _join(
    dtype: str, places: Mapping[str, NDArray[np.int64]], older: State, newer: State
) -> JoinedEdits:
    """Read both versions at `places` of tensors of one dtype: in few calls, as each wants the interpreter."""
    counts = {name: positions.size for name, positions in places.items()}
    width = np.result_type(*(_width(older[name]) for name in places))
    joined = JoinedEdits(
        dtype,
        counts,
        np.concatenate([*places.values()], dtype=width, casting="unsafe"),
        *(np.empty(sum(counts.values()), BITS[dtype]) for _ in range(2)),
    )
    at = 0
    for name, positions in places.items():
        part = slice(at, at := at + positions.size)
        older[name].data.take(positions, out=joined.older[part], mode="clip")  # none is clipped
        newer[name].data.take(positions, out=joined.newer[part], mode="clip")
    return joined
