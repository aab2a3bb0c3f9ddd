import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from pydantic import ValidationError
from support.training_cases import group

from primerl.node.config.training import (
    LengthPenaltyConfig,
    LossConfig,
    OverlongConfig,
    TrainingConfig,
)
from primerl.node.training.advantages import (
    CreditedBatch,
    Size,
    credit,
    grpo,
    grpo_length,
    grpo_std,
    has_equal_rewards,
    max_rl,
    observations,
    overlong_penalty,
    rloo,
)
from primerl.node.training.buffer import AgentShare, BranchTokens, RolloutGroup, ScoredRollout

KINDS = ["grpo", "grpo_std", "grpo_length", "max_rl", "rloo", "reinforce_plus_plus"]
OUTPUT_ONLY = LengthPenaltyConfig(num_input_tokens_weight=0.0, num_turns_weight=0.0)


def training(kind: str = "grpo", **fields: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"advantage": kind, **fields})


def branch(mask: list[int]) -> BranchTokens:
    return BranchTokens([7] * len(mask), [bool(one) for one in mask], [0.0] * len(mask))


def mixed(rewards: list[float], lengths: list[int]) -> RolloutGroup:
    rollouts = [
        ScoredRollout([branch([0, 0] + [1] * length)], reward)
        for reward, length in zip(rewards, lengths, strict=True)
    ]
    return RolloutGroup(b"t", "e", rollouts, 0, b"n", b"l")


def test_a_loss_of_its_own_decides_what_of_an_environment_is_trained() -> None:
    flat, other = mixed([1.0, 1.0], [2, 2]), replace(mixed([1.0, 1.0], [2, 2]), environment="other")
    own = {"other": training(loss={"type": "reverse_kl"})}
    batch = credit([flat, other], training(), own)
    assert [one.environment for one in batch.samples] == ["other", "other"]
    assert (batch.groups, batch.filtered, batch.zero_advantage) == (1, 1, 2)


