"""Where a state differs from its base, collected while it is decoded.

What is collected may name more than what changed, never less.
"""

import numpy as np
from numpy.typing import NDArray

from .state import Changed

DENSE_SHARE = 8
"""A tensor of which more than one in so many elements changed counts as changed all over."""

Positions = NDArray[np.int64]


class Found:
    """Collects where tensors changed, block by block; forgets the places where there are many."""

    def __init__(self) -> None:
        self._places: dict[str, list[Positions] | None] = {}
        self._count: dict[str, int] = {}

    def add(self, name: str, start: int, index: Positions | None, size: int) -> None:
        """Elements `index` of the block at `start` changed in `name`, which has `size`; None: any."""
        count = self._count.get(name, 0) + (size if index is None else index.size)
        self._count[name] = count
        places = self._places.setdefault(name, [])
        if index is None or places is None or count * DENSE_SHARE > size:
            self._places[name] = None
        elif index.size:
            places.append(index + start)

    def changed(self) -> Changed:
        """All that was added."""
        return {
            name: None if places is None else np.concatenate([np.empty(0, np.int64), *places])
            for name, places in self._places.items()
        }
