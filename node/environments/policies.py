"""Policies within an episode: the Exchange that samples its turns, and recorded turns.

Invariants:
- a failure of the policy never counts as the episode's: environment libraries swallow exceptions, so Exchange
  stores it and check() raises it again;
- a recording answers only the exact prompts that it holds, so replaying it through the environment proves that
  the environment would have sent the same prompts.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

from ...crypto.hashing import digest
from ...protocol.rollouts import pack_u32
from ..inference.engine import Completion
from .environment import Branch, Policy, ScoreMismatch
from .stop_strings import StopStrings

episode_clock: ContextVar[Callable[[], float]] = ContextVar("episode_clock", default=time.monotonic)
"""Clock for the deadline of an episode, in seconds; a host leaves out the time of other episodes' code."""

Judge = Callable[[bytes], Awaitable[bytes]]
"""(request to /chat/completions) -> completion, both in JSON. Raises JudgeRefused."""
episode_judge: ContextVar[Judge | None] = ContextVar("episode_judge", default=None)
"""Judge for an episode's rewards; None if they are not computed here."""


class JudgeRefused(Exception):
    """The judge answers, but not this conversation; the text has the reason."""


class PlayFailed(Exception):
    """The rollout has no score; the text is the reason. It is data, not a crash."""


class BadCompletion(PlayFailed):
    """The tokens are not one completion under the sampling contract."""


class EpisodeStuck(PlayFailed):
    """The environment's own code exceeded its deadline."""


def check_completion(
    completion: Completion,
    *,
    max_tokens: int,
    stop_token_ids: Sequence[int],
    stops: StopStrings | None = None,
) -> None:
    """Raise BadCompletion unless `completion` keeps the sampling contract.

    It has 1..max_tokens tokens, one logprob each, no stop token before the last token, and `finish` to match;
    it was cut at the first of `stops`.
    """
    ids = completion.token_ids
    if not 1 <= len(ids) <= max_tokens:
        raise BadCompletion(f"{len(ids)} tokens in one completion: sample 1 to {max_tokens}")
    if len(completion.logprobs) != len(ids):
        raise BadCompletion(
            f"{len(completion.logprobs)} logprobs for {len(ids)} tokens: send one each"
        )
    if any(stop in ids[:-1] for stop in stop_token_ids):
        raise BadCompletion("tokens after a stop token: end the completion there")
    ended = ids[-1] in stop_token_ids or (stops is not None and stops.end(ids) > 0)
    if (completion.finish == "stop") != ended:
        raise BadCompletion(f"finish is {completion.finish!r} but the last token says otherwise")


