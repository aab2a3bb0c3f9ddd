"""Writes a config as TOML that reads back as the same config.

Only what JSON can hold is written; None, which TOML lacks, becomes the word that the config reader takes
for it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

NONE = "None"
"""prime-pydantic-config reads this string as null."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(values: Mapping[str, Any]) -> str:
    """`values` as TOML. Raises TypeError for what TOML cannot hold."""
    lines: list[str] = []
    _table(lines, (), values)
    return "\n".join(lines).strip() + "\n"


def _table(lines: list[str], path: tuple[str, ...], values: Mapping[str, Any]) -> None:
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    nested = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    if path and (plain or not nested):
        lines.extend(["", f"[{'.'.join(map(_key, path))}]"])
    lines.extend(f"{_key(key)} = {_value(value)}" for key, value in plain.items())
    for key, value in nested.items():
        _table(lines, (*path, key), value)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    # JSON's escapes are a subset of TOML's, but for DEL, which TOML wants escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if value is None:
        return _string(NONE)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, Mapping):  # a table inside a list
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    raise TypeError(f"TOML cannot hold a {type(value).__name__}")