def test_grpo_is_the_distance_from_the_group_mean() -> None:
    assert grpo([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]


def test_grpo_std_divides_by_the_sample_standard_deviation() -> None:
    scale = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert grpo_std([1.0, 0.0, 0.0, 1.0]) == pytest.approx([scale, -scale, -scale, scale])


def test_max_rl_divides_by_the_mean() -> None:
    assert max_rl([1.0, 0.0, 0.0, 0.0]) == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert max_rl([0.5, 0.25]) == pytest.approx([1 / 3, -1 / 3])


def test_rloo_is_the_distance_from_the_mean_of_the_others() -> None:
    assert rloo([1.0, 0.0, 0.5]) == pytest.approx([0.75, -0.75, 0.0])
    assert rloo([1.0, 0.0]) == [1.0, -1.0]


def test_reinforce_plus_plus_divides_by_the_standard_deviation_of_the_batch() -> None:
    """Not of the group: what a group of small differences says stays small beside the others."""
    groups = [mixed([1.0, 0.0], [2, 2]), mixed([0.1, 0.0], [2, 2])]
    found = [one.advantage for one in credit(groups, training("reinforce_plus_plus")).samples]
    std = math.sqrt((2 * 0.5**2 + 2 * 0.05**2) / 3) + 1e-4
    assert found == pytest.approx([0.5 / std, -0.5 / std, 0.05 / std, -0.05 / std])


@pytest.mark.parametrize("pruned", [True, False])
def test_groups_of_equal_rewards_count_in_the_standard_deviation_of_the_batch(pruned: bool) -> None:
    groups = [mixed([1.0, 1.0, 1.0], [2, 2, 2]), mixed([1.0, 0.0], [2, 2])]
    config = training("reinforce_plus_plus", filter_zero_advantages=pruned)
    batch = credit(groups, config)
    std = math.sqrt(2 * 0.5**2 / 4) + 1e-4  # of 0, 0, 0, 0.5, -0.5
    found = [one.advantage for one in batch.samples]
    assert found == pytest.approx([*([] if pruned else [0.0] * 3), 0.5 / std, -0.5 / std])
    assert (batch.groups, batch.filtered) == ((1, 1) if pruned else (2, 0))


def test_reinforce_plus_plus_leaves_groups_without_signal_at_nothing() -> None:
    kept = training("reinforce_plus_plus", filter_zero_advantages=False)
    batch = credit([mixed([1.0, 1.0], [2, 2]), mixed([1.0, 0.0], [2, 2])], kept)
    assert [one.advantage for one in batch.samples[:2]] == [0.0, 0.0]
    alone = credit([mixed([1.0, 1.0], [2, 2])], kept)
    assert [one.advantage for one in alone.samples] == [0.0, 0.0]


def test_each_environment_has_its_own_advantage_in_a_batch_of_groups_of_different_sizes() -> None:
    small = mixed([1.0, 0.0], [2, 2])
    large = replace(mixed([1.0, 0.0, 0.0, 0.0], [2] * 4), environment="other")
    own = {"e": training("rloo"), "other": training("max_rl")}
    batch = credit([small, large], training(), own)
    assert [one.advantage for one in batch.samples] == pytest.approx([1, -1, 3, -1, -1, -1])
    assert (batch.groups, batch.too_few) == (2, 0)


def test_only_the_groups_that_ask_for_it_are_divided_by_the_standard_deviation_of_the_batch() -> (
    None
):
    one, other = mixed([1.0, 0.0], [2, 2]), replace(mixed([4.0, 0.0], [2, 2]), environment="other")
    own = {"other": training("reinforce_plus_plus")}
    found = [one.advantage for one in credit([one, other, one], training(), own).samples]
    scale = 2.0 / (math.sqrt(8.0) + 1e-4)
    assert found == pytest.approx([0.5, -0.5, scale, -scale, 0.5, -0.5])


OVERLONG = OverlongConfig(max_tokens=10, buffer_tokens=4, penalty=2.0)


@pytest.mark.parametrize(("drawn", "lost"), [(0, 0), (6, 0), (7, 0.5), (9, 1.5), (10, 2), (50, 2)])
def test_an_overlong_rollout_loses_in_proportion(drawn: int, lost: float) -> None:
    assert overlong_penalty(drawn, OVERLONG) == pytest.approx(lost)


def test_overlong_answers_are_worse_than_short_ones_with_the_same_reward() -> None:
    config = training(overlong=OVERLONG)
    right = mixed([1.0, 1.0], [3, 10])
    assert [one.advantage for one in credit([right], config).samples] == [1.0, -1.0]
    assert not has_equal_rewards(right, config)
    assert has_equal_rewards(right, training())
    assert has_equal_rewards(mixed([1.0, 1.0], [3, 6]), config)


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [-1.0, 1.0], [-1.0, -3.0, 0.5]])
def test_max_rl_of_a_mean_that_is_not_positive_is_no_signal(rewards: list[float]) -> None:
    assert max_rl(rewards) == [0.0] * len(rewards)


def test_max_rl_does_not_explode_where_rewards_nearly_cancel() -> None:
    advantages = max_rl([-1.0, 1.0 + 1e-12])
    assert max(map(abs, advantages)) <= 4.0
    assert advantages[1] > 0 > advantages[0]


def test_the_length_penalty_is_its_formula() -> None:
    rewards = [1.0, 1.0, 0.0]
    sizes = [Size(100, 40, 1), Size(50, 80, 4), Size(200, 20, 2)]
    frac = [
        0.25 * 0.5 + 0.1 * 0.5 + 0.1 * 0.25,
        0.25 * 0.25 + 0.1 * 1.0 + 0.1 * 1.0,
        0.25 * 1.0 + 0.1 * 0.25 + 0.1 * 0.5,
    ]
    shaped = [reward - 2 / 3 * part for reward, part in zip(rewards, frac, strict=True)]
    expected = [value - sum(shaped) / 3 for value in shaped]
    assert grpo_length(rewards, sizes, LengthPenaltyConfig()) == pytest.approx(expected)


def test_the_shorter_of_two_right_answers_is_better_and_both_beat_a_wrong_one() -> None:
    batch = credit([mixed([1.0, 1.0, 0.0], [2, 8, 1])], training("grpo_length"))
    short, long, wrong = (sample.advantage for sample in batch.samples)
    assert short > long > wrong


def test_right_answers_alone_have_signal_by_their_length() -> None:
    groups = [mixed([1.0, 1.0], [2, 4]), mixed([1.0, 1.0], [3, 3])]
    batch = credit(groups, training("grpo_length", length_penalty=OUTPUT_ONLY))
    assert [sample.advantage for sample in batch.samples] == pytest.approx([0.0625, -0.0625])
    assert (batch.groups, batch.filtered) == (1, 1)


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [-1.0, -1.0]])
def test_a_failure_earns_nothing_by_its_length(rewards: list[float]) -> None:
    assert credit([mixed(rewards, [2, 9])], training("grpo_length")).filtered == 1


