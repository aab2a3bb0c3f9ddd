"""Finished rollouts as policies: what a submission's tokens say each turn was.

A recording answers only the exact prompts that it holds, so replaying it through the environment proves
that the environment would have said the same.
"""

from collections.abc import Sequence

from ..inference.engine import Completion
from .environment import Branch, ScoreMismatch


class PlayFailed(Exception):
    """The rollout came to no score; the text says why. Data, not a crash."""


class BadCompletion(PlayFailed):
    """The tokens cannot be one completion under the sampling contract."""


def check_completion(
    completion: Completion, *, max_tokens: int, stop_token_ids: Sequence[int]
) -> None:
    """Raise BadCompletion unless it has 1..max_tokens tokens and ends at its first stop token, or at none."""
    ids = completion.token_ids
    if not 1 <= len(ids) <= max_tokens:
        raise BadCompletion(f"{len(ids)} tokens in one completion: sample 1 to {max_tokens}")
    if len(completion.logprobs) != len(ids):
        raise BadCompletion(
            f"{len(completion.logprobs)} logprobs for {len(ids)} tokens: send one each"
        )
    if any(stop in ids[:-1] for stop in stop_token_ids):
        raise BadCompletion("tokens after a stop token: end the completion there")
    if (completion.finish == "stop") != (ids[-1] in stop_token_ids):
        raise BadCompletion(f"finish is {completion.finish!r} but the last token says otherwise")


def spans(branch: Branch) -> list[tuple[int, int]]:
    """(start, end) of each turn: the runs of sampled tokens. Raises ScoreMismatch on malformed branches."""
    count = len(branch.token_ids)
    if not count == len(branch.sampled) == len(branch.logprobs):
        raise ScoreMismatch("token_ids, sampled and logprobs differ in length")
    edges = [i for i in range(1, count) if branch.sampled[i] != branch.sampled[i - 1]]
    if not edges or branch.sampled[0] or not branch.sampled[-1]:
        raise ScoreMismatch("a branch starts with a prompt and ends with sampled tokens")
    edges.append(count)
    return list(zip(edges[::2], edges[1::2], strict=True))


class RecordedRollout:
    """The turns of a finished rollout, as a policy."""

    def __init__(self, branches: Sequence[Branch], *, stop_token_ids: Sequence[int]) -> None:
        if not branches:
            raise ScoreMismatch("a rollout without branches has no score")
        self._branches = branches
        self._turns: dict[tuple[int, ...], list[Completion]] = {}
        self._asked: dict[tuple[int, ...], list[int]] = {}
        """Prompt and reply -> the numbers of the turns in which it was said."""
        for branch in branches:
            for start, end in spans(branch):
                self._add(branch, start, end, stop_token_ids)

    def _add(self, branch: Branch, start: int, end: int, stops: Sequence[int]) -> None:
        ids = branch.token_ids[start:end]
        completion = Completion(
            token_ids=ids,
            logprobs=branch.logprobs[start:end],
            finish="stop" if ids[-1] in stops else "length",
            policy_first=branch.policy_first,
            policy_last=branch.policy_last,
        )
        held = self._turns.setdefault(tuple(branch.token_ids[:start]), [])
        # Branches of one conversation share their first turns; each was sampled once.
        if all(other.token_ids != ids for other in held):
            held.append(completion)

    async def __call__(self, prompt: Sequence[int], turn: int) -> Completion:
        """The recorded completion of `prompt`. Raises ScoreMismatch if there is none."""
        held = self._turns.get(tuple(prompt))
        if not held:
            raise ScoreMismatch(f"turn {turn} of the task has another prompt than the rollout")
        completion = held.pop(0) if len(held) > 1 else held[0]
        self._asked.setdefault((*prompt, *completion.token_ids), []).append(turn)
        return completion

    def turns(self) -> tuple[tuple[int, ...], ...]:
        """Per branch, the turn number of each reply, as the environment asked for them just now."""
        asked = {said: list(numbers) for said, numbers in self._asked.items()}
        return tuple(
            tuple(_next(asked[tuple(branch.token_ids[:end])]) for _, end in spans(branch))
            for branch in self._branches
        )

    def check(self, replayed: Sequence[Branch]) -> None:
        """Raise ScoreMismatch unless the replay led to exactly the recorded branches."""
        if len(replayed) != len(self._branches):
            raise ScoreMismatch(
                f"{len(self._branches)} branches where the task gives {len(replayed)}"
            )
        for ours, theirs in zip(replayed, self._branches, strict=True):
            same = ours.token_ids == theirs.token_ids and ours.sampled == theirs.sampled
            if not same or ours.finish != theirs.finish:
                raise ScoreMismatch("the environment's tokens or the ending were altered")


def _next(numbers: list[int]) -> int:
    """Branches that share a turn share its number; the same words said twice have two."""
    return numbers.pop(0) if len(numbers) > 1 else numbers[0]
