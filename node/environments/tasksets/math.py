"""Short algebra problems with answers compared by value: 0.5, 1/2 and \\frac{1}{2} are equal.

`math-verify` parses and compares; an ordinary `verifiers` v1 package otherwise, which needs draws.py. The hash
of a question assigns it to one split permanently. No reward depends on a clock: answers that could take long to
compute are recognised by patterns and count as wrong.
"""

# A hook must name the library's bare Trace, which is generic.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.utils.score import extract_boxed_answer

from .draws import Draws, is_held_out

INSTRUCTION = "\nPut your final answer within \\boxed{}."
MAX_ATTEMPTS = 1000
MAX_ANSWER = 256
"""Longest answer that is compared, characters."""
TOO_HARD = re.compile(
    r"\^\s*\{?[^{}]*\^"  # a power of a power
    r"|\^\s*\{?\s*-?\d{5}"  # or a large power
    r"|[)}\]]\s*\^\s*\{?\s*-?\d{2}"  # also of a sum, which has many terms
    r"|\d{64}|!|\\(?:binom|int|sum|prod|lim)\b|factorial",
)
"""Pattern of answers whose value may take too long to compute."""
OPERATOR = re.compile(r"[^\s{(\[,=]\s*[-+*]|\\(?:cdot|times|div|pm)\b")
"""Pattern of sums and products; a sign or a fraction does not match."""

Family = Literal["linear", "fraction", "quadratic", "product", "system"]
FAMILIES: tuple[Family, ...] = ("linear", "fraction", "quadratic", "product", "system")


class MathConfig(vf.TasksetConfig):
    """Options of the problems."""

    seed: int = 0
    split: Literal["train", "eval"] = "train"
    families: tuple[Family, ...] = Field(default=FAMILIES, min_length=1)
    max_value: int = Field(default=12, ge=3, le=10**6)
    """Numbers of a problem are drawn from 1..max_value."""


class MathData(vf.TaskData):
    """One problem and its answer, in a box."""

    answer: str


class MathTask(vf.Task[MathData]):
    """Task of one turn: the last \\boxed{} after any thoughts must equal the answer in value."""

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        """One reply is all there is."""
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1.0 for a boxed answer of the same value, else 0.0."""
        return float(is_right(trace.last_reply, self.data.answer))

    @vf.metric
    async def boxed(self, trace: vf.Trace) -> float:
        """1.0 if there is a boxed answer at all."""
        return float(bool(boxed_answer(trace.last_reply)))


def is_right(reply: str, answer: str) -> bool:
    """Return whether the boxed answer of a reply equals another in value; False without a box."""
    given, right = boxed_answer(reply), boxed_answer(answer)
    return bool(given and right) and is_equal(right, given)


def boxed_answer(reply: str) -> str:
    """Return the content of a reply's last box, outside its thoughts; empty without one."""
    if "<think>" in reply and "</think>" not in reply:
        return ""
    return extract_boxed_answer(reply.rsplit("</think>", 1)[-1], strict=True).strip()


@lru_cache(maxsize=4096)
def is_equal(answer: str, given: str) -> bool:
    """Return whether two LaTeX expressions are equal in value, by math-verify."""
    if answer == given:
        return True
    if len(given) > MAX_ANSWER or TOO_HARD.search(given):
        return False
    if OPERATOR.search(given) and not OPERATOR.search(answer):
        return False  # the expression is not computed
    from math_verify import parse, verify  # loads sympy

    # silences its warning that callers who disable its timeout have to set another one
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # 0: no timeout, as with one the result would depend on the machine's speed
    gold, found = (parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in (answer, given))
    return bool(gold and found and verify(gold, found, timeout_seconds=0))


class MathTaskset(vf.Taskset[MathTask, MathConfig]):
    """Endless taskset; task number i is made directly, without iterating from 0."""

    INFINITE = True

    def load(self) -> Iterator[MathTask]:
        """Yield all tasks in order."""
        return map(self.task_at, itertools.count())

    def task_at(self, index: int) -> MathTask:
        """Return task number `index` (from 0), a function of seed, split, options and index alone."""
        config = self.config
        for attempt in range(MAX_ATTEMPTS):
            draws = Draws("math", config.seed, config.split, index, attempt)
            question, answer = _PROBLEMS[draws.choice(config.families)](draws, config.max_value)
            if is_held_out(question) == (config.split == "eval"):
                values = {"idx": index, "prompt": question + INSTRUCTION}
                values["answer"] = f"\\boxed{{{answer}}}"
                return MathTask(MathData.model_validate(values), config.task)
        raise ValueError(f"no problem of split {config.split!r} found: raise max_value")


# -- problems --------------------------------------------------------------------------------------


def _linear(draws: Draws, most: int) -> tuple[str, str]:
    slope, offset, result = draws.between(2, most), draws.between(1, most), draws.between(1, most)
    solution = Fraction(result - offset, slope)
    return f"Solve for x: {slope}x + {offset} = {result}", _latex(solution)


def _fraction(draws: Draws, most: int) -> tuple[str, str]:
    left, right = (Fraction(draws.between(1, most), draws.between(2, most)) for _ in range(2))
    sign = draws.choice("+-")
    total = left + right if sign == "+" else left - right
    return f"Compute {_latex(left)} {sign} {_latex(right)} as a fraction.", _latex(total)


def _quadratic(draws: Draws, most: int) -> tuple[str, str]:
    one, other = draws.between(-most, most), draws.between(-most, most)
    larger, smaller = max(one, other), min(one, other)
    equation = f"x^2 {_signed(-one - other, 'x')} {_signed(one * other)} = 0"
    which, answer = draws.choice((("larger", larger), ("smaller", smaller)))
    return f"What is the {which} solution of {equation} ?", str(answer)


def _product(draws: Draws, most: int) -> tuple[str, str]:
    one, other, factor = (draws.between(1, most) for _ in range(3))
    question = f"What is the coefficient of x in (x + {one})({factor}x - {other})?"
    return question, str(factor * one - other)


def _system(draws: Draws, most: int) -> tuple[str, str]:
    x, y = draws.between(1, most), draws.between(1, most)
    factor = draws.between(2, 5)
    question = f"If x + y = {x + y} and {factor}x - y = {factor * x - y}, what is (x, y)?"
    return question, f"({x}, {y})"


_PROBLEMS: dict[Family, Callable[[Draws, int], tuple[str, str]]] = {
    "linear": _linear,
    "fraction": _fraction,
    "quadratic": _quadratic,
    "product": _product,
    "system": _system,
}


def _latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _signed(number: int, unit: str = "") -> str:
    return f"{'-' if number < 0 else '+'} {abs(number)}{unit}"


__all__ = ["MathTaskset"]
