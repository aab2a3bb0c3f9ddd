"""Items of an audit, the versions that it needs, and what a submission says of its stages."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from support.protocol_cases import (
    BRANCH,
    LEASE,
    MANIFEST,
    NOW,
    OTHER_RUN,
    PLAN,
    RUN,
    STRANGER,
    SUBMISSION,
    TRAINER,
    WORKER,
    refuses,
)

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.errors import EngineError
from primerl.node.inference.fingerprint import Projection
from primerl.node.trainer.audits import _measured as from_report  # pyright: ignore[reportPrivateUsage]
from primerl.node.validator.loop import job_items, make_report
from primerl.node.verification import auditor
from primerl.node.verification.checks import CheckedRollout, check_submission
from primerl.node.weights.state import Tensor
from primerl.protocol import rollouts
from primerl.protocol.audits import CrossedRow, Place, check_rows
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason
from primerl.protocol.leaders import Leaders
from primerl.protocol.messages import AuditJob
from primerl.protocol.pipelines import PipelinePlan, Stage

PROVED = msgspec.structs.replace(
    BRANCH, proof=Projection().make(np.arange(64, dtype=np.float32).reshape(2, 32))
)
STATED = (bytes(range(16)),)
"""At the only boundary of PLAN, of two sampled tokens."""


def sealed_plan(plan: PipelinePlan = PLAN, key: SecretKey = TRAINER, run: bytes = RUN) -> bytes:
    """A plan as the trainer seals it."""
    return seal(key, Purpose.PIPELINE, run, plan, expires=NOW)


def work(*crossed: rollouts.Crossed, branches: int = 1, **changes: Any) -> rollouts.Submission:
    """The example, whose first rollout was made by a pipeline."""
    groups = list(SUBMISSION.groups)
    first = (rollouts.RolloutRecord((PROVED,) * branches, 1.0, ""), *groups[0].rollouts[1:])
    groups[0] = msgspec.structs.replace(groups[0], rollouts=first)
    made = {
        "plan": sealed_plan(),
        "crossed": crossed or (rollouts.Crossed(0, 0, 0, STATED),),
        **changes,
    }
    return msgspec.structs.replace(SUBMISSION, groups=tuple(groups), **made)


def checked(submission: rollouts.Submission, plan: PipelinePlan | None = PLAN) -> CheckedRollout:
    """Its first rollout."""
    (one,) = check_submission(submission, LEASE, MANIFEST, 4, plan).rollouts
    return one


def plan_in(submission: rollouts.Submission, node: bytes = WORKER.node_id) -> PipelinePlan | None:
    """As the trainer finds it."""
    return auditor.plan_of(submission, Leaders(RUN, TRAINER.node_id), node)


def test_an_auditor_is_asked_about_the_boundaries_of_the_plan() -> None:
    rollout = checked(work())
    assert rollout.crossed == [STATED]
    turns = auditor.plain_turns(rollout.branches)
    assert turns is not None
    sampling = MANIFEST.environments[0].sampling
    (item,) = auditor.audit_items(
        rollout, turns, lease=LEASE, run=RUN, sampling=sampling, node=WORKER.node_id, plan=PLAN
    )
    assert item.boundaries == [auditor.BoundaryClaim(14, "fp8", STATED[0])]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (sealed_plan(key=STRANGER), Reason.WRONG_SIGNER),
        (sealed_plan(key=WORKER), Reason.WRONG_SIGNER),
        (sealed_plan(run=OTHER_RUN), Reason.WRONG_RUN),
        (sealed_plan()[:-1] + b"\x00\x00", Reason.MALFORMED),
        (
            sealed_plan(msgspec.structs.replace(PLAN, stages=PLAN.stages[::-1])),
            Reason.MALFORMED,
        ),
        (
            sealed_plan(
                msgspec.structs.replace(
                    PLAN, stages=(Stage(STRANGER.node_id, 0, 14), Stage(WORKER.node_id, 14, 28))
                )
            ),
            Reason.WRONG_SIGNER,
        ),
        (b"no envelope", Reason.MALFORMED),
    ],
    ids=[
        "a stranger's",
        "its own",
        "another run's",
        "bent",
        "of no sense",
        "not its first",
        "none",
    ],
)
def test_only_a_plan_of_the_trainers_whose_first_stage_signed_counts(
    plan: bytes, reason: Reason
) -> None:
    with refuses(reason):
        plan_in(work(plan=plan))


def test_a_rollout_that_lacks_boundaries_of_a_branch_has_none() -> None:
    assert checked(work(rollouts.Crossed(1, 0, 0, STATED))).crossed == []
    two = work(rollouts.Crossed(0, 0, 0, STATED), branches=2)
    assert checked(two).crossed == []
    both = work(rollouts.Crossed(0, 0, 0, STATED), rollouts.Crossed(0, 0, 1, STATED), branches=2)
    assert checked(both).crossed == [STATED, STATED]
    assert checked(work(), plan=None).crossed == []


@pytest.mark.parametrize(
    "crossed",
    [
        (rollouts.Crossed(0, 0, 0, (bytes(15),)),),
        (rollouts.Crossed(0, 0, 0, (bytes(24),)),),
        (rollouts.Crossed(0, 0, 0, (b"",)),),
        (rollouts.Crossed(0, 0, 0, STATED * 2),),
        (rollouts.Crossed(0, 0, 0, STATED), rollouts.Crossed(0, 0, 0, STATED)),
    ],
    ids=["cut short", "of a longer reply", "empty", "of another plan", "twice"],
)
def test_boundaries_of_another_size_cost_the_bundle(crossed: tuple[rollouts.Crossed, ...]) -> None:
    with refuses(Reason.MALFORMED):
        checked(work(*crossed))


def test_boundaries_that_are_not_fingerprints_are_left_to_the_audit() -> None:
    """Who passed them on need not have written them: only an audit can tell whose they are."""
    assert checked(work(rollouts.Crossed(0, 0, 0, (b"\xff" * 16,)))).crossed == [(b"\xff" * 16,)]


def test_a_validator_asks_and_reports_the_same() -> None:
    data = seal(WORKER, Purpose.SUBMISSION, RUN, work(), recipient=TRAINER.node_id, expires=NOW)
    job = AuditJob(
        job=1,
        node=WORKER.node_id,
        submission=digest(data),
        size=len(data),
        challenge=digest(b"challenge"),
        chosen=(Place(0, 0),),
        versions=(3, 4),
        others=(),
        seconds=5.0,
    )
    (item,) = job_items(job, data, run=MANIFEST, leaders=Leaders(RUN, TRAINER.node_id))
    assert [one.layers for one in item.boundaries] == [14]
    found = auditor.Measured(0, 0, 2, 0.1, 0.0, 0.0, 0.0, 0.0, -1.0, 0.5, 2.0, boundaries=(0.25,))
    report = make_report(job, [found])
    check_rows(report, [(0, 0)])
    assert report.crossed == (CrossedRow(0, 0, (0.25,)),)
    assert from_report([auditor.AuditTarget(checked(work()), [item])], report) == [[found]]
    lied = msgspec.structs.replace(report, crossed=(CrossedRow(0, 0, (0.25, 0.5)),))
    assert from_report([auditor.AuditTarget(checked(work()), [item])], lied)[0][0].boundaries == ()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "rows",
    [
        (CrossedRow(0, 1, (0.1,)),),
        (CrossedRow(0, 0, (0.1,)), CrossedRow(0, 0, (0.1,))),
        (CrossedRow(0, 0, (float("nan"),)),),
        (CrossedRow(0, 0, (float("inf"),)),),
    ],
    ids=["of what was not measured", "twice", "nan", "inf"],
)
def test_a_report_with_senseless_boundaries_is_refused(rows: tuple[CrossedRow, ...]) -> None:
    job = AuditJob(1, WORKER.node_id, digest(b"x"), 1, digest(b"c"), (Place(0, 0),), (3,), (), 5.0)
    report = make_report(job, [auditor.Measured(0, 0, 2, 0.1, 0.0, 0.0, 0.0, 0.0, -1.0)])
    assert b"crossed" not in msgspec.msgpack.encode(report)
    check_rows(report, [(0, 0)])
    with refuses(Reason.MALFORMED):
        check_rows(msgspec.structs.replace(report, crossed=rows), [(0, 0)])


def test_a_rollout_is_as_far_off_at_a_boundary_as_the_worst_of_its_branches() -> None:
    def branch(*boundaries: float) -> auditor.Measured:
        return auditor.Measured(0, 0, 2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, boundaries=boundaries)

    assert auditor.boundary_distances([branch(0.1, 0.4), branch(0.3, 0.2)]) == (0.3, 0.4)
    assert auditor.boundary_distances([branch(0.1), branch()]) == ()
    assert auditor.boundary_distances([branch(0.1), branch(0.1, 0.2)]) == ()
    assert auditor.boundary_distances([branch(0.1), branch(float("nan"))])[0] != 0.1


def test_the_longest_verdict_on_a_pipeline_fits_a_message() -> None:
    node = bytes(range(32))
    verdict = rollouts.Verdict(
        submission=node,
        lease_id=2**53,
        accepted=2**31,
        rejections=(
            rollouts.Rejection(4095, 4095, Reason.ENVIRONMENT_ERROR, "x" * rollouts.MAX_DETAIL),
        )
        * rollouts.MAX_REJECTIONS,
        audited=2**31,
        rejected=2**31,
        challenge=node,
        rate=0.1,
        evidence=(rollouts.Evidence(4095, 4095, 2**24, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1),)
        * rollouts.MAX_EVIDENCE,
        validator=node,
        pipeline=rollouts.PipelineVerdict(
            node,
            2**53,
            (node,) * 16,
            (rollouts.Blamed(4095, 4095, (0.1,) * 15, tuple(range(16))),) * rollouts.MAX_BLAMED,
        ),
    )
    sealed = seal(TRAINER, Purpose.VERDICT, RUN, verdict, expires=NOW, recipient=node)
    assert len(sealed) < 64 * 1024


def item(length: int = 10, versions: Sequence[int] = (3,)) -> auditor.AuditItem:
    count = len(versions)
    return auditor.AuditItem(
        [0] * length, [auditor.SampledSpan(1, 1 + count, 0)], [0.0] * count, versions, b""
    )


def test_versions_that_rounding_hides_are_seldom_compared_until_one_tells_them_apart() -> None:
    comparisons = auditor.VersionComparisons()
    for _ in range(16):
        assert comparisons.due()
        comparisons.note(0.0)  # version 0 has none before it
        comparisons.note(-0.9)
    assert sum(comparisons.due() for _ in range(64)) == 8
    comparisons.note(60.0)  # a worker with old weights
    assert all(comparisons.due() for _ in range(64))


def test_versions_that_differ_are_always_compared() -> None:
    comparisons = auditor.VersionComparisons()
    for _ in range(100):
        assert comparisons.due()
        comparisons.note(-4.0)


def test_a_branch_of_one_version_is_never_compared_with_itself() -> None:
    others = {3: [2, 3, 4], 4: [3]}
    assert auditor.other_versions({3}, others) == [2, 4]
    assert replace(item(), others=[2, 4]).wanted == [2, 3, 4]
    # of two versions: each of them may have drawn all of it
    assert auditor.other_versions({3, 4}, others) == [2, 3, 4]
    assert auditor.other_versions({7}, others) == []


def test_a_version_that_is_not_held_is_named() -> None:
    auditor.check_versions([item()], {3: None})
    with pytest.raises(EngineError, match="policy 2"):
        auditor.check_versions([replace(item(), others=[2])], {3: None})


@pytest.mark.usefixtures("small_heap")
def test_a_state_is_the_same_only_if_its_tensors_are() -> None:
    def tensor() -> Tensor:
        return Tensor("F32", (2,), np.zeros(2, "<u4"))

    state = {"a": tensor(), "b": tensor()}
    seen = auditor.SameState(state)
    assert seen.matches(state)
    assert seen.matches(dict(state))
    assert not seen.matches(state | {"a": tensor()})
    assert not seen.matches(state | {"c": tensor()})
    assert not seen.matches({"a": state["a"]})
    del state["b"]
    gc.collect()
    assert not seen.matches(state | {"b": tensor()})
