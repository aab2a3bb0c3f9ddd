"""What learners are given and give back: of whom, for what, once, and with which weight."""

import pytest
from msgspec import structs
from support.protocol_cases import (
    ASSIGNMENT,
    CONTRIBUTION,
    LEADERS,
    LEARNERS,
    NOW,
    OUTER_STEP,
    RUN,
    SEALED_ASSIGNMENT,
    STRANGER,
    TRAINER,
    WORKER,
    refuses,
    sealed,
)

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.protocol.contributions import (
    Contribution,
    OpenedContribution,
    check_answers,
    open_assignment,
    open_contribution,
    open_contributions,
    open_outer_step,
)
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import OuterStep, WeighedContribution

NOBODY = SecretKey.from_seed(bytes(31) + b"x")


def sealed_by(key: SecretKey, body: Contribution = CONTRIBUTION) -> bytes:
    """A contribution as `key` seals it."""
    return seal(key, Purpose.CONTRIBUTION, RUN, body, expires=NOW + 3600)


def opened(body: Contribution = CONTRIBUTION, key: SecretKey = WORKER) -> OpenedContribution:
    """A contribution that was read."""
    return open_contribution(sealed_by(key, body), RUN, LEARNERS, LEADERS)


def merged(*parts: WeighedContribution, **changes: object) -> OuterStep:
    """An outer step of these contributions."""
    return structs.replace(OUTER_STEP, contributions=parts, **changes)


def test_an_assignment_is_read_by_the_learner_that_it_is_for_alone() -> None:
    read = open_assignment(sealed(Purpose.ASSIGNMENT), RUN, WORKER.node_id, LEADERS)
    assert read == ASSIGNMENT
    with refuses(Reason.WRONG_RECIPIENT):
        open_assignment(sealed(Purpose.ASSIGNMENT), RUN, STRANGER.node_id, LEADERS)


def test_an_assignment_or_a_step_by_any_other_than_a_leader_is_refused() -> None:
    body = structs.replace(ASSIGNMENT, learner=WORKER.node_id)
    forged = seal(STRANGER, Purpose.ASSIGNMENT, RUN, body, expires=NOW + 3600)
    with refuses(Reason.WRONG_SIGNER):
        open_assignment(forged, RUN, WORKER.node_id, LEADERS)
    with refuses(Reason.WRONG_SIGNER):
        open_outer_step(
            seal(STRANGER, Purpose.OUTER_STEP, RUN, OUTER_STEP, expires=NOW), RUN, LEADERS
        )


def test_a_contribution_of_a_learner_or_a_leader_is_read_and_of_nobody_else() -> None:
    assert opened().node == WORKER.node_id
    assert opened(key=TRAINER).node == TRAINER.node_id
    with refuses(Reason.WRONG_SIGNER):
        opened(key=NOBODY)


def test_a_contribution_answers_its_own_assignment() -> None:
    check_answers(opened(), SEALED_ASSIGNMENT, ASSIGNMENT)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 6}, Reason.STALE),
        ({"term": 0}, Reason.STALE),
        ({"outer": digest(b"another state")}, Reason.STALE),
        ({"assignment": digest(b"the data of another")}, Reason.WRONG_TASK),
        ({"tokens": ASSIGNMENT.tokens + 1}, Reason.MALFORMED),
    ],
    ids=["stale base", "another epoch", "another state", "another's data", "too many tokens"],
)
def test_a_contribution_to_anything_else_is_refused(
    changes: dict[str, object], reason: Reason
) -> None:
    with refuses(reason):
        check_answers(
            opened(structs.replace(CONTRIBUTION, **changes)), SEALED_ASSIGNMENT, ASSIGNMENT
        )


def test_a_contribution_of_another_learner_to_ones_assignment_is_refused() -> None:
    with refuses(Reason.WRONG_TASK):
        check_answers(opened(key=STRANGER), SEALED_ASSIGNMENT, ASSIGNMENT)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "anchor", "base_version": -1}, Reason.WRONG_BASE),
        ({"base_state": digest(b"another state")}, Reason.WRONG_BASE),
        ({"size": 2**40}, Reason.MALFORMED),
    ],
    ids=["a whole state", "from another state", "a size that is not its chunks'"],
)
def test_a_payload_that_is_no_delta_from_the_base_is_refused(
    changes: dict[str, object], reason: Reason
) -> None:
    artifact = structs.replace(CONTRIBUTION.artifact, **changes)
    body = structs.replace(CONTRIBUTION, artifact=artifact)
    with refuses(reason):
        check_answers(opened(body), SEALED_ASSIGNMENT, ASSIGNMENT)


def test_the_contributions_of_an_honest_step_are_read_in_its_order() -> None:
    parts = [
        WeighedContribution(sealed_by(WORKER), 0.5),
        WeighedContribution(sealed_by(STRANGER), 0.5),
    ]
    read = open_contributions(merged(*parts), RUN, LEARNERS, LEADERS)
    assert [part.node for part in read] == [WORKER.node_id, STRANGER.node_id]


@pytest.mark.parametrize(
    "step",
    [
        merged(*2 * [WeighedContribution(sealed_by(WORKER), 0.5)]),
        merged(
            WeighedContribution(sealed_by(WORKER, structs.replace(CONTRIBUTION, version=6)), 1.0)
        ),
        merged(
            WeighedContribution(sealed_by(WORKER), 0.75),
            WeighedContribution(sealed_by(STRANGER), 0.25),
        ),
    ],
    ids=["twice the same", "one of an older version", "more weight than its tokens give it"],
)
def test_a_step_that_no_honest_leader_signs_is_proof_by_itself(step: OuterStep) -> None:
    with refuses(Reason.WRONG_MERGE):
        open_contributions(step, RUN, LEARNERS, LEADERS)


def test_a_step_with_a_forged_contribution_is_refused() -> None:
    with refuses(Reason.WRONG_SIGNER):
        open_contributions(
            merged(WeighedContribution(sealed_by(NOBODY), 1.0)), RUN, LEARNERS, LEADERS
        )
