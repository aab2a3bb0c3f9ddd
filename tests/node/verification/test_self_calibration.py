"""A run measures its own noise: rollouts that make bounds, their renewal, and the workers that they judge."""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.noise_cases import H100, RTX, TOKENS, honest_4b
from support.protocol_cases import PROOFS

from primerl.node.config.run import RunConfig
from primerl.node.verification.bounds import PROVISIONAL, proof_contract
from primerl.node.verification.class_bounds import ENOUGH, Reference, provisional
from primerl.node.verification.envelope import FIRST
from primerl.node.verification.judgement import judge
from primerl.node.verification.self_calibration import (
    ADVICE,
    KEPT,
    MOST_FAILED_READINGS,
    RENEW,
    RENEW_STEPS,
    UNKNOWN,
    SelfCalibration,
    bounds_row,
)
from primerl.protocol.errors import Reason
from primerl.protocol.numerics import ENVELOPE, MAX_CLASSES, NumericsClass
from primerl.protocol.reputation import (
    CANARIES,
    OUTSIDE_CANARIES,
    Audited,
    BanTest,
    Placement,
    Reputation,
    ban_test,
    outcome_of,
)
from primerl.protocol.rollouts import MEASURES, Evidence

OWN, SECOND, STRANGER = b"o" * 32, b"s" * 32, b"x" * 32
NEW, IN_CLASS = Placement(H100), Placement(H100, canaries=CANARIES)
CONTRACT = replace(PROOFS, bounds="measured", reject=PROVISIONAL, suspect=PROVISIONAL)


def at(version: int, found: Sequence[Evidence]) -> list[tuple[int, Evidence]]:
    return [(version, one) for one in found]


def noise(count: int, seed: int = 0, scale: float = 1.0) -> list[Evidence]:
    return honest_4b(np.random.default_rng(seed), count, scale)


def calibrated(*nodes: bytes, count: int = ENOUGH, version: int = 0) -> SelfCalibration:
    """A run in which the first of `nodes` has made the bounds of H100."""
    made = SelfCalibration(CONTRACT, nodes or (OWN,))
    made.add([(nodes or (OWN,))[0]], H100, at(version, noise(count)))
    return made


# -- before there are bounds -------------------------------------------------------------------------


def test_honest_noise_of_a_4b_model_is_nowhere_near_provisional_bounds() -> None:
    found = noise(20_000)
    bounds = provisional(H100)
    for name in ("fingerprint", "sampling", "sampling_max", "logprob", "logprob_max"):
        largest = max(getattr(one, name) for one in found)
        assert largest < getattr(bounds.reject, name) / 4, name
    judged = [judge(one, bounds.applied(CONTRACT)) for one in found]
    assert not any(one.suspect or one.reason for one in judged), "nothing is suspected"


def test_nor_is_what_a_mixture_of_experts_with_random_routers_measured() -> None:
    worst = Evidence(0, 0, 96, 0.127, 0.02, 1.2, 0.08, 0.61, 40.0)
    assert judge(worst, provisional(H100).applied(CONTRACT)).reason is None


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        ({"fingerprint": 1.3}, Reason.WRONG_MODEL),
        ({"sampling_max": 4.0}, Reason.BAD_SAMPLING),
        ({"sampling": 0.4}, Reason.BAD_SAMPLING),
        ({"logprob_max": 9.0}, Reason.BAD_LOGPROBS),
        ({"fingerprint": float("nan")}, Reason.WRONG_MODEL),
    ],
)
def test_what_no_noise_explains_is_rejected_from_the_first_rollout_on(
    forged: dict[str, float], reason: Reason
) -> None:
    values: dict[str, Any] = dict.fromkeys(MEASURES, 0.0) | forged
    found = Evidence(0, 0, TOKENS, **values)
    assert judge(found, provisional(H100).applied(CONTRACT)).reason is reason


def test_without_references_work_is_learned_from_after_it_was_audited_whole() -> None:
    calibration = SelfCalibration(CONTRACT)
    found = calibration.conditions([STRANGER], H100, NEW)
    assert found.bounds is not None
    assert found.bounds.provisional
    assert (found.all_audited, found.unlearned, found.by_trainer) == (True, "", False)
    assert found.contract.other_scale == 0.0, "unmeasured noise bans nobody"
    (warning,) = calibration.warnings(Counter({H100: 2}))
    assert "provisional" in warning
    assert ADVICE in warning


