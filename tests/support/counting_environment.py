"""A tiny environment without libraries: the right reply to n is n + 1, then STOP.

Tokens are plain numbers; a task's number follows from its index and split alone.
"""

from collections.abc import Sequence
from dataclasses import replace

from primerl.crypto.hashing import derive
from primerl.node.environments.environment import (
    AgentScore,
    Branch,
    Demonstration,
    Environment,
    Episode,
    Policy,
    Score,
    ScoreMismatch,
    Split,
    Task,
)
from primerl.node.environments.policies import Exchange, PlayFailed, RecordedRollout
from primerl.node.environments.stop_strings import StopStrings
from primerl.node.inference.engine import Completion

STOP = 1
ASK = 2
"""Opens every prompt."""
FIRST_NUMBER = 3
NUMBERS = 64


class CountingEnvironment:
    """Single turn, deterministic, no start-up cost."""

    stops: StopStrings | None = None

    def __init__(
        self,
        *,
        max_tokens: int = 4,
        deadline: float = 60.0,
        name: str = "counting",
        stops: tuple[int, ...] = (STOP,),
    ) -> None:
        """Environments of different names have different tasks."""
        self._max_tokens = max_tokens
        self._deadline = deadline
        self._name = name
        self._stops = stops

    @property
    def name(self) -> str:
        """Its id."""
        return self._name

    @property
    def status(self) -> str:
        """Nothing can go wrong."""
        return ""

    @property
    def judge_fault(self) -> str:
        """No judge."""
        return ""

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to stop."""

    async def task(self, index: int, split: Split = "train") -> Task:
        """Task number `index`."""
        return counting_task(index, split, self._name)

    async def prompt(self, task: Task) -> list[int]:
        """ASK and a number: even ones train, odd ones evaluate."""
        self._check(task)
        return question(task)

    async def demonstration(self, task: Task) -> Demonstration | None:
        """The next number and STOP."""
        self._check(task)
        return Demonstration.of_reply(question(task), right_reply(task))

    async def run(self, task: Task, policy: Policy) -> Episode:
        """One turn."""
        exchange = Exchange(
            policy,
            max_tokens=self._max_tokens,
            stop_token_ids=self._stops,
            deadline=self._deadline,
            stops=self.stops,
        )
        try:
            prompt = await self.prompt(task)
            async with exchange.bounded():
                completion = await exchange.sample(prompt)
        except (PlayFailed, ScoreMismatch) as error:
            return Episode(branches=[], score=Score(reward=0.0), error=str(error))
        reply = completion.token_ids
        sequence = Branch.of_turns(
            [*prompt, *reply],
            [False] * len(prompt) + [True] * len(reply),
            [0.0] * len(prompt) + completion.logprobs,
            [completion],
        )
        return Episode(branches=[sequence], score=self._worth(task, reply))

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """Play again with the recorded turn."""
        self._check(task)
        recording = RecordedRollout(branches, stop_token_ids=self._stops)
        episode = await self.run(task, recording)
        if episode.error:
            raise ScoreMismatch(episode.error)
        recording.check(episode.branches)
        return replace(episode.score, turns=recording.turns())

    def _worth(self, task: Task, reply: Sequence[int]) -> Score:
        exact = float(list(reply) == right_reply(task))
        return Score(reward=exact, metrics={"exact": exact})

    def _check(self, task: Task) -> None:
        if task != counting_task(task.index, task.split, self._name):
            raise ScoreMismatch(f"task {task.index} has other content here")


def counting_task(index: int, split: Split = "train", name: str = "counting") -> Task:
    """Task number `index` of the environment of that name."""
    parts = (split.encode(), index.to_bytes(8, "little"))
    return Task(index=index, digest=derive(f"{name} task", *parts), split=split)


def question(task: Task) -> list[int]:
    """The prompt of a task."""
    return [ASK, _number(task)]


def right_reply(task: Task) -> list[int]:
    """The only reply to a task that is rewarded."""
    return [_number(task) + 1, STOP]


def _number(task: Task) -> int:
    drawn = 2 * (task.digest[0] % (NUMBERS // 2))
    return FIRST_NUMBER + drawn + (task.split == "eval")


class EvenEnvironment(CountingEnvironment):
    """The reward is the share of even tokens: something to learn from the first step on."""

    def _worth(self, task: Task, reply: Sequence[int]) -> Score:
        share = even_share(reply)
        return Score(reward=share, metrics={"exact": float(share == 1.0)})


def even_share(reply: Sequence[int]) -> float:
    """The share of even tokens."""
    return sum(token % 2 == 0 for token in reply) / len(reply)


class DuelEnvironment(CountingEnvironment):
    """Two agents answer the same question in turn; the one with more right tokens wins."""

    async def run(self, task: Task, policy: Policy) -> Episode:
        """See Environment."""
        turns = 0

        async def next_turn(prompt: Sequence[int], _: int) -> Completion:
            nonlocal turns
            turns += 1
            return await policy(prompt, turns - 1)

        played = [await super(DuelEnvironment, self).run(task, next_turn) for _ in "ab"]
        if error := played[0].error or played[1].error:
            return Episode([], Score(0.0), error)
        branches = [branch for one in played for branch in one.branches]
        ours, theirs = (len({*one.token_ids[2:]} & {*right_reply(task)}) for one in branches)
        won = float((ours > theirs) - (ours < theirs))
        agents = (AgentScore("first", won, 1), AgentScore("second", -won, 1))
        return Episode(branches, Score(0.0, turns=((0,), (1,)), agents=agents))


async def shown_reply(environment: Environment, task: Task) -> list[int]:
    """The reply of a demonstration of one turn."""
    shown = await environment.demonstration(task)
    assert shown is not None
    ((_, reply),) = shown.turns()
    return reply


if __name__ == "__main__":  # in a process of its own, as HostedEnvironment starts it
    from primerl.node.environments.host import main

    main(lambda set_up: CountingEnvironment(max_tokens=set_up.max_tokens))
