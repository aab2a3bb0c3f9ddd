"""A pipeline that is only simulated, by arithmetic: so its best number of micro-batches can be known."""

import heapq
import random
from dataclasses import dataclass, field

from primerl.node.pipeline.micro_batches import MicroBatches

NUMBERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)


@dataclass
class Ring:
    """Stages that need `fixed` + `each` * rows seconds for a micro-batch, `hop` seconds apart."""

    stages: int
    hop: float
    fixed: float
    each: float
    rows: int = 64
    slowest: float = 1.0
    """How many times longer the last stage needs."""
    relay: float = 0.0
    """What every line is busy with a micro-batch, which nobody measures,"""
    line: float = 0.0
    """and with every row of it, but on the way back."""
    desk: float = 0.0
    """What stage 0 does besides for a micro-batch, which nobody measures."""
    noise: float = 0.0
    """Standard deviation of what a step takes, as part of it."""
    prompts: float = 0.0
    """Share of steps that take three times as long."""
    graph_rows: int = 0
    """Larger steps have no recorded graph,"""
    ungraphed: float = 0.0
    """and take so many seconds more."""
    lanes: int = 0
    """Micro-batches in flight now."""
    _random: random.Random = field(default_factory=lambda: random.Random(7))

    def step(self, rank: int, rows: int) -> float:
        """What stage `rank` needs for so many rows."""
        took = self.fixed + self.each * rows
        if 0 < self.graph_rows < rows:
            took += self.ungraphed
        if rank == self.stages - 1:
            took *= self.slowest
        if self.noise:
            took *= max(0.3, self._random.gauss(1.0, self.noise))
        return took * (3.0 if self._random.random() < self.prompts else 1.0)

    def run(self, pace: MicroBatches, trips: int, start: float = 0.0) -> tuple[float, float]:
        """(rows a second of the last half, time at the end) of so many micro-batches."""
        free, lines = [start] * self.stages, [start] * self.stages
        events: list[tuple[float, int, int, bool, int, float, float]] = []
        idle, number, done, at, made, half = self.rows, 0, 0, start, 0, start
        while done < trips:
            wanted = pace.count(self.rows)
            while idle and self.lanes < wanted:
                rows = min(idle, -(-self.rows // wanted))
                idle, number, self.lanes = idle - rows, number + 1, self.lanes + 1
                begin = max(at, free[0]) + self.desk
                took = self.step(0, rows)
                free[0] = begin + took
                pace.sent(number, rows, begin)
                heapq.heappush(events, (free[0], number, 1, False, rows, took, 0.0))
            now, one, rank, there, rows, busy, waited = heapq.heappop(events)
            if not there:
                size = self.relay + self.line * rows * (rank < self.stages)
                lines[rank - 1] = max(now, lines[rank - 1]) + size
                arrives = lines[rank - 1] + self.hop
                heapq.heappush(events, (arrives, one, rank, True, rows, busy, waited))
            elif rank < self.stages:
                begin, took = max(now, free[rank]), self.step(rank, rows)
                free[rank] = begin + took
                late = (max(busy, took), waited + begin - now)
                heapq.heappush(events, (free[rank], one, rank + 1, False, rows, *late))
            else:
                at, idle, done, self.lanes = now, idle + rows, done + 1, self.lanes - 1
                pace.back(one, busy, waited, now)
                half, made = (now, 0) if done == trips // 2 else (half, made + rows)
        self.lanes = 0
        return made / (at - half), at


class Fixed(MicroBatches):
    """As many as it is told."""

    def __init__(self, number: int) -> None:
        super().__init__(64)
        self.number = number

    def count(self, rows: int) -> int:
        """See MicroBatches."""
        return min(rows, self.number)


def best_of(ring: Ring, trips: int = 0) -> float:
    """Rows a second of the best number."""
    return max(
        ring.run(Fixed(number), trips or 8 * number + 16)[0]
        for number in NUMBERS
        if number <= ring.rows
    )