def test_with_references_nothing_is_learned_from_a_stranger_of_an_unmeasured_class() -> None:
    calibration = calibrated(OWN)
    found = calibration.conditions([STRANGER], RTX, IN_CLASS)
    assert found.all_audited
    assert "RTX 4090" in found.unlearned
    assert not calibration.conditions([STRANGER], H100, IN_CLASS).unlearned
    unknown = calibration.conditions([STRANGER], UNKNOWN, IN_CLASS)
    assert "unknown class" in unknown.unlearned
    (warning,) = calibration.warnings(Counter({RTX: 1, H100: 3}))
    assert "1 worker of vllm 0.25.1 on RTX 4090, tp 1, bfloat16 waits for bounds" in warning
    assert f"no reference of that class has sent work: {ADVICE}" in warning


def test_a_reference_is_judged_by_provisional_bounds_and_measured_by_the_trainer() -> None:
    found = calibrated(OWN).conditions([OWN], H100, NEW)
    assert found.bounds is not None
    assert found.bounds.provisional
    assert (found.by_trainer, found.unlearned) == (True, "")
    assert not found.all_audited, "its class has bounds: a share of it is enough to renew them"
    assert SelfCalibration(CONTRACT, [OWN]).conditions([OWN], H100, NEW).all_audited


@pytest.mark.parametrize(
    ("per_step", "rate"), [(1, 0.1), (64, 0.1), (128, 0.0625), (512, 0.025), (4096, 0.025)]
)
def test_a_proven_reference_is_audited_as_often_as_renewing_the_bounds_takes(
    per_step: int, rate: float
) -> None:
    contract = replace(CONTRACT, audit_rate=0.1)
    calibration = SelfCalibration(contract, [OWN], rollouts_per_step=per_step)
    calibration.add([OWN], H100, at(0, noise(ENOUGH)))
    assert calibration.conditions([OWN], H100, IN_CLASS).audit_rate == pytest.approx(rate)
    for makers in (
        [STRANGER],
        [OWN, STRANGER],
    ):  # attack: a stranger's stage in a reference's pipeline
        assert calibration.conditions(makers, H100, IN_CLASS).audit_rate is None


# -- bounds ------------------------------------------------------------------------------------------


def test_bounds_come_with_enough_rollouts_and_say_of_what_they_are_made() -> None:
    calibration = SelfCalibration(CONTRACT, [OWN])
    taken, made = calibration.add([OWN], H100, at(3, noise(ENOUGH - 1)))
    assert (len(taken), made) == (ENOUGH - 1, None)
    assert calibration.rows({})[0].gathered == ENOUGH - 1
    _, made = calibration.add([OWN], H100, at(5, noise(1, 7)))
    assert made is not None
    assert (made.number, made.rollouts, made.tokens) == (1, ENOUGH, ENOUGH * TOKENS)
    assert (made.first_version, made.last_version) == (3, 5)
    assert 0 < made.rejected_at_most < 0.06
    assert made == calibration.bounds_of(H100)
    assert max(one.fingerprint for one in noise(ENOUGH)) < made.suspect.fingerprint
    assert made.suspect.fingerprint < made.reject.fingerprint < 0.2
    row = bounds_row(made, gathered=ENOUGH, workers=2)
    assert row.numerics == "vllm 0.25.1 on H100, tp 1, bfloat16"


def test_bounds_are_renewed_as_the_noise_grows_and_what_was_judged_stays_judged() -> None:
    calibration = calibrated(OWN)
    before = calibration.bounds_of(H100)
    assert before is not None
    loud = noise(4 * RENEW, 1, scale=1.6)
    made = [
        calibration.add([OWN], H100, at(40, loud[start : start + 16]))[1]
        for start in range(0, len(loud), 16)
    ]
    renewed = [one for one in made if one is not None]
    assert [one.number for one in renewed] == [2, 3, 4, 5]
    assert renewed[-1].suspect.fingerprint > before.suspect.fingerprint
    assert renewed[-1].last_version == 40
    after = calibration.conditions([STRANGER], H100, IN_CLASS)
    assert after.bounds == renewed[-1]
    assert before.number == 1, "a fact that was signed does not change"


