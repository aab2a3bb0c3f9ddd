"""The loop's lateness: what blocks it is seen."""

import asyncio
import inspect
import time

from support.swarm import until

from primerl.node.ops.metrics import (
    EVERY_S,
    LOOK_S,
    STILL_S,
    EventLoopMonitor,
    StallDetector,
    scene,
    where,
)


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


def test_a_loop_that_moves_is_not_spoken_of() -> None:
    still = StallDetector(100.0)
    assert [still.look(now, now - EVERY_S) for now in (100.5, 101.0, 101.5)] == ["", "", ""]


def test_a_loop_that_stands_still_is_spoken_of_once_and_when_it_goes_on() -> None:
    still = StallDetector(100.0)
    assert looks(still, 100.0, begin=100.5, end=110.0) == ["the event loop stands still for 2.5 s"]
    assert still.look(110.5, 110.4) == "the event loop goes on, it stood still for 10.4 s"
    assert still.look(111.0, 110.9) == ""


def test_a_lock_that_holds_up_every_thread_is_told_from_a_loop_that_blocks() -> None:
    still = StallDetector(100.0)
    words = still.look(100.0 + LOOK_S + STILL_S + 1.0, 100.0)
    assert words == "no thread of Python ran for 3.0 s, nor did the event loop"


def test_it_is_said_in_what_the_loop_s_thread_stands_and_what_others_do_beside_it() -> None:
    here = inspect.currentframe()
    assert here is not None
    words = scene({1: here, 2: here}, 1)
    assert words.count("test_event_loop_monitor.py") == 2
    assert "beside it" in words
    assert where(None, 1) == "its thread has ended"
