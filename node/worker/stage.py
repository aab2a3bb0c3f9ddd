"""Later stage of a pipeline: its weights follow the requests of stage 0; it takes no leases.

The trainer defines a version: stage 0 only names one, and loaded weights are proved as on every node.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import RunManifest
from ...protocol.messages import PrepareVersion
from ...protocol.pipelines import PipelinePlan
from ..inference.engine import Engine
from ..p2p.heads import HeadStore
from ..p2p.rpc import Refused
from ..p2p.transport import TransportError
from ..pipeline.acceptor import LinkAcceptor
from ..pipeline.ring import Ring, RingFault
from ..tasks import end_tasks
from .stage_offers import AssignedPlan
from .weight_sync import WeightSync

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 30.0
PAUSE_S = 0.1
PAUSE_MAX_S = 2.0
PATIENCE_S = 600.0
"""Time for a stage to fetch its part of a version, at worst all of it."""
AHEAD = 2**53
"""Version that is returned for a stage that is ahead of the requested one."""


async def all_ready(
    ring: Ring,
    order: tuple[int, int],
    complain: Callable[[Iterable[bytes]], None],
    *,
    patience_s: float = PATIENCE_S,
) -> int:
    """Wait until all other stages have (policy epoch, version) `order` ready.

    Returns the version, or AHEAD if a stage is further. `complain` is called with stages that are not ready
    after `patience_s`. Callers cancel this once another plan holds.
    """
    ranks = range(1, len(ring.plan.stages))
    async with asyncio.TaskGroup() as tasks:
        waits = [
            tasks.create_task(_ready(ring, rank, order, complain, patience_s)) for rank in ranks
        ]
    return max(task.result() for task in waits)


async def _ready(
    ring: Ring,
    rank: int,
    order: tuple[int, int],
    complain: Callable[[Iterable[bytes]], None],
    patience_s: float,
) -> int:
    node = ring.plan.stages[rank].node
    pause, began = PAUSE_S, time.monotonic()
    while True:
        try:
            await ring.prepare(rank, *order, deadline=ASK_TIMEOUT_S)
            return order[1]
        except (TransportError, Refused, RemoteProtocolError) as error:
            if isinstance(error, Refused) and error.reason is Reason.ROLLBACK:
                return AHEAD
            logger.info("stage %s has not got version %d: %s", short(node), order[1], error)
        if time.monotonic() - began > patience_s:
            complain([node])
            began = time.monotonic()
        await asyncio.sleep(pause)
        pause = min(pause * 1.6, PAUSE_MAX_S)


RING_AGAIN_S = 0.1
"""Pause between two checks of a ring that breaks as soon as it is complete."""
LOOK = 1 / 8
"""Pause between two checks of the stages' answers, as a share of stall_s."""
STEADY_S = 30.0
"""Age from which on a ring does not count as one that breaks repeatedly."""
MOST_BREAKS = 3
"""Breaks in a row after which a stage is reported even if it can be reached."""

T = TypeVar("T")

Prepare = Callable[[PrepareVersion], Awaitable[None]]


@dataclass
class _Turn:
    """Lifetime of one ring."""

    ring: Ring
    over: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = field(default_factory=time.monotonic)
    was_whole: bool = False


