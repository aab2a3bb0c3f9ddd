"""JSON that every reader takes: NaN and infinities, which JSON does not have, are null."""

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Write `value` (dicts, lists, tuples, strings, numbers, booleans, None) as JSON.

    Mappings and tuples may be nested. Raises TypeError for anything else in it.
    """
    return json.dumps(_strict(value), indent=indent, allow_nan=False)


def _strict(value: Any) -> Any:
    """Copy `value` with None in place of every float that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value
