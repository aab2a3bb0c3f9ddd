"""The fields of a request that change logits before a token is drawn; what they mean is in
engines/adjustment.py."""

from collections.abc import Mapping
from typing import Any

from ..engines.adjustment import (
    BIAS,
    MOST_BIASES,
    MOST_TOKENS,
    PENALTY,
    REPETITION_LEAST,
    REPETITION_MOST,
    Adjustment,
)
from .errors import bad
from .fields import Fields


def read_adjustment(
    fields: Fields, *, vocab_size: int, ends: tuple[int, ...], most: int | None
) -> Adjustment | None:
    """None where nothing is asked for. `ends` are all tokens that could end a completion, `most` is
    max_tokens. Raises ApiError."""
    least = fields.integer("min_tokens", 0, 0, MOST_TOKENS - 1)
    if most is not None and least > most:
        raise bad(fields.name("min_tokens"), f"max_tokens is {most}: ask for no more than that")
    found = Adjustment(
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        presence=fields.number("presence_penalty", 0.0, -PENALTY, PENALTY),
        frequency=fields.number("frequency_penalty", 0.0, -PENALTY, PENALTY),
        repetition=fields.number("repetition_penalty", 1.0, REPETITION_LEAST, REPETITION_MOST),
        bias=_bias(fields, vocab_size),
        min_tokens=least,
        ends=ends if least else (),
    )
    if len(found.ends) >= vocab_size:
        raise bad(fields.name("min_tokens"), "no token is left to draw: stop at fewer of them")
    return None if found == Adjustment() else found


def _bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    value, name = fields.take("logit_bias"), fields.name("logit_bias")
    if not isinstance(value, dict | None) or len(value or {}) > MOST_BIASES:
        raise bad(name, f"give an object of at most {MOST_BIASES} tokens")
    given: Mapping[str, Any] = value or {}
    found = {_token(key, vocab_size, name): _number(one, name) for key, one in given.items()}
    if len(found) < len(given):
        raise bad(name, "a token is there twice: give each one number")
    return tuple((token, number) for token, number in found.items() if number)


def _token(key: str, vocab_size: int, name: str) -> int:
    known = key.isascii() and key.isdecimal() and len(key) <= len(str(vocab_size))
    if not known or int(key) >= vocab_size:
        raise bad(name, f"its keys are token ids, 0 to {vocab_size - 1}")
    return int(key)


def _number(value: Any, name: str) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not -BIAS <= value <= BIAS:
        raise bad(name, f"its values are numbers of {-BIAS:g} to {BIAS:g}")
    return float(value)