def test_only_the_newest_rollouts_count_so_bounds_follow_the_noise_down_too() -> None:
    calibration = calibrated(OWN, count=KEPT)
    wide = calibration.bounds_of(H100)
    for start in range(KEPT // RENEW):
        calibration.add([OWN], H100, at(9, noise(RENEW, 100 + start, scale=0.5)))
    narrow = calibration.bounds_of(H100)
    assert wide is not None
    assert narrow is not None
    assert narrow.rollouts == KEPT
    assert narrow.first_version == 9
    assert narrow.reject.fingerprint < 0.7 * wide.reject.fingerprint


def test_measured_bounds_are_never_wider_than_provisional_ones() -> None:
    calibration = SelfCalibration(CONTRACT, [OWN])
    _, made = calibration.add([OWN], H100, at(0, noise(ENOUGH, scale=9.0)))
    assert made is not None
    for name in MEASURES:
        assert getattr(made.reject, name) <= getattr(PROVISIONAL, name)
        assert getattr(made.suspect, name) <= getattr(PROVISIONAL, name)


def test_a_class_holds_for_no_other_one() -> None:
    calibration = calibrated(OWN)
    for other in (RTX, replace(H100, tp=2), replace(H100, release="0.26.0"), UNKNOWN):
        found = calibration.conditions([STRANGER], other, IN_CLASS)
        assert found.unlearned, other


# -- poisoning ---------------------------------------------------------------------------------------


def test_a_stranger_never_moves_a_bound() -> None:
    calibration = calibrated(OWN)
    before = calibration.bounds_of(H100)
    for number in range(64):
        added = calibration.add([STRANGER], H100, at(1, noise(RENEW, number, scale=5.0)))
        assert added == ([], None)
        assert calibration.add([STRANGER], RTX, at(1, noise(RENEW, number))) == ([], None)
    assert calibration.bounds_of(H100) == before
    assert calibration.bounds_of(RTX) is None
    assert len(calibration.rows({})) == 1, "claims of strangers take no memory"


def test_nor_does_a_pipeline_that_a_stranger_is_a_stage_of() -> None:
    calibration = calibrated(OWN, SECOND)
    assert calibration.add([OWN, STRANGER], H100, at(1, noise(RENEW))) == ([], None)
    assert calibration.conditions([OWN, STRANGER], RTX, NEW).unlearned
    taken, _ = calibration.add([OWN, SECOND], H100, at(1, noise(RENEW)))
    assert len(taken) == RENEW


def test_a_reference_that_does_not_say_how_it_computes_makes_no_bounds() -> None:
    calibration = SelfCalibration(CONTRACT, [OWN])
    assert calibration.add([OWN], UNKNOWN, at(0, noise(ENOUGH))) == ([], None)


def test_the_number_of_classes_is_bounded() -> None:
    calibration = SelfCalibration(CONTRACT, [OWN])
    for number in range(3 * MAX_CLASSES):
        claimed = NumericsClass("hf", f"2.{number}", "cpu", 1, "bfloat16")
        calibration.add([OWN], claimed, at(0, noise(1)))
    assert len(calibration.rows({})) == MAX_CLASSES
    claims = {NumericsClass("hf", f"3.{number}"): 1 for number in range(4096)}
    assert len(calibration.rows(claims)) == 2 * MAX_CLASSES


def test_a_banned_reference_stops_counting_and_takes_its_rollouts_with_it() -> None:
    calibration = SelfCalibration(CONTRACT, [OWN, SECOND])
    calibration.add([OWN], H100, at(0, noise(ENOUGH, scale=4.0)))
    calibration.add([SECOND], H100, at(0, noise(2 * ENOUGH, 1)))
    wide = calibration.bounds_of(H100)
    (made,) = calibration.drop(OWN)
    assert wide is not None
    assert (made.rollouts, made.number) == (2 * ENOUGH, wide.number + 1)
    assert made.reject.fingerprint < wide.reject.fingerprint / 2
    assert calibration.add([OWN], H100, at(0, noise(RENEW))) == ([], None)


def test_a_class_whose_references_are_all_banned_is_provisional_again() -> None:
    calibration = calibrated(OWN)
    (made,) = calibration.drop(OWN)
    assert (made.provisional, made.number) == (True, 2)
    found = calibration.conditions([STRANGER], H100, IN_CLASS)
    assert found.unlearned, "a run that lost its references is not one that never had some"
    (warning,) = calibration.warnings(Counter({H100: 1}))
    assert "all workers of verification.references are banned" in warning


# -- restarts and rollbacks --------------------------------------------------------------------------


def test_a_restart_loses_nothing() -> None:
    before = calibrated(OWN, SECOND, count=2 * ENOUGH)
    before.add([SECOND], H100, at(7, noise(RENEW - 1, 5)))
    rows = [Reference(OWN, 0, one) for one in noise(2 * ENOUGH)]
    rows += [Reference(SECOND, 7, one) for one in noise(RENEW - 1, 5)]
    made = before.bounds_of(H100)
    assert made is not None
    after = SelfCalibration(CONTRACT, [OWN, SECOND])
    after.restore({H100: rows}, [made])
    assert after.rows({}) == before.rows({})
    conditions = after.conditions([STRANGER], H100, IN_CLASS)
    assert conditions == before.conditions([STRANGER], H100, IN_CLASS)
    _, renewed = after.add([OWN], H100, at(8, noise(RENEW, 6)))
    assert renewed is not None
    assert (renewed.number, renewed.rollouts) == (made.number + 1, 3 * ENOUGH + RENEW - 1)


def test_rollouts_of_versions_that_the_trainer_lost_make_no_bounds() -> None:
    calibration = calibrated(OWN, count=ENOUGH, version=4)
    calibration.add([OWN], H100, at(11, noise(RENEW, 1, scale=3.0)))
    wide = calibration.bounds_of(H100)
    (made,) = calibration.go_back(1, 6)
    assert wide is not None
    assert (made.term, made.number, made.last_version) == (1, wide.number + 1, 4)
    assert made.reject.fingerprint < wide.reject.fingerprint
    assert calibration.go_back(2, 6) == [], "nothing was lost this time"
    (gone,) = calibration.go_back(3, 2)
    assert gone.provisional


# -- claims ------------------------------------------------------------------------------------------


def test_a_worker_of_another_class_is_told_which_one_it_looks_like() -> None:
    calibration = calibrated(OWN)
    calibration.add([OWN], RTX, at(0, noise(ENOUGH, 2, scale=2.0)))
    seen = noise(16, 3, scale=2.0)
    why = calibration.misplaced(H100, seen)
    assert "claims vllm 0.25.1 on H100" in why
    assert "look like vllm 0.25.1 on RTX 4090" in why
    odd = calibration.misplaced(H100, noise(16, 3, scale=5.0))
    assert "look like no class that was measured" in odd


def test_a_worker_of_another_class_reads_which_measure_differs_and_by_how_much() -> None:
    calibration = calibrated(OWN)
    bounds = calibration.bounds_of(H100)
    assert bounds is not None
    alike = [replace(one, other_policy=-30.0) for one in noise(12, 4)]
    seen = [replace(one, logprob=0.9) for one in alike[:9]] + alike[9:]
    why = calibration.misplaced(H100, seen)
    assert f"logprob is up to 0.9 in 9 of 12, the bound is {bounds.suspect.logprob:.3g};" in why
    placed = Reputation(placement=Placement(H100).refuse(why))
    assert len(placed.refused) <= 250, "the whole of it fits into a refusal"


def replayed(seed: int, rollouts: int = 100_000) -> tuple[int, int, list[Reputation]]:
    """Honest workers and a reference under a policy whose noise grows by half: rejected, audits, workers."""
    chance = np.random.default_rng(seed)
    calibration = SelfCalibration(CONTRACT, [OWN])
    bar = ban_test(replace(CONTRACT, false_bans=1e-3), 1e6).bar
    workers = [Reputation() for _ in range(8)]
    rejected = judged = step = 0
    while judged < rollouts:
        batch = honest_4b(chance, 100, 1.0 + 0.5 * judged / rollouts)
        calibration.add([OWN], H100, at(step, batch[:12]))
        bounds = calibration.bounds_of(H100)
        step += 1
        if bounds is None:
            continue
        contract, test = bounds.applied(CONTRACT), BanTest(bar, bounds.other_scale)
        for number, seen in enumerate(batch[12:]):
            found, peer = judge(seen, contract), workers[number % len(workers)]
            outcome = outcome_of(found.reason, found.suspect)
            assert outcome is not None
            peer.observe([Audited(outcome, seen.other_policy)], test)
            peer.placement = peer.placement.claim(H100).add([found.suspect])
            rejected += found.reason is not None
            judged += 1
    return rejected, judged, workers


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_of_100000_honest_rollouts_none_is_rejected_and_no_worker_is_banned_while_bounds_are_renewed(
    seed: int,
) -> None:
    rejected, judged, workers = replayed(seed)
    assert judged >= 100_000
    assert rejected == 0
    assert not any(one.banned or one.placement.is_odd for one in workers)
    assert all(one.placement.placed for one in workers)
    assert max(one.suspicion for one in workers) < 0.5, "and none is suspect for long"


# -- the setting -------------------------------------------------------------------------------------


def contract(**verification: object) -> str:
    asked = {"verification": verification, "engine": {"dtype": "bfloat16"}}
    return proof_contract(RunConfig.model_validate(asked)).bounds


def test_a_run_in_bfloat16_measures_its_bounds_unless_it_is_told_others() -> None:
    assert contract() == "measured"
    assert contract(bounds="built-in") == "fixed"
    found = proof_contract(RunConfig())
    assert (found.dtype, found.bounds, found.source) == ("float32", "fixed", "built in for float32")


# -- the envelope ------------------------------------------------------------------------------------


def reading(count: int, seed: int = 3, version: int = 0, scale: float = 1.0) -> list[Reference]:
    return [Reference(b"t" * 32, version, one) for one in noise(count, seed, scale)]


def test_a_stranger_of_any_class_is_judged_by_the_envelope_and_learned_from() -> None:
    calibration = SelfCalibration(CONTRACT, [OWN], reads=True)
    before = calibration.conditions([STRANGER], RTX, Placement(RTX))
    assert (before.reads, before.all_audited, before.unlearned) == (True, True, "")
    assert not calibration.unmeasured([STRANGER], RTX)
    now, made = calibration.read(reading(FIRST), before)
    assert made is not None
    assert now.bounds == made == calibration.bounds_of(ENVELOPE)
    assert now.contract.suspect == made.suspect, "what was read first judges the same submission"
    after = calibration.conditions([STRANGER], RTX, Placement(RTX))
    assert (after.bounds, after.all_audited) == (made, False)


def test_few_readings_make_no_bounds_and_later_ones_renew_them() -> None:
    calibration = SelfCalibration(CONTRACT, reads=True)
    start = calibration.conditions([STRANGER], RTX, Placement(RTX))
    now, made = calibration.read(reading(FIRST - 1), start)
    assert (now, made) == (start, None)
    _, first = calibration.read(reading(1), start)
    assert first is not None
    _, second = calibration.read(reading(ENOUGH - FIRST, 4), start)
    assert second is not None
    assert second.reject.fingerprint < first.reject.fingerprint, "the more, the narrower"
    assert calibration.read(reading(1), start)[1] is None
    grown = calibration.read(reading(ENOUGH, 5, scale=2.0), start)[1]
    assert grown is not None
    assert grown.suspect.fingerprint > 1.5 * second.suspect.fingerprint


def test_the_first_rollouts_are_read_and_then_one_in_64() -> None:
    calibration = SelfCalibration(CONTRACT, reads=True)
    start = calibration.conditions([STRANGER], RTX, Placement(RTX))
    for _ in range(ENOUGH // 8):
        assert calibration.readings_due(8, 0) == 8
        calibration.read(reading(8), start)
    due = [calibration.readings_due(16, 0) for _ in range(64)]
    assert sum(due) == 16
    assert set(due) == {0, 8}
    assert SelfCalibration(CONTRACT).readings_due(8, 0) == 0


def test_texts_that_are_being_read_are_not_asked_for_again() -> None:
    calibration = SelfCalibration(CONTRACT, reads=True)
    start = calibration.conditions([STRANGER], RTX, Placement(RTX))
    due = [calibration.readings_due(48, 0)]
    first = calibration.reading(48)
    with ExitStack() as others:
        with first:
            for _ in range(2):
                due.append(calibration.readings_due(48, 0))
                others.enter_context(calibration.reading(due[-1]))
        assert due == [48, 16, 0]
        calibration.not_read("busy", start)
        assert calibration.readings_due(64, 0) == 48


def test_a_reading_that_is_cut_short_is_not_waited_for() -> None:
    calibration = SelfCalibration(CONTRACT, reads=True)

    def cut_short() -> None:
        with calibration.reading(8):
            assert calibration.is_reading
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_short()
    assert not calibration.is_reading


def test_texts_of_new_versions_are_read_however_few_are_audited() -> None:
    calibration = SelfCalibration(CONTRACT, reads=True)
    start = calibration.conditions([STRANGER], RTX, Placement(RTX))
    assert calibration.readings_due(ENOUGH, 0) == ENOUGH
    calibration.read(reading(ENOUGH), start)
    due = [calibration.readings_due(8, version) for version in range(1, 2 * RENEW_STEPS + 1)]
    assert [version for version, count in enumerate(due, 1) if count] == [
        RENEW_STEPS,
        2 * RENEW_STEPS,
    ]


def test_another_version_weighs_nothing_until_readings_were_compared_with_one() -> None:
    calibration = SelfCalibration(CONTRACT, reads=True)
    start = calibration.conditions([STRANGER], RTX, Placement(RTX))
    first = [replace(one.evidence, other_policy=0.0) for one in reading(ENOUGH)]
    calibration.read([Reference(b"t" * 32, 0, one) for one in first], start)
    bounds = calibration.bounds_of(ENVELOPE)
    assert bounds is not None
    assert bounds.suspect.other_policy == PROVISIONAL.other_policy
    assert bounds.other_scale == 0
    calibration.read(reading(ENOUGH, 8, version=3), start)
    bounds = calibration.bounds_of(ENVELOPE)
    assert bounds is not None
    assert 3.0 <= bounds.suspect.other_policy < 200


def test_a_class_of_its_own_judges_those_that_fit_it_and_the_envelope_the_others() -> None:
    calibration = SelfCalibration(CONTRACT, [OWN], reads=True)
    calibration.add([OWN], H100, at(0, noise(ENOUGH)))
    start = calibration.conditions([STRANGER], H100, NEW)
    calibration.read(reading(ENOUGH), start)
    new = calibration.conditions([STRANGER], H100, NEW)
    assert new.bounds == calibration.bounds_of(ENVELOPE)
    assert new.all_audited
    fits = calibration.conditions([STRANGER], H100, IN_CLASS)
    assert fits.bounds == calibration.bounds_of(H100)
    outside = Placement(H100, canaries=CANARIES, odd=OUTSIDE_CANARIES).leave_class()
    assert outside.outside
    assert not outside.placed
    other = calibration.conditions([STRANGER], H100, outside)
    assert (other.bounds, other.all_audited) == (calibration.bounds_of(ENVELOPE), False)


def test_no_worker_is_of_the_envelope_and_none_makes_it() -> None:
    calibration = SelfCalibration(CONTRACT, [OWN], reads=True)
    assert calibration.add([OWN], ENVELOPE, at(0, noise(ENOUGH))) == ([], None)
    assert calibration.bounds_of(ENVELOPE) is None
    assert calibration.conditions([STRANGER], ENVELOPE, Placement(ENVELOPE)).bounds is not None


def test_the_envelope_outlives_a_restart_and_goes_back_with_the_trainer() -> None:
    before = SelfCalibration(CONTRACT, reads=True)
    start = before.conditions([STRANGER], RTX, Placement(RTX))
    before.read(reading(ENOUGH, version=2), start)
    rows = [*reading(ENOUGH, version=2), *reading(8, 7, version=9)]
    made = before.bounds_of(ENVELOPE)
    assert made is not None
    after = SelfCalibration(CONTRACT, reads=True)
    after.restore({ENVELOPE: rows}, [made])
    assert after.bounds_of(ENVELOPE) == made
    assert after.gathered(ENVELOPE) == ENOUGH + 8
    (renewed,) = after.go_back(1, 5)
    assert (renewed.rollouts, renewed.last_version) == (ENOUGH, 2)


def test_where_nothing_can_be_read_strangers_wait_as_without_an_envelope() -> None:
    calibration = SelfCalibration(CONTRACT, [OWN], reads=True)
    start = calibration.conditions([STRANGER], RTX, Placement(RTX))
    failed = calibration.not_read("out of memory", start)
    assert "out of memory" in failed.unlearned
    assert calibration.reads, "it is tried again"
    for _ in range(MOST_FAILED_READINGS - 1):
        calibration.not_read("out of memory", start)
    assert not calibration.reads
    assert calibration.unmeasured([STRANGER], RTX)
    assert not calibration.conditions([OWN], H100, NEW).reads
    known = SelfCalibration(CONTRACT, [OWN], reads=True)
    known.read(reading(ENOUGH), start)
    later = known.conditions([STRANGER], RTX, Placement(RTX))
    assert known.not_read("busy", later) == later, "what was measured still judges"
