"""How many uploads at a time fill our line and no more: few where the line is narrow, more where it is long.

Every upload tells what the line carries with so many under way. The limit is the least number that reaches
nearly the best of that, and half as many more are tried for as long as more were better. Pure.
"""

FEWEST, MOST = 2, 16
NEARLY = 0.85
"""Of the best rate; what is lost to it is gained by chunks that are whole sooner."""
EPOCH = 256
"""Uploads after which all is forgotten and learned again: lines change."""
NEWEST = 0.25
"""Weight of the newest upload in what is known."""


class UploadLimit:
    """Learns from uploads that went well."""

    def __init__(self, first: int = FEWEST) -> None:
        self._fewest = min(first, FEWEST)
        self._limit = first
        self._uploads = 0
        self._rates: dict[int, float] = {}
        """Uploads under way -> bytes per second of all of them."""
        self.typical_s = 0.0
        """About how long an upload takes; 0 before the first."""

    @property
    def value(self) -> int:
        """Uploads to have under way."""
        return self._limit

    def learn(self, size: int, seconds: float, beside: int) -> None:
        """An upload of `size` bytes took `seconds` while `beside` were under way, itself included."""
        seconds = max(seconds, 1e-6)
        self.typical_s = _mixed(self.typical_s, seconds)
        self._uploads += 1
        if self._uploads % EPOCH == 0:
            self._rates.clear()
            self._limit = self._fewest
        self._rates[beside] = _mixed(self._rates.get(beside, 0.0), beside * size / seconds)
        enough = NEARLY * max(self._rates.values())
        best = min(count for count, rate in self._rates.items() if rate >= enough)
        if best == max(self._rates) and best >= self._limit:
            best += (best + 1) // 2  # by one alone the next could seem no better
        self._limit = max(self._fewest, min(best, MOST))


def _mixed(known: float, newest: float) -> float:
    return known + NEWEST * (newest - known) if known else newest
