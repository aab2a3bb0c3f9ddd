"""Turn groups with rewards into samples with advantages. No torch.

An advantage compares a rollout with its own group, and the batch at most scales it; `rae` compares it with
earlier rollouts of the same agent. It is computed here from the trainer's rewards and never taken from a
worker. In an environment of several agents, each agent has its own traces, rewards and advantages, and is
compared only with itself.
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
"""Threshold of the advantages' magnitude; a group with all of them below it has no learning signal."""
MAX_REWARD = 1e9
"""Limit of a reward's magnitude; larger rewards count as infinite, so that a reward times the largest
importance ratio still fits float32."""


@dataclass(frozen=True)
class CreditedBatch:
    """Samples of a batch, and counts of the groups that were left out."""

    samples: list[Sample]
    groups: int
    """Groups that contributed samples."""
    filtered: int
    """Groups without signal that were left out."""
    too_few: int
    """Groups with fewer than two rollouts that have tokens and a finite reward."""
    zero_advantage: int = 0
    """Groups without signal (every advantage 0), whether left out or not."""
    baselines: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """Baselines of rae after this batch, by environment and agent."""


def grpo(rewards: Sequence[float]) -> list[float]:
    """Return r - mean(group), prime-rl's default; not divided by the std (Dr. GRPO)."""
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def grpo_std(rewards: Sequence[float]) -> list[float]:
    """Return (r - mean) / (std + 1e-4), std with n - 1 (GRPO, arXiv 2402.03300).

    Needs at least two rewards.
    """
    centred = grpo(rewards)
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + STD_EPSILON) for value in centred]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Return r - mean of the group's other rewards: REINFORCE leave-one-out (arXiv 2402.14740).

    The result is n / (n - 1) times that of grpo. Needs at least two rewards.
    """
    count = len(rewards)
    return [value * count / (count - 1) for value in grpo(rewards)]


def over_batch_std(advantages: Sequence[Sequence[float]]) -> list[list[float]]:
    """Divide advantages by (std + 1e-4), std (n - 1) over all advantages of the batch.

    Returns them group by group. After grpo this is REINFORCE++ with the group's mean as baseline (arXiv
    2501.03262): unlike grpo_std, it does not inflate a group with small differences. Groups of equal rewards
    count as part of the batch: the more there are, the larger the advantages of the other groups.
    """
    values = [value for group in advantages for value in group]
    if len(values) < 2:
        return [list(group) for group in advantages]
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return [[value / (std + STD_EPSILON) for value in group] for group in advantages]


def rae(rewards: Sequence[float], baseline: float, decay: float) -> tuple[list[float], float]:
    """Return r - a moving average of one agent's rewards, and the new average.

    Role-conditioned advantage estimation (SPIRAL, arXiv 2506.24119), in the order of prime-rl's `algo/rae.py`:

        A = r - b,   then   b <- decay * b + (1 - decay) * r

    one reward after the other, so that no reward is part of its own baseline. `rewards` belong to one agent of
    one environment: for two agents in a zero-sum game the mean over both is always 0, and the first player's
    structural advantage must not count as merit. Returns the advantages and the new baseline b,
    which starts at 0.
    """
    differences: list[float] = []
    for reward in rewards:
        differences.append(reward - baseline)
        baseline = decay * baseline + (1 - decay) * reward
    return differences, baseline


def overlong_penalty(tokens: int, config: OverlongConfig) -> float:
    """Return the penalty of a rollout of `tokens` tokens.

    DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to max_tokens - buffer_tokens, then
    rising linearly to `penalty` at max_tokens.
    """
    over = tokens - (config.max_tokens - config.buffer_tokens)
    return config.penalty * min(max(over / config.buffer_tokens, 0.0), 1.0)


def max_rl(rewards: Sequence[float]) -> list[float]:
    """Return (r - mean) / mean, all 0 if mean <= 0: maximum-likelihood RL (arXiv 2602.02710).

    As in prime-rl. Meant for rewards >= 0: a rarely solved task weighs about 1 / (its pass rate). With negative
    rewards the mean may come close to 0, so the divisor is at least max(|r|) / n; that changes nothing for
    rewards >= 0 and bounds advantages by 2 n.
    """
    mean = math.fsum(rewards) / len(rewards)
    if mean <= 0:
        return [0.0] * len(rewards)
    scale = max(mean, max(map(abs, rewards)) / len(rewards))
    return [(reward - mean) / scale for reward in rewards]


@dataclass(frozen=True)
class Size:
    """Token and turn counts of one rollout, over all its branches."""

    output: int
    """Tokens sampled by the model."""
    input: int
    """Tokens read but not sampled by the model."""
    turns: int
    """Contiguous runs of sampled tokens."""

    @classmethod
    def of(cls, rollout: ScoredRollout) -> "Size":
        """Count the tokens and turns of a rollout."""
        masks = [branch.mask for branch in rollout.branches]
        output = sum(map(sum, masks))
        turns = sum(
            now and not before
            for mask in masks
            for before, now in zip([False, *mask], mask, strict=False)
        )
        return cls(output, sum(map(len, masks)) - output, turns)


def grpo_length(
    rewards: Sequence[float], sizes: Sequence[Size], penalty: LengthPenaltyConfig
) -> list[float]:
    """Return grpo of length-penalised rewards: prime-rl's `linear` penalty (`algo/grpo.py`).

        r' = r - max(mean(r), 0) * (a * output / max output + b * input / max input + c * turns / max turns)
        A  = r' - mean(r')

    with maxima over the group and the weights a, b, c of `penalty`. The higher a group's mean reward, the
    stronger the penalty; a group that solved nothing has none. prime-rl also multiplies by a negative mean,
    which would reward length.
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
    """Make one sample per branch of every rollout; an agent's branches share its advantage.

    `own` maps environment names to their settings where the advantage or loss differs from `training`.
    `baselines` are the rae baselines after the previous batch.

    Rollouts without tokens or with a reward that is not finite are left out, also of the group's baseline; the
    remaining ones are compared with each other. Groups without signal are left out, not back-filled, unless the
    config keeps them or its loss reads no advantages; then their advantages are exactly 0. With ECHO such a
    group still contributes its environment tokens, but no model tokens.
    """
    compared: list[tuple[RolloutGroup, list[ScoredRollout], list[float]]] = []
    by_batch: list[int] = []
    """Indices of the groups in `compared` whose advantages are divided by the batch's standard deviation."""
    zero_advantage = too_few = 0
    averages = {name: dict(averages_of_run) for name, averages_of_run in baselines.items()}
    for group in groups:
        survivors = _survivors(group)
        if len(survivors) < 2:
            too_few += 1
            continue
        settings = own.get(group.environment, training)
        averages.setdefault(group.environment, {})
        traces = [trace for rollout in survivors for _, trace in rollout.traces()]
        advantages = _advantages(survivors, settings, averages[group.environment])
        if max(map(abs, advantages)) < NO_SIGNAL:
            zero_advantage += 1
            advantages = [0.0] * len(traces)
        if settings.advantage == "reinforce_plus_plus":
            by_batch.append(len(compared))
        compared.append((group, traces, advantages))
    values_by_group = [advantages for _, _, advantages in compared]
    scaled = over_batch_std([values_by_group[number] for number in by_batch])
    for number, advantages in zip(by_batch, scaled, strict=True):
        values_by_group[number] = advantages
    used = [
        _samples(group.environment, traces, values, own.get(group.environment, training))
        for (group, traces, _), values in zip(compared, values_by_group, strict=True)
    ]
    samples = [sample for group in used for sample in group]
    credited = sum(map(bool, used))
    averages = {name: by_agent for name, by_agent in averages.items() if by_agent}
    return CreditedBatch(
        samples, credited, len(compared) - credited, too_few, zero_advantage, averages
    )


