"""A trainer with several environments: leases of each, reports, and where a checkpoint goes on."""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from support.bare_node import bare_services
from support.counting_environment import CountingEnvironment, counting_task
from support.lease_cases import granted, policy
from support.protocol_cases import MIXED, RUN, refuses
from support.virtual_time import on_virtual_time
from support.waiting import until

from primerl.cli.tables import state_of
from primerl.crypto.hashing import digest
from primerl.node.environments.environment import EnvironmentFailed, Split, Task
from primerl.node.errors import UsageError
from primerl.node.ops.figures import PeerRow
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.status_view import ROWS_AT_A_TIME
from primerl.node.storage.ledger import Ledger
from primerl.node.trainer.audits import AuditQueue
from primerl.node.trainer.lease_book import LeaseBook, LeaseShare, MixtureShare
from primerl.node.trainer.scheduler import HOLD_S, POLLS, LeaseScheduler, TaskSupply
from primerl.node.trainer.state import TaskPosition, TrainerState, positions
from primerl.node.trainer.status_view import worker_rows
from primerl.node.trainer.workers import ABLE_S, GONE_S, JOINING_S, PRESENT_S, WorkerRegistry
from primerl.protocol.envelope import Purpose, unseal, utc
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.leases import Lease
from primerl.protocol.messages import LeaseReply, LeaseRequest, WorkerStats
from primerl.protocol.reputation import HALF_LIFE_S, Reputation

NAMES = ("sums", "words", "games")
GAMES = msgspec.structs.replace(MIXED.environments[1], name="games", id="games", package="games 2")
A, B = bytes(31) + b"a", bytes(31) + b"b"


class Slow(CountingEnvironment):
    """Never has a task ready."""

    async def task(self, index: int, split: Split = "train") -> Task:
        """See Environment."""
        raise TimeoutError


class Long(CountingEnvironment):
    """Has prompts of a hundred tokens in the tasks of `long`, and of two in the others."""

    def __init__(self, long: Callable[[int], bool]) -> None:
        super().__init__()
        self._long = long

    async def prompt(self, task: Task) -> list[int]:
        """See Environment."""
        return await super().prompt(task) * (50 if self._long(task.index) else 1)


class Front:
    """The lease scheduler of a run with three environments, without a network."""

    def __init__(self, directory: Path, *, slow: str = "", nodes: Sequence[bytes] = (A, B)) -> None:
        self.now = 0.0
        self.ledger = Ledger(directory / "ledger.db", fsync=False)
        for node in nodes:
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
        for node in nodes:
            known = self.registry.reputation(node)
            for name in NAMES:
                known.record(name, 1000, Counter(), time.time())
            known.audited = 3000
        publisher = SimpleNamespace(order=(0, 7))
        self.free = 100
        """Groups that may be leased."""
        self.looks = 0
        demand = SimpleNamespace(capacity=self.capacity, exhausted=lambda: self.free < 1)
        kinds = (Slow if name == slow else CountingEnvironment for name in NAMES)
        tasks = [
            TaskSupply(kind(name=name), self.book, number)
            for number, (kind, name) in enumerate(zip(kinds, NAMES, strict=True))
        ]
        self.scheduler = LeaseScheduler(
            self.registry, tasks, cast(Any, publisher), cast(Any, demand)
        )

    def capacity(self, node: bytes | None) -> int:
        self.looks += 1
        return self.free

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


@on_virtual_time
async def test_the_more_workers_wait_the_longer_each_is_held_unless_there_is_work(
    tmp_path: Path,
) -> None:
    nodes = [digest(b"node %d" % number) for number in range(100)]
    front = Front(tmp_path, nodes=nodes)
    front.free, held = 0, list[float]()

    async def ask(node: bytes) -> list[Lease]:
        began = time.monotonic()
        leases = await front.ask(node, None, wanted=1)
        held.append(time.monotonic() - began)
        return leases

    assert await ask(nodes[0]) == []
    assert held == [HOLD_S]
    await asyncio.gather(*map(ask, nodes))
    assert len(nodes) / statistics.mean(held[1:]) < 2 * POLLS + 5
    first, *_ = [asyncio.create_task(ask(node)) for node in nodes]
    await asyncio.sleep(0.1)
    front.free = 100
    await front.scheduler.work_changed()
    assert await first
    assert held[-1] == pytest.approx(0.1)
    front.ledger.close()


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


