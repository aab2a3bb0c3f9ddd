from collections.abc import Collection
from copy import deepcopy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.lease_cases import SEED, A, B, C, D, E, grant, granted, indices, policy, task_digest
from support.protocol_cases import NOW, refuses

from primerl.node.trainer import lease_book
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease, TaskRef
from primerl.protocol.manifests import encode
from primerl.protocol.session import decode


def test_a_lease_says_all_that_a_worker_needs() -> None:
    book = lease_book.LeaseBook(policy(), next_lease=5, tasks=[lease_book.TaskQueue(20)])
    assert granted(book) == Lease(
        lease_id=5,
        tasks=tuple(TaskRef(index, task_digest(index)) for index in (20, 21, 22)),
        group_size=4,
        seed=SEED,
        min_version=7,
        deadline=NOW + 60.0,
        max_bytes=1000,
    )
    assert book.outstanding_groups() == 3
    assert decode(encode(book.held[5].lease), Lease) == book.held[5].lease


@pytest.mark.parametrize(
    ("steps", "training", "turnaround_s", "expected"),
    [
        (0, False, 5.0, 8),
        (0, True, 5.0, 0),  # synchronous: nothing is made while a batch is trained
        (1, False, 90.0, 12),
        (1, True, 90.0, 8),  # a third batch could not be trained in time
        (2, False, 90.0, 14),
        (2, True, 90.0, 14),
        (8, False, 90.0, 40),  # generation is the limit: as many as stragglers leave room for
        (8, True, 90.0, 40),
        (8, True, 15.0, 20),  # 1.5 batches are under way while one is trained, and one in reserve
        (8, True, 1.0, 8),  # training is the limit: nothing gets older than it has to
    ],
)
def test_leases_run_ahead_as_far_as_generation_needs_and_staleness_allows(
    steps: int, training: bool, turnaround_s: float, expected: int
) -> None:
    book = lease_book.LeaseBook(policy(max_off_policy_steps=steps))
    book.lead.trained(10.0)
    book.lead.returned(8, 8, turnaround_s)
    assert book.capacity(waiting_groups=0, training=training) == expected
    assert book.capacity(waiting_groups=5, training=training) == expected - 5
    granted(book)
    assert book.capacity(waiting_groups=0, training=training) == expected - 3
    assert book.capacity(waiting_groups=5, training=training) == expected - 8


def test_more_groups_are_leased_where_some_are_not_admitted() -> None:
    """Of n that are on lease n p + 2 sqrt(n p (1 - p)) are counted, and p is at least a half."""
    book = lease_book.LeaseBook(policy(leases_per_worker=99))
    while book.outstanding_groups() < 36:
        granted(book)
    full = book.capacity(waiting_groups=3, training=False)
    for _ in range(1000):
        book.lead.judged(True, 8)
        book.lead.judged(False, 8)
    share = book.lead.admitted
    assert share == pytest.approx(0.5, abs=0.1)
    book.lead.admitted = 0.5
    assert book.capacity(waiting_groups=3, training=False) == full + 36 - (18 + 6)
    book.lead.admitted = 0.9  # 32.4 + 3.6
    assert book.capacity(waiting_groups=3, training=False) == full
    for _ in range(1000):
        book.lead.judged(False, 8)
    assert book.capacity(waiting_groups=3, training=False) == full + 36 - (18 + 6)
    for _ in range(1000):
        book.lead.judged(True, 8)
    assert book.capacity(waiting_groups=3, training=False) == full


def test_turnaround_rises_over_one_batch_and_falls_over_four() -> None:
    lead = lease_book.LeadTime()
    lead.returned(4, 16, 8.0)
    assert lead.turnaround_s == 8.0  # the first counts in full
    lead.returned(4, 16, 16.0)
    assert lead.turnaround_s == 10.0
    lead.returned(32, 16, 18.0)
    assert lead.turnaround_s == 18.0
    lead.returned(16, 16, 10.0)
    assert lead.turnaround_s == 16.0
    lead.returned(16, 16, -5.0)  # a clock was set back
    assert lead.turnaround_s == 12.0


def test_a_slow_first_step_does_not_keep_later_ones_short_of_groups() -> None:
    lead = lease_book.LeadTime()
    lead.returned(16, 16, 12.0)
    lead.trained(25.0)  # it compiled
    lead.trained(3.0)
    assert lead.step_s == 3.0
    assert lead.depth(8, training=False) == 12.0 / 3.0 + 1.0
    lead.trained(7.0)
    assert lead.step_s == 4.0


@pytest.mark.parametrize(
    ("bound", "most"), [(1, 1.0), (2, 1.75), (4, 2.25), (6, 3.0), (8, 5.0), (16, 13.0)]
)
def test_versions_of_the_bound_are_left_for_stragglers(bound: int, most: float) -> None:
    assert lease_book.LeadTime().depth(bound, training=True) == most


