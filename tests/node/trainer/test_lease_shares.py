import pytest
from support.lease_cases import STRANGER, A, B, C, fail, grant, granted, keep, policy
from support.protocol_cases import NOW

from primerl.node.trainer.lease_book import HORIZON, MAX_DOUBLINGS, STEADY, LeaseBook, LeaseShare
from primerl.protocol.reputation import Trust

# -- nodes that do not honour their leases -----------------------------------------------------------


def expire_one(book: LeaseBook, node: bytes, now: float) -> float:
    """Let `node` take a lease and miss it; returns when that is noticed."""
    granted(book, node, now=now)
    book.expire(now + 61)
    return now + 61


def test_the_cooling_off_doubles_with_every_lease_that_runs_out_and_is_bounded() -> None:
    book = LeaseBook(policy())
    now, rests = float(NOW), list[float]()
    for _ in range(10):
        now = expire_one(book, A, now)
        until = book.record(A).rest_until
        assert grant(book, A, now=until - 0.01) is None
        rests.append(until - now)
        now = until
    assert rests[:4] == [15.0, 30.0, 60.0, 120.0]
    assert rests[-1] == rests[-2] == 15.0 * 2**MAX_DOUBLINGS
    assert granted(book, B)  # nobody else rests


def test_the_first_cooling_off_is_short_where_leases_are() -> None:
    book = LeaseBook(policy(timeout_s=2))
    granted(book)
    book.expire(NOW + 3)
    assert book.record(A).rest_until == NOW + 3 + 0.5


def test_a_settled_lease_ends_the_doubling() -> None:
    book = LeaseBook(policy())
    now = expire_one(book, A, expire_one(book, A, NOW) + 100) + 100
    assert book.record(A).missed == 2
    keep(book, granted(book, A, now=now), A, now + 1)
    assert book.record(A).missed == 0
    assert len(granted(book, A, now=now + 1).tasks) == 3


def test_a_lease_that_ran_out_halves_the_next_so_that_the_slow_get_what_they_can_do() -> None:
    book = LeaseBook(policy(groups_per_lease=4))
    now, sizes = float(NOW), list[int]()
    for _ in range(4):
        lease = granted(book, A, now=now)
        sizes.append(len(lease.tasks))
        book.expire(now + 61)
        now = book.record(A).rest_until
    assert sizes == [4, 2, 1, 1]


def test_a_restart_costs_no_cooling_off() -> None:
    book = LeaseBook(policy())
    granted(book)
    granted(book)
    book.release(A, NOW + 1)
    assert not book.resting(A, NOW + 1)
    assert book.record(A).reliability < 1.0
    lost = granted(book, A, now=NOW + 2)
    assert book.release_lost(A, (), NOW + 2)[0].lease == lost
    assert granted(book, A, now=NOW + 2)


@pytest.mark.parametrize("most", [2, 16])
def test_what_a_restart_costs_does_not_depend_on_how_many_leases_were_out(most: int) -> None:
    book, now = LeaseBook(policy(leases_per_worker=most)), float(NOW)
    for _ in range(2):  # nothing comes back in between
        out = 0
        while grant(book, A, now=now):
            out += 1
        assert out >= 0.8 * most
        now += 1
        assert len(book.release_lost(A, (), now)) == out
        assert not book.resting(A, now)
    assert book.record(A).reliability == pytest.approx(0.78, abs=0.01)


def test_leases_that_one_outage_takes_cost_one_rest_whenever_their_loss_is_noticed() -> None:
    """Found by a line that was dead for 20 s: the leases came back stale, one after the other, and each
    doubled the rest of an honest worker, to more than a minute."""
    book = LeaseBook(policy(leases_per_worker=4))
    leases = [granted(book) for _ in range(4)]
    for number, lease in enumerate(leases):
        fail(book, lease, A, NOW + 1 + number)
    assert book.record(A).rest_until == NOW + 1 + 15
    assert book.record(A).missed == 1
    again = book.record(A).rest_until
    fail(book, granted(book, now=again), A, again + 1)
    assert book.record(A).rest_until == again + 1 + 30


@pytest.mark.parametrize("how", ["expire", "give back"])
def test_whole_leases_cannot_be_picked_by_dropping_those_with_bad_luck(how: str) -> None:
    """Attack: a lease takes 10 s; every other one is dropped when it is done. In an hour the picker settles
    less than a third of what an honest node does, and half of that is luck."""

    def settled_in_an_hour(drops: bool) -> int:
        book, now, done = LeaseBook(policy()), float(NOW), 0
        for number in range(10_000):
            now = max(now, book.record(A).rest_until)
            if now > NOW + 3600:
                break
            lease = granted(book, A, now=now)
            now += 10.0
            if not drops or number % 2:
                keep(book, lease, A, now)
                done += 1
            elif how == "expire":
                now = lease.deadline + 1
                book.expire(now)
            else:
                book.release_lost(A, (), now)
        return done

    assert settled_in_an_hour(drops=False) >= 359
    assert settled_in_an_hour(drops=True) < 359 / 3


