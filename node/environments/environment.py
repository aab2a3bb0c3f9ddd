"""Define environments: tasks by index, rollouts driven by a policy, scores that can be recomputed.

Trainer and worker hold the same environment, fixed by the run manifest, so index and digest name a task, and
the trainer recomputes a claimed reward. A failed rollout is data: run() reports it in the episode.
Implementations: hosted.py (real: verifiers.py in a process of its own), tests/support/counting_environment.py
(fake). Suite: tests/conformance/test_environment.py.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..inference.engine import Completion
from ..ops.errors import NodeError

Split = Literal["train", "eval"]

Policy = Callable[[Sequence[int], int], Awaitable[Completion]]
"""(prompt token ids, turn number from 0) -> completion. Seed, temperature and limits are bound in."""


@dataclass(frozen=True)
class Task:
    """One task: `digest` identifies its content across machines."""

    index: int
    digest: bytes
    split: Split = "train"


@dataclass(frozen=True)
class Branch:
    """One training sequence: prompt, sampled and environment tokens in order.

    `sampled[i]` says whether the model drew token i; `logprobs[i]` is its logprob, 0.0 where not sampled.
    """

    token_ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    policy_first: int
    policy_last: int
    finish: Literal["stop", "length"]
    spans: tuple[tuple[int, int], ...] = ()
    """(index among the sampled tokens, version that drew from it on); empty if one drew them all."""
    proof: bytes = b""
    """Proofs of the replies, joined."""
    boundaries: tuple[bytes, ...] = ()
    """Completion.boundaries of all replies of a pipeline, joined."""
    plan: bytes = b""
    """Plan of these boundaries; if several plans made the branch, the last one, and there are no boundaries."""
    routes: bytes = b""
    """Routes of all sampled tokens, joined; empty if a reply has none."""

    @classmethod
    def of_turns(
        cls,
        token_ids: list[int],
        sampled: list[bool],
        logprobs: list[float],
        turns: Sequence[Completion],
    ) -> "Branch":
        """Make the branch of a conversation from its turns, in order; at least one."""
        boundaries, plan = _join_boundaries(turns)
        return cls(
            token_ids=token_ids,
            sampled=sampled,
            logprobs=logprobs,
            policy_first=min(turn.policy_first for turn in turns),
            policy_last=max(turn.policy_last for turn in turns),
            finish=turns[-1].finish,
            spans=_join_spans(turns),
            proof=b"".join(turn.proof for turn in turns),
            boundaries=boundaries,
            plan=plan,
            routes=b"".join(turn.routes for turn in turns)
            if all(turn.routes for turn in turns)
            else b"",
        )


def _join_boundaries(turns: Sequence[Completion]) -> tuple[tuple[bytes, ...], bytes]:
    """Join the boundaries of all turns, with their plan; if that changed, none and the last plan."""
    plans = {turn.plan for turn in turns}
    columns = [turn.boundaries for turn in turns]
    if len(plans) > 1 or not all(columns) or len({len(one) for one in columns}) > 1:
        return (), turns[-1].plan
    return tuple(b"".join(column) for column in zip(*columns, strict=True)), plans.pop()


def _join_spans(turns: Sequence[Completion]) -> tuple[tuple[int, int], ...]:
    """Find where the policy changed among the sampled tokens of all turns; empty if it did not."""
    found: list[tuple[int, int]] = []
    before = 0
    for turn in turns:
        for start, version in turn.spans or ((0, turn.policy_first),):
            if not found or found[-1][1] != version:
                found.append((before + start, version))
        before += len(turn.token_ids)
    return tuple(found) if len(found) > 1 else ()


@dataclass(frozen=True)
class AgentScore:
    """Reward of one agent's trace in a rollout of several agents."""

    agent: str
    """Its name in the environment's config; several traces of a rollout may have the same."""
    reward: float
    branches: int
    """How many of the rollout's branches are this trace's: the next ones in order."""


@dataclass(frozen=True)
class Demonstration:
    """A good conversation on a task, from its prompt on; `sampled[i]` says whether the model says token i."""

    token_ids: list[int]
    sampled: list[bool]

    @classmethod
    def of_reply(cls, prompt: Sequence[int], reply: Sequence[int]) -> "Demonstration":
        """Make that of a single turn."""
        return cls([*prompt, *reply], [False] * len(prompt) + [True] * len(reply))

    def turns(self) -> list[tuple[list[int], list[int]]]:
        """List what the model reads and what it says to that, turn by turn."""
        ids, said = self.token_ids, [*self.sampled, False]
        starts = [i for i, now in enumerate(said) if now and not said[i - 1]]
        return [(ids[:start], ids[start : said.index(False, start)]) for start in starts]


@dataclass(frozen=True)
class Score:
    """Reward and named metrics (e.g. `exact`) of one rollout."""

    reward: float
    """Of several agents: the mean of their traces' rewards."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    turns: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    """Turn numbers of each branch's replies, part of their seeds; set in a recomputed score, and where
    there are agents."""
    agents: tuple[AgentScore, ...] = ()
    """In the order in which they first spoke; empty where the environment has one agent."""


@dataclass(frozen=True)
class Episode:
    """One finished rollout of a task; `branches` is empty when `error` says why it failed."""

    branches: list[Branch]
    score: Score
    error: str = ""


class Environment(Protocol):
    """A source of tasks with a way to play and to score them."""

    @property
    def name(self) -> str:
        """Its id in the run manifest."""
        ...

    @property
    def status(self) -> str:
        """Its activity or fault, for the operator; empty while all is well."""
        ...

    @property
    def judge_fault(self) -> str:
        """Why its judge does not answer; empty while it does, or has none."""
        ...

    async def start(self) -> None:
        """Make it ready (heavy imports, tool servers). Raises EnvironmentFailed."""
        ...

    async def task(self, index: int, split: Split = "train") -> Task:
        """Task number `index` of a split; the same on every machine. Splits share no task.
        Raises EnvironmentFailed if it cannot be made."""
        ...

    async def prompt(self, task: Task) -> list[int]:
        """The token ids that the first turn of this task starts with. Raises ScoreMismatch if the task has
        other content here."""
        ...

    async def demonstration(self, task: Task) -> Demonstration | None:
        """A right reply, or all of those of a conversation, for warm-up by SFT; None if unknown."""
        ...

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Play the task once with `policy` and score it. Raises what that raises, and EnvironmentGivenUp."""
        ...

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """Recompute the score of a finished rollout from its tokens alone. Raises ScoreMismatch if the
        tokens are no rollout of this task (wrong prompt, environment turns altered), EnvironmentFailed if
        the environment's own code fails on them."""
        ...

    async def close(self) -> None:
        """Stop the environment."""
        ...


def shown_statuses(environments: Iterable[Environment]) -> str:
    """Join the statuses of environments that have something to say, each with its id."""
    return "; ".join(f"{one.name}: {one.status}" for one in environments if one.status)


class EnvironmentFailed(NodeError):
    """The environment cannot be made, or its own code failed: a reward that raises, no result in time."""

    exit_code = 8


class EnvironmentStuck(EnvironmentFailed):
    """The environment's code did not return in time, or took its process along."""


class EnvironmentGivenUp(EnvironmentFailed):
    """No process of the environment stays up."""


class ScoreMismatch(Exception):
    """The tokens are not a rollout of the task that they claim."""
