"""What a node is composed of by default."""

import logging
from typing import Any

import pytest

from primerl.node.app import factories
from primerl.node.config.run import RunConfig


def config(**verification: Any) -> RunConfig:
    return RunConfig.model_validate({"engine": {"type": "vllm"}, "verification": verification})


@pytest.mark.parametrize(
    ("installed", "verification", "expected"),
    [
        (True, {}, "vllm"),
        (False, {}, "hf"),  # a trainer without vLLM whose workers have it
        (False, {"auditor": "vllm"}, "vllm"),  # start() says that it is missing
        (False, {"numerics": "exact"}, "vllm"),
        (True, {"auditor": "hf"}, "hf"),
    ],
)
def test_the_engine_of_the_workers_audits_where_it_is_installed(
    installed: bool,
    verification: dict[str, Any],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(factories, "vllm_is_installed", lambda: installed)
    with caplog.at_level(logging.WARNING):
        assert factories.auditing(config(**verification)).type == expected
    assert ("not installed" in caplog.text) == (not installed and expected == "hf")
