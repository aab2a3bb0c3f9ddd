from collections import Counter

import pytest
from protocol_cases import NOW

from primerl.protocol.errors import Reason
from primerl.protocol.reputation import (
    FRAUD_WEIGHT,
    HALF_LIFE_S,
    HARMLESS,
    MIN_EVIDENCE,
    PROVABLE_FRAUD,
    Reputation,
)

OTHERS = set(Reason) - HARMLESS - PROVABLE_FRAUD


def after(accepted: int = 0, **rejected: int) -> Reputation:
    """A peer after one submission; reasons by name in lower case."""
    peer = Reputation()
    peer.record(accepted, Counter({Reason(name): n for name, n in rejected.items()}), NOW)
    return peer


def test_a_stranger_is_neither_trusted_nor_quarantined() -> None:
    peer = Reputation()
    assert peer.trust == 0.5
    assert not peer.quarantined
    assert peer.top_reason() == ""


def test_only_evidence_moves_trust() -> None:
    assert after(accepted=9).trust == pytest.approx(10 / 11)
    assert after(accepted=9, malformed=1).trust == pytest.approx(10 / 12)
    assert after(malformed=3).trust == pytest.approx(1 / 5)


@pytest.mark.parametrize("reason", sorted(HARMLESS))
def test_what_costs_the_rollout_only_never_costs_the_peer(reason: Reason) -> None:
    peer = after(**{reason.value: 1000})
    assert peer.trust == 0.5
    assert not peer.quarantined
    assert peer.top_reason() == reason.value  # still shown


@pytest.mark.parametrize("reason", sorted(PROVABLE_FRAUD))
def test_fraud_weighs_more_than_a_failure(reason: Reason) -> None:
    assert after(**{reason.value: 1}).bad == FRAUD_WEIGHT
    assert after(**{reason.value: 1}).trust < after(malformed=1).trust


@pytest.mark.parametrize("reason", sorted(OTHERS))
def test_any_other_reason_is_one_failure(reason: Reason) -> None:
    assert after(**{reason.value: 3}).bad == 3


def test_a_reason_is_harmless_or_fraud_but_not_both() -> None:
    assert not HARMLESS & PROVABLE_FRAUD


def test_quarantine_needs_evidence() -> None:
    few = int(MIN_EVIDENCE) - 1
    assert not after(malformed=few).quarantined
    assert after(malformed=few + 1).quarantined
    assert after(bad_reward=int(MIN_EVIDENCE / FRAUD_WEIGHT)).quarantined


def test_quarantine_needs_more_bad_than_good() -> None:
    assert not after(accepted=20, malformed=20).quarantined
    assert after(accepted=20, malformed=21).quarantined


def test_evidence_halves_in_half_a_life() -> None:
    peer = after(accepted=8, malformed=16)
    peer.age(NOW + HALF_LIFE_S)
    assert (peer.good, peer.bad) == pytest.approx((4, 8))
    peer.record(1, Counter({Reason.MALFORMED: 2}), NOW + 2 * HALF_LIFE_S)
    assert (peer.good, peer.bad) == pytest.approx((3, 6))
    assert (peer.accepted, peer.rejected[Reason.MALFORMED]) == (9, 18)  # the history does not fade


def test_a_quarantined_peer_recovers_by_time_alone() -> None:
    """It is leased nothing, so no record() ever comes: age() must do it."""
    peer = after(malformed=20)
    assert peer.quarantined
    peer.age(NOW + 60)
    assert peer.quarantined
    peer.age(NOW + HALF_LIFE_S)
    assert not peer.quarantined
    assert peer.trust < 0.5  # let in again, not forgiven


def test_ageing_in_many_steps_is_ageing_in_one() -> None:
    often, once = after(accepted=5, malformed=7), after(accepted=5, malformed=7)
    for minute in range(1, 61):
        often.age(NOW + 60 * minute)
    once.age(NOW + 3600)
    assert (often.good, often.bad) == pytest.approx((once.good, once.bad))


def test_a_clock_that_is_set_back_neither_adds_nor_decays_evidence() -> None:
    peer = after(malformed=10)
    peer.age(NOW - 10 * HALF_LIFE_S)
    assert peer.bad == 10
    peer.age(NOW)
    assert peer.bad == 10


def test_good_work_outweighs_old_faults() -> None:
    peer = after(malformed=30)
    for submission in range(1, 9):
        peer.record(16, Counter(), NOW + 60 * submission)
    assert not peer.quarantined
    assert peer.trust > 0.75


def test_the_commonest_reason_is_shown() -> None:
    assert after(malformed=2, bad_reward=3, stale=1).top_reason() == "bad_reward"
