"""Which chunk to give away next so that a swarm is served with as few uploads as possible.

Super-seeding: give what was given least often, and nothing that others have only just got and will pass on.
Pure: time and randomness are arguments.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

MAX_CHUNKS = 1 << 16
"""Chunks remembered; one that was forgotten counts as never given."""
RELAY_S = 2.0
"""Least time that others get to pass a chunk on before it is given away again."""
RELAY_MAX_S = 12.0
UNDER_WAY_MAX_S = 60.0
"""A copy that takes longer than this to send is not counted upon: its receiver may stall on purpose."""
FIRST_RATE = 1024 * 1024
"""Bytes per second that an upload is expected to reach before any was measured."""


@dataclass
class Given:
    """One chunk that was given away."""

    count: int = 0
    """Copies sent or being sent."""
    spreads_until: float = 0.0
    """Until then others may be counted upon to get it and to pass it on."""


class Copies:
    """What was given to whom, without the whom."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._given: OrderedDict[bytes, Given] = OrderedDict()
        self._seconds_per_byte = 1.0 / FIRST_RATE

    def choose(
        self, held: Iterable[tuple[int, bytes]], *, urgent: bool, now: float
    ) -> tuple[int, bytes] | None:
        """The (index, digest) of `held` to give now; None while every one of them is spreading.

        `urgent` gives one that spreads rather than none.
        """
        best: tuple[int, bytes] | None = None
        lowest: tuple[bool, int, float] | None = None
        for index, name in held:
            given = self._given.get(name) or Given()
            spreads = now < given.spreads_until
            if spreads and not urgent:
                continue
            rank = (spreads, given.count, self._chance.random())
            if lowest is None or rank < lowest:
                best, lowest = (index, name), rank
        return best

    def begun(self, name: bytes, size: int, now: float) -> None:
        """A copy of a chunk goes out."""
        given = self._given.setdefault(name, Given())
        self._given.move_to_end(name)
        given.count += 1
        expected = min(4 * size * self._seconds_per_byte, UNDER_WAY_MAX_S)
        given.spreads_until = max(given.spreads_until, now + RELAY_S + expected)
        if len(self._given) > MAX_CHUNKS:
            self._given.popitem(last=False)

    def ended(self, name: bytes, size: int, seconds: float, now: float) -> None:
        """A copy went out whole, in `seconds`."""
        given = self._given.setdefault(name, Given())
        given.spreads_until = now + min(RELAY_S + 3 * seconds, RELAY_MAX_S)
        if size:
            self._seconds_per_byte += 0.3 * (seconds / size - self._seconds_per_byte)

    def failed(self, name: bytes, now: float) -> None:
        """A copy did not get through: it is as if it had never been given."""
        given = self._given.setdefault(name, Given(1))
        given.count = max(0, given.count - 1)
        if not given.count:
            given.spreads_until = now
