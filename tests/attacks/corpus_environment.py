"""An environment over endless synthetic text: go on with it. Rewards have many values, so picking pays.

Tokens go in and out as they are, without tokenizer or library: what is tested is how they were drawn.
"""

from collections.abc import Sequence
from dataclasses import replace

from primerl.crypto.hashing import derive
from primerl.node.environments.environment import (
    Branch,
    Episode,
    Policy,
    Score,
    ScoreMismatch,
    Split,
    Task,
)
from primerl.node.environments.policies import Exchange, PlayFailed, RecordedRollout
from primerl.scripts.bench.trained_model import Corpus

SHORTEST, LONGEST = 16, 48
"""Tokens of a prompt."""


class CorpusEnvironment:
    """Single turn, deterministic, no start-up cost."""

    def __init__(self, corpus: Corpus, *, max_tokens: int, stops: tuple[int, ...]) -> None:
        self._corpus = corpus
        self._max_tokens = max_tokens
        self._stops = stops

    @property
    def name(self) -> str:
        """Its id."""
        return "corpus"

    @property
    def status(self) -> str:
        """Nothing can go wrong."""
        return ""

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to stop."""

    async def task(self, index: int, split: Split = "train") -> Task:
        """Task number `index`."""
        parts = (split.encode(), index.to_bytes(8, "little"))
        return Task(index=index, digest=derive("corpus task", *parts), split=split)

    async def prompt(self, task: Task) -> list[int]:
        """The beginning of a text."""
        if task != await self.task(task.index, task.split):
            raise ScoreMismatch(f"task {task.index} has other content here")
        tokens = SHORTEST + task.digest[0] % (LONGEST - SHORTEST)
        text = self._corpus.text([1, *task.digest[:8]], tokens)
        return [token for token in text if token not in self._stops]

    async def demonstration(self, task: Task) -> list[int] | None:
        """Nothing is right here."""
        return None

    async def run(self, task: Task, policy: Policy) -> Episode:
        """One turn."""
        exchange = Exchange(
            policy, max_tokens=self._max_tokens, stop_token_ids=self._stops, deadline=60.0
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
        return Episode(branches=[sequence], score=Score(reward=worth(reply)))

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """Play again with the recorded turn."""
        recording = RecordedRollout(branches, stop_token_ids=self._stops)
        episode = await self.run(task, recording)
        if episode.error:
            raise ScoreMismatch(episode.error)
        recording.check(episode.branches)
        return replace(episode.score, turns=recording.turns())


def worth(reply: Sequence[int]) -> float:
    """The reward: the share of even tokens."""
    return sum(token % 2 == 0 for token in reply) / len(reply)
