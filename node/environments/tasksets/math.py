"""Short algebra problems with answers compared by value: 0.5, 1/2 and \\frac{1}{2} are equal.

`math-verify` parses and compares, floats to five digits; what it drops without a word, units and percent signs,
is compared here: one may be left out, but not be another. An ordinary `verifiers` v1 package otherwise, which
needs draws.py. The hash of a question assigns it to one split permanently. No reward depends on a clock:
answers that could take long to compute are recognised by patterns and count as wrong.
"""

# A hook must name the library's bare Trace, which is generic.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false

import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

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
OPERATOR = re.compile(r"[^\s{(\[,=]\s*[-+*]|\\(?:cdot|times|div|pm)(?![A-Za-z])")
"""Pattern of sums and products; a sign or a fraction does not match."""
SCIENTIFIC = re.compile(r"\\(?:cdot|times)\s*10\s*\^")
"""Pattern of the one product that is a number: 1.6 \\times 10^{-19}."""
DIGITS = 5
"""Significant digits to which floats are compared; at least DECIMALS decimals are."""
DECIMALS, MOST_DECIMALS = 6, 400
NOISE = 1e-12
"""Relative difference of floats that are the same number."""
UNITS: dict[str, str] = {
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres",
    "inch": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "mg": "mg milligram milligrams",
    "g": "g gram grams",
    "kg": "kg kilogram kilograms",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "ml": "ml mL milliliter milliliters millilitre millilitres",
    "l": "l L liter liters litre litres",
    "ms": "ms millisecond milliseconds",
    "s": "s sec second seconds",
    "min": "min minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "yr year years",
    "cent": "cent cents",
    "dollar": "dollar dollars",
    "degree": "degree degrees",
    "rad": "rad radian radians",
    "percent": "percent",
    "N": "N newton newtons",
    "J": "J joule joules",
    "kJ": "kJ",
    "W": "W watt watts",
    "kW": "kW",
    "V": "V volt volts",
    "mph": "mph",
}
"""Unit -> its names. Words that are none of these are left out of the comparison, as math-verify does."""
_UNIT_OF = {name: unit for unit, names in UNITS.items() for name in names.split()}
_NAMES = "|".join(sorted(_UNIT_OF, key=len, reverse=True))
_FACTOR = rf"(?:(?:square|cubic)\s+)?(?:{_NAMES})(?![A-Za-z])(?:\s*\^\s*\{{?-?\d\}}?)?"
_UNIT = re.compile(
    rf"(?<![A-Za-z\\])(?:{_FACTOR})(?:\s*(?:/|\bper\b|\\cdot|\*|\s)\s*(?:{_FACTOR}))*\s*\.?\s*$"
)
_FACTORS = re.compile(
    rf"(/|\bper\b)?\s*(?:(square|cubic)\s+)?({_NAMES})(?![A-Za-z])(?:\s*\^\s*\{{?(-?\d)\}}?)?"
)
_TEXT = re.compile(r"\\(?:text|textrm|textbf|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_SPACE = re.compile(r"\\[,;:! ]|~|\\quad\b")
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b|\N{DEGREE SIGN}")
_PERCENT = re.compile(r"\\?%")
_COMMAND, _LETTER = re.compile(r"\\[A-Za-z]+"), re.compile(r"[A-Za-z]")

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
        """End the conversation after one reply."""
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1.0 for a boxed answer of the same value, else 0.0."""
        return float(is_right(trace.last_reply, self.data.answer))

    @vf.metric
    async def boxed(self, trace: vf.Trace) -> float:
        """Return 1.0 if there is a boxed answer at all."""
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
    if OPERATOR.search(SCIENTIFIC.sub("", given, count=1)) and not OPERATOR.search(answer):
        return False  # the expression is not computed
    units = [read_unit(text) for text in (answer, given)]
    if all(units) and units[0] != units[1]:
        return False
    from math_verify import parse, verify  # loads sympy

    # silences its warning that callers who disable its timeout have to set another one
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # 0: no timeout, as with one the result would depend on the machine's speed
    # a percent sign is a unit: the library reads 50 % as 50 and as 0.5, whichever fits
    texts = (_PERCENT.sub("", text) for text in (answer, given))
    gold, reply = (parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in texts)
    if not gold or not reply:
        return False
    decimals = max(DECIMALS, *map(_decimals, gold))
    # the library calls numbers equal whose difference vanishes at this precision
    precision = max(15, decimals + DIGITS)
    if verify(gold, reply, decimals, precision, timeout_seconds=0):
        return True
    return _is_same_float(gold[0], reply[0])


def read_unit(text: str) -> frozenset[tuple[str, int]]:
    """Return the unit at the end of an answer, as (unit, power); empty if it has none that is known."""
    text = _DEGREE.sub(" degree", _PERCENT.sub(" percent", _SPACE.sub(" ", text)))
    if text.lstrip().startswith(("\\$", "$")):
        text += " dollars"
    text = _TEXT.sub(r" \1 ", text).rsplit("=", 1)[-1]
    unit = _UNIT.search(text)
    if unit and _LETTER.search(_COMMAND.sub(" ", text[: unit.start()])):
        return frozenset()  # a variable, as in 2m + 3g
    powers: Counter[str] = Counter()
    for over, shape, name, power in _FACTORS.findall(unit[0]) if unit else ():
        exponent = int(power or {"square": 2, "cubic": 3}.get(shape, 1)) * (-1 if over else 1)
        for part, times in (("mi", 1), ("h", -1)) if name == "mph" else ((_UNIT_OF[name], 1),):
            powers[part] += times * exponent
    return frozenset(powers.items())


def _decimals(value: Any) -> int:
    """Return the decimals to which the numbers in a parsed answer have DIGITS digits."""
    if getattr(value, "is_number", False):
        from sympy import floor, log

        size = abs(value.doit().evalf())
        if not (size.is_finite and size > 0):
            return 0
        return min(DIGITS - int(floor(log(size, 10).evalf())), MOST_DECIMALS)
    return max(map(_decimals, getattr(value, "args", ())), default=0)


def _is_same_float(gold: Any, reply: Any) -> bool:
    """Return whether two numbers, one of them a float, differ by rounding alone: 1.6e-19 and 1.60e-19."""
    if not (getattr(gold, "is_number", False) and getattr(reply, "is_number", False)):
        return False
    from sympy import Float

    if not (gold.has(Float) or reply.has(Float)):
        return False
    exact, other = gold.doit().evalf(), reply.doit().evalf()
    difference, size = abs(exact - other), abs(exact)
    return bool(difference.is_finite and size.is_finite and difference <= NOISE * size)


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
    root, other = draws.between(-most, most), draws.between(-most, most)
    larger, smaller = max(root, other), min(root, other)
    equation = f"x^2 {_signed(-root - other, 'x')} {_signed(root * other)} = 0"
    which, answer = draws.choice((("larger", larger), ("smaller", smaller)))
    return f"What is the {which} solution of {equation} ?", str(answer)


def _product(draws: Draws, most: int) -> tuple[str, str]:
    first, other, factor = (draws.between(1, most) for _ in range(3))
    question = f"What is the coefficient of x in (x + {first})({factor}x - {other})?"
    return question, str(factor * first - other)


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
