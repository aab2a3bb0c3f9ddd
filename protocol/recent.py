"""Remember a bounded number of things."""

from collections import Counter, OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RecentDict(OrderedDict[K, V]):
    """A dictionary of the `most` entries that were set last, the oldest first.

    Setting a key renews it, as move_to_end() does; reading does not.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


class RecentCounter(Counter[K]):
    """Counts of the `most` keys that were counted last, the oldest first."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, count: int) -> None:
        self.pop(key, None)
        super().__setitem__(key, count)
        if len(self) > self._most:
            del self[next(iter(self))]
