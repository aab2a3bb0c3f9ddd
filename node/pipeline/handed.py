"""What was handed to the process that computes and has not come back: whether it hangs, and how busy it is.

Pure: time is an argument, seconds of one clock. It answers in order, but does not answer what is out of date.
"""

from collections import deque

from .frame import Kind
from .frame_codec import Head


class Handed:
    """Follows one process; cleared when another takes its place."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        """With a micro-batch."""
        self.idle_s = 0.0
        """Without one, between two of one chain."""
        self._waiting: deque[tuple[bool, int, int, float]] = deque()
        """(whether it is a micro-batch, epoch, number, handed over at)."""
        self._heard = 0.0
        self._steps = 0
        self._since: float | None = None
        """Since when it is busy, or idle; None where no chain runs."""

    @property
    def stall_share(self) -> float:
        """Share of the time in which it had nothing to do, 0 to 1."""
        whole = self.busy_s + self.idle_s
        return self.idle_s / whole if whole else 0.0

    def given(self, head: Head, now: float) -> None:
        """A frame was handed over."""
        step = head.kind is Kind.STEP
        if step:
            self._pass(now)
            self._steps += 1
        elif head.kind is Kind.RESET:
            self._pass(None)
        self._waiting.append((step, head.epoch, head.number, now))

    def answered(self, head: Head, now: float) -> None:
        """A frame came back; whatever was handed over before it will not."""
        self._heard = now
        step = head.kind in (Kind.STEP, Kind.DRAWN)
        what = (step, head.epoch, head.number)
        if not any(one[:3] == what for one in self._waiting):
            return
        if step:
            self._pass(now)
        while self._waiting:
            one = self._waiting.popleft()
            self._steps -= one[0]
            if one[:3] == what:
                return

    def silent_s(self, now: float) -> float:
        """How long it has said nothing though there is something to say; 0 where there is not."""
        return now - max(self._heard, self._waiting[0][3]) if self._waiting else 0.0

    def clear(self) -> None:
        """Nothing of it will come back."""
        self._waiting.clear()
        self._steps = 0
        self._since = None

    def _pass(self, now: float | None) -> None:
        """Count the time up to `now`; None begins a chain."""
        if self._since is not None and now is not None:
            if self._steps:
                self.busy_s += now - self._since
            else:
                self.idle_s += now - self._since
        self._since = now
