"""end_tasks(): tasks are cancelled and have ended when it returns."""

import asyncio

import pytest

from primerl.node.tasks import end_tasks


async def test_tasks_have_ended_and_an_error_stays_with_its_task() -> None:
    cleaned = asyncio.Event()

    async def clean_up_slowly() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned.set()

    async def fail() -> None:
        raise OSError("gone")

    slow, failed = asyncio.create_task(clean_up_slowly()), asyncio.create_task(fail())
    await asyncio.sleep(0)
    await end_tasks(slow, None, failed)
    assert cleaned.is_set()
    assert slow.cancelled()
    with pytest.raises(OSError, match="gone"):
        failed.result()
    await end_tasks(slow)
    await end_tasks()


async def test_a_cancellation_of_the_caller_is_not_lost() -> None:
    async def ignore_once() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)

    stubborn = asyncio.create_task(ignore_once())
    await asyncio.sleep(0)
    ending = asyncio.create_task(end_tasks(stubborn))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    await stubborn
