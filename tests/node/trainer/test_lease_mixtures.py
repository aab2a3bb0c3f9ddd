"""Several environments in one run: which of them the next lease is of, and which tasks it names."""

import random
from collections import Counter

import msgspec
import pytest
from support.lease_cases import SEED, A, B, grant, granted, indices, policy, task_digest
from support.protocol_cases import LEASE, MIXED, MIXED_LEASE, NOW, refuses

from primerl.node.trainer.lease_book import LeaseBook, LeaseShare, MixtureShare
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease, check_assignment, environment_of, sample_seed
from primerl.protocol.session import decode

ALL = frozenset({0, 1, 2})


def mixture(*ratios: float, sizes: tuple[int, ...] = (4, 4, 4), per_lease: int = 3) -> LeaseBook:
    """A book in which nodes may hold as much as they like."""
    shares = tuple(MixtureShare(size, ratio) for size, ratio in zip(sizes, ratios, strict=True))
    return LeaseBook(policy(environments=shares, leases_per_worker=64, groups_per_lease=per_lease))


def plays(*environments: int, staffed: frozenset[int] = ALL) -> LeaseShare:
    return LeaseShare(playable=frozenset(environments), staffed=staffed)


def work(book: LeaseBook, node: bytes, share: LeaseShare, now: float = NOW) -> Lease:
    """A lease that is worked off at once."""
    lease = granted(book, node, now=now, share=share)
    book.settle(lease.lease_id, node, now)
    return lease


def groups(leases: list[Lease]) -> Counter[int]:
    counted: Counter[int] = Counter()
    for lease in leases:
        counted[lease.environment] += len(lease.tasks)
    return counted


@pytest.mark.parametrize("ratios", [(1, 1, 1), (9, 1, 1), (0.5, 0.3, 0.2), (100, 1, 10)])
def test_ratios_hold_over_many_leases(ratios: tuple[float, ...]) -> None:
    book = mixture(*ratios)
    found = groups([work(book, A, plays(0, 1, 2)) for _ in range(2000)])
    for number, ratio in enumerate(ratios):
        assert abs(found[number] - 6000 * ratio / sum(ratios)) <= 2 * 3


def test_ratios_hold_in_every_batch() -> None:
    book = mixture(1, 1, 2, per_lease=1)
    leases = [work(book, A, plays(0, 1, 2)) for _ in range(800)]
    for start in range(0, 800, 8):
        assert groups(leases[start : start + 8]) == {0: 2, 1: 2, 2: 4}


def test_a_node_that_can_play_all_makes_up_for_one_that_cannot() -> None:
    book = mixture(1, 1, 1)
    leases: list[Lease] = []
    for _ in range(500):
        leases += [work(book, A, plays(0, 1, 2)), work(book, B, plays(0, 1))]
        assert leases[-1].environment in (0, 1)
    found = groups(leases)
    assert all(abs(found[number] - 1000) <= 2 * 3 for number in range(3))


def test_an_environment_that_no_node_can_play_is_skipped_and_catches_up_on_a_batch_at_most() -> (
    None
):
    book = mixture(1, 1, 1)
    without = [work(book, B, plays(0, 1, staffed=frozenset({0, 1}))) for _ in range(100)]
    assert groups(without) == {0: 150, 1: 150}
    found = groups([work(book, A, plays(0, 1, 2)) for _ in range(100)])
    assert all(abs(found[number] - 100) <= 2 * 3 for number in range(3)), "it is owed nothing"


def test_what_few_nodes_can_play_is_never_owed_more_than_a_batch() -> None:
    book, most = mixture(1, 1, 8), policy().groups_per_batch
    work(book, B, plays(0, 1))
    later = NOW + 61  # the claim to play the third was waited for
    for _ in range(200):
        work(book, B, plays(0, 1), later)
    assert most <= book.tasks[2].owed <= most + 3
    assert sum(queue.owed for queue in book.tasks) == pytest.approx(0.0)
    found = groups([work(book, A, plays(0, 1, 2), later) for _ in range(100)])
    assert found[2] <= 0.8 * 300 + most + 2 * 3