def test_a_length_penalty_of_nothing_is_grpo() -> None:
    off = LengthPenaltyConfig(
        num_output_tokens_weight=0, num_input_tokens_weight=0, num_turns_weight=0
    )
    sizes = [Size(5, 0, 1), Size(9, 3, 2)]
    assert grpo_length([0.3, 0.9], sizes, off) == grpo([0.3, 0.9])


@pytest.mark.parametrize("weight", [-0.1, 1.1, math.nan])
def test_a_length_penalty_is_bounded(weight: float) -> None:
    with pytest.raises(ValidationError):
        LengthPenaltyConfig(num_output_tokens_weight=weight)


def test_a_size_counts_all_branches_of_a_rollout() -> None:
    rollout = ScoredRollout([branch([0, 0, 1, 1, 0, 1]), branch([0, 1, 1])], 1.0)
    assert Size.of(rollout) == Size(output=5, input=4, turns=3)


@pytest.mark.parametrize("kind", KINDS)
def test_advantages_of_a_group_add_up_to_nothing_and_rank_as_rewards_do(kind: str) -> None:
    rng = random.Random(5)
    for _ in range(50):
        count = rng.randint(2, 9)
        rewards = [rng.choice([0.0, 1.0, rng.uniform(-1, 2)]) for _ in range(count)]
        batch = credit([mixed(rewards, [4] * count)], training(kind))
        advantages = [sample.advantage for sample in batch.samples]
        assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-9)
        assert all(map(math.isfinite, advantages))
        for (one, mine), (other, theirs) in zip(
            zip(rewards, advantages, strict=False),
            zip(rewards[1:], advantages[1:], strict=False),
            strict=False,
        ):
            assert (mine - theirs) * (one - other) >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_groups_without_signal_are_pruned_and_counted(kind: str) -> None:
    batch = credit([group([1, 1, 1]), group([0, 0]), group([0, 1])], training(kind))
    assert (batch.groups, batch.filtered, batch.too_few, batch.zero_advantage) == (1, 2, 0, 2)
    assert len(batch.samples) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_groups_without_signal_may_be_kept_and_are_counted_still(kind: str) -> None:
    groups = [group([0.1] * 3), group([0, 1]), group([1.0])]
    batch = credit(groups, training(kind, filter_zero_advantages=False))
    assert (batch.groups, batch.filtered, batch.too_few, batch.zero_advantage) == (2, 0, 1, 1)
    assert [sample.advantage for sample in batch.samples[:3]] == [0.0] * 3


@pytest.mark.parametrize("loss", ["reverse_kl", "ce"])
def test_a_loss_that_reads_no_advantage_keeps_every_group(loss: str) -> None:
    config = training(loss=LossConfig.model_validate({"type": loss}))
    batch = credit([group([1, 1]), group([0, 1])], config)
    assert (batch.groups, batch.filtered, batch.zero_advantage) == (2, 0, 1)


def test_equal_rewards_that_do_not_add_up_exactly_are_no_signal() -> None:
    assert credit([group([0.1] * 3)], training("grpo_std")).filtered == 1


def test_survivors_of_a_group_are_compared_with_each_other() -> None:
    lost = [ScoredRollout([], 9.0), ScoredRollout(group([0]).rollouts[0].branches, math.nan)]
    whole = group([1.0, 0.0])
    partial = RolloutGroup(b"t", "e", [*lost, *whole.rollouts], 0, b"n", b"l")
    batch = credit([partial], training())
    assert [sample.advantage for sample in batch.samples] == [0.5, -0.5]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e308, -1e300])
def test_an_absurd_reward_is_left_out_of_its_group(kind: str, reward: float) -> None:
    batch = credit([group([1.0, reward, 0.0, reward])], training(kind))
    assert len(batch.samples) == 2
    assert all(abs(sample.advantage) <= 2.0 for sample in batch.samples)


def test_a_lone_survivor_teaches_nothing() -> None:
    batch = credit([group([1.0, math.inf])], training())
    assert (batch.samples, batch.too_few) == ([], 1)


