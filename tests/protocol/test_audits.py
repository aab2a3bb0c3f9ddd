import random
from collections import Counter

import pytest
from support.protocol_cases import NOW

from primerl.crypto.hashing import digest
from primerl.protocol.audits import (
    MAX_ENVIRONMENTS,
    MAX_PEERS,
    MIN_GROUPS,
    Outliers,
    audit_rate,
    draw,
    is_audited,
)
from primerl.protocol.errors import Reason
from primerl.protocol.reputation import Reputation, Trust

CHALLENGE = digest(b"challenge")
ME, B, C, D = (bytes([n]) * 32 for n in (10, 11, 12, 13))


def known(good: float, bad: float = 0.0) -> Trust:
    return Trust(good=good, bad=bad)


# -- how much ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("good", [0, 1, 63.9])
def test_everything_of_a_newcomer_is_audited(good: float) -> None:
    assert audit_rate(known(good), 0.1, 0.0, False) == 1.0


def test_the_rate_falls_with_a_clean_record_to_the_base() -> None:
    rates = [audit_rate(known(good), 0.1, 0.0, False) for good in (64, 128, 256, 640, 10_000)]
    assert rates == sorted(rates, reverse=True)
    assert rates == pytest.approx([1.0, 0.5, 0.26, 0.103, 0.1], abs=0.02)
    assert audit_rate(known(1e6), 0.0, 0.0, False) < 1e-3
    assert audit_rate(known(1e6), 1.0, 0.0, False) == 1.0


def test_failures_in_the_record_keep_the_rate_up() -> None:
    assert audit_rate(known(1000, 30), 0.1, 0.0, False) > 0.5
    assert audit_rate(known(100, 10), 0.1, 0.0, False) == 1.0


def test_after_a_recent_fault_everything_is_audited() -> None:
    assert audit_rate(known(1e6), 0.1, 0.0, True) == 1.0
    peer = Reputation({"sums": known(1e6)})
    peer.record("sums", 100, Counter({Reason.BAD_SAMPLING: 1}), NOW)
    assert audit_rate(peer.of("sums"), 0.1, 0.0, peer.recent_fault) == 1.0


@pytest.mark.parametrize(("odd", "rate"), [(0, 0.1), (0.5, 0.55), (1, 1), (7, 1), (-1, 0.1)])
def test_outliers_are_audited_more(odd: float, rate: float) -> None:
    assert audit_rate(known(1e6), 0.1, odd, False) == pytest.approx(rate)


@pytest.mark.parametrize("good", [0, 10, 64, 100, 1e4, 1e7])
@pytest.mark.parametrize("bad", [0, 0.5, 3, 1e4])
def test_a_rate_is_a_share_and_never_below_the_base(good: float, bad: float) -> None:
    for odd in (0.0, 0.3, 1.0):
        assert 0.05 <= audit_rate(known(good, bad), 0.05, odd, False) <= 1.0


# -- which -------------------------------------------------------------------------------------------


def test_the_draw_is_as_frequent_as_the_rate() -> None:
    for rate in (0.02, 0.1, 0.5):
        drawn = sum(is_audited(CHALLENGE, g, r, rate) for g in range(100) for r in range(100))
        assert drawn == pytest.approx(10_000 * rate, abs=4 * (10_000 * rate) ** 0.5)


def test_a_rate_of_one_draws_everything_and_of_zero_nothing() -> None:
    places = [(g, r) for g in range(20) for r in range(20)]
    assert all(is_audited(CHALLENGE, g, r, 1.0) for g, r in places)
    assert not any(is_audited(CHALLENGE, g, r, 0.0) for g, r in places)


def test_the_draw_can_be_recomputed_and_hangs_on_the_challenge_and_the_place() -> None:
    lots = {draw(CHALLENGE, g, r) for g in range(30) for r in range(30)}
    assert len(lots) == 900
    assert draw(CHALLENGE, 3, 4) == draw(CHALLENGE, 3, 4)
    assert draw(CHALLENGE, 3, 4) != draw(CHALLENGE, 4, 3)
    assert draw(CHALLENGE, 3, 4) != draw(digest(b"another"), 3, 4)


def test_a_rollout_audited_at_a_rate_is_audited_at_every_higher_one() -> None:
    """So a verdict is checked without its rate: every audited lot lies below every other."""
    places = [(g, r) for g in range(20) for r in range(20)]
    few = {place for place in places if is_audited(CHALLENGE, *place, 0.1)}
    many = {place for place in places if is_audited(CHALLENGE, *place, 0.3)}
    assert few < many
    assert max(draw(CHALLENGE, *p) for p in few) < min(
        draw(CHALLENGE, *p) for p in places if p not in few
    )


def test_a_draw_that_is_known_beforehand_can_be_dodged_and_one_drawn_after_cannot() -> None:
    """Attack: a worker forges where it expects no audit, by a challenge that it guessed."""
    rng = random.Random(6)
    caught = 0
    for _ in range(100):
        guessed, real = rng.randbytes(32), rng.randbytes(32)
        forged = [n for n in range(40) if not is_audited(guessed, 0, n, 0.2)]
        assert not any(is_audited(guessed, 0, n, 0.2) for n in forged)
        caught += any(is_audited(real, 0, n, 0.2) for n in forged)
    assert caught >= 95


