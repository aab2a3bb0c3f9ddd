"""From a rollout to what an auditor is asked: each branch, the seeds of its replies, the version of each token.

Trainer and validator build the same items from the same bundle, so neither has to believe the other.
"""

from collections.abc import Iterable, Sequence
from itertools import compress
from math import inf

from ...protocol.leases import Lease, sample_seed
from ...protocol.rollouts import Evidence
from ..audits.auditor import AuditItem, Measured, Reply
from ..environments.environment import Branch
from .checks import CheckedRollout, sampled_runs

Turns = Sequence[Sequence[int]]
"""Per branch, the turn number of each of its replies."""


def plain_turns(branches: Sequence[Branch]) -> Turns | None:
    """The turns of a rollout of one branch, which need no environment to be known; else None."""
    if len(branches) != 1:
        return None
    return [range(len(sampled_runs(branches[0].sampled)))]


def audit_items(
    rollout: CheckedRollout, turns: Turns, *, lease: Lease, run: bytes, node: bytes
) -> list[AuditItem]:
    """One item per branch. `run` is the run id, `node` the worker's id."""
    task = lease.tasks[rollout.group].digest

    def seed(turn: int) -> int:
        return sample_seed(run, lease, node, task, rollout.index, turn)

    return [
        AuditItem(
            token_ids=branch.token_ids,
            replies=[
                Reply(start, end, seed(turn))
                for (start, end), turn in zip(sampled_runs(branch.sampled), numbers, strict=True)
            ],
            logprobs=list(compress(branch.logprobs, branch.sampled)),
            versions=versions(branch),
            proof=branch.proof,
        )
        for branch, numbers in zip(rollout.branches, turns, strict=True)
    ]


def versions(branch: Branch) -> list[int]:
    """The policy version of each sampled token."""
    count = sum(branch.sampled)
    spans = branch.spans or ((0, branch.policy_first),)
    starts = [start for start, _ in spans[1:]] + [count]
    found: list[int] = []
    for (_, version), end in zip(spans, starts, strict=True):
        found += [version] * (end - len(found))
    return found


def evidence(rollout: CheckedRollout, measured: Iterable[Measured]) -> Evidence:
    """What was measured on a rollout: of each measure, the worst of its branches."""
    found = list(measured)

    def worst(name: str) -> float:
        # NaN is worse than anything
        return max((getattr(one, name) for one in found), key=lambda v: v if v == v else inf)

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
