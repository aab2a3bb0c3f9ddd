"""From groups with rewards to samples with advantages. No torch.

An advantage compares a rollout with its own group, and is at most scaled by the batch's; `rae` compares it with
earlier ones of the same agent. It is computed here from the trainer's rewards and never taken from a worker. Of
several agents each has traces, rewards and advantages of its own, and is compared with itself alone.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from operator import or_
from types import MappingProxyType

from ..config.training import LengthPenaltyConfig, OverlongConfig, TrainingConfig
from .backend import Sample
from .buffer import RolloutGroup, ScoredRollout

STD_EPSILON = 1e-4
NO_SIGNAL = 1e-9
"""A group whose advantages are all below this teaches nothing."""
MAX_REWARD = 1e9
"""Rewards beyond it are as good as infinite: times the largest ratio, float32 must have room for them."""


@dataclass(frozen=True)
class CreditedBatch:
    """The samples of a batch, and counts of groups that were left out."""

    samples: list[Sample]
    groups: int
    """Groups that gave samples."""
    pruned: int
    """Groups without signal that were left out."""
    thin: int
    """Groups with fewer than two rollouts that have tokens and a finite reward."""
    flat: int = 0
    """Groups without signal, every advantage 0, left out or not."""
    baselines: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """Of rae, by environment and agent, after this batch."""


def grpo(rewards: Sequence[float]) -> list[float]:
    """r - mean(group): prime-rl's default, no division by the standard deviation (Dr. GRPO)."""
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def grpo_std(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-4) with the sample standard deviation, n - 1 (GRPO, arXiv 2402.03300).

    Needs at least two rewards.
    """
    centred = grpo(rewards)
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + STD_EPSILON) for value in centred]


def rloo(rewards: Sequence[float]) -> list[float]:
    """r - mean of the group's other rewards: REINFORCE, leave one out (arXiv 2402.14740).

    It is n / (n - 1) times grpo's. Needs at least two rewards.
    """
    count = len(rewards)
    return [value * count / (count - 1) for value in grpo(rewards)]


def over_batch_std(advantages: Sequence[Sequence[float]]) -> list[list[float]]:
    """A / (std + 1e-4) with the standard deviation, n - 1, of all of a batch's advantages, group by group.

    After grpo it is REINFORCE++ with the group's mean as baseline (arXiv 2501.03262): a group of few
    differences is not blown up as by grpo_std. Groups of equal rewards belong to the batch: the more of them
    there are, the larger the steps that the others ask for.
    """
    values = [value for group in advantages for value in group]
    if len(values) < 2:
        return [list(group) for group in advantages]
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return [[value / (std + STD_EPSILON) for value in group] for group in advantages]


def rae(rewards: Sequence[float], baseline: float, decay: float) -> tuple[list[float], float]:
    """r - a moving average of one agent's rewards: role-conditioned advantage estimation (SPIRAL, arXiv
    2506.24119), in the order of prime-rl's `algo/rae.py`.

        A = r - b,   then   b <- decay * b + (1 - decay) * r

    one reward after the other, so that none is in its own baseline. `rewards` are of one agent of one
    environment: of two that play against each other the mean over both is 0 whatever they do, and the edge of
    the one that begins is no merit of its play. Returns the advantages and the new baseline; the first is 0.
    """
    found: list[float] = []
    for reward in rewards:
        found.append(reward - baseline)
        baseline = decay * baseline + (1 - decay) * reward
    return found, baseline


def overlong_penalty(drawn: int, config: OverlongConfig) -> float:
    """What a rollout of `drawn` tokens loses: DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    0 up to max_tokens - buffer_tokens, from there linearly to `penalty` at max_tokens.
    """
    over = drawn - (config.max_tokens - config.buffer_tokens)
    return config.penalty * min(max(over / config.buffer_tokens, 0.0), 1.0)


def max_rl(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / mean, all 0 where mean <= 0: maximum-likelihood RL (arXiv 2602.02710), as in prime-rl.

    Meant for rewards >= 0: a rarely solved task weighs about 1 / (its pass rate). Where some are
    negative the mean may come close to 0: the divisor is at least max(|r|) / n, which changes nothing for
    rewards >= 0 and bounds advantages by 2 n.
    """
    mean = math.fsum(rewards) / len(rewards)
    if mean <= 0:
        return [0.0] * len(rewards)
    scale = max(mean, max(map(abs, rewards)) / len(rewards))
    return [(reward - mean) / scale for reward in rewards]


