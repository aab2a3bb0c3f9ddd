"""An environment in which a small real model can learn something at once."""

from collections.abc import Sequence
from dataclasses import replace

from support.counting_environment import CountingEnvironment

from primerl.node.environments.environment import Branch, Episode, Policy, Score, Task


class EvenEnvironment(CountingEnvironment):
    """The reward is the share of even tokens: something to learn from the first step on."""

    async def run(self, task: Task, policy: Policy) -> Episode:
        """See Environment."""
        episode = await super().run(task, policy)
        return replace(episode, score=_even(episode.branches)) if episode.branches else episode


def _even(branches: Sequence[Branch]) -> Score:
    drawn = [
        token
        for branch in branches
        for token, sampled in zip(branch.token_ids, branch.sampled, strict=True)
        if sampled
    ]
    share = sum(token % 2 == 0 for token in drawn) / len(drawn)
    return Score(reward=share, metrics={"exact": float(share == 1.0)})