async def test_tasks_whose_prompts_are_too_long_are_not_leased_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    front = Front(tmp_path)
    try:
        long = Long(lambda index: index % 2 == 0)
        supply = front.scheduler.tasks[0] = TaskSupply(long, front.book, longest=100)  # pyright: ignore[reportIndexIssue]
        leases = [*await front.ask(A, (0,)), *await front.ask(A, (0,))]
        indices = [task.index for lease in leases for task in lease.tasks]
        assert indices == list(range(1, 2 * len(indices), 2))
        assert supply.passed_over >= len(indices)
        (told,) = (line.message for line in caplog.records if "passed over" in line.message)
        assert "the prompt of task 0 has 100 tokens and does not fit into 100 tokens" in told
    finally:
        front.ledger.close()


@pytest.mark.parametrize("drawn", [False, True])
async def test_an_environment_of_which_no_prompt_fits_ends_the_run_with_a_line(
    tmp_path: Path, *, drawn: bool
) -> None:
    front = Front(tmp_path)
    try:
        if drawn:
            front.book.tasks[0].draw = lambda _, out: next(
                (i for i in range(9) if i not in out), None
            )
        supply = TaskSupply(Long(lambda index: True), front.book, longest=99)
        said = (
            "none of its 9 remaining prompts fits"
            if drawn
            else "none of 4096 prompts in a row fits"
        )
        with pytest.raises(EnvironmentFailed, match=f"{said} into 99 tokens .training.seq_len"):
            await supply.run(front.scheduler)
    finally:
        front.ledger.close()


async def test_workers_that_fetch_the_runs_files_are_told_of_its_end_too(front: Front) -> None:
    assert front.registry.joining() == {A, B}
    await front.ask(A, None)  # it has a policy
    assert front.registry.joining() == {B}
    front.now += JOINING_S + 1
    assert front.registry.joining() == set(), "it is gone"
    front.registry.seen(B)
    assert front.registry.joining() == {B}
    front.registry.workers[B].left = True
    assert front.registry.joining() == set()


async def test_present_workers_are_counted_once_a_second(front: Front) -> None:
    assert front.registry.present() == 2
    front.registry.goodbye(B, "")
    assert front.registry.present() == 2
    front.now += ABLE_S
    assert front.registry.present() == 1
    front.now += PRESENT_S + ABLE_S
    assert front.registry.present() == 0
    front.registry.seen(A)
    front.now += ABLE_S
    assert front.registry.present() == 1


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


def record(**good: float) -> Reputation:
    """A worker with this many good rollouts by environment; below 0 they are bad rewards."""
    known = Reputation(audited=1000)
    for name, count in good.items():
        bad = Counter({Reason.BAD_REWARD: int(-count)}) if count < 0 else Counter[Reason]()
        known.record(name, max(0, int(count)), bad, time.time())
    return known


async def test_a_worker_holds_one_group_at_a_time_of_an_environment_that_is_new_to_it(
    front: Front,
) -> None:
    front.registry.reputations[A] = record(sums=1000)
    leases = await front.ask(A, None, wanted=8)
    assert Counter(lease.environment for lease in leases) == {0: 5, 1: 1, 2: 1}, "ahead by a batch"
    assert {len(lease.tasks) for lease in leases if lease.environment} == {1}
    assert {len(lease.tasks) for lease in leases if not lease.environment} == {3}
    front.registry.reputations[A] = record(sums=1000, words=100)
    front.book.settle(next(lease.lease_id for lease in leases if lease.environment == 1), A, 0.0)
    more = await front.ask(A, (1, 2), wanted=8)
    assert {lease.environment for lease in more} == {1}
    assert len(more) > 1


