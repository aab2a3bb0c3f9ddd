"""Pings that stage 0 sends round the ring: whether they come back, and how soon. Time is an argument."""

EVERY_S = 2.0
SOON_S = 0.2
"""While the ring is not whole: the next one may be the first that gets through."""
MAX_OUT = 256
"""Older ones are given up."""
EMA = 0.3


class Rounds:
    """Numbers that go out and come back in order."""

    def __init__(self) -> None:
        self.round_ms: float | None = None
        """How long one takes, smoothed."""
        self._number = 0
        self._first = 1
        """The first that counts: those before were sent before something broke."""
        self._out: dict[int, float] = {}
        self._last = -EVERY_S
        self._heard = 0.0

    def next(self, now: float, *, whole: bool) -> int | None:
        """The number to send now; None if it is not time yet."""
        due = self._last + (EVERY_S if whole else SOON_S)
        return self._number + 1 if now >= due else None

    def sent(self, number: int, now: float) -> None:
        """It left."""
        self._number = number
        self._last = now
        self._out[number] = now
        if len(self._out) > MAX_OUT:
            del self._out[next(iter(self._out))]

    def heard(self, now: float) -> None:
        """Something came round: the ring moves."""
        self._heard = now

    def back(self, number: int, now: float) -> bool:
        """A ping came back; true if it was sent since the last begin()."""
        since = self._out.pop(number, None)
        if since is None or number < self._first:
            return False
        self._out = {one: at for one, at in self._out.items() if one > number}
        took = (now - since) * 1e3
        self.round_ms = took if self.round_ms is None else (1 - EMA) * self.round_ms + EMA * took
        return True

    def silent_s(self, now: float) -> float:
        """How long nothing came round though something should have."""
        return now - max(self._heard, min(self._out.values())) if self._out else 0.0

    def begin(self) -> None:
        """Something broke: what is out does not count any more."""
        self._out.clear()
        self._first = self._number + 1
