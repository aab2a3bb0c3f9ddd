"""The number of micro-batches, on simulated pipelines: it must be what keeps the slowest stage busy."""

import heapq
from dataclasses import dataclass

import pytest

from primerl.node.pipeline.micro_batches import MicroBatches


@dataclass
class Pipeline:
    """Stages that need `fixed` + `each` * rows seconds for a micro-batch, `hop` seconds apart, in a ring."""

    stages: int
    hop: float
    fixed: float
    each: float
    sequences: int = 64
    slowest: float = 1.0
    """How many times longer the last stage needs."""

    def step(self, rank: int, rows: int) -> float:
        factor = self.slowest if rank == self.stages - 1 else 1.0
        return factor * (self.fixed + self.each * rows)

    def run(self, pace: MicroBatches, trips: int, start: float = 0.0) -> tuple[float, float]:
        """(rows a second, time at the end) over the last half of so many micro-batches."""
        free = [start] * self.stages
        events: list[tuple[float, int, int, int, float, float]] = []
        number, done, at, rows_done, half = 0, 0, start, 0, 0.0
        idle = self.sequences
        while done < trips:
            lanes = pace.count(self.sequences)
            while idle and len(events) < lanes:
                rows = min(idle, -(-self.sequences // lanes))
                idle -= rows
                pace.sent(number, rows, at)
                heapq.heappush(events, (at, number, 0, rows, 0.0, 0.0))
                number += 1
            now, one, rank, rows, busy, waited = heapq.heappop(events)
            if rank == self.stages:
                at = now
                pace.back(one, busy, waited, now)
                idle += rows
                done += 1
                if done == trips // 2:
                    half, rows_done = now, 0
                rows_done += rows
                continue
            begin = max(now, free[rank])
            took = self.step(rank, rows)
            free[rank] = begin + took
            arrives = begin + took + self.hop
            heapq.heappush(
                events, (arrives, one, rank + 1, rows, max(busy, took), waited + begin - now)
            )
        return rows_done / (at - half), at


class Fixed(MicroBatches):
    """As many as it is told."""

    def __init__(self, number: int) -> None:
        super().__init__(64)
        self.number = number

    def count(self, rows: int) -> int:
        return self.number


def rate(pipeline: Pipeline, pace: MicroBatches) -> float:
    return pipeline.run(pace, 800)[0]


PIPELINES = {
    "no latency": Pipeline(2, 0.0, 0.010, 0.0001),
    "a home": Pipeline(2, 0.010, 0.010, 0.0001),
    "a continent": Pipeline(4, 0.025, 0.010, 0.0001),
    "an ocean": Pipeline(4, 0.050, 0.005, 0.0005),
    "a slow last stage": Pipeline(3, 0.020, 0.005, 0.0002, slowest=3.0),
    "slow machines": Pipeline(2, 0.050, 0.200, 0.01),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_it_comes_close_to_the_best_number(name: str) -> None:
    pipeline = PIPELINES[name]
    best = max(
        rate(pipeline, Fixed(number)) for number in (1, 2, 3, 4, 5, 6, 8, 12, 14, 16, 24, 32, 48)
    )
    assert rate(pipeline, MicroBatches(64)) >= 0.85 * best


def test_the_slowest_stage_idles_less_than_with_one_at_a_time() -> None:
    pipeline = PIPELINES["a continent"]
    one, many = Fixed(1), MicroBatches(64)
    pipeline.run(one, 1000)
    pipeline.run(many, 1000)
    assert one.stall_share > 0.85
    assert many.stall_share < 0.15


def test_there_are_never_more_than_the_plan_allows_nor_than_there_are_sequences() -> None:
    pace = MicroBatches(6)
    PIPELINES["an ocean"].run(pace, 1000)
    assert pace.count(64) == 6
    assert pace.count(4) == 4
    assert pace.count(0) == 1


def test_a_micro_batch_has_the_rows_that_were_asked_for() -> None:
    pace = MicroBatches(64, least_rows=4)
    PIPELINES["an ocean"].run(pace, 1000)
    assert pace.count(20) == 5


def test_when_the_way_becomes_longer_there_are_more_and_shorter_again_fewer() -> None:
    near, far = Pipeline(2, 0.005, 0.010, 0.0), Pipeline(2, 0.100, 0.010, 0.0)
    pace = MicroBatches(64)
    _, at = near.run(pace, 500)
    few = pace.count(64)
    pace.forget()
    _, at = far.run(pace, 1000, at)
    many = pace.count(64)
    pace.forget()
    near.run(pace, 1000, at)
    assert 3 <= few <= 6
    assert 20 <= many <= 30
    assert pace.count(64) <= few + 1


def test_the_number_stands_still_where_nothing_changes() -> None:
    pipeline = PIPELINES["a continent"]
    pace = MicroBatches(64)
    _, at = pipeline.run(pace, 1000)
    seen: set[int] = set()
    for _ in range(50):
        _, at = pipeline.run(pace, 20, at)
        seen.add(pace.count(64))
    assert max(seen) - min(seen) <= 1


def test_what_was_lost_with_a_chain_says_nothing() -> None:
    pace = MicroBatches(8)
    pace.sent(1, 4, 0.0)
    pace.forget()
    pace.back(1, 0.1, 0.0, 50.0)
    pace.back(99, 0.1, 0.0, 50.0)
    assert pace.ring_s == 0.0
    assert pace.stall_share == 0.0
    assert pace.count(64) == 2