def group_advantages(group: RolloutGroup, training: TrainingConfig) -> list[float]:
    """Return the advantages of a group's surviving rollouts, one per trace.

    Not scaled by the batch; empty with fewer than two survivors. Does not support rae.
    """
    survivors = _survivors(group)
    return _advantages(survivors, training, {}) if len(survivors) > 1 else []


def _survivors(group: RolloutGroup) -> list[ScoredRollout]:
    return [
        rollout
        for rollout in group.rollouts
        if rollout.branches
        and all(abs(trace.reward) <= MAX_REWARD for _, trace in rollout.traces())
    ]


def has_equal_rewards(group: RolloutGroup, training: TrainingConfig) -> bool:
    """Return whether equal rewards make all advantages of a group 0.

    With a length penalty and a positive reward sum they may differ even for equal rewards.
    """
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
"""(agent, index of the rollout): key of traces that are compared; index None means across all rollouts of the
group."""


def _comparable(
    rollouts: Sequence[ScoredRollout], training: TrainingConfig
) -> dict[Peers, list[tuple[int, ScoredRollout]]]:
    """Group a group's traces, each with its number, by the traces they are compared with.

    A trace is compared with the same agent's traces: those of the whole group or, for the `episode_agents` of
    hierarchical_grpo, those of the same episode. So the solvers of one proposed problem are compared with each
    other, and its proposer with the proposers of the group's other problems (prime-rl's
    `algo/hierarchical_grpo.py`).
    """
    inside = training.episode_agents if training.advantage == "hierarchical_grpo" else ()
    traces: dict[Peers, list[tuple[int, ScoredRollout]]] = {}
    numbers = count()
    for place, rollout in enumerate(rollouts):
        for agent, trace in rollout.traces():
            peers = (agent, place if agent in inside else None)
            traces.setdefault(peers, []).append((next(numbers), trace))
    return traces


