"""Contributors that take leases and bring nothing, until they are cancelled."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from support.hostile import Rogue
from support.swarm import Swarm
from support.waiting import until

from primerl.node.p2p.rpc import Refused
from primerl.node.p2p.transport import TransportError
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.leases import Lease, TaskRef
from primerl.protocol.messages import LeaseReply, LeaseRequest, WorkerStats
from primerl.protocol.rollouts import WITHDRAWN, GroupRecord, RolloutRecord

MARGIN_S = 1.0
"""Time before a lease's deadline at which it is answered."""
FAILURE = f"{WITHDRAWN}it was drawn again"

Answer = Callable[["Contributor", Lease], tuple[GroupRecord, ...] | None]


def failures(contributor: "Contributor", lease: Lease) -> tuple[GroupRecord, ...]:
    """Report every rollout as failed."""
    del contributor
    return tuple(failed(lease, task) for task in lease.tasks)


def failed(lease: Lease, task: TaskRef) -> GroupRecord:
    """Make a group of nothing but failures."""
    rollouts = (RolloutRecord((), 0.0, FAILURE),) * lease.group_size
    return GroupRecord(task.index, task.digest, rollouts)


class Contributor(Rogue):
    """A key that works honestly for a while, and then takes all it is given."""

    def __init__(
        self,
        swarm: Swarm,
        name: str,
        *,
        environments: tuple[int, ...] | None = None,
        wanted: int = 4,
    ) -> None:
        super().__init__(swarm, name)
        self.environments = environments
        self.wanted = wanted
        self.taken = 0
        """Groups that it was leased after it had stopped working."""
        self.obstacle = ""
        """Why it was leased nothing at last."""

    async def earn_groups(self, groups: int) -> None:
        """Say hello and work until so many groups are accepted."""
        await self.hello()
        done = 0
        while done < groups:
            lease, sealed = await self.lease()
            await self.submit(self.bundle(sealed, await self.play(lease)), lease.lease_id)
            done += (await self.verdict(lease.lease_id)).accepted // lease.group_size

    async def hold(self) -> None:
        """Take leases, keep them almost to their deadlines, then answer with failures."""
        await self._abuse(until_deadline=True)

    async def burn(self) -> None:
        """Take leases and answer each at once with failures."""
        await self._abuse(until_deadline=False)

    async def work_at_pace_of(self, name: str) -> None:
        """Work honestly at the environments that it says it can play, as fast as the worker `name`."""
        while True:
            for lease, sealed in await self.take():
                due = self._generated(name) + len(lease.tasks) * lease.group_size
                await until(lambda due=due: self._generated(name) >= due)
                with suppress(Refused, TransportError, TimeoutError):
                    bundle = self.bundle(sealed, await self.play(lease))
                    await self.submit(bundle, lease.lease_id)
            await asyncio.sleep(0.02)

    def _generated(self, name: str) -> int:
        """Return the number of completions that a worker's engine began."""
        events = self.swarm.fakes.events
        return sum(event.name == name and event.kind == "generate" for event in events)

    async def look(self) -> None:
        """Take leases and hand them back, for ever."""
        while True:
            await self.take(holding=())
            await asyncio.sleep(0.02)

    async def _abuse(self, *, until_deadline: bool) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                for lease, sealed in await self.take():
                    tasks.create_task(self._fail(lease, sealed, until_deadline))
                await asyncio.sleep(0.02)

    async def _fail(self, lease: Lease, sealed: bytes, until_deadline: bool) -> None:
        if until_deadline:
            await asyncio.sleep(max(0.0, lease.deadline - time.time() - MARGIN_S))
        with suppress(Refused, TransportError, TimeoutError):
            bundle = self.bundle(sealed, failures(self, lease))
            await self.submit(bundle, lease.lease_id)

    async def take(self, holding: tuple[int, ...] | None = None) -> Sequence[tuple[Lease, bytes]]:
        """Ask for leases once."""
        request = LeaseRequest(self.wanted, WorkerStats(0), holding, None, self.environments)
        try:
            reply = await self.ask(request, LeaseReply)
        except (Refused, TransportError, TimeoutError) as error:
            self.obstacle = str(error)
            return []
        self.obstacle = reply.why
        leases = [
            (unseal(one, Purpose.LEASE, Lease, now=0, signer=self.trainer).body, one)
            for one in reply.leases
        ]
        self.taken += sum(len(lease.tasks) for lease, _ in leases)
        return leases