def test_all_branches_of_a_rollout_share_its_advantage() -> None:
    branches = [BranchTokens([n, 5], [False, True], [0.0, -1.0]) for n in (1, 2)]
    rollouts = [ScoredRollout(branches, 1.0), ScoredRollout(branches[:1], 0.0)]
    batch = credit([RolloutGroup(b"t", "e", rollouts, 0, b"n", b"l")], training())
    assert [sample.advantage for sample in batch.samples] == [0.5, 0.5, -0.5]
    assert batch.samples[1].token_ids == [2, 5]


ECHO = LossConfig(echo_alpha=0.1)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ([0, 0, 1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1, 0, 1]),
        ([0, 0, 1, 1], [0, 0, 0, 0]),  # one turn: nothing but the prompt and the reply
        ([0, 0, 0], [0, 0, 0]),
        ([1, 0, 1], [0, 1, 0]),
        ([], []),
    ],
)
def test_the_environments_tokens_are_those_after_the_first_reply(
    mask: list[int], said: list[int]
) -> None:
    assert observations([bool(one) for one in mask]) == [bool(one) for one in said]


def conversations(rewards: list[float]) -> RolloutGroup:
    rollouts = [ScoredRollout([branch([0, 1, 0, 1])], reward) for reward in rewards]
    return RolloutGroup(b"t", "e", rollouts, 0, b"n", b"l")


def test_echo_learns_the_environments_tokens_of_every_group() -> None:
    groups = [conversations([1.0, 0.0]), conversations([1.0, 1.0]), mixed([0.0, 0.0], [2, 2])]
    batch = credit(groups, training(loss=ECHO))
    assert [one.advantage for one in batch.samples] == [0.5, -0.5, 0.0, 0.0]
    assert [one.mask for one in batch.samples[1:3]] == [[False, True, False, True], [False] * 4]
    assert all(one.echo == [False, False, True, False] for one in batch.samples)
    # a group without signal whose environment said nothing is left out as ever
    assert (batch.groups, batch.filtered, batch.zero_advantage) == (2, 1, 2)


def test_without_echo_nothing_of_the_environment_is_trained() -> None:
    batch = credit([conversations([1.0, 0.0])], training())
    assert [one.echo for one in batch.samples] == [None, None]


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(type="gspo"),
        LossConfig(type="reinforce", importance="sequence"),
        LossConfig(rejection="geometric"),
        LossConfig(rejection="sequence"),
    ],
)
def test_a_sequences_mean_is_not_taken_over_parts_of_it(loss: LossConfig) -> None:
    with pytest.raises(ValidationError, match="context_parallel to 1"):
        training(loss=loss, context_parallel=2)
    training(loss=LossConfig(type="reinforce", rejection="token"), context_parallel=2)


# -- several agents -------------------------------------------------------------------------------


def episodes(*rewards: Sequence[tuple[str, float]], environment: str = "e") -> RolloutGroup:
    """A group of episodes: each (agent, reward) is a trace of one branch, whose number is its first token."""
    numbers = itertools.count(1)
    rollouts = [
        ScoredRollout(
            [BranchTokens([next(numbers), 5], [False, True], [0.0, -1.0]) for _ in one],
            math.fsum(reward for _, reward in one) / len(one),
            [AgentShare(agent, reward, 1) for agent, reward in one],
        )
        for one in rewards
    ]
    return RolloutGroup(b"t", environment, rollouts, 0, b"n", b"l")


def advantages(batch: CreditedBatch) -> list[float]:
    assert [one.token_ids[0] for one in batch.samples] == list(range(1, len(batch.samples) + 1))
    return [sample.advantage for sample in batch.samples]


def test_rae_compares_each_agent_with_a_moving_average_of_its_own_rewards() -> None:
    """A zero-sum game that `first` wins three times of four: the mean over both is 0, whatever they do."""
    wins = [1.0, 1.0, -1.0, 1.0]
    group = episodes(*([("first", win), ("second", -win)] for win in wins))
    batch = credit([group], training("rae", rae_decay=0.8))
    # b before reward k is 0.2 * the sum over j < k of 0.8**(k - 1 - j) r_j
    before = [0.2 * math.fsum(0.8 ** (k - 1 - j) * wins[j] for j in range(k)) for k in range(5)]
    own = [win - b for win, b in zip(wins, before[:4], strict=True)]
    assert advantages(batch)[::2] == pytest.approx(own, rel=1e-12)
    assert advantages(batch)[1::2] == pytest.approx([-one for one in own], rel=1e-12)
    assert batch.baselines == {
        "e": {"first": pytest.approx(before[4]), "second": pytest.approx(-before[4])}
    }


