"""Writes a config as TOML that reads back as the same config.

Only what JSON can hold is written. TOML has no null: a key that is None becomes a comment, for a key of a
config that may be None is None where it is not set.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

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
    for key, value in plain.items():
        unset = value is None
        lines.append(f"# {_key(key)} is not set" if unset else f"{_key(key)} = {_value(value)}")
    for key, value in nested.items():
        _table(lines, (*path, key), value)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    # JSON's escapes are a subset of TOML's, but for DEL, which TOML wants escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
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
        items = [f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None]
        return "{ " + ", ".join(items) + " }"
    raise TypeError(f"TOML cannot hold a {type(value).__name__}")
