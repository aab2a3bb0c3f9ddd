"""Which whole number gives the most of what can only be measured, and with noise: a number is tried, kept if it
was better, and given back if not.

Where it goes is proposed by whoever has a model of it, for that is quick, and judged by what was measured, for
that is true. A proposal that was no good is tried again ever more rarely, and so are the neighbours that nobody
proposed: what a model leaves out is found, and costs little where there is nothing to find. Step by step nobody
finds what lies behind numbers that give no more: such a number can be pointed out, and is tried in one leap.
Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

GAIN, PROPOSED_GAIN = 1.02, 1.01
"""So many times more has another number to give: moving costs something, and there is noise."""
NO_LOSS = 0.99
"""A smaller one that is proposed has to give this share of what there is."""
CLOSE = 0.1
"""Nearer than this to what there is, a trial is not judged by few measurements."""
CLEAR, FEW, MANY = 2, 3, 12
"""Measurements: if all are far from what there is, to one side; else; and where the middle one is close."""
HOPELESS = 0.75
"""A first one below this share of what there is ends the trial."""
PATIENCE, MOST_PATIENCE = 6, 96
"""Measurements between two trials of a way that nobody proposes; doubled by each that was in vain."""
CHANGED = 1.3
"""A proposal so many times larger or smaller than the one that was in vain is another one."""
NEAR = 0.1
"""Part of one by which a proposal may be above a number and still mean it."""
LEAP, UP, DOWN = 2, 1, -1
"""Ways to another number; trials are made in this order."""


@dataclass
class Side:
    """What is known of one way."""

    left: int = PATIENCE
    """Measurements until it is tried unasked."""
    patience: int = PATIENCE
    in_vain: float = 0.0
    """The proposal that was."""
    step: int = 0
    """Longest that one is tried; 0: as proposed."""


class Climb:
    """Follows what is measured. `home` is the number that is kept."""

    def __init__(self, home: int) -> None:
        self.home = home
        self.trial: int | None = None
        """The number that is tried now."""
        self._rate = 0.0
        self._proposal = float(home)
        self._leap = home
        self._way = UP
        """Of the trial."""
        self._sides = {LEAP: Side(), UP: Side(), DOWN: Side()}

    @property
    def number(self) -> int:
        """What should be measured next."""
        return self.home if self.trial is None else self.trial

    def is_enough(self, rates: Sequence[float]) -> bool:
        """Whether `number` can be judged by these."""
        if self.trial is None or not rates:
            return len(rates) >= FEW
        low, high = self._rate * (1 - CLOSE), self._rate * (1 + CLOSE)
        if max(rates) < low or min(rates) > high:
            return len(rates) >= CLEAR or rates[0] < HOPELESS * self._rate
        return len(rates) >= (MANY if low <= median(rates) <= high else FEW)

    def measured(
        self, rates: Sequence[float], proposal: float, most: int, *, leap: int = 0
    ) -> None:
        """`number` gave these rates; a model would have `proposal`, and there are at most `most`.

        From `leap` on things are otherwise than below, for all that is known.
        """
        rate = median(rates)  # one that something else has spoiled does not count
        if self.trial is not None:
            if not self._judge(rate):
                return  # what home gives is measured anew before anything else is compared with it
        else:
            for side in self._sides.values():
                side.left -= 1
            rate = (self._rate + rate) / 2 if self._rate else rate
        self._rate, self._proposal, self._leap = rate, proposal, leap
        if self.home <= most:
            self._way, self.trial = next(self._trials(most), (UP, None))

    def give_up(self) -> None:
        """What was measured of home and of a trial cannot be compared."""
        self.trial = None
        self._rate = 0.0

    def _trials(self, most: int) -> Iterator[tuple[int, int]]:
        """Ways and numbers worth a trial, the best idea first."""
        for way, side in self._sides.items():
            before = side.in_vain
            known = before / CHANGED < self._wanted(way) < before * CHANGED
            if side.left <= 0 or (self._is_proposed(way) and not known):
                target = self._target(way, side, most)
                if target != self.home:
                    yield way, target

    def _wanted(self, way: int) -> float:
        return self._leap if way == LEAP else self._proposal

    def _is_proposed(self, way: int) -> bool:
        if way == DOWN:
            return self._wanted(way) < self.home / (1 + NEAR)
        return self._wanted(way) > self.home + NEAR

    def _target(self, way: int, side: Side, most: int) -> int:
        """At most twice as many, or half, but for a leap; never the same but at an end."""
        if way == LEAP:
            return min(max(self._leap, self.home), most)
        step = max(1, self.home // 4)
        if self._is_proposed(way):
            step = max(step, abs(ceil(self._proposal - NEAR) - self.home))
        step = min(step, side.step or step)
        if way == UP:
            return min(self.home + step, 2 * self.home, most)
        return max(self.home - step, self.home // 2, 1)

    def _judge(self, rate: float) -> bool:
        trial, self.trial = self.trial or self.home, None
        way, needed = self._way, GAIN
        if self._is_proposed(way):
            needed = NO_LOSS if way == DOWN else PROPOSED_GAIN
        if rate >= self._rate * needed:
            self.home = trial
            found = rate > self._rate * (1 + CLOSE)
            for one, side in self._sides.items():
                patience = PATIENCE if found else side.patience
                self._sides[one] = Side(patience, patience)
            return True
        side = self._sides[way]
        side.patience = min(MOST_PATIENCE, 2 * side.patience)
        side.left, side.in_vain = side.patience, self._wanted(way)
        side.step = max(1, abs(trial - self.home) // 2)
        return False
