"""What becomes of a stage 0 that others call lost, and of its leases: it has work in its hands."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.bare_node import bare_services
from support.counting_environment import CountingEnvironment
from support.lease_cases import policy, task_digest
from support.offer_cases import (
    MODEL,
    NOW,
    PART,
    RUN,
    TRAINER,
    OfferNetwork,
    key,
    node,
    offer,
    opened,
    ranks,
    record,
)
from support.protocol_cases import refuses

from primerl.crypto.hashing import digest
from primerl.node.p2p.heads import HeadServer, HeadStore
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.rpc import receive
from primerl.node.storage.ledger import Ledger
from primerl.node.trainer import pipeline_coordinator
from primerl.node.trainer.audits import AuditQueue
from primerl.node.trainer.lease_book import LeaseBook
from primerl.node.trainer.requests import ControlHandler
from primerl.node.trainer.scheduler import LeaseScheduler, TaskSupply
from primerl.node.trainer.state import Progress
from primerl.node.trainer.submissions import SubmissionReceiver
from primerl.node.trainer.workers import WorkerRegistry
from primerl.protocol import messages
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import PeerRecord
from primerl.protocol.pipelines import PipelinePlan
from primerl.protocol.session import frame
from primerl.protocol.trust import TrustedRun
from primerl.protocol.version import WIRE_VERSION


@pytest.fixture
def world(tmp_path: Path) -> Iterator[OfferNetwork]:
    found = OfferNetwork(tmp_path)
    yield found
    found.ledger.close()


def plan_in(reply: messages.StageWait | messages.StagePlanned) -> PipelinePlan:
    """As opened(), by the clock on the wall."""
    return opened(reply, int(time.time()))


def trio(world: OfferNetwork) -> tuple[PipelinePlan, int, int, int]:
    """A plan of two stages, with the nodes: (plan, stage 0, stage 1, spare)."""
    plan = world.gather(1, 2, 3)
    head, last = ranks(plan)
    return plan, head, last, ({1, 2, 3} - {head, last}).pop()


# -- its stage -------------------------------------------------------------------------------------


def test_a_spare_takes_the_place_of_a_stage_0_that_falls_silent(world: OfferNetwork) -> None:
    plan, head, last, spare = trio(world)
    assert opened(world.offer(last, of=plan, lost=(head,))) == plan
    world.later(pipeline_coordinator.HEAD_S - 1)
    world.offer(spare)
    assert opened(world.offer(last, of=plan)) == plan
    world.later(1.0)
    after = opened(world.offer(last, of=plan))
    assert ranks(after) == [spare, last]
    assert (after.group, after.generation) == (plan.group, 1)
    assert isinstance(world.offer(head), messages.StageWait)


def test_silence_alone_takes_nothing_from_a_stage_0(world: OfferNetwork) -> None:
    plan, _, last, spare = trio(world)
    for _ in range(4):
        world.later(pipeline_coordinator.HEAD_S)
        assert isinstance(world.offer(spare), messages.StageWait)
        assert opened(world.offer(last, of=plan)) == plan
    assert world.coordinator.orphans() == []


def test_a_false_complaint_about_a_working_stage_0_costs_its_sender(world: OfferNetwork) -> None:
    plan, head, slanderer, spare = trio(world)
    world.offer(slanderer, of=plan, lost=(head,))
    world.later(1.0)
    after = opened(world.offer(head, of=plan))
    assert ranks(after) == [head, spare]
    assert isinstance(world.offer(slanderer), messages.StageWait)
    world.later(pipeline_coordinator.BENCH_S)
    assert world.coordinator.orphans() == []


def test_a_word_from_before_the_trainer_heard_stage_0_last_does_not_count_twice(
    world: OfferNetwork,
) -> None:
    """Nobody else is there: all connect again, and only a new complaint is weighed again."""
    plan = world.gather(1, 2)
    head, other = ranks(plan)
    world.offer(other, of=plan, lost=(head,))
    world.later(1.0)
    after = opened(world.offer(head, of=plan))
    assert (ranks(after), after.generation) == ([head, other], 1)
    world.later(1.0)
    assert opened(world.offer(head, of=after)) == after


def test_a_stage_0_that_one_stage_after_the_other_cannot_reach_goes(world: OfferNetwork) -> None:
    plan, head, first, second = trio(world)
    world.offer(first, of=plan, lost=(head,))
    world.later(1.0)
    after = opened(world.offer(head, of=plan))
    world.later(pipeline_coordinator.ALIVE_S + pipeline_coordinator.BENCH_S)
    for number in (head, second, first):
        world.offer(number)
    world.offer(second, of=after, lost=(head,))
    world.later(1.0)
    assert isinstance(world.offer(head, of=after), messages.StageWait)
    assert ranks(opened(world.offer(second))) == [first, second]


def test_both_neighbours_of_a_stage_0_are_believed(world: OfferNetwork) -> None:
    plan = world.gather(1, 2, 3, 4, world_size=3)
    head, middle, last = ranks(plan)
    spare = ({1, 2, 3, 4} - {head, middle, last}).pop()
    for number in (middle, last):
        world.offer(number, of=plan, lost=(head,), world_size=3)
    world.later(1.0)
    assert isinstance(world.offer(head, of=plan, world_size=3), messages.StageWait)
    assert ranks(opened(world.offer(last, world_size=3))) == [spare, middle, last]


def test_a_stage_0_does_not_keep_its_stage_by_starting_again_and_again(world: OfferNetwork) -> None:
    plan, head, last, spare = trio(world)
    for _ in range(pipeline_coordinator.MANY_RESTARTS):
        assert opened(world.offer(head)) == plan
        world.later(1.0)
        world.offer(spare)
        world.offer(last, of=plan, lost=(head,))
        world.coordinator.began(node(head))
    after = opened(world.offer(last, of=plan))
    assert ranks(after) == [spare, last]
    world.coordinator.left(node(last))
    assert isinstance(world.offer(head), messages.StageWait)
    assert opened(world.offer(spare)) == after


def test_a_word_against_stage_0_is_forgotten_with_the_plan(world: OfferNetwork) -> None:
    plan = world.gather(1, 2, 3, 4, world_size=3)
    head, middle, last = ranks(plan)
    spare = ({1, 2, 3, 4} - {head, middle, last}).pop()
    world.offer(middle, of=plan, lost=(head,), world_size=3)
    world.coordinator.left(node(last))
    world.later(1.0)
    for number in (head, middle, spare):
        after = opened(world.offer(number, world_size=3))
        assert (ranks(after), after.generation) == ([head, middle, spare], 1)


def test_a_node_that_a_stage_0_left_without_a_spare_waits_for_another(world: OfferNetwork) -> None:
    plan = world.gather(1, 2)
    head, other = ranks(plan)
    world.offer(other, of=plan, lost=(head,))
    world.later(pipeline_coordinator.HEAD_S)
    assert isinstance(world.offer(other, of=plan), messages.StageWait)


def test_a_stage_0_that_is_right_about_others_stays_as_long_as_it_brings_work(
    world: OfferNetwork,
) -> None:
    """All of them speak to the trainer, whose word against its word that is."""
    plan = world.gather(1, 2, 3, 4, 5, world_size=3)
    head, _, last = ranks(plan)
    for works in (True, False):
        lost = ranks(plan)[1]
        plan = opened(world.offer(head, of=plan, lost=(lost,), world_size=3))
        assert (ranks(plan)[0], ranks(plan)[2]) == (head, last)
        if works:
            world.coordinator.worked(node(head))
    world.offer(6, world_size=3)
    # nothing came of the second: it is perhaps its own fault
    assert isinstance(world.offer(head, of=plan, lost=(last,), world_size=3), messages.StageWait)


def test_work_of_a_node_that_leads_no_pipeline_excuses_no_node(world: OfferNetwork) -> None:
    plan, head, slanderer, _ = trio(world)
    world.offer(slanderer, of=plan, lost=(head,))
    world.later(1.0)
    world.offer(head, of=plan)
    world.coordinator.worked(node(slanderer))
    assert isinstance(world.offer(slanderer), messages.StageWait)
    world.coordinator.left(node(head))
    assert isinstance(world.offer(slanderer), messages.StageWait)


# -- its leases ------------------------------------------------------------------------------------


def test_a_node_that_led_a_pipeline_and_works_alone_since_is_no_orphan(world: OfferNetwork) -> None:
    _, head, last, _ = trio(world)
    world.coordinator.orphans()
    world.coordinator.left(node(head))
    world.coordinator.began(node(head))
    world.later(pipeline_coordinator.ALIVE_S + 1)
    world.offer(last)
    assert world.coordinator.orphans() == []


class Memory:
    """Implements Stream: one request, and what is answered."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.answer = b""

    async def read_exact(self, size: int) -> bytes:
        data, self._request = self._request[:size], self._request[size:]
        return data

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self.answer += bytes(data)

    async def finish(self) -> None:
        """Nothing more comes."""

    async def abort(self) -> None:
        """Nobody looks."""


