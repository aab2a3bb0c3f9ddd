"""From a finished trace to our branches and score.

Reads the trace by its public fields only, so that nothing here needs the library that made it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..inference.engine import Completion
from .environment import Branch, Score
from .replay import PlayFailed


def branch(
    token_ids: list[int],
    sampled: list[bool],
    logprobs: list[float],
    turns: Sequence[Completion],
) -> Branch:
    """A training sequence and the turns in it, in order; at least one."""
    boundaries, plan = _crossed(turns)
    return Branch(
        token_ids=token_ids,
        sampled=sampled,
        logprobs=logprobs,
        policy_first=min(turn.policy_first for turn in turns),
        policy_last=max(turn.policy_last for turn in turns),
        finish=turns[-1].finish,
        spans=_spans(turns),
        proof=b"".join(turn.proof for turn in turns),
        boundaries=boundaries,
        plan=plan,
    )


def _crossed(turns: Sequence[Completion]) -> tuple[tuple[bytes, ...], bytes]:
    """What crossed between stages in all turns, and their plan; of several plans nothing, and the last one."""
    plans = {turn.plan for turn in turns}
    parts = [turn.boundaries for turn in turns]
    if len(plans) > 1 or not all(parts) or len({len(one) for one in parts}) > 1:
        return (), turns[-1].plan
    return tuple(b"".join(column) for column in zip(*parts, strict=True)), plans.pop()


def _spans(turns: Sequence[Completion]) -> tuple[tuple[int, int], ...]:
    """Where the policy changed, counted among the sampled tokens of all turns; empty if nowhere."""
    found: list[tuple[int, int]] = []
    before = 0
    for turn in turns:
        for start, version in turn.spans or ((0, turn.policy_first),):
            if not found or found[-1][1] != version:
                found.append((before + start, version))
        before += len(turn.token_ids)
    return tuple(found) if len(found) > 1 else ()


def only_trace(traces: Sequence[Any]) -> Any:
    """The episode's one trace. Raises PlayFailed if there are several, or if it failed."""
    if len(traces) != 1:
        raise PlayFailed(f"{len(traces)} rollouts in an episode: only 1 is supported")
    trace = traces[0]
    if not trace.ok or trace.is_timeout:
        last = trace.last_error
        raise PlayFailed(trace.stop_condition if last is None else f"{last.type}: {last.message}")
    return trace


def branches(trace: Any, completions: Mapping[int, Completion]) -> list[Branch]:
    """The trace's root-to-leaf paths that hold a turn; `completions` by id() of the sampled node.
    Raises PlayFailed if there is none."""
    found: list[Branch] = []
    for it in trace.branches:
        turns = [completions[id(node)] for node in it.nodes if node.sampled]
        if turns:
            found.append(branch(it.token_ids, it.sampled_mask, it.logprobs, turns))
    if not found:
        raise PlayFailed(f"the rollout ended without a turn: {trace.stop_condition}")
    return found


def score(trace: Any) -> Score:
    """The weighted sum of the rewards; each reward stands by name among the metrics, unweighted.
    Raises PlayFailed where one is NaN or infinite."""
    named: dict[str, float] = {
        name: float(reward.score) for name, reward in trace.rewards.items() if reward is not None
    }
    named |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
    total = float(trace.reward)
    if not all(map(math.isfinite, [total, *named.values()])):
        raise PlayFailed("a reward or metric is not a finite number: mend the taskset")
    return Score(reward=total, metrics=named)
