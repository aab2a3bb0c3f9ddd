"""Hold the policies of a run that may still be claimed: the newest whole, older ones as differences.

A step changes a few percent of the bf16 bits, so nine versions of a model take little more memory than three.
"""

from collections.abc import Iterator, Mapping, Sequence
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from .state import Changed, PendingChanges, State, Tensor

WHOLE = 3
"""Newest states that are held whole: audits claim these, and the version before the claimed one."""

Patch = Mapping[str, "Tensor | tuple[NDArray[np.unsignedinteger], NDArray[np.unsignedinteger]]"]
"""The next older state: name -> whole tensor, or (flat positions, bits); other tensors are equal."""


class StateHistory(Mapping[int, State]):
    """Version -> state, ascending. add() may run in a thread while others read."""

    def __init__(self, keep: int, whole: int = WHOLE) -> None:
        """Hold the newest `keep` versions, of which `whole` take the memory of a state."""
        self._keep = max(1, keep)
        self._most_whole = max(1, min(whole, keep))
        self._held: tuple[Mapping[int, State], Mapping[int, Patch]] = ({}, {})
        """Whole states, and patches from the next newer version that is held: replaced in one step."""
        self._changed: dict[int, Changed | None] = {}
        """Of whole states: where they differ from the one before."""
        self._patched: WeakValueDictionary[int, PatchedState] = WeakValueDictionary()
        """Older states that somebody holds: asked for again they are the same objects."""

    def add(self, version: int, state: State, changed: Changed | None = None) -> None:
        """Hold a state; `changed` says where it may differ from the one added before, None: anywhere.

        It takes the place of the versions from it on: a trainer went back. Older ones that are not whole may
        be lost by that.
        """
        whole, patches = dict(self._held[0]), dict(self._held[1])
        for replaced in [one for one in whole if one >= version]:
            del whole[replaced], self._changed[replaced]
            changed = None
        if not whole:
            patches = {}
            self._patched.clear()
        whole[version] = state
        self._changed[version] = changed
        while len(whole) > self._most_whole:
            oldest, following = sorted(whole)[:2]
            patches[oldest] = _patch(whole[oldest], whole[following], self._changed[following])
            del whole[oldest], self._changed[oldest]
        for gone in sorted(patches)[: max(0, len(whole) + len(patches) - self._keep)]:
            del patches[gone]
        self._held = whole, patches

    def __getitem__(self, version: int) -> State:
        whole, patches = self._held
        if version in whole:
            return whole[version]
        if version not in patches:
            raise KeyError(version)
        if (known := self._patched.get(version)) is not None:
            return known
        newer_first = [one for one in sorted(patches, reverse=True) if one >= version]
        found = PatchedState(whole[min(whole)], [patches[one] for one in newer_first])
        self._patched[version] = found
        return found

    def __iter__(self) -> Iterator[int]:
        whole, patches = self._held
        return iter(sorted({*patches, *whole}))

    def __len__(self) -> int:
        return sum(map(len, self._held))


class PatchedState(Mapping[str, Tensor]):
    """A state whose tensors are made when they are read, and shared while somebody holds them."""

    def __init__(self, base: State, patches: Sequence[Patch]) -> None:
        """Apply `patches` to `base` in order."""
        self.base = base
        self._patches = patches
        self._made: WeakValueDictionary[str, Tensor] = WeakValueDictionary()

    def __getitem__(self, name: str) -> Tensor:
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self._make(name)
        return made

    def _make(self, name: str) -> Tensor:
        tensor, copied = self.base[name], False
        for patch in self._patches:
            found = patch.get(name)
            if isinstance(found, Tensor):
                tensor, copied = found, False
            elif found is not None:
                if not copied:
                    tensor = Tensor(tensor.dtype, tensor.shape, tensor.data.copy())
                    copied = True
                positions, bits = found
                tensor.data[positions] = bits
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)

    def changed(self) -> Changed:
        """Say where it may differ from `base`."""
        found = PendingChanges()
        found.none()
        for patch in self._patches:
            found.add(
                {
                    name: None if isinstance(one, Tensor) else one[0].astype(np.int64)
                    for name, one in patch.items()
                }
            )
        return found.changed or {}


def known_changes(old: State, new: State) -> Changed | None:
    """Say where two states of one history may differ; None if its differences do not tell."""
    patched = [one for one in (old, new) if isinstance(one, PatchedState)]
    first, second = (one.base if isinstance(one, PatchedState) else one for one in (old, new))
    if first is not second:
        return None
    found = PendingChanges()
    found.none()
    for one in patched:
        found.add(one.changed())
    return found.changed


def _patch(older: State, newer: State, changed: Changed | None) -> Patch:
    """Make what turns `newer` into `older`."""
    found: dict[str, Tensor | tuple[NDArray[np.unsignedinteger], NDArray[np.unsignedinteger]]] = {}
    for name, tensor in older.items():
        if changed is not None and name not in changed:
            continue
        known = None if changed is None else changed[name]
        positions = (
            np.flatnonzero(tensor.data != newer[name].data).astype(np.int64)
            if known is None
            else known
        )
        width = np.uint32 if tensor.data.size < 2**32 else np.uint64
        if positions.size * (tensor.data.itemsize + np.dtype(width).itemsize) >= tensor.data.nbytes:
            found[name] = tensor
        elif positions.size:
            found[name] = (positions.astype(width), tensor.data[positions])
    return found