async def test_a_worker_that_fails_in_one_environment_is_leased_the_others(front: Front) -> None:
    known = front.registry.reputations[A] = record(sums=1000, words=-30, games=500)
    assert {lease.environment for lease in await front.ask(A, None)} == {0, 2}
    assert front.registry.able() == {0: 1, 2: 1}
    (warning,) = front.registry.warnings()
    assert "too much of the environment 'words' (words 1.2) was rejected" in warning
    with pytest.raises(RemoteProtocolError, match="too much was rejected: bad_reward") as refused:
        await front.ask(A, (1,))
    assert refused.value.reason == Reason.BANNED
    assert front.registry.refusal(A)
    assert {lease.environment for lease in await front.ask(B, None)} == {0, 1, 2}
    known.of("words").updated -= 3 * HALF_LIFE_S
    front.book.release(A, 0.0)
    assert {lease.environment for lease in await front.ask(A, None)} == {0, 1, 2}, "it has healed"


async def test_a_worker_that_is_banned_is_leased_nothing_of_any_environment(front: Front) -> None:
    front.registry.reputation(A).record("words", 0, Counter({Reason.BAD_PROOF: 1}), time.time())
    with pytest.raises(RemoteProtocolError, match="bad_proof: no honest software"):
        await front.ask(A, (0, 2))


async def test_an_operator_bans_a_worker_until_it_is_pardoned(front: Front) -> None:
    restored = state(tasks={name: TaskPosition() for name in NAMES}).restore_reputations
    row = front.registry.ban(A.hex(), "shares\na key")
    assert (row.id, row.until) == (A.hex(), 0.0)
    with pytest.raises(RemoteProtocolError, match=r"banned: by the operator \(shares\?a key\)"):
        await front.ask(A, None)
    assert restored(front.ledger)[A].banned, "also when the trainer starts again"
    assert not front.registry.reputation(B).banned
    assert front.registry.pardon(A.hex()) == A
    assert await front.ask(A, None)
    assert (restored(front.ledger)[A].banned, restored(front.ledger)[A].accepted) == ("", 0)
    assert not front.registry.proven(A), "it is a newcomer again"


async def test_a_ban_with_an_end_is_over_by_itself_and_leaves_the_trust_as_it_was(
    front: Front,
) -> None:
    restored = state(tasks={name: TaskPosition() for name in NAMES}).restore_reputations
    earned = front.registry.reputation(A).accepted
    row = front.registry.ban(A.hex(), "its clock", 3 * 86400.0)
    assert row.until - row.since == 3 * 86400.0
    ends = utc(int(row.until))
    with pytest.raises(RemoteProtocolError, match=rf"banned until {ends}: by the operator") as no:
        await front.ask(A, None)
    assert no.value.reason == Reason.BANNED
    again = restored(front.ledger)[A]
    assert (again.banned_until, again.accepted) == (row.until, earned), (
        "after a restart it has the same end"
    )
    front.registry.end_bans(row.until - 1)
    assert front.registry.refusal(A)
    front.registry.reputation(A).banned_until = time.time() - 1
    assert await front.ask(A, None), "its next request is answered with work"
    assert front.registry.bans() == []
    assert front.registry.reputation(A).accepted == earned, (
        "its record is neither forgotten nor better"
    )


@pytest.mark.parametrize("lasts_s", [59.0, 4e8, -1.0, float("nan")])
def test_a_ban_of_no_sensible_length_is_refused_and_changes_nothing(
    front: Front, lasts_s: float
) -> None:
    with pytest.raises(UsageError, match="at least a minute"):
        front.registry.ban(A.hex(), "", lasts_s)
    assert not front.registry.refusal(A)


def test_a_short_ban_by_hand_does_not_shorten_one_without_an_end(front: Front) -> None:
    front.registry.reputation(A).record("words", 0, Counter({Reason.BAD_PROOF: 1}), time.time())
    row = front.registry.ban(A.hex(), "for a minute", 60.0)
    assert (row.until, row.why) == (0.0, "bad_proof: no honest software makes this")
    front.registry.end_bans(time.time() + 1e6)
    assert front.registry.refusal(A)