@pytest.mark.parametrize("capacity", [0, -1, -100])
def test_nothing_is_granted_beyond_capacity(capacity: int) -> None:
    book = lease_book.LeaseBook(policy())
    assert grant(book, capacity=capacity) is None
    assert (book.next_lease, book.tasks, book.held) == (0, [lease_book.TaskQueue()], {})


@pytest.mark.parametrize(("capacity", "size"), [(1, 1), (2, 2), (3, 3), (4, 3), (100, 3)])
def test_a_lease_is_no_larger_than_capacity_and_policy(capacity: int, size: int) -> None:
    lease = grant(lease_book.LeaseBook(policy()), capacity=capacity)
    assert lease is not None
    assert len(lease.tasks) == size


def test_the_leases_of_a_node_are_limited() -> None:
    book = lease_book.LeaseBook(policy(leases_per_worker=2))
    first, second = granted(book), granted(book)
    assert grant(book) is None
    assert granted(book, B)  # another node has its own quota
    book.settle(first.lease_id, A, NOW)
    third = granted(book)
    assert len({first.lease_id, second.lease_id, third.lease_id}) == 3


def test_a_settled_lease_is_gone_and_its_tasks_are_done() -> None:
    book = lease_book.LeaseBook(policy())
    lease = granted(book)
    assert book.settle(lease.lease_id, A, NOW) == lease
    assert book.outstanding_groups() == 0
    with refuses(Reason.UNKNOWN_LEASE):
        book.settle(lease.lease_id, A, NOW)
    assert not set(indices(granted(book))) & set(indices(lease))


def test_tasks_of_an_expired_lease_go_out_again_first_and_in_order() -> None:
    book = lease_book.LeaseBook(policy(groups_per_lease=4))
    first = granted(book, A)
    second = granted(book, B, now=NOW + 30)
    book.expire(NOW + 61)
    again = granted(book, C, now=NOW + 61)
    assert indices(again) == indices(first)
    assert again.lease_id != first.lease_id
    book.expire(NOW + 91)
    rest = grant(book, D, capacity=2)
    assert rest is not None
    assert indices(rest) == indices(second)[:2]
    mixed = granted(book, E)
    assert indices(mixed) == [*indices(second)[2:], 8, 9]


def test_an_expired_lease_is_settled_by_nobody() -> None:
    book = lease_book.LeaseBook(policy())
    lease = granted(book)
    book.expire(NOW + 61)
    with refuses(Reason.UNKNOWN_LEASE):
        book.settle(lease.lease_id, A, NOW)


def test_a_node_that_leaves_gives_back_its_own_leases_only() -> None:
    book = lease_book.LeaseBook(policy())
    mine, others = granted(book, A), granted(book, B)
    assert [held.lease for held in book.release(A, NOW)] == [mine]
    assert list(book.held) == [others.lease_id]
    assert indices(granted(book, C)) == indices(mine)
    assert book.release(A, NOW) == []


def test_a_task_that_cannot_be_made_is_not_lost() -> None:
    def fails_at_4(index: int) -> bytes:
        if index == 4:
            raise LookupError("no task 4")
        return task_digest(index)

    book = lease_book.LeaseBook(policy())
    granted(book, A)
    book.expire(NOW + 61)
    before = (deepcopy(book.tasks), book.next_lease)
    book.policy = policy(groups_per_lease=5)
    with pytest.raises(LookupError):
        grant(book, B, digest_of=fails_at_4)
    assert (book.tasks, book.next_lease) == before
    assert book.held == {}
    assert indices(granted(book, B)) == [0, 1, 2, 3, 4]


