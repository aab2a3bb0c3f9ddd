import dataclasses
import math
import random
from collections import Counter
from itertools import product

import msgspec
import numpy as np
import pytest
from support.protocol_cases import NOW, PROOFS

from primerl.protocol.audits import audit_rate
from primerl.protocol.envelope import utc
from primerl.protocol.errors import Reason
from primerl.protocol.numerics import MeanBounds, NumericsClass
from primerl.protocol.reputation import (
    AUDIT_FAULTS,
    BAN_AT_ONCE,
    CANARIES,
    CHEATER,
    CLIP_COST,
    CLIP_NATS,
    FAULT_MEMORY,
    FRAUD,
    FRAUD_WEIGHT,
    HALF_LIFE_S,
    HARMLESS,
    HONEST,
    INCREMENT,
    MIN_EVIDENCE,
    WINDOW,
    Audited,
    BanTest,
    Outcome,
    Placement,
    Reputation,
    ReputationSnapshot,
    Trust,
    ban_test,
    beta_low,
    outcome_of,
)

OTHERS = set(Reason) - HARMLESS - FRAUD
TEST = ban_test(msgspec.structs.replace(PROOFS, false_bans=1e-3), expected_audits=1e6)
"""Bars of a run of a million audits with one false ban in a thousand such runs."""


def after(accepted: int = 0, **rejected: int) -> Reputation:
    """A peer after one submission; reasons by name in lower case."""
    peer = Reputation()
    peer.record("sums", accepted, Counter({Reason(name): n for name, n in rejected.items()}), NOW)
    return peer


def trust(accepted: int = 0, **rejected: int) -> Trust:
    """Trust in that peer, in the environment that the submission was of."""
    return after(accepted, **rejected).of("sums")


def test_a_stranger_is_neither_trusted_nor_quarantined() -> None:
    peer = Reputation()
    assert peer.of("sums").mean == 0.5
    assert not peer.of("sums").quarantined
    assert peer.top_reason() == ""


def test_only_evidence_moves_trust() -> None:
    assert trust(accepted=9).mean == pytest.approx(10 / 11)
    assert trust(accepted=9, malformed=1).mean == pytest.approx(10 / 12)
    assert trust(malformed=3).mean == pytest.approx(1 / 5)


def test_what_costs_the_rollout_only_never_costs_the_peer() -> None:
    for reason in HARMLESS:
        peer = after(**{reason.value: 1000})
        assert peer.of("sums").mean == 0.5, reason
        assert not peer.of("sums").quarantined
        assert peer.top_reason() == reason.value  # still shown


def test_fraud_weighs_more_than_a_failure() -> None:
    for reason in FRAUD:
        assert trust(**{reason.value: 1}).bad == FRAUD_WEIGHT, reason
        assert trust(**{reason.value: 1}).mean < trust(malformed=1).mean


def test_any_other_reason_is_one_failure() -> None:
    for reason in OTHERS:
        assert trust(**{reason.value: 3}).bad == 3, reason


def test_a_reason_is_harmless_or_fraud_but_not_both() -> None:
    assert not HARMLESS & FRAUD
    assert BAN_AT_ONCE < AUDIT_FAULTS < FRAUD


def test_quarantine_needs_evidence() -> None:
    few = int(MIN_EVIDENCE) - 1
    assert not trust(malformed=few).quarantined
    assert trust(malformed=few + 1).quarantined
    assert trust(bad_reward=int(MIN_EVIDENCE / FRAUD_WEIGHT)).quarantined


def test_quarantine_needs_more_bad_than_good() -> None:
    assert not trust(accepted=20, malformed=20).quarantined
    assert trust(accepted=20, malformed=21).quarantined


def test_evidence_halves_in_half_a_life() -> None:
    peer = trust(accepted=8, malformed=16)
    peer.age(NOW + HALF_LIFE_S)
    assert (peer.good, peer.bad) == pytest.approx((4, 8))
    peer.record(1, Counter({Reason.MALFORMED: 2}), NOW + 2 * HALF_LIFE_S)
    assert (peer.good, peer.bad) == pytest.approx((3, 6))
    assert (peer.accepted, peer.rejected[Reason.MALFORMED]) == (9, 18)  # the history does not fade


