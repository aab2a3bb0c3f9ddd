import json
import math

import pytest

from primerl.node.ops.strict_json import to_json


def refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is no JSON")


def test_what_is_no_number_is_written_as_null_wherever_it_is_nested() -> None:
    value = {"a": [1, math.nan, (math.inf, {"b": -math.inf})], "c": 0.5, "d": "NaN", "e": True}
    for indent in (None, 2):
        read = json.loads(to_json(value, indent=indent), parse_constant=refuse)
        assert read == {"a": [1, None, [None, {"b": None}]], "c": 0.5, "d": "NaN", "e": True}


def test_what_is_no_json_is_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError):
        to_json({"a": object()})
