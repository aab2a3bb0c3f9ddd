"""What a node is composed of by default."""

from typing import Any

import pytest

from primerl.node.app.factories import auditing
from primerl.node.config.run import RunConfig
from primerl.node.inference import vllm_arguments


@pytest.mark.parametrize("installed", [True, False])
def test_in_bfloat16_the_workers_engine_audits_where_it_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_arguments, "is_installed", lambda: installed)
    config = RunConfig.model_validate({"engine": {"type": "vllm", "dtype": "bfloat16"}})
    assert auditing(config).type == ("vllm" if installed else "hf")
    embedded = RunConfig.model_validate({"engine": {"type": "hf", "dtype": "bfloat16"}})
    assert auditing(embedded).type == "hf"


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