@dataclass(frozen=True)
class Size:
    """Of one rollout, over all its branches."""

    output: int
    """Tokens that the model drew."""
    input: int
    """Tokens that it read and did not draw."""
    turns: int
    """Times that it began to draw."""

    @classmethod
    def of(cls, rollout: ScoredRollout) -> "Size":
        """Count the tokens of a rollout."""
        masks = [branch.mask for branch in rollout.branches]
        drawn = sum(map(sum, masks))
        turns = sum(
            now and not before
            for mask in masks
            for before, now in zip([False, *mask], mask, strict=False)
        )
        return cls(drawn, sum(map(len, masks)) - drawn, turns)


def grpo_length(
    rewards: Sequence[float], sizes: Sequence[Size], penalty: LengthPenaltyConfig
) -> list[float]:
    """grpo on rewards that a length penalty was taken from, prime-rl's `linear` one (`algo/grpo.py`):

        r' = r - max(mean(r), 0) * (a * output / max output + b * input / max input + c * turns / max turns)
        A  = r' - mean(r')

    with maxima over the group and a, b, c of `penalty`. The better a group does, the more being short counts;
    a group that solved nothing has no penalty at all. prime-rl multiplies by a negative mean too, which would
    reward length.
    """
    pass_rate = max(math.fsum(rewards) / len(rewards), 0.0)
    longest = max(max(size.output for size in sizes), 1)
    most_read = max(max(size.input for size in sizes), 1)
    most_turns = max(max(size.turns for size in sizes), 1)
    return grpo(
        [
            reward
            - pass_rate
            * (
                penalty.num_output_tokens_weight * size.output / longest
                + penalty.num_input_tokens_weight * size.input / most_read
                + penalty.num_turns_weight * size.turns / most_turns
            )
            for reward, size in zip(rewards, sizes, strict=True)
        ]
    )


