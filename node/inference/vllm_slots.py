"""The requests that vLLM's worker draws for, as columns of numbers: what they ask for, and how far they are."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass
class Slots:
    """The requests that were not collected yet, each at its index of every array; all grow together."""

    size: int
    of: dict[str, int] = field(default_factory=dict[str, int])
    ids: dict[int, str] = field(default_factory=dict[int, str])

    def __post_init__(self) -> None:
        self.seeds = np.zeros(self.size, np.int64)
        self.temperatures = np.ones(self.size, np.float64)
        self.top_ks = np.zeros(self.size, np.int64)
        self.top_ps = np.ones(self.size, np.float64)
        self.prompts = np.zeros(self.size, np.int64)
        self.drawn = np.zeros(self.size, np.int64)
        """Tokens whose drawing was begun."""
        self.filed = np.zeros(self.size, np.int64)
        """Tokens whose rows have come."""
        self.versions = np.zeros(self.size, np.int64)
        self.spans: list[list[list[int]]] = [[] for _ in range(self.size)]
        self._free = list(range(self.size - 1, -1, -1))

    def take(self, request_id: str, key: int) -> int:
        """A slot with nothing drawn; call grow() first if full()."""
        slot = self._free.pop()
        self.of[request_id], self.ids[key] = slot, request_id
        self.drawn[slot] = self.filed[slot] = 0
        self.versions[slot] = np.iinfo(np.int64).min  # none: the first token begins a span
        self.spans[slot] = []
        return slot

    def leave(self, key: int) -> None:
        """Free the slot of a request, if it has one."""
        if (request_id := self.ids.pop(key, None)) is not None:
            self._free.append(self.of.pop(request_id))

    def full(self) -> bool:
        """Whether there is no slot to take."""
        return not self._free

    def grow(self) -> None:
        """Twice as many slots."""
        more = Slots(self.size)
        for name, column in list(vars(self).items()):
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, getattr(more, name)]))
        self.spans += more.spans
        self._free = list(range(2 * self.size - 1, self.size - 1, -1))
        self.size *= 2

    def stamp(self, slots: Ints, rows: Ints, version: int) -> None:
        """Begin a span for each request whose token at `rows` is the first of its under `version`."""
        for index in np.flatnonzero(self.versions[slots] != version).tolist():
            slot, row = int(slots[index]), int(rows[index])
            spans = self.spans[slot]
            while spans and spans[-1][0] >= row:
                spans.pop()  # of tokens that vLLM has thrown away, and that are drawn again now
            spans.append([row, version])
            self.versions[slot] = version