def test_a_node_that_loses_one_lease_in_ten_is_steady() -> None:
    book, now = LeaseBook(policy()), float(NOW)
    for number in range(200):
        now = max(now + 1, book.record(A).rest_until)
        lease = granted(book, A, now=now)
        if number % 10:
            keep(book, lease, A, now + 1)
        else:
            book.expire(now := now + 61)
        assert book.record(A).reliability >= STEADY
        assert book.record(A).missed <= 1


# -- shares ------------------------------------------------------------------------------------------


def test_a_newcomer_starts_with_one_lease() -> None:
    book = LeaseBook(policy())
    first = granted(book, A, share=STRANGER)
    assert grant(book, A, share=STRANGER) is None
    book.settle(first.lease_id, A, NOW + 1)
    known = Trust(good=12.0)  # its first lease was verified
    for _ in range(2):
        granted(book, A, now=NOW + 1, share=LeaseShare(known.low))
    assert grant(book, A, now=NOW + 1, share=LeaseShare(known.low)) is None


@pytest.mark.parametrize(
    ("trust", "leases"), [(0.0, 1), (0.1, 1), (0.2, 2), (0.5, 4), (0.9, 8), (1.0, 8)]
)
def test_leases_at_a_time_follow_trust(trust: float, leases: int) -> None:
    book = LeaseBook(policy(leases_per_worker=8))
    assert book.quota(A, trust)[0] == leases


def test_a_node_holds_what_it_can_settle_in_half_a_leases_time() -> None:
    book = LeaseBook(policy(groups_per_lease=4, leases_per_worker=4))
    assert book.quota(A, 1.0)[1] == 16  # nothing is known of its speed
    lease = granted(book, A)
    book.settle(lease.lease_id, A, NOW + 20)  # 5 s a group
    assert book.quota(A, 1.0)[1] == HORIZON * 60 / 5 == 6
    sizes = [len(granted(book, A, now=NOW + 20).tasks) for _ in range(2)]
    assert sizes == [4, 2]
    assert grant(book, A, now=NOW + 20) is None


def test_a_slow_node_is_still_given_one_group() -> None:
    book = LeaseBook(policy(groups_per_lease=4))
    book.settle(granted(book, A).lease_id, A, NOW + 3600)  # a trainer that was stopped, say
    assert book.quota(A, 1.0)[1] == 1
    assert len(granted(book, A, now=NOW + 3600).tasks) == 1


def test_fast_nodes_with_small_leases_are_not_held_back() -> None:
    book, now = LeaseBook(policy()), float(NOW)
    held = [granted(book, A, now=now), granted(book, A, now=now)]
    for _ in range(50):
        now += 0.5
        book.settle(held.pop(0).lease_id, A, now)
        held.append(granted(book, A, now=now))
    assert len(held) == 2


def test_two_leases_worked_off_one_after_the_other_are_not_counted_as_slow() -> None:
    book = LeaseBook(policy())
    first, second = granted(book), granted(book)
    book.settle(first.lease_id, A, NOW + 3)
    book.settle(second.lease_id, A, NOW + 6)
    assert book.record(A).pace == pytest.approx(1.0)


def test_a_lease_for_everybody_comes_before_a_second_for_anybody() -> None:
    book = LeaseBook(policy())
    granted(book, A)
    waiting = LeaseShare(waiting=frozenset({A, B, C}))
    assert grant(book, A, capacity=6, share=waiting) is None
    assert len(granted(book, A, capacity=7, share=waiting).tasks) == 1
    assert len(granted(book, B, capacity=6, share=waiting).tasks) == 3


def test_those_that_hold_nothing_divide_what_there_is() -> None:
    waiting = LeaseShare(waiting=frozenset({A, B, C}))
    for capacity, size in ((9, 3), (6, 2), (3, 1), (2, 1), (1, 1)):
        assert len(granted(LeaseBook(policy()), A, capacity=capacity, share=waiting).tasks) == size


def test_nobody_waits_for_a_node_that_rests() -> None:
    book = LeaseBook(policy())
    now = expire_one(book, B, NOW)
    granted(book, A, now=now)
    waiting = LeaseShare(waiting=frozenset({A, B}))
    lease = grant(book, A, capacity=3, now=now, share=waiting)
    assert lease is not None


def test_a_fast_node_does_not_starve_slow_ones() -> None:
    """Attack: one node asks all the time; two slow ones wait beside it and must each get their leases."""
    book, now = LeaseBook(policy()), float(NOW)
    got: dict[bytes, int] = {A: 0, B: 0, C: 0}
    busy: dict[bytes, float] = {}
    for _ in range(300):
        now += 0.1
        for held in list(book.held.values()):
            if busy[held.node] <= now:
                book.settle(held.lease.lease_id, held.node, now)
        idle = frozenset(node for node in (B, C) if not book.leased()[node])
        for node in (A, A, B, C):
            room = book.capacity(waiting_groups=0, training=True) // 2
            lease = grant(book, node, capacity=room, now=now, share=LeaseShare(waiting=idle | {A}))
            if lease is not None:
                got[node] += 1
                busy[node] = now + (0.1 if node == A else 2.0)
    assert got[A] > 5 * got[B]  # by speed
    assert min(got[B], got[C]) >= 12  # of 15 that fit into 30 s
