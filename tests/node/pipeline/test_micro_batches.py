"""The number of micro-batches, on simulated pipelines: it must give what the best fixed number gives."""

import pytest
from simulated_ring import Fixed, Ring, best_of

from primerl.node.pipeline.micro_batches import MicroBatches

COSTS = {
    "a step that takes its time whatever is in it": (0.020, 0.0),
    "rows that cost little": (0.010, 0.0001),
    "rows that cost": (0.005, 0.0005),
    "nothing but rows": (0.0005, 0.001),
    "a heavy step": (0.050, 0.0002),
}
TRIPS = 2400


def reached(ring: Ring, trips: int = TRIPS) -> float:
    """Of what the best number gives, once it has had time."""
    return ring.run(MicroBatches(64, stages=ring.stages), trips)[0] / best_of(ring)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("costs", COSTS)
def test_it_gives_what_the_best_number_gives(costs: str, stages: int) -> None:
    fixed, each = COSTS[costs]
    for hop in (0.0, 0.010, 0.050):
        for rows in (96, 512):
            found = reached(Ring(stages, hop, fixed, each, rows))
            assert found >= 0.95, (hop, rows)


@pytest.mark.parametrize(
    "more",
    [
        {"slowest": 3.0},
        {"slowest": 3.0, "fixed": 0.020, "each": 0.0},
        {"relay": 0.004},
        {"desk": 0.005},
        {"line": 0.0003},
        {"line": 0.001, "relay": 0.002},
    ],
    ids=str,
)
def test_it_does_where_something_else_is_in_the_way_than_what_is_measured(
    more: dict[str, float],
) -> None:
    for hop in (0.0, 0.025):
        ring = Ring(**{"stages": 3, "hop": hop, "fixed": 0.010, "each": 0.0002, **more})  # pyright: ignore
        assert reached(ring) >= 0.93, hop


@pytest.mark.parametrize("hop", [0.0, 0.010, 0.025, 0.050])
def test_it_finds_micro_batches_that_devices_have_recorded_graphs_for(hop: float) -> None:
    """Somewhat smaller ones than it begins with give nothing: a step of 512 takes a third of one of 600."""
    ring = Ring(2, hop, 0.002, 6e-6, rows=6144, graph_rows=512, ungraphed=0.010, noise=0.05)
    pace = MicroBatches(96, stages=2, graph_rows=512)
    _, at = ring.run(pace, 200)
    assert ring.run(pace, 400, at)[0] >= 0.85 * best_of(ring)


@pytest.mark.parametrize("hop", [0.0, 0.025])
def test_noise_and_prompts_do_not_mislead_it_far(hop: float) -> None:
    ring = Ring(2, hop, 0.010, 0.0002, noise=0.1, prompts=0.03)
    pace = MicroBatches(64, stages=2)
    assert ring.run(pace, 2 * TRIPS)[0] >= 0.9 * best_of(ring, 1200)


def test_it_begins_with_one_micro_batch_a_stage_and_stays_there_if_all_are_equally_fast() -> None:
    for stages in (2, 3, 4):
        pace = MicroBatches(64, stages=stages)
        assert pace.count(64) == stages
        _, at = Ring(stages, 0.0, 0.010, 0.0).run(pace, 200)
        seen: set[int] = set()
        for _ in range(40):
            _, at = Ring(stages, 0.0, 0.010, 0.0).run(pace, 10, at)
            seen.add(pace.count(64))
        assert stages in seen
        assert max(seen) <= 2 * stages


def test_small_micro_batches_among_large_ones_do_not_make_them_fewer() -> None:
    """A small one is soon back: that says nothing of how long a large one keeps a stage busy."""
    pace = MicroBatches(8, stages=2)
    at = [0.0, 0.0]
    for number in range(400):
        rows = 4 if number % 5 == 4 else 60
        step = 0.0005 * rows
        begin = at[number % 2]
        pace.sent(number, rows, begin)
        at[number % 2] = begin + 2 * step
        pace.back(number, step, 0.0, at[number % 2])
    assert pace.count(512) >= 2


def test_the_slowest_stage_idles_less_than_with_one_at_a_time() -> None:
    ring, one, many = Ring(4, 0.025, 0.010, 0.0005), Fixed(1), MicroBatches(64, stages=4)
    ring.run(one, 400)
    ring.run(many, 1600)
    assert one.stall_share > 0.7
    assert many.stall_share < 0.15


def test_there_are_never_more_than_the_plan_allows_nor_than_there_are_sequences() -> None:
    pace = MicroBatches(6)
    Ring(4, 0.050, 0.001, 0.001).run(pace, 600)
    assert pace.count(64) == 6
    assert pace.count(4) == 4
    assert pace.count(0) == 1
    assert MicroBatches(1, stages=4).count(64) == 1


def test_when_the_way_becomes_longer_there_are_more_and_when_shorter_fewer() -> None:
    near, far = Ring(2, 0.002, 0.010, 0.0005), Ring(2, 0.100, 0.010, 0.0005)
    pace = MicroBatches(64)
    _, at = near.run(pace, 600)
    few = pace.count(64)
    pace.forget()
    rate, at = far.run(pace, 1000, at)
    assert rate >= 0.95 * best_of(far)
    assert pace.count(64) >= 3 * few
    pace.forget()
    rate, _ = near.run(pace, 3000, at)
    assert rate >= 0.95 * best_of(near)


def test_what_was_lost_with_a_chain_says_nothing() -> None:
    pace = MicroBatches(8)
    pace.sent(1, 4, 0.0)
    pace.forget()
    pace.back(1, 0.1, 0.0, 50.0)
    pace.back(99, 0.1, 0.0, 50.0)
    assert pace.ring_s == 0.0
    assert pace.stall_share == 0.0
    assert pace.count(64) == 2


def test_a_time_without_work_is_no_measure_of_the_number() -> None:
    ring, pace = Ring(2, 0.025, 0.010, 0.0005), MicroBatches(64)
    _, at = ring.run(pace, 600)
    settled = pace.count(64)
    for _ in range(20):
        pace.forget()
        _, at = ring.run(pace, 12, at + 60.0)
    assert pace.stall_share < 0.9
    assert abs(pace.count(64) - settled) <= settled // 2


def test_with_fewer_sequences_than_before_rates_are_not_compared() -> None:
    """Half the rows give half the rate, whatever the number: that is nobody's merit or fault."""
    many, few = Ring(2, 0.050, 0.010, 0.0001, rows=256), Ring(2, 0.050, 0.010, 0.0001, rows=32)
    pace = MicroBatches(64)
    at = 0.0
    for _ in range(30):
        _, at = many.run(pace, 30, at)
        pace.forget()
        _, at = few.run(pace, 30, at)
        pace.forget()
    rate, _ = many.run(pace, 600, at)
    assert rate >= 0.9 * best_of(many)
