"""The metrics of a run that went on from a checkpoint, each step once; and the lag of the event loop."""

import asyncio
import inspect
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from primerl.node.ops.figures import MAX_POINTS
from primerl.node.ops.metrics import (
    EVERY_S,
    LOOK_S,
    STILL_S,
    EventLoopMonitor,
    MetricsLog,
    PhaseClock,
    StallDetector,
    StepCurves,
    scene,
    where,
)
from primerl.node.process.spawn import began

LINE = {"time": 5.0, "loss/mean": 0.5}
"""Of step 2, as its checkpoint has it."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path: Path) -> list[int]:
    return [line["step"] for line in lines(path)]


def written(path: Path, *numbers: int) -> MetricsLog:
    metrics = MetricsLog(path)
    for number in numbers:
        metrics.write(number, {"loss/mean": 1.0 / number, "time/save_ckpt": 0.1})
    return metrics


def test_what_came_after_the_checkpoint_is_dropped_and_made_again(path: Path) -> None:
    metrics = written(path, 1, 2, 3, 4)
    metrics.go_back(2, LINE)
    metrics.write(3, {"loss/mean": 0.3})
    metrics.close()
    assert steps(path) == [1, 2, 3]
    assert lines(path)[1]["time/save_ckpt"] == 0.1, "the line that was written stays as it was"
    assert lines(path)[2]["loss/mean"] == 0.3


def test_a_line_that_was_not_written_before_the_end_comes_from_the_checkpoint(path: Path) -> None:
    written(path, 1).close()
    again = MetricsLog(path)
    again.go_back(2, LINE)
    again.write(3, {"loss/mean": 0.3})
    again.close()
    assert steps(path) == [1, 2, 3]
    assert lines(path)[1] == {"step": 2, **LINE}


def test_a_torn_line_is_none(path: Path) -> None:
    written(path, 1).close()
    with path.open("a") as file:
        file.write('{"step": 2, "loss/me')
    again = MetricsLog(path)
    again.go_back(2, LINE)
    again.close()
    assert steps(path) == [1, 2]


def test_an_evaluation_of_the_step_is_not_its_line(path: Path) -> None:
    metrics = written(path, 1)
    metrics.write(2, {"eval/reverse-text/avg@1": 0.5})
    metrics.go_back(2, LINE)
    metrics.close()
    assert [(line["step"], "loss/mean" in line) for line in lines(path)] == [
        (1, True),
        (2, False),
        (2, True),
    ]


def test_a_checkpoint_without_a_line_adds_none(path: Path) -> None:
    metrics = written(path)
    metrics.go_back(0, {})
    metrics.close()
    assert lines(path) == []


# -- event loop ------------------------------------------------------------------------------------


async def test_what_blocks_the_loop_is_seen() -> None:
    lag = EventLoopMonitor()
    assert lag.read() == {}
    measuring = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    time.sleep(EVERY_S + 0.2)  # noqa: ASYNC251  a taskset that blocks
    await until(lambda: bool(lag.read()))
    seen = lag.read()
    measuring.cancel()
    assert seen["max"] >= 0.15
    assert seen["mean"] <= seen["max"]


def looks(still: StallDetector, beat: float, *, begin: float, end: float) -> list[str]:
    """What is said between two times of a loop that moved last at `beat`."""
    said: list[str] = []
    now = begin
    while now <= end:
        said.append(still.look(now, beat))
        now += LOOK_S
    return [words for words in said if words]


def test_a_loop_that_stands_still_is_spoken_of_once_and_when_it_goes_on() -> None:
    still = StallDetector(100.0)
    assert looks(still, 100.0, begin=100.5, end=110.0) == ["the event loop stands still for 2.5 s"]
    assert still.look(110.5, 110.4) == "the event loop goes on, it stood still for 10.4 s"
    assert still.look(111.0, 110.9) == ""


def test_a_lock_that_holds_up_every_thread_is_distinguished_from_a_loop_that_blocks() -> None:
    still = StallDetector(100.0)
    words = still.look(100.0 + LOOK_S + STILL_S + 1.0, 100.0)
    assert words == "no thread of Python ran for 3.0 s, nor did the event loop"


def test_a_stalled_loop_is_reported_with_the_stacks_of_its_thread_and_others() -> None:
    here = inspect.currentframe()
    assert here is not None
    words = scene({1: here, 2: here}, 1)
    assert words.count("test_metrics.py") == 2
    assert "beside it" in words
    assert where(None, 1) == "its thread has ended"


def test_a_moment_counts_from_the_start_of_the_program_and_the_first_time_only() -> None:
    clock = PhaseClock(began(os.getpid()))
    clock.reach("ticket")
    first = clock.moments["ticket"]
    clock.reach("ticket")
    assert clock.moments == {"ticket": first}
    assert 0.0 < first < time.monotonic()
    assert began(os.getppid()) <= began(os.getpid()) + 0.02, (
        "the system counts in hundredths of a second"
    )


def test_curves_of_a_long_run_are_bounded_and_still_show_its_beginning_and_its_newest_step() -> (
    None
):
    curves = StepCurves()
    for step in range(20 * MAX_POINTS):
        curves.add(step, {"reward/mean": float(step >= 10 * MAX_POINTS), "reward/math": None})
    points = curves.curve("reward/mean")
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS
    assert points[-1] == (20 * MAX_POINTS - 1, 1.0)
    assert points[0][0] < 100
    half = [value for step, value in points if step < 10 * MAX_POINTS]
    assert half == [0.0] * len(half), "steps are averaged with their neighbours alone"
    assert abs(2 * len(half) - len(points)) <= 2, "no part of the run is drawn coarser than another"
    assert list(curves.curves().values) == ["reward/mean"]


def test_figures_without_a_number_leave_no_point_and_a_step_has_a_median_length() -> None:
    curves = StepCurves()
    for step, at in enumerate((10.0, 12.0, 14.0, 5000.0, 5002.0)):
        loss = float("nan") if step == 1 else 0.5
        curves.add(step, {"time": at, "loss/mean": loss, "reward/mean": 0.25, "other": 1.0})
        curves.add(step, {"time": at, "eval/demo/avg@1": 0.5})  # a line of an evaluation
    assert [step for step, _ in curves.curve("loss/mean")] == [0, 2, 3, 4]
    assert curves.curves().values["loss/mean"][1] is None
    assert curves.step_s == 2.0
    assert curves.newest == {"loss/mean": 0.5, "reward/mean": 0.25}
    assert StepCurves().step_s is None


def test_a_run_that_goes_on_has_the_curves_of_its_steps_before(path: Path) -> None:
    written(path, 1, 2, 3, 4).close()
    metrics = MetricsLog(path)
    metrics.go_back(2, {"loss/mean": 0.5})
    metrics.write(3, {"loss/mean": 0.25})
    metrics.close()
    assert metrics.curves.curve("loss/mean") == [(1, 1.0), (2, 0.5), (3, 0.25)]
