"""From a submission to a verdict and the groups that may be learned from, cheap checks first.

Rewards are recomputed, never taken; what is audited is drawn after the upload. A verdict always comes out:
bad input costs the rollout, never the trainer.
"""

import logging
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease
from ...protocol.manifests import RunManifest
from ...protocol.rollouts import MAX_DETAIL, MAX_REJECTIONS, Rejection, Submission, Verdict
from ..engines.scorer import Scorer
from ..environments.environment import (
    Branch,
    Environment,
    EnvironmentFailed,
    ScoreMismatch,
    Task,
)
from ..training.buffer import BranchTokens, Group, ScoredRollout
from ..weights.state import State
from .checks import CheckedRollout, Rejected, check_submission

logger = logging.getLogger(__name__)

REWARD_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Verified:
    """A verdict, and the groups made of what was accepted."""

    verdict: Verdict
    rejections: list[Rejection]
    """All of them; the verdict lists the first."""
    groups: list[Group]

    def reasons(self) -> Counter[Reason]:
        """Rejected rollouts by reason."""
        return Counter(rejection.reason for rejection in self.rejections)


class Verifier:
    """Checks submissions against lease, environment and policy."""

    def __init__(
        self,
        run: RunManifest,
        environment: Environment,
        scorer: Scorer,
        states: Mapping[int, State],
        *,
        chance: random.Random,
    ) -> None:
        """`states` holds the policies that may still be claimed, by version; it is read, not copied."""
        self._run = run
        self._environment = environment
        self._scorer = scorer
        self._states = states
        self._chance = chance

    async def verify(
        self,
        submission: Submission,
        lease: Lease,
        *,
        digest: bytes,
        node: bytes,
        version: int,
        audit_fraction: float,
    ) -> Verified:
        """Verify one submission against policy `version`, the newest one published.

        Raises:
            RemoteProtocolError: the bundle as a whole is not the work of its lease.
        """
        checked = check_submission(submission, lease, self._run, version)
        rejections = list(checked.rejections)
        rewards: dict[tuple[int, int], float] = {}
        passed: list[CheckedRollout] = []
        for rollout in checked.rollouts:
            try:
                rewards[rollout.group, rollout.index] = await self._reward(lease, rollout)
                passed.append(rollout)
            except Rejected as fault:
                rejections.append(_rejection(rollout, fault))
        chosen = [one for one in passed if self._chance.random() < audit_fraction]
        caught = await self._audit(chosen)
        rejections += caught
        guilty = {(one.group, one.rollout) for one in caught}
        honest = [one for one in passed if (one.group, one.index) not in guilty]
        verdict = make_verdict(digest, lease, len(honest), rejections, len(chosen))
        return Verified(verdict, rejections, self._groups(lease, node, honest, rewards))

    async def _reward(self, lease: Lease, rollout: CheckedRollout) -> float:
        task = Task(lease.tasks[rollout.group].index, lease.tasks[rollout.group].digest)
        try:
            score = await self._environment.score(task, rollout.branches)
        except ScoreMismatch as error:
            raise Rejected(Reason.BAD_PROMPT, str(error)) from error
        except EnvironmentFailed as error:
            raise Rejected(Reason.ENVIRONMENT_ERROR, str(error)) from error
        if abs(score.reward - rollout.claimed_reward) > REWARD_TOLERANCE:
            detail = f"claimed {rollout.claimed_reward:.6g}, recomputed {score.reward:.6g}"
            raise Rejected(Reason.BAD_REWARD, detail)
        return score.reward

    async def _audit(self, rollouts: list[CheckedRollout]) -> list[Rejection]:
        """Recompute the logprobs of `rollouts` under the policies that each claims.

        Weights may change while a sample is drawn: each of its tokens must then fit one of the versions
        in its span, so that claiming such a change is no way around an audit.
        """
        audits = [_Audit(one) for one in rollouts if self._holds(one)]
        versions = {version for audit in audits for version in audit.versions()}
        # Taken now: the publisher drops old ones while we wait for the scorer.
        states = {version: self._states[version] for version in sorted(versions)}
        for version, state in states.items():
            open_parts = [part for audit in audits for part in audit.parts if version in part.span]
            values = await self._scorer.logprobs(
                state,
                [part.branch.token_ids for part in open_parts],
                self._run.sampling.temperature,
                key=version,
            )
            for part, recomputed in zip(open_parts, values, strict=True):
                part.compare(recomputed)
        return [
            _rejection(audit.rollout, Rejected(Reason.BAD_LOGPROBS, audit.detail()))
            for audit in audits
            if audit.mean_error() > self._run.proofs.reject.logprob
        ]

    def _holds(self, rollout: CheckedRollout) -> bool:
        """Whether every policy that the rollout claims is still in memory; older ones are stale anyway."""
        return all(
            branch.policy_first in self._states and branch.policy_last in self._states
            for branch in rollout.branches
        )

    def _groups(
        self,
        lease: Lease,
        node: bytes,
        rollouts: list[CheckedRollout],
        rewards: Mapping[tuple[int, int], float],
    ) -> list[Group]:
        groups: list[Group] = []
        for number, task in enumerate(lease.tasks):
            members = [one for one in rollouts if one.group == number]
            if len(members) < 2:
                continue
            groups.append(
                Group(
                    task=task.digest,
                    environment=self._environment.name,
                    rollouts=[
                        ScoredRollout(
                            [
                                BranchTokens(b.token_ids, b.sampled, b.logprobs)
                                for b in one.branches
                            ],
                            rewards[one.group, one.index],
                        )
                        for one in members
                    ],
                    policy_oldest=min(b.policy_first for one in members for b in one.branches),
                    node=node,
                    lease=lease.lease_id.to_bytes(8, "big"),
                )
            )
        return groups