class BookMachine(RuleBasedStateMachine):
    """Nodes come, work, dawdle and leave in any order; the trainer takes batches. `steps` by subclass."""

    steps = 1

    def __init__(self) -> None:
        super().__init__()
        self.book = lease_book.LeaseBook(policy(max_off_policy_steps=self.steps))
        self.now = float(NOW)
        self.training = False
        self.waiting = 0
        self.done: list[int] = []
        self.leases: set[int] = set()

    def capacity(self) -> int:
        return self.book.capacity(waiting_groups=self.waiting, training=self.training)

    @rule(node=st.sampled_from([A, B, C]))
    def ask(self, node: bytes) -> None:
        before, requeued = self.capacity(), list(self.book.tasks[0].requeued)
        held = [one for one in self.book.held.values() if one.node == node]
        lease = grant(self.book, node, capacity=before, now=self.now)
        if lease is None:
            leases, groups = self.book.quota(node, 1.0)
            full = len(held) >= leases or sum(len(one.lease.tasks) for one in held) >= groups
            assert before < 1 or full or self.book.resting(node, self.now)
            return
        assert lease.lease_id not in self.leases
        self.leases.add(lease.lease_id)
        assert self.capacity() == before - len(lease.tasks) >= 0
        assert indices(lease)[: len(requeued)] == requeued[: len(lease.tasks)]

    @precondition(lambda self: bool(self.book.held))
    @rule(data=st.data(), node=st.sampled_from([A, B, C]))
    def answer(self, data: st.DataObject, node: bytes) -> None:
        held = self.book.held[data.draw(st.sampled_from(sorted(self.book.held)))]
        if node != held.node:
            with refuses(Reason.WRONG_RECIPIENT):
                self.book.settle(held.lease.lease_id, node, self.now)
            return
        self.done += indices(self.book.settle(held.lease.lease_id, node, self.now))
        self.waiting += len(held.lease.tasks)

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for held in self.book.expire(self.now):
            assert held.lease.deadline < self.now
        assert all(one.lease.deadline >= self.now for one in self.book.held.values())

    @rule(node=st.sampled_from([A, B, C]))
    def leave(self, node: bytes) -> None:
        self.book.release(node, self.now)
        assert all(one.node != node for one in self.book.held.values())

    @precondition(lambda self: not self.training and self.waiting >= 8)
    @rule()
    def train(self) -> None:
        self.waiting -= 8
        self.training = True

    @precondition(lambda self: self.training)
    @rule()
    def publish(self) -> None:
        self.training = False

    @invariant()
    def a_node_with_nothing_gets_something_once_it_has_rested(self) -> None:
        """Whatever it did: nobody in good standing is starved for ever."""
        longest = lease_book.MAX_FIRST_COOLING_S * 2**lease_book.MAX_DOUBLINGS
        for node in self.book.nodes:
            assert not self.book.resting(node, self.now + longest)
            assert min(self.book.quota(node, 0.0)) >= 1

    @invariant()
    def no_task_is_lost_or_out_twice(self) -> None:
        out = [index for one in self.book.held.values() for index in indices(one.lease)]
        everything = [*out, *self.book.tasks[0].requeued, *self.done]
        assert sorted(everything) == list(range(self.book.tasks[0].next_task))

    @invariant()
    def the_leases_of_each_node_are_found_among_all(self) -> None:
        for table in (self.book.held, self.book.unjudged):
            for node in (A, B, C):
                own = {number: one for number, one in table.items() if one.node == node}
                assert table.of(node) == own
                assert (node in table.nodes) == bool(own)

    @invariant()
    def who_counts_as_full_may_hold_no_more(self) -> None:
        for node in self.book.full:
            leases, groups = self.book.quota(node, 1.0)
            held = self.book.held.of(node).values()
            assert len(held) >= leases or sum(len(one.lease.tasks) for one in held) >= groups

    @rule(turnaround_s=st.floats(0, 1000), step_s=st.floats(0, 1000))
    def measure(self, turnaround_s: float, step_s: float) -> None:
        self.book.lead.returned(8, 8, turnaround_s)
        self.book.trained(step_s)

    @invariant()
    def work_in_the_system_never_exceeds_what_staleness_allows(self) -> None:
        batches = self.book.outstanding_groups() + self.waiting + 8 * self.training
        assert batches <= 8 * (self.steps + 1)
        if self.steps:
            most = max(1.25 + self.steps / 4, self.steps - 3.0)
            assert batches <= 8 * (most + self.training)


class SynchronousMachine(BookMachine):
    """The same with a staleness bound of 0."""

    steps = 0


class LooseMachine(BookMachine):
    """The same with a staleness bound of 8."""

    steps = 8


for machine in (BookMachine, SynchronousMachine, LooseMachine):
    machine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestBook = BookMachine.TestCase
TestSynchronousBook = SynchronousMachine.TestCase
TestLooseBook = LooseMachine.TestCase


def test_tasks_that_nobody_can_play_are_passed_over_for_good() -> None:
    queue = lease_book.TaskQueue()
    queue.requeue((7,))
    for index in (0, 2, 3, 7):
        queue.pass_over(index)
    assert queue.upcoming(3) == [1, 4, 5]
    queue.take(2)
    assert (queue.next_task, queue.unfit) == (5, {7})
    assert queue.upcoming(3) == [5, 6, 8]


def test_a_drawn_task_that_nobody_can_play_is_not_drawn_again() -> None:
    def draw(number: int, out: Collection[int]) -> int | None:
        return min({0, 1, 2} - {*out}, default=None)

    queue = lease_book.TaskQueue(draw=draw)
    assert queue.upcoming(1) == [0]
    queue.pass_over(0)
    assert queue.upcoming(3) == [1, 2]
    queue.take(1)
    assert queue.upcoming(3) == [2, 1], "what was leased may be drawn again"
