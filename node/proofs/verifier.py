"""From a submission to a verdict and the groups that may be learned from, cheap checks first.

Rewards are recomputed, never taken; what is audited is drawn after the upload. A verdict always comes out:
bad input costs the rollout, never the trainer.
"""

import logging
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ...protocol.errors import Reason
from ...protocol.leases import Lease
from ...protocol.manifests import RunManifest
from ...protocol.rollouts import Rejection, Submission, Verdict
from ..engines.scorer import Scorer
from ..environments.environment import Environment, EnvironmentFailed, ScoreMismatch, Task
from ..training.buffer import BranchTokens, Group, ScoredRollout
from ..weights.state import State
from .checks import CheckedRollout, Rejected, check_submission

logger = logging.getLogger(__name__)

REWARD_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Verified:
    """A verdict, and the groups made of what was accepted."""

    verdict: Verdict
    groups: list[Group]

    def reasons(self) -> Counter[Reason]:
        """Rejected rollouts by reason."""
        return Counter(rejection.reason for rejection in self.verdict.rejections)


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
        verdict = Verdict(digest, lease.lease_id, len(honest), tuple(rejections), len(chosen))
        return Verified(verdict, self._groups(lease, node, honest, rewards))

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
        """Recompute the logprobs of `rollouts` under the policy that each claims."""
        by_version: dict[int, list[CheckedRollout]] = {}
        for rollout in rollouts:
            versions = {(one.policy_first, one.policy_last) for one in rollout.branches}
            first, last = next(iter(versions))
            # Weights that changed mid-sample leave no single policy to compare with.
            if len(versions) == 1 and first == last and first in self._states:
                by_version.setdefault(first, []).append(rollout)
        caught: list[Rejection] = []
        for version, members in by_version.items():
            sequences = [branch.token_ids for one in members for branch in one.branches]
            values = await self._scorer.logprobs(
                self._states[version], sequences, self._run.sampling.temperature, key=version
            )
            recomputed = iter(values)
            for rollout in members:
                own = [next(recomputed) for _ in rollout.branches]
                error = mean_error(rollout, own)
                if error > self._run.limits.logprob_tolerance:
                    detail = f"mean |logprob difference| {error:.3g} under policy {version}"
                    caught.append(_rejection(rollout, Rejected(Reason.BAD_LOGPROBS, detail)))
        return caught

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


def mean_error(rollout: CheckedRollout, recomputed: list[list[float]]) -> float:
    """Mean over sampled tokens of |claimed - recomputed| logprob; a lower claim cannot hide in the mean."""
    errors = [
        abs(claim - own)
        for branch, values in zip(rollout.branches, recomputed, strict=True)
        for flag, claim, own in zip(branch.sampled, branch.logprobs, values, strict=True)
        if flag
    ]
    return sum(errors) / len(errors)


def _rejection(rollout: CheckedRollout, fault: Rejected) -> Rejection:
    return Rejection(rollout.group, rollout.index, fault.reason, fault.detail[:500])
