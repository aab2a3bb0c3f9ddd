"""Small sums and differences, as an ordinary `verifiers` v1 package.

It imports nothing else of this package, so that `verifiers` can load it by itself. The hash of a question
assigns it to one split permanently: no training question occurs in the evaluation.
"""

# A hook must name the library's bare Trace, which is generic.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false

import hashlib
import itertools
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

HELD_OUT_BELOW = 26
"""Bound of the first byte of a question's hash: about a tenth of all questions is held out."""
MAX_ATTEMPTS = 10_000


class ArithmeticConfig(vf.TasksetConfig):
    """Options of the questions."""

    seed: int = 0
    split: Literal["train", "eval"] = "train"
    max_value: int = Field(99, ge=9, le=10**9)
    """Operands are drawn from 0..max_value."""
    operations: Literal["+", "-", "+-"] = "+-"


class ArithmeticData(vf.TaskData):
    """One question and its result in decimal."""

    answer: str


class ArithmeticTask(vf.Task[ArithmeticData]):
    """Task of one turn: the reply must be the number and nothing else."""

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        """End the conversation after one reply."""
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        """Return 1.0 for the right number in a reply that ended by itself, else 0.0."""
        return float(trace.last_reply == self.data.answer and not trace.is_truncated)

    @vf.metric
    async def numeric(self, trace: vf.Trace) -> float:
        """Return 1.0 if the reply is a whole number in plain digits at all."""
        digits = trace.last_reply.removeprefix("-")
        return float(digits.isascii() and digits.isdigit())


class ArithmeticTaskset(vf.Taskset[ArithmeticTask, ArithmeticConfig]):
    """Endless taskset; task number i is made directly, without iterating from 0."""

    INFINITE = True

    def load(self) -> Iterator[ArithmeticTask]:
        """Yield all tasks in order."""
        return map(self.task_at, itertools.count())

    def task_at(self, index: int) -> ArithmeticTask:
        """Return task number `index` (from 0), a function of seed, split, options and index alone."""
        for attempt in range(MAX_ATTEMPTS):
            question, answer = self._draw(index, attempt)
            if self._in_split(question):
                values = {"idx": index, "prompt": question, "answer": answer}
                data = ArithmeticData.model_validate(values)
                return ArithmeticTask(data, self.config.task)
        raise ValueError(f"no question of split {self.config.split!r} found: raise max_value")

    def _in_split(self, question: str) -> bool:
        held_out = hashlib.blake2b(question.encode()).digest()[0] < HELD_OUT_BELOW
        return held_out == (self.config.split == "eval")

    def _draw(self, index: int, attempt: int) -> tuple[str, str]:
        """Draw (question, answer) from one hash, read as a number in mixed base.

        The result is the same on every machine and Python.
        """
        config = self.config
        name = f"arithmetic/{config.seed}/{config.split}/{index}/{attempt}".encode()
        number = int.from_bytes(hashlib.shake_128(name).digest(24), "big")
        number, left = divmod(number, config.max_value + 1)
        number, right = divmod(number, config.max_value + 1)
        operation = config.operations[number % len(config.operations)]
        result = left + right if operation == "+" else left - right
        return f"{left}{operation}{right}", str(result)


__all__ = ["ArithmeticTaskset"]
