"""From a rollout to what an auditor is asked: each branch, the seeds of its replies, the version of each token.

Trainer and validator build the same items from the same bundle, so neither has to believe the other.
"""

from collections.abc import Iterable, Sequence
from itertools import compress
from math import inf

from ...protocol.envelope import Purpose, unseal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease, sample_seed
from ...protocol.pipelines import PipelinePlan, check_plan
from ...protocol.rollouts import Evidence, Submission
from ..environments.environment import Branch
from .auditor import AuditItem, BoundaryClaim, Measured, SampledSpan
from .checks import CheckedRollout, sampled_runs

Turns = Sequence[Sequence[int]]
"""Per branch, the turn number of each of its replies."""


def plain_turns(branches: Sequence[Branch]) -> Turns | None:
    """The turns of a rollout of one branch, which need no environment to be known; else None."""
    if len(branches) != 1:
        return None
    return [range(len(sampled_runs(branches[0].sampled)))]


def audit_items(
    rollout: CheckedRollout,
    turns: Turns,
    *,
    lease: Lease,
    run: bytes,
    node: bytes,
    plan: PipelinePlan | None = None,
) -> list[AuditItem]:
    """One item per branch. `run` is the run id, `node` the worker's id, `plan` that of its pipeline."""
    task = lease.tasks[rollout.group].digest
    crossed = rollout.crossed or [()] * len(rollout.branches)

    def seed(turn: int) -> int:
        return sample_seed(run, lease, node, task, rollout.index, turn)

    return [
        AuditItem(
            token_ids=branch.token_ids,
            replies=[
                SampledSpan(start, end, seed(turn))
                for (start, end), turn in zip(sampled_runs(branch.sampled), numbers, strict=True)
            ],
            logprobs=list(compress(branch.logprobs, branch.sampled)),
            versions=versions(branch),
            proof=branch.proof,
            boundaries=_boundaries(parts, plan),
        )
        for branch, numbers, parts in zip(rollout.branches, turns, crossed, strict=True)
    ]


def plan_of(
    submission: Submission, *, run: bytes, trainer: bytes, node: bytes
) -> PipelinePlan | None:
    """The pipeline plan that a submission of `node` says it was made under; None if it says nothing.

    Raises:
        RemoteProtocolError: the trainer did not sign it, or `node` is not its first stage.
    """
    if not submission.plan:
        return None
    # However old the plan is: what was made under it may come late.
    plan = unseal(
        submission.plan, Purpose.PIPELINE, PipelinePlan, now=0, run=run, signer=trainer
    ).body
    check_plan(plan)
    if plan.rank_of(node) != 0:
        raise RemoteProtocolError(Reason.WRONG_SIGNER, "a plan whose first stage is another node")
    return plan


def _boundaries(parts: Sequence[bytes], plan: PipelinePlan | None) -> list[BoundaryClaim]:
    if plan is None or not parts:
        return []
    encoding = plan.shape.encoding
    below = [stage.end for stage in plan.stages[:-1]]
    return [BoundaryClaim(end, encoding, part) for end, part in zip(below, parts, strict=True)]


def versions(branch: Branch) -> list[int]:
    """The policy version of each sampled token."""
    count = sum(branch.sampled)
    spans = branch.spans or ((0, branch.policy_first),)
    starts = [start for start, _ in spans[1:]] + [count]
    found: list[int] = []
    for (_, version), end in zip(spans, starts, strict=True):
        found += [version] * (end - len(found))
    return found


def boundary_distances(measured: Iterable[Measured]) -> tuple[float, ...]:
    """What was measured at each boundary of a rollout's branches, the worst; nothing if some have none."""
    found = [one.boundaries for one in measured]
    if not all(found) or len({len(one) for one in found}) != 1:
        return ()
    return tuple(max(column, key=_nan_last) for column in zip(*found, strict=True))


def evidence(rollout: CheckedRollout, measured: Iterable[Measured]) -> Evidence:
    """What was measured on a rollout: of each measure, the worst of its branches."""
    found = list(measured)

    def worst(name: str) -> float:
        return max((getattr(one, name) for one in found), key=_nan_last)

    return Evidence(
        group=rollout.group,
        rollout=rollout.index,
        tokens=sum(one.tokens for one in found),
        fingerprint=worst("fingerprint"),
        sampling=worst("sampling"),
        sampling_max=worst("sampling_max"),
        logprob=worst("logprob"),
        logprob_max=worst("logprob_max"),
        other_policy=worst("other_policy"),
    )


def _nan_last(value: float) -> float:
    """NaN is worse than anything."""
    return value if value == value else inf
