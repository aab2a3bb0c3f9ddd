"""The environment seam: tasks by index, rollouts driven by a policy, scores that can be recomputed.

Trainer and worker hold the same environment (the run manifest fixes it), so a task is named by its index
and its digest, and a reward is a claim that the trainer recomputes. A bad rollout is data, not a crash:
run() reports errors in the episode. Implementations: hosted.py (real: verifiers.py in a process of its
own), tests/support/counting_environment.py (fake). Suite: tests/conformance/test_environment.py.
"""

from collections.abc import Awaitable, Callable, Sequence
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
    """The proofs of the replies, one after the other."""
    boundaries: tuple[bytes, ...] = ()
    """Of a pipeline, what Completion.boundaries says of all replies, one after the other."""
    plan: bytes = b""
    """Of these boundaries; where several plans made the branch there are none, and it is the last of them."""


@dataclass(frozen=True)
class Score:
    """Reward and named metrics (e.g. `exact`) of one rollout."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    turns: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    """Of a recomputed score: per branch, the turn number of each of its replies; it is part of their seeds."""


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
        """What it is busy with, or why it does not work just now, for the operator; "" while all is well."""
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

    async def demonstration(self, task: Task) -> list[int] | None:
        """Token ids of a right first reply, stop token included, for warm-up by SFT; None if unknown."""
        ...

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Play the task once with `policy` and score it. Raises what that raises, and EnvironmentGivenUp."""
        ...

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """Recompute the score of a finished rollout from its tokens alone. Raises ScoreMismatch if the
        tokens are no rollout of this task (wrong prompt, environment turns altered), EnvironmentFailed if
        the environment's own code fails on them, which is nobody's fault but its own."""
        ...

    async def close(self) -> None:
        """Stop whatever start() started."""
        ...


class EnvironmentFailed(NodeError):
    """The environment cannot be made, or its own code failed: a reward that raises, no result in time."""

    exit_code = 8


class EnvironmentStuck(EnvironmentFailed):
    """The environment's code did not return in time, or took its process along."""


class EnvironmentGivenUp(EnvironmentFailed):
    """No process of the environment stays up."""


class ScoreMismatch(Exception):
    """The tokens are not a rollout of the task that they claim."""