async def test_a_pardon_lifts_the_ban_of_an_audit_too(front: Front) -> None:
    front.registry.reputation(A).record("words", 0, Counter({Reason.BAD_PROOF: 1}), time.time())
    front.registry.pardon(A.hex())
    assert await front.ask(A, None)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("00", "give at least 4 digits of one that `primerl-node peers` shows"),
        ("ffff", "no worker has an id that begins with 'ffff'"),
        ("0000", "2 workers have ids that begin with '0000': give more digits"),
    ],
)
def test_a_worker_is_named_by_digits_that_are_only_its_own(
    front: Front, name: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        front.registry.pardon(name)
    with pytest.raises(UsageError, match=says):
        front.registry.ban(name, "")
    assert not front.registry.refusal(A)


async def test_trust_is_shown_for_each_environment(front: Front) -> None:
    front.registry.reputations[A] = record(sums=1000, words=-30)
    await front.ask(A, None)
    services = front.registry.services
    row = next(row for row in await worker_rows(services, front.scheduler) if row.id == A.hex())
    assert row.trusts == pytest.approx({"sums": 0.999, "words": 0.008}, abs=2e-3)
    assert row.trust == row.trusts["words"]
    assert row.refused == "no leases of words: too much was rejected: bad_reward"


async def test_a_worker_whose_engine_starts_is_not_shown_as_long_gone(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    await front.ask(A, None)

    async def row() -> PeerRow:
        rows = await worker_rows(front.registry.services, front.scheduler)
        return next(row for row in rows if row.id == A.hex())

    front.registry.services.peers.get(A).last_seen = time.time() - 77.0
    front.registry.workers[A].stats = WorkerStats(-1)
    silence = {A: 0.0}  # it is connected
    monkeypatch.setattr(front.registry, "silence", silence.__getitem__)
    assert ((shown := await row()).starting, shown.last_seen_s) == (True, 0.0)
    assert state_of(await row()) == "starting its engine, or fetching its first policy"
    silence[A] = 77.0
    assert not (await row()).starting
    assert (await row()).last_seen_s == pytest.approx(77.0, abs=60.0)
    silence[A] = 0.0
    front.registry.workers[A].stats = WorkerStats(0)
    assert not (await row()).starting


OLD = {
    **{"good": 900.0, "bad": 4.0, "updated": 1.0, "accepted": 900, "rejected": {"bad_reward": 1}},
    **{"audited": 300, "clean_streak": 7, "faults": 1, "cheat_nats": 2.5, "other_nats": 0.5},
    **{"suspicion": 0.1, "banned": "", "accusers": ["ab"], "placement": {"canaries": 3}},
}
"""As it was stored while trust was one for the run."""


@pytest.mark.parametrize("names", [("sums",), ("sums", "words")])
def test_a_state_from_before_trust_was_kept_by_environment_is_loaded(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """With several environments nobody can tell which it was earned in: then it is trust in none."""
    document = msgspec.to_builtins(state(tasks={name: TaskPosition() for name in names}))
    document["reputations"] = {A.hex(): OLD, B.hex(): OLD}
    old = msgspec.json.decode(msgspec.json.encode(document), type=TrainerState)
    ledger = Ledger(tmp_path / "ledger.db", fsync=False)
    newer = msgspec.json.encode({**OLD, "banned": "a lie", "accepted": 901})
    ledger.add_verdict(B, b"sealed", 3, {B: newer}, (), {})
    known = old.restore_reputations(ledger)
    ledger.close()
    assert (known[A].accepted, known[B].accepted) == (900, 901)
    assert known[A].rejected == {Reason.BAD_REWARD: 1}
    assert (known[A].cheat_nats, known[A].clean_streak, known[A].audited) == (2.5, 7, 300)
    assert (known[A].accusers, known[A].placement.canaries) == (("ab",), 3)
    assert (known[A].proven, known[A].banned, known[B].banned) == (True, "", "a lie")
    assert known[A].of("sums").good == (900.0 if len(names) == 1 else 0.0)
    again = Reputation.restore(known[A].snapshot(), names)
    assert again == known[A]


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


def crowd(front: Front, size: int) -> list[bytes]:
    """Let proven nodes join."""
    nodes = [digest(b"node %d" % number) for number in range(size)]
    for node in nodes:
        front.ledger.admit(node, 0)
        known = front.registry.reputation(node)
        for name in NAMES:
            known.record(name, 1000, Counter(), time.time())
        known.audited = 3000
    return nodes


async def prepare(front: Front, leases: int) -> None:
    for supply in front.scheduler.tasks:
        await supply.make_ready(leases)


@on_virtual_time
async def test_where_nothing_is_left_hundreds_that_wait_cost_one_look(
    front: Front,
) -> None:
    nodes = crowd(front, 200)
    front.free = 0
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(front.ask(node, None, 1)) for node in nodes]
        await until(lambda: len(front.registry.pending) == len(nodes))
        front.looks = 0
        await front.scheduler.work_changed()
        assert front.looks <= 2
        front.free = 1000
        await prepare(front, len(nodes))
        await front.scheduler.work_changed()
        assert all(await asyncio.gather(*waiting))


@on_virtual_time
async def test_of_hundreds_that_hold_all_they_may_that_one_is_looked_at_whose_work_came_back(
    front: Front,
) -> None:
    nodes, most = crowd(front, 100), front.book.policy.leases_per_worker
    front.free = 10**6
    held = {node: await front.ask(node, None, most) for node in nodes}
    assert {len(leases) for leases in held.values()} == {most}
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(front.ask(node, None, 1)) for node in nodes]
        await until(lambda: len(front.registry.pending) == len(nodes))
        await front.scheduler.work_changed()
        await prepare(front, len(nodes))
        front.looks = 0
        node = nodes[7]
        grant = front.book.held[held[node][0].lease_id]
        front.book.settle(grant.lease.lease_id, node, grant.granted)
        await front.scheduler.work_changed()
        assert len(await waiting[7]) == 1
        assert front.looks <= 3
        assert len(front.registry.pending) == len(nodes) - 1
        for task in waiting:
            task.cancel()


@on_virtual_time
async def test_who_holds_nothing_is_leased_before_those_that_came_earlier_and_want_more(
    front: Front,
) -> None:
    front.free = 100
    assert len(await front.ask(A, None, 1)) == 1
    front.free = 0
    async with asyncio.TaskGroup() as tasks:
        more = tasks.create_task(front.ask(A, None, 1))
        await until(lambda: A in front.registry.pending)
        first = tasks.create_task(front.ask(B, None, 1))
        await until(lambda: B in front.registry.pending)
        front.free = 100
        await front.scheduler.work_changed()
        assert [lease.lease_id for lease in await first + await more] == [1, 2]


@on_virtual_time
async def test_a_verdict_ends_the_wait_of_its_node_and_of_no_other(
    front: Front,
) -> None:
    front.free = 0
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(front.scheduler.lease(A, LeaseRequest(1, WorkerStats(7))))
        other = tasks.create_task(front.scheduler.lease(B, LeaseRequest(1, WorkerStats(7))))
        await until(lambda: front.registry.pending.keys() == {A, B})
        front.registry.deliver(A, b"verdict")
        assert (await asking).verdicts == (b"verdict",)
        assert front.registry.pending.keys() == {B}
        other.cancel()


@on_virtual_time
async def test_a_goodbye_ends_a_wait(
    front: Front,
) -> None:
    front.free = 0
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(front.ask(A, None, 1))
        await until(lambda: A in front.registry.pending)
        front.registry.goodbye(A, "")
        assert await asking == []


async def test_a_view_of_hundreds_of_peers_leaves_turns_to_others(front: Front) -> None:
    nodes = crowd(front, 200)
    for node in nodes:
        front.registry.services.peers.get(node)
    viewing = asyncio.create_task(worker_rows(front.registry.services, front.scheduler))
    turns = 0
    while not viewing.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 2 * (len(nodes) // ROWS_AT_A_TIME)
    assert {row.id for row in viewing.result()} >= {node.hex() for node in nodes}
