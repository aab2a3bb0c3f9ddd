"""The bridge between asyncio and the trio thread: results, errors, cancellation, events, the end."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable

import pytest
import pytest_asyncio
import trio
from support.waiting import until

from primerl.node.p2p.trio_bridge import EventQueue, TrioStopped, TrioThread, attempt


@pytest_asyncio.fixture
async def thread() -> AsyncIterator[TrioThread]:
    thread = TrioThread("trio under test")
    await thread.start()
    yield thread
    await thread.stop()


async def forever(began: threading.Event, ended: threading.Event) -> None:
    began.set()
    try:
        await trio.sleep_forever()
    finally:
        ended.set()


async def test_a_call_runs_in_trio_and_returns_its_result(thread: TrioThread) -> None:
    async def where(word: str) -> tuple[str, str]:
        await trio.lowlevel.checkpoint()
        return word, threading.current_thread().name

    assert await thread.call(where, "hello") == ("hello", "trio under test")


async def test_an_error_in_trio_is_raised_in_the_caller_and_hurts_nobody_else(
    thread: TrioThread,
) -> None:
    async def fail() -> None:
        raise ValueError("from trio")

    with pytest.raises(ValueError, match="from trio"):
        await thread.call(fail)
    assert await thread.call(answer) == 42


async def answer() -> int:
    return 42


async def test_cancelling_the_caller_cancels_the_call(thread: TrioThread) -> None:
    began, ended = threading.Event(), threading.Event()
    call = asyncio.create_task(thread.call(forever, began, ended))
    await until(began.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(ended.is_set)


async def test_stopping_ends_calls_under_way_and_joins_the_thread() -> None:
    thread = TrioThread("trio to stop")
    await thread.start()
    began, ended = threading.Event(), threading.Event()
    call = asyncio.create_task(thread.call(forever, began, ended))
    await until(began.is_set)
    await thread.stop()
    await thread.stop()
    with pytest.raises(TrioStopped):
        await call
    assert ended.is_set()
    assert "trio to stop" not in {each.name for each in threading.enumerate()}


@pytest.mark.parametrize("started", [False, True])
async def test_a_call_outside_the_life_of_the_thread_says_so(started: bool) -> None:
    thread = TrioThread("trio outside")
    if started:
        await thread.start()
        await thread.stop()
    with pytest.raises(TrioStopped, match="start"):
        await thread.call(answer)


async def test_a_dying_background_task_ends_the_thread_and_its_calls() -> None:
    thread = TrioThread("trio to die")
    await thread.start()
    began, ended = threading.Event(), threading.Event()
    call = asyncio.create_task(thread.call(forever, began, ended))
    await until(began.is_set)

    async def plant() -> None:
        thread.nursery.start_soon(die)

    await thread.call(plant)
    with pytest.raises(TrioStopped):
        await call
    await thread.stop()


async def die() -> None:
    raise RuntimeError("a background task failed")


async def test_events_cross_in_order() -> None:
    queue: EventQueue[int] = EventQueue(100)
    queue.bind(asyncio.get_running_loop())
    feeder = threading.Thread(target=lambda: [queue.put(i) for i in range(50)])
    feeder.start()
    async with asyncio.timeout(60):
        assert [await anext(queue) for _ in range(50)] == list(range(50))
    feeder.join()


async def test_a_full_queue_drops_the_oldest() -> None:
    queue: EventQueue[int] = EventQueue(3)
    queue.bind(asyncio.get_running_loop())
    for i in range(10):
        queue.put(i)
    queue.close()
    assert [item async for item in queue] == [7, 8, 9]


async def test_closing_a_queue_ends_a_reader_that_waits_and_refuses_what_comes_later() -> None:
    queue: EventQueue[int] = EventQueue(3)
    queue.bind(asyncio.get_running_loop())
    reader: Awaitable[int] = asyncio.ensure_future(anext(queue, -1))
    await asyncio.sleep(0)
    queue.close()
    assert await reader == -1
    queue.put(1)
    assert await anext(queue, -1) == -1


async def test_a_cancelled_reader_takes_nothing_away() -> None:
    queue: EventQueue[int] = EventQueue(3)
    queue.bind(asyncio.get_running_loop())
    reader = asyncio.ensure_future(anext(queue))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    queue.put(5)
    assert await anext(queue) == 5


async def test_an_attempt_has_a_deadline_and_turns_errors_into_none(thread: TrioThread) -> None:
    assert await thread.call(attempt, 5.0, answer) == 42
    assert await thread.call(attempt, 5.0, die) is None
    assert await thread.call(attempt, 0.01, trio.sleep_forever) is None