def refuse_all(digest: bytes, lease: Lease, error: RemoteProtocolError) -> Verified:
    """The verdict on a bundle that is not the work of its lease: every rollout of it is lost."""
    rejections = [
        Rejection(group, index, error.reason, error.detail[:MAX_DETAIL])
        for group in range(len(lease.tasks))
        for index in range(lease.group_size)
    ]
    return Verified(make_verdict(digest, lease, 0, rejections, 0), rejections, [])


def make_verdict(
    digest: bytes, lease: Lease, accepted: int, rejections: list[Rejection], audited: int
) -> Verdict:
    """A verdict that fits a message, whatever was rejected."""
    listed = tuple(rejections[:MAX_REJECTIONS])
    return Verdict(digest, lease.lease_id, accepted, listed, audited, len(rejections))


class _Part:
    """One branch under audit: how far each sampled token is from the nearest of its policies."""

    def __init__(self, branch: Branch) -> None:
        self.branch = branch
        self.span = range(branch.policy_first, branch.policy_last + 1)
        self._claims = [
            lp for lp, drawn in zip(branch.logprobs, branch.sampled, strict=True) if drawn
        ]
        self.errors = [math.inf] * len(self._claims)

    def compare(self, recomputed: list[float]) -> None:
        """Take in the logprobs of all tokens under one more policy of the span."""
        own = [lp for lp, drawn in zip(recomputed, self.branch.sampled, strict=True) if drawn]
        found = [abs(claim - value) for claim, value in zip(self._claims, own, strict=True)]
        self.errors = list(map(min, self.errors, found))


class _Audit:
    """One rollout under audit."""

    def __init__(self, rollout: CheckedRollout) -> None:
        self.rollout = rollout
        self.parts = [_Part(branch) for branch in rollout.branches]

    def versions(self) -> set[int]:
        """Policies to compare with."""
        return {version for part in self.parts for version in part.span}

    def mean_error(self) -> float:
        """Mean over sampled tokens of |claimed - recomputed| logprob; no sign, so nothing cancels out."""
        errors = [error for part in self.parts for error in part.errors]
        return sum(errors) / len(errors)

    def detail(self) -> str:
        """The evidence in words."""
        versions = sorted(self.versions())
        policies = f"{versions[0]}" if len(versions) == 1 else f"{versions[0]}..{versions[-1]}"
        return f"mean |logprob difference| {self.mean_error():.3g} under policy {policies}"


def _rejection(rollout: CheckedRollout, fault: Rejected) -> Rejection:
    return Rejection(rollout.group, rollout.index, fault.reason, fault.detail[:MAX_DETAIL])
