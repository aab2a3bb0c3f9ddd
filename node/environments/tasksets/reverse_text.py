"""Reverse a short random string: the demo's taskset, an ordinary `verifiers` v1 package.

It imports nothing else of this package, so that `verifiers` can load it by itself. The hash of a string assigns
it to one split permanently: no training string occurs in the evaluation.
"""

# A hook must name the library's bare Trace, which is generic.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field, model_validator

LETTERS = "abcdefghijklmnopqrstuvwxyz"
HELD_OUT_BELOW = 26
"""Bound of the first byte of a string's hash: about a tenth of all strings is held out."""


class ReverseTextConfig(vf.TasksetConfig):
    """Options of the strings."""

    seed: int = 0
    split: Literal["train", "eval"] = "train"
    min_len: int = Field(4, ge=1)
    max_len: int = Field(8, le=1024)

    @model_validator(mode="after")
    def _check_lengths(self) -> "ReverseTextConfig":
        if self.min_len > self.max_len:
            raise ValueError("min_len must not exceed max_len")
        return self


class ReverseTextData(vf.TaskData):
    """One string and its reverse."""

    answer: str


class ReverseTextTask(vf.Task[ReverseTextData]):
    """Task of one turn: the reply must be the reversed string and nothing else."""

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        """End the conversation after one reply."""
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        """Return 1.0 for the reversed string in a reply that ended by itself, else 0.0."""
        return float(trace.last_reply == self.data.answer and not trace.is_truncated)

    @vf.metric
    async def lcs(self, trace: vf.Trace) -> float:
        """Return the longest common subsequence of reply and answer over the longer of both, 0.0..1.0."""
        reply, answer = trace.last_reply, self.data.answer
        return common_subsequence(reply, answer) / max(len(reply), len(answer))


def common_subsequence(left: str, right: str) -> int:
    """Return the length of the longest common subsequence.

    Takes O(len(left) * len(right)) time and one row of memory.
    """
    row = [0] * (len(right) + 1)
    for char in left:
        diagonal = 0
        for column, other in enumerate(right, start=1):
            above = row[column]
            row[column] = diagonal + 1 if char == other else max(above, row[column - 1])
            diagonal = above
    return row[-1]


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    """Endless taskset; task number i is made directly, without iterating from 0."""

    INFINITE = True

    def load(self) -> Iterator[ReverseTextTask]:
        """Yield all tasks in order."""
        return map(self.task_at, itertools.count())

    def task_at(self, index: int) -> ReverseTextTask:
        """Return task number `index` (from 0), a function of seed, split, lengths and index alone."""
        text = next(filter(self._in_split, map(self._draw(index), itertools.count())))
        data = ReverseTextData.model_validate({"idx": index, "prompt": text, "answer": text[::-1]})
        return ReverseTextTask(data, self.config.task)

    def _in_split(self, text: str) -> bool:
        held_out = hashlib.blake2b(text.encode()).digest()[0] < HELD_OUT_BELOW
        return held_out == (self.config.split == "eval")

    def _draw(self, index: int) -> Callable[[int], str]:
        """Return a function from attempt number to string.

        Each string is made of one hash, read as a number in mixed base: the same everywhere, unlike `random`,
        whose algorithms may change with Python.
        """
        config = self.config
        span = config.max_len - config.min_len + 1

        def draw(attempt: int) -> str:
            name = f"reverse-text/{config.seed}/{config.split}/{index}/{attempt}".encode()
            number = int.from_bytes(hashlib.shake_128(name).digest(16 + config.max_len), "big")
            number, extra = divmod(number, span)
            letters: list[str] = []
            for _ in range(config.min_len + extra):
                number, letter = divmod(number, len(LETTERS))
                letters.append(LETTERS[letter])
            return "".join(letters)

        return draw


__all__ = ["ReverseTextTaskset"]
