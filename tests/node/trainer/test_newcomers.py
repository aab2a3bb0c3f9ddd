"""What newcomers are leased: a bounded pool beside proven nodes, in turns over tickets and networks."""

from support.lease_cases import A, B, C, D, granted, policy, task_digest
from support.protocol_cases import NOW

from primerl.crypto.hashing import digest
from primerl.node.trainer.lease_book import (
    FAILING,
    FORGET_S,
    MAX_PLACES,
    SLOT_SHARE,
    LeaseBook,
    LeaseShare,
    Origin,
    pool,
)
from primerl.protocol.leases import Lease
from primerl.protocol.reputation import Reputation, Trust

ONE, TWO = Origin(b"one"), Origin(b"two")


def key(number: int) -> bytes:
    """A fresh key, as anybody makes them."""
    return digest(b"key %d" % number)


def staffed(now: float = NOW) -> LeaseBook:
    """A book of batches of 8 groups; a proven node asked just now."""
    book = LeaseBook(policy())
    book.present(A, now)
    return book


def room(book: LeaseBook, now: float = NOW) -> int:
    return book.newcomer_capacity(waiting_groups=0, training=False, now=now)


class Line:
    """A book and the newcomers that ask."""

    def __init__(self, book: LeaseBook) -> None:
        self.book = book
        self.origins: dict[bytes, Origin] = {}

    def ask(self, node: bytes, origin: Origin = ONE, now: float = NOW) -> None:
        """`node` asks for a lease."""
        self.origins[node] = origin
        self.book.newcomers.enter(node, origin, now)

    def flood(self, count: int, origin: Origin = ONE, now: float = NOW, first: int = 0) -> None:
        """So many fresh keys ask."""
        for number in range(first, first + count):
            self.ask(key(number), origin, now)

    def serve(self, now: float = NOW) -> list[tuple[bytes, Lease]]:
        """Lease to newcomers as long as it is the turn of one."""
        served: list[tuple[bytes, Lease]] = []
        while (node := self.book.next_newcomer(room(self.book, now), now)) is not None:
            lease = self.book.grant(
                node,
                version=7,
                capacity=room(self.book, now),
                digest_of=lambda _, index: task_digest(index),
                seed=digest(b"seed"),
                now=now,
                share=LeaseShare(0.05, newcomer=self.origins[node]),
            )
            assert lease is not None
            served.append((node, lease))
        return served


def nodes(served: list[tuple[bytes, Lease]]) -> list[bytes]:
    return [node for node, _ in served]


def test_a_thousand_keys_hold_no_more_than_the_pool_and_proven_nodes_lose_nothing() -> None:
    line = Line(staffed())
    before = line.book.capacity(waiting_groups=0, training=False)
    line.flood(1000)
    served = line.serve()
    assert sum(len(lease.tasks) for _, lease in served) == 2 <= pool(8) == 4
    for number in range(20):
        line.flood(50, Origin(b"ticket %d" % number), first=50 * number)
    served += line.serve()
    assert sum(len(lease.tasks) for _, lease in served) == pool(8)
    assert line.book.capacity(waiting_groups=0, training=False) == before
    assert len(granted(line.book, A, capacity=before).tasks) == 3


def test_a_ticket_holds_no_more_than_it_leaves_free_to_others() -> None:
    line = Line(staffed())
    line.flood(100, ONE)
    assert len(line.serve()) == 2
    line.ask(B, TWO)
    assert nodes(line.serve()) == [B]
    line.ask(C, TWO)
    assert line.serve() == [], "one place is kept for a third ticket"
    line.ask(D, Origin(b"three"))
    assert nodes(line.serve()) == [D]


def test_a_dead_newcomer_passes_its_slot_on_long_before_its_lease_is_over() -> None:
    line = Line(staffed())
    line.flood(100)
    first = line.serve()
    slot_s = SLOT_SHARE * line.book.policy.timeout_s
    assert line.serve(NOW + slot_s - 0.1) == []
    line.book.present(A, NOW + slot_s)
    assert len(line.serve(NOW + slot_s)) == 2
    node, lease = first[0]
    assert lease.deadline == NOW + line.book.policy.timeout_s
    assert line.book.settle(lease.lease_id, node, lease.deadline - 1) == lease, (
        "the slow are in time"
    )


def test_work_of_no_worth_keeps_its_slot_and_work_that_is_accepted_frees_it() -> None:
    """Else keys that answer at once with nonsense would have all the time of the audits."""
    line = Line(staffed())
    line.flood(4)
    (bad, lease), (good, other) = line.serve()
    line.book.settle(lease.lease_id, bad, NOW + 1)
    line.book.settle(other.lease_id, good, NOW + 1)
    assert line.serve(NOW + 2) == []
    line.book.newcomers.proved(good)
    assert len(line.serve(NOW + 2)) == 1


def test_tasks_that_newcomers_lose_are_leased_again_before_new_ones() -> None:
    line = Line(staffed())
    line.flood(10)
    lost = [task.index for _, lease in line.serve() for task in lease.tasks]
    line.book.expire(NOW + 61)
    again = granted(line.book, A, now=NOW + 61)
    assert [task.index for task in again.tasks][:2] == lost


