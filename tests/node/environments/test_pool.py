"""An environment has as many processes as it keeps busy."""

import asyncio
import gc
import weakref
from collections.abc import Sequence

import pytest
from support.counting_environment import CountingEnvironment
from support.virtual_time import on_virtual_time

from primerl.node.environments import pool
from primerl.node.environments.environment import (
    Branch,
    EnvironmentFailed,
    EnvironmentGivenUp,
    Score,
    Task,
)
from primerl.node.environments.pool import LOOK_S, EnvironmentPool


class Process(CountingEnvironment):
    """A process that is as busy as a test says."""

    is_busy = False
    is_given_up = False
    starts = True
    is_closed = False

    def __init__(self) -> None:
        super().__init__()
        self.scored: list[int] = []

    async def start(self) -> None:
        if not self.starts:
            raise EnvironmentFailed("no memory")

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        if self.is_given_up:
            raise EnvironmentGivenUp("it does not stay up")
        await asyncio.sleep(0.01)
        self.scored.append(task.index)
        return Score(1.0)

    async def close(self) -> None:
        self.is_closed = True


class World:
    """A pool and its processes."""

    def __init__(self, most: int = 5) -> None:
        self.processes: list[Process] = []
        self.next_starts = True
        self.pool = EnvironmentPool(self.make, most)

    def make(self) -> Process:
        process = Process()
        process.starts = self.next_starts
        self.processes.append(process)
        return process

    async def score(self, *indices: int) -> None:
        for index in indices:
            await self.pool.score(await self.pool.task(index), [])

    async def become_busy(self) -> None:
        """Make all processes busy until the pool has looked at them."""
        for process in self.processes:
            process.is_busy = True
        await asyncio.sleep(1.5 * LOOK_S)


@on_virtual_time
async def test_another_process_starts_when_all_are_busy_up_to_the_most() -> None:
    world = World()
    await world.pool.start()
    await asyncio.sleep(10 * LOOK_S)
    assert len(world.processes) == 1
    await world.become_busy()
    assert len(world.processes) == 2
    await asyncio.sleep(10 * LOOK_S)
    assert len(world.processes) == 2, "the second one is not busy"
    await world.become_busy()
    assert len(world.processes) == 4, "as many again"
    await world.become_busy()
    await world.become_busy()
    assert len(world.processes) == 5
    await world.pool.close()
    assert all(process.is_closed for process in world.processes)


@on_virtual_time
async def test_the_rollouts_of_a_task_go_to_one_process_and_tasks_to_the_least_busy_one() -> None:
    world = World(most=2)
    await world.pool.start()
    await world.become_busy()
    tasks = [task for task in (0, 2, 4, 6) for _ in range(4)]
    await asyncio.gather(*(world.score(task) for task in tasks))
    first, second = world.processes
    assert sorted(first.scored) == [0] * 4 + [4] * 4
    assert sorted(second.scored) == [2] * 4 + [6] * 4
    await world.pool.close()


@on_virtual_time
async def test_many_rollouts_of_one_task_are_scored_by_all_processes() -> None:
    world = World(most=2)
    await world.pool.start()
    await world.become_busy()
    await asyncio.gather(*(world.score(7) for _ in range(64)))
    assert min(len(process.scored) for process in world.processes) > 16
    await world.pool.close()


@pytest.mark.usefixtures("small_heap")
@on_virtual_time
async def test_another_process_that_is_given_up_costs_no_rollout() -> None:
    world = World(most=2)
    await world.pool.start()
    await world.become_busy()
    first, second = world.processes
    second.is_given_up = True
    await asyncio.gather(world.score(1), world.score(2))
    assert first.scored == [1, 2]
    assert second.is_closed
    closed = weakref.ref(second)
    del second, world.processes[1]
    gc.collect()
    assert closed() is None, "the pool does not keep it"
    await world.become_busy()
    assert len(world.processes) == 2, "its place is free again"
    first.is_given_up = True
    with pytest.raises(EnvironmentGivenUp):
        await world.score(0)
    await world.pool.close()


@on_virtual_time
async def test_without_memory_for_another_process_the_first_goes_on_alone() -> None:
    world = World()
    await world.pool.start()
    world.next_starts = False
    await world.become_busy()
    await world.become_busy()
    await world.score(0, 1)
    assert [process.is_closed for process in world.processes] == [False, True]
    assert world.processes[0].scored == [0, 1]
    await world.pool.close()


@pytest.mark.parametrize(("cores", "most"), [(None, 1), (2, 1), (8, 2), (16, 4), (128, 8)])
def test_processes_leave_cores_to_engines_and_to_training(
    cores: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool.os, "cpu_count", lambda: cores)
    assert pool.most_processes() == most