def test_a_quarantined_peer_recovers_by_time_alone() -> None:
    """It is leased nothing, so no record() ever comes: age() must do it."""
    peer = trust(malformed=20)
    assert peer.quarantined
    peer.age(NOW + 60)
    assert peer.quarantined
    peer.age(NOW + HALF_LIFE_S)
    assert not peer.quarantined
    assert peer.mean < 0.5  # let in again, not forgiven


def test_a_clock_that_is_set_back_neither_adds_nor_decays_evidence() -> None:
    peer = trust(malformed=10)
    peer.age(NOW - 10 * HALF_LIFE_S)
    assert peer.bad == 10
    peer.age(NOW)
    assert peer.bad == 10


def test_the_commonest_reason_is_shown() -> None:
    assert after(malformed=2, bad_reward=3, stale=1).top_reason() == "bad_reward"


# -- what can be counted on --------------------------------------------------------------------------


def test_the_lower_quantile_is_that_of_the_beta_posterior() -> None:
    grid = (np.arange(200_000) + 0.5) / 200_000
    for good, bad in product([0, 0.5, 1, 4, 16, 64, 1000], [0, 0.3, 1, 4, 64]):
        log = good * np.log(grid) + bad * np.log1p(-grid)
        below = np.cumsum(np.exp(log - log.max()))
        exact = grid[np.searchsorted(below, 0.05 * below[-1])]
        assert beta_low(1 + good, 1 + bad) == pytest.approx(exact, abs=0.012), (good, bad)


def test_what_can_be_counted_on_grows_with_the_record_and_is_small_for_a_stranger() -> None:
    lows = [trust(accepted=n).low for n in (0, 1, 8, 64, 640)]
    assert lows == sorted(lows)
    assert (lows[0], lows[3]) == pytest.approx((0.05, 0.955), abs=1e-3)
    assert trust(accepted=64, malformed=8).low < trust(accepted=64).low
    assert all(low < trust(accepted=n).mean for n, low in zip((0, 1, 8, 64), lows, strict=False))


# -- the sequential test -----------------------------------------------------------------------------


def audits(outcome: Outcome, count: int, nats: float = -1.0) -> list[Audited]:
    return [Audited(outcome, nats)] * count


def honest(rng: np.random.Generator, count: int) -> list[Audited]:
    """As calibrated: outcomes of HONEST; log-likelihood ratios of honest noise between policies that are
    0 to 4 standard deviations apart, so exp() of each has mean 1."""
    outcomes: list[Outcome] = list(HONEST)
    apart = rng.uniform(0.0, 4.0, count)
    nats = rng.normal(-0.5 * apart**2, apart)
    chosen = rng.choice(3, count, p=list(HONEST.values()))
    return [Audited(outcomes[k], x) for k, x in zip(chosen.tolist(), nats.tolist(), strict=True)]


def cheating(rng: np.random.Generator, count: int, detected: float) -> list[Audited]:
    """Rejected with a probability of `detected`, else clean."""
    return [Audited("rejected" if x < detected else "clean", 0.0) for x in rng.random(count)]


def alarms(stream: list[Audited], test: BanTest) -> int:
    """How many bans a stream of audits brings; after each the test begins anew."""
    peer, found = Reputation(), 0
    for one in stream:
        peer.observe([one], test)
        if peer.banned:
            found += 1
            peer = Reputation()
    return found


def until_ban(peer: Reputation, stream: list[Audited]) -> int:
    """Audits until the ban."""
    for count, one in enumerate(stream, 1):
        peer.observe([one], TEST)
        if peer.banned:
            return count
    return len(stream) + 1


def test_both_hypotheses_of_the_test_are_distributions() -> None:
    assert sum(HONEST.values()) == pytest.approx(1)
    assert sum(CHEATER.values()) == pytest.approx(1)
    # What Ville's inequality asks for: under honesty the mean of e^increment is 1.
    assert sum(p * math.exp(INCREMENT[name]) for name, p in HONEST.items()) == pytest.approx(1)


