"""The rings of one stage: a newer plan makes a new ring, and a node that keeps one incomplete is reported."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from support.ring_cases import SHAPE
from support.waiting import until

from primerl.node.p2p.rpc import Refused
from primerl.node.pipeline.ring import RingFault
from primerl.node.worker.stage import AHEAD, RingSupervisor
from primerl.node.worker.stage_offers import AssignedPlan
from primerl.protocol.errors import Reason
from primerl.protocol.pipelines import PipelinePlan, Stage

NODES = [bytes([number]) * 32 for number in range(4)]


def planned(generation: int = 1, third: int = 2) -> AssignedPlan:
    """A plan of three stages; we are the first."""
    nodes = (NODES[0], NODES[1], NODES[third])
    stages = tuple(Stage(node, 2 * rank, 2 * rank + 2) for rank, node in enumerate(nodes))
    return AssignedPlan(PipelinePlan(b"g" * 32, generation, stages, (), SHAPE), b"sealed", 0)


class FakeRing:
    """A ring that a test breaks."""

    def __init__(self, planned: AssignedPlan) -> None:
        self.plan = planned.plan
        self.epoch = -1
        self.fault: RingFault | None = RingFault(2, "cannot be reached")
        self.up = asyncio.Event()
        self.down = asyncio.Event()
        self.runs = False
        self.asked: list[tuple[int, int, int]] = []
        self.answers: list[Exception] = []

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        self.runs = True
        try:
            yield
        finally:
            self.runs = False

    async def wait_healthy(self) -> None:
        await self.up.wait()

    def begin(self) -> int:
        self.epoch += 1
        self.fault = None
        self.down.clear()
        return self.epoch

    async def wait_failed(self) -> RingFault:
        await self.down.wait()
        assert self.fault is not None
        return self.fault

    def fall(self, fault: RingFault) -> None:
        self.fault = fault
        self.up.clear()
        self.down.set()

    async def prepare(self, rank: int, policy_epoch: int, version: int, *, deadline: float) -> None:
        self.asked.append((rank, policy_epoch, version))
        if self.answers:
            raise self.answers.pop(0)


class FakeAcceptor:
    """Knows which ring it lets lines into."""

    def __init__(self) -> None:
        self.ring: Any = None

    def attach(self, ring: Any, prepare: Any = None) -> None:
        self.ring = ring

    def detach(self, ring: Any) -> None:
        assert self.ring is ring
        self.ring = None


class Bench:
    """A chain over fakes."""

    def __init__(self, stall_s: float = 0.05, patience_s: float = 60.0) -> None:
        self.rings: list[FakeRing] = []
        self.acceptor = FakeAcceptor()
        self.reported: list[bytes] = []
        self.newest: AssignedPlan | None = None
        self.reachable = dict.fromkeys(NODES, True)
        acceptor: Any = self.acceptor
        self.chain = RingSupervisor(
            planned(),
            self._make,
            acceptor,
            self._complain,
            self._reach,
            lambda: self.newest,
            stall_s=stall_s,
            patience_s=patience_s,
        )

    def _make(self, planned: AssignedPlan) -> Any:
        self.rings.append(FakeRing(planned))
        return self.rings[-1]

    def _complain(self, nodes: Iterable[bytes]) -> None:
        self.reported.extend(nodes)

    async def _reach(self, node: bytes) -> bool:
        return self.reachable[node]

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["Bench"]:
        task = asyncio.create_task(self.chain.run())
        try:
            await until(lambda: bool(self.rings))
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert self.acceptor.ring is None
            assert not any(ring.runs for ring in self.rings)


async def test_a_newer_plan_is_a_new_ring_and_waiters_for_the_old_one_wait_for_it() -> None:
    async with Bench(stall_s=60.0).running() as bench:
        waiting = asyncio.create_task(bench.chain.wait_whole())
        await until(lambda: bench.acceptor.ring is bench.rings[0])
        bench.chain.use(planned(2, third=3))
        await until(lambda: len(bench.rings) == 2 and bench.acceptor.ring is bench.rings[1])
        assert [ring.runs for ring in bench.rings] == [False, True]
        bench.rings[0].up.set()
        await asyncio.sleep(0.02)
        assert not waiting.done()
        bench.rings[1].up.set()
        assert await waiting == 0
        broken = asyncio.create_task(bench.chain.wait_broken(0))
        await asyncio.sleep(0.02)
        assert not broken.done()
        bench.chain.use(planned(3))  # that is a break, too
        await asyncio.wait_for(broken, 60.0)


async def test_a_node_out_of_reach_is_reported_and_one_that_only_starts_is_not() -> None:
    async with Bench().running() as bench:
        waiting = asyncio.create_task(bench.chain.wait_whole())
        await asyncio.sleep(0.15)
        assert bench.reported == []
        bench.reachable[NODES[2]] = False
        await until(lambda: bool(bench.reported))
        assert set(bench.reported) == {NODES[2]}
        waiting.cancel()


async def test_a_node_that_starts_for_ever_is_reported() -> None:
    async with Bench(patience_s=0.1).running() as bench:
        waiting = asyncio.create_task(bench.chain.wait_whole())
        await until(lambda: bool(bench.reported))
        waiting.cancel()


async def test_a_stage_that_falls_silent_after_a_good_start_is_reported_though_its_node_is_there() -> (
    None
):
    async with Bench(stall_s=0.5).running() as bench:
        bench.rings[0].up.set()
        epoch = await bench.chain.wait_whole()
        bench.rings[0].fall(RingFault(2, "stalls"))
        await bench.chain.wait_broken(epoch)
        assert bench.reported == []
        waiting = asyncio.create_task(bench.chain.wait_whole())
        await until(lambda: bool(bench.reported))
        assert set(bench.reported) == {NODES[2]}
        waiting.cancel()


async def test_a_stage_that_breaks_the_ring_again_and_again_is_reported() -> None:
    async with Bench(stall_s=60.0).running() as bench:
        for _ in range(3):
            assert bench.reported == []
            bench.rings[0].up.set()
            epoch = await bench.chain.wait_whole()
            bench.rings[0].fall(RingFault(1, "no such version"))
            await bench.chain.wait_broken(epoch)
        assert bench.reported == [NODES[1]]


async def test_our_own_fault_is_nobody_elses() -> None:
    async with Bench().running() as bench:
        bench.rings[0].fault = RingFault(0, "the engine is not there")
        waiting = asyncio.create_task(bench.chain.wait_whole())
        await asyncio.sleep(0.15)
        assert bench.reported == []
        waiting.cancel()


async def test_stages_are_asked_until_all_are_ready_and_anew_under_a_newer_plan() -> None:
    async with Bench(stall_s=60.0).running() as bench:
        bench.rings[0].answers = [Refused(Reason.NOT_YET), Refused(Reason.NOT_YET)]
        assert await bench.chain.prepare((0, 5)) == 5
        assert sorted(bench.rings[0].asked) == [(1, 0, 5)] * 2 + [(2, 0, 5)] * 2
        bench.rings[0].answers = [Refused(Reason.NOT_YET)] * 1000
        asking = asyncio.create_task(bench.chain.prepare((0, 6)))
        await asyncio.sleep(0.02)
        bench.chain.use(planned(2, third=3))
        assert await asking == 6
        assert bench.rings[1].asked == [(1, 0, 6), (2, 0, 6)]


async def test_a_stage_that_is_further_says_so() -> None:
    async with Bench().running() as bench:
        bench.rings[0].answers = [Refused(Reason.ROLLBACK)]
        assert await bench.chain.prepare((0, 5)) == AHEAD


async def test_a_stage_that_is_never_ready_is_reported() -> None:
    async with Bench(patience_s=0.0).running() as bench:
        bench.rings[0].answers = [Refused(Reason.NOT_YET)]
        assert await bench.chain.prepare((0, 5)) == 5
        assert bench.reported == [NODES[1]]


async def test_after_a_break_a_fresh_seal_of_the_same_plan_is_a_new_ring() -> None:
    async with Bench(stall_s=60.0).running() as bench:
        bench.rings[0].up.set()
        epoch = await bench.chain.wait_whole()
        bench.newest = replace(planned(), sealed=b"sealed anew")
        await asyncio.sleep(0.02)
        assert len(bench.rings) == 1  # it does not break a ring by itself
        bench.rings[0].fall(RingFault(1, "the line was lost"))
        await bench.chain.wait_broken(epoch)
        await until(lambda: len(bench.rings) == 2)
        assert bench.chain.planned.sealed == b"sealed anew"