def test_leases_that_do_not_come_back_cost_an_environment_nothing() -> None:
    book = mixture(1, 1, 1)
    for turn in range(60):
        lost = granted(book, B, now=NOW + 1e4 * turn, share=plays(2))
        assert book.expire(NOW + 1e4 * turn + 61)[0].lease == lost
    assert [queue.owed for queue in book.tasks] == pytest.approx([0.0, 0.0, 0.0])
    found = groups([work(book, A, plays(0, 1, 2)) for _ in range(100)])
    assert all(abs(found[number] - 100) <= 2 * 3 for number in range(3))


def test_no_lease_is_granted_to_a_node_that_can_play_nothing_that_is_ready() -> None:
    book = mixture(1, 1, 1)
    assert grant(book, A, share=plays()) is None
    assert grant(book, A, share=plays(7)) is None
    assert (book.held, book.next_lease) == ({}, 0)


def test_each_environment_has_its_own_order_of_tasks_and_its_own_group_size() -> None:
    book = mixture(1, 1, 1, sizes=(4, 16, 2))
    first = [granted(book, A, share=plays(number)) for number in (0, 1, 2, 1)]
    assert [indices(lease) for lease in first] == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [3, 4, 5]]
    assert [lease.group_size for lease in first] == [4, 16, 2, 16]
    book.release(A, NOW)
    assert [sorted(queue.requeued) for queue in book.tasks] == [
        [0, 1, 2],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2],
    ]
    assert indices(granted(book, B, share=plays(2))) == [0, 1, 2]


def test_digests_are_asked_of_the_environment_of_the_lease() -> None:
    asked: list[tuple[int, int]] = []

    def digest_of(environment: int, index: int) -> bytes:
        asked.append((environment, index))
        return task_digest(index)

    book = mixture(1, 1, 1)
    book.grant(
        A,
        version=7,
        capacity=9,
        digest_of=digest_of,
        seed=SEED,
        now=NOW,
        share=plays(1),
    )
    assert asked == [(1, 0), (1, 1), (1, 2)]


def test_whatever_is_granted_lost_and_finished_what_is_owed_adds_up_to_nothing() -> None:
    chance, book = random.Random(7), mixture(5, 2, 1)
    for turn in range(400):
        now = NOW + 100.0 * turn
        some = frozenset(chance.sample(range(3), chance.randint(1, 3)))
        share = plays(*some, staffed=some | {0})
        for node in (A, B):
            if (lease := grant(book, node, now=now, share=share)) and chance.random() < 0.7:
                book.settle(lease.lease_id, node, now)
        book.expire(now + 61)
        assert sum(queue.owed for queue in book.tasks) == pytest.approx(0.0, abs=1e-6)


# -- leases of an environment ------------------------------------------------------------------------


def test_a_lease_of_an_environment_that_the_run_does_not_have_is_refused() -> None:
    assert environment_of(MIXED, MIXED_LEASE).name == "words"
    with refuses(Reason.WRONG_TASK):
        environment_of(MIXED, msgspec.structs.replace(LEASE, environment=2))


@pytest.mark.parametrize("number", [-1, 64, 2**40])
def test_the_number_of_an_environment_has_limits(number: int) -> None:
    wrong = msgspec.structs.replace(LEASE, environment=number)
    with refuses(Reason.MALFORMED):
        decode(msgspec.msgpack.encode(wrong), Lease)


def test_tasks_are_those_of_the_environment_of_the_lease() -> None:
    lease = granted(mixture(1, 1, 1), share=plays(1))
    check_assignment(lease, task_digest)
    with refuses(Reason.WRONG_TASK):
        check_assignment(lease, lambda index: task_digest(index + 100))


def test_two_leases_of_one_task_number_have_other_seeds() -> None:
    book = mixture(1, 1, 1)
    one, other = (granted(book, A, share=plays(number)) for number in (0, 1))
    assert one.tasks == other.tasks, "two environments may have the same task"
    seeds = {sample_seed(SEED, lease, A, one.tasks[0].digest, 0) for lease in (one, other)}
    assert len(seeds) == 2
