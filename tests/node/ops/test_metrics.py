"""The metrics of a run that went on from a checkpoint: every step once, wherever it was interrupted."""

import json
from pathlib import Path
from typing import Any

import pytest

from primerl.node.ops.metrics import MetricsLog

LINE = {"time": 5.0, "loss/mean": 0.5}
"""Of step 2, as its checkpoint has it."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path: Path) -> list[int]:
    return [line["step"] for line in lines(path)]


def written(path: Path, *numbers: int) -> MetricsLog:
    metrics = MetricsLog(path)
    for number in numbers:
        metrics.write(number, {"loss/mean": 1.0 / number, "time/save_ckpt": 0.1})
    return metrics


def test_what_came_after_the_checkpoint_is_dropped_and_made_again(path: Path) -> None:
    metrics = written(path, 1, 2, 3, 4)
    metrics.go_back(2, LINE)
    metrics.write(3, {"loss/mean": 0.3})
    metrics.close()
    assert steps(path) == [1, 2, 3]
    assert lines(path)[1]["time/save_ckpt"] == 0.1, "the line that was written stays as it was"
    assert lines(path)[2]["loss/mean"] == 0.3


def test_a_line_that_was_not_written_before_the_end_comes_from_the_checkpoint(path: Path) -> None:
    written(path, 1).close()
    again = MetricsLog(path)
    again.go_back(2, LINE)
    again.write(3, {"loss/mean": 0.3})
    again.close()
    assert steps(path) == [1, 2, 3]
    assert lines(path)[1] == {"step": 2, **LINE}


def test_a_torn_line_is_none(path: Path) -> None:
    written(path, 1).close()
    with path.open("a") as file:
        file.write('{"step": 2, "loss/me')
    again = MetricsLog(path)
    again.go_back(2, LINE)
    again.close()
    assert steps(path) == [1, 2]


def test_an_evaluation_of_the_step_is_not_its_line(path: Path) -> None:
    metrics = written(path, 1)
    metrics.write(2, {"eval/reverse-text/avg@1": 0.5})
    metrics.go_back(2, LINE)
    metrics.close()
    assert [(line["step"], "loss/mean" in line) for line in lines(path)] == [
        (1, True),
        (2, False),
        (2, True),
    ]


def test_a_checkpoint_without_a_line_adds_none(path: Path) -> None:
    metrics = written(path)
    metrics.go_back(0, {})
    metrics.close()
    assert lines(path) == []