class RingSupervisor:
    """The other stages, over all rings to come; run() maintains the ring."""

    def __init__(
        self,
        planned: AssignedPlan,
        make: Callable[[AssignedPlan], Ring],
        acceptor: LinkAcceptor,
        complain: Callable[[Iterable[bytes]], None],
        reachable: Callable[[bytes], Awaitable[bool]],
        newest: Callable[[], AssignedPlan | None],
        *,
        stall_s: float,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`complain` reports stages that keep the ring from recovering for `stall_s` to the trainer.

        `newest` returns the newest plan, possibly the current one in a fresh seal, since seals expire.

        `patience_s` is the time for stages that can be reached and start: an engine, and the weights of the
        first version.
        """
        self.planned = planned
        self.prepare_own: Prepare = _not_yet
        """Function that prepares a version on this node when stage 0 asks."""
        self._make = make
        self._acceptor = acceptor
        self._complain = complain
        self._reachable = reachable
        self._newest = newest
        self._stall_s = stall_s
        self._patience_s = patience_s
        self._turn: _Turn | None = None
        self._there = asyncio.Event()
        self._breaks: Counter[bytes] = Counter()

    @property
    def ring(self) -> Ring | None:
        """Current ring; None while there is none."""
        return self._turn.ring if self._turn else None

    @property
    def plan(self) -> PipelinePlan:
        """Current plan."""
        return self.planned.plan

    def use(self, planned: AssignedPlan) -> None:
        """Continue with a newer plan in which our stage is the same."""
        self.planned = planned
        self._breaks.clear()
        self._end()

    async def run(self) -> None:
        """Keep a ring of the newest plan, until cancelled."""
        while True:
            ring = self._make(self.planned)
            turn = _Turn(ring)
            async with ring.running():
                self._acceptor.attach(ring, self._prepare_own)
                self._turn = turn
                self._there.set()
                try:
                    await turn.over.wait()
                finally:
                    self._end()
                    self._acceptor.detach(ring)

    def _end(self) -> None:
        """End the current ring: waiters go on to the next one."""
        if self._turn is not None:
            self._turn.over.set()
        self._turn = None
        self._there.clear()

    async def _prepare_own(self, request: PrepareVersion) -> None:
        await self.prepare_own(request)

    async def wait_whole(self) -> int:
        """Wait, as stage 0, for a ring with all stages, and begin an epoch of it."""
        while True:
            turn = await self._current()
            if await self._is_whole(turn):
                return turn.ring.begin()

    async def wait_broken(self, epoch: int) -> None:
        """Wait until the ring of that epoch has failed."""
        turn = await self._current()
        if turn.ring.epoch == epoch:
            await self._until_broken(turn)

    async def prepare(self, order: tuple[int, int]) -> int:
        """Run all_ready(), as stage 0; start it anew with every new plan."""
        while True:
            turn = await self._current()
            asking = all_ready(turn.ring, order, self._complain, patience_s=self._patience_s)
            answer = await _unless_over(turn, asking)
            if answer is not None:
                return answer

    async def watch(self) -> None:
        """Report, as a later stage, the stages that keep the ring incomplete, until cancelled."""
        while True:
            turn = await self._current()
            if await self._is_whole(turn):
                await self._until_broken(turn)
            await asyncio.sleep(RING_AGAIN_S)

    async def _current(self) -> _Turn:
        while self._turn is None:
            await self._there.wait()
        return self._turn

    async def _is_whole(self, turn: _Turn) -> bool:
        """Wait until the ring is complete; return False once another ring has replaced it."""
        looking = asyncio.create_task(self._keep_looking(turn))
        try:
            healthy = await _unless_over(turn, _true(turn.ring.wait_healthy()))
        finally:
            await end_tasks(looking)
        turn.was_whole |= bool(healthy)
        return bool(healthy)

    async def _keep_looking(self, turn: _Turn) -> None:
        began = time.monotonic()
        while not turn.over.is_set():
            await asyncio.sleep(self._stall_s * LOOK)
            await self._look(turn, time.monotonic() - began)

    async def _look(self, turn: _Turn, waited_s: float) -> None:
        """Report the stages that keep a ring from recovering: silent ones, else known failures.

        A node that answers may still come back by itself, or be starting.
        """
        plan, rank = self.plan, self.planned.rank
        ring = {stage.node for stage in plan.stages}
        neighbours = ring if rank == 0 else {plan.before(rank), plan.after(rank)}
        others = sorted(neighbours - {plan.stages[rank].node})
        answers = await asyncio.gather(*(self._reachable(node) for node in others))
        silent = [node for node, answers in zip(others, answers, strict=True) if not answers]
        starting = not turn.was_whole and time.monotonic() - turn.began < self._patience_s
        fault = turn.ring.fault
        if silent:
            self._report(silent, "no answer")
        elif rank == 0 and fault is not None and waited_s >= self._stall_s and not starting:
            self._report(self._node(fault), fault.reason)

    async def _until_broken(self, turn: _Turn) -> None:
        began = time.monotonic()
        fault = await _unless_over(turn, turn.ring.wait_failed())
        if fault is None:
            return
        logger.warning("the chain of %d stages broke: %s", len(self.plan.stages), fault.reason)
        fresh = self._newest()
        if fresh and fresh.name == self.planned.name and fresh.sealed != self.planned.sealed:
            self.use(fresh)
        nodes = self._node(fault)
        if not nodes or time.monotonic() - began > STEADY_S:
            self._breaks.clear()
            return
        self._breaks.update(nodes)
        if self._breaks[nodes[0]] >= MOST_BREAKS:
            self._breaks.clear()
            self._report(nodes, fault.reason)

    def _report(self, nodes: Sequence[bytes], words: str) -> None:
        if nodes:
            names = ", ".join(short(node) for node in nodes)
            logger.warning("reported to the trainer: %s (%s)", names, words)
            self._complain(nodes)

    def _node(self, fault: RingFault) -> list[bytes]:
        """Return the node at fault, if it is known and not this one."""
        if fault.rank is None or fault.rank == self.planned.rank:
            return []
        return [self.plan.stages[fault.rank].node]


async def _not_yet(request: PrepareVersion) -> None:
    raise RemoteProtocolError(Reason.NOT_YET, "this stage is still starting")


async def _true(waiting: Awaitable[Any]) -> bool:
    await waiting
    return True


async def _unless_over(turn: _Turn, waiting: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `waiting`; cancel it and return None once another ring replaces this."""
    work = asyncio.ensure_future(waiting)
    over = asyncio.ensure_future(turn.over.wait())
    try:
        await asyncio.wait({work, over}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        over.cancel()
        work.cancel()


ANSWER_S = 10.0
"""Time for a head and the chunks that it names.

After it stage 0 is told to ask again, since silence would look like a lost node.
"""
LOOK_S = 1.0


class StageRole:
    """Loops of one later stage."""

    def __init__(
        self,
        *,
        run: RunManifest,
        book: HeadStore,
        weight_sync: WeightSync,
        engine: Engine,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._answer_s = answer_s
        self._run = run
        self._book = book
        self._weight_sync = weight_sync
        self._engine = engine

    async def run(self) -> None:
        """Hold the stage until the run ends. Raises EngineError if the engine cannot be restarted."""
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(self._weight_sync.run())
            while not self._book.ended:
                version, last = self._engine.policy_version, self._run.max_steps
                await self._book.end_without_trainer(version, last)
                self._engine.stats()
                await self._book.wait_news(self._book.order(), LOOK_S)
            following.cancel()

    async def prepare(self, request: PrepareVersion) -> None:
        """Prepare a version.

        Raises:
            RemoteProtocolError: NOT_YET, ask again; ROLLBACK, this stage is further and does not go back.
        """
        order = (request.term, request.version)
        # only signed versions: a lying stage 0 could make us wait for one that never comes
        if not await self._book.wait(lambda: self._book.order() >= order, self._answer_s):
            raise RemoteProtocolError(Reason.NOT_YET, "no such version is known here yet")
        if await self._weight_sync.reach(order, self._answer_s):
            return
        current = self._weight_sync.order
        if current <= order:
            raise RemoteProtocolError(Reason.NOT_YET, "the weights are still on their way")
        if current[0] > request.term or self._engine.policy_version != request.version:
            raise RemoteProtocolError(Reason.ROLLBACK, f"this stage is at version {current[1]}")