def credit(
    groups: Iterable[RolloutGroup],
    training: TrainingConfig,
    own: Mapping[str, TrainingConfig] = MappingProxyType({}),
    baselines: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> CreditedBatch:
    """One sample per branch of every rollout; all branches of an agent's trace share its advantage.

    `own` holds the settings of environments whose advantage or loss differs, by name; `baselines` are those of
    rae after the batch before.

    A rollout without tokens or with a reward that is not finite is left out of its group's baseline;
    the survivors are compared with each other. Groups without signal are pruned, not back-filled, unless
    the config keeps them or its loss reads no advantages; then their advantages are exactly 0. With ECHO
    a group that is pruned still gives the tokens of its environment, and none of the model's.
    """
    compared: list[tuple[RolloutGroup, list[ScoredRollout], list[float]]] = []
    by_batch: list[int] = []
    """Groups of `compared` whose advantages are divided by the batch's standard deviation."""
    flat = thin = 0
    averages = {name: dict(one) for name, one in baselines.items()}
    for group in groups:
        survivors = _survivors(group)
        if len(survivors) < 2:
            thin += 1
            continue
        settings = own.get(group.environment, training)
        averages.setdefault(group.environment, {})
        traces = [trace for rollout in survivors for _, trace in rollout.traces()]
        advantages = _advantages(survivors, settings, averages[group.environment])
        if max(map(abs, advantages)) < NO_SIGNAL:
            flat += 1
            advantages = [0.0] * len(traces)
        if settings.advantage == "reinforce_plus_plus":
            by_batch.append(len(compared))
        compared.append((group, traces, advantages))
    found = [advantages for _, _, advantages in compared]
    scaled = over_batch_std([found[number] for number in by_batch])
    for number, advantages in zip(by_batch, scaled, strict=True):
        found[number] = advantages
    used = [
        _samples(group.environment, traces, values, own.get(group.environment, training))
        for (group, traces, _), values in zip(compared, found, strict=True)
    ]
    samples = [one for group in used for one in group]
    kept = sum(map(bool, used))
    averages = {name: one for name, one in averages.items() if one}
    return CreditedBatch(samples, kept, len(compared) - kept, thin, flat, averages)


def group_advantages(group: RolloutGroup, training: TrainingConfig) -> list[float]:
    """Compute the advantages of a group's survivors, by their agents' traces and unscaled by its batch; none of
    fewer than two. Not for rae."""
    survivors = _survivors(group)
    return _advantages(survivors, training, {}) if len(survivors) > 1 else []


def _survivors(group: RolloutGroup) -> list[ScoredRollout]:
    return [
        one
        for one in group.rollouts
        if one.branches and all(abs(trace.reward) <= MAX_REWARD for _, trace in one.traces())
    ]


def has_equal_rewards(group: RolloutGroup, training: TrainingConfig) -> bool:
    """Whether a group's rewards alone say that all its advantages are 0; with a length penalty they may not."""
    if training.advantage == "rae":
        return False
    for traces in _comparable(group.rollouts, training).values():
        rewards = _rewards([trace for _, trace in traces], training)
        if training.advantage == "grpo_length" and math.fsum(rewards) > 0:
            return False
        if max(rewards) - min(rewards) >= NO_SIGNAL:
            return False
    return True


Peers = tuple[str, int | None]
"""(agent, place of the rollout): traces that are compared; None: with those of all rollouts of the group."""


def _comparable(
    rollouts: Sequence[ScoredRollout], training: TrainingConfig
) -> dict[Peers, list[tuple[int, ScoredRollout]]]:
    """Sort a group's traces, each with its number, by what they are compared with.

    Those are the same agent's traces: of the whole group or, for the `episode_agents` of hierarchical_grpo, of
    the same episode. So solvers of one proposed problem are compared with each other, and its proposer with
    those of the group's other problems (prime-rl's `algo/hierarchical_grpo.py`).
    """
    inside = training.episode_agents if training.advantage == "hierarchical_grpo" else ()
    found: dict[Peers, list[tuple[int, ScoredRollout]]] = {}
    numbers = count()
    for place, rollout in enumerate(rollouts):
        for agent, trace in rollout.traces():
            peers = (agent, place if agent in inside else None)
            found.setdefault(peers, []).append((next(numbers), trace))
    return found


def _advantages(
    rollouts: Sequence[ScoredRollout], training: TrainingConfig, baselines: dict[str, float]
) -> list[float]:
    """Compute an advantage for each trace of each rollout, in order; `baselines` of rae go on."""
    found: dict[int, float] = {}
    for (agent, _), members in _comparable(rollouts, training).items():
        traces = [trace for _, trace in members]
        if training.advantage == "rae":
            rewards, before = _rewards(traces, training), baselines.get(agent, 0.0)
            values, baselines[agent] = rae(rewards, before, training.rae_decay)
        elif len(traces) == 1:
            values = [0.0]  # nothing to compare with
        else:
            values = _compared(traces, training)
        found |= {number: value for (number, _), value in zip(members, values, strict=True)}
    return [found[number] for number in range(len(found))]


def _compared(rollouts: Sequence[ScoredRollout], training: TrainingConfig) -> list[float]:
    rewards = _rewards(rollouts, training)
    match training.advantage:
        case "rloo":
            return rloo(rewards)
        case "grpo_std":
            return grpo_std(rewards)
        case "grpo_length":
            return grpo_length(rewards, list(map(Size.of, rollouts)), training.length_penalty)
        case "max_rl":
            return max_rl(rewards)
        case (
            _
        ):  # grpo, hierarchical_grpo and reinforce_plus_plus, whose part of the batch is credit()'s
            return grpo(rewards)


def _rewards(rollouts: Sequence[ScoredRollout], training: TrainingConfig) -> list[float]:
    """What advantages are made of: the rewards, less what overlong rollouts lose."""
    overlong = training.overlong
    if overlong is None:
        return [rollout.reward for rollout in rollouts]
    return [one.reward - overlong_penalty(Size.of(one).output, overlong) for one in rollouts]


def _samples(
    environment: str,
    rollouts: Sequence[ScoredRollout],
    advantages: Sequence[float],
    training: TrainingConfig,
) -> list[Sample]:
    """Make the samples of a group; one that is pruned has none of the model's tokens."""
    prune = training.filter_zero_advantages and training.loss.reads_advantages
    rewarded, echo = any(advantages) or not prune, training.loss.echo_alpha > 0
    samples = [
        Sample(
            branch.token_ids,
            branch.mask if rewarded else [False] * len(branch.mask),
            branch.logprobs,
            advantage,
            observations(branch.mask) if echo else None,
            environment=environment,
            routes=branch.routes if rewarded else b"",
        )
        for rollout, advantage in zip(rollouts, advantages, strict=True)
        for branch in rollout.branches
    ]
    return [one for one in samples if rewarded or any(one.echo or ())]


def observations(drawn: Sequence[bool]) -> list[bool]:
    """Mark the environment's tokens after the model's first one; the prompt is not among them.

    As prime-rl's `algo/echo.py` where it knows no roles, the tokens of the chat template around them included.
    """
    begun = [False, *accumulate(drawn, or_)]
    return [before and not own for before, own in zip(begun, drawn, strict=False)]
