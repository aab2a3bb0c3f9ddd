"""Compute with a calculator: the model calls a tool, reads the result, answers the number.

An ordinary `verifiers` v1 package with a toolset; it needs draws.py. The hash of a question assigns it to one
split permanently.
"""

# A hook must name the library's bare types, which are generic, and states are known at run time only.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeArguments=false

import ast
import itertools
import json
import operator
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import verifiers.v1 as vf
from pydantic import Field

from .draws import Draws, is_held_out

MAX_ATTEMPTS = 10_000
MAX_CHARACTERS = 200
MAX_BITS = 256
"""Largest number that a calculation begins with or results in, bits."""
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorConfig(vf.TasksetConfig):
    """Options of the questions."""

    seed: int = 0
    split: Literal["train", "eval"] = "train"
    max_value: int = Field(999, ge=9, le=10**9)
    """Numbers are drawn from 0..max_value."""
    operations: Literal["+", "-", "*", "+-", "+*", "+-*"] = "+-*"
    steps: Annotated[int, Field(ge=1, le=8)] = 2
    """Number of operations in a question."""


class CalculatorData(vf.TaskData):
    """One question and its result in decimal."""

    answer: str
    replies: tuple[str, ...]
    """A call and the answer, for SFT warm-up only."""


class CalculatorState(vf.State):
    """Results of the calculator so far."""

    results: tuple[str, ...] = ()


class CalculatorToolset(vf.Toolset[vf.SharedToolsetConfig, CalculatorState]):
    """The calculator."""

    TOOL_PREFIX = None

    @vf.tool
    async def calculate(self, expression: str) -> str:
        """Compute an expression of whole numbers with +, -, *, //, % and parentheses."""
        result = evaluate(expression)
        self.state.results += (result,)
        return result


class CalculatorTask(vf.Task[CalculatorData, CalculatorState]):
    """Task of one question: any number of calls, then the number and nothing else."""

    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        """Return 1.0 for the right number in a last reply that ended by itself, else 0.0."""
        return float(trace.last_reply == self.data.answer and not trace.is_truncated)

    @vf.reward(weight=0.2)
    async def computed(self, trace: vf.Trace) -> float:
        """Return 1.0 if the calculator ever showed the right number."""
        return float(self.data.answer in trace.state.results)


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    """Endless taskset; task number i is made directly, without iterating from 0."""

    INFINITE = True

    @classmethod
    def toolsets(cls, config: CalculatorConfig) -> list[vf.Toolset[Any, Any]]:
        """Return one calculator for all rollouts; its results are in the state of each."""
        return [CalculatorToolset(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[CalculatorTask]:
        """Yield all tasks in order."""
        return map(self.task_at, itertools.count())

    def task_at(self, index: int) -> CalculatorTask:
        """Return task number `index` (from 0), a function of seed, split, options and index alone."""
        config = self.config
        draws = Draws("calculator", config.seed, config.split, index)
        for _ in range(MAX_ATTEMPTS):
            question = str(draws.between(0, config.max_value))
            for _ in range(config.steps):
                question += draws.choice(config.operations) + str(
                    draws.between(0, config.max_value)
                )
            if is_held_out(question) == (config.split == "eval"):
                return self._task(index, question)
        raise ValueError(f"no question of split {config.split!r} found: raise max_value")

    def _task(self, index: int, question: str) -> CalculatorTask:
        answer = evaluate(question)
        call = {"name": "calculate", "arguments": {"expression": question}}
        values = {
            "idx": index,
            "prompt": question,
            "answer": answer,
            "replies": (f"<tool_call>{json.dumps(call)}</tool_call>", answer),
        }
        return CalculatorTask(CalculatorData.model_validate(values), self.config.task)


def evaluate(expression: str) -> str:
    """Evaluate an expression of whole numbers; return the value in decimal.

    Raises ValueError for other text; the model reads its message.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"more than {MAX_CHARACTERS} characters")
    try:
        parsed = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("this is no expression") from None  # Python's own text differs by release
    return str(_value(parsed.body))


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            number = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = -_value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            first, other = _value(left), _value(right)
            if not other and isinstance(sign, ast.FloorDiv | ast.Mod):
                raise ValueError("division by zero")
            number = _OPERATORS[type(sign)](first, other)
        case _:
            raise ValueError("only whole numbers, +, -, *, //, % and parentheses are known")
    if number.bit_length() > MAX_BITS:
        raise ValueError("the number is too large")
    return number


__all__ = ["CalculatorTaskset"]

if __name__ == "__main__":  # how the library itself serves a toolset
    CalculatorToolset.run()