# -- outliers ----------------------------------------------------------------------------------------


class Play:
    """Peers send groups in turn: success of each rollout by `right`, replies of `length` tokens."""

    def __init__(self, seed: int = 1) -> None:
        self.outliers = Outliers()
        self._rng = random.Random(seed)

    def group(self, node: bytes, right: float, length: float = 50.0, env: str = "e") -> None:
        easy = self._rng.uniform(-0.2, 0.2)  # of the task: all rollouts of a group share it
        rewards = [float(self._rng.random() < right + easy) for _ in range(8)]
        lengths = [max(1, round(self._rng.gauss(length, 20.0))) for _ in range(8)]
        self.outliers.note(node, env, rewards, lengths)

    def odd(self, node: bytes) -> float:
        return self.outliers.outlierness(node)


@pytest.mark.parametrize("peers", [2, 4, 10])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_peers_alike_are_no_outliers(peers: int, seed: int) -> None:
    play = Play(seed)
    nodes = [bytes([n]) * 32 for n in range(peers)]
    worst = 0.0
    for _ in range(200):
        for node in nodes:
            play.group(node, 0.5)
        worst = max(worst, *(play.odd(node) for node in nodes))
    assert worst < 0.6
    assert max(play.odd(node) for node in nodes) < 0.3


@pytest.mark.parametrize(("right", "length"), [(0.8, 50.0), (0.2, 50.0), (0.5, 15.0)])
def test_a_peer_unlike_the_others_stands_out_and_they_do_not(right: float, length: float) -> None:
    play = Play()
    for _ in range(80):
        play.group(ME, right, length)
        for node in (B, C, D):
            play.group(node, 0.5)
    assert play.odd(ME) > 0.9
    assert max(play.odd(node) for node in (B, C, D)) < 0.5


def test_a_policy_that_learns_makes_nobody_an_outlier() -> None:
    play = Play()
    worst = 0.0
    for step in range(300):
        for node in (ME, B, C):
            play.group(node, 0.2 + 0.6 * step / 300)
        worst = max(worst, *(play.odd(node) for node in (ME, B, C)))
    assert worst < 0.6


def test_little_known_peers_are_no_outliers_and_serve_as_no_measure() -> None:
    play = Play()
    for _ in range(MIN_GROUPS - 1):
        play.group(B, 0.9)
    for _ in range(100):
        play.group(ME, 0.1)
    assert play.odd(ME) == play.odd(B) == play.odd(C) == 0.0


def test_the_failures_of_a_worker_that_behaves_again_are_soon_forgotten() -> None:
    play = Play()
    for right in (1.0, 0.5):
        for _ in range(150):
            play.group(ME, right)
            for node in (B, C, D):
                play.group(node, 0.5)
        if right == 1.0:
            assert play.odd(ME) > 0.9
    assert play.odd(ME) < 0.3


def test_a_minority_of_forgers_cannot_make_an_honest_peer_the_outlier() -> None:
    play = Play()
    forgers = [bytes([n]) * 32 for n in (20, 21)]
    for _ in range(100):
        for node in (ME, B, C, D):
            play.group(node, 0.5)
        for node in forgers:
            play.group(node, 1.0)
    assert play.odd(ME) < 0.3
    assert min(play.odd(node) for node in forgers) > 0.5


def test_environments_are_compared_apart() -> None:
    play = Play()
    for _ in range(60):
        play.group(ME, 0.9, env="easy")
        play.group(B, 0.9, env="easy")
        play.group(C, 0.1, env="hard")
        play.group(D, 0.1, env="hard")
    assert max(play.odd(node) for node in (ME, B, C, D)) < 0.5


def test_equal_rewards_of_everybody_are_no_evidence_and_one_other_value_is() -> None:
    outliers = Outliers()
    for _ in range(40):
        for node in (ME, B, C):
            outliers.note(node, "e", [1.0] * 4, [])
    assert outliers.outlierness(ME) == 0.0
    for _ in range(40):
        outliers.note(ME, "e", [0.0] * 4, [])
        outliers.note(B, "e", [1.0] * 4, [])
        outliers.note(C, "e", [1.0] * 4, [])
    assert outliers.outlierness(ME) == 1.0


def test_numbers_that_are_none_are_left_out() -> None:
    outliers = Outliers()
    for _ in range(40):
        outliers.note(ME, "e", [float("nan"), float("inf")], [])
        outliers.note(B, "e", [1.0], [])
    assert outliers.outlierness(ME) == 0.0


def test_memory_is_bounded() -> None:
    outliers = Outliers()
    for number in range(MAX_PEERS + 50):
        outliers.note(number.to_bytes(32, "big"), "e", [1.0], [4])
    assert len(outliers) == 2 * MAX_PEERS
    for number in range(4 * MAX_ENVIRONMENTS):
        outliers.note(ME, f"e{number}", [1.0], [4])
    assert len(outliers) == 2 * MAX_ENVIRONMENTS
