"""The number of micro-batches in flight: its limits, and what is derived from measured trips."""

from collections.abc import Callable
from math import ceil

import pytest

from primerl.node.pipeline.micro_batches import WINDOW, MicroBatches

Cost = Callable[[int], float]
"""Seconds that a stage needs for a micro-batch of this number of sequences."""


def test_the_plan_and_the_sequences_bound_the_number() -> None:
    many = MicroBatches(32, stages=100)
    assert many.count(512) == 32
    assert many.count(5) == 5
    assert many.count(0) == 1
    assert MicroBatches(32, stages=1).count(512) == 1


def test_steps_are_small_enough_for_recorded_graphs_where_the_plan_allows_it() -> None:
    assert MicroBatches(32, graph_rows=512).count(6144) == 12
    assert MicroBatches(8, graph_rows=512).count(6144) == 8
    assert MicroBatches(32, stages=20, graph_rows=512).count(6144) == 20
    assert MicroBatches(32, graph_rows=512).count(400) == 2


class Pipeline:
    """Stages that all cost the same, with hops of `hops_s` in all; no queues."""

    def __init__(self, stages: int, hops_s: float, cost: Cost, rows: int, most: int = 64) -> None:
        self.stages, self.hops_s, self.cost, self.rows = stages, hops_s, cost, rows
        self.pace = MicroBatches(most, stages=stages)
        self.now, self._number = 0.0, 0

    @property
    def lanes(self) -> int:
        return self.pace.count(self.rows)

    def trips(self, count: int, waited_s: float = 0.0) -> None:
        """Send micro-batches one after the other; only their round trips matter."""
        for _ in range(count):
            step = self.cost(ceil(self.rows / self.lanes))
            self.pace.record_send(self._number, self.now)
            self.now += self.stages * step + self.hops_s + waited_s
            self.pace.record_return(self._number, step, waited_s, self.now)
            self._number += 1


COSTS: dict[str, Cost] = {
    "the same whatever is in it": lambda rows: 0.020,
    "mostly the same": lambda rows: 0.010 + 0.0001 * rows,
    "mostly rows": lambda rows: 0.005 + 0.0005 * rows,
}


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("hops_s", [0.0, 0.040, 0.100])
def test_the_number_settles_where_the_slowest_stage_is_just_full(
    stages: int, hops_s: float, name: str
) -> None:
    """n steps take as long as a trip, and n - 1 do not; n depends on their size, and that on n."""
    made = Pipeline(stages, hops_s, COSTS[name], 512)
    assert made.lanes == stages
    made.trips(600)
    settled = made.lanes
    made.trips(600)
    assert made.lanes == settled
    step = made.cost(ceil(512 / settled))
    trip = stages * step + hops_s
    assert trip <= (settled + 0.26) * step
    assert (settled - 1) * step < trip


def test_time_in_queues_is_no_part_of_a_trip() -> None:
    made = Pipeline(2, 0.0, COSTS["the same whatever is in it"], 64)
    made.trips(300, waited_s=1.0)
    assert made.lanes == 2


def test_trips_of_the_number_before_do_not_count() -> None:
    """Round trips of micro-batches sent with the old number do not count for the new one."""
    pace = MicroBatches(64)
    for number in range(100):
        pace.record_send(number, 0.0)
    for number in range(WINDOW):
        pace.record_return(number, 0.010, 0.0, 0.100)
    for number in range(WINDOW, 100):
        pace.record_return(number, 0.010, 0.070, 0.100)
    assert pace.count(512) == 10


def test_small_variations_change_nothing() -> None:
    made = Pipeline(2, 0.0, COSTS["the same whatever is in it"], 64)
    for hops_s in (0.0, 0.0015, 0.0005, 0.001) * 50:
        made.hops_s = hops_s
        made.trips(1)
        assert made.lanes == 2


def test_queues_that_nothing_measures_do_not_raise_the_number_for_ever() -> None:
    """Each micro-batch beyond one for each stage makes all of them 20 ms later, between the stages."""
    made = Pipeline(2, 0.020, COSTS["mostly rows"], 64)
    for _ in range(400):
        made.hops_s = 0.020 + 0.020 * (made.lanes - 2)
        made.trips(1)
    assert made.lanes == 4


def test_a_new_chain_is_measured_anew() -> None:
    made = Pipeline(2, 0.100, COSTS["the same whatever is in it"], 512)
    made.trips(200)
    made.pace.reset()
    assert made.lanes == 2
    made.hops_s = 0.040
    made.trips(200)
    assert made.lanes == 4


def test_a_pipeline_that_gets_faster_has_fewer_in_flight_again() -> None:
    made = Pipeline(2, 0.100, COSTS["the same whatever is in it"], 512)
    made.trips(200)
    assert made.lanes == 7
    made.hops_s = 0.0
    made.trips(200)
    assert made.lanes == 2


def test_the_share_of_the_time_in_which_the_slowest_stage_waits_is_measured() -> None:
    pace = MicroBatches(4)
    assert pace.stall_share == 0.0
    for number in range(8):
        pace.record_send(number, 0.1 * number)
        pace.record_return(number, 0.025, 0.0, 0.1 * number + 0.05)
    assert pace.stall_share == pytest.approx(0.75)
    pace.reset()
    assert pace.stall_share == 0.0


def test_a_pause_without_work_is_no_idle_time() -> None:
    pace = MicroBatches(4)
    for number, at in enumerate([0.0, 0.1, 100.0, 100.1]):
        pace.record_send(number, at)
        pace.record_return(number, 0.05, 0.0, at + 0.1)
    assert pace.stall_share == pytest.approx(0.5)


def test_what_was_never_sent_counts_for_nothing() -> None:
    pace = MicroBatches(4)
    for number in range(100):
        pace.record_return(number, 0.01, 0.0, 1.0)
    assert pace.count(64) == 2