def test_false_bans_stay_within_the_budget() -> None:
    """200,000 honest audits at a bar for 0.25 alarms per 500: at most 100 alarms are in the budget."""
    test = ban_test(msgspec.structs.replace(PROOFS, false_bans=0.25), expected_audits=500)
    stream = honest(np.random.default_rng(1), 200_000)
    assert 1 <= alarms(stream, test) <= 100


@pytest.mark.parametrize("apart", [0.1, 1.0, 3.0, 10.0])
def test_clipping_gives_an_honest_worker_no_upward_drift(apart: float) -> None:
    """E[e^increment] <= 1 by integration over the normal noise of policies `apart` deviations apart."""
    grid = np.linspace(-10, 10, 200_001)
    density = np.exp(-0.5 * grid**2) / np.exp(-0.5 * grid**2).sum()
    increment = np.clip(-0.5 * apart**2 + apart * grid, -CLIP_NATS, CLIP_NATS) - CLIP_COST
    assert (density * np.exp(increment)).sum() <= 1.0
    assert (density * increment).sum() < 0.0


@pytest.mark.parametrize("record", [0, 10_000])
@pytest.mark.parametrize(("detected", "within"), [(0.99, 4), (0.5, 20)])
def test_a_cheater_is_banned_soon_whatever_its_record(
    record: int, detected: float, within: int
) -> None:
    """99 of 100 cheaters are banned within 4 audited rollouts if each is caught with 99 %, within 20 if
    with 50 %; ten thousand honest rollouts before buy nothing."""
    rng = np.random.default_rng(3)
    before = Reputation()
    before.observe(audits("clean", record), TEST)
    counts: list[int] = []
    for _ in range(400):
        peer = Reputation.restore(before.snapshot(), ())
        counts.append(until_ban(peer, cheating(rng, 100, detected)))
    assert np.mean(np.array(counts) <= within) >= 0.99


@pytest.mark.parametrize("share", [0.05, 0.1, 0.25])
def test_a_worker_that_forges_a_small_share_after_a_long_honest_record_is_banned(
    share: float,
) -> None:
    """Two thousand honest rollouts bring the audits down to a tenth; then one rollout in twenty or more is
    forged. In the mean less than a hundred forgeries are learned from until the ban."""
    learned: list[int] = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        peer, forged, now = Reputation(), 0, float(NOW)
        for submission in range(2500):
            now += 5.0
            peer.age(now)
            if peer.banned:
                break
            if peer.of("sums").quarantined:
                continue
            bad = (rng.random(8) < share) & (submission >= 250)
            drawn = rng.random(8) < audit_rate(peer.of("sums"), 0.1, 0.0, peer.recent_fault)
            drawn |= bool((bad & drawn).any())  # one guilty has them all audited
            caught = int((bad & drawn).sum())
            forged += int(bad.sum()) - caught
            faults = Counter({Reason.BAD_SAMPLING: caught}) if caught else Counter[Reason]()
            peer.record("sums", 8 - caught, faults, now)
            peer.observe(
                [Audited("rejected" if one else "clean", -1.0) for one in bad[drawn].tolist()], TEST
            )
        assert peer.banned
        learned.append(forged)
    assert np.mean(learned) < 100


def test_a_previous_policy_is_found_by_many_small_signs() -> None:
    """No single audit is suspect; 1 nat in the mean per audited rollout bans within 64 of them."""
    rng = np.random.default_rng(4)
    for _ in range(50):
        stream = [Audited("clean", x) for x in rng.normal(1.0, math.sqrt(2.0), 64).tolist()]
        peer = Reputation()
        assert until_ban(peer, stream) <= 64
        assert peer.banned.startswith("another policy version in a sequential test: ")


def test_one_rollout_alone_bans_nobody_by_another_policy() -> None:
    peer = Reputation()
    peer.observe([Audited("clean", 1e9)], TEST)
    assert peer.other_nats <= CLIP_NATS
    peer.observe([Audited("clean", math.nan)], TEST)
    assert not peer.banned


