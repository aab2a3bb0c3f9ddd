"""A lease is kept by its verdict: what is burnt or handed back costs the node, and its tasks go out again."""

import pytest
from support.lease_cases import A, B, C, fail, grant, granted, indices, keep, policy
from support.protocol_cases import NOW

from primerl.node.trainer.lease_book import (
    LATE,
    MAX_FREE_RETURNS,
    MAX_TRIES,
    LeaseBook,
    LeaseOutcome,
    LeaseShare,
    MixtureShare,
    Origin,
)
from primerl.protocol.leases import Lease

EARNED = LeaseShare(earned=4.0)


def test_a_lease_that_is_answered_with_failures_is_lost_and_its_node_rests() -> None:
    book = LeaseBook(policy())
    fail(book, granted(book), A, NOW + 1)
    assert book.resting(A, NOW + 2)
    assert book.record(A).lost_groups == 3
    assert book.record(A).reliability < 1.0
    keep(book, granted(book, B), B, NOW + 1)
    assert not book.resting(B, NOW + 2)
    assert book.record(B).reliability == 1.0


def test_burnt_groups_are_paid_for_by_half_as_much_accepted_work() -> None:
    book = LeaseBook(policy(groups_per_lease=8, leases_per_worker=1))
    lease = granted(book, A, share=EARNED)
    assert len(lease.tasks) == 8
    fail(book, lease, A, NOW + 1)
    later = book.record(A).rest_until
    assert len(granted(book, A, now=later, share=EARNED).tasks) == 1


def test_work_that_is_not_judged_yet_counts_as_lost_until_it_is() -> None:
    book = LeaseBook(policy(groups_per_lease=8, leases_per_worker=4))
    lease = granted(book, A, share=EARNED)
    book.settle(lease.lease_id, A, NOW + 1)
    assert len(granted(book, A, now=NOW + 1, share=EARNED).tasks) == 1
    book.judge(lease, A, LeaseOutcome(8, 32), NOW + 2)
    assert not book.unjudged
    assert len(granted(book, A, now=NOW + 2, share=EARNED).tasks) == 7


def test_what_nobody_could_judge_counts_neither_way() -> None:
    book = LeaseBook(policy())
    lease = granted(book)
    book.judge(book.settle(lease.lease_id, A, NOW + 1), A, LeaseOutcome(3, blameless=True), NOW + 1)
    record = book.record(A)
    assert (record.reliability, record.lost_groups, record.kept_leases) == (1.0, 0.0, 0)
    assert not book.resting(A, NOW + 1)


def test_a_lost_task_goes_out_again_to_whoever_asks_next_a_few_times() -> None:
    book = LeaseBook(policy(groups_per_lease=1, leases_per_worker=64))
    lost = granted(book)
    fail(book, lost, A, NOW + 1)
    for _ in range(MAX_TRIES - 1):
        book.lease_again(0, indices(lost)[0])
        assert indices(granted(book, B)) == indices(lost)
    book.lease_again(0, indices(lost)[0])
    assert indices(granted(book, B)) != indices(lost), "it may be the task's fault"


def test_a_task_that_nobody_could_judge_goes_out_as_often_as_it_takes() -> None:
    book = LeaseBook(policy(groups_per_lease=1, leases_per_worker=64))
    lost = granted(book)
    for _ in range(3 * MAX_TRIES):
        book.lease_again(0, indices(lost)[0], blameless=True)
        assert indices(granted(book, B)) == indices(lost)


def test_leases_that_are_late_do_not_count_as_coming() -> None:
    book = LeaseBook(policy(max_off_policy_steps=8, leases_per_worker=8))
    for node in (A, B):
        keep(book, granted(book, node), node, NOW + 2)
    book.lead.returned(6, 8, 2.0)
    granted(book, A, now=NOW + 2)
    assert book.leased(now=NOW + 2 + 2 * LATE - 0.1) == {A: 3}
    assert book.leased(now=NOW + 2 + 2 * LATE + 0.1) == {}
    assert book.leased() == {A: 3}, "it is still on lease"
    early, late = (
        book.capacity(waiting_groups=0, training=False, now=NOW + 2 + seconds)
        for seconds in (1.0, 2 * LATE + 1)
    )
    assert late == early + 3


def test_a_node_that_makes_itself_slow_is_late_by_the_measure_of_the_others() -> None:
    book = LeaseBook(policy(leases_per_worker=8))
    keep(book, granted(book, C), C, NOW + 50)
    assert book.record(C).turnaround_s == 50
    book.lead.returned(29, 8, 2.0)
    book.lead.returned(3, 8, 50.0)
    assert book.lead.usual_s == 2.0
    granted(book, C, now=NOW + 50)
    assert book.leased(now=NOW + 50 + 2 * LATE + 0.1) == {}


