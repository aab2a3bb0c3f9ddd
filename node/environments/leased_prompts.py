"""The environment whose tasks come with the lease: a prompt, one reply to it, and no reward.

Trainer, worker and validator read the same prompt in the same signed lease, so none has to trust another.
"""

from collections.abc import Sequence

from ...protocol.errors import RemoteProtocolError
from ...protocol.leases import LEASED_PROMPTS, Lease, prompt_digest
from ...protocol.rollouts import unpack_u32
from .environment import (
    Branch,
    Demonstration,
    Environment,
    EnvironmentFailed,
    Episode,
    Policy,
    Score,
    ScoreMismatch,
    Split,
    Task,
)
from .policies import PlayFailed


class LeasedPrompts:
    """Environment of one lease's prompts; without a lease it has no tasks."""

    name = LEASED_PROMPTS
    status = ""
    judge_fault = ""
    stops = None

    def __init__(self, lease: Lease | None = None) -> None:
        tasks = lease.tasks if lease else ()
        # if a lease has fewer prompts than tasks, the other tasks have none
        pairs = zip(tasks, lease.prompts if lease else (), strict=False)
        self._prompts = {task.index: prompt for task, prompt in pairs}

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def task(self, index: int, split: Split = "train") -> Task:
        """See Environment."""
        prompt = self._prompts.get(index)
        if prompt is None:
            raise EnvironmentFailed(
                f"task {index} of {LEASED_PROMPTS} has no prompt: only `primerl-node judge` leases such tasks"
            )
        return Task(index, prompt_digest(prompt), split)

    async def prompt(self, task: Task) -> list[int]:
        """See Environment."""
        if task != await self.task(task.index, task.split):
            raise ScoreMismatch(f"task {task.index} has another prompt in this lease")
        try:
            return unpack_u32(self._prompts[task.index])
        except RemoteProtocolError as error:
            raise ScoreMismatch(
                f"the prompt of task {task.index} is not readable: {error}"
            ) from error

    async def demonstration(self, task: Task) -> Demonstration | None:
        """Return None: no correct reply is known."""
        return None

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Play one turn, with reward 0; see Environment."""
        try:
            prompt = await self.prompt(task)
            reply = await policy(prompt, 0)
        except (ScoreMismatch, PlayFailed) as error:
            return Episode([], Score(0.0), str(error))
        branch = Branch.of_turns(
            [*prompt, *reply.token_ids],
            [False] * len(prompt) + [True] * len(reply.token_ids),
            [0.0] * len(prompt) + reply.logprobs,
            [reply],
        )
        return Episode([branch], Score(0.0))

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """Check a rollout; its score is always 0. See Environment."""
        prompt = await self.prompt(task)
        if len(branches) != 1:
            raise ScoreMismatch(f"{len(branches)} sequences in place of one prompt and its reply")
        (branch,) = branches
        reply_length = len(branch.token_ids) - len(prompt)
        if branch.token_ids[: len(prompt)] != prompt:
            raise ScoreMismatch("the lease has another prompt than the rollout")
        if reply_length < 1 or branch.sampled != [False] * len(prompt) + [True] * reply_length:
            raise ScoreMismatch("not the prompt of the lease and one reply")
        return Score(0.0, turns=((0,),))


def of_lease(environment: Environment, lease: Lease) -> Environment:
    """Return the environment for the tasks of `lease`: LeasedPrompts of it, or `environment`."""
    return LeasedPrompts(lease) if isinstance(environment, LeasedPrompts) else environment