def test_where_another_policy_says_nothing_it_bans_no_worker() -> None:
    deaf = ban_test(msgspec.structs.replace(PROOFS, other_scale=0.0), 1000)
    peer = Reputation()
    peer.observe([Audited("clean", 50.0)] * 1000, deaf)
    assert peer.other_nats == 0.0
    half = ban_test(msgspec.structs.replace(PROOFS, other_scale=0.5), 1000)
    peer.observe([Audited("clean", 4.0)], half)
    assert peer.other_nats == pytest.approx(2.0, abs=0.01)


def test_the_bar_grows_by_the_logarithm_of_what_is_audited() -> None:
    assert ban_test(PROOFS, 1e6).bar - ban_test(PROOFS, 1e3).bar == pytest.approx(math.log(1e3))
    assert ban_test(PROOFS, 0).bar == ban_test(PROOFS, 1).bar


def test_a_ban_says_which_test_its_value_and_the_bar() -> None:
    peer = Reputation()
    peer.observe(audits("rejected", 3), TEST)
    assert peer.banned == (
        "rejected and suspect audits in a sequential test: 24.0 nats, the bar is 21.8 "
        "(after 3 audited rollouts)"
    )
    assert peer.refused == f"banned: {peer.banned}"
    peer.record("sums", 1000, Counter(), NOW)
    peer.age(NOW + 100 * HALF_LIFE_S)
    assert peer.refused  # neither work nor time lifts it


BOUNDS = MeanBounds(0.01, 0.008, 0.03, 0.05)
MEAN_TEST = dataclasses.replace(TEST, means=BOUNDS)


def with_means(
    count: int,
    *,
    shift: float = 0.0,
    trend: float = 0.0,
    apart: float = 0.0,
    distance: float = 0.04,
) -> list[Audited]:
    """Clean rollouts whose means scatter about these values."""
    rng, means = np.random.default_rng(7), (shift, trend, *[apart / 7**0.5] * 7, distance)
    scatter = np.array([0.01, 0.005, *[0.02] * 7, 0.005])
    return [
        Audited("clean", -1.0, means=tuple((scatter * rng.normal(size=10) + means).tolist()))
        for _ in range(count)
    ]


def test_noise_that_averages_out_bans_nobody() -> None:
    peer = Reputation()
    peer.observe(with_means(1000 * WINDOW), MEAN_TEST)
    assert not peer.banned
    assert peer.mean_nats == 0.0


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("logprob_shift", {"shift": -0.05}),
        ("logprob_trend", {"trend": -0.021}),
        ("fingerprint_shift", {"apart": 0.06}),
        ("fingerprint", {"distance": 0.06}),
    ],
)
def test_what_is_in_the_noise_of_a_rollout_and_stays_in_the_mean_bans_within_64(
    name: str, off: dict[str, float]
) -> None:
    peer = Reputation()
    cheats = with_means(64, **off)
    peer.observe(cheats[: 2 * WINDOW], MEAN_TEST)
    assert not peer.banned, "two windows are not enough"
    peer.observe(cheats[2 * WINDOW : 3 * WINDOW], MEAN_TEST)
    assert peer.banned.startswith(f"means of 16 rollouts ({name} ")
    assert "(after 48 audited rollouts)" in peer.banned
    unbounded = Reputation()
    unbounded.observe(cheats, TEST)
    assert not unbounded.banned, "a run without such bounds tests no means"


def test_a_text_that_comes_again_and_what_is_no_number_say_nothing_of_a_mean() -> None:
    peer = Reputation()
    bad = [Audited("clean", -1.0, means=(math.nan,) * 10), Audited("clean", -1.0)]
    peer.observe([*with_means(WINDOW - 1, shift=1.0), *bad * 50], MEAN_TEST)
    assert len(peer.window) == WINDOW - 1
    assert peer.mean_nats == 0.0
    again = Reputation.restore(peer.snapshot(), ())
    again.observe(with_means(1, shift=1.0), MEAN_TEST)
    assert (again.window, again.mean_nats > 0) == ((), True)


def test_bytes_that_no_honest_software_makes_ban_at_once() -> None:
    peer = after(accepted=1000, bad_proof=1)
    assert peer.banned == "bad_proof: no honest software makes this"
    assert not after(accepted=1000, bad_reward=1).banned
    assert not after(accepted=1000, bad_proof=0).banned


