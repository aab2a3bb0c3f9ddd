"""Play an environment in several processes, as many as its rollouts keep busy.

Invariants: tasks and prompts come from the first process, which is there from start() on; as many again start
when all are busy, and one that is given up costs no rollout but its own.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ...protocol.recent import RecentDict
from ..tasks import end_tasks
from .environment import (
    Branch,
    Demonstration,
    Environment,
    EnvironmentFailed,
    EnvironmentGivenUp,
    Episode,
    Policy,
    Score,
    Split,
    Task,
)
from .stop_strings import StopStrings

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_PROCESSES = 8
CORES_PER_PROCESS = 4
"""Cores of the machine for each process: the others are for engines and for training."""
LOOK_S = 2.0
"""Pause between two looks at whether all processes are busy."""
LEAD = 8
"""Rollouts that a task's process may have more of than the least busy one, before another prepares it, too."""
MOST_TASKS = 1024
"""Tasks whose process is remembered."""


def most_processes() -> int:
    """Return the number of processes that an environment may have on this machine."""
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // CORES_PER_PROCESS))


class HostedProcess(Environment, Protocol):
    """An environment in a process of its own: HostedEnvironment, or a fake in tests."""

    @property
    def is_busy(self) -> bool:
        """Whether its code has run much of the time lately."""
        ...


@dataclass(eq=False)
class _Member:
    """A process of a pool."""

    process: HostedProcess
    under_way: int = 0
    """Rollouts that it plays or scores."""


class EnvironmentPool:
    """An Environment in up to `most` processes."""

    def __init__(self, make: Callable[[], HostedProcess], most: int) -> None:
        """`make` makes the environment in another process, not started."""
        self._make = make
        self._most = most
        self._first = make()
        self._members = [_Member(self._first)]
        self._players = RecentDict[int, _Member](MOST_TASKS)
        """Task -> process that has prepared it."""
        self._growing: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """See Environment."""
        return self._first.name

    @property
    def status(self) -> str:
        """See Environment."""
        return next((one.process.status for one in self._members if one.process.status), "")

    @property
    def judge_fault(self) -> str:
        """See Environment."""
        return self._first.judge_fault

    @property
    def stops(self) -> StopStrings | None:
        """See Environment."""
        return self._first.stops

    async def start(self) -> None:
        """Start the first process. Raises EnvironmentFailed, StorageError."""
        await self._first.start()
        if self._most > 1:
            self._growing = asyncio.create_task(self._grow(), name="environment processes")

    async def close(self) -> None:
        """End all processes."""
        await end_tasks(self._growing)
        await asyncio.gather(*(member.process.close() for member in self._members))

    async def task(self, index: int, split: Split = "train") -> Task:
        """See Environment."""
        return await self._first.task(index, split)

    async def prompt(self, task: Task) -> list[int]:
        """See Environment."""
        return await self._first.prompt(task)

    async def demonstration(self, task: Task) -> Demonstration | None:
        """See Environment."""
        return await self._first.demonstration(task)

    async def run(self, task: Task, policy: Policy) -> Episode:
        """See Environment."""
        return await self._ask(task, lambda member: member.run(task, policy))

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """See Environment."""
        return await self._ask(task, lambda member: member.score(task, branches))

    async def _ask(self, task: Task, ask: Callable[[HostedProcess], Awaitable[T]]) -> T:
        """Have a process play: the task's, which has prepared it for its group, or the least busy one."""
        while True:
            member = self._player(task)
            member.under_way += 1
            try:
                return await ask(member.process)
            except EnvironmentGivenUp:
                if member.process is self._first:
                    raise
                if member in self._members:
                    await self._drop(member)
            finally:
                member.under_way -= 1

    async def _drop(self, member: _Member) -> None:
        """Close a process that was given up, and forget it."""
        self._members.remove(member)
        for task in [task for task, player in self._players.items() if player is member]:
            del self._players[task]
        await member.process.close()

    def _player(self, task: Task) -> _Member:
        least = min(self._members, key=lambda member: member.under_way)
        player = self._players.get(task.index)
        if player is not None and player.under_way <= least.under_way + LEAD:
            return player
        self._players[task.index] = least
        return least

    async def _grow(self) -> None:
        """Start as many processes again whenever all are busy."""
        while True:
            await asyncio.sleep(LOOK_S)
            more = min(len(self._members), self._most - len(self._members))
            if not more or not all(member.process.is_busy for member in self._members):
                continue
            started = await asyncio.gather(*(self._start_another() for _ in range(more)))
            if not all(started):
                return
            logger.info("environment %s has %d processes", self.name, len(self._members))

    async def _start_another(self) -> bool:
        """Start another process; return whether it works."""
        process = self._make()
        try:
            await process.start()
        except EnvironmentFailed as error:
            logger.warning("environment %s gets no further process: %s", self.name, error)
            await process.close()
            return False
        except BaseException:  # also when cancelled: the process would stay
            await process.close()
            raise
        self._members.append(_Member(process))
        return True
