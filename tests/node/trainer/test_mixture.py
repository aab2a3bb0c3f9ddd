"""A trainer with several environments: leases of each, reports, and where a checkpoint goes on."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from support.bare_services import bare_services
from support.counting_environment import CountingEnvironment, counting_task
from support.lease_cases import granted, policy
from support.protocol_cases import MIXED, RUN, refuses

from primerl.node.environments.environment import Split, Task
from primerl.node.p2p.peers import PeerTable
from primerl.node.storage.ledger import Ledger
from primerl.node.trainer.audits import AuditQueue
from primerl.node.trainer.scheduler import LeaseScheduler, TaskSupply
from primerl.node.trainer.state import TaskPosition, TrainerState, positions
from primerl.node.trainer.workers import ABLE_S, GONE_S, WorkerRegistry
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease, LeaseBook, LeaseShare, MixtureShare
from primerl.protocol.messages import LeaseReply, LeaseRequest, WorkerStats

NAMES = ("sums", "words", "games")
GAMES = msgspec.structs.replace(MIXED.environments[1], name="games", id="games", package="games 2")
A, B = bytes(31) + b"a", bytes(31) + b"b"


class Slow(CountingEnvironment):
    """Never has a task ready."""

    async def task(self, index: int, split: Split = "train") -> Task:
        """See Environment."""
        raise TimeoutError


class Front:
    """The lease scheduler of a run with three environments, without a network."""

    def __init__(self, directory: Path, *, slow: str = "") -> None:
        self.now = 0.0
        self.ledger = Ledger(directory / "ledger.db", fsync=False)
        for node in (A, B):
            self.ledger.admit(node, 0)
        shares = tuple(MixtureShare(size) for size in (4, 2, 8))
        self.book = LeaseBook(policy(environments=shares, leases_per_worker=12))
        self.registry = WorkerRegistry(
            bare_services(ledger=self.ledger, peers=PeerTable()),
            b"",
            self.book,
            AuditQueue(),
            clock=lambda: self.now,
            environments=(*MIXED.environments, GAMES),
        )
        for node in (A, B):
            known = self.registry.reputation(node)
            known.record(1000, Counter(), time.time())
            known.audited = 1000
        publisher = SimpleNamespace(order=(0, 7))
        demand = SimpleNamespace(capacity=lambda node: 100)  # pyright: ignore[reportUnknownLambdaType]
        kinds = (Slow if name == slow else CountingEnvironment for name in NAMES)
        tasks = [
            TaskSupply(kind(name=name), self.book, number)
            for number, (kind, name) in enumerate(zip(kinds, NAMES, strict=True))
        ]
        self.scheduler = LeaseScheduler(
            self.registry, tasks, cast(Any, publisher), cast(Any, demand)
        )

    async def ask(
        self, node: bytes, environments: tuple[int, ...] | None, wanted: int = 6
    ) -> list[Lease]:
        request = LeaseRequest(wanted, WorkerStats(7), None, None, environments)
        reply: LeaseReply = await self.scheduler.lease(node, request)
        return [
            unseal(sealed, Purpose.LEASE, Lease, now=0, run=RUN, recipient=node).body
            for sealed in reply.leases
        ]


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    found = Front(tmp_path)
    yield found
    found.ledger.close()


async def test_a_worker_is_leased_only_what_it_can_play(front: Front) -> None:
    found = {lease.environment for lease in await front.ask(A, (0, 2))}
    assert found == {0, 2}
    assert {lease.environment for lease in await front.ask(B, None)} == {0, 1, 2}


async def test_leases_name_tasks_and_group_size_of_their_environment(front: Front) -> None:
    for lease in await front.ask(B, None):
        name = NAMES[lease.environment]
        assert lease.group_size == (4, 2, 8)[lease.environment]
        wanted = [counting_task(task.index, name=name).digest for task in lease.tasks]
        assert [task.digest for task in lease.tasks] == wanted


@pytest.mark.parametrize("said", [(3,), (0, 63), (0, 1, 2, 3)])
async def test_a_worker_that_names_an_environment_that_is_none_is_refused(
    front: Front, said: tuple[int, ...]
) -> None:
    with refuses(Reason.MALFORMED):
        await front.ask(A, said)
    assert front.book.held == {}


async def test_an_environment_whose_tasks_are_not_ready_holds_up_no_other(tmp_path: Path) -> None:
    front = Front(tmp_path, slow="words")
    try:
        assert {lease.environment for lease in await front.ask(A, None)} == {0, 2}
    finally:
        front.ledger.close()


async def test_an_environment_that_no_worker_can_play_is_reported_until_one_can(
    front: Front,
) -> None:
    assert front.registry.warnings() == [], "before anybody asked"
    await front.ask(A, (0, 1))
    (warning,) = front.registry.warnings()
    assert "'games' (games 2)" in warning
    assert "--allow-environment games" in warning
    await front.ask(B, None)
    assert front.registry.warnings() == []
    assert front.registry.able() == {0: 2, 1: 2, 2: 1}
    front.registry.reputation(B).banned = "a lie"
    front.now += ABLE_S
    assert len(front.registry.warnings()) == 1, "B gets no work"
    front.registry.reputation(B).banned = ""
    front.now += GONE_S - 2
    front.registry.seen(A)
    front.now += 3
    assert len(front.registry.warnings()) == 1, "B is silent"


def test_a_checkpoint_holds_the_place_in_each_environment() -> None:
    book = two_environments()
    for number in (1, 0, 1):
        granted(book, A, share=LeaseShare(playable={number}))
    answered = book.settle(0, A, 0.0)
    saved = positions(book, ("a", "b"))
    assert saved == {"a": TaskPosition(3, [0, 1, 2]), "b": TaskPosition(6, [3, 4, 5])}
    again = LeaseBook(book.policy)
    state(tasks=saved).restore_tasks(again, ("a", "b"), [answered])
    assert [queue.next_task for queue in again.tasks] == [3, 6]
    assert [list(queue.requeued) for queue in again.tasks] == [[0, 1, 2], [3, 4, 5]]


def test_tasks_that_were_leased_and_answered_after_a_checkpoint_are_not_leased_again() -> None:
    book = two_environments()
    answered = [granted(book, A, share=LeaseShare(playable={number})) for number in (1, 0)]
    again = LeaseBook(book.policy)
    state(tasks={"a": TaskPosition(), "b": TaskPosition()}).restore_tasks(
        again, ("a", "b"), answered[:1]
    )
    assert [queue.next_task for queue in again.tasks] == [0, 3]
    assert [list(queue.requeued) for queue in again.tasks] == [[], []]


def test_a_mixture_goes_on_by_name_and_new_environments_begin_at_the_first_task() -> None:
    old = state(tasks={"a": TaskPosition(9, [4]), "gone": TaskPosition(2)})
    assert old.positions(["new", "a"]) == {"new": TaskPosition(), "a": TaskPosition(9, [4])}


def two_environments() -> LeaseBook:
    shares = (MixtureShare(4), MixtureShare(2))
    return LeaseBook(policy(environments=shares, leases_per_worker=8))


def state(**fields: Any) -> TrainerState:
    empty: dict[str, Any] = {
        "verified_up_to": 0,
        "history": [],
        "accepted": 0,
        "rejected": {},
        "received": 0,
        "delta_bytes": 0,
        "full_bytes": 0,
        "staleness_history": [],
        "staleness_max": 0,
    }
    return TrainerState(**{**empty, **fields})