def test_the_first_ban_stands() -> None:
    peer = after(bad_proof=1)
    peer.observe(audits("rejected", 9), TEST)
    assert peer.banned.startswith("bad_proof")


def test_a_proof_of_fraud_during_a_ban_with_an_end_bans_for_ever() -> None:
    peer = after(accepted=3)
    peer.ban("by the operator", NOW + 60)
    assert peer.refused == f"banned until {utc(int(NOW) + 60)}: by the operator"
    peer.record("sums", 0, Counter({Reason.BAD_PROOF: 1}), NOW)
    assert not peer.end_ban(NOW + 1e9)
    assert peer.refused == "banned: bad_proof: no honest software makes this"


def test_only_what_an_audit_rejects_counts_in_the_test() -> None:
    counted = {reason: outcome_of(reason, True) for reason in Reason}
    assert counted == {reason: "rejected" if reason in AUDIT_FAULTS else None for reason in Reason}


def test_a_rollout_that_holds_is_clean_or_suspect() -> None:
    assert (outcome_of(None, False), outcome_of(None, True)) == ("clean", "suspect")


def test_a_fault_is_recent_until_enough_audits_were_clean() -> None:
    peer = after(accepted=100)
    assert not peer.recent_fault
    peer.record("sums", 0, Counter({Reason.BAD_SAMPLING: 1}), NOW)
    peer.observe(audits("clean", FAULT_MEMORY - 1), TEST)
    assert peer.recent_fault
    peer.observe(audits("clean", 1), TEST)
    assert not peer.recent_fault


def test_half_way_to_a_ban_counts_as_a_recent_fault() -> None:
    peer = Reputation()
    peer.observe(audits("suspect", 3), TEST)
    assert not peer.recent_fault
    peer.observe(audits("suspect", 1), TEST)
    assert peer.recent_fault


def test_a_reputation_restored_from_bytes_goes_on_as_before() -> None:
    peer = after(accepted=40, bad_sampling=1, stale=3)
    peer.observe([*audits("rejected", 2), *audits("clean", 2, nats=3.0)], TEST)
    stored = msgspec.msgpack.encode(peer.snapshot())
    again = Reputation.restore(msgspec.msgpack.decode(stored, type=ReputationSnapshot), ())
    assert again == peer
    for one in (peer, again):
        one.observe(audits("rejected", 1), TEST)
    assert again.banned == peer.banned != ""
    assert Reputation.restore(again.snapshot(), ()).banned == peer.banned


def test_a_stored_reason_of_newer_software_is_left_out() -> None:
    stored = msgspec.structs.replace(trust(malformed=2).snapshot(), rejected={"newer": 3})
    assert Trust.restore(stored).rejected == {}


# -- numerics classes --------------------------------------------------------------------------------

ONE, TWO = NumericsClass("vllm", "0.25.1", "H100"), NumericsClass("hf", "2.13.0", "cpu")


def test_a_worker_is_placed_by_its_first_rollouts_and_later_ones_change_nothing() -> None:
    placement = Placement().claim(ONE).add([False] * 12).add([True, False, False, True, True])
    assert (placement.canaries, placement.odd) == (CANARIES, 2)
    assert placement.placed
    assert placement.add([True] * 99) == placement


def test_of_ten_thousand_honest_workers_none_is_misplaced() -> None:
    chance = random.Random(0)
    for _ in range(10_000):
        drawn = [chance.random() < HONEST["suspect"] for _ in range(CANARIES)]
        assert not Placement().claim(ONE).add(drawn).is_odd


def test_a_refused_claim_stays_refused_and_another_one_starts_anew() -> None:
    peer = Reputation()
    peer.placement = Placement().claim(ONE).add([True] * CANARIES).refuse("not of it")
    assert peer.refused == "wrong numerics class: not of it"
    assert not peer.banned
    peer.placement = peer.placement.claim(TWO)
    assert peer.refused == ""
    assert peer.placement.canaries == 0
    peer.placement = peer.placement.claim(ONE)
    assert "as it was found before" in peer.refused
    again = Reputation.restore(peer.snapshot(), ())
    assert again == peer
