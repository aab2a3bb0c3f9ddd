"""Records of validators: what ends their part in a run, and what honest noise does not."""

import random

import pytest

from primerl.protocol.reputation import HONEST, Outcome
from primerl.protocol.validators import (
    MAX_PASSED,
    MIN_DIFFERING,
    SLIP_EVERY,
    SLIPS,
    Comparison,
    Judged,
    ValidatorRecord,
    decode_records,
    encode_records,
)

WORKER = b"w" * 32
AGREED = Comparison(Judged("clean"), Judged("clean"))
SLIP = Comparison(Judged("clean"), Judged("rejected"))
PASSED = Comparison(Judged("clean"), Judged("rejected", certain=True))
INVENTED = Comparison(Judged("rejected", certain=True), Judged("clean"))
NOISY = Comparison(Judged("rejected"), Judged("clean"))
ALARM = Comparison(Judged("suspect"), Judged("clean"))
FAILED = Comparison(Judged("suspect", failed=True), Judged("clean"))


@pytest.mark.parametrize("lie", [PASSED, INVENTED])
def test_one_judgement_that_no_noise_explains_is_enough(lie: Comparison) -> None:
    record = ValidatorRecord(jobs=10_000, rollouts=10_000, compared=500)
    record.note(WORKER, 1, [lie] if lie is PASSED else [], [lie] if lie is INVENTED else [])
    assert record.disqualified
    assert record.passed == ((WORKER.hex(),) if lie is PASSED else ())


def test_what_noise_may_explain_is_allowed_for_at_its_rate_and_no_oftener() -> None:
    record = ValidatorRecord()
    for number in range(1, SLIPS + 2):
        assert not record.disqualified
        record.note(WORKER, 20, [SLIP, *[AGREED] * 19], [])
        assert record.slips == number
    assert "that the trainer rejects" in record.disqualified
    long = ValidatorRecord(compared=3 * SLIP_EVERY, slips=SLIPS + 2)
    long.note(WORKER, 1, [SLIP], [])
    assert not long.disqualified


@pytest.mark.parametrize("alarm", [NOISY, ALARM])
def test_a_validator_that_was_right_for_long_is_not_needed_once_it_suspects_everybody(
    alarm: Comparison,
) -> None:
    record = ValidatorRecord()
    record.note(WORKER, 100_000, [AGREED] * 5000, [])
    for _ in range(MIN_DIFFERING - 1):
        record.note(WORKER, 1, [], [alarm])
    assert not record.disqualified
    record.note(WORKER, 1, [], [alarm])
    assert "32 of the 5032 rollouts" in record.disqualified


def test_audits_that_fail_at_a_validator_are_no_lies() -> None:
    """A worker could make texts on which one engine fails and another does not."""
    record = ValidatorRecord()
    record.note(WORKER, 100, [], [FAILED] * 100)
    assert not record.disqualified


def test_honest_noise_of_two_machines_disqualifies_no_validator() -> None:
    """Each calls one rollout in a hundred suspect, by noise of its own; one in a million both reject."""
    chance = random.Random(2)

    def judged() -> Judged:
        outcomes: list[Outcome] = ["clean", "suspect", "rejected"]
        return Judged(chance.choices(outcomes, [HONEST[one] for one in outcomes])[0])

    record = ValidatorRecord()
    for _ in range(300):
        pairs = [Comparison(judged(), judged()) for _ in range(100)]
        odd = [one for one in pairs if one.theirs.outcome != "clean"]
        record.note(WORKER, len(pairs), pairs[:5], odd)
    assert record.overturned > 150
    assert not record.disqualified


def test_the_workers_that_were_covered_for_are_bounded_and_the_latest_remembered() -> None:
    record = ValidatorRecord()
    workers = [number.to_bytes(32, "big") for number in range(MAX_PASSED + 10)]
    for worker in workers:
        record.note(worker, 1, [PASSED], [])
    assert record.passed == tuple(one.hex() for one in workers[10:])
    record.forget_pass(workers[-1])
    assert workers[-1].hex() not in record.passed


def test_records_are_read_as_they_were_stored() -> None:
    record = ValidatorRecord(jobs=3, compared=4, missing=0.5, passed=("ab",), disqualified="why")
    assert decode_records(encode_records({"cd": record})) == {"cd": record}
    assert decode_records(None) == {}
