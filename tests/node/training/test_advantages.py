import math

import pytest
from training_cases import group

from primerl.node.training.advantages import credit, grpo, grpo_std
from primerl.node.training.buffer import BranchTokens, Group, ScoredRollout


def test_grpo_is_the_distance_from_the_group_mean() -> None:
    assert grpo([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]


def test_grpo_std_divides_by_the_sample_standard_deviation() -> None:
    scale = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert grpo_std([1.0, 0.0, 0.0, 1.0]) == pytest.approx([scale, -scale, -scale, scale])


def test_groups_without_signal_are_pruned_and_counted() -> None:
    batch = credit([group([1, 1, 1]), group([0, 0]), group([0, 1])], "grpo_std")
    assert (batch.groups, batch.pruned, batch.thin) == (1, 2, 0)
    assert len(batch.samples) == 2


def test_equal_rewards_that_do_not_add_up_exactly_are_no_signal() -> None:
    assert credit([group([0.1] * 7)], "grpo_std").pruned == 1


def test_survivors_of_a_group_are_compared_with_each_other() -> None:
    lost = [ScoredRollout([], 9.0), ScoredRollout(group([0]).rollouts[0].branches, math.nan)]
    whole = group([1.0, 0.0])
    partial = Group(b"t", "e", [*lost, *whole.rollouts], 0, b"n", b"l")
    batch = credit([partial], "grpo")
    assert [sample.advantage for sample in batch.samples] == [0.5, -0.5]


def test_a_lone_survivor_teaches_nothing() -> None:
    batch = credit([group([1.0, math.inf])], "grpo")
    assert (batch.samples, batch.thin) == ([], 1)


def test_all_branches_of_a_rollout_share_its_advantage() -> None:
    branches = [BranchTokens([n, 5], [False, True], [0.0, -1.0]) for n in (1, 2)]
    rollouts = [ScoredRollout(branches, 1.0), ScoredRollout(branches[:1], 0.0)]
    batch = credit([Group(b"t", "e", rollouts, 0, b"n", b"l")], "grpo")
    assert [sample.advantage for sample in batch.samples] == [0.5, 0.5, -0.5]
    assert batch.samples[1].token_ids == [2, 5]