def hundred(node: bytes | None) -> int:
    return 100


class Front:
    """A lease scheduler that nodes ask as they do over a network."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.ledger = Ledger(directory / "ledger.db", fsync=False)
        self.book = LeaseBook(policy(timeout_s=3600))
        for number in (1, 2, 3):
            self.ledger.admit(node(number), NOW)
        peers = PeerTable()
        for number in (1, 2, 3):
            body = PeerRecord(node(number), "inference", "1", ("10.0.0.1:1",), (), True)
            peers.learn(body, record(key(number)))
        unused = cast(Any, SimpleNamespace(progress=Progress()))
        heads = HeadServer(HeadStore(TrustedRun(RUN, TRAINER.node_id), self.ledger))
        registry = WorkerRegistry(
            bare_services(
                TRAINER,
                run_id=RUN,
                ledger=self.ledger,
                peers=peers,
                head_server=heads,
            ),
            b"",
            self.book,
            AuditQueue(),
            MODEL,
            clock=lambda: self.now,
        )
        publisher = SimpleNamespace(order=(0, 0))
        demand = SimpleNamespace(capacity=hundred, exhausted=lambda: False)
        self.scheduler = LeaseScheduler(
            registry,
            [TaskSupply(CountingEnvironment(), self.book)],
            cast(Any, publisher),
            cast(Any, demand),
        )
        self.requests = ControlHandler(
            self.scheduler, SubmissionReceiver(self.scheduler, unused, boot=0)
        )

    async def offer(
        self, number: int, of: PipelinePlan | None = None, lost: tuple[int, ...] = ()
    ) -> messages.StageWait | messages.StagePlanned:
        ways = {node(other): 10.0 for other in (1, 2, 3) if other != number}
        message = messages.OfferStage(offer(PART, round_trips=ways))
        if of is not None:
            gone = tuple(map(node, lost))
            message = messages.OfferStage(message.offer, of.group, of.generation, gone)
        stream = Memory(frame(message))
        await self.requests.handle(node(number), stream)
        kinds: Any = messages.StageWait | messages.StagePlanned
        return await receive(Memory(stream.answer), kinds)

    async def gather(self) -> tuple[PipelinePlan, int, int, int]:
        """As trio()."""
        for number in (1, 2, 3):
            await self.offer(number)
        self.now += 4.0
        await self.offer(1)
        replies = [await self.offer(number) for number in (1, 2, 3)]
        plan = next(plan_in(reply) for reply in replies if isinstance(reply, messages.StagePlanned))
        head, last = ranks(plan)
        return plan, head, last, ({1, 2, 3} - {head, last}).pop()

    def lease(self, number: int) -> int:
        """One to a node."""
        lease = self.book.grant(
            node(number),
            version=0,
            capacity=100,
            digest_of=lambda _, index: task_digest(index),
            seed=digest(b"seed"),
            now=time.time(),
        )
        assert lease is not None
        return lease.lease_id


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    found = Front(tmp_path)
    yield found
    found.ledger.close()


async def test_leases_of_a_stage_0_that_is_gone_go_to_others_long_before_they_run_out(
    front: Front,
) -> None:
    plan, head, last, spare = await front.gather()
    lease = front.lease(head)
    tasks = [task.index for task in front.book.held[lease].lease.tasks]
    assert front.scheduler.take_back(time.time()) == []
    await front.offer(last, plan, (head,))
    front.now += pipeline_coordinator.HEAD_S
    await front.offer(spare)
    after = plan_in(await front.offer(last, plan))
    assert ranks(after) == [spare, last]
    assert front.scheduler.take_back(time.time()) == []
    front.now += pipeline_coordinator.ALIVE_S - pipeline_coordinator.HEAD_S + 1
    (lost,) = front.scheduler.take_back(time.time())
    assert (lost.lease.lease_id, lost.node) == (lease, node(head))
    assert [task.index for task in front.book.held[front.lease(spare)].lease.tasks] == tasks
    late = Memory(frame(messages.SubmitOffer(digest(b"late"), 10, lease)))
    with refuses(Reason.LEASE_EXPIRED):
        await front.requests.handle(node(head), late)


async def test_a_false_word_robs_a_stage_0_of_no_lease(front: Front) -> None:
    """Two words do, of two stages: as when the way to it is cut. It is told, and others do its work."""
    plan, head, slanderer, spare = await front.gather()
    lease = front.lease(head)
    await front.offer(slanderer, plan, (head,))
    front.now += 1.0
    plan = plan_in(await front.offer(head, plan))
    assert ranks(plan) == [head, spare]
    for _ in range(10):
        front.now += pipeline_coordinator.ALIVE_S / 4
        await front.offer(head, plan)
        await front.offer(spare, plan)
        assert front.scheduler.take_back(time.time()) == []
    assert lease in front.book.held
    await front.offer(slanderer)
    await front.offer(spare, plan, (head,))
    front.now += 1.0
    assert isinstance(await front.offer(head, plan), messages.StageWait)
    assert lease not in front.book.held


async def test_a_stage_0_that_says_hello_again_has_no_leases_and_keeps_its_stage(
    front: Front,
) -> None:
    plan, head, last, _ = await front.gather()
    lease = front.lease(head)
    await front.offer(last, plan, (head,))
    front.now += 1.0
    sealed = record(key(head), now=int(time.time()))
    stream = Memory(frame(messages.Hello(WIRE_VERSION, "inference", "1", b"", sealed)))
    await front.requests.handle(node(head), stream)
    assert lease not in front.book.held
    assert plan_in(await front.offer(head)) == plan
    assert plan_in(await front.offer(last, plan)) == plan


async def test_a_later_stage_takes_nothing_from_workers_beside_the_pipeline(front: Front) -> None:
    """Nor does its own offer, or a complaint about a node that is no stage."""
    plan, head, last, spare = await front.gather()
    front.lease(head)
    front.ledger.admit(node(4), NOW)
    beside = front.lease(4)
    await front.offer(last, plan, (4, head, spare))
    assert front.scheduler.take_back(time.time()) == []
    front.now += pipeline_coordinator.GONE_S + 1
    taken = [held.node for held in front.scheduler.take_back(time.time())]
    assert taken == [node(head)]
    assert beside in front.book.held