def test_baselines_go_on_from_batch_to_batch_and_are_those_of_one_environment() -> None:
    config, group = training("rae"), episodes([("a", 1.0)], [("a", 3.0)])
    first = credit([group], config)
    second = credit([group], config, {}, first.baselines)
    both = credit([group, replace(group, environment="other")], config, {}, first.baselines)
    together = credit([group, group], config)
    assert first.baselines["e"]["a"] == pytest.approx(0.95 * 0.05 + 0.15)
    assert advantages(second)[0] == pytest.approx(1.0 - first.baselines["e"]["a"])
    assert together.baselines == second.baselines
    assert both.baselines == {"e": second.baselines["e"], "other": first.baselines["e"]}
    assert first.baselines == credit([group], config).baselines  # nothing was written into them


def test_rae_without_agents_is_reinforce_with_a_moving_average() -> None:
    batch = credit([group([1.0, 1.0])], training("rae", rae_decay=0.5))
    assert [one.advantage for one in batch.samples] == [1.0, 0.5]
    assert not has_equal_rewards(group([1.0, 1.0]), training("rae"))


def test_hierarchical_grpo_compares_solvers_within_an_episode_and_proposers_across() -> None:
    batch = credit(
        [
            episodes(
                [("proposer", 1.0), ("solver", 1.0), ("solver", 0.0)],
                [("proposer", 0.0), ("solver", 5.0), ("solver", 2.0)],
            )
        ],
        training("hierarchical_grpo", episode_agents=["solver"]),
    )
    assert advantages(batch) == [0.5, 0.5, -0.5, -0.5, 1.5, -1.5]


def test_an_agent_alone_in_its_episode_has_nothing_to_be_compared_with() -> None:
    one = episodes([("p", 1.0), ("s", 4.0)], [("p", 0.0), ("s", 1.0)])
    assert advantages(credit([one], training("hierarchical_grpo", episode_agents=["s"]))) == [
        0.5,
        0.0,
        -0.5,
        0.0,
    ]


@pytest.mark.parametrize("kind", KINDS[:-1])  # the last one's scale is that of the whole batch
def test_every_other_advantage_compares_an_agent_with_itself_alone(kind: str) -> None:
    """Adding a second agent changes nothing of the first one's advantages."""
    alone = credit([group([1.0, 0.0, 0.5])], training(kind))
    rewards = [[("a", r), ("b", 10 * r)] for r in (1.0, 0.0, 0.5)]
    batch = credit([episodes(*rewards)], training(kind))
    assert advantages(batch)[::2] == pytest.approx([one.advantage for one in alone.samples])


def test_rewards_that_only_differ_between_agents_are_no_signal() -> None:
    flat = episodes([("a", 1.0), ("b", -1.0)], [("a", 1.0), ("b", -1.0)])
    assert has_equal_rewards(flat, training())
    assert credit([flat], training()).zero_advantage == 1


@pytest.mark.parametrize("reward", [math.nan, math.inf, -1e300])
def test_an_absurd_reward_of_one_agent_leaves_its_episode_out(reward: float) -> None:
    kept = [[("a", 1.0), ("b", 0.0)], [("a", 0.0), ("b", 1.0)]]
    batch = credit([episodes(*kept, [("a", 0.5), ("b", reward)])], training("rae"))
    assert len(batch.samples) == 4
    assert all(map(math.isfinite, batch.baselines["e"].values()))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"advantage": "hierarchical_grpo"}, "needs episode_agents"),
        ({"advantage": "rae", "curriculum": {"gates": {"signal": {}}}}, "compares no groups"),
        ({"advantage": "rae", "rae_decay": 1.0}, "less than 1"),
    ],
)
def test_settings_of_agents_that_do_not_go_together_are_refused(
    fields: dict[str, object], says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        TrainingConfig.model_validate(fields)


def test_samples_that_are_rewarded_keep_their_routes_and_supports() -> None:
    routed = BranchTokens([1, 2], [False, True], [0.0, -1.0], routes=b"\1\2", support=b"\0")
    pair = [ScoredRollout([routed], reward) for reward in (0.0, 1.0)]
    [one, other] = credit([RolloutGroup(b"t", "e", pair, 0, b"n", b"l")], training()).samples
    assert (one.routes, other.routes) == (b"\1\2", b"\1\2")
    assert (one.support, other.support) == (b"\0", b"\0")