def test_a_node_holds_no_more_than_it_returns_before_it_is_too_stale() -> None:
    book = LeaseBook(policy(leases_per_worker=16))
    book.lead.trained(1.0, 1.0)  # a version every two seconds, one of staleness
    keep(book, granted(book), A, NOW + 6)  # two seconds a group
    assert book.quota(A, 1.0)[1] == 3
    book.lead.trained(100.0, 100.0)
    assert book.quota(A, 1.0)[1] == 15, "half of a lease's time is the bound of slow runs"


# -- handing back ------------------------------------------------------------------------------------


def test_looking_at_leases_and_handing_some_back_is_free_for_restarts_alone() -> None:
    book, now = LeaseBook(policy()), float(NOW)
    free = 0
    while True:
        granted(book, A, now=now)
        book.release_lost(A, (), now)
        if book.resting(A, now):
            break
        free += 1
    assert free == MAX_FREE_RETURNS
    assert book.record(A).returned_leases == free + 1


@pytest.mark.parametrize("every", [3, 4, 8])
def test_a_node_that_hands_back_some_leases_gets_less_done_than_an_honest_one(every: int) -> None:
    """Attack: it looks at each lease, and computes those that it likes. A lease takes ten seconds."""
    book, now, kept, seen = LeaseBook(policy()), float(NOW), 0, 0
    while now < NOW + 4 * 3600:
        lease = granted(book, A, now=now)
        seen += 1
        if seen % every:
            now += 10.0
            keep(book, lease, A, now)
            kept += 1
        else:
            book.release_lost(A, (), now)
            now = max(now, book.record(A).rest_until)
    honest = 4 * 360
    assert kept < honest * (1 - 0.8 / every)
    assert book.record(A).returned_leases / seen == pytest.approx(1 / every, abs=0.01)


def test_a_rest_is_never_shorter_than_the_work_that_was_dropped() -> None:
    book = LeaseBook(policy(timeout_s=1000.0))
    keep(book, granted(book), A, NOW + 300)  # 100 s a group
    dropped = 0
    for _ in range(3):
        dropped = len(granted(book, A, now=NOW + 300).tasks)
        book.release_lost(A, (), NOW + 300)
    assert book.record(A).rest_until >= NOW + 300 + 100 * dropped


# -- newcomers ---------------------------------------------------------------------------------------


def newcomer(book: LeaseBook, node: bytes, now: float) -> Lease:
    share = LeaseShare(newcomer=Origin(b"ticket"))
    lease = grant(book, node, capacity=4, now=now, share=share)
    assert lease is not None
    return lease


def test_a_newcomer_that_answers_with_nothing_frees_its_slot_and_rests() -> None:
    book = LeaseBook(policy())
    book.present(A, NOW)
    before = book.newcomer_capacity(waiting_groups=0, training=False, now=NOW)
    lease = newcomer(book, B, NOW)
    assert book.newcomer_capacity(waiting_groups=0, training=False, now=NOW) == before - 1
    fail(book, lease, B, NOW)
    assert book.newcomer_capacity(waiting_groups=0, training=False, now=NOW) == before
    assert book.resting(B, NOW + 1)


def test_a_ticket_whose_newcomers_answer_with_nothing_is_failing() -> None:
    book = LeaseBook(policy())
    for number in range(12):
        node = bytes([100 + number]) * 32
        fail(book, newcomer(book, node, NOW), node, NOW)
    assert book.newcomers.tickets[b"ticket"].failing
    for number in range(12):
        node = bytes([150 + number]) * 32
        keep(book, newcomer(book, node, NOW), node, NOW)
    assert not book.newcomers.tickets[b"ticket"].failing


# -- mixtures ----------------------------------------------------------------------------------------

CHEAP, DEAR = 0, 1


def mixture() -> LeaseBook:
    shares = (MixtureShare(4), MixtureShare(4))
    return LeaseBook(policy(environments=shares, leases_per_worker=64, groups_per_lease=1))


def cheap_leases(book: LeaseBook, now: float, most: int = 100) -> int:
    """Nodes ask for the cheap environment alone, while others can play both."""
    taken = 0
    share = LeaseShare(playable={CHEAP}, staffed={CHEAP, DEAR})
    while taken < most and (lease := grant(book, A, now=now, share=share)):
        keep(book, lease, A, now)
        taken += 1
    return taken


def test_an_environment_that_is_a_batch_ahead_of_its_ratio_waits_for_the_others() -> None:
    """Attack: contributors say that they play the cheap environment alone."""
    book = mixture()
    ahead = cheap_leases(book, NOW)
    assert ahead <= 2 * 8 + 1
    assert book.ahead({CHEAP}, {CHEAP, DEAR}, NOW)
    dear = LeaseShare(playable={DEAR}, staffed={CHEAP, DEAR})
    for _ in range(10):
        lease = grant(book, B, now=NOW, share=dear)
        assert lease is not None
        keep(book, lease, B, NOW)
    assert cheap_leases(book, NOW) == pytest.approx(10, abs=1)