def test_newcomers_are_served_in_the_order_of_asking_also_if_they_went_away_for_a_moment() -> None:
    line = Line(staffed())
    line.ask(B, now=NOW)
    line.book.newcomers.leave(B, ONE, NOW + 1)
    line.flood(10, now=NOW + 2)
    line.ask(B, now=NOW + 3)
    assert nodes(line.serve(NOW + 3))[0] == B
    line.ask(C, now=NOW + 4)
    line.book.newcomers.leave(C, ONE, NOW + 5)
    line.ask(C, now=NOW + 6 + FORGET_S)
    line.flood(10, first=10, now=NOW + 6)
    line.book.present(A, NOW + 40)
    assert C not in nodes(line.serve(NOW + 40))


def test_of_one_ticket_networks_take_turns() -> None:
    """An attacker has few addresses, whatever the number of its keys."""
    line = Line(staffed())
    line.flood(100, Origin(b"one", "4:c00002"))
    line.ask(B, Origin(b"one", "4:c63364"), NOW + 1)
    assert B in nodes(line.serve(NOW + 1))


def test_a_node_that_rests_or_holds_a_lease_is_passed_over() -> None:
    line = Line(staffed())
    line.ask(B)
    assert nodes(line.serve()) == [B]
    line.ask(B)
    assert line.serve() == []
    line.book.expire(NOW + 61)
    line.book.present(A, NOW + 62)
    assert line.serve(NOW + 62) == []
    line.ask(C, now=NOW + 62)
    assert nodes(line.serve(NOW + 62)) == [C]


# -- where nobody is proven --------------------------------------------------------------------------


def test_where_no_proven_node_is_here_newcomers_are_leased_all_the_work() -> None:
    line = Line(LeaseBook(policy()))
    line.ask(B)
    line.ask(C)
    served = line.serve()
    assert [len(lease.tasks) for _, lease in served] == [3, 3]
    line.flood(100)
    assert sum(len(lease.tasks) for _, lease in line.serve()) == 12 - 6


def test_where_no_proven_node_is_here_dead_keys_hold_the_work_for_a_slots_time() -> None:
    line = Line(LeaseBook(policy()))
    line.flood(100)
    assert len(line.serve()) == 12
    assert len(line.serve(NOW + SLOT_SHARE * 60)) == 12


def test_the_first_proven_node_finds_all_the_work_free() -> None:
    line = Line(LeaseBook(policy()))
    line.flood(100)
    line.serve()
    assert line.book.capacity(waiting_groups=0, training=False) == 12


def test_proven_nodes_that_were_silent_for_long_are_not_here() -> None:
    book = staffed()
    assert book.staffed(NOW + 14)
    assert not book.staffed(NOW + 16)


def test_nothing_is_leased_to_newcomers_while_a_batch_is_trained_that_must_be_fresh() -> None:
    line = Line(LeaseBook(policy(max_off_policy_steps=0)))
    line.book.present(A, NOW)
    assert line.book.newcomer_capacity(waiting_groups=0, training=True, now=NOW) == 0
    assert line.book.newcomer_capacity(waiting_groups=0, training=False, now=NOW) == pool(8)


# -- what it costs to hold more ----------------------------------------------------------------------


def test_a_node_holds_at_most_twice_the_groups_that_were_accepted_of_it() -> None:
    """Attack: a key earns trust with one group, takes all that trust allows, and answers nothing."""
    book = LeaseBook(policy(leases_per_worker=16))
    for earned, most in ((1.0, 2), (3.0, 6), (100.0, 48)):
        assert book.quota(A, 1.0, earned)[1] == most


def test_groups_that_were_dropped_are_paid_for_before_as_many_are_held_again() -> None:
    book = LeaseBook(policy(leases_per_worker=16))
    earned = LeaseShare(1.0, earned=6.0)
    held = [granted(book, A, share=earned) for _ in range(4)]
    assert sum(len(lease.tasks) for lease in held) == 12
    book.expire(NOW + 61)
    later = book.record(A).rest_until
    assert book.quota(A, 1.0, 6.0)[1] == 1
    assert len(granted(book, A, now=later, share=earned).tasks) == 1
    assert book.quota(A, 1.0, 12.0)[1] == 12


def test_a_node_is_proven_by_work_that_was_accepted_and_stood_an_audit() -> None:
    assert not Reputation().proven
    accepted = {"sums": Trust(accepted=4)}
    assert not Reputation(accepted).proven, "audited by nobody"
    assert Reputation(accepted, audited=4).proven


# -- what is remembered ------------------------------------------------------------------------------


def test_a_ticket_whose_leases_do_not_come_back_is_failing_until_they_do() -> None:
    line, now = Line(staffed()), float(NOW)
    for number in range(20):
        line.flood(10, first=10 * number, now=now)
        line.serve(now)
        now += 61
        line.book.expire(now)
        line.book.present(A, now)
    record = line.book.newcomers.tickets[ONE.ticket]
    assert record.lost >= 11
    assert record.failing
    assert record.reliability < FAILING
    for _ in range(16):
        record.count(True)
    assert not record.failing


def test_keys_that_come_and_go_leave_nothing_behind() -> None:
    line = Line(staffed())
    line.ask(C)
    line.book.newcomers.leave(C, ONE, NOW)
    for number in range(MAX_PLACES):
        line.ask(key(number))
        line.book.newcomers.leave(key(number), ONE, NOW)
    assert len(line.book.newcomers) == 0
    assert line.book.nodes == {}
    line.flood(3, now=NOW + 1, first=2 * MAX_PLACES)
    line.ask(C, now=NOW + 2)
    assert C not in nodes(line.serve(NOW + 2)), "its place was forgotten"
