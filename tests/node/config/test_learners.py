"""The section [learners]: what would not work is refused in words, and staleness counts inner steps."""

from typing import Any

import pytest
from pydantic import ValidationError

from primerl.node.config.run import RunConfig

NODES = ["a" * 64, "b" * 64]


def config(**sections: Any) -> RunConfig:
    """Make a run with two learners."""
    learners = {"nodes": NODES, "inner_steps": 4, **sections.pop("learners", {})}
    return RunConfig.model_validate(
        {"learners": learners, "checkpoint": {"interval": 1}, **sections}
    )


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"learners": {"nodes": [NODES[0], NODES[0]]}}, "names a node twice"),
        ({"learners": {"nodes": ["me"]}}, "String should match pattern"),
        ({"learners": {"quorum": 4}}, "above the number of learners"),
        ({"learners": {"inner_steps": 8}}, "at least that"),
        ({"checkpoint": {"interval": 2}}, "set checkpoint.interval to 1"),
        ({"rollouts": {"max_off_policy_steps": 2}}, "at least 3"),
        (
            {"training": {"loss": {"type": "custom", "custom": "a.b:c"}}},
            "not for runs with learners",
        ),
    ],
)
def test_what_cannot_work_with_learners_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(**sections)


@pytest.mark.parametrize(("steps", "versions"), [(3, 0), (6, 0), (7, 1), (8, 1), (15, 3)])
def test_staleness_counts_inner_steps(steps: int, versions: int) -> None:
    bound = config(rollouts={"max_off_policy_steps": steps}).in_versions()
    assert bound.rollouts.max_off_policy_steps == versions


def test_a_run_without_learners_counts_versions_as_ever() -> None:
    alone = RunConfig.model_validate({"rollouts": {"max_off_policy_steps": 5}})
    assert alone.in_versions() is alone