def test_a_false_claim_to_play_an_environment_does_not_hold_up_the_others() -> None:
    book = mixture()
    cheap_leases(book, NOW)
    assert cheap_leases(book, NOW + 59) == 0
    assert cheap_leases(book, NOW + 61) == 100, (
        "nothing of the dear one came back in a lease's time"
    )


def test_an_environment_that_nobody_can_play_holds_up_nothing() -> None:
    book = mixture()
    share = LeaseShare(playable={CHEAP}, staffed={CHEAP})
    for _ in range(50):
        lease = grant(book, A, share=share)
        assert lease is not None
        keep(book, lease, A, NOW)
    assert not book.ahead({CHEAP}, {CHEAP}, NOW)


def test_a_task_goes_out_once_where_its_lease_was_taken_back_and_its_work_came_and_was_lost() -> (
    None
):
    """A worker that lists a lease no more, while it uploads the answer, doubled its tasks in the queue."""
    book = LeaseBook(policy(groups_per_lease=4, leases_per_worker=64))
    lost = granted(book)
    assert book.release_lost(A, (), NOW + 1)
    for index in indices(lost):
        book.lease_again(0, index)
    again = [index for _ in range(3) for index in indices(granted(book, B, NOW + 2))]
    assert sorted(again) == sorted(set(again)) == list(range(12))


def test_a_claim_to_play_that_ends_and_comes_again_holds_up_the_others_no_longer() -> None:
    """Renewed within a lease's time it made the others of a mixture wait for ever, at no cost."""
    ratios = (MixtureShare(4), MixtureShare(4))
    book = LeaseBook(policy(environments=ratios, leases_per_worker=64))

    def play(now: float, *staffed: int) -> bool:
        lease = grant(book, A, now=now, share=LeaseShare(playable={0}, staffed=staffed))
        if lease is not None:
            keep(book, lease, A, now)
        return lease is not None

    while play(NOW, 0, 1):
        pass
    assert not play(NOW + 50, 0, 1), "the ratio is kept while work of the other may come"
    play(NOW + 55, 0)
    later = [play(NOW + 55 + second, 0, 1) for second in range(1, 60)]
    assert later[:4] == [False] * 4, "as before"
    assert all(later[6:])


@pytest.mark.parametrize("every", [1, 10])
def test_environments_that_share_the_debt_to_a_third_wait_for_it_too(every: int) -> None:
    """Three contributors play one environment each; the one that most is wanted of is slow."""
    ratios = (MixtureShare(4, 1), MixtureShare(4, 2), MixtureShare(4, 4))
    book = LeaseBook(policy(environments=ratios, leases_per_worker=64, groups_per_lease=1))
    groups = [0, 0, 0]
    for second in range(1200):
        for environment, node in enumerate((A, B, C)):
            if environment < 2 or second % every == 0:
                share = LeaseShare(playable={environment}, staffed={0, 1, 2})
                lease = grant(book, node, now=NOW + second, share=share)
                if lease is not None:
                    keep(book, lease, node, NOW + second)
                    groups[environment] += 1
    for environment, ratio in enumerate((1, 2)):
        # each is at most a batch of 8 groups ahead
        assert groups[environment] <= ratio / 7 * sum(groups) + 8 + 1


@pytest.mark.parametrize("every", [59.0, 20.0])
def test_a_single_slow_player_of_an_environment_does_not_set_the_pace_of_the_run(
    every: float,
) -> None:
    """Attack: it alone plays the dear environment, and brings a group now and then."""
    book, now = mixture(), float(NOW)
    cheap, dear = (LeaseShare(playable={one}, staffed={CHEAP, DEAR}) for one in (CHEAP, DEAR))
    slow, due, done = grant(book, B, now=now, share=dear), now + every, 0
    while now < NOW + 1200:
        lease = grant(book, A, now=now, share=cheap)
        now += 0.5
        if lease is not None:
            keep(book, lease, A, now)
            done += now > NOW + 200
        if slow is not None and now >= due:
            keep(book, slow, B, now)
            slow, due = grant(book, B, now=now, share=dear), now + every
    assert done > 0.9 * 2000, "after the time in which its claim was new"


def test_a_ratio_is_held_where_those_that_play_both_are_outnumbered() -> None:
    book, now, done = mixture(), float(NOW), [0, 0]
    cheap = LeaseShare(playable={CHEAP}, staffed={CHEAP, DEAR})
    both = LeaseShare(playable={CHEAP, DEAR}, staffed={CHEAP, DEAR})
    nodes = [(A, both), (B, both), *((bytes([60 + n]) * 32, cheap) for n in range(8))]
    for _ in range(600):
        leases = [(node, grant(book, node, now=now, share=share)) for node, share in nodes]
        now += 1.0
        for node, lease in leases:
            if lease is not None:
                keep(book, lease, node, now)
                done[lease.environment] += len(lease.tasks)
    assert done[CHEAP] < 1.1 * done[DEAR], done