def _advantages(
    rollouts: Sequence[ScoredRollout], training: TrainingConfig, baselines: dict[str, float]
) -> list[float]:
    """Compute each trace's advantage, in order; update rae's `baselines` in place."""
    advantages: dict[int, float] = {}
    for (agent, _), members in _comparable(rollouts, training).items():
        traces = [trace for _, trace in members]
        if training.advantage == "rae":
            rewards, before = _rewards(traces, training), baselines.get(agent, 0.0)
            values, baselines[agent] = rae(rewards, before, training.rae_decay)
        elif len(traces) == 1:
            values = [0.0]  # nothing to compare with
        else:
            values = _compared(traces, training)
        advantages |= {number: value for (number, _), value in zip(members, values, strict=True)}
    return [advantages[number] for number in range(len(advantages))]


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
        case _:  # grpo, hierarchical_grpo, reinforce_plus_plus; credit() applies the batch scaling
            return grpo(rewards)


def _rewards(rollouts: Sequence[ScoredRollout], training: TrainingConfig) -> list[float]:
    """Return the rewards less the overlong penalties."""
    overlong = training.overlong
    if overlong is None:
        return [rollout.reward for rollout in rollouts]
    return [
        rollout.reward - overlong_penalty(Size.of(rollout).output, overlong) for rollout in rollouts
    ]


def _samples(
    environment: str,
    rollouts: Sequence[ScoredRollout],
    advantages: Sequence[float],
    training: TrainingConfig,
) -> list[Sample]:
    """Make the samples of a group; a group without signal contributes none of the model's tokens."""
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
            support=branch.support if rewarded else b"",
        )
        for rollout, advantage in zip(rollouts, advantages, strict=True)
        for branch in rollout.branches
    ]
    return [sample for sample in samples if rewarded or any(sample.echo or ())]


def observations(mask: Sequence[bool]) -> list[bool]:
    """Mark the environment's tokens after the model's first token; the prompt is not marked.

    As prime-rl's `algo/echo.py` does where it has no roles: the chat template's tokens around them are
    included.
    """
    begun = [False, *accumulate(mask, or_)]
    return [before and not own for before, own in zip(begun, mask, strict=False)]
