"""Define environments: numbered tasks, rollouts by a policy, scores that can be recomputed.

Trainer and worker hold the same environment, fixed by the run manifest, so index and digest name a task, and
the trainer recomputes a claimed reward. A failed rollout is data: run() reports it in the episode.
Implementations: hosted.py (real: verifiers.py in a process of its own), tests/support/counting_environment.py
(fake). Suite: tests/conformance/test_environment.py.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ...protocol.rollouts import join_support
from ..errors import NodeError
from ..inference.engine import Completion, join_boundaries, join_spans
from .stop_strings import StopStrings

Split = Literal["train", "eval", "all"]
"""`all` is for what no training uses: the `eval` split of a taskset that has one, else all of its tasks."""

Policy = Callable[[Sequence[int], int], Awaitable[Completion]]
"""(prompt token ids, turn number from 0) -> completion. Seed, temperature and limits are bound in."""


@dataclass(frozen=True)
class Task:
    """One task: `digest` identifies its content across machines."""

    index: int
    digest: bytes
    split: Split = "train"
    place: int = field(default=-1, compare=False)
    """Number in the split, below `index` where a finite taskset has begun anew; -1: not known."""
    content: bytes = field(default=b"", compare=False)
    """Digest of the content without the task's number, if known: equal for a task that comes again."""


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
    """(index among the sampled tokens, policy version of the tokens from there on); empty if one version
    sampled all tokens."""
    proof: bytes = b""
    """Proofs of the replies, joined."""
    boundaries: tuple[bytes, ...] = ()
    """Completion.boundaries of all replies of a pipeline, joined."""
    plan: bytes = b""
    """Pipeline plan of the boundaries; if the plan changed between turns, the last plan, without boundaries."""
    routes: bytes = b""
    """Routes of all sampled tokens, joined; empty if a reply has none."""
    support: bytes = b""
    """Supports of all sampled tokens, joined; empty if a reply has none."""

    @classmethod
    def of_turns(
        cls,
        token_ids: list[int],
        sampled: list[bool],
        logprobs: list[float],
        turns: Sequence[Completion],
    ) -> "Branch":
        """Make the branch of a conversation from its turns, in order; at least one."""
        boundaries, plan = join_boundaries(turns)
        return cls(
            token_ids=token_ids,
            sampled=sampled,
            logprobs=logprobs,
            policy_first=min(turn.policy_first for turn in turns),
            policy_last=max(turn.policy_last for turn in turns),
            finish=turns[-1].finish,
            spans=join_spans(turns),
            proof=b"".join(turn.proof for turn in turns),
            boundaries=boundaries,
            plan=plan,
            routes=b"".join(turn.routes for turn in turns)
            if all(turn.routes for turn in turns)
            else b"",
            support=join_support([(turn.support, len(turn.token_ids)) for turn in turns]),
        )


@dataclass(frozen=True)
class AgentScore:
    """Reward of one agent's trace in a rollout of several agents."""

    agent: str
    """Name of the agent in the environment's config; several traces of a rollout may share it."""
    reward: float
    branches: int
    """Number of the rollout's branches that belong to this trace: the next ones in order."""


@dataclass(frozen=True)
class Demonstration:
    """A good conversation on a task, prompt included; `sampled[i]`: token i is the model's."""

    token_ids: list[int]
    sampled: list[bool]

    @classmethod
    def of_reply(cls, prompt: Sequence[int], reply: Sequence[int]) -> "Demonstration":
        """Make the demonstration of a single turn."""
        return cls([*prompt, *reply], [False] * len(prompt) + [True] * len(reply))

    def turns(self) -> list[tuple[list[int], list[int]]]:
        """List (prompt, reply) of each turn, as token ids."""
        ids, sampled = self.token_ids, [*self.sampled, False]
        starts = [i for i, now in enumerate(sampled) if now and not sampled[i - 1]]
        return [(ids[:start], ids[start : sampled.index(False, start)]) for start in starts]


@dataclass(frozen=True)
class Score:
    """Reward and named metrics (e.g. `exact`) of one rollout."""

    reward: float
    """Reward; with several agents, the mean over their traces."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    turns: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    """Turn numbers of each branch's replies, which their seeds depend on; set in a recomputed score, and if
    there are agents."""
    agents: tuple[AgentScore, ...] = ()
    """Scores of the agents' traces, by first turn; empty if the environment has one agent."""


@dataclass(frozen=True)
class Episode:
    """A finished rollout of a task; on failure `error` has the reason and `branches` is empty."""

    branches: list[Branch]
    score: Score
    error: str = ""


class Environment(Protocol):
    """A source of tasks, with methods to play and to score them."""

    @property
    def name(self) -> str:
        """Id of the environment in the run manifest."""
        ...

    @property
    def status(self) -> str:
        """Activity or fault, for the operator; empty in normal operation."""
        ...

    @property
    def judge_fault(self) -> str:
        """Reason why the judge does not answer; empty if it answers or there is none."""
        ...

    @property
    def stops(self) -> StopStrings | None:
        """Strings at which a policy should end its replies, known once started; run() cuts later ones."""
        ...

    async def start(self) -> None:
        """Start the environment (heavy imports, tool servers). Raises EnvironmentFailed."""
        ...

    async def task(self, index: int, split: Split = "train") -> Task:
        """Return task number `index` of a split, the same on every machine.

        Splits share no task. Raises EnvironmentFailed if the task cannot be made.
        """
        ...

    async def prompt(self, task: Task) -> list[int]:
        """Return the token ids of the first turn's prompt.

        Raises ScoreMismatch if the task has other content here.
        """
        ...

    async def demonstration(self, task: Task) -> Demonstration | None:
        """Return a conversation with correct replies, for SFT warm-up; None if unknown."""
        ...

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Play the task once with `policy` and score it.

        Raises EnvironmentGivenUp, and the errors of `policy`.
        """
        ...

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """Recompute the score of a finished rollout from its tokens alone.

        Raises ScoreMismatch if the tokens are not a rollout of this task (wrong prompt, environment turns
        altered), EnvironmentFailed if the environment's own code fails on them.
        """
        ...

    async def close(self) -> None:
        """Stop the environment."""
        ...


def shown_statuses(environments: Iterable[Environment]) -> str:
    """Join the non-empty statuses of environments, each with its id."""
    return "; ".join(
        f"{environment.name}: {environment.status}"
        for environment in environments
        if environment.status
    )


class EnvironmentFailed(NodeError):
    """The environment cannot be made, or its code failed: a reward raised, or timed out."""

    exit_code = 8


class EnvironmentStuck(EnvironmentFailed):
    """The environment's code did not return in time, or ended its process."""


class EnvironmentGivenUp(EnvironmentFailed):
    """The environment's process keeps failing and is not started again."""


class ScoreMismatch(Exception):
    """The tokens are not a rollout of the task that they claim."""
