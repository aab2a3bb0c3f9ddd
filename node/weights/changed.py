"""Where a state differs from the one that an engine holds, summed up over the steps in between.

Too much is safe (the values are taken from the new state), too little never is: what is not known to be
unchanged counts as changed.
"""

import numpy as np
from numpy.typing import NDArray

from .state import Changed


class Unwritten:
    """What an engine has not been given yet. Starts with everything."""

    def __init__(self) -> None:
        self._changed: Changed | None = None

    def all(self) -> None:
        """The engine holds nothing of use: after an anchor, or a load that failed."""
        self._changed = None

    def none(self) -> None:
        """The engine holds exactly what we do."""
        self._changed = {}

    def add(self, changed: Changed | None) -> None:
        """One more step; None if nobody knows what it changed."""
        if changed is None or self._changed is None:
            self._changed = None
            return
        self._changed = {
            **self._changed,
            **{name: _union(self._changed, name, changed) for name in changed},
        }

    @property
    def changed(self) -> Changed | None:
        """What to write, or None: everything."""
        return self._changed


def _union(held: Changed, name: str, more: Changed) -> NDArray[np.int64] | None:
    added = more[name]
    if name not in held:
        return added
    before = held[name]
    return None if before is None or added is None else _merge(before, added)


def _merge(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Both, sorted, each position once: a stable sort merges two sorted runs, union1d is 100x slower."""
    both = np.concatenate((first, second))
    both.sort(kind="stable")
    return both[np.concatenate(([True], both[1:] != both[:-1]))] if both.size else both
