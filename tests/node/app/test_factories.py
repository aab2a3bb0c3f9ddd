"""What a node is composed of by default."""

from typing import Any

import pytest

from primerl.node.app.factories import auditing
from primerl.node.config.run import RunConfig


@pytest.mark.parametrize(
    ("verification", "expected"),
    [
        ({}, "hf"),
        ({"auditor": "vllm"}, "vllm"),
        ({"auditor": "hf"}, "hf"),
        ({"numerics": "exact"}, "vllm"),  # nothing else has the bits of its workers
    ],
)
def test_the_engine_that_audits_is_chosen_by_the_numerics_unless_it_is_named(
    verification: dict[str, Any], expected: str
) -> None:
    told = {"engine": {"type": "vllm"}, "verification": verification}
    assert auditing(RunConfig.model_validate(told)).type == expected