class Exchange:
    """Sampler of one episode's turns, with a deadline for the environment's code between them."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        deadline: float,
        stops: StopStrings | None = None,
    ) -> None:
        """Completions are cut at the first of `stops`."""
        self._policy = policy
        self._strings = stops
        self._max_tokens = max_tokens
        self._stops = stop_token_ids
        self._deadline = deadline
        self._clock = episode_clock.get()
        self._judge = episode_judge.get()
        self._timer: asyncio.Timeout | None = None
        self._look: asyncio.TimerHandle | None = None
        self._began: float | None = None
        """Start of the environment's own code; None while the policy samples or the judge answers."""
        self._outside = 0
        """Pending answers of the policy and of the judge."""
        self._turn = 0
        self._failure: Exception | None = None

    @property
    def turns(self) -> int:
        """Number of turns so far, which is the number of the next one."""
        return self._turn

    async def sample(self, prompt: Sequence[int]) -> Completion:
        """Sample a completion. Raises BadCompletion if it breaks the sampling contract."""
        turn, self._turn = self._turn, self._turn + 1
        with self._waiting():
            try:
                completion = await self._policy(prompt, turn)
            except Exception as error:
                self._failure = error  # see check(): the caller may swallow it
                raise
        if self._strings is not None:
            completion = self._strings.cut(completion)
        check_completion(
            completion,
            max_tokens=self._max_tokens,
            stop_token_ids=self._stops,
            stops=self._strings,
        )
        return completion

    async def _ask_judge(self, request: bytes) -> bytes:
        """Ask the judge for the episode's code. Raises JudgeRefused."""
        if self._judge is None:
            raise JudgeRefused("no judge is asked here: rewards of judges are the trainer's")
        with self._waiting():
            return await self._judge(request)

    @contextmanager
    def _waiting(self) -> Generator[None]:
        """Stop the deadline's clock inside: only the environment's own time counts."""
        self._count(+1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self._outside += change
        self._began = None if self._outside else self._clock()

    def _check_time(self) -> None:
        """End the episode if its code exceeded the deadline, else schedule the next check."""
        assert self._timer is not None  # made before the first check
        loop = asyncio.get_running_loop()
        remaining_s = self._deadline
        if self._began is not None:
            remaining_s += self._began - self._clock()
        if remaining_s > 0.0:
            self._look = loop.call_later(remaining_s, self._check_time)
        else:
            self._timer.reschedule(loop.time())

    @asynccontextmanager
    async def bounded(self) -> AsyncGenerator[None]:
        """Raise EpisodeStuck if the environment's code runs for `deadline` seconds between turns.

        A loop that never awaits cannot be interrupted from inside its own process (host.py).
        """
        judge = episode_judge.set(self._ask_judge)
        try:
            async with asyncio.timeout(None) as self._timer:
                self._count(0)
                self._check_time()
                yield
        except TimeoutError as error:
            if self._timer is None or not self._timer.expired():
                raise
            raise EpisodeStuck(
                f"the environment's code gave no result within {self._deadline:g} s: mend it, or raise "
                "environment.timeout_s"
            ) from error
        finally:
            episode_judge.reset(judge)
            if self._look is not None:
                self._look.cancel()

    def check(self) -> None:
        """Raise the failure of the policy, if there was one."""
        if self._failure is not None:
            raise self._failure


def turn_spans(branch: Branch) -> list[tuple[int, int]]:
    """Return (start, end) of each turn, a run of sampled tokens.

    Raises ScoreMismatch if the branch is malformed.
    """
    count = len(branch.token_ids)
    if not count == len(branch.sampled) == len(branch.logprobs):
        raise ScoreMismatch("token_ids, sampled and logprobs differ in length")
    edges = [i for i in range(1, count) if branch.sampled[i] != branch.sampled[i - 1]]
    if not edges or branch.sampled[0] or not branch.sampled[-1]:
        raise ScoreMismatch("a branch starts with a prompt and ends with sampled tokens")
    edges.append(count)
    return list(zip(edges[::2], edges[1::2], strict=True))


class RecordedRollout:
    """Policy that repeats the turns of a finished rollout."""

    def __init__(self, branches: Sequence[Branch], *, stop_token_ids: Sequence[int]) -> None:
        if not branches:
            raise ScoreMismatch("a rollout without branches has no score")
        self._branches = branches
        self._turns: dict[tuple[int, ...], list[Completion]] = {}
        self._asked: dict[tuple[int, ...], list[int]] = {}
        """Prompt and reply -> numbers of the turns that used it."""
        for branch in branches:
            for start, end in turn_spans(branch):
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
        recorded = self._turns.setdefault(tuple(branch.token_ids[:start]), [])
        # Branches of one conversation share their first turns; each was sampled once.
        if all(other.token_ids != ids for other in recorded):
            recorded.append(completion)

    async def __call__(self, prompt: Sequence[int], turn: int) -> Completion:
        """Return the recorded completion of `prompt`. Raises ScoreMismatch if there is none."""
        recorded = self._turns.get(tuple(prompt))
        if not recorded:
            prompt_digest = digest(pack_u32(list(prompt))).hex()[:8]
            raise ScoreMismatch(
                f"turn {turn} of the task has another prompt than the rollout (here {prompt_digest})"
            )
        completion = recorded.pop(0) if len(recorded) > 1 else recorded[0]
        self._asked.setdefault((*prompt, *completion.token_ids), []).append(turn)
        return completion

    def turns(self) -> tuple[tuple[int, ...], ...]:
        """Return the turn numbers of each branch's replies in the replay."""
        turns = {conversation: list(numbers) for conversation, numbers in self._asked.items()}
        return tuple(
            tuple(_next(turns[tuple(branch.token_ids[:end])]) for _, end in turn_spans(branch))
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


def check_endings(
    branches: Sequence[Branch],
    stops: StopStrings,
    *,
    max_tokens: int,
    stop_token_ids: Sequence[int],
) -> None:
    """Raise ScoreMismatch if a reply that others follow ends before it is full, by none of the ends there are.

    The last reply of a branch says how it ended, which RecordedRollout.check() compares.
    """
    for branch in branches:
        for start, end in turn_spans(branch)[:-1]:
            ids = branch.token_ids[start:end]
            if len(ids) < max_tokens and ids[-1] not in stop_token_ids and not stops.end(ids):
                raise ScoreMismatch(f"a reply of {len(ids)} tokens was cut short")


class ShownReplies:
    """Policy that returns given replies, turn by turn."""

    def __init__(self, replies: Sequence[list[int]]) -> None:
        """Take the token ids of each reply, stop token included."""
        self._replies = replies

    async def __call__(self, prompt: Sequence[int], turn: int) -> Completion:
        """See Policy. Raises PlayFailed after the last reply."""
        if turn >= len(self._replies):
            raise PlayFailed(f"after {len(self._replies)} replies it goes on")
        ids = self._replies[turn]
        return Completion(ids, [0.0] * len(ids), "stop", 0, 0)


def _next(numbers: list[int]) -> int:
    """Take the next turn number; the only one is shared by branches that share the turn."""
    return numbers.pop(0) if len(numbers) > 1 else numbers[0]


class RememberedPolicy:
    """Policy that samples each turn once, even if its rollout is restarted."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._said: dict[tuple[int, tuple[int, ...]], Completion] = {}

    async def __call__(self, prompt: Sequence[int], turn: int) -> Completion:
        """See Policy."""
        key = (turn, tuple(prompt))
        if key not in self._said:
            self._said[key] = await self._policy(prompt, turn)
        return self._said[key]
