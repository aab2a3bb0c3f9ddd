"""Requests that enter a full engine several at a time."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from primerl.node.inference.prefill_batcher import SHARE, PrefillBatcher

ROOM = 2 * SHARE


class Requests:
    """Requests that stay in the engine until they are told to end."""

    def __init__(self, batcher: PrefillBatcher) -> None:
        self.batcher = batcher
        self.inside: list[int] = []
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.entered: dict[int, asyncio.Event] = {}
        self._ends: dict[int, asyncio.Event] = {}

    async def start(self, *numbers: int) -> None:
        for number in numbers:
            self.entered[number], self._ends[number] = asyncio.Event(), asyncio.Event()
            self.tasks[number] = asyncio.create_task(self._request(number))
        await settled()

    async def end(self, *numbers: int) -> None:
        for number in numbers:
            self._ends[number].set()
        await settled()

    async def cancel(self, *numbers: int) -> None:
        for number in numbers:
            self.tasks[number].cancel()
        await settled()

    async def _request(self, number: int) -> None:
        async with self.batcher.admitted():
            self.inside.append(number)
            self.entered[number].set()
            try:
                await self._ends[number].wait()
            finally:
                self.inside.remove(number)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@asynccontextmanager
async def full(*, most_wait_s: float = 3600.0) -> AsyncGenerator[Requests]:
    """An engine with as many requests as it has room for."""
    requests = Requests(PrefillBatcher(ROOM, most_wait_s=most_wait_s))
    await requests.start(*range(ROOM))
    try:
        yield requests
    finally:
        await requests.cancel(*requests.tasks)


async def test_requests_enter_at_once_while_the_engine_is_not_full() -> None:
    requests = Requests(PrefillBatcher(ROOM))
    await requests.start(*range(ROOM))
    assert requests.inside == list(range(ROOM))
    assert requests.batcher.waiting == 0
    await requests.end(*range(ROOM))


async def test_a_full_engine_takes_requests_once_a_share_of_its_sequences_has_ended() -> None:
    async with full() as requests:
        await requests.start(100, 101, 102)
        await requests.end(0)
        assert requests.batcher.waiting == 3
        await requests.end(1)
        assert requests.inside[-2:] == [100, 101]
        assert requests.batcher.waiting == 1


async def test_requests_that_come_while_it_is_open_enter_until_it_is_full_again() -> None:
    async with full() as requests:
        await requests.end(0, 1)
        await requests.start(100)
        await requests.start(101)
        await requests.start(102)
        assert requests.inside[-2:] == [100, 101]
        assert requests.batcher.waiting == 1


async def test_a_request_that_has_waited_long_enough_takes_what_room_there_is() -> None:
    async with full(most_wait_s=0.02) as requests:
        await requests.end(0)
        await requests.start(100)
        await asyncio.wait_for(requests.entered[100].wait(), 5)


async def test_a_request_that_has_waited_long_enough_enters_as_the_next_sequence_ends() -> None:
    async with full(most_wait_s=0.0) as requests:
        await requests.start(100)
        await asyncio.sleep(0.01)
        assert 100 not in requests.inside
        await requests.end(0)
        assert 100 in requests.inside


async def test_a_request_that_is_cancelled_while_it_waits_gives_up_its_place() -> None:
    async with full() as requests:
        await requests.start(100, 101)
        await requests.cancel(100)
        await requests.end(0, 1)
        assert 101 in requests.inside
        assert len(requests.inside) == ROOM - 1


async def test_a_request_cancelled_as_it_is_let_in_leaves_its_room_to_the_next() -> None:
    async with full() as requests:
        await requests.start(100, 101, 102)
        for number in (0, 1):
            requests.tasks[number].cancel()
        await asyncio.sleep(0)  # 100 and 101 are let in and do not know yet
        requests.tasks[100].cancel()
        await settled()
        assert 101 in requests.inside
        assert requests.batcher.waiting + len(requests.inside) == ROOM
        await requests.end(2, 3)
        assert 102 in requests.inside


@pytest.mark.parametrize("room", [1, 2, SHARE])
async def test_a_small_engine_takes_a_request_as_soon_as_a_sequence_ends(room: int) -> None:
    requests = Requests(PrefillBatcher(room, most_wait_s=3600.0))
    await requests.start(*range(room), 100)
    assert 100 not in requests.inside
    await requests.end(0)
    assert 100 in requests.inside
    await requests.cancel(*requests.tasks)
