"""What a request says to the model's chat template: `chat_template_kwargs`, and OpenAI's reasoning_effort.

Only what the template itself asks for may be said; it has no way to anything else (environments/chat.py).
"""

from collections.abc import Collection
from typing import Any

from .errors import ApiError, bad
from .fields import Fields

KWARGS, EFFORT = "chat_template_kwargs", "reasoning_effort"
MAX_OPTIONS = 32
LONGEST = 4096
"""Characters of a value that is text."""


def read_options(fields: Fields, known: Collection[str]) -> dict[str, Any]:
    """Take both fields; `known` are the names that the template asks for. Raises ApiError."""
    given = fields.take(KWARGS)
    if given is not None and (not isinstance(given, dict) or len(given) > MAX_OPTIONS):
        raise bad(KWARGS, f"give an object of at most {MAX_OPTIONS} values")
    options = {name: value for name, value in (given or {}).items() if value is not None}
    for name, value in options.items():
        if name not in known:
            raise _unknown(KWARGS, name, known)
        _check(f"{KWARGS}.{name}", value)
    effort = fields.text(EFFORT, LONGEST)
    if effort is not None:
        if EFFORT not in known:
            raise _unknown(EFFORT, EFFORT, known)
        options.setdefault(EFFORT, effort)
    return options


def _check(param: str, value: Any) -> None:
    if not isinstance(value, bool | int | float | str):
        raise bad(param, "give true, false, a number or a text")
    if isinstance(value, str) and len(value) > LONGEST:
        raise bad(param, f"give at most {LONGEST} characters")


def _unknown(param: str, name: str, known: Collection[str]) -> ApiError:
    has = ", ".join(sorted(known)) or "none"
    return bad(
        param,
        f"not supported (this model's chat template asks for no {name[:100]}; it asks for: {has})",
        code="unsupported_parameter",
    )
